#include "client/cli/plot.h"

#include <png.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace logitd::cli {
namespace {

struct Color {
  uint8_t red, green, blue;
};
constexpr Color kInk = {40, 44, 52};
constexpr Color kGrid = {225, 228, 232};
constexpr Color kDots = {190, 205, 230};
constexpr Color kLine = {30, 90, 180};
constexpr Color kMean = {200, 80, 40};

// 5 x 7 dots, a byte a row, the highest of 5 bits to the left.
struct Glyph {
  char character;
  std::array<uint8_t, 7> rows;
};
constexpr Glyph kGlyphs[] = {
    {'0', {14, 17, 19, 21, 25, 17, 14}}, {'1', {4, 12, 4, 4, 4, 4, 14}},
    {'2', {14, 17, 1, 2, 4, 8, 31}},     {'3', {31, 2, 4, 2, 1, 17, 14}},
    {'4', {2, 6, 10, 18, 31, 2, 2}},     {'5', {31, 16, 30, 1, 1, 17, 14}},
    {'6', {6, 8, 16, 30, 17, 17, 14}},   {'7', {31, 1, 2, 4, 8, 8, 8}},
    {'8', {14, 17, 17, 14, 17, 17, 14}}, {'9', {14, 17, 17, 15, 1, 2, 12}},
    {'.', {0, 0, 0, 0, 0, 12, 12}},      {'a', {0, 0, 14, 1, 15, 17, 15}},
    {'e', {0, 0, 14, 17, 31, 16, 14}},   {'k', {16, 16, 18, 20, 24, 20, 18}},
    {'l', {12, 4, 4, 4, 4, 4, 14}},      {'m', {0, 0, 26, 21, 21, 17, 17}},
    {'n', {0, 0, 22, 25, 17, 17, 17}},   {'o', {0, 0, 14, 17, 17, 17, 14}},
    {'s', {0, 0, 14, 16, 14, 1, 30}},    {'t', {8, 8, 28, 8, 8, 9, 6}},
    {'i', {4, 0, 12, 4, 4, 4, 14}},
};

class Image {
 public:
  static constexpr int kWidth = 1200;
  static constexpr int kHeight = 420;

  void Dot(int x, int y, Color color) {
    if (x < 0 || x >= kWidth || y < 0 || y >= kHeight) return;
    uint8_t* at = &pixels_[3 * (static_cast<size_t>(y) * kWidth + static_cast<size_t>(x))];
    at[0] = color.red;
    at[1] = color.green;
    at[2] = color.blue;
  }

  void Square(int x, int y, int size, Color color) {
    for (int dy = 0; dy < size; ++dy) {
      for (int dx = 0; dx < size; ++dx) Dot(x + dx, y + dy, color);
    }
  }

  void Line(double x0, double y0, double x1, double y1, int width, Color color) {
    const int steps = 1 + static_cast<int>(std::max(std::abs(x1 - x0), std::abs(y1 - y0)));
    for (int i = 0; i <= steps; ++i) {
      const double t = static_cast<double>(i) / steps;
      Square(static_cast<int>(std::lround(x0 + t * (x1 - x0))),
             static_cast<int>(std::lround(y0 + t * (y1 - y0))), width, color);
    }
  }

  // Its upper left corner at (x, y); two pixels a dot.
  void Text(int x, int y, absl::string_view text, Color color) {
    for (char character : text) {
      for (const Glyph& glyph : kGlyphs) {
        if (glyph.character != character) continue;
        for (int row = 0; row < 7; ++row) {
          for (int column = 0; column < 5; ++column) {
            if (glyph.rows[static_cast<size_t>(row)] >> (4 - column) & 1) {
              Square(x + 2 * column, y + 2 * row, 2, color);
            }
          }
        }
      }
      x += kTextStep;
    }
  }
  static constexpr int kTextStep = 12;

  absl::Status Write(const std::string& path) const {
    png_image image = {};
    image.version = PNG_IMAGE_VERSION;
    image.width = kWidth;
    image.height = kHeight;
    image.format = PNG_FORMAT_RGB;
    if (png_image_write_to_file(&image, path.c_str(), /*convert_to_8bit=*/0, pixels_.data(),
                                /*row_stride=*/0, /*colormap=*/nullptr) != 0) {
      return absl::OkStatus();
    }
    return absl::UnavailableError(absl::StrFormat("%s: %s", path, image.message));
  }

 private:
  std::vector<uint8_t> pixels_ = std::vector<uint8_t>(size_t{3} * kWidth * kHeight, 255);
};

// 1, 2 or 5 times a power of ten: about `parts` of them make `range`.
double Step(double range, int parts) {
  const double rough = std::max(range, 1e-9) / parts;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  for (double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough) return factor * power;
  }
  return 10 * power;
}

}  // namespace

absl::Status PlotLosses(const std::string& path, absl::Span<const float> losses, double mean) {
  constexpr int kLeft = 90;
  constexpr int kRight = Image::kWidth - 30;
  constexpr int kTop = 40;
  constexpr int kBottom = Image::kHeight - 60;
  const double tokens = std::max<double>(1, static_cast<double>(losses.size()));
  double top = 1e-3;
  for (float loss : losses) {
    if (std::isfinite(loss)) top = std::max(top, static_cast<double>(loss));
  }
  const double y_step = Step(top, 6);
  top = y_step * std::ceil(top / y_step);
  const auto x_of = [&](double token) { return kLeft + token / tokens * (kRight - kLeft); };
  const auto y_of = [&](double loss) {
    return kBottom - std::max(loss, 0.0) / top * (kBottom - kTop);
  };

  Image image;
  for (int i = 0; i * y_step <= top * 1.0001; ++i) {
    const double y = y_of(i * y_step);
    image.Line(kLeft, y, kRight, y, 1, kGrid);
    const std::string label = absl::StrFormat("%.4g", i * y_step);
    image.Text(kLeft - 12 - static_cast<int>(label.size()) * Image::kTextStep,
               static_cast<int>(y) - 6, label, kInk);
  }
  const double x_step = std::max(1.0, Step(tokens, 8));
  for (int i = 0; i * x_step <= tokens; ++i) {
    const double x = x_of(i * x_step);
    image.Line(x, kBottom, x, kBottom + 6, 1, kInk);
    const std::string label = absl::StrFormat("%.0f", i * x_step);
    image.Text(static_cast<int>(x) - static_cast<int>(label.size()) * Image::kTextStep / 2,
               kBottom + 12, label, kInk);
  }
  image.Line(kLeft, kTop, kLeft, kBottom, 1, kInk);
  image.Line(kLeft, kBottom, kRight, kBottom, 1, kInk);
  image.Text(kLeft, 14, "loss in nats", kInk);
  image.Text((kLeft + kRight) / 2 - 30, Image::kHeight - 22, "token", kInk);

  // A running mean over a fiftieth of the text, which a reader can follow where dots are dense.
  const size_t window = std::max<size_t>(1, losses.size() / 50);
  for (size_t i = 0; i < losses.size(); ++i) {
    if (!std::isfinite(losses[i])) continue;
    image.Square(static_cast<int>(x_of(static_cast<double>(i) + 0.5)) - 1,
                 static_cast<int>(y_of(losses[i])) - 1, 3, kDots);
  }
  // Each of its points is summed anew, so that one large loss does not affect later points; there
  // are about as many as pixels.
  const size_t step = std::max<size_t>(1, losses.size() / (2 * Image::kWidth));
  double last_x = -1;
  double last_y = 0;
  for (size_t i = 0; i < losses.size(); i += step) {
    double sum = 0;
    int64_t count = 0;
    for (size_t k = i + 1 - std::min(window, i + 1); k <= i; ++k) {
      if (!std::isfinite(losses[k])) continue;
      sum += static_cast<double>(losses[k]);
      ++count;
    }
    if (count == 0) continue;
    const double x = x_of(static_cast<double>(i) + 0.5);
    const double y = y_of(sum / static_cast<double>(count));
    if (last_x >= 0) image.Line(last_x, last_y, x, y, 2, kLine);
    last_x = x;
    last_y = y;
  }
  if (std::isfinite(mean)) {
    for (int x = kLeft; x < kRight; x += 16) {
      image.Line(x, y_of(mean), std::min(x + 8, kRight), y_of(mean), 1, kMean);
    }
    image.Text(kRight - 130, 14, absl::StrFormat("mean %.3f", mean), kMean);
  }
  return image.Write(path);
}

}  // namespace logitd::cli

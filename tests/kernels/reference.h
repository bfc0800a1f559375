// What the op tests are measured against: tensors with any stride and offset, seeded inputs,
// softmax_topk in double precision, and a comparison that says where and by how much.
#ifndef LOGITD_TESTS_KERNELS_REFERENCE_H_
#define LOGITD_TESTS_KERNELS_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "kernels/softmax_topk.h"
#include "kernels/types.h"

namespace logitd::testing {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr DType kAllDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

// Elements between the end of a row and the next row, and from an aligned address to the first row.
// Cases take them in turn.
inline constexpr int64_t kStrides[] = {0, 1, 3, 17, 64};
inline constexpr int64_t kOffsets[] = {0, 1, 3, 6, 9, 13, 32};

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float FloatOf(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// To nearest, ties to even, as every encoder of these types does. NaN stays NaN.
inline uint16_t Bf16Bits(float x) {
  const uint32_t bits = BitsOf(x);
  if (std::isnan(x)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t F16Bits(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return sign | 0x7e00;
  const double size = std::fabs(x);
  if (size >= 65520) return sign | 0x7c00;
  if (size == 0) return sign;
  const int exponent = std::max(std::ilogb(size), -14);
  const int mantissa = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return static_cast<uint16_t>(sign | (((exponent + 14) << 10) + mantissa));
}

inline float F16Value(uint16_t bits) {
  const int exponent = bits >> 10 & 0x1f;
  const int mantissa = bits & 0x3ff;
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 0x1f) return mantissa != 0 ? kNan : sign * kInf;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
}

// Nearest value of the type.
inline float RoundedTo(DType dtype, double value) {
  const auto single = static_cast<float>(value);
  if (dtype == DType::kF32) return single;
  const uint16_t half = dtype == DType::kF16 ? F16Bits(single) : Bf16Bits(single);
  return dtype == DType::kF16 ? F16Value(half) : FloatOf(uint32_t{half} << 16);
}

// Whether `got`, an element of the type, is what rounding makes of some number in want +- error.
inline bool Agrees(DType dtype, float got, double want, double error) {
  return got >= RoundedTo(dtype, want - error) && got <= RoundedTo(dtype, want + error);
}

// A [rows, cols] tensor in its own memory. Element (r, c) is at `offset + r * row_stride + c`
// elements from an aligned address. Everything else is NaN, so that a kernel that reads outside its
// row is found.
class HostTensor {
 public:
  HostTensor(DType dtype, int64_t rows, int64_t cols, int64_t row_stride, int64_t offset)
      : dtype_(dtype), rows_(rows), cols_(cols), row_stride_(row_stride), offset_(offset) {
    const int64_t elements = offset + (rows - 1) * row_stride + cols;
    bytes_.assign(elements * SizeOf(dtype), std::byte{0xff});
  }

  DType dtype() const { return dtype_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t row_stride() const { return row_stride_; }
  size_t offset_bytes() const { return offset_ * SizeOf(dtype_); }
  absl::Span<const std::byte> bytes() const { return bytes_; }  // from the aligned address on
  // The shape; `data` is null.
  TensorView View() const { return {nullptr, dtype_, rows_, cols_, row_stride_}; }
  std::vector<std::byte>& mutable_bytes() { return bytes_; }

  // Rounded to the tensor's type.
  void Set(int64_t r, int64_t c, float value) {
    std::byte* to = bytes_.data() + Index(r, c) * SizeOf(dtype_);
    const uint16_t half = dtype_ == DType::kF16 ? F16Bits(value) : Bf16Bits(value);
    if (dtype_ == DType::kF32) {
      std::memcpy(to, &value, sizeof(value));
    } else {
      std::memcpy(to, &half, sizeof(half));
    }
  }

  float At(int64_t r, int64_t c) const {
    const std::byte* from = bytes_.data() + Index(r, c) * SizeOf(dtype_);
    if (dtype_ == DType::kF32) {
      float value;
      std::memcpy(&value, from, sizeof(value));
      return value;
    }
    uint16_t half;
    std::memcpy(&half, from, sizeof(half));
    return dtype_ == DType::kF16 ? F16Value(half) : FloatOf(uint32_t{half} << 16);
  }

 private:
  int64_t Index(int64_t r, int64_t c) const { return offset_ + r * row_stride_ + c; }

  DType dtype_;
  int64_t rows_, cols_, row_stride_, offset_;
  std::vector<std::byte> bytes_;
};

// A tensor of `values`, row by row.
inline HostTensor TensorOf(DType dtype, int64_t rows, absl::Span<const float> values) {
  const auto cols = static_cast<int64_t>(values.size()) / rows;
  HostTensor tensor(dtype, rows, cols, cols, 0);
  for (int64_t i = 0; i < rows * cols; ++i) tensor.Set(i / cols, i % cols, values[i]);
  return tensor;
}

inline std::vector<float> RowOf(const HostTensor& tensor, int64_t r) {
  std::vector<float> x(tensor.cols());
  for (int64_t c = 0; c < tensor.cols(); ++c) x[c] = tensor.At(r, c);
  return x;
}

// "" where they are the same.
inline std::string DescribeStatus(RowStatus got, RowStatus want) {
  if (got.code == want.code && got.position == want.position) return "";
  return absl::StrFormat("status: got code %d position %d, want code %d position %d",
                         static_cast<int>(got.code), got.position, static_cast<int>(want.code),
                         want.position);
}

// Kinds of rows.
enum class Fill {
  kNormal,   // as a language model's logits
  kUniform,  // in [-1, 1)
  kAllEqual,
  kAscending,  // the largest last
  kDescending,
  kManyTies,        // five values, both zeros among them
  kMostlyMinusInf,  // one in a hundred is finite
  kAllMinusInf,
  kWithNan,      // one NaN in most rows, at any place
  kWithPlusInf,  // a few +inf, and -inf
  kHuge,         // up to the type's largest, both signs
  kDenormal,     // below the type's smallest normal
  kOneHot,       // one far above the rest
};
inline constexpr Fill kAllFills[] = {
    Fill::kNormal,     Fill::kUniform,     Fill::kAllEqual,       Fill::kAscending,
    Fill::kDescending, Fill::kManyTies,    Fill::kMostlyMinusInf, Fill::kAllMinusInf,
    Fill::kWithNan,    Fill::kWithPlusInf, Fill::kHuge,           Fill::kDenormal,
    Fill::kOneHot,
};

inline std::string_view Name(Fill fill) {
  static constexpr std::string_view kNames[] = {
      "normal",    "uniform",          "all_equal",     "ascending", "descending",
      "many_ties", "mostly_minus_inf", "all_minus_inf", "with_nan",  "with_plus_inf",
      "huge",      "denormal",         "one_hot"};
  return kNames[static_cast<int>(fill)];
}

// Fills row r; the same seed and row give the same values in every shape that holds them.
inline void FillRow(HostTensor& tensor, int64_t r, Fill fill, uint64_t seed) {
  std::mt19937_64 random(seed * 1000003 + r);
  const int64_t n = tensor.cols();
  const auto uniform = [&] { return static_cast<float>(random() >> 40) / (1 << 23) - 1.0f; };
  // Four uniforms: close enough to normal, and much cheaper.
  const auto normal = [&] {
    const uint64_t bits = random();
    float sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<float>(bits >> (16 * i) & 0xffff) / 32768 - 1.0f;
    return 2.6f * sum;
  };
  const float huge = tensor.dtype() == DType::kF16 ? 65504.0f : 3e38f;
  const float tiny = tensor.dtype() == DType::kF16 ? 6e-5f : 1e-38f;
  const float level = uniform();
  for (int64_t c = 0; c < n; ++c) {
    float x = 0;
    switch (fill) {
      case Fill::kNormal:
      case Fill::kWithNan:
      case Fill::kOneHot:
        x = normal();
        break;
      case Fill::kUniform:
        x = uniform();
        break;
      case Fill::kAllEqual:
        x = level;
        break;
      case Fill::kAscending:
        x = level + 20.0f * static_cast<float>(c) / static_cast<float>(n);
        break;
      case Fill::kDescending:
        x = level - 20.0f * static_cast<float>(c) / static_cast<float>(n);
        break;
      case Fill::kManyTies: {
        static constexpr float kValues[] = {-1.5f, -0.0f, 0.0f, 0.25f, -3.0f};
        x = kValues[random() % 5];
        break;
      }
      case Fill::kMostlyMinusInf:
        x = random() % 100 == 0 ? normal() : -kInf;
        break;
      case Fill::kAllMinusInf:
        x = -kInf;
        break;
      case Fill::kWithPlusInf: {
        const uint64_t pick = random() % 50;
        x = pick == 0 ? kInf : pick == 1 ? -kInf : normal();
        break;
      }
      case Fill::kHuge:
        x = huge * uniform();
        break;
      case Fill::kDenormal:
        x = tiny * uniform();
        break;
    }
    tensor.Set(r, c, x);
  }
  if (fill == Fill::kWithNan && r % 4 != 3) tensor.Set(r, random() % n, r % 2 == 0 ? kNan : -kNan);
  if (fill == Fill::kOneHot) tensor.Set(r, random() % n, 200.0f);
}

// The answer to one row; the meaning of each field is SoftmaxTopKArgs's.
struct TopKRowAnswer {
  RowStatus status;
  double logsumexp = 0;
  std::vector<int32_t> indices;
  std::vector<double> probs;
};

// Row r by the formula, in double precision: sort everything, divide.
inline TopKRowAnswer ReferenceSoftmaxTopK(const HostTensor& tensor, int64_t r,
                                          const SoftmaxTopKRow& ask) {
  const int64_t n = tensor.cols();
  TopKRowAnswer answer;
  std::vector<float> x(n);
  for (int64_t c = 0; c < n; ++c) {
    x[c] = tensor.At(r, c);
    if (std::isnan(x[c])) {
      answer.status = {RowCode::kNanLogit, static_cast<int32_t>(c)};
      return answer;
    }
  }
  const float max = *std::max_element(x.begin(), x.end());
  answer.indices.resize(n);
  std::iota(answer.indices.begin(), answer.indices.end(), 0);
  const auto before = [&x](int32_t a, int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; };
  std::partial_sort(answer.indices.begin(), answer.indices.begin() + ask.k, answer.indices.end(),
                    before);
  answer.indices.resize(ask.k);
  if (max == -kInf) {
    answer.status = {RowCode::kEmptySupport, -1};
    answer.logsumexp = -kInf;
    answer.probs.assign(ask.k, 0.0);
    return answer;
  }
  const double t = ask.temperature;
  const auto weight = [&](float v) {
    if (max == kInf) return v == kInf ? 1.0 : 0.0;
    return std::exp((double{v} - max) / t);
  };
  double sum = 0;
  for (float v : x) sum += weight(v);
  answer.logsumexp = max / t + std::log(sum);
  for (int32_t i : answer.indices) answer.probs.push_back(weight(x[i]) / sum);
  return answer;
}

// Steps between two floats of one sign; how far a result is off in its own last place.
inline int64_t UlpsApart(float a, float b) {
  const auto order = [](float x) {
    const auto bits = static_cast<int32_t>(BitsOf(x));
    return int64_t{bits >= 0 ? bits : static_cast<int32_t>(0x80000000u - BitsOf(x))};
  };
  return std::llabs(order(a) - order(b));
}

// The tolerances kernels/softmax_topk.h promises.
inline bool ProbabilityAgrees(float got, double want) {
  return std::fabs(got - want) <= 4e-6 * want + 1e-37;
}
inline bool LogSumExpAgrees(float got, double want) {
  // Where the double is beyond f32, infinity is right.
  const auto rounded = static_cast<float>(want);
  if (std::isinf(rounded)) return got == rounded;
  return std::fabs(got - want) <= 2e-6 * std::max(1.0, std::fabs(want));
}

// "" where a row's answer agrees with the reference, else what differs first: field, column, both
// values, ULPs.
inline std::string DescribeDifference(const TopKRowAnswer& want, RowStatus status, float logsumexp,
                                      absl::Span<const int32_t> indices,
                                      absl::Span<const float> probs) {
  if (std::string difference = DescribeStatus(status, want.status); !difference.empty()) {
    return difference;
  }
  if (want.status.code == RowCode::kNanLogit) return "";
  if (!LogSumExpAgrees(logsumexp, want.logsumexp)) {
    return absl::StrFormat("logsumexp: got %.9g, want %.12g, %d ulps", logsumexp, want.logsumexp,
                           UlpsApart(logsumexp, static_cast<float>(want.logsumexp)));
  }
  for (size_t j = 0; j < want.indices.size(); ++j) {
    if (indices[j] != want.indices[j]) {
      return absl::StrFormat("column %d: got index %d (p %.9g), want index %d (p %.12g)", j,
                             indices[j], probs[j], want.indices[j], want.probs[j]);
    }
    if (!ProbabilityAgrees(probs[j], want.probs[j])) {
      return absl::StrFormat("column %d (index %d): got p %.9g, want %.12g, %d ulps", j, indices[j],
                             probs[j], want.probs[j],
                             UlpsApart(probs[j], static_cast<float>(want.probs[j])));
    }
  }
  return "";
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_REFERENCE_H_

#include "bench/kernels/sweep.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_format.h"

namespace logitd::bench {
namespace {

using enum DType;

constexpr double kMostBytes = 0x1p30;  // of the tensors that a call reads and writes
constexpr int64_t kRows[] = {1, 4, 16, 64, 100, 300, 512, 1024, 4096, 16384, 65536};
constexpr int64_t kVocabularies[] = {1000,  1024,  1025,   2000,   2049,   4096,   4097,
                                     5000,  8192,  8193,   12345,  20000,  32000,  32768,
                                     50257, 65536, 100003, 131072, 151936, 201088, 262144};
constexpr int64_t kMatrices[] = {1, 8, 32, 128, 1024};
// Attention's kernels change after 64, 128, 256, 512, 1024 and every further 1024 or 2048 keys.
constexpr int64_t kKeys[] = {33,   64,   65,   100,  128,  129,  200,  256,   257,   400,   511,
                             512,  513,  700,  1000, 1023, 1024, 1025, 1100,  1500,  2048,  2049,
                             2500, 3000, 4096, 4097, 6000, 8192, 8193, 12345, 16384, 16385, 20000};
constexpr int64_t kHeadRows[] = {1,   2,   3,   8,   17,  32,  64,  65,  100,  128,
                                 129, 200, 256, 300, 400, 512, 600, 777, 1100, 2048};

// Adds make(rows, length) for all shapes of a grid that fit.
template <class Make>
void AddGrid(std::vector<SweepCase>& cases, const std::string& grid,
             absl::Span<const int64_t> all_rows, absl::Span<const int64_t> lengths, Make make) {
  for (const int64_t rows : all_rows) {
    for (const int64_t length : lengths) {
      const auto shape = make(rows, length);
      if (shape.FloorBytes() <= kMostBytes) cases.push_back({grid, rows, length, shape});
    }
  }
}

void AddTopK(std::vector<SweepCase>& cases, DType dtype, int32_t k) {
  AddGrid(cases, absl::StrFormat("softmax_topk %s K=%d", Name(dtype), k), kRows, kVocabularies,
          [&](int64_t rows, int64_t vocab) {
            return TopKCase{rows, vocab, dtype, std::min(k, static_cast<int32_t>(vocab)), vocab};
          });
}

void AddSample(std::vector<SweepCase>& cases, DType dtype, const char* what, SampleRow row) {
  row.active = 1;
  row.repetition = 1;
  row.typical_p = 1;
  AddGrid(cases, absl::StrFormat("sample %s %s", Name(dtype), what), kRows, kVocabularies,
          [&](int64_t rows, int64_t vocab) {
            return SampleCase{rows, vocab, dtype, row};
          });
}

void AddLosses(std::vector<SweepCase>& cases, DType dtype, const char* what, CrossEntropyRow row,
               LossOp op = LossOp::kForward) {
  row.active = 1;
  row.temperature = 1;
  AddGrid(cases, absl::StrFormat("cross_entropy %s %s", Name(dtype), what), kRows, kVocabularies,
          [&](int64_t rows, int64_t vocab) {
            return CrossEntropyCase{rows, vocab, dtype, row, op};
          });
}

void AddAttention(std::vector<SweepCase>& cases, const char* what, AttentionCase of) {
  AddGrid(cases, absl::StrFormat("attention_softmax %s %s", Name(of.dtype), what), kMatrices, kKeys,
          [&](int64_t matrices, int64_t keys) {
            of.batch = 1;
            of.heads = matrices;
            of.queries = of.keys = keys;
            return of;
          });
}

void AddHeads(std::vector<SweepCase>& cases, HeadOp op, const char* name, int64_t hidden,
              int64_t vocab) {
  for (const int64_t rows : kHeadRows) {
    cases.push_back({absl::StrFormat("%s bf16 D=%d", name, hidden), rows, vocab,
                     HeadCase{op, rows, hidden, vocab, kBF16}});
  }
}

// What two neighbours on one axis, null where there is none, say of a figure.
double Relative(const SweepFigure& figure, const SweepFigure* smaller, const SweepFigure* larger) {
  if (smaller == nullptr && larger == nullptr) return 1;
  if (smaller == nullptr) return larger->us / figure.us;
  const double by_share = figure.share() / smaller->share();
  if (larger == nullptr) return by_share;
  const double span = larger->floor_us - smaller->floor_us;
  const double place =
      span <= 0 ? 1 : std::clamp((figure.floor_us - smaller->floor_us) / span, 0.0, 1.0);
  const double on_line = smaller->us + place * (larger->us - smaller->us);
  return std::min(by_share, std::max(on_line, smaller->us) / figure.us);
}

}  // namespace

std::vector<SweepCase> SweepCases() {
  std::vector<SweepCase> cases;
  for (const DType dtype : {kF32, kBF16}) {
    for (const int32_t k : {10, 64, 1024}) AddTopK(cases, dtype, k);
    AddSample(cases, dtype, "top-k 50, top-p 0.9", {.temperature = 1, .top_k = 50, .top_p = 0.9f});
    AddSample(cases, dtype, "greedy", {.temperature = 0, .top_p = 1});
    AddSample(cases, dtype, "unfiltered", {.temperature = 1, .top_p = 1});
    AddSample(cases, dtype, "top-p 0.9, flat", {.temperature = 1, .top_p = 0.9f});
    AddLosses(cases, dtype, "loss", {});
  }
  AddLosses(cases, kBF16, "rank", {.want = kWantRank});
  AddLosses(cases, kBF16, "softcap", {.softcap = 30});
  AddLosses(cases, kBF16, "backward", {}, LossOp::kBackward);
  AddLosses(cases, kBF16, "training", {}, LossOp::kTraining);
  constexpr AttentionWindow kCausal = {.left = AttentionWindow::kUnbounded, .right = 0};
  for (const DType dtype : {kF32, kBF16}) {
    AddAttention(cases, "unmasked", {.dtype = dtype});
    AddAttention(cases, "causal", {.dtype = dtype, .window = kCausal});
    AddAttention(cases, "backward", {.dtype = dtype, .backward = true});
  }
  AddAttention(cases, "causal backward", {.dtype = kBF16, .window = kCausal, .backward = true});
  AddAttention(cases, "window", {.dtype = kBF16, .window = {.left = 256, .right = 0}});
  AddAttention(cases, "bool mask", {.dtype = kBF16, .mask = MaskKind::kBool});
  AddAttention(cases, "additive mask", {.dtype = kBF16, .mask = MaskKind::kAdditive});
  for (const auto& [hidden, vocab] : {std::pair{4096, 128256}, std::pair{2048, 50257}}) {
    AddHeads(cases, HeadOp::kTopK, "linear_topk", hidden, vocab);
    AddHeads(cases, HeadOp::kSample, "linear_sample", hidden, vocab);
    AddHeads(cases, HeadOp::kCrossEntropy, "linear_cross_entropy", hidden, vocab);
  }
  return cases;
}

std::vector<double> RelativeToNeighbours(absl::Span<const SweepFigure> figures) {
  std::vector<double> relative(figures.size(), std::numeric_limits<double>::infinity());
  // Figures on a line of the grid, by their place on it.
  const auto along = [&](auto line_of, auto place_of) {
    std::map<std::pair<std::string, int64_t>, std::map<int64_t, size_t>> lines;
    for (size_t i = 0; i < figures.size(); ++i)
      lines[{figures[i].grid, line_of(figures[i])}][place_of(figures[i])] = i;
    for (const auto& [name, line] : lines) {
      for (auto at = line.begin(); at != line.end(); ++at) {
        const auto next = std::next(at);
        const SweepFigure* smaller = at == line.begin() ? nullptr : &figures[std::prev(at)->second];
        const SweepFigure* larger = next == line.end() ? nullptr : &figures[next->second];
        double& lowest = relative[at->second];
        lowest = std::min(lowest, Relative(figures[at->second], smaller, larger));
      }
    }
  };
  const auto rows = [](const SweepFigure& figure) { return figure.rows; };
  const auto length = [](const SweepFigure& figure) { return figure.length; };
  along(rows, length);
  along(length, rows);
  return relative;
}

}  // namespace logitd::bench

// kernel_bench: every op as a share of its floor, the floor taken from the device's own ceilings in
// the same run.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/kernels/cases.h"
#include "bench/kernels/sweep.h"
#if LOGITD_WITH_CUDA
#include "kernels/cuda/rows/plan.h"
#endif

namespace logitd::bench {
namespace {

// What bounds a launch from below: one read, a read and a write, or the bare product.
enum class Floor { kRead, kCopy, kProduct };

// A case as the table and the results file tell it, and once it has run its figures.
struct Record {
  std::string op;
  std::string shape;
  nlohmann::json fields;  // of the shape
  Floor floor;
  double bytes;  // FloorBytes()
  double us = 0;
  double bytes_us = 0;    // of those bytes at the device's ceiling
  double product_us = 0;  // kProduct
  Anchor h200;

  double floor_us() const { return floor == Floor::kProduct ? product_us : bytes_us; }
  double share() const { return floor_us() / us; }
};

Record RecordOf(const TopKCase& c) {
  return {.op = "softmax_topk",
          .shape = absl::StrFormat("%dx%d %s K=%d%s", c.rows, c.vocab, Name(c.dtype), c.k,
                                   c.row_stride == c.vocab ? "" : " padded"),
          .fields = {{"rows", c.rows},
                     {"vocab", c.vocab},
                     {"dtype", Name(c.dtype)},
                     {"k", c.k},
                     {"row_stride", c.row_stride}},
          .floor = Floor::kRead,
          .bytes = c.FloorBytes()};
}

Record RecordOf(const SampleCase& c) {
  return {.op = "sample",
          .shape = absl::StrFormat("%dx%d %s", c.rows, c.vocab, Name(c.dtype)),
          .fields = {{"rows", c.rows}, {"vocab", c.vocab}, {"dtype", Name(c.dtype)}},
          .floor = Floor::kRead,
          .bytes = c.FloorBytes()};
}

Record RecordOf(const VerifyCase& c) {
  Record record = RecordOf(c.rows);
  record.op = "verify";
  record.fields["rows_of_sequence"] = c.length;
  record.bytes = c.FloorBytes();
  return record;
}

Record RecordOf(const AttentionCase& c) {
  constexpr const char* kMasks[] = {"none", "bool", "additive"};  // by MaskKind
  return {.op = c.backward ? "attention_softmax_backward" : "attention_softmax",
          .shape = absl::StrFormat("[%d,%d,%d,%d] %s", c.batch, c.heads, c.queries, c.keys,
                                   Name(c.dtype)),
          .fields = {{"batch", c.batch},
                     {"heads", c.heads},
                     {"queries", c.queries},
                     {"keys", c.keys},
                     {"dtype", Name(c.dtype)},
                     {"window", {c.window.left, c.window.right}},
                     {"mask", kMasks[static_cast<int>(c.mask)]}},
          .floor = Floor::kCopy,
          .bytes = c.FloorBytes()};
}

Record RecordOf(const CrossEntropyCase& c) {
  constexpr const char* kOps[] = {"cross_entropy", "cross_entropy_backward",
                                  "cross_entropy and its backward",
                                  "cross_entropy_training"};  // by LossOp
  return {.op = kOps[static_cast<int>(c.op)],
          .shape = absl::StrFormat("%dx%d %s", c.rows, c.vocab, Name(c.dtype)),
          .fields = {{"rows", c.rows}, {"vocab", c.vocab}, {"dtype", Name(c.dtype)}},
          .floor = c.op == LossOp::kForward ? Floor::kRead : Floor::kCopy,
          .bytes = c.FloorBytes()};
}

Record RecordOf(const DivergenceCase& c) {
  return {.op = "divergence",
          .shape = absl::StrFormat("%dx%d %s", c.rows, c.vocab, Name(c.dtype)),
          .fields = {{"rows", c.rows}, {"vocab", c.vocab}, {"dtype", Name(c.dtype)}},
          .floor = Floor::kRead,
          .bytes = c.FloorBytes()};
}

Record RecordOf(const HeadCase& c) {
  constexpr const char* kOps[] = {
      "linear_topk",          "linear_sample",
      "linear_verify",        "linear_verify",
      "linear_cross_entropy", "linear_cross_entropy forward and backward",
      "linear_divergence",    "linear_divergence_training"};  // by HeadOp
  return {.op = kOps[static_cast<int>(c.op)],
          .shape = absl::StrFormat("%dx%dx%d %s", c.rows, c.hidden, c.vocab, Name(c.dtype)),
          .fields = {{"rows", c.rows},
                     {"hidden", c.hidden},
                     {"vocab", c.vocab},
                     {"dtype", Name(c.dtype)}},
          .floor = Floor::kProduct,
          .bytes = c.FloorBytes()};
}

// Times the ops of one device.
class Bench {
 public:
  explicit Bench(Device& device) : device_(device), inputs_(device) {}

  double read() const { return read_; }  // bytes per second, here and below
  double copy() const { return copy_; }  // read plus written

  absl::Status MeasureCeilings() {
    const size_t bytes = device_.input_bytes();
    const auto buffer = inputs_.Cut(DType::kF32, bytes);
    if (!buffer.ok()) return buffer.status();
    std::byte* data = buffer->data;  // a copy of normals leaves normals
    const auto read = device_.Time({}, [&](int) { return device_.Read(data, bytes); });
    if (!read.ok()) return read.status();
    const auto copy =
        device_.Time({}, [&](int) { return device_.Copy(data + bytes / 2, data, bytes / 2); });
    if (!copy.ok()) return copy.status();
    read_ = static_cast<double>(bytes) / *read * 1e6;
    copy_ = static_cast<double>(bytes) / *copy * 1e6;
    return absl::OkStatus();
  }

  absl::Status Measure(const Case& shape, Record& record) {
    const auto us = Time(shape, device_, inputs_);
    if (!us.ok()) return us.status();
    record.us = *us;
    record.bytes_us = record.bytes / (record.floor == Floor::kCopy ? copy_ : read_) * 1e6;
    if (const auto* head = std::get_if<HeadCase>(&shape)) {
      const auto product = TimeProduct(*head, device_, inputs_);
      if (!product.ok()) return product.status();
      // The gradients are a product each; a divergence has two heads.
      record.product_us = *product * (head->op == HeadOp::kDivergenceTraining ? 4
                                      : head->op == HeadOp::kTraining         ? 3
                                      : head->op == HeadOp::kDivergence       ? 2
                                                                              : 1);
    }
    return absl::OkStatus();
  }

 private:
  Device& device_;
  Inputs inputs_;
  double read_ = 0;
  double copy_ = 0;
};

void Print(const Record& record, const std::string& label) {
  const Anchor& h200 = record.h200;
  const auto number = [](double value) {
    return value == 0 ? std::string("-") : absl::StrFormat("%.0f", value);
  };
  absl::PrintF("%-84s %10.2f %10.2f %9.1f %6.1f%% %8s %9s  %s\n", label, record.us,
               record.floor_us(), record.bytes / record.us / 1e3, 100 * record.share(),
               number(h200.goal_us), number(h200.peer_us), h200.peer);
}

nlohmann::json ToJson(const Record& record, const char* why) {
  nlohmann::json out = record.fields;
  out.update({{"op", record.op}, {"why", why}, {"us", record.us}});
  if (record.floor == Floor::kProduct) {
    out.update({{"read_us", record.bytes_us},
                {"product_us", record.product_us},
                {"share_of_product", record.share()}});
  } else {
    out.update({{"floor_us", record.bytes_us}, {"share_of_floor", record.share()}});
  }
  out.update({{"goal_us", record.h200.goal_us},
              {"goal_share", record.h200.goal_share},
              {"peer", record.h200.peer},
              {"peer_us_h200", record.h200.peer_us}});
  return out;
}

bool Contains(const std::string& label, const std::vector<std::string>& any_of) {
  return any_of.empty() || std::any_of(any_of.begin(), any_of.end(), [&](const auto& text) {
           return label.find(text) != std::string::npos;
         });
}

// Times and prints the entries whose line contains one of `only`, and adds them to `out`. Returns
// how many failed.
int RunEntries(Bench& bench, const std::vector<absl::Span<const Entry>>& tables,
               const std::vector<std::string>& only, nlohmann::json& out) {
  absl::PrintF("%-84s %10s %10s %9s %7s %8s %9s  %s\n", "op", "us", "floor us", "GB/s", "share",
               "goal us", "peer us", "peer (on an H200)");
  int failed = 0;
  for (const absl::Span<const Entry> table : tables) {
    for (const Entry& entry : table) {
      Record record = std::visit([](const auto& c) { return RecordOf(c); }, entry.shape);
      record.h200 = entry.h200;
      const std::string label = absl::StrCat(record.op, " ", record.shape, " ", entry.why);
      if (!Contains(label, only)) continue;
      if (const absl::Status status = bench.Measure(entry.shape, record); !status.ok()) {
        absl::PrintF("%-84s %s\n", label, status.ToString());
        ++failed;
        continue;
      }
      Print(record, label);
      out["entries"].push_back(ToJson(record, entry.why));
    }
    absl::PrintF("\n");
  }
  return failed;
}

// Prints the grid's worst shapes beside their neighbours, `figures` of one grid.
void PrintGrid(absl::Span<const SweepFigure> figures, absl::Span<const double> relative) {
  constexpr size_t kShown = 3;
  constexpr double kSlow = 0.6;  // all below it are shown
  std::vector<size_t> order(figures.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return relative[a] < relative[b]; });
  absl::PrintF("%s: %d shapes\n", figures[0].grid, figures.size());
  for (size_t i = 0; i < order.size() && (i < kShown || relative[order[i]] < kSlow); ++i) {
    const SweepFigure& figure = figures[order[i]];
    absl::PrintF("  %9d x %-7d %10.2f us %10.2f %6.1f%% %8.2f%s\n", figure.rows, figure.length,
                 figure.us, figure.floor_us, 100 * figure.share(), relative[order[i]],
                 relative[order[i]] < kSlow ? "  SLOW" : "");
  }
}

// Times the sweep's shapes whose "<grid> <rows>x<length>" contains one of `only`, prints the worst
// of each grid, and adds all to `out`. Returns how many failed.
int RunSweep(Bench& bench, const std::vector<std::string>& only, nlohmann::json& out) {
  absl::PrintF("%-31s %16s %7s %8s\n", "matrices or rows x length", "floor us", "share",
               "of its neighbours'");
  std::vector<SweepFigure> figures;
  int failed = 0;
  for (const SweepCase& at : SweepCases()) {
    if (!Contains(absl::StrFormat("%s %dx%d", at.grid, at.rows, at.length), only)) continue;
    Record record = std::visit([](const auto& c) { return RecordOf(c); }, at.shape);
    if (const absl::Status status = bench.Measure(at.shape, record); !status.ok()) {
      absl::PrintF("%s %d x %d: %s\n", at.grid, at.rows, at.length, status.ToString());
      ++failed;
      continue;
    }
    figures.push_back({at.grid, at.rows, at.length, record.floor_us(), record.us});
  }
  const std::vector<double> relative = RelativeToNeighbours(figures);
  const auto rounded = [](double value) { return std::round(value * 1e3) / 1e3; };
  for (size_t begin = 0, end = 0; begin < figures.size(); begin = end) {
    while (end < figures.size() && figures[end].grid == figures[begin].grid) ++end;
    PrintGrid(absl::MakeConstSpan(figures).subspan(begin, end - begin),
              absl::MakeConstSpan(relative).subspan(begin, end - begin));
    for (size_t i = begin; i < end; ++i) {
      out["sweep"][figures[i].grid].push_back({figures[i].rows, figures[i].length,
                                               rounded(figures[i].us), rounded(figures[i].floor_us),
                                               rounded(relative[i])});
    }
  }
  return failed;
}

#if LOGITD_WITH_CUDA
// Times every form of the planner that fits, over the sweep's shapes of softmax_topk, cross_entropy
// and cross_entropy_training, for fit_plans.py. Returns how many failed.
int RunForms(Bench& bench, const std::vector<std::string>& only, std::ofstream out) {
  constexpr int kMostForms = 16;
  constexpr int kMostBlocks = 8;
  int failed = 0;
  for (const SweepCase& at : SweepCases()) {
    const auto* topk = std::get_if<TopKCase>(&at.shape);
    const auto* loss = std::get_if<CrossEntropyCase>(&at.shape);
    if (topk == nullptr && (loss == nullptr || loss->op == LossOp::kBackward)) continue;
    if (!Contains(absl::StrFormat("%s %dx%d", at.grid, at.rows, at.length), only)) continue;
    const DType dtype = topk != nullptr ? topk->dtype : loss->dtype;
    for (int form = 0; form < kMostForms; ++form) {
      for (int blocks = 1; blocks <= kMostBlocks; ++blocks) {
        cuda::ForceForm(form, blocks);
        Record record = std::visit([](const auto& c) { return RecordOf(c); }, at.shape);
        const absl::Status status = bench.Measure(at.shape, record);
        const cuda::RowsPlan plan = cuda::LastPlan();
        if (plan.form < 0) continue;  // does not fit
        failed += !status.ok();
        out << absl::StrFormat("%s %s %d %d %d %.0f %d %d %d %d %d %.2f\n", record.op, Name(dtype),
                               topk != nullptr ? topk->k : 0, at.rows, (at.length + 1023) / 1024,
                               record.bytes / at.rows, form, blocks, plan.teams, plan.places,
                               plan.turns, record.us);
      }
    }
  }
  cuda::ForceForm(-1, 0);
  return failed;
}
#endif

int Main(int argc, char** argv) {
  CLI::App app(
      "Times every op on one device and prints it as a share of its floor. The floor's rates are "
      "measured in the same run. The floor is one read of the logits at the rate of a plain read; "
      "for attention and gradients, the bytes that must be read and written at the rate of a plain "
      "copy; for heads, the bare product.");
  std::string backend = "auto", json_path, commit, forms_path;
  std::vector<std::string> only;
  bool sweep = false, once = false;
  app.add_option("--backend", backend, "auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  app.add_option("--json", json_path, "also write the results to this file");
  app.add_option("--only", only, "only entries whose line contains one of these texts, e.g. K=64");
  app.add_option("--commit", commit, "the commit that is measured, for the JSON");
  app.add_flag(
      "--sweep", sweep,
      "instead of the entries, briefly time every op over a grid of shapes, and print those that "
      "are slow beside their neighbours; needs a GPU. In the JSON, a shape is [rows or matrices, "
      "length of a row, us, floor us, speed beside its neighbours']");
  app.add_option("--forms", forms_path,
                 "instead, time every form that an op on rows has, over the sweep's shapes, and "
                 "write the times to "
                 "this file for fit_plans.py; needs a GPU");
  app.add_flag("--once", once,
               "launch every entry, or every shape of the sweep, once, for a profiler or a "
               "sanitizer; needs a GPU");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  const bool forms = !forms_path.empty();
  if (sweep || once || forms) backend = "cuda";

  absl::StatusOr<std::unique_ptr<Device>> device =
      absl::UnavailableError("this build has only the CPU backend");
#if LOGITD_WITH_CUDA
  if (backend != "cpu") {
    device = CreateCudaDevice(once             ? Effort::kOnce
                              : sweep || forms ? Effort::kBrief
                                               : Effort::kFull);
  }
#endif
  const bool cuda = device.ok();
  if (!cuda && backend != "cuda") device = CreateCpuDevice();
  if (!device.ok()) {
    std::cerr << "kernel_bench: " << device.status().message() << "\n";
    return 1;
  }
  Bench bench(**device);
  if (const absl::Status status = bench.MeasureCeilings(); !status.ok()) {
    std::cerr << "kernel_bench: " << status << "\n";
    return 1;
  }
  absl::PrintF("%s: read %.2f GB/s, copy %.2f GB/s\n\n", (*device)->name(), bench.read() / 1e9,
               bench.copy() / 1e9);
  nlohmann::json out = {{"device", (*device)->name()},
                        {"commit", commit},
                        {"read_bytes_per_s", bench.read()},
                        {"copy_bytes_per_s", bench.copy()}};
#if LOGITD_WITH_CUDA
  if (forms) {
    std::ofstream file(forms_path);
    file << absl::StrFormat("multiprocessors %d bytes_per_us %.0f\n", (*device)->multiprocessors(),
                            bench.read() / 1e6);
    return RunForms(bench, only, std::move(file)) == 0 ? 0 : 1;
  }
#endif
  const int failed = sweep ? RunSweep(bench, only, out)
                           : RunEntries(bench, cuda ? CudaEntries() : CpuEntries(), only, out);
  if (failed == 0 && !out.contains("entries") && !out.contains("sweep")) {
    std::cerr << "kernel_bench: no line contains a text of --only\n";
    return 1;
  }
  if (!json_path.empty()) std::ofstream(json_path) << out.dump(sweep ? -1 : 1) << "\n";
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace logitd::bench

int main(int argc, char** argv) { return logitd::bench::Main(argc, argv); }

// engine_bench: the engine's own cost of a job. Each job is one row of an op that does nothing, on
// the CPU backend. Prints processor time and wall time for each job, by jobs in flight. Needs no
// server.
#include <sys/resource.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "server/base/clock.h"
#include "server/engine/engine.h"

namespace logitd::engine {
namespace {

constexpr int kJobs = 400'000;

constexpr Array kOutputs[] = {{kRowAxis, sizeof(float)}};
constexpr OpTraits kNothing = {
    .name = "nothing", .inputs = {}, .outputs = kOutputs, .enqueue = [](Stream&, const BatchView&) {
      return absl::OkStatus();
    }};
constexpr const OpTraits* kOps[] = {&kNothing};

std::atomic<int> left = 0;

class NothingJob final : public Job {
 public:
  explicit NothingJob(Engine& engine) : engine_(engine) {
    spec_.key = {.op = &kNothing, .dtype = DType::kF32, .row_elements = 4};
    spec_.counts[kRowAxis] = 1;
    spec_.size = SizeOfJob(spec_);
  }
  const JobSpec& spec() const override { return spec_; }
  void CopyRowsTo(std::byte*, size_t) override {}
  void WriteInputs(absl::Span<std::byte* const>, const AxisCounts&) override {}
  // Its place is taken by the next job, so that no thread has to look how many are in flight.
  void Done(const absl::Status&, const JobAnswer&, const JobTimes&) override {
    if (--left >= 0) engine_.Submit(std::make_shared<NothingJob>(engine_));
  }

 private:
  Engine& engine_;
  JobSpec spec_;
};

int64_t ProcessorNanos() {
  rusage used = {};
  getrusage(RUSAGE_SELF, &used);
  const auto nanos = [](const timeval& time) {
    return int64_t{time.tv_sec} * 1'000'000'000 + int64_t{time.tv_usec} * 1000;
  };
  return nanos(used.ru_utime) + nanos(used.ru_stime);
}

void Measure(Engine& engine, int in_flight) {
  left = kJobs - in_flight;
  std::vector<std::shared_ptr<Job>> jobs;
  for (int i = 0; i < in_flight; ++i) jobs.push_back(std::make_shared<NothingJob>(engine));
  const int64_t begun_ns = MonotonicNanos();
  const int64_t processor_ns = ProcessorNanos();
  engine.Submit(absl::MakeSpan(jobs));
  engine.WaitIdle(absl::InfiniteFuture());
  std::printf("%4d in flight: %5.2f us of processor time a job, %5.2f us each\n", in_flight,
              static_cast<double>(ProcessorNanos() - processor_ns) / kJobs / 1000,
              static_cast<double>(MonotonicNanos() - begun_ns) / kJobs / 1000);
}

int Main() {
  const auto backend = CreateBackend("cpu", {.cpu_threads = 1});
  if (!backend.ok()) return 1;
  EngineOptions options;
  options.ops = kOps;
  options.streams = 1;
  options.slab_payload_bytes = options.slab_answer_bytes = 1 << 20;
  options.max_batch_rows = 4096;
  auto engine = Engine::Create(backend->get(), options, nullptr, [](const absl::Status&) {});
  if (!engine.ok()) return 1;
  for (const int in_flight : {1, 8, 64, 512}) Measure(**engine, in_flight);
  return 0;
}

}  // namespace
}  // namespace logitd::engine

int main() { return logitd::engine::Main(); }

// metrics_bench: what the metrics cost a call.
//
// Every thread makes the updates of one unary call again and again: those of its gauges, its
// phases, its request, and of a batch of one job with one slice. Real calls lie much further apart,
// so the contention here is an upper bound. It also times the text of one scrape.
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "server/engine/metrics.h"
#include "server/ops/ops.h"

namespace logitd::bench {
namespace {

using engine::CallPhase;
using engine::Gauge;
using engine::Metrics;
using Clock = std::chrono::steady_clock;

double Seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

void CountCall(Metrics& metrics, std::string_view op) {
  metrics.Add(Gauge::kOpenCalls, 1);
  metrics.Set(Gauge::kPredictedDelay, 1e-3);
  metrics.CountPhase(CallPhase::kAdmission, 1e-5);
  metrics.CountPhase(CallPhase::kReceive, 1e-4);
  for (int step = 0; step < 3; ++step) {  // the ticket is taken, shrinks and is given back
    metrics.Set(Gauge::kHeldBytes, 1 << 20);
    metrics.Set(Gauge::kWaitingCalls, 0);
  }
  for (int step = 0; step < 3; ++step) {  // the batch opens, runs and ends
    metrics.Set(Gauge::kSlabsInUse, 1);
    metrics.Set(Gauge::kSlabsKept, 0);
    metrics.Set(Gauge::kQueuedJobs, 1);
  }
  metrics.CountSlice(op, /*device=*/0, /*rows=*/1, 1e-4);
  metrics.CountBatch(op, {.copy_ns = 50'000,
                          .queue_ns = 10'000,
                          .h2d_ns = 20'000,
                          .kernel_ns = 30'000,
                          .d2h_ns = 5'000,
                          .batch_rows = 1});
  metrics.CountPhase(CallPhase::kSend, 1e-5);
  metrics.CountRequest(op, absl::StatusCode::kOk, 5e-4);
  metrics.Add(Gauge::kOpenCalls, -1);
}

// Thread time of one call's updates, with so many threads at the same time.
double NanosecondsPerCall(Metrics& metrics, std::string_view op, int threads, double seconds) {
  std::atomic<bool> stop = false;
  std::atomic<int64_t> calls = 0;
  std::vector<std::thread> running;
  running.reserve(threads);
  const Clock::time_point start = Clock::now();
  for (int i = 0; i < threads; ++i) {
    running.emplace_back([&] {
      int64_t mine = 0;
      for (; !stop.load(std::memory_order_relaxed); ++mine) CountCall(metrics, op);
      calls.fetch_add(mine);
    });
  }
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  stop = true;
  for (std::thread& thread : running) thread.join();
  return Seconds(Clock::now() - start) * 1e9 * threads / static_cast<double>(calls.load());
}

int Run(double seconds, const std::string& json_file) {
  const std::vector<std::string_view> names = ops::AllNames();
  Metrics metrics(names);
  const std::string_view op = names.front();
  nlohmann::json results = nlohmann::json::array();
  const int most = static_cast<int>(std::thread::hardware_concurrency());
  for (int threads = 1; threads <= std::max(most, 1); threads *= 2) {
    const double ns = NanosecondsPerCall(metrics, op, threads, seconds);
    std::printf("%2d threads: %7.0f ns for the updates of one call\n", threads, ns);
    results.push_back({{"threads", threads}, {"ns_per_call", ns}});
  }
  const Clock::time_point start = Clock::now();
  const std::string page = prometheus::TextSerializer().Serialize(metrics.page()->Collect());
  const double scrape = Seconds(Clock::now() - start);
  std::printf("scrape: %.2f ms for %zu bytes\n", scrape * 1e3, page.size());
  if (json_file.empty()) return 0;
  std::ofstream file(json_file);
  file << nlohmann::json{{"cpus", most},
                         {"results", results},
                         {"scrape_seconds", scrape},
                         {"scrape_bytes", page.size()}}
              .dump(1)
       << "\n";
  file.close();
  return file.fail() ? 1 : 0;
}

}  // namespace
}  // namespace logitd::bench

int main(int argc, char** argv) {
  CLI::App app("Measures what the metrics cost a call.");
  double seconds = 1;
  std::string json_file;
  app.add_option("--seconds", seconds, "of each number of threads")
      ->check(CLI::Range(0.01, 60.0))
      ->capture_default_str();
  app.add_option("--json", json_file, "file for the results");
  CLI11_PARSE(app, argc, argv);
  return logitd::bench::Run(seconds, json_file);
}

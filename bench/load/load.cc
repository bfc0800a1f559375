#include "bench/load/load.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "client/client.h"
#include "client/tensor_file.h"
#include "formats/half.h"

namespace logitd::bench {
namespace {

using client::Client;
using client::TopKRequest;
using client::TopKResult;
using Clock = std::chrono::steady_clock;

// Requests of an open loop in flight: bounds our own memory when the server falls behind.
constexpr int kMaxOutstanding = 20000;

// Logits of nearly normal distribution with a deviation of 3; the same size gives the same logits.
std::shared_ptr<const std::string> RandomLogits(int64_t elements, v1::DType dtype) {
  auto bytes = std::make_shared<std::string>(elements * client::DTypeSize(dtype), '\0');
  uint64_t state = 0x9e3779b97f4a7c15;
  for (int64_t i = 0; i < elements; ++i) {
    state = state * 6364136223846793005 + 1442695040888963407;
    const uint64_t bits = state ^ state >> 29;
    // Four 16-bit uniforms add up to something near a normal distribution.
    const int sum = static_cast<int>((bits & 0xffff) + (bits >> 16 & 0xffff) +
                                     (bits >> 32 & 0xffff) + (bits >> 48));
    const float value = static_cast<float>(sum - 2 * 65535) * (3.0f / 37837.0f);
    if (dtype == v1::DTYPE_F32) {
      std::memcpy(bytes->data() + 4 * i, &value, 4);
    } else {
      const uint16_t half =
          dtype == v1::DTYPE_BF16 ? formats::FloatToBF16(value) : formats::FloatToF16(value);
      std::memcpy(bytes->data() + 2 * i, &half, 2);
    }
  }
  return bytes;
}

int64_t Nanos(Clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

// What one thread, or one connection, saw.
struct Recorder {
  void Record(const absl::StatusOr<TopKResult>& result, Clock::time_point from,
              Clock::time_point now) {
    if (!result.ok()) {
      ++errors[absl::StatusCodeToString(result.status().code())];
      return;
    }
    retries += result->attempts - 1;
    samples.push_back({Nanos(now - from), absl::ToInt64Nanoseconds(result->round_trip),
                       result->answer.timings()});
  }

  std::vector<Sample> samples;
  std::map<std::string, int64_t> errors;
  int64_t retries = 0;
};

struct Window {
  Clock::time_point begin;
  Clock::time_point end;
  bool Holds(Clock::time_point t) const { return t >= begin && t < end; }
};

void ClosedLoop(const Scenario& scenario, const TopKRequest& request,
                std::vector<std::unique_ptr<Client>>& clients, const Window& window,
                std::vector<Recorder>& recorders) {
  const size_t count = clients.size() * scenario.in_flight;
  recorders.resize(count);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      Client& client = *clients[i % clients.size()];
      Recorder recorder;
      recorder.samples.reserve(1 << 12);
      for (Clock::time_point start = Clock::now(); start < window.end; start = Clock::now()) {
        const absl::StatusOr<TopKResult> result = client.TopK(request);
        const Clock::time_point now = Clock::now();
        if (window.Holds(now)) recorder.Record(result, start, now);
        if (!result.ok() && !scenario.retry) {
          // A refusal costs the server little: without a pause the client measures itself.
          absl::SleepFor(absl::Milliseconds(1));
        }
      }
      recorders[i] = std::move(recorder);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void OpenLoop(const Scenario& scenario, const TopKRequest& request,
              std::vector<std::unique_ptr<Client>>& clients, const Window& window,
              std::vector<Recorder>& recorders) {
  struct Shard {
    absl::Mutex mutex;
    Recorder recorder;
  };
  std::vector<Shard> shards(clients.size());
  std::atomic<int> outstanding = 0;
  std::mt19937_64 random(20241121);
  std::exponential_distribution<double> gap(scenario.rate);
  int64_t not_sent = 0;
  Clock::time_point due = Clock::now();
  for (size_t i = 0;; ++i) {
    due += std::chrono::nanoseconds(static_cast<int64_t>(gap(random) * 1e9));
    if (due >= window.end) break;
    std::this_thread::sleep_until(due);
    if (outstanding >= kMaxOutstanding) {
      not_sent += window.Holds(due);
      continue;
    }
    ++outstanding;
    Shard& shard = shards[i % shards.size()];
    // Arrivals in the window count, not answers: a server that falls behind answers late.
    const bool counts = window.Holds(due);
    clients[i % clients.size()]->TopKAsync(
        request, [&shard, &outstanding, counts, due](const absl::StatusOr<TopKResult>& result) {
          if (counts) {
            absl::MutexLock lock(&shard.mutex);
            shard.recorder.Record(result, due, Clock::now());
          }
          --outstanding;
        });
  }
  while (outstanding > 0) absl::SleepFor(absl::Milliseconds(1));  // each has its deadline
  for (Shard& shard : shards) {
    absl::MutexLock lock(&shard.mutex);
    recorders.push_back(std::move(shard.recorder));
  }
  if (not_sent > 0) recorders[0].errors["NOT_SENT"] += not_sent;
}

// VmHWM of a process, in bytes; 0 where it cannot be read.
int64_t PeakResidentBytes(int pid) {
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  std::string line;
  while (std::getline(status, line)) {
    absl::string_view rest = line;
    if (!absl::ConsumePrefix(&rest, "VmHWM:") || !absl::ConsumeSuffix(&rest, " kB")) continue;
    int64_t kib = 0;
    if (absl::SimpleAtoi(rest, &kib)) return kib * 1024;
  }
  return 0;
}

// Resets VmHWM. Where the kernel refuses, the peak is that of the server's whole life.
void ResetPeak(int pid) { std::ofstream(absl::StrCat("/proc/", pid, "/clear_refs")) << 5; }

}  // namespace

int64_t Scenario::payload_bytes() const { return rows * vocab * client::DTypeSize(dtype); }

int64_t Percentile(std::vector<int64_t>& values, double p) {
  if (values.empty()) return 0;
  const size_t rank = static_cast<size_t>(std::ceil(p * static_cast<double>(values.size())));
  const size_t index = std::min(values.size(), std::max<size_t>(rank, 1)) - 1;
  std::nth_element(values.begin(), values.begin() + index, values.end());
  return values[index];
}

absl::StatusOr<Measured> RunScenario(const Scenario& scenario, const client::ClientOptions& target,
                                     int server_pid) {
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < scenario.connections; ++i) {
    client::ClientOptions options = target;
    options.deadline = scenario.deadline;
    options.priority = scenario.priority;
    options.state_sizes = scenario.state_sizes;
    options.retry.max_attempts = scenario.retry ? 1'000'000 : 1;
    absl::StatusOr<std::unique_ptr<Client>> client = Client::Create(options);
    if (!client.ok()) return client.status();
    // Connects: the measurement does not include a cold connection.
    if (absl::StatusOr<v1::GetInfoResponse> info = (*client)->Info(); !info.ok()) {
      return info.status();
    }
    clients.push_back(*std::move(client));
  }
  const std::shared_ptr<const std::string> logits =
      RandomLogits(scenario.rows * scenario.vocab, scenario.dtype);
  TopKRequest request = {.dtype = scenario.dtype,
                         .rows = scenario.rows,
                         .vocab = scenario.vocab,
                         .logits = {*logits},
                         .owner = logits};
  request.params.add_k(scenario.k);
  Measured measured = {.scenario = scenario, .seconds = absl::ToDoubleSeconds(scenario.duration)};
  if (server_pid != 0) ResetPeak(server_pid);
  Window window;
  window.begin = Clock::now() + absl::ToChronoNanoseconds(scenario.warmup);
  window.end = window.begin + absl::ToChronoNanoseconds(scenario.duration);
  std::vector<Recorder> recorders;
  if (scenario.rate > 0) {
    OpenLoop(scenario, request, clients, window, recorders);
  } else {
    ClosedLoop(scenario, request, clients, window, recorders);
  }
  if (server_pid != 0) measured.server_peak_bytes = PeakResidentBytes(server_pid);
  for (Recorder& recorder : recorders) {
    measured.samples.insert(measured.samples.end(), recorder.samples.begin(),
                            recorder.samples.end());
    for (const auto& [code, count] : recorder.errors) measured.errors[code] += count;
    measured.retries += recorder.retries;
  }
  return measured;
}

}  // namespace logitd::bench

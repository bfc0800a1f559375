#include "bench/load/loops.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <queue>
#include <random>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"

namespace logitd::bench {
namespace {

using client::Client;

// Requests of an open loop in flight: bounds our own memory when the server falls behind.
constexpr int kMaxOutstanding = 20000;

int64_t Nanos(Clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

// Draws parts of the mix by weight. Not thread-safe.
class Choice {
 public:
  Choice(const Scenario& scenario, uint64_t seed) : random_(seed) {
    std::vector<double> weights;
    for (const MixPart& part : scenario.mix) weights.push_back(part.weight);
    part_ = std::discrete_distribution<int>(weights.begin(), weights.end());
  }
  int Next() { return part_(random_); }

 private:
  std::mt19937_64 random_;
  std::discrete_distribution<int> part_;
};

}  // namespace

void Recorder::Record(const absl::StatusOr<Answered>& result, int part, Clock::time_point from,
                      int64_t late_ns, Clock::time_point now) {
  if (!result.ok()) {
    ++errors[absl::StatusCodeToString(result.status().code())];
    return;
  }
  retries += result->attempts - 1;
  samples.push_back({Nanos(now - from), absl::ToInt64Nanoseconds(result->round_trip),
                     result->timings, late_ns, part});
}

std::vector<Recorder> ClosedLoop(const Scenario& scenario, const Calls& calls,
                                 const std::vector<std::unique_ptr<Client>>& clients,
                                 const Window& window) {
  const size_t count = clients.size() * scenario.in_flight;
  std::vector<Recorder> recorders(count);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      Client& client = *clients[i % clients.size()];
      Choice choice(scenario, i);
      Recorder recorder;
      recorder.samples.reserve(1 << 12);
      for (Clock::time_point start = Clock::now(); start < window.end; start = Clock::now()) {
        const int part = choice.Next();
        const absl::StatusOr<Answered> result = calls[part]->Run(client);
        const Clock::time_point now = Clock::now();
        if (window.Holds(now)) recorder.Record(result, part, start, /*late_ns=*/0, now);
        if (!result.ok() && !scenario.retry) {
          // A refusal costs the server little: without a pause the client measures itself.
          absl::SleepFor(absl::Milliseconds(1));
        }
      }
      recorders[i] = std::move(recorder);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return recorders;
}

namespace {

// The requests of one connection in an open loop. Its methods run on one thread, except the
// callbacks of calls.
class Arrivals {
 public:
  Arrivals(const Scenario& scenario, const Calls& calls, Client* client, const Window& window,
           uint64_t seed, std::atomic<int>* outstanding)
      : calls_(calls),
        client_(*client),
        window_(window),
        choice_(scenario, seed),
        random_(~seed),
        gap_(scenario.rate / scenario.connections),
        outstanding_(*outstanding),
        due_(Clock::now()) {
    Advance();
  }

  Clock::time_point due() const { return due_; }

  // Sends the request that is due, without waiting for its answer.
  void Send() {
    const Clock::time_point due = due_;
    Advance();
    const bool counts = window_.Holds(due);
    if (outstanding_ >= kMaxOutstanding) {
      not_sent_ += counts;
      return;
    }
    ++outstanding_;
    const int part = choice_.Next();
    const int64_t late_ns = Nanos(Clock::now() - due);
    calls_[part]->RunAsync(
        client_, [this, counts, due, late_ns, part](const absl::StatusOr<Answered>& result) {
          if (counts) {
            absl::MutexLock lock(&mutex_);
            recorder_.Record(result, part, due, late_ns, Clock::now());
          }
          --outstanding_;
        });
  }

  // When no call is outstanding.
  Recorder Take() {
    absl::MutexLock lock(&mutex_);
    if (not_sent_ > 0) recorder_.errors["NOT_SENT"] += not_sent_;
    return std::move(recorder_);
  }

 private:
  void Advance() { due_ += std::chrono::nanoseconds(static_cast<int64_t>(gap_(random_) * 1e9)); }

  const Calls& calls_;
  Client& client_;
  const Window& window_;
  Choice choice_;
  std::mt19937_64 random_;
  std::exponential_distribution<double> gap_;
  std::atomic<int>& outstanding_;
  Clock::time_point due_;
  int64_t not_sent_ = 0;
  absl::Mutex mutex_;
  Recorder recorder_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::vector<Recorder> OpenLoop(const Scenario& scenario, const Calls& calls,
                               const std::vector<std::unique_ptr<Client>>& clients,
                               const Window& window) {
  std::atomic<int> outstanding = 0;
  std::vector<std::unique_ptr<Arrivals>> arrivals;
  for (size_t i = 0; i < clients.size(); ++i) {
    arrivals.push_back(std::make_unique<Arrivals>(scenario, calls, clients[i].get(), window,
                                                  /*seed=*/20241121 + i, &outstanding));
  }
  // A thread sends for some of the connections: always the request that is due first.
  const size_t senders =
      std::min<size_t>(clients.size(), std::max(1u, std::thread::hardware_concurrency()));
  std::vector<std::thread> threads;
  for (size_t t = 0; t < senders; ++t) {
    threads.emplace_back([&, t] {
      const auto later = [](const Arrivals* a, const Arrivals* b) { return a->due() > b->due(); };
      std::priority_queue<Arrivals*, std::vector<Arrivals*>, decltype(later)> next(later);
      for (size_t i = t; i < arrivals.size(); i += senders) next.push(arrivals[i].get());
      while (next.top()->due() < window.end) {
        Arrivals* const first = next.top();
        next.pop();
        std::this_thread::sleep_until(first->due());
        first->Send();
        next.push(first);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  while (outstanding > 0) absl::SleepFor(absl::Milliseconds(1));  // each has its deadline
  std::vector<Recorder> recorders;
  for (const auto& connection : arrivals) recorders.push_back(connection->Take());
  return recorders;
}

}  // namespace logitd::bench

// How calls are sent: in a closed loop each caller waits for its answer, in an open loop calls come
// when they are due.
#ifndef LOGITD_BENCH_LOAD_LOOPS_H_
#define LOGITD_BENCH_LOAD_LOOPS_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/load/calls.h"
#include "bench/load/load.h"
#include "client/client.h"

namespace logitd::bench {

using Clock = std::chrono::steady_clock;

// What one thread, or one connection, saw.
struct Recorder {
  void Record(const absl::StatusOr<Answered>& result, int part, Clock::time_point from,
              int64_t late_ns, Clock::time_point now);

  std::vector<Sample> samples;
  std::map<std::string, int64_t> errors;
  int64_t retries = 0;
};

// When what is seen counts.
struct Window {
  Clock::time_point begin;
  Clock::time_point end;
  bool Holds(Clock::time_point t) const { return t >= begin && t < end; }
};

// Both run until the window's end, with a call of `calls` for each part of the mix, and return what
// was seen. In a closed loop answers in the window count, in an open loop arrivals: a server that
// falls behind answers late.
std::vector<Recorder> ClosedLoop(const Scenario& scenario, const Calls& calls,
                                 const std::vector<std::unique_ptr<client::Client>>& clients,
                                 const Window& window);
std::vector<Recorder> OpenLoop(const Scenario& scenario, const Calls& calls,
                               const std::vector<std::unique_ptr<client::Client>>& clients,
                               const Window& window);

}  // namespace logitd::bench

#endif  // LOGITD_BENCH_LOAD_LOOPS_H_

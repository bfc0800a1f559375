// The calls of a scenario, ready to be sent, by every way there is: rows that are sent, that lie in
// leased memory, through a ring or through a stream.
#ifndef LOGITD_BENCH_LOAD_CALLS_H_
#define LOGITD_BENCH_LOAD_CALLS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "bench/load/load.h"
#include "client/client.h"
#include "logitd/v1/types.pb.h"

namespace logitd::bench {

// An answer, without what it says.
struct Answered {
  absl::Duration round_trip;
  int attempts;
  v1::Timings timings;
};

// One part of the mix, ready to be sent. Thread-safe.
class Call {
 public:
  virtual ~Call() = default;
  virtual int64_t payload_bytes() const = 0;
  virtual absl::StatusOr<Answered> Run(client::Client& client) const = 0;
  // Calls of some kinds cannot; see CheckScenario.
  virtual void RunAsync(client::Client& client,
                        std::function<void(const absl::StatusOr<Answered>&)> done) const {
    done(absl::UnimplementedError("a call that is not asynchronous"));
  }
};
using Calls = std::vector<std::unique_ptr<Call>>;

// One part of the mix. `head` is null for logits. Errors: the server gives no memory, where the
// scenario has rows in it.
absl::StatusOr<std::unique_ptr<Call>> MakeCall(const Scenario& scenario, Op op,
                                               const v1::Head* head);

}  // namespace logitd::bench

#endif  // LOGITD_BENCH_LOAD_CALLS_H_

// The load generator. A scenario is one shape of request, sent in one way for some seconds.
#ifndef LOGITD_BENCH_LOAD_LOAD_H_
#define LOGITD_BENCH_LOAD_LOAD_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/arena.h"
#include "client/options.h"
#include "logitd/v1/types.pb.h"

namespace logitd::bench {

enum class Op { kTopK, kSample, kScore, kSoftmax };

// One kind of call in a mix.
struct MixPart {
  Op op = Op::kTopK;
  bool hidden = false;  // hidden states for Scenario::head in place of logits
  double weight = 1;    // of all calls, relative to the other parts
};
std::string NameOf(const MixPart& part);  // "topk", "hidden_sample"

// "topk=3,sample=1,hidden_score" with weights of 1 where they are missing. INVALID_ARGUMENT: what
// it got, what is allowed.
absl::StatusOr<std::vector<MixPart>> ParseMix(const std::string& text);

struct Scenario {
  std::string name;
  std::vector<MixPart> mix = {MixPart{}};  // each call is one of them, drawn by weight
  std::string head;  // of parts with hidden states, which have its size and type
  int64_t rows = 1;
  int64_t vocab = 131072;
  int k = 64;
  v1::DType dtype = v1::DTYPE_F32;
  int connections = 1;
  // Closed loop (rate 0): every connection keeps this many requests in flight. Open loop: not used.
  int in_flight = 1;
  // Open loop: requests per second over all connections. Every connection has its own share of them
  // with its own exponential gaps, sent whether or not earlier ones were answered. A latency counts
  // from the moment the request was due, not from when it was sent, so that a stalled server does
  // not hide the requests that it delayed (coordinated omission).
  double rate = 0;
  // Closed loop: come back after the server's delay when refused; the latency then includes the
  // waits. Otherwise a refusal is an error like any other.
  bool retry = false;
  // Where the server leases memory ("unix:PATH"): rows lie there and are not sent. Empty: sent.
  // The answers of softmax go there too.
  std::string arena;
  client::ArenaKind arena_kind = client::ArenaKind::kHost;
  // Calls go through rings of leased memory, a ring for each call in flight. With `arena`, in a
  // closed loop.
  bool ring = false;
  // How long a ring's caller looks for its answer before it sleeps. With more callers than cores,
  // those that look take time from those that work.
  absl::Duration ring_spin = absl::Milliseconds(1);
  // Samples go through SampleStream, a stream for each call in flight, without deadlines. In a
  // closed loop.
  bool stream = false;
  client::Priority priority = client::Priority::kInteractive;
  bool state_sizes = true;  // see client::ClientOptions
  bool throttle = true;     // likewise
  absl::Duration warmup = absl::Seconds(1);
  absl::Duration duration = absl::Seconds(5);
  absl::Duration deadline =
      absl::Seconds(30);  // of one request; bounds how long a scenario overruns
};

// One answered request.
struct Sample {
  int64_t latency_ns;     // from the start, or in an open loop from when it was due
  int64_t round_trip_ns;  // of the last attempt
  v1::Timings timings;
  int64_t late_ns;  // open loop: how much later than due it was sent, by our own fault
  int part;         // of the mix
};

struct Measured {
  Scenario scenario;
  double seconds = 0;                     // the window in which answers counted
  std::vector<int64_t> part_bytes;        // payload of a call, by part of the mix
  std::vector<Sample> samples;            // answers OK inside the window, in no order
  std::map<std::string, int64_t> errors;  // by status code; NOT_SENT: too many were in flight
  int64_t retries = 0;
  int64_t server_peak_bytes = 0;  // resident, during the scenario; 0: not known
};

// Runs one scenario against the server of `target`. `server_pid` (0: not known) is the server's
// process on this machine, whose peak of resident memory is read. Fails only for options that
// cannot work; a failed call is a count in `errors`.
absl::StatusOr<Measured> RunScenario(const Scenario& scenario, const client::ClientOptions& target,
                                     int server_pid);

// Exact: the sample at rank ceil(p * n) of the sorted values, p in (0, 1]. Not HdrHistogram: Debian
// 12 has no package of its C library, and a run records a few million values at most.
int64_t Percentile(std::vector<int64_t>& values, double p);

}  // namespace logitd::bench

#endif  // LOGITD_BENCH_LOAD_LOAD_H_

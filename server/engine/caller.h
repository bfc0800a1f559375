// Who sent a call, as fairness sees it.
#ifndef LOGITD_SERVER_ENGINE_CALLER_H_
#define LOGITD_SERVER_ENGINE_CALLER_H_

#include <cstdint>

namespace logitd::engine {

// Work of kBatch runs when no work of kInteractive waits.
enum class Priority : uint8_t { kInteractive, kBatch };

// How a caller showed who it is.
enum class Proof : uint8_t { kNone, kToken, kCertificate, kUser };

struct Caller {
  uint64_t id = 0;    // equal ids share one share of memory and time; an identity or a connection
  double weight = 1;  // of that share, > 0
  Priority priority = Priority::kInteractive;
  int64_t max_held_bytes = 0;  // room that it may hold and wait for; 0: no limit of its own
  Proof proof = Proof::kNone;  // for the metrics
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_CALLER_H_

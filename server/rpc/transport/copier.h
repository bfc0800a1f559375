// The one copy of a payload: out of the message's slices, into its rows of a slab.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_COPIER_H_
#define LOGITD_SERVER_RPC_TRANSPORT_COPIER_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc {

// Rows as they lie in a message, one after another.
struct Payload {
  ByteRange range;
  int64_t rows = 0;
  size_t row_bytes = 0;
};

// Copies large payloads with several threads: one core alone copies cold memory at 6 to 10 GB/s,
// which behind a receive at 3.4 GB/s would cost a 64-MiB request a third of its rate. Small ones
// are copied by the caller. Helpers take what the caller has not got to yet; when they are busy, or
// there are none, the caller does it all. Thread-safe.
class Copier {
 public:
  // As many helpers as the machine can spare: none below four hardware threads.
  Copier();
  explicit Copier(int helpers);
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Row r to dst + r * row_stride; bytes between rows are left alone. The payload must lie within
  // `pieces`.
  void Copy(Pieces pieces, const Payload& payload, std::byte* dst, size_t row_stride);

 private:
  struct Task;

  void Help();

  absl::Mutex mutex_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::list<Task*> tasks_ ABSL_GUARDED_BY(mutex_);  // with parts left to take
  std::vector<std::thread> helpers_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_COPIER_H_

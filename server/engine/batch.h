// A batch: rows of jobs of one key, gathered in one slab.
//
// A slab holds, from its start: the payload, row r at r * row_stride; from the 16-byte border after
// the last row that runs, the other inputs, so that one upload covers all; from a fixed offset, the
// outputs, so that one download covers them. Arrays are laid out when the batch runs, one after
// another, each on a 16-byte border. The first output of a job that runs in place takes the place of
// the payload.
#ifndef LOGITD_SERVER_ENGINE_BATCH_H_
#define LOGITD_SERVER_ENGINE_BATCH_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/backend.h"
#include "server/engine/engine.h"
#include "server/engine/job.h"

namespace logitd::engine {

inline constexpr size_t kAlignment = 16;  // of rows and arrays

constexpr size_t AlignUp(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

inline size_t RowBytes(const BatchKey& key) {
  return static_cast<size_t>(key.row_elements) * SizeOf(key.dtype);
}
inline size_t RowStride(const BatchKey& key) {
  return key.op->exclusive_batch ? RowBytes(key) : AlignUp(RowBytes(key));
}

// Lays `arrays` out from `offset` on, each on a 16-byte border. Returns where they end.
size_t LayOut(absl::Span<const Array> arrays, const AxisCounts& counts, size_t offset,
              size_t* offsets);

// Where the regions of a slab lie. The limits of EngineOptions count what clients send and get; what
// the borders take comes on top.
struct SlabLayout {
  explicit SlabLayout(const EngineOptions& options);
  size_t answer_offset;
  size_t bytes;
};

// See Engine::CheckFits.
absl::Status CheckFits(const JobSpec& spec, const EngineOptions& options);

// A job's rows in a batch.
struct Slot {
  Job* job = nullptr;  // null: dropped; the rows are skipped
  int64_t first_row = 0;
  int64_t rows = 0;
};

struct KeyQueue;

// Guarded by the batcher's lock, except while kRunning: then it belongs to the stream that took it,
// which changes only its slots.
struct Batch {
  enum class State : uint8_t {
    kFree,
    kOpen,    // jobs of its key may join
    kSealed,  // complete; ready to run when `copying` is 0
    kRunning,
    kKept,  // ran; its job still keeps the answer
  };
  Slab slab;
  State state = State::kFree;
  BatchKey key;
  KeyQueue* queue = nullptr;
  uint64_t sequence = 0;  // of its oldest job
  int64_t opened_ns = 0;
  int64_t taken_ns = 0;  // by the stream that runs it
  int64_t rows = 0;      // reserved, by dropped jobs too; so are the next two
  int64_t payload_bytes = 0;
  int64_t answer_bytes = 0;
  int copying = 0;    // payload copies not finished, or not begun
  int copied = 0;     // payload copies finished
  int live = 0;       // slots with a job
  bool kept = false;  // by the job, from Keep to TakeBack
  std::vector<Slot> slots;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_BATCH_H_

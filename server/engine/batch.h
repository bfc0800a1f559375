// A batch: rows of jobs of one key, gathered in one slab.
//
// A slab holds, from its start: the payload, row r at r * row_stride; from the 16-byte border after
// the last row that runs, the other inputs, so that one upload covers all; from a fixed offset, the
// outputs, so that one download covers them. Arrays are laid out when the batch runs, one after
// another, each on a 16-byte border. The first output of a job that runs in place takes the place
// of the payload.
#ifndef LOGITD_SERVER_ENGINE_BATCH_H_
#define LOGITD_SERVER_ENGINE_BATCH_H_

#include <array>
#include <atomic>
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
  const bool padded = !key.op->exclusive_batch || key.head != nullptr;
  return padded ? AlignUp(RowBytes(key)) : RowBytes(key);
}

// Lays `arrays` out from `offset` on, each on a 16-byte border. Returns where they end.
size_t LayOut(absl::Span<const Array> arrays, const AxisCounts& counts, size_t offset,
              size_t* offsets);

// Where the regions of a slab lie. The limits of EngineOptions count what clients send and get;
// what the borders take comes on top.
struct SlabLayout {
  explicit SlabLayout(const EngineOptions& options);
  size_t answer_offset;
  size_t bytes;
};

// See Engine::CheckFits.
absl::Status CheckFits(const JobSpec& spec, const EngineOptions& options);

// A job's rows in a batch.
struct Slot {
  Job* job = nullptr;  // null: it has ended
  int64_t first_row = 0;
  int64_t rows = 0;
  Caller caller;
  double cost_ns = 0;    // as estimated when the job was submitted
  bool has_run = false;  // all of its rows
};

// How far a batch has run, and what its stream needs from one slice to the next.
struct Progress {
  bool begun = false;  // payload and inputs are on the device; the members up to `outputs` are set
  bool done = false;   // no slice is left, and Done of all jobs has run
  size_t row_stride = 0;
  AxisCounts counts = {};
  int32_t max_row_entries = 0;
  uint32_t wanted = 0;
  bool in_place = false;  // this and the next: only of an exclusive op
  const ExclusiveCall* call = nullptr;
  std::array<size_t, kMaxArrays> inputs = {};
  size_t upload_end = 0;
  std::array<size_t, kMaxArrays> outputs = {};
  size_t answer_end = 0;

  int64_t next_row = 0;  // the first row that has not run
  int64_t rows_run = 0;
  double row_ns = 0;       // on the device, as the last slice measured it; 0: none has run
  double kind_row_ns = 0;  // the estimate for its kind, with all slices so far
  JobTimes times;          // of all slices so far

  // The work of the last slice.
  int64_t slice_rows = 0;
  int64_t slice_ns = 0;
  int finished = 0;  // jobs whose Done it ran
};

struct KeyQueue;

// Guarded by the engine's lock, except while kRunning: then `slots`, `row_data` and `progress`
// belong to the stream that took it.
struct Batch {
  enum class State : uint8_t {
    kFree,
    kRunning,  // a slice
    kPaused,   // between two slices, and ready for the next
    kKept,     // ran; its job still keeps the answer
  };

  // Takes the batch for jobs of `queue`; it has none yet.
  void Begin(KeyQueue* of);
  // Gives the job, which waits no longer, its rows.
  void Add(Job* job);

  Slab slab;       // its own for ever, as is the next
  int device = 0;  // that runs it
  State state = State::kFree;
  KeyQueue* queue = nullptr;  // its jobs come from it
  BatchKey key;
  bool sharded = false;  // IsSharded(key); also where the head is gone
  Urgency urgency;       // the least of its jobs; later slices start later
  double weight = 0;     // sum over its callers
  bool whole = false;    // runs in one slice; true if it has several jobs
  int64_t taken_ns = 0;  // by the stream that ran its first slice
  absl::Time last_deadline = absl::InfinitePast();  // of its jobs
  int64_t rows = 0;
  int64_t payload_bytes = 0;
  int64_t answer_bytes = 0;
  int live = 0;       // slots with a job
  int gone = 0;       // of these, those whose caller has left while it ran
  bool kept = false;  // the job keeps the answer
  bool slow = false;  // while kRunning: its slice may take longer than kSlowSlice
  // While kRunning: every job's caller has left, or is late. Written under the lock, read by the
  // stream.
  std::atomic<bool> abandoned = false;
  std::vector<Slot> slots;
  std::vector<const void*> row_data;  // of all rows, where the op reads them apart; else empty
  Progress progress;
};

// True: a job of the batch's queue fits beside those it has.
bool Fits(const Batch& batch, const JobSpec& spec, const EngineOptions& options);

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_BATCH_H_

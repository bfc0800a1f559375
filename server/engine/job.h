// A job, which the engine runs: some rows of one op.
#ifndef LOGITD_SERVER_ENGINE_JOB_H_
#define LOGITD_SERVER_ENGINE_JOB_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/types.h"
#include "server/engine/caller.h"
#include "server/engine/job_place.h"
#include "server/engine/op.h"

namespace logitd::engine {

class Head;

inline constexpr int kAnyDevice = -1;

// Jobs with equal keys may share a batch.
struct BatchKey {
  const OpTraits* op = nullptr;
  DType dtype = DType::kF32;
  int64_t row_elements = 0;    // vocab, for ops on logits; hidden, for ops on hidden states
  const Head* head = nullptr;  // of ops on hidden states; the job keeps it until Done
  const Head* reference_head = nullptr;  // of an op's second hidden states, likewise
  int device = kAnyDevice;               // the one that can read the job's rows, as Devices counts
  friend bool operator==(const BatchKey&, const BatchKey&) = default;
  template <typename H>
  friend H AbslHashValue(H hash, const BatchKey& key) {
    return H::combine(std::move(hash), key.op, key.dtype, key.row_elements, key.head,
                      key.reference_head, key.device);
  }
};

// True: batches of this key run on all devices together.
bool IsSharded(const BatchKey& key);

// The bytes of a batch that a job takes.
struct JobSize {
  int64_t payload_bytes = 0;  // with the lists: input arrays of other axes than the rows
  int64_t answer_bytes = 0;
};

struct JobSpec {
  BatchKey key;
  AxisCounts counts = {};  // elements on every axis, e.g. rows, and the sum of k
  // Hints for the choice of a kernel, from all rows of the job: the most entries that a row asks
  // for (e.g. the largest k), and bits of the op's own for what any row wants.
  int32_t max_row_entries = 0;
  uint32_t wanted = 0;
  absl::Time deadline = absl::InfiniteFuture();
  Caller caller;
  // The rows may not be cut into slices: they depend on each other, or an answer sums over them.
  bool whole = false;
  // Only where the op is exclusive. `in_place`: the first output is written over the payload, and
  // costs no bytes of answer. `call`: valid until Done.
  bool in_place = false;
  const ExclusiveCall* call = nullptr;
  JobSize size;  // SizeOfJob of the above: computed once, when the rest is filled

  int64_t rows() const { return counts[kRowAxis]; }
};

// Both saturate at INT64_MAX; a negative count is too much.
JobSize SizeOfJob(const JobSpec& spec);

struct JobTimes {
  int64_t copy_ns = 0;
  int64_t queue_ns = 0;  // until the first slice
  int64_t h2d_ns = 0;    // this and the next two: of all slices
  int64_t kernel_ns = 0;
  int64_t d2h_ns = 0;
  int32_t batch_rows = 0;
};

// The answer of a job that succeeded.
struct JobAnswer {
  // The job's own slice of each output array, in host memory. Valid until Done returns, or for as
  // long as a copy of `keep` lives.
  absl::Span<const absl::Span<const std::byte>> outputs;
  // Keeps the slab of an exclusive job from the next batch: for answers that are large enough to be
  // sent from the slab. Null where too many slabs are kept already, so that peers that are slow to
  // take their answers do not stop the others. May be dropped on any thread, under any lock except
  // the engine's own; the engine waits some seconds for it when it is destroyed, then leaves it its
  // slab.
  std::shared_ptr<const void> keep;

  // One of `outputs`.
  template <typename T>
  absl::Span<const T> Out(Output<T> array) const {
    const absl::Span<const std::byte> bytes = outputs[array.index];
    return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
};

// The place of rows that no thread copies to the slab: memory of the device that runs the batch, or
// host memory, which is pinned unless the device is the host. The job keeps it until Done.
struct RowsPlace {
  const std::byte* data = nullptr;  // null: the rows are in the slab
  size_t row_stride = 0;            // bytes
  size_t row_bytes = 0;
  size_t slab_stride = 0;  // bytes between rows of an input in the slab; not of the payload
  int64_t rows = 0;
  bool on_device = false;
  // Nobody writes them before Done. The host's ops may read such rows there, and others see each
  // byte once.
  bool steady = false;
};

// One admitted request. Implemented above the engine; the engine calls it from its own threads, or
// from inside Submit or Cancel. Submitted once.
class Job {
 public:
  virtual ~Job() = default;

  // Constant from Submit on.
  virtual const JobSpec& spec() const = 0;

  // Copies the payload to `dst`, row r to dst + r * row_stride, unless it has a place. Once, when
  // its batch begins, before WriteInputs. A job of an exclusive op also fills inputs that have no
  // place: they lie where LayOut puts them after the payload.
  virtual void CopyRowsTo(std::byte* dst, size_t row_stride) = 0;

  // Where the payload lies, then inputs 0, 1, ... of an exclusive op, as far as there are any. What
  // has a place is neither written by CopyRowsTo nor by WriteInputs: the batch's first slice copies
  // it, and whoever writes it meanwhile changes no rows but these. Constant from Submit on.
  virtual absl::Span<const RowsPlace> places() const { return {}; }

  // Of an exclusive op: where its first output goes, in memory of the device that runs the batch or
  // in pinned host memory, which the job keeps until Done. The first of JobAnswer::outputs is then
  // unspecified. After an error, or where the caller has left, something may be written there.
  // Null: the job gets it in JobAnswer. Constant from Submit on.
  virtual std::byte* answer_place() const { return nullptr; }

  // Writes the job's own slice of each input array, at inputs[i]. In the batch the job's elements
  // start at first[axis] on every axis; places in arrays count from there. At most once.
  virtual void WriteInputs(absl::Span<std::byte* const> inputs, const AxisCounts& first) = 0;

  // Exactly once, whatever happens. Where `status` is not OK, `answer` is empty. No lock of the
  // engine is held.
  virtual void Done(const absl::Status& status, const JobAnswer& answer, const JobTimes& times) = 0;

 private:
  friend class Scheduler;
  friend class WaitingJobs;
  friend class RunningBatches;
  friend struct Batch;
  friend struct JobList;
  friend struct QueueLinks;
  friend struct DeadlineLinks;
  using Place = JobPlace;
  Place place_;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_JOB_H_

// A job, which the engine runs: some rows of one op. The engine knows sizes and times, never what
// an op means.
#ifndef LOGITD_SERVER_ENGINE_JOB_H_
#define LOGITD_SERVER_ENGINE_JOB_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/types.h"
#include "server/engine/caller.h"
#include "server/engine/fair_queue.h"

namespace logitd::engine {

struct Batch;
struct KeyQueue;
class Head;

// An axis is what an op's arrays have elements for: axis 0 is the rows; the others (answers, ids of
// lists, words of masks, ...) are the op's own.
inline constexpr size_t kRowAxis = 0;
inline constexpr size_t kMaxAxes = 10;
inline constexpr size_t kMaxArrays = 16;  // inputs of an op, or outputs

// A number for each axis: of elements, or of the first element. Axes that an op does not have are
// 0.
using AxisCounts = std::array<int64_t, kMaxAxes>;

// One array of an op: so many bytes for each element of an axis.
struct Array {
  size_t axis;
  size_t bytes;
};

// An array with a T for each element of `axis`: number `index` of OpTraits::inputs, or of
// OpTraits::outputs.
template <typename T>
struct Input {
  size_t index;
  size_t axis;
};
template <typename T>
struct Output {
  size_t index;
  size_t axis;
};

// The OpTraits::inputs, or outputs, of typed arrays, which must come in the order of their index.
template <template <typename> typename Kind, typename... T>
consteval std::array<Array, sizeof...(T)> ArraysOf(Kind<T>... typed) {
  static_assert(sizeof...(T) <= kMaxArrays);
  size_t next = 0;
  (([&] {
     if (typed.index != next++ || typed.axis >= kMaxAxes) throw "an index or axis is wrong";
   }()),
   ...);
  return {{{typed.axis, sizeof(T)}...}};
}

// A slice of a batch as an op sees it, in the memory of the backend: some of its rows, often all.
// Row r of the payload starts at payload + r * row_stride. Payload and arrays of kRowAxis start at
// the slice's first row. Arrays of other axes are those of the whole batch.
struct BatchView {
  DType dtype;
  AxisCounts counts;  // rows: of the slice; others: of the batch
  int64_t first_row;  // the slice's first row, counted from the batch's
  int64_t row_elements;
  size_t row_stride;  // bytes: a multiple of 16, or exactly a row where the op is exclusive
  const std::byte* payload;
  const void* const*
      row_data;             // where the payload's rows lie apart: row r is row_data[r]; else null
  int32_t max_row_entries;  // the largest JobSpec::max_row_entries
  uint32_t wanted;          // the bits of every JobSpec::wanted
  absl::Span<std::byte* const> inputs;   // one per OpTraits::inputs, each 16-byte aligned
  absl::Span<std::byte* const> outputs;  // one per OpTraits::outputs, each 16-byte aligned
  const HeadView* head;                  // that of BatchKey::head; null where there is none

  int64_t rows() const { return counts[kRowAxis]; }

  // The payload as a matrix.
  TensorView Payload() const {
    return {.data = payload,
            .dtype = dtype,
            .rows = rows(),
            .cols = row_elements,
            .row_stride = static_cast<int64_t>(row_stride / SizeOf(dtype)),
            .row_data = row_data};
  }

  // An array; null where the batch has no element for it.
  template <typename T>
  const T* In(Input<T> array) const {
    return counts[array.axis] == 0 ? nullptr : reinterpret_cast<const T*>(inputs[array.index]);
  }
  template <typename T>
  T* Out(Output<T> array) const {
    return counts[array.axis] == 0 ? nullptr : reinterpret_cast<T*>(outputs[array.index]);
  }
};

// How an op travels through the engine. One static object per op, compared by address.
struct OpTraits {
  std::string_view name;            // label in metrics and logs
  absl::Span<const Array> inputs;   // besides the payload; a row of zero bytes = skip the row
  absl::Span<const Array> outputs;  // in the order in which the job gets them back
  // Null where the op is exclusive: JobSpec::call has it.
  absl::Status (*enqueue)(Stream& stream, const BatchView& batch) = nullptr;
  // A batch holds one job: for ops whose jobs have more parameters (shapes, masks) than rows can
  // hold, and are large enough to fill a device. Its rows lie without padding, and only bytes bound
  // their number.
  bool exclusive_batch = false;
  // On the host its rows may lie apart, so that it reads them where they came in: for ops on
  // logits, whose rows are long. See TensorView::row_data.
  bool rows_apart = false;
};

// The parameters of a job of an exclusive op as a whole.
class ExclusiveCall {
 public:
  virtual ~ExclusiveCall() = default;

  // As OpTraits::enqueue. Where the rows may be cut, it shifts arrays of axes that follow the rows
  // by BatchView::first_row.
  virtual absl::Status Enqueue(Stream& stream, const BatchView& batch) const = 0;
};

inline constexpr int kAnyDevice = -1;

// Jobs with equal keys may share a batch.
struct BatchKey {
  const OpTraits* op = nullptr;
  DType dtype = DType::kF32;
  int64_t row_elements = 0;    // vocab, for ops on logits; hidden, for ops on hidden states
  const Head* head = nullptr;  // of ops on hidden states; the job keeps it until Done
  int device = kAnyDevice;     // the one that can read the job's rows, as Devices counts
  friend bool operator==(const BatchKey&, const BatchKey&) = default;
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

  // Neighbours in a heap; see fair_queue.h.
  struct HeapLinks {
    Job* child = nullptr;
    Job* next = nullptr;
    Job* previous = nullptr;
  };

  // Where the job is. The engine keeps this here so that a job costs it no allocation and no
  // look-up.
  struct Place {
    enum class State : uint8_t {
      kNew,      // not submitted
      kWaiting,  // in its queue
      kInBatch,  // that has begun
      kDone,     // ended, or about to
    };
    // Written under the engine's lock, except the last step, kDone, which the stream takes before
    // it gives the batch back.
    std::atomic<State> state = State::kNew;
    bool begun = false;  // it was dropped after a slice of its batch
    // Its caller left while its batch ran: it ends after the slice. Written under the lock.
    std::atomic<bool> gone = false;
    absl::Status ending;  // where it ends without its last slice
    KeyQueue* queue = nullptr;
    Batch* batch = nullptr;  // while kInBatch
    size_t slot = 0;         // index in the batch
    Urgency urgency;
    double cost_ns = 0;  // as estimated when it was submitted
    int64_t submitted_ns = 0;
    Job* previous = nullptr;  // neighbours in the one list the job is in
    Job* next = nullptr;
    HeapLinks in_queue;         // while kWaiting
    HeapLinks by_deadline;      // while kWaiting, if it has one
    std::shared_ptr<Job> self;  // keeps the job from Submit to Done
  };
  Place place_;
};

// Jobs linked through Place::previous and next. A job is in one such list at most.
struct JobList {
  void PushBack(Job* job);
  void Remove(Job* job);
  Job* PopFront();
  Job* first = nullptr;
  Job* last = nullptr;
  int64_t size = 0;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_JOB_H_

// What the engine runs: a job is some rows of one op. The engine knows sizes and moments, never the
// op's meaning.
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

namespace logitd::engine {

struct Batch;
class Head;

// What an op's arrays have elements for: axis 0 is the rows, the others (answers, ids of lists,
// words of masks, ...) are the op's own.
inline constexpr size_t kRowAxis = 0;
inline constexpr size_t kMaxAxes = 10;

// A number for each axis: of elements, or of the first element. Axes an op does not have are 0.
using AxisCounts = std::array<int64_t, kMaxAxes>;

// A sealed batch as an op sees it, in the memory of the backend. Row r of the payload starts at
// payload + r * row_stride.
struct BatchView {
  DType dtype;
  AxisCounts counts;  // dropped jobs count on the row axis alone
  int64_t row_elements;
  size_t row_stride;  // bytes, a multiple of 16; of an op that is alone, those of a row
  const std::byte* payload;
  int32_t max_row_entries;               // largest JobSpec::max_row_entries
  absl::Span<std::byte* const> inputs;   // one per OpTraits::inputs, each 16-byte aligned
  absl::Span<std::byte* const> outputs;  // one per OpTraits::outputs, each 16-byte aligned
  const void* call;                      // JobSpec::call where the op is alone, else null
  const HeadView* head;                  // BatchKey::head's, else null

  int64_t rows() const { return counts[kRowAxis]; }
};

// One array of an op: so many bytes for each element of an axis.
struct Array {
  size_t axis;
  size_t bytes;
};

// How an op travels through the engine. One static object per op, compared by address.
struct OpTraits {
  std::string_view name;            // label in metrics and logs
  absl::Span<const Array> inputs;   // beside the payload; those of rows: all zero bytes = skip it
  absl::Span<const Array> outputs;  // in the order the job gets them back
  absl::Status (*enqueue)(Stream& stream, const BatchView& batch);
  // A batch of it is one job: for ops whose calls have more to themselves (shapes, masks) than rows
  // can tell, and are large enough to fill a device. Its rows lie without padding, and bytes alone
  // bound their number.
  bool alone = false;
};

// Jobs with equal keys may share a batch.
struct BatchKey {
  const OpTraits* op = nullptr;
  DType dtype = DType::kF32;
  int64_t row_elements = 0;    // vocab, for ops on logits; hidden, for ops on hidden states
  const Head* head = nullptr;  // of ops on hidden states; the job keeps it until Done
  friend bool operator==(const BatchKey&, const BatchKey&) = default;
};

struct JobSpec {
  BatchKey key;
  AxisCounts counts = {};       // elements on every axis, e.g. rows, and the sum of k
  int32_t max_row_entries = 0;  // e.g. the largest k
  absl::Time deadline = absl::InfiniteFuture();
  // Of an op that is alone. `in_place`: the first output is written over the payload, and costs no
  // bytes of answer. `call`: what `enqueue` needs to know of the job; good until Done.
  bool in_place = false;
  const void* call = nullptr;

  int64_t rows() const { return counts[kRowAxis]; }
};

struct JobTimes {
  int64_t copy_ns = 0;
  int64_t queue_ns = 0;
  int64_t h2d_ns = 0;
  int64_t kernel_ns = 0;
  int64_t d2h_ns = 0;
  int32_t batch_rows = 0;
};

// What a job that went well is given.
struct JobAnswer {
  // The job's own slice of each output array, in host memory. Valid until Done returns, or for as
  // long as a copy of `keep` lives.
  absl::Span<const absl::Span<const std::byte>> outputs;
  // Keeps the slab of a job that was alone in it from the next batch: for answers worth sending
  // from where they lie. Null where too many slabs are kept already, so that those who are slow to
  // take their answers do not stop the others. May be dropped on any thread, under any lock but the
  // engine's own; the engine waits some seconds for it when it is destroyed, then leaves it its
  // slab.
  std::shared_ptr<const void> keep;
};

// One admitted request. Implemented above the engine; the engine calls it from its own threads, or
// from inside Submit or Cancel. Submitted once.
class Job {
 public:
  virtual ~Job() = default;

  // Constant from Submit on.
  virtual const JobSpec& spec() const = 0;

  // Copies the payload to `dst`, row r to dst + r * row_stride. At most once, before WriteInputs.
  // The job may free its copy of the payload afterwards. One that is alone may fill its inputs here
  // too, which lie where LayOut puts them behind the payload.
  virtual void CopyPayload(std::byte* dst, size_t row_stride) = 0;

  // Writes the job's own slice of each input array, at inputs[i]. In the batch the job's elements
  // start at first[axis] on every axis: what it says of places in arrays counts from there. At most
  // once.
  virtual void WriteInputs(absl::Span<std::byte* const> inputs, const AxisCounts& first) = 0;

  // Exactly once, whatever happens. Where `status` is not OK, `answer` is empty. No lock of the
  // engine is held.
  virtual void Done(const absl::Status& status, const JobAnswer& answer, const JobTimes& times) = 0;

 private:
  friend class Batcher;

  // Where the job is: the engine's own note, kept here so that a job costs it no allocation and no
  // look-up.
  struct Place {
    enum class State : uint8_t {
      kNew,      // not submitted
      kPending,  // no slab has room
      kPlaced,   // has rows in a batch; its payload waits for a copy thread
      kCopying,  // a thread is inside CopyPayload
      kCopied,   // in its batch, to run with it
      kDone,     // ended, or about to
    };
    // Written under the batcher's lock, but for the last step, kDone, which the stream takes before
    // it gives the batch back.
    std::atomic<State> state = State::kNew;
    bool dropped = false;  // while kCopying: ends with `why` as soon as the copy returns
    absl::StatusCode why = absl::StatusCode::kOk;
    size_t slot = 0;         // index in the batch
    Batch* batch = nullptr;  // from kPlaced on
    uint64_t sequence = 0;   // order of arrival
    int64_t submitted_ns = 0;
    int64_t copy_ns = 0;
    Job* previous = nullptr;  // neighbours in the one list the job is in
    Job* next = nullptr;
    Job* key_previous = nullptr;  // neighbours among pending jobs of the same key
    Job* key_next = nullptr;
    std::shared_ptr<Job> self;  // keeps the job from Submit to Done
  };
  Place place_;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_JOB_H_

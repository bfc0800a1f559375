// What the engine runs: a job is some rows of one op. The engine knows sizes and moments, never the
// op's meaning.
#ifndef LOGITD_SERVER_ENGINE_JOB_H_
#define LOGITD_SERVER_ENGINE_JOB_H_

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

// A sealed batch as an op sees it, in the memory of the backend. Row r of the payload starts at
// payload + r * row_stride; its parameters at params + r * OpTraits::param_bytes.
struct BatchView {
  DType dtype;
  int64_t rows;
  int64_t row_elements;
  size_t row_stride;  // bytes, a multiple of 16
  const std::byte* payload;
  const std::byte* params;
  int32_t max_entries;                  // largest entry count of any row
  absl::Span<std::byte* const> planes;  // one per OpTraits::planes, each 16-byte aligned
};

// One output array of an op.
struct Plane {
  enum class Per { kRow, kEntry };
  Per per;
  size_t bytes;  // per row, or per entry
};

// How an op travels through the engine. One static object per op, compared by address.
struct OpTraits {
  std::string_view name;           // label in metrics and logs
  size_t param_bytes;              // per row; all zero bytes = skip the row
  absl::Span<const Plane> planes;  // outputs, in the order the job gets them back
  absl::Status (*enqueue)(Stream& stream, const BatchView& batch);
};

// Jobs with equal keys may share a batch.
struct BatchKey {
  const OpTraits* op = nullptr;
  DType dtype = DType::kF32;
  int64_t row_elements = 0;  // vocab, for ops on logits
  friend bool operator==(const BatchKey&, const BatchKey&) = default;
};

struct JobSpec {
  BatchKey key;
  int64_t rows = 0;
  int64_t entries = 0;  // over all rows, e.g. the sum of k
  int32_t max_row_entries = 0;
  absl::Time deadline = absl::InfiniteFuture();
};

struct JobTimes {
  int64_t copy_ns = 0;
  int64_t queue_ns = 0;
  int64_t h2d_ns = 0;
  int64_t kernel_ns = 0;
  int64_t d2h_ns = 0;
  int32_t batch_rows = 0;
};

// One admitted request. Implemented above the engine; the engine calls it from its own threads, or
// from inside Submit or Cancel. Submitted once.
class Job {
 public:
  virtual ~Job() = default;

  // Constant from Submit on.
  virtual const JobSpec& spec() const = 0;

  // Copies the payload to `dst`, row r to dst + r * row_stride. At most once, before WriteParams.
  // The job may free its copy of the payload afterwards.
  virtual void CopyPayload(std::byte* dst, size_t row_stride) = 0;

  // Writes rows * param_bytes at `dst`; the job's entries start at `first_entry` in the batch's
  // entry planes. At most once.
  virtual void WriteParams(std::byte* dst, int64_t first_entry) = 0;

  // Exactly once, whatever happens. OK: `planes` holds the job's own slice of each output plane,
  // host memory valid until Done returns. Otherwise `planes` is empty. No lock of the engine is
  // held.
  virtual void Done(const absl::Status& status,
                    absl::Span<const absl::Span<const std::byte>> planes,
                    const JobTimes& times) = 0;

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

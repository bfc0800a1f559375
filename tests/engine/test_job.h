// A job of the fake device's op that checks its own answer.
#ifndef LOGITD_TESTS_ENGINE_TEST_JOB_H_
#define LOGITD_TESTS_ENGINE_TEST_JOB_H_

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "server/engine/heads.h"
#include "server/engine/job.h"
#include "tests/engine/fake_backend.h"

namespace logitd::engine {

// Thread-safe, but for the hooks, which are set before Submit.
class TestJob final : public Job {
 public:
  struct Shape {
    uint32_t tag = 'a';
    int64_t row_elements = 4;
    int64_t rows = 1;
    int32_t entries_per_row = 1;
    int32_t notes_per_row = 0;
    std::shared_ptr<const Head> head;  // its scale is added to the rows' tags; null: none
    absl::Time deadline = absl::InfiniteFuture();
  };

  explicit TestJob(const Shape& shape) : shape_(shape) {
    spec_.key = {.op = &kDigest,
                 .dtype = DType::kF32,
                 .row_elements = shape.row_elements,
                 .head = shape.head.get()};
    spec_.counts[kDigestRows] = shape.rows;
    spec_.counts[kDigestEntries] = shape.rows * shape.entries_per_row;
    spec_.counts[kDigestNotes] = shape.rows * shape.notes_per_row;
    spec_.max_row_entries = shape.entries_per_row;
    spec_.deadline = shape.deadline;
    spec_.size = SizeOfJob(spec_);
  }

  std::function<void()> before_copy;
  std::function<void(const absl::Status&)> on_done;

  const JobSpec& spec() const override { return spec_; }

  void CopyPayload(std::byte* dst, size_t row_stride) override {
    if (before_copy) before_copy();
    if (copies_++ > 0 || dones_ > 0) misused_ = true;
    for (int64_t r = 0; r < spec_.rows(); ++r) {
      const std::vector<uint32_t> row = Row(r);
      std::memcpy(dst + static_cast<size_t>(r) * row_stride, row.data(), row.size() * 4);
    }
  }

  void WriteInputs(absl::Span<std::byte* const> inputs, const AxisCounts& first) override {
    if (inputs_++ > 0 || copies_ != 1 || dones_ > 0) misused_ = true;
    for (int64_t r = 0; r < spec_.rows(); ++r) {
      const int64_t note = r * shape_.notes_per_row;
      const DigestRow row{.first_entry = first[kDigestEntries] + r * shape_.entries_per_row,
                          .first_note = first[kDigestNotes] + note,
                          .entries = shape_.entries_per_row,
                          .notes = shape_.notes_per_row,
                          .tag = shape_.tag,
                          .unused = 0};
      std::memcpy(inputs[0] + static_cast<size_t>(r) * sizeof(row), &row, sizeof(row));
      for (int64_t n = note; n < note + shape_.notes_per_row; ++n) {
        const uint32_t value = Note(n);
        std::memcpy(inputs[1] + static_cast<size_t>(n) * sizeof(value), &value, sizeof(value));
      }
    }
  }

  void Done(const absl::Status& status, const JobAnswer& answer, const JobTimes& times) override {
    if (dones_++ > 0) misused_ = true;
    if (status.ok() ? !IsRight(answer.outputs) || times.batch_rows < spec_.rows()
                    : !answer.outputs.empty()) {
      misused_ = true;
    }
    if (times.queue_ns < 0 || times.copy_ns < 0) misused_ = true;
    if (on_done) on_done(status);
    std::lock_guard<std::mutex> lock(mutex_);
    status_ = status;
    times_ = times;
    done_.notify_all();
  }

  // Blocks until Done.
  absl::Status Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return status_.has_value(); });
    return *status_;
  }
  // Nothing before Done.
  std::optional<absl::Status> status() {
    std::lock_guard<std::mutex> lock(mutex_);
    return status_;
  }
  JobTimes times() {
    std::lock_guard<std::mutex> lock(mutex_);
    return times_;
  }
  int dones() const { return dones_; }
  // A call of the engine came twice, too late or out of order, or an answer was not this job's.
  bool misused() const { return misused_; }

 private:
  uint32_t Note(int64_t n) const { return shape_.tag * 97 + static_cast<uint32_t>(n) * 40503u; }

  std::vector<uint32_t> Row(int64_t r) const {
    std::vector<uint32_t> row(static_cast<size_t>(spec_.key.row_elements));
    uint32_t x = shape_.tag * 2654435761u + static_cast<uint32_t>(r) * 40503u;
    for (uint32_t& element : row) element = x = x * 1664525u + 1013904223u;
    return row;
  }

  bool IsRight(absl::Span<const absl::Span<const std::byte>> outputs) const {
    const auto rows = static_cast<size_t>(spec_.rows());
    if (outputs.size() != 3 || outputs[0].size() != rows * 8 ||
        outputs[1].size() != static_cast<size_t>(spec_.counts[kDigestEntries]) * 4 ||
        outputs[2].size() != rows * 4) {
      return false;
    }
    for (size_t r = 0; r < rows; ++r) {
      const std::vector<uint32_t> row = Row(static_cast<int64_t>(r));
      const auto* bytes = reinterpret_cast<const std::byte*>(row.data());
      const uint64_t sum = Checksum(bytes, row.size() * 4);
      if (std::memcmp(outputs[0].data() + r * 8, &sum, 8) != 0) return false;
      uint32_t tag = shape_.tag;
      if (shape_.head != nullptr) tag += static_cast<uint32_t>(shape_.head->view().scale);
      for (int32_t n = 0; n < shape_.notes_per_row; ++n) {
        tag += Note(static_cast<int64_t>(r) * shape_.notes_per_row + n);
      }
      if (std::memcmp(outputs[2].data() + r * 4, &tag, 4) != 0) return false;
      for (int32_t e = 0; e < shape_.entries_per_row; ++e) {
        const uint32_t want = EntryOf(bytes, spec_.key.row_elements, e);
        const size_t at = r * static_cast<size_t>(shape_.entries_per_row) + static_cast<size_t>(e);
        if (std::memcmp(outputs[1].data() + at * 4, &want, 4) != 0) return false;
      }
    }
    return true;
  }

  const Shape shape_;
  JobSpec spec_;
  std::atomic<int> copies_ = 0;
  std::atomic<int> inputs_ = 0;
  std::atomic<int> dones_ = 0;
  std::atomic<bool> misused_ = false;
  std::mutex mutex_;
  std::condition_variable done_;
  std::optional<absl::Status> status_;
  JobTimes times_;
};

}  // namespace logitd::engine

#endif  // LOGITD_TESTS_ENGINE_TEST_JOB_H_

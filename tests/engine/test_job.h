// Jobs that check their own answers, and what else the engine's tests share.
#ifndef LOGITD_TESTS_ENGINE_TEST_JOB_H_
#define LOGITD_TESTS_ENGINE_TEST_JOB_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "prometheus/collectable.h"
#include "prometheus/text_serializer.h"
#include "server/engine/engine.h"
#include "server/engine/heads.h"
#include "server/engine/job.h"
#include "server/engine/metrics.h"
#include "tests/fake_backend.h"

namespace logitd::engine {

// A head without a weight. On device d its scale is 100 * d + `scale`, unless it is cut over the
// devices.
inline std::shared_ptr<const Head> MakeHead(const std::vector<Backend*>& backends, float scale,
                                            bool sharded = false) {
  std::vector<Head::Copy> copies;
  for (Backend* backend : backends) {
    const float of_device = 100 * static_cast<float>(copies.size()) + scale;
    copies.push_back({.backend = backend, .memory = {}, .view = {.scale = of_device}});
  }
  std::optional<HeadView> whole;
  if (sharded) whole = {.scale = scale};
  return std::make_shared<Head>(std::move(copies), HeadInfo(), whole);
}

inline std::string Scrape(const Metrics& metrics) {
  return prometheus::TextSerializer().Serialize(metrics.page()->Collect());
}

// A job that knows its own answer. Thread-safe, except the public members, which are set before
// Submit.
class CheckedJob : public Job {
 public:
  std::function<void(const absl::Status&)> on_done;
  bool keep_answer = false;  // until Take

  const JobSpec& spec() const override { return spec_; }
  // Its name in the log of a fake device.
  virtual uint32_t tag() const { return 0; }

  void Done(const absl::Status& status, const JobAnswer& answer, const JobTimes& times) override {
    Check(dones_++ == 0);
    Check(status.ok() ? IsRight(answer.outputs) && times.batch_rows >= spec_.rows()
                      : answer.outputs.empty() && answer.keep == nullptr);
    Check(times.queue_ns >= 0 && times.copy_ns >= 0);
    if (on_done) on_done(status);
    std::lock_guard<std::mutex> lock(mutex_);
    could_keep_ = answer.keep != nullptr;
    if (keep_answer && could_keep_) {
      kept_ = answer.keep;
      outputs_.assign(answer.outputs.begin(), answer.outputs.end());
    }
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
  bool could_keep() {
    std::lock_guard<std::mutex> lock(mutex_);
    return could_keep_;
  }
  // Whether the kept memory still holds the answer.
  bool KeptIsRight() {
    std::lock_guard<std::mutex> lock(mutex_);
    return kept_ != nullptr && IsRight(outputs_);
  }
  std::shared_ptr<const void> Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::move(kept_);
  }
  int dones() const { return dones_; }
  // A call of the engine came twice, too late or out of order, or an answer was not this job's.
  bool misused() const { return misused_; }

 protected:
  virtual bool IsRight(absl::Span<const absl::Span<const std::byte>> outputs) const = 0;
  void Check(bool condition) {
    if (!condition) misused_ = true;
  }
  template <typename T>
  static bool Equal(const std::vector<T>& want, absl::Span<const std::byte> got) {
    return std::ranges::equal(std::as_bytes(std::span(want)), got);
  }

  JobSpec spec_;

 private:
  std::atomic<int> dones_ = 0;
  std::atomic<bool> misused_ = false;
  std::mutex mutex_;
  std::condition_variable done_;
  std::optional<absl::Status> status_;
  JobTimes times_;
  bool could_keep_ = false;
  std::shared_ptr<const void> kept_;
  std::vector<absl::Span<const std::byte>> outputs_;
};

// ---- the op "digest": for each row a checksum of its payload and its tag plus the sum of its
// notes, for each entry one element of its row

// Parameters of a row. All zero: skip the row.
struct DigestRow {
  int64_t first_entry;
  int64_t first_note;
  int32_t entries;
  int32_t notes;
  uint32_t tag;  // the job's; not 0
  uint32_t unused;
};

enum DigestAxis : size_t { kDigestRows = kRowAxis, kDigestEntries, kDigestNotes };

inline uint64_t Checksum(const std::byte* row, size_t bytes) {
  uint64_t sum = 14695981039346656037u;  // FNV-1a
  for (size_t i = 0; i < bytes; ++i) {
    sum = (sum ^ static_cast<uint64_t>(row[i])) * 1099511628211u;
  }
  return sum;
}
inline uint32_t EntryOf(const std::byte* row, int64_t row_elements, int32_t entry) {
  uint32_t element;
  std::memcpy(&element, row + (entry % row_elements) * sizeof(element), sizeof(element));
  return element + static_cast<uint32_t>(entry);
}

// Logs one letter for each run of rows with one tag, '.' for skipped rows.
inline absl::Status RunDigest(Stream& stream, const BatchView& batch) {
  const auto* params = reinterpret_cast<const DigestRow*>(batch.inputs[0]);
  const auto* notes = reinterpret_cast<const uint32_t*>(batch.inputs[1]);
  std::string runs;
  for (int64_t r = 0; r < batch.rows(); ++r) {
    const char tag = params[r].tag == 0 ? '.' : static_cast<char>(params[r].tag);
    if (runs.empty() || runs.back() != tag) runs.push_back(tag);
  }
  return static_cast<FakeStream&>(stream).Run(std::move(runs), batch.rows(), [&] {
    auto* sums = reinterpret_cast<uint64_t*>(batch.outputs[0]);
    auto* entries = reinterpret_cast<uint32_t*>(batch.outputs[1]);
    auto* tags = reinterpret_cast<uint32_t*>(batch.outputs[2]);
    const size_t row_bytes = static_cast<size_t>(batch.row_elements) * SizeOf(batch.dtype);
    for (int64_t r = 0; r < batch.rows(); ++r) {
      if (params[r].tag == 0) continue;
      Require(params[r].entries <= batch.max_row_entries, "max_row_entries is too small");
      const std::byte* row = RowData(batch.Payload(), r);
      sums[r] = Checksum(row, row_bytes);
      tags[r] = params[r].tag;
      if (batch.head != nullptr) tags[r] += static_cast<uint32_t>(batch.head->scale);
      Require(params[r].first_note + params[r].notes <= batch.counts[kDigestNotes],
              "a note of another job");
      for (int32_t n = 0; n < params[r].notes; ++n) tags[r] += notes[params[r].first_note + n];
      for (int32_t e = 0; e < params[r].entries; ++e) {
        entries[params[r].first_entry + e] = EntryOf(row, batch.row_elements, e);
      }
    }
    return absl::OkStatus();
  });
}

inline constexpr Array kDigestInputs[] = {{kDigestRows, sizeof(DigestRow)},
                                          {kDigestNotes, sizeof(uint32_t)}};
inline constexpr Array kDigestOutputs[] = {{kDigestRows, sizeof(uint64_t)},
                                           {kDigestEntries, sizeof(uint32_t)},
                                           {kDigestRows, sizeof(uint32_t)}};
inline constexpr OpTraits kDigest = {.name = "digest",
                                     .inputs = kDigestInputs,
                                     .outputs = kDigestOutputs,
                                     .enqueue = &RunDigest,
                                     .rows_apart = true};
inline constexpr const OpTraits* kTestOps[] = {&kDigest};

// Small slabs, so that tests can fill them, and one stream, so that they can keep it busy.
inline EngineOptions SmallOptions(absl::Span<const OpTraits* const> ops = kTestOps) {
  EngineOptions options;
  options.ops = ops;
  options.streams = 1;
  options.slabs_per_stream = 4;
  options.slab_payload_bytes = 4096;
  options.slab_answer_bytes = 4096;
  options.max_batch_rows = 64;
  return options;
}

class TestJob final : public CheckedJob {
 public:
  struct Shape {
    uint32_t tag = 'a';
    int64_t row_elements = 4;
    int64_t rows = 1;
    int32_t entries_per_row = 1;
    int32_t notes_per_row = 0;
    std::shared_ptr<const Head> head;  // its scale is added to the rows' tags; null: none
    absl::Time deadline = absl::InfiniteFuture();
    Caller caller;
    bool whole = false;
    // The rows lie elsewhere, with space between; only `device`, if there is one, can read them.
    bool placed = false;
    bool steady = false;  // RowsPlace::steady
    int device = kAnyDevice;
  };

  // The device whose copy of the head the job saw. Only of an answered job with a head.
  int head_device() const { return head_device_; }

  explicit TestJob(const Shape& shape) : shape_(shape) {
    spec_.key = {.op = &kDigest,
                 .dtype = DType::kF32,
                 .row_elements = shape.row_elements,
                 .head = shape.head.get(),
                 .device = shape.device};
    spec_.counts[kDigestRows] = shape.rows;
    spec_.counts[kDigestEntries] = shape.rows * shape.entries_per_row;
    spec_.counts[kDigestNotes] = shape.rows * shape.notes_per_row;
    spec_.max_row_entries = shape.entries_per_row;
    spec_.deadline = shape.deadline;
    spec_.caller = shape.caller;
    spec_.whole = shape.whole;
    spec_.size = SizeOfJob(spec_);
    if (shape.placed) Place();
  }

  uint32_t tag() const override { return shape_.tag; }

  absl::Span<const RowsPlace> places() const override {
    return absl::MakeConstSpan(&place_, shape_.placed ? 1 : 0);
  }

  void CopyRowsTo(std::byte* dst, size_t row_stride) override {
    Check(copies_++ == 0 && dones() == 0);
    if (shape_.placed) return;
    for (int64_t r = 0; r < spec_.rows(); ++r) {
      const std::vector<uint32_t> row = Row(r);
      std::memcpy(dst + static_cast<size_t>(r) * row_stride, row.data(), row.size() * 4);
    }
  }

  void WriteInputs(absl::Span<std::byte* const> inputs, const AxisCounts& first) override {
    Check(inputs_++ == 0 && copies_ == 1 && dones() == 0);
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

 private:
  uint32_t Note(int64_t n) const { return shape_.tag * 97 + static_cast<uint32_t>(n) * 40503u; }

  std::vector<uint32_t> Row(int64_t r) const {
    std::vector<uint32_t> row(static_cast<size_t>(spec_.key.row_elements));
    uint32_t x = shape_.tag * 2654435761u + static_cast<uint32_t>(r) * 40503u;
    for (uint32_t& element : row) element = x = x * 1664525u + 1013904223u;
    return row;
  }

  uint32_t ScaleOn(int device) const {
    return static_cast<uint32_t>(shape_.head->view(device).scale);
  }
  // Any device, where none has this scale.
  int DeviceOf(uint32_t scale) const {
    int device = static_cast<int>(shape_.head->copies().size()) - 1;
    while (device > 0 && ScaleOn(device) != scale) --device;
    return device;
  }

  bool IsRight(absl::Span<const absl::Span<const std::byte>> outputs) const override {
    std::vector<uint64_t> sums;
    std::vector<uint32_t> entries;
    std::vector<uint32_t> tags;
    for (int64_t r = 0; r < spec_.rows(); ++r) {
      const std::vector<uint32_t> row = Row(r);
      const auto* bytes = reinterpret_cast<const std::byte*>(row.data());
      sums.push_back(Checksum(bytes, row.size() * 4));
      for (int32_t e = 0; e < shape_.entries_per_row; ++e) {
        entries.push_back(EntryOf(bytes, spec_.key.row_elements, e));
      }
      tags.push_back(shape_.tag);
      for (int32_t n = 0; n < shape_.notes_per_row; ++n) {
        tags.back() += Note(r * shape_.notes_per_row + n);
      }
    }
    if (shape_.head != nullptr && outputs.size() == 3 && outputs[2].size() == tags.size() * 4) {
      uint32_t seen;
      std::memcpy(&seen, outputs[2].data(), sizeof(seen));
      head_device_ = DeviceOf(seen - tags[0]);
      for (uint32_t& tag : tags) tag += ScaleOn(head_device_);
    }
    return outputs.size() == 3 && Equal(sums, outputs[0]) && Equal(entries, outputs[1]) &&
           Equal(tags, outputs[2]);
  }

  void Place() {
    const size_t row_bytes = static_cast<size_t>(shape_.row_elements) * 4;
    const size_t stride = row_bytes + 12;
    elsewhere_.resize(static_cast<size_t>(shape_.rows) * stride);
    for (int64_t r = 0; r < shape_.rows; ++r) {
      std::memcpy(elsewhere_.data() + static_cast<size_t>(r) * stride, Row(r).data(), row_bytes);
    }
    place_ = {.data = elsewhere_.data(),
              .row_stride = stride,
              .row_bytes = row_bytes,
              .rows = shape_.rows,
              .on_device = true,
              .steady = shape_.steady};
  }

  const Shape shape_;
  mutable std::atomic<int> head_device_ = 0;
  std::vector<std::byte> elsewhere_;
  RowsPlace place_;
  std::atomic<int> copies_ = 0;
  std::atomic<int> inputs_ = 0;
};

}  // namespace logitd::engine

#endif  // LOGITD_TESTS_ENGINE_TEST_JOB_H_

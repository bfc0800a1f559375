// A job of an exclusive op, whose batches hold one job: it may be answered in place and keep its
// answer.
#ifndef LOGITD_TESTS_ENGINE_SHIFT_JOB_H_
#define LOGITD_TESTS_ENGINE_SHIFT_JOB_H_

#include <algorithm>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "server/engine/batch.h"
#include "tests/engine/test_job.h"

namespace logitd::engine {

enum ShiftAxis : size_t { kShiftRows = kRowAxis, kShiftElements, kShiftNotes };

// The op "shift" adds a note and the call's number to every element of the payload, and writes one
// number a row.
inline constexpr Array kShiftInputs[] = {{kShiftNotes, sizeof(uint32_t)},
                                         {kShiftNotes, sizeof(uint32_t)}};
inline constexpr Array kShiftOutputs[] = {{kShiftElements, sizeof(uint32_t)},
                                          {kShiftRows, sizeof(uint64_t)}};

inline constexpr OpTraits kShift = {
    .name = "shift", .inputs = kShiftInputs, .outputs = kShiftOutputs, .exclusive_batch = true};
inline constexpr const OpTraits* kAllTestOps[] = {&kDigest, &kShift};

class ShiftCall final : public ExclusiveCall {
 public:
  explicit ShiftCall(uint32_t add) : add_(add) {}
  absl::Status Enqueue(Stream& stream, const BatchView& batch) const override {
    const auto run = [&] {
      const auto* in = reinterpret_cast<const uint32_t*>(batch.payload);
      const auto* copied = reinterpret_cast<const uint32_t*>(batch.inputs[0]);
      const auto* written = reinterpret_cast<const uint32_t*>(batch.inputs[1]);
      const int64_t skipped = batch.first_row * batch.row_elements;
      auto* out = reinterpret_cast<uint32_t*>(batch.outputs[0]) + skipped;
      const int64_t notes = batch.counts[kShiftNotes];
      for (int64_t i = 0; i < batch.rows() * batch.row_elements; ++i) {
        const int64_t n = notes == 0 ? 0 : (skipped + i) % notes;
        const uint32_t note = notes == 0 ? 0 : copied[n] ^ written[n];
        out[i] = in[i] + add_ + note;
      }
      for (int64_t r = 0; r < batch.rows(); ++r) {
        reinterpret_cast<uint64_t*>(batch.outputs[1])[r] =
            static_cast<uint64_t>(batch.first_row + r) + add_;
      }
      return absl::OkStatus();
    };
    return static_cast<FakeStream&>(stream).Run(std::string(1, static_cast<char>(add_)),
                                                batch.rows(), run);
  }

 private:
  const uint32_t add_;
};

class ShiftJob final : public CheckedJob {
 public:
  struct Shape {
    uint32_t tag = 'a';
    int64_t rows = 1;
    int64_t row_elements = 5;
    int64_t notes = 0;
    bool in_place = false;
    bool keep = false;
    bool placed = false;  // the payload and the first input lie elsewhere
    Caller caller;
    absl::Time deadline = absl::InfiniteFuture();
  };

  explicit ShiftJob(const Shape& shape) : shape_(shape), call_(shape.tag) {
    keep_answer = shape.keep;
    spec_.key = {.op = &kShift, .dtype = DType::kF32, .row_elements = shape.row_elements};
    spec_.counts[kShiftRows] = shape.rows;
    spec_.counts[kShiftElements] = shape.rows * shape.row_elements;
    spec_.counts[kShiftNotes] = shape.notes;
    spec_.caller = shape.caller;
    spec_.deadline = shape.deadline;
    spec_.in_place = shape.in_place;
    spec_.call = &call_;
    spec_.size = SizeOfJob(spec_);
    for (int64_t i = 0; i < spec_.counts[kShiftElements]; ++i) {
      payload_.push_back(static_cast<uint32_t>(i) * 2654435761u + shape.tag);
    }
    for (int64_t i = 0; i < shape.notes; ++i) {
      copied_.push_back(static_cast<uint32_t>(i) * 40503u + 7);
      written_.push_back(static_cast<uint32_t>(i));
    }
    if (shape.placed) places_.push_back(PlaceOf(payload_, shape.rows));
    if (shape.placed && shape.notes > 0) places_.push_back(PlaceOf(copied_, 1));
  }

  uint32_t tag() const override { return shape_.tag; }

  absl::Span<const RowsPlace> places() const override { return places_; }

  void CopyRowsTo(std::byte* dst, size_t row_stride) override {
    Check(row_stride == static_cast<size_t>(shape_.row_elements) * 4);
    if (shape_.placed) return;
    size_t offsets[kMaxArrays];
    LayOut(kShiftInputs, spec_.counts, static_cast<size_t>(spec_.rows()) * row_stride, offsets);
    std::ranges::copy(std::as_bytes(std::span(payload_)), dst);
    std::ranges::copy(std::as_bytes(std::span(copied_)), dst + offsets[0]);
  }

  void WriteInputs(absl::Span<std::byte* const> inputs, const AxisCounts& first) override {
    Check(first == AxisCounts{});
    std::ranges::copy(std::as_bytes(std::span(written_)), inputs[1]);
  }

 private:
  static RowsPlace PlaceOf(const std::vector<uint32_t>& values, int64_t rows) {
    const size_t row_bytes = values.size() * 4 / static_cast<size_t>(rows);
    return {.data = reinterpret_cast<const std::byte*>(values.data()),
            .row_stride = row_bytes,
            .row_bytes = row_bytes,
            .slab_stride = row_bytes,
            .rows = rows};
  }

  bool IsRight(absl::Span<const absl::Span<const std::byte>> outputs) const override {
    std::vector<uint32_t> shifted;
    for (const uint32_t value : payload_) {
      const size_t n = copied_.empty() ? 0 : shifted.size() % copied_.size();
      const uint32_t note = copied_.empty() ? 0 : copied_[n] ^ written_[n];
      shifted.push_back(value + shape_.tag + note);
    }
    std::vector<uint64_t> numbers(static_cast<size_t>(shape_.rows));
    std::iota(numbers.begin(), numbers.end(), uint64_t{shape_.tag});
    return outputs.size() == 2 && Equal(shifted, outputs[0]) && Equal(numbers, outputs[1]);
  }

  const Shape shape_;
  const ShiftCall call_;
  std::vector<uint32_t> payload_;
  std::vector<uint32_t> copied_;  // the first input, and the second
  std::vector<uint32_t> written_;
  std::vector<RowsPlace> places_;
};

}  // namespace logitd::engine

#endif  // LOGITD_TESTS_ENGINE_SHIFT_JOB_H_

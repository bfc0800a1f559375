// Runs one op on any backend: a slab with arguments and answers in it, up, run, down, wait.
#ifndef LOGITD_TESTS_KERNELS_OP_RUNNER_H_
#define LOGITD_TESTS_KERNELS_OP_RUNNER_H_

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/status_macros.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {

// What lies in memory after a call. Whatever the op did not write still holds the sentinels.
struct TopKAnswer {
  static constexpr int32_t kUnwrittenIndex = -77;
  static constexpr float kUnwrittenFloat = -77.5f;

  std::vector<int32_t> indices;   // [entries]
  std::vector<float> probs;       // [entries]
  std::vector<float> logsumexp;   // [rows]
  std::vector<RowStatus> status;  // [rows]
  StreamTimes times;
};

// What a call of sample is given besides the logits: the rows' parameters, and lists they point
// into.
struct SampleBatch {
  std::vector<SampleRow> rows;
  std::vector<int32_t> history;
  std::vector<SampleBias> bias;
  std::vector<int32_t> extra_ids;
  std::vector<uint32_t> mask_words;
  int64_t top_entries = 0;
  int64_t extra_entries = 0;
};

// What lies in memory after a call of sample, sentinels as in TopKAnswer.
struct SampleAnswer {
  std::vector<int32_t> tokens;  // [rows]
  std::vector<float> logprobs;
  std::vector<int32_t> ranks;
  std::vector<float> logsumexp;
  std::vector<RowStatus> status;
  std::vector<int32_t> top_ids;  // [top entries]
  std::vector<float> top_logprobs;
  std::vector<float> extra_logprobs;  // [extra entries]
};

class OpRunner {
 public:
  // Fails with the backend's own status. `backend` outlives the runner.
  static absl::StatusOr<std::unique_ptr<OpRunner>> Create(Backend* backend) {
    auto stream = backend->CreateStream();
    if (!stream.ok()) return stream.status();
    return std::unique_ptr<OpRunner>(new OpRunner(backend, *std::move(stream)));
  }
  ~OpRunner() {
    if (slab_.bytes > 0) backend_->FreeSlab(slab_);
  }
  OpRunner(const OpRunner&) = delete;
  OpRunner& operator=(const OpRunner&) = delete;

  // One call of the op; `entries` is how many answers there is room for.
  absl::StatusOr<TopKAnswer> SoftmaxTopK(const HostTensor& logits,
                                         absl::Span<const SoftmaxTopKRow> rows, int64_t entries) {
    Layout layout;
    const size_t at_logits = layout.Add(logits.bytes().size());
    const size_t at_rows = layout.Add(rows.size() * sizeof(SoftmaxTopKRow));
    const size_t at_indices = layout.Add(entries * sizeof(int32_t));
    const size_t at_probs = layout.Add(entries * sizeof(float));
    const size_t at_logsumexp = layout.Add(rows.size() * sizeof(float));
    const size_t at_status = layout.Add(rows.size() * sizeof(RowStatus));
    LOGITD_RETURN_IF_ERROR(Reserve(layout.bytes));

    TopKAnswer answer;
    answer.indices.assign(entries, TopKAnswer::kUnwrittenIndex);
    answer.probs.assign(entries, TopKAnswer::kUnwrittenFloat);
    answer.logsumexp.assign(rows.size(), TopKAnswer::kUnwrittenFloat);
    answer.status.assign(rows.size(), {RowCode::kOk, TopKAnswer::kUnwrittenIndex});
    Put(at_logits, logits.bytes());
    Put(at_rows, rows);
    Put(at_indices, absl::MakeConstSpan(answer.indices));
    Put(at_probs, absl::MakeConstSpan(answer.probs));
    Put(at_logsumexp, absl::MakeConstSpan(answer.logsumexp));
    Put(at_status, absl::MakeConstSpan(answer.status));

    SoftmaxTopKArgs args;
    args.logits = {.data = slab_.device + at_logits + logits.offset_bytes(),
                   .dtype = logits.dtype(),
                   .rows = logits.rows(),
                   .cols = logits.cols(),
                   .row_stride = logits.row_stride()};
    args.rows = reinterpret_cast<const SoftmaxTopKRow*>(slab_.device + at_rows);
    for (const SoftmaxTopKRow& row : rows) args.max_k = std::max(args.max_k, row.k);
    args.indices = reinterpret_cast<int32_t*>(slab_.device + at_indices);
    args.probs = reinterpret_cast<float*>(slab_.device + at_probs);
    args.logsumexp = reinterpret_cast<float*>(slab_.device + at_logsumexp);
    args.status = reinterpret_cast<RowStatus*>(slab_.device + at_status);

    LOGITD_RETURN_IF_ERROR(stream_->Upload(slab_, 0, layout.bytes));
    LOGITD_RETURN_IF_ERROR(stream_->SoftmaxTopK(args));
    LOGITD_RETURN_IF_ERROR(stream_->Download(slab_, at_indices, layout.bytes - at_indices));
    auto times = stream_->Wait();
    if (!times.ok()) return times.status();
    answer.times = *times;

    Fetch(at_indices, answer.indices);
    Fetch(at_probs, answer.probs);
    Fetch(at_logsumexp, answer.logsumexp);
    Fetch(at_status, answer.status);
    return answer;
  }

  // One call of sample.
  absl::StatusOr<SampleAnswer> Sample(const HostTensor& logits, const SampleBatch& batch) {
    const size_t rows = batch.rows.size();
    Layout layout;
    const size_t at_logits = layout.Add(logits.bytes().size());
    const size_t at_rows = layout.Add(rows * sizeof(SampleRow));
    const size_t at_history = layout.Add(batch.history.size() * sizeof(int32_t));
    const size_t at_bias = layout.Add(batch.bias.size() * sizeof(SampleBias));
    const size_t at_extra_ids = layout.Add(batch.extra_ids.size() * sizeof(int32_t));
    const size_t at_mask = layout.Add(batch.mask_words.size() * sizeof(uint32_t));
    const size_t at_tokens = layout.Add(rows * sizeof(int32_t));
    const size_t at_logprobs = layout.Add(rows * sizeof(float));
    const size_t at_ranks = layout.Add(rows * sizeof(int32_t));
    const size_t at_logsumexp = layout.Add(rows * sizeof(float));
    const size_t at_status = layout.Add(rows * sizeof(RowStatus));
    const size_t at_top_ids = layout.Add(batch.top_entries * sizeof(int32_t));
    const size_t at_top_logprobs = layout.Add(batch.top_entries * sizeof(float));
    const size_t at_extra_logprobs = layout.Add(batch.extra_entries * sizeof(float));
    LOGITD_RETURN_IF_ERROR(Reserve(layout.bytes));

    constexpr int32_t kIndex = TopKAnswer::kUnwrittenIndex;
    constexpr float kFloat = TopKAnswer::kUnwrittenFloat;
    SampleAnswer answer;
    answer.tokens.assign(rows, kIndex);
    answer.logprobs.assign(rows, kFloat);
    answer.ranks.assign(rows, kIndex);
    answer.logsumexp.assign(rows, kFloat);
    answer.status.assign(rows, {RowCode::kOk, kIndex});
    answer.top_ids.assign(batch.top_entries, kIndex);
    answer.top_logprobs.assign(batch.top_entries, kFloat);
    answer.extra_logprobs.assign(batch.extra_entries, kFloat);
    Put(at_logits, logits.bytes());
    Put(at_rows, absl::MakeConstSpan(batch.rows));
    Put(at_history, absl::MakeConstSpan(batch.history));
    Put(at_bias, absl::MakeConstSpan(batch.bias));
    Put(at_extra_ids, absl::MakeConstSpan(batch.extra_ids));
    Put(at_mask, absl::MakeConstSpan(batch.mask_words));
    Put(at_tokens, absl::MakeConstSpan(answer.tokens));
    Put(at_logprobs, absl::MakeConstSpan(answer.logprobs));
    Put(at_ranks, absl::MakeConstSpan(answer.ranks));
    Put(at_logsumexp, absl::MakeConstSpan(answer.logsumexp));
    Put(at_status, absl::MakeConstSpan(answer.status));
    Put(at_top_ids, absl::MakeConstSpan(answer.top_ids));
    Put(at_top_logprobs, absl::MakeConstSpan(answer.top_logprobs));
    Put(at_extra_logprobs, absl::MakeConstSpan(answer.extra_logprobs));

    const SampleArgs args{.logits = {.data = slab_.device + at_logits + logits.offset_bytes(),
                                     .dtype = logits.dtype(),
                                     .rows = logits.rows(),
                                     .cols = logits.cols(),
                                     .row_stride = logits.row_stride()},
                          .rows = At<const SampleRow>(at_rows),
                          .history = At<const int32_t>(at_history),
                          .bias = At<const SampleBias>(at_bias),
                          .extra_ids = At<const int32_t>(at_extra_ids),
                          .mask_words = At<const uint32_t>(at_mask),
                          .tokens = At<int32_t>(at_tokens),
                          .logprobs = At<float>(at_logprobs),
                          .ranks = At<int32_t>(at_ranks),
                          .logsumexp = At<float>(at_logsumexp),
                          .top_ids = At<int32_t>(at_top_ids),
                          .top_logprobs = At<float>(at_top_logprobs),
                          .extra_logprobs = At<float>(at_extra_logprobs),
                          .status = At<RowStatus>(at_status)};
    LOGITD_RETURN_IF_ERROR(stream_->Upload(slab_, 0, layout.bytes));
    LOGITD_RETURN_IF_ERROR(stream_->Sample(args));
    LOGITD_RETURN_IF_ERROR(stream_->Download(slab_, at_tokens, layout.bytes - at_tokens));
    if (auto times = stream_->Wait(); !times.ok()) return times.status();

    Fetch(at_tokens, answer.tokens);
    Fetch(at_logprobs, answer.logprobs);
    Fetch(at_ranks, answer.ranks);
    Fetch(at_logsumexp, answer.logsumexp);
    Fetch(at_status, answer.status);
    Fetch(at_top_ids, answer.top_ids);
    Fetch(at_top_logprobs, answer.top_logprobs);
    Fetch(at_extra_logprobs, answer.extra_logprobs);
    return answer;
  }

 private:
  struct Layout {
    size_t bytes = 0;
    size_t Add(size_t count) {
      const size_t at = bytes;
      bytes += (count + 255) / 256 * 256;
      return at;
    }
  };

  OpRunner(Backend* backend, std::unique_ptr<Stream> stream)
      : backend_(backend), stream_(std::move(stream)) {}

  absl::Status Reserve(size_t bytes) {
    if (bytes <= slab_.bytes) return absl::OkStatus();
    if (slab_.bytes > 0) backend_->FreeSlab(std::exchange(slab_, Slab{}));
    auto slab = backend_->AllocateSlab(bytes);
    if (!slab.ok()) return slab.status();
    slab_ = *slab;
    return absl::OkStatus();
  }

  template <typename T>
  T* At(size_t offset) const {
    return reinterpret_cast<T*>(slab_.device + offset);
  }

  template <typename T>
  void Put(size_t at, absl::Span<const T> values) {
    if (!values.empty()) std::memcpy(slab_.host + at, values.data(), values.size() * sizeof(T));
  }

  template <typename T>
  void Fetch(size_t at, std::vector<T>& values) {
    if (!values.empty()) std::memcpy(values.data(), slab_.host + at, values.size() * sizeof(T));
  }

  Backend* backend_;
  std::unique_ptr<Stream> stream_;
  Slab slab_;
};

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_OP_RUNNER_H_

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
  bool says_edited = false;  // also where no row is
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

// What a call of verify is given besides.
struct VerifyBatch {
  std::vector<VerifyDraft> drafts;
  std::vector<int32_t> draft_ids;
  std::vector<float> draft_probs;
  std::vector<VerifySequence> sequences;
};

struct VerifyAnswer {
  SampleAnswer rows;
  std::vector<int32_t> accepted;  // [sequences]
};

// What a call of attention_softmax is given. `args` has all but the memory, which is here.
struct AttentionCall {
  AttentionSoftmaxArgs args;
  HostTensor scores;
  std::vector<std::byte> mask;
  size_t mask_offset_bytes = 0;  // of its first element from an aligned address
  std::vector<float> sinks;      // empty: none
  HostTensor probs;  // its type, stride and offset; what it holds shows where not written
  bool in_place = false;
  bool want_logsumexp = true;
};

struct AttentionAnswer {
  HostTensor probs;
  std::vector<float> logsumexp;
  std::vector<RowStatus> status;
};

// What a call of its backward is given.
struct AttentionBackwardCall {
  enum class Output { kApart, kOverProbs, kOverDProbs };
  AttentionSoftmaxBackwardArgs args;
  HostTensor probs;
  HostTensor d_probs;
  std::vector<float> sinks;
  std::vector<float> logsumexp;
  HostTensor d_scores;
  Output output = Output::kApart;
};

struct AttentionBackwardAnswer {
  HostTensor d_scores;
  std::vector<double> d_sinks;
  std::vector<RowStatus> status;
};

// What a call of cross_entropy is given besides the logits.
struct LossBatch {
  std::vector<CrossEntropyRow> rows;
  std::vector<int32_t> extra_ids;
  int64_t top_entries = 0;
  int64_t extra_entries = 0;
  bool says_all_wanted = false;  // also where no row wants it; else arrays nobody wants are null
};

// What lies in memory after a call of cross_entropy, sentinels as in TopKAnswer.
struct LossAnswer {
  std::vector<float> loss;  // [rows]
  std::vector<float> logsumexp;
  std::vector<float> target_logprob;
  std::vector<int32_t> rank;
  std::vector<float> entropy;
  std::vector<RowStatus> status;
  std::vector<int32_t> top_ids;  // [top entries]
  std::vector<float> top_logprobs;
  std::vector<float> extra_logprobs;  // [extra entries]
};

// What a call of its backward is given.
struct LossBackwardCall {
  HostTensor logits;
  std::vector<CrossEntropyRow> rows;
  std::vector<float> logsumexp;
  std::vector<float> upstream;
  HostTensor d_logits;  // its stride and offset; what it holds shows where not written
  bool in_place = false;
};

// A head in host memory.
struct HostHead {
  HostTensor weight;
  std::vector<float> bias;  // empty: none
  std::vector<float> norm;  // empty: none
  float norm_epsilon = 0;
  float scale = 1;
  float softcap = 0;
};

// What a call of linear_cross_entropy's backward is given.
struct LinearBackwardCall {
  HostTensor hidden;
  HostHead head;
  std::vector<CrossEntropyRow> rows;
  std::vector<float> logsumexp;
  std::vector<float> upstream;
  HostTensor d_hidden;  // types and strides; what they hold shows where not written
  HostTensor d_weight;
  bool want_d_bias = true;
};

struct LinearBackwardAnswer {
  HostTensor d_hidden;
  HostTensor d_weight;
  std::vector<float> d_bias;
};

struct LinearTrainingAnswer {
  LossAnswer loss;
  LinearBackwardAnswer gradient;
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
    const TopKPlaces at = Place(layout, rows, entries);
    LOGITD_RETURN_IF_ERROR(Reserve(layout.bytes));
    Put(at_logits, logits.bytes());
    TopKAnswer answer = Put(at, rows, entries);
    SoftmaxTopKArgs args = ArgsAt(at, rows);
    args.logits = ViewAt(at_logits, logits);
    LOGITD_RETURN_IF_ERROR(stream_->Upload(slab_, 0, layout.bytes));
    LOGITD_RETURN_IF_ERROR(stream_->SoftmaxTopK(args));
    LOGITD_RETURN_IF_ERROR(stream_->Download(slab_, at.indices, layout.bytes - at.indices));
    auto times = stream_->Wait();
    if (!times.ok()) return times.status();
    answer.times = *times;
    Fetch(at, answer);
    return answer;
  }

  // One call of linear_topk.
  absl::StatusOr<TopKAnswer> LinearTopK(const HostTensor& hidden, const HostHead& head,
                                        absl::Span<const SoftmaxTopKRow> rows, int64_t entries) {
    Layout layout;
    const HeadPlaces at_head = Place(layout, hidden, head);
    const TopKPlaces at = Place(layout, rows, entries);
    LOGITD_RETURN_IF_ERROR(Reserve(layout.bytes));
    Put(at_head, hidden, head);
    TopKAnswer answer = Put(at, rows, entries);
    LOGITD_RETURN_IF_ERROR(stream_->Upload(slab_, 0, layout.bytes));
    LOGITD_RETURN_IF_ERROR(stream_->LinearTopK({.hidden = ViewAt(at_head.hidden, hidden),
                                                .head = HeadAt(at_head, head),
                                                .topk = ArgsAt(at, rows)}));
    LOGITD_RETURN_IF_ERROR(stream_->Download(slab_, at.indices, layout.bytes - at.indices));
    if (auto times = stream_->Wait(); !times.ok()) return times.status();
    Fetch(at, answer);
    return answer;
  }

  // One call of linear_sample.
  absl::StatusOr<SampleAnswer> LinearSample(const HostTensor& hidden, const HostHead& head,
                                            const SampleBatch& batch) {
    const HostTensor no_logits(DType::kF32, 1, 1, 1, 0);
    Layout layout;
    const HeadPlaces at_head = Place(layout, hidden, head);
    const SamplePlaces at = Place(layout, no_logits, batch);
    LOGITD_RETURN_IF_ERROR(Reserve(layout.bytes));
    Put(at_head, hidden, head);
    SampleAnswer answer = Put(at, no_logits, batch);
    LinearSampleArgs args{.hidden = ViewAt(at_head.hidden, hidden),
                          .head = HeadAt(at_head, head),
                          .sample = ArgsAt(at, no_logits, batch)};
    args.sample.logits = {};
    LOGITD_RETURN_IF_ERROR(stream_->Upload(slab_, 0, layout.bytes));
    LOGITD_RETURN_IF_ERROR(stream_->LinearSample(args));
    LOGITD_RETURN_IF_ERROR(stream_->Download(slab_, at.tokens, layout.bytes - at.tokens));
    if (auto times = stream_->Wait(); !times.ok()) return times.status();
    Fetch(at, answer);
    return answer;
  }

  // One call of linear_cross_entropy.
  absl::StatusOr<LossAnswer> LinearCrossEntropy(const HostTensor& hidden, const HostHead& head,
                                                const LossBatch& batch) {
    Layout layout;
    const HeadPlaces at_head = Place(layout, hidden, head);
    const LossPlaces at = Place(layout, batch);
    LOGITD_RETURN_IF_ERROR(Reserve(layout.bytes));
    Put(at_head, hidden, head);
    LossAnswer answer = Put(at, batch);
    LOGITD_RETURN_IF_ERROR(stream_->Upload(slab_, 0, layout.bytes));
    LOGITD_RETURN_IF_ERROR(stream_->LinearCrossEntropy({.hidden = ViewAt(at_head.hidden, hidden),
                                                        .head = HeadAt(at_head, head),
                                                        .cross_entropy = ArgsAt(at, batch)}));
    LOGITD_RETURN_IF_ERROR(stream_->Download(slab_, at.loss, layout.bytes - at.loss));
    if (auto times = stream_->Wait(); !times.ok()) return times.status();
    Fetch(at, answer);
    return answer;
  }

  // One call of its backward.
  absl::StatusOr<LinearBackwardAnswer> LinearCrossEntropyBackward(const LinearBackwardCall& call) {
    Layout layout;
    const HeadPlaces at_head = Place(layout, call.hidden, call.head);
    const LinearBackwardPlaces at = Place(layout, call);
    LOGITD_RETURN_IF_ERROR(Reserve(layout.bytes));
    Put(at_head, call.hidden, call.head);
    LinearBackwardAnswer answer = Put(at, call);
    LOGITD_RETURN_IF_ERROR(stream_->Upload(slab_, 0, layout.bytes));
    LOGITD_RETURN_IF_ERROR(stream_->LinearCrossEntropyBackward(ArgsAt(at_head, at, call)));
    LOGITD_RETURN_IF_ERROR(stream_->Download(slab_, at.d_hidden, layout.bytes - at.d_hidden));
    if (auto times = stream_->Wait(); !times.ok()) return times.status();
    Fetch(at, answer);
    return answer;
  }

  // One call of both in one; the rows are the call's, its logsumexp is not sent.
  absl::StatusOr<LinearTrainingAnswer> LinearCrossEntropyTraining(const LinearBackwardCall& call) {
    const LossBatch batch{.rows = call.rows};
    Layout layout;
    const HeadPlaces at_head = Place(layout, call.hidden, call.head);
    const LossPlaces at_loss = Place(layout, batch);
    const LinearBackwardPlaces at = Place(layout, call);
    LOGITD_RETURN_IF_ERROR(Reserve(layout.bytes));
    Put(at_head, call.hidden, call.head);
    LinearTrainingAnswer answer{.loss = Put(at_loss, batch), .gradient = Put(at, call)};
    LinearCrossEntropyTrainingArgs args{.gradient = ArgsAt(at_head, at, call),
                                        .answers = ArgsAt(at_loss, batch).answers};
    args.gradient.logsumexp = nullptr;
    LOGITD_RETURN_IF_ERROR(stream_->Upload(slab_, 0, layout.bytes));
    LOGITD_RETURN_IF_ERROR(stream_->LinearCrossEntropyTraining(args));
    LOGITD_RETURN_IF_ERROR(stream_->Download(slab_, at_loss.loss, layout.bytes - at_loss.loss));
    if (auto times = stream_->Wait(); !times.ok()) return times.status();
    Fetch(at_loss, answer.loss);
    Fetch(at, answer.gradient);
    return answer;
  }

  // One call of sample.
  absl::StatusOr<SampleAnswer> Sample(const HostTensor& logits, const SampleBatch& batch) {
    Layout layout;
    const SamplePlaces at = Place(layout, logits, batch);
    LOGITD_RETURN_IF_ERROR(Reserve(layout.bytes));
    SampleAnswer answer = Put(at, logits, batch);
    LOGITD_RETURN_IF_ERROR(stream_->Upload(slab_, 0, layout.bytes));
    LOGITD_RETURN_IF_ERROR(stream_->Sample(ArgsAt(at, logits, batch)));
    LOGITD_RETURN_IF_ERROR(stream_->Download(slab_, at.tokens, layout.bytes - at.tokens));
    if (auto times = stream_->Wait(); !times.ok()) return times.status();
    Fetch(at, answer);
    return answer;
  }

  // One call of verify.
  absl::StatusOr<VerifyAnswer> Verify(const HostTensor& logits, const SampleBatch& batch,
                                      const VerifyBatch& verify) {
    Layout layout;
    const size_t at_drafts = layout.Add(verify.drafts.size() * sizeof(VerifyDraft));
    const size_t at_ids = layout.Add(verify.draft_ids.size() * sizeof(int32_t));
    const size_t at_probs = layout.Add(verify.draft_probs.size() * sizeof(float));
    const size_t at_sequences = layout.Add(verify.sequences.size() * sizeof(VerifySequence));
    const SamplePlaces at = Place(layout, logits, batch);
    const size_t at_accepted = layout.Add(verify.sequences.size() * sizeof(int32_t));
    LOGITD_RETURN_IF_ERROR(Reserve(layout.bytes));
    VerifyAnswer answer;
    answer.accepted.assign(verify.sequences.size(), TopKAnswer::kUnwrittenIndex);
    answer.rows = Put(at, logits, batch);
    Put(at_drafts, absl::MakeConstSpan(verify.drafts));
    Put(at_ids, absl::MakeConstSpan(verify.draft_ids));
    Put(at_probs, absl::MakeConstSpan(verify.draft_probs));
    Put(at_sequences, absl::MakeConstSpan(verify.sequences));
    Put(at_accepted, absl::MakeConstSpan(answer.accepted));
    const VerifyArgs args{.sample = ArgsAt(at, logits, batch),
                          .drafts = At<const VerifyDraft>(at_drafts),
                          .draft_ids = At<const int32_t>(at_ids),
                          .draft_probs = At<const float>(at_probs),
                          .sequences = At<const VerifySequence>(at_sequences),
                          .sequence_count = static_cast<int64_t>(verify.sequences.size()),
                          .accepted = At<int32_t>(at_accepted)};
    LOGITD_RETURN_IF_ERROR(stream_->Upload(slab_, 0, layout.bytes));
    LOGITD_RETURN_IF_ERROR(stream_->Verify(args));
    LOGITD_RETURN_IF_ERROR(stream_->Download(slab_, at.tokens, layout.bytes - at.tokens));
    if (auto times = stream_->Wait(); !times.ok()) return times.status();
    Fetch(at, answer.rows);
    Fetch(at_accepted, answer.accepted);
    return answer;
  }

  // One call of cross_entropy.
  absl::StatusOr<LossAnswer> CrossEntropy(const HostTensor& logits, const LossBatch& batch) {
    Layout layout;
    const size_t at_logits = layout.Add(logits.bytes().size());
    const LossPlaces at = Place(layout, batch);
    LOGITD_RETURN_IF_ERROR(Reserve(layout.bytes));
    LossAnswer answer = Put(at, batch);
    Put(at_logits, logits.bytes());
    CrossEntropyArgs args = ArgsAt(at, batch);
    args.logits = ViewAt(at_logits, logits);
    LOGITD_RETURN_IF_ERROR(stream_->Upload(slab_, 0, layout.bytes));
    LOGITD_RETURN_IF_ERROR(stream_->CrossEntropy(args));
    LOGITD_RETURN_IF_ERROR(stream_->Download(slab_, at.loss, layout.bytes - at.loss));
    if (auto times = stream_->Wait(); !times.ok()) return times.status();
    Fetch(at, answer);
    return answer;
  }

  // One call of its backward. Returns d_logits.
  absl::StatusOr<HostTensor> CrossEntropyBackward(const LossBackwardCall& call) {
    Layout layout;
    const size_t at_rows = layout.Add(call.rows.size() * sizeof(CrossEntropyRow));
    const size_t at_logsumexp = layout.Add(call.logsumexp.size() * sizeof(float));
    const size_t at_upstream = layout.Add(call.upstream.size() * sizeof(float));
    const size_t at_logits = layout.Add(call.logits.bytes().size());
    const size_t at_gradient = call.in_place ? at_logits : layout.Add(call.d_logits.bytes().size());
    LOGITD_RETURN_IF_ERROR(Reserve(layout.bytes));
    HostTensor gradient = call.in_place ? call.logits : call.d_logits;
    Put(at_rows, absl::MakeConstSpan(call.rows));
    Put(at_logsumexp, absl::MakeConstSpan(call.logsumexp));
    Put(at_upstream, absl::MakeConstSpan(call.upstream));
    Put(at_logits, call.logits.bytes());
    Put(at_gradient, gradient.bytes());
    LOGITD_RETURN_IF_ERROR(stream_->Upload(slab_, 0, layout.bytes));
    LOGITD_RETURN_IF_ERROR(
        stream_->CrossEntropyBackward({.logits = ViewAt(at_logits, call.logits),
                                       .rows = At<const CrossEntropyRow>(at_rows),
                                       .logsumexp = At<const float>(at_logsumexp),
                                       .upstream = At<const float>(at_upstream),
                                       .d_logits = MutableViewAt(at_gradient, gradient)}));
    LOGITD_RETURN_IF_ERROR(stream_->Download(slab_, at_gradient, layout.bytes - at_gradient));
    if (auto times = stream_->Wait(); !times.ok()) return times.status();
    Fetch(at_gradient, gradient.mutable_bytes());
    return gradient;
  }

  // One call of attention_softmax.
  absl::StatusOr<AttentionAnswer> AttentionSoftmax(const AttentionCall& call) {
    const int64_t rows = call.args.shape.rows;
    Layout layout;
    const size_t at_mask = layout.Add(call.mask_offset_bytes + call.mask.size());
    const size_t at_sinks = layout.Add(call.sinks.size() * sizeof(float));
    const size_t at_scores = layout.Add(call.scores.bytes().size());
    const size_t at_probs = call.in_place ? at_scores : layout.Add(call.probs.bytes().size());
    const size_t at_logsumexp = layout.Add(rows * sizeof(float));
    const size_t at_status = layout.Add(rows * sizeof(RowStatus));
    LOGITD_RETURN_IF_ERROR(Reserve(layout.bytes));

    AttentionAnswer answer{.probs = call.in_place ? call.scores : call.probs};
    answer.logsumexp.assign(rows, TopKAnswer::kUnwrittenFloat);
    answer.status.assign(rows, {RowCode::kOk, TopKAnswer::kUnwrittenIndex});
    Put(at_mask + call.mask_offset_bytes, absl::MakeConstSpan(call.mask));
    Put(at_sinks, absl::MakeConstSpan(call.sinks));
    Put(at_scores, call.scores.bytes());
    Put(at_probs, answer.probs.bytes());
    Put(at_logsumexp, absl::MakeConstSpan(answer.logsumexp));
    Put(at_status, absl::MakeConstSpan(answer.status));

    AttentionSoftmaxArgs args = call.args;
    args.scores = ViewAt(at_scores, call.scores);
    args.mask.data = slab_.device + at_mask + call.mask_offset_bytes;
    args.sinks = call.sinks.empty() ? nullptr : At<const float>(at_sinks);
    args.probs = MutableViewAt(at_probs, answer.probs);
    args.logsumexp = call.want_logsumexp ? At<float>(at_logsumexp) : nullptr;
    args.status = At<RowStatus>(at_status);
    LOGITD_RETURN_IF_ERROR(stream_->Upload(slab_, 0, layout.bytes));
    LOGITD_RETURN_IF_ERROR(stream_->AttentionSoftmax(args));
    LOGITD_RETURN_IF_ERROR(stream_->Download(slab_, at_scores, layout.bytes - at_scores));
    if (auto times = stream_->Wait(); !times.ok()) return times.status();
    Fetch(at_probs, answer.probs.mutable_bytes());
    Fetch(at_logsumexp, answer.logsumexp);
    Fetch(at_status, answer.status);
    return answer;
  }

  // One call of its backward.
  absl::StatusOr<AttentionBackwardAnswer> AttentionSoftmaxBackward(
      const AttentionBackwardCall& call) {
    using Output = AttentionBackwardCall::Output;
    const int64_t rows = call.args.shape.rows;
    const int64_t heads = call.args.shape.heads;
    Layout layout;
    const size_t at_sinks = layout.Add(call.sinks.size() * sizeof(float));
    const size_t at_logsumexp = layout.Add(call.logsumexp.size() * sizeof(float));
    const size_t at_probs = layout.Add(call.probs.bytes().size());
    const size_t at_d_probs = layout.Add(call.d_probs.bytes().size());
    const size_t at_d_scores = call.output == Output::kApart
                                   ? layout.Add(call.d_scores.bytes().size())
                               : call.output == Output::kOverProbs ? at_probs
                                                                   : at_d_probs;
    const size_t at_d_sinks = layout.Add(heads * sizeof(double));
    const size_t at_status = layout.Add(rows * sizeof(RowStatus));
    LOGITD_RETURN_IF_ERROR(Reserve(layout.bytes));

    AttentionBackwardAnswer answer{.d_scores = call.output == Output::kApart       ? call.d_scores
                                               : call.output == Output::kOverProbs ? call.probs
                                                                                   : call.d_probs};
    answer.d_sinks.assign(heads, TopKAnswer::kUnwrittenFloat);
    answer.status.assign(rows, {RowCode::kOk, TopKAnswer::kUnwrittenIndex});
    Put(at_sinks, absl::MakeConstSpan(call.sinks));
    Put(at_logsumexp, absl::MakeConstSpan(call.logsumexp));
    Put(at_probs, call.probs.bytes());
    Put(at_d_probs, call.d_probs.bytes());
    Put(at_d_scores, answer.d_scores.bytes());
    Put(at_d_sinks, absl::MakeConstSpan(answer.d_sinks));
    Put(at_status, absl::MakeConstSpan(answer.status));

    AttentionSoftmaxBackwardArgs args = call.args;
    args.probs = ViewAt(at_probs, call.probs);
    args.d_probs = ViewAt(at_d_probs, call.d_probs);
    args.d_scores = MutableViewAt(at_d_scores, answer.d_scores);
    if (!call.sinks.empty()) {
      args.sinks = At<const float>(at_sinks);
      args.logsumexp = At<const float>(at_logsumexp);
      args.d_sinks = At<double>(at_d_sinks);
    }
    args.status = At<RowStatus>(at_status);
    LOGITD_RETURN_IF_ERROR(stream_->Upload(slab_, 0, layout.bytes));
    LOGITD_RETURN_IF_ERROR(stream_->AttentionSoftmaxBackward(args));
    LOGITD_RETURN_IF_ERROR(stream_->Download(slab_, at_probs, layout.bytes - at_probs));
    if (auto times = stream_->Wait(); !times.ok()) return times.status();
    Fetch(at_d_scores, answer.d_scores.mutable_bytes());
    Fetch(at_d_sinks, answer.d_sinks);
    Fetch(at_status, answer.status);
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

  // Where the arguments and answers of softmax_topk, the logits apart, lie in the slab; answers
  // last.
  struct TopKPlaces {
    size_t rows;
    size_t indices, probs, logsumexp, status;
  };

  static TopKPlaces Place(Layout& layout, absl::Span<const SoftmaxTopKRow> rows, int64_t entries) {
    return {.rows = layout.Add(rows.size() * sizeof(SoftmaxTopKRow)),
            .indices = layout.Add(entries * sizeof(int32_t)),
            .probs = layout.Add(entries * sizeof(float)),
            .logsumexp = layout.Add(rows.size() * sizeof(float)),
            .status = layout.Add(rows.size() * sizeof(RowStatus))};
  }

  // Returns the sentinels that lie where the answers will.
  TopKAnswer Put(const TopKPlaces& at, absl::Span<const SoftmaxTopKRow> rows, int64_t entries) {
    TopKAnswer answer;
    answer.indices.assign(entries, TopKAnswer::kUnwrittenIndex);
    answer.probs.assign(entries, TopKAnswer::kUnwrittenFloat);
    answer.logsumexp.assign(rows.size(), TopKAnswer::kUnwrittenFloat);
    answer.status.assign(rows.size(), {RowCode::kOk, TopKAnswer::kUnwrittenIndex});
    Put(at.rows, rows);
    Put(at.indices, absl::MakeConstSpan(answer.indices));
    Put(at.probs, absl::MakeConstSpan(answer.probs));
    Put(at.logsumexp, absl::MakeConstSpan(answer.logsumexp));
    Put(at.status, absl::MakeConstSpan(answer.status));
    return answer;
  }

  // All but the logits.
  SoftmaxTopKArgs ArgsAt(const TopKPlaces& at, absl::Span<const SoftmaxTopKRow> rows) const {
    SoftmaxTopKArgs args;
    args.rows = At<const SoftmaxTopKRow>(at.rows);
    for (const SoftmaxTopKRow& row : rows) args.max_k = std::max(args.max_k, row.k);
    args.indices = At<int32_t>(at.indices);
    args.probs = At<float>(at.probs);
    args.logsumexp = At<float>(at.logsumexp);
    args.status = At<RowStatus>(at.status);
    return args;
  }

  void Fetch(const TopKPlaces& at, TopKAnswer& answer) {
    Fetch(at.indices, answer.indices);
    Fetch(at.probs, answer.probs);
    Fetch(at.logsumexp, answer.logsumexp);
    Fetch(at.status, answer.status);
  }

  // Where hidden states and their head lie.
  struct HeadPlaces {
    size_t hidden, weight, bias, norm;
  };

  static HeadPlaces Place(Layout& layout, const HostTensor& hidden, const HostHead& head) {
    return {.hidden = layout.Add(hidden.bytes().size()),
            .weight = layout.Add(head.weight.bytes().size()),
            .bias = layout.Add(head.bias.size() * sizeof(float)),
            .norm = layout.Add(head.norm.size() * sizeof(float))};
  }

  void Put(const HeadPlaces& at, const HostTensor& hidden, const HostHead& head) {
    Put(at.hidden, hidden.bytes());
    Put(at.weight, head.weight.bytes());
    Put(at.bias, absl::MakeConstSpan(head.bias));
    Put(at.norm, absl::MakeConstSpan(head.norm));
  }

  HeadView HeadAt(const HeadPlaces& at, const HostHead& head) const {
    return {.weight = ViewAt(at.weight, head.weight),
            .bias = head.bias.empty() ? nullptr : At<const float>(at.bias),
            .norm = head.norm.empty() ? nullptr : At<const float>(at.norm),
            .norm_epsilon = head.norm_epsilon,
            .scale = head.scale,
            .softcap = head.softcap};
  }

  // Where the arguments and answers of sample lie in the slab; answers last.
  struct SamplePlaces {
    size_t logits, rows, history, bias, extra_ids, mask_words;
    size_t tokens, logprobs, ranks, logsumexp, status, top_ids, top_logprobs, extra_logprobs;
  };

  static SamplePlaces Place(Layout& layout, const HostTensor& logits, const SampleBatch& batch) {
    const size_t rows = batch.rows.size();
    return {.logits = layout.Add(logits.bytes().size()),
            .rows = layout.Add(rows * sizeof(SampleRow)),
            .history = layout.Add(batch.history.size() * sizeof(int32_t)),
            .bias = layout.Add(batch.bias.size() * sizeof(SampleBias)),
            .extra_ids = layout.Add(batch.extra_ids.size() * sizeof(int32_t)),
            .mask_words = layout.Add(batch.mask_words.size() * sizeof(uint32_t)),
            .tokens = layout.Add(rows * sizeof(int32_t)),
            .logprobs = layout.Add(rows * sizeof(float)),
            .ranks = layout.Add(rows * sizeof(int32_t)),
            .logsumexp = layout.Add(rows * sizeof(float)),
            .status = layout.Add(rows * sizeof(RowStatus)),
            .top_ids = layout.Add(batch.top_entries * sizeof(int32_t)),
            .top_logprobs = layout.Add(batch.top_entries * sizeof(float)),
            .extra_logprobs = layout.Add(batch.extra_entries * sizeof(float))};
  }

  // Returns the sentinels that lie where the answers will.
  SampleAnswer Put(const SamplePlaces& at, const HostTensor& logits, const SampleBatch& batch) {
    const size_t rows = batch.rows.size();
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
    Put(at.logits, logits.bytes());
    Put(at.rows, absl::MakeConstSpan(batch.rows));
    Put(at.history, absl::MakeConstSpan(batch.history));
    Put(at.bias, absl::MakeConstSpan(batch.bias));
    Put(at.extra_ids, absl::MakeConstSpan(batch.extra_ids));
    Put(at.mask_words, absl::MakeConstSpan(batch.mask_words));
    Put(at.tokens, absl::MakeConstSpan(answer.tokens));
    Put(at.logprobs, absl::MakeConstSpan(answer.logprobs));
    Put(at.ranks, absl::MakeConstSpan(answer.ranks));
    Put(at.logsumexp, absl::MakeConstSpan(answer.logsumexp));
    Put(at.status, absl::MakeConstSpan(answer.status));
    Put(at.top_ids, absl::MakeConstSpan(answer.top_ids));
    Put(at.top_logprobs, absl::MakeConstSpan(answer.top_logprobs));
    Put(at.extra_logprobs, absl::MakeConstSpan(answer.extra_logprobs));
    return answer;
  }

  SampleArgs ArgsAt(const SamplePlaces& at, const HostTensor& logits,
                    const SampleBatch& batch) const {
    return {.logits = {.data = slab_.device + at.logits + logits.offset_bytes(),
                       .dtype = logits.dtype(),
                       .rows = logits.rows(),
                       .cols = logits.cols(),
                       .row_stride = logits.row_stride()},
            .rows = At<const SampleRow>(at.rows),
            .history = batch.history.empty() ? nullptr : At<const int32_t>(at.history),
            .bias = batch.bias.empty() ? nullptr : At<const SampleBias>(at.bias),
            .extra_ids = At<const int32_t>(at.extra_ids),
            .mask_words = At<const uint32_t>(at.mask_words),
            .edited = batch.says_edited || !batch.history.empty() || !batch.bias.empty() ||
                      !batch.mask_words.empty(),
            .tokens = At<int32_t>(at.tokens),
            .logprobs = At<float>(at.logprobs),
            .ranks = At<int32_t>(at.ranks),
            .logsumexp = At<float>(at.logsumexp),
            .top_ids = At<int32_t>(at.top_ids),
            .top_logprobs = At<float>(at.top_logprobs),
            .extra_logprobs = At<float>(at.extra_logprobs),
            .status = At<RowStatus>(at.status)};
  }

  void Fetch(const SamplePlaces& at, SampleAnswer& answer) {
    Fetch(at.tokens, answer.tokens);
    Fetch(at.logprobs, answer.logprobs);
    Fetch(at.ranks, answer.ranks);
    Fetch(at.logsumexp, answer.logsumexp);
    Fetch(at.status, answer.status);
    Fetch(at.top_ids, answer.top_ids);
    Fetch(at.top_logprobs, answer.top_logprobs);
    Fetch(at.extra_logprobs, answer.extra_logprobs);
  }

  // Where the arguments and answers of cross_entropy, the logits apart, lie in the slab; answers
  // last.
  struct LossPlaces {
    size_t rows, extra_ids;
    size_t loss, logsumexp, target_logprob, rank, entropy, status;
    size_t top_ids, top_logprobs, extra_logprobs;
  };

  static LossPlaces Place(Layout& layout, const LossBatch& batch) {
    const size_t rows = batch.rows.size();
    return {.rows = layout.Add(rows * sizeof(CrossEntropyRow)),
            .extra_ids = layout.Add(batch.extra_ids.size() * sizeof(int32_t)),
            .loss = layout.Add(rows * sizeof(float)),
            .logsumexp = layout.Add(rows * sizeof(float)),
            .target_logprob = layout.Add(rows * sizeof(float)),
            .rank = layout.Add(rows * sizeof(int32_t)),
            .entropy = layout.Add(rows * sizeof(float)),
            .status = layout.Add(rows * sizeof(RowStatus)),
            .top_ids = layout.Add(batch.top_entries * sizeof(int32_t)),
            .top_logprobs = layout.Add(batch.top_entries * sizeof(float)),
            .extra_logprobs = layout.Add(batch.extra_entries * sizeof(float))};
  }

  // Returns the sentinels that lie where the answers will.
  LossAnswer Put(const LossPlaces& at, const LossBatch& batch) {
    const size_t rows = batch.rows.size();
    constexpr int32_t kIndex = TopKAnswer::kUnwrittenIndex;
    constexpr float kFloat = TopKAnswer::kUnwrittenFloat;
    LossAnswer answer;
    answer.loss.assign(rows, kFloat);
    answer.logsumexp.assign(rows, kFloat);
    answer.target_logprob.assign(rows, kFloat);
    answer.rank.assign(rows, kIndex);
    answer.entropy.assign(rows, kFloat);
    answer.status.assign(rows, {RowCode::kOk, kIndex});
    answer.top_ids.assign(batch.top_entries, kIndex);
    answer.top_logprobs.assign(batch.top_entries, kFloat);
    answer.extra_logprobs.assign(batch.extra_entries, kFloat);
    Put(at.rows, absl::MakeConstSpan(batch.rows));
    Put(at.extra_ids, absl::MakeConstSpan(batch.extra_ids));
    Put(at.loss, absl::MakeConstSpan(answer.loss));
    Put(at.logsumexp, absl::MakeConstSpan(answer.logsumexp));
    Put(at.target_logprob, absl::MakeConstSpan(answer.target_logprob));
    Put(at.rank, absl::MakeConstSpan(answer.rank));
    Put(at.entropy, absl::MakeConstSpan(answer.entropy));
    Put(at.status, absl::MakeConstSpan(answer.status));
    Put(at.top_ids, absl::MakeConstSpan(answer.top_ids));
    Put(at.top_logprobs, absl::MakeConstSpan(answer.top_logprobs));
    Put(at.extra_logprobs, absl::MakeConstSpan(answer.extra_logprobs));
    return answer;
  }

  // All but the logits.
  CrossEntropyArgs ArgsAt(const LossPlaces& at, const LossBatch& batch) const {
    int32_t want = 0, max_top = 0;
    for (const CrossEntropyRow& row : batch.rows) {
      want |= row.want;
      max_top = std::max(max_top, row.top_logprobs);
    }
    CrossEntropyArgs args;
    args.rows = At<const CrossEntropyRow>(at.rows);
    args.extra_ids = batch.extra_ids.empty() ? nullptr : At<const int32_t>(at.extra_ids);
    CrossEntropyAnswers& to = args.answers;
    to.loss = At<float>(at.loss);
    to.logsumexp = At<float>(at.logsumexp);
    to.target_logprob = At<float>(at.target_logprob);
    to.status = At<RowStatus>(at.status);
    if (!batch.says_all_wanted) {
      args.want = want;
      args.max_top_logprobs = max_top;
    }
    if ((args.want & kWantRank) != 0) to.rank = At<int32_t>(at.rank);
    if ((args.want & kWantEntropy) != 0) to.entropy = At<float>(at.entropy);
    if (batch.top_entries > 0) {
      to.top_ids = At<int32_t>(at.top_ids);
      to.top_logprobs = At<float>(at.top_logprobs);
    }
    if (batch.extra_entries > 0) to.extra_logprobs = At<float>(at.extra_logprobs);
    return args;
  }

  void Fetch(const LossPlaces& at, LossAnswer& answer) {
    Fetch(at.loss, answer.loss);
    Fetch(at.logsumexp, answer.logsumexp);
    Fetch(at.target_logprob, answer.target_logprob);
    Fetch(at.rank, answer.rank);
    Fetch(at.entropy, answer.entropy);
    Fetch(at.status, answer.status);
    Fetch(at.top_ids, answer.top_ids);
    Fetch(at.top_logprobs, answer.top_logprobs);
    Fetch(at.extra_logprobs, answer.extra_logprobs);
  }

  // Where the arguments and answers of linear_cross_entropy's backward, hidden states and head
  // apart, lie in the slab; answers last.
  struct LinearBackwardPlaces {
    size_t rows, logsumexp, upstream;
    size_t d_hidden, d_weight, d_bias;
  };

  static LinearBackwardPlaces Place(Layout& layout, const LinearBackwardCall& call) {
    return {.rows = layout.Add(call.rows.size() * sizeof(CrossEntropyRow)),
            .logsumexp = layout.Add(call.logsumexp.size() * sizeof(float)),
            .upstream = layout.Add(call.upstream.size() * sizeof(float)),
            .d_hidden = layout.Add(call.d_hidden.bytes().size()),
            .d_weight = layout.Add(call.d_weight.bytes().size()),
            .d_bias = layout.Add(call.head.weight.rows() * sizeof(float))};
  }

  // Returns what lies where the answers will.
  LinearBackwardAnswer Put(const LinearBackwardPlaces& at, const LinearBackwardCall& call) {
    LinearBackwardAnswer answer{.d_hidden = call.d_hidden, .d_weight = call.d_weight};
    answer.d_bias.assign(call.head.weight.rows(), TopKAnswer::kUnwrittenFloat);
    Put(at.rows, absl::MakeConstSpan(call.rows));
    Put(at.logsumexp, absl::MakeConstSpan(call.logsumexp));
    Put(at.upstream, absl::MakeConstSpan(call.upstream));
    Put(at.d_hidden, answer.d_hidden.bytes());
    Put(at.d_weight, answer.d_weight.bytes());
    Put(at.d_bias, absl::MakeConstSpan(answer.d_bias));
    return answer;
  }

  LinearCrossEntropyBackwardArgs ArgsAt(const HeadPlaces& at_head, const LinearBackwardPlaces& at,
                                        const LinearBackwardCall& call) const {
    return {.hidden = ViewAt(at_head.hidden, call.hidden),
            .head = HeadAt(at_head, call.head),
            .rows = At<const CrossEntropyRow>(at.rows),
            .logsumexp = At<const float>(at.logsumexp),
            .upstream = At<const float>(at.upstream),
            .d_hidden = MutableViewAt(at.d_hidden, call.d_hidden),
            .d_weight = MutableViewAt(at.d_weight, call.d_weight),
            .d_bias = call.want_d_bias ? At<float>(at.d_bias) : nullptr};
  }

  void Fetch(const LinearBackwardPlaces& at, LinearBackwardAnswer& answer) {
    Fetch(at.d_hidden, answer.d_hidden.mutable_bytes());
    Fetch(at.d_weight, answer.d_weight.mutable_bytes());
    Fetch(at.d_bias, answer.d_bias);
  }

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

  TensorView ViewAt(size_t at, const HostTensor& tensor) const {
    return {.data = slab_.device + at + tensor.offset_bytes(),
            .dtype = tensor.dtype(),
            .rows = tensor.rows(),
            .cols = tensor.cols(),
            .row_stride = tensor.row_stride()};
  }
  MutableTensorView MutableViewAt(size_t at, const HostTensor& tensor) const {
    return {.data = slab_.device + at + tensor.offset_bytes(),
            .dtype = tensor.dtype(),
            .rows = tensor.rows(),
            .cols = tensor.cols(),
            .row_stride = tensor.row_stride()};
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

// Runs one op on any backend: what a call is given as vectors and tensors in host memory, and what
// lies in memory after it.
#ifndef LOGITD_TESTS_KERNELS_OP_RUNNER_H_
#define LOGITD_TESTS_KERNELS_OP_RUNNER_H_

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "tests/kernels/arena.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {

// What an output holds before the call, and after it where the op did not write.
inline constexpr int32_t kUnwrittenIndex = -77;
inline constexpr float kUnwrittenFloat = -77.5f;
inline constexpr RowStatus kUnwrittenStatus = {RowCode::kOk, kUnwrittenIndex};

struct TopKAnswer {
  std::vector<int32_t> indices;   // [entries]
  std::vector<float> probs;       // [entries]
  std::vector<float> logsumexp;   // [rows]
  std::vector<RowStatus> status;  // [rows]
};

// What a call of sample is given besides the logits: the rows' parameters, and the lists they point
// into.
struct SampleBatch {
  std::vector<SampleRow> rows;
  std::vector<int32_t> history;
  std::vector<SampleBias> bias;
  std::vector<int32_t> extra_ids;
  std::vector<uint32_t> mask_words;
  int64_t top_entries = 0;
  int64_t extra_entries = 0;
  int64_t support_entries = 0;
  int64_t draw_entries = 0;
  bool says_edited = false;  // even if no row is
};

struct SampleAnswer {
  std::vector<int32_t> tokens;  // [rows]
  std::vector<float> logprobs;
  std::vector<int32_t> ranks;
  std::vector<float> logsumexp;
  std::vector<RowStatus> status;
  std::vector<int32_t> top_ids;  // [top entries]
  std::vector<float> top_logprobs;
  std::vector<float> extra_logprobs;  // [extra entries]
  std::vector<float> entropies;       // [rows]
  std::vector<float> raw_entropies;
  std::vector<int32_t> support_size;  // [rows]
  std::vector<int32_t> support_ids;   // [support entries]
  std::vector<float> support_logprobs;
  std::vector<int32_t> draw_tokens;  // [draw entries]
  std::vector<float> draw_logprobs;
};

// What a call of verify is given in addition.
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

// What a call of attention_softmax is given. `args` has everything except pointers.
struct AttentionCall {
  AttentionSoftmaxArgs args;
  HostTensor scores;
  std::vector<std::byte> mask;
  size_t mask_offset_bytes = 0;  // of its first element from an aligned address
  std::vector<float> sinks;      // empty: none
  HostTensor probs;              // its type, stride, offset and contents before the call
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

  // The tensor that the gradient is written over.
  const HostTensor& Before() const {
    return output == Output::kApart ? d_scores : output == Output::kOverProbs ? probs : d_probs;
  }
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
  std::vector<int32_t> support_ids;
  int64_t top_entries = 0;
  int64_t extra_entries = 0;
  bool says_all_wanted = false;  // even if no row wants it; else arrays that no row wants are null
  int64_t counted_rows = -1;     // as in CrossEntropyArgs
};

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

struct DivergenceAnswer {
  std::vector<float> forward_kl, reverse_kl, entropy, reference_entropy;  // [rows], all of them
  std::vector<float> logsumexp, reference_logsumexp, target_logprob, reference_target_logprob;
  std::vector<int32_t> top_ids, reference_top_ids;  // [entries], these two and the next
  std::vector<float> top_logprobs, reference_top_logprobs;
  std::vector<RowStatus> status;
};

// What a call of cross_entropy's backward is given.
struct LossBackwardCall {
  HostTensor logits;
  std::vector<CrossEntropyRow> rows;
  std::vector<float> logsumexp;
  std::vector<float> upstream;
  HostTensor d_logits;  // its stride, offset and contents before the call
  bool in_place = false;
};

// What a call of cross_entropy_training is given.
struct LossTrainingCall {
  HostTensor logits;
  LossBatch batch;
  std::vector<float> upstream;
  HostTensor d_logits;  // as in LossBackwardCall
  bool in_place = false;
};

struct LossTrainingAnswer {
  LossAnswer loss;
  HostTensor d_logits;
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
  HostTensor d_hidden;  // their types, strides and contents before the call
  HostTensor d_weight;
  bool want_d_bias = true;
  int64_t counted_rows = -1;
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

// The inputs of a call of linear_divergence_training.
struct DivergenceTrainingCall {
  HostTensor hidden;
  HostHead head;
  HostTensor reference_hidden;
  HostHead reference_head;
  std::vector<DivergenceRow> rows;
  std::vector<float> upstream;
  DivergenceLoss kind = DivergenceLoss::kReverseKl;
  float beta = 0.5f;
  HostTensor d_hidden;  // their types, strides and contents before the call
  HostTensor d_weight;
  bool want_d_hidden = true;
  bool want_d_weight = true;
  bool want_d_bias = true;
};

struct DivergenceTrainingAnswer {
  std::vector<float> loss;
  std::vector<RowStatus> status;
  HostTensor d_hidden;
  HostTensor d_weight;
  std::vector<float> d_bias;
};

// ---- Each Add names the arrays of a group of arguments once: the arena places them, and the
// answer's vectors get what the op writes.

inline void Add(Arena& arena, const HostTensor& tensor, TensorView* view) {
  *view = tensor.View();
  arena.In(tensor.bytes(), tensor.offset_bytes(), &view->data);
}

// An op in place reads its input there too.
inline void Add(Arena& arena, HostTensor* tensor, MutableTensorView* view,
                TensorView* input = nullptr) {
  const TensorView shape = tensor->View();
  *view = {nullptr, shape.dtype, shape.rows, shape.cols, shape.row_stride};
  if (input != nullptr) *input = shape;
  arena.Out(absl::MakeSpan(tensor->mutable_bytes()), tensor->offset_bytes(), &view->data,
            input == nullptr ? nullptr : &input->data);
}

template <typename T>
void AddOutput(Arena& arena, int64_t count, T before, std::vector<T>* values, T** field) {
  values->assign(count, before);
  arena.Out(values, field);
}

inline void Add(Arena& arena, absl::Span<const SoftmaxTopKRow> rows, int64_t entries,
                SoftmaxTopKArgs* args, TopKAnswer* to) {
  for (const SoftmaxTopKRow& row : rows) args->max_k = std::max(args->max_k, row.k);
  arena.In(rows, &args->rows);
  const auto count = static_cast<int64_t>(rows.size());
  AddOutput(arena, entries, kUnwrittenIndex, &to->indices, &args->indices);
  AddOutput(arena, entries, kUnwrittenFloat, &to->probs, &args->probs);
  AddOutput(arena, count, kUnwrittenFloat, &to->logsumexp, &args->logsumexp);
  AddOutput(arena, count, kUnwrittenStatus, &to->status, &args->status);
}

inline void Add(Arena& arena, const SampleBatch& batch, SampleArgs* args, SampleAnswer* to,
                bool says_edited = false) {
  args->edited = says_edited || batch.says_edited || !batch.history.empty() ||
                 !batch.bias.empty() || !batch.mask_words.empty() ||
                 std::any_of(batch.rows.begin(), batch.rows.end(), AsksMore);
  args->asks_more = says_edited || batch.says_edited ||
                    std::any_of(batch.rows.begin(), batch.rows.end(), AsksMore);
  arena.In(batch.rows, &args->rows);
  arena.In(batch.history, &args->history);
  arena.In(batch.bias, &args->bias);
  arena.In(batch.extra_ids, &args->extra_ids);
  arena.In(batch.mask_words, &args->mask_words);
  const auto count = static_cast<int64_t>(batch.rows.size());
  AddOutput(arena, count, kUnwrittenIndex, &to->tokens, &args->tokens);
  AddOutput(arena, count, kUnwrittenFloat, &to->logprobs, &args->logprobs);
  AddOutput(arena, count, kUnwrittenIndex, &to->ranks, &args->ranks);
  AddOutput(arena, count, kUnwrittenFloat, &to->logsumexp, &args->logsumexp);
  AddOutput(arena, count, kUnwrittenStatus, &to->status, &args->status);
  AddOutput(arena, batch.top_entries, kUnwrittenIndex, &to->top_ids, &args->top_ids);
  AddOutput(arena, batch.top_entries, kUnwrittenFloat, &to->top_logprobs, &args->top_logprobs);
  AddOutput(arena, batch.extra_entries, kUnwrittenFloat, &to->extra_logprobs,
            &args->extra_logprobs);
  if (args->edited) {
    AddOutput(arena, count, kUnwrittenFloat, &to->entropies, &args->entropies);
    AddOutput(arena, count, kUnwrittenFloat, &to->raw_entropies, &args->raw_entropies);
    AddOutput(arena, count, kUnwrittenIndex, &to->support_size, &args->support_size);
  } else {  // no row wants them
    to->entropies.assign(count, 0);
    to->raw_entropies.assign(count, 0);
    to->support_size.assign(count, 0);
  }
  AddOutput(arena, batch.support_entries, kUnwrittenIndex, &to->support_ids, &args->support_ids);
  AddOutput(arena, batch.support_entries, kUnwrittenFloat, &to->support_logprobs,
            &args->support_logprobs);
  AddOutput(arena, batch.draw_entries, kUnwrittenIndex, &to->draw_tokens, &args->draw_tokens);
  AddOutput(arena, batch.draw_entries, kUnwrittenFloat, &to->draw_logprobs, &args->draw_logprobs);
}

inline void Add(Arena& arena, const SampleBatch& batch, const VerifyBatch& verify, VerifyArgs* args,
                VerifyAnswer* to) {
  args->blocks = std::any_of(verify.sequences.begin(), verify.sequences.end(),
                             [](const VerifySequence& sequence) { return sequence.block != 0; });
  Add(arena, batch, &args->sample, &to->rows, args->blocks);
  arena.In(verify.drafts, &args->drafts);
  arena.In(verify.draft_ids, &args->draft_ids);
  arena.In(verify.draft_probs, &args->draft_probs);
  arena.In(verify.sequences, &args->sequences);
  args->sequence_count = static_cast<int64_t>(verify.sequences.size());
  AddOutput(arena, args->sequence_count, kUnwrittenIndex, &to->accepted, &args->accepted);
}

inline void Add(Arena& arena, const LossBatch& batch, CrossEntropyArgs* args, LossAnswer* to) {
  if (!batch.says_all_wanted) {
    args->want = args->max_top_logprobs = args->max_extra_ids = 0;
    for (const CrossEntropyRow& row : batch.rows) {
      args->want |= row.want;
      args->max_extra_ids = std::max(args->max_extra_ids, row.extra_count);
      args->max_top_logprobs = std::max(args->max_top_logprobs, row.top_logprobs);
    }
  }
  args->counted_rows = batch.counted_rows;
  bool all_supported = true;
  for (const CrossEntropyRow& row : batch.rows) {
    args->max_support = std::max(args->max_support, row.support_count);
    all_supported &= !IsWhole(row) || IsLeftOut(*args, row);
  }
  args->all_supported = all_supported && !batch.says_all_wanted;
  arena.In(batch.rows, &args->rows);
  arena.In(batch.extra_ids, &args->extra_ids);
  arena.In(batch.support_ids, &args->support_ids);
  const auto count = static_cast<int64_t>(batch.rows.size());
  CrossEntropyAnswers& fields = args->answers;
  AddOutput(arena, count, kUnwrittenFloat, &to->loss, &fields.loss);
  AddOutput(arena, count, kUnwrittenFloat, &to->logsumexp, &fields.logsumexp);
  AddOutput(arena, count, kUnwrittenFloat, &to->target_logprob, &fields.target_logprob);
  AddOutput(arena, count, kUnwrittenStatus, &to->status, &fields.status);
  to->rank.assign(count, kUnwrittenIndex);
  if ((args->want & kWantRank) != 0) arena.Out(&to->rank, &fields.rank);
  to->entropy.assign(count, kUnwrittenFloat);
  if ((args->want & kWantEntropy) != 0) arena.Out(&to->entropy, &fields.entropy);
  AddOutput(arena, batch.top_entries, kUnwrittenIndex, &to->top_ids, &fields.top_ids);
  AddOutput(arena, batch.top_entries, kUnwrittenFloat, &to->top_logprobs, &fields.top_logprobs);
  AddOutput(arena, batch.extra_entries, kUnwrittenFloat, &to->extra_logprobs,
            &fields.extra_logprobs);
}

inline void Add(Arena& arena, const std::vector<DivergenceRow>& rows, DivergenceArgs* args,
                DivergenceAnswer* to) {
  arena.In(rows, &args->rows);
  const auto count = static_cast<int64_t>(rows.size());
  DivergenceAnswers& fields = args->answers;
  const auto add = [&](std::vector<float>* values, float** field) {
    AddOutput(arena, count, kUnwrittenFloat, values, field);
  };
  add(&to->forward_kl, &fields.forward_kl);
  add(&to->reverse_kl, &fields.reverse_kl);
  add(&to->entropy, &fields.entropy);
  add(&to->reference_entropy, &fields.reference_entropy);
  add(&to->logsumexp, &fields.logsumexp);
  add(&to->reference_logsumexp, &fields.reference_logsumexp);
  add(&to->target_logprob, &fields.target_logprob);
  add(&to->reference_target_logprob, &fields.reference_target_logprob);
  AddOutput(arena, count, kUnwrittenStatus, &to->status, &fields.status);
  // An entry more than rows ask for, which stays as it is.
  int64_t entries = 1, reference_entries = 1;
  for (const DivergenceRow& row : rows) {
    args->max_top_logprobs = std::max(args->max_top_logprobs, row.top_logprobs);
    args->max_reference_top_logprobs =
        std::max(args->max_reference_top_logprobs, row.reference_top_logprobs);
    entries = std::max(entries, row.first_top_entry + row.top_logprobs + 1);
    reference_entries =
        std::max(reference_entries, row.first_reference_top_entry + row.reference_top_logprobs + 1);
  }
  AddOutput(arena, entries, kUnwrittenIndex, &to->top_ids, &fields.top_ids);
  AddOutput(arena, entries, kUnwrittenFloat, &to->top_logprobs, &fields.top_logprobs);
  AddOutput(arena, reference_entries, kUnwrittenIndex, &to->reference_top_ids,
            &fields.reference_top_ids);
  AddOutput(arena, reference_entries, kUnwrittenFloat, &to->reference_top_logprobs,
            &fields.reference_top_logprobs);
}

inline void Add(Arena& arena, const HostHead& head, HeadView* view) {
  Add(arena, head.weight, &view->weight);
  arena.In(head.bias, &view->bias);
  arena.In(head.norm, &view->norm);
  view->norm_epsilon = head.norm_epsilon;
  view->scale = head.scale;
  view->softcap = head.softcap;
}

// Everything except the logsumexp.
inline void Add(Arena& arena, const LinearBackwardCall& call, LinearCrossEntropyBackwardArgs* args,
                LinearBackwardAnswer* to) {
  Add(arena, call.hidden, &args->hidden);
  Add(arena, call.head, &args->head);
  arena.In(call.rows, &args->rows);
  arena.In(call.upstream, &args->upstream);
  Add(arena, &to->d_hidden, &args->d_hidden);
  Add(arena, &to->d_weight, &args->d_weight);
  args->counted_rows = call.counted_rows;
  to->d_bias.assign(call.head.weight.rows(), kUnwrittenFloat);
  if (call.want_d_bias) arena.Out(&to->d_bias, &args->d_bias);
}

// One method for each op. Not thread-safe.
class OpRunner {
 public:
  // Fails with the backend's own status. `backend` outlives the runner.
  static absl::StatusOr<std::unique_ptr<OpRunner>> Create(Backend* backend) {
    auto arena = Arena::Create(backend);
    if (!arena.ok()) return arena.status();
    return std::unique_ptr<OpRunner>(new OpRunner(*std::move(arena)));
  }

  Arena& arena() { return *arena_; }

  // `entries` is how many answers there is room for.
  absl::StatusOr<TopKAnswer> SoftmaxTopK(const HostTensor& logits,
                                         absl::Span<const SoftmaxTopKRow> rows, int64_t entries) {
    SoftmaxTopKArgs args;
    TopKAnswer answer;
    Add(*arena_, logits, &args.logits);
    Add(*arena_, rows, entries, &args, &answer);
    return Run(args, answer);
  }

  absl::StatusOr<TopKAnswer> LinearTopK(const HostTensor& hidden, const HostHead& head,
                                        absl::Span<const SoftmaxTopKRow> rows, int64_t entries) {
    LinearTopKArgs args;
    TopKAnswer answer;
    Add(*arena_, hidden, &args.hidden);
    Add(*arena_, head, &args.head);
    Add(*arena_, rows, entries, &args.topk, &answer);
    return Run(args, answer);
  }

  absl::StatusOr<SampleAnswer> Sample(const HostTensor& logits, const SampleBatch& batch) {
    SampleArgs args;
    SampleAnswer answer;
    Add(*arena_, logits, &args.logits);
    Add(*arena_, batch, &args, &answer);
    return Run(args, answer);
  }

  // `says_kept`: the call has its rows' max_kept.
  absl::StatusOr<SampleAnswer> LinearSample(const HostTensor& hidden, const HostHead& head,
                                            const SampleBatch& batch, bool says_kept = false) {
    LinearSampleArgs args;
    for (const SampleRow& row : batch.rows) {
      if (!says_kept) break;
      if (KeptTokens(row) == 0) return absl::InvalidArgumentError("a row may need any token");
      args.max_kept = std::max(args.max_kept, KeptTokens(row));
    }
    SampleAnswer answer;
    Add(*arena_, hidden, &args.hidden);
    Add(*arena_, head, &args.head);
    Add(*arena_, batch, &args.sample, &answer);
    return Run(args, answer);
  }

  absl::StatusOr<VerifyAnswer> Verify(const HostTensor& logits, const SampleBatch& batch,
                                      const VerifyBatch& verify) {
    VerifyArgs args;
    VerifyAnswer answer;
    Add(*arena_, logits, &args.sample.logits);
    Add(*arena_, batch, verify, &args, &answer);
    return Run(args, answer);
  }

  absl::StatusOr<VerifyAnswer> LinearVerify(const HostTensor& hidden, const HostHead& head,
                                            const SampleBatch& batch, const VerifyBatch& verify) {
    LinearVerifyArgs args;
    VerifyAnswer answer;
    Add(*arena_, hidden, &args.hidden);
    Add(*arena_, head, &args.head);
    Add(*arena_, batch, verify, &args.verify, &answer);
    return Run(args, answer);
  }

  absl::StatusOr<LossAnswer> CrossEntropy(const HostTensor& logits, const LossBatch& batch) {
    CrossEntropyArgs args;
    LossAnswer answer;
    Add(*arena_, logits, &args.logits);
    Add(*arena_, batch, &args, &answer);
    return Run(args, answer);
  }

  absl::StatusOr<LossAnswer> LinearCrossEntropy(const HostTensor& hidden, const HostHead& head,
                                                const LossBatch& batch) {
    LinearCrossEntropyArgs args;
    LossAnswer answer;
    Add(*arena_, hidden, &args.hidden);
    Add(*arena_, head, &args.head);
    Add(*arena_, batch, &args.cross_entropy, &answer);
    return Run(args, answer);
  }

  absl::StatusOr<DivergenceAnswer> Divergence(const HostTensor& logits, const HostTensor& reference,
                                              const std::vector<DivergenceRow>& rows) {
    DivergenceArgs args;
    DivergenceAnswer answer;
    Add(*arena_, logits, &args.logits);
    Add(*arena_, reference, &args.reference_logits);
    Add(*arena_, rows, &args, &answer);
    return Run(args, answer);
  }

  absl::StatusOr<DivergenceAnswer> LinearDivergence(const HostTensor& hidden, const HostHead& head,
                                                    const HostTensor& reference_hidden,
                                                    const HostHead& reference_head,
                                                    const std::vector<DivergenceRow>& rows) {
    LinearDivergenceArgs args;
    DivergenceAnswer answer;
    Add(*arena_, hidden, &args.hidden);
    Add(*arena_, head, &args.head);
    Add(*arena_, reference_hidden, &args.reference_hidden);
    Add(*arena_, reference_head, &args.reference_head);
    Add(*arena_, rows, &args.divergence, &answer);
    return Run(args, answer);
  }

  // Hidden states beside logits in f32, which are the reference, or the first input.
  absl::StatusOr<DivergenceAnswer> MixedDivergence(const HostTensor& hidden, const HostHead& head,
                                                   const HostTensor& logits, bool is_reference,
                                                   const std::vector<DivergenceRow>& rows) {
    LinearDivergenceArgs args;
    DivergenceAnswer answer;
    DivergenceArgs& inner = args.divergence;
    Add(*arena_, hidden, is_reference ? &args.hidden : &args.reference_hidden);
    Add(*arena_, head, is_reference ? &args.head : &args.reference_head);
    Add(*arena_, logits, is_reference ? &inner.reference_logits : &inner.logits);
    Add(*arena_, rows, &inner, &answer);
    return Run(args, answer);
  }

  // Returns d_logits.
  absl::StatusOr<HostTensor> CrossEntropyBackward(const LossBackwardCall& call) {
    CrossEntropyBackwardArgs args;
    HostTensor gradient = call.in_place ? call.logits : call.d_logits;
    arena_->In(call.rows, &args.rows);
    arena_->In(call.logsumexp, &args.logsumexp);
    arena_->In(call.upstream, &args.upstream);
    if (!call.in_place) Add(*arena_, call.logits, &args.logits);
    Add(*arena_, &gradient, &args.d_logits, call.in_place ? &args.logits : nullptr);
    return Run(args, gradient);
  }

  absl::StatusOr<LossTrainingAnswer> CrossEntropyTraining(const LossTrainingCall& call) {
    CrossEntropyTrainingArgs args;
    LossTrainingAnswer answer{.d_logits = call.in_place ? call.logits : call.d_logits};
    TensorView& logits = args.loss.logits;
    if (!call.in_place) Add(*arena_, call.logits, &logits);
    Add(*arena_, &answer.d_logits, &args.d_logits, call.in_place ? &logits : nullptr);
    Add(*arena_, call.batch, &args.loss, &answer.loss);
    arena_->In(call.upstream, &args.upstream);
    return Run(args, answer);
  }

  absl::StatusOr<LinearBackwardAnswer> LinearCrossEntropyBackward(const LinearBackwardCall& call) {
    LinearCrossEntropyBackwardArgs args;
    LinearBackwardAnswer answer{.d_hidden = call.d_hidden, .d_weight = call.d_weight};
    Add(*arena_, call, &args, &answer);
    arena_->In(call.logsumexp, &args.logsumexp);
    return Run(args, answer);
  }

  // The call's logsumexp is not sent.
  absl::StatusOr<LinearTrainingAnswer> LinearCrossEntropyTraining(const LinearBackwardCall& call) {
    LinearCrossEntropyTrainingArgs args;
    LinearTrainingAnswer answer{.gradient = {.d_hidden = call.d_hidden, .d_weight = call.d_weight}};
    Add(*arena_, call, &args.gradient, &answer.gradient);
    const auto rows = static_cast<int64_t>(call.rows.size());
    AddOutput(*arena_, rows, kUnwrittenFloat, &answer.loss.loss, &args.answers.loss);
    AddOutput(*arena_, rows, kUnwrittenFloat, &answer.loss.logsumexp, &args.answers.logsumexp);
    AddOutput(*arena_, rows, kUnwrittenFloat, &answer.loss.target_logprob,
              &args.answers.target_logprob);
    AddOutput(*arena_, rows, kUnwrittenStatus, &answer.loss.status, &args.answers.status);
    return Run(args, answer);
  }

  absl::StatusOr<DivergenceTrainingAnswer> LinearDivergenceTraining(
      const DivergenceTrainingCall& call) {
    LinearDivergenceTrainingArgs args{.kind = call.kind, .beta = call.beta};
    DivergenceTrainingAnswer answer{.d_hidden = call.d_hidden, .d_weight = call.d_weight};
    Add(*arena_, call.hidden, &args.hidden);
    Add(*arena_, call.head, &args.head);
    Add(*arena_, call.reference_hidden, &args.reference_hidden);
    Add(*arena_, call.reference_head, &args.reference_head);
    arena_->In(call.rows, &args.rows);
    arena_->In(call.upstream, &args.upstream);
    const auto rows = static_cast<int64_t>(call.rows.size());
    std::vector<DivergenceTrainingRow> memory;
    AddOutput(*arena_, rows, kUnwrittenFloat, &answer.loss, &args.loss);
    AddOutput(*arena_, rows, kUnwrittenStatus, &answer.status, &args.status);
    AddOutput(*arena_, rows, DivergenceTrainingRow{}, &memory, &args.memory);
    if (call.want_d_hidden) Add(*arena_, &answer.d_hidden, &args.d_hidden);
    if (call.want_d_weight) Add(*arena_, &answer.d_weight, &args.d_weight);
    answer.d_bias.assign(call.head.weight.rows(), kUnwrittenFloat);
    if (call.want_d_bias) arena_->Out(&answer.d_bias, &args.d_bias);
    return Run(args, answer);
  }

  absl::StatusOr<AttentionAnswer> AttentionSoftmax(const AttentionCall& call) {
    AttentionSoftmaxArgs args = call.args;
    AttentionAnswer answer{.probs = call.in_place ? call.scores : call.probs};
    std::vector<std::byte> mask(call.mask_offset_bytes);
    mask.insert(mask.end(), call.mask.begin(), call.mask.end());
    if (args.mask.kind != MaskKind::kNone) {
      arena_->In(mask, call.mask_offset_bytes, &args.mask.data);
    }
    arena_->In(call.sinks, &args.sinks);
    if (!call.in_place) Add(*arena_, call.scores, &args.scores);
    Add(*arena_, &answer.probs, &args.probs, call.in_place ? &args.scores : nullptr);
    answer.logsumexp.assign(args.shape.rows, kUnwrittenFloat);
    if (call.want_logsumexp) arena_->Out(&answer.logsumexp, &args.logsumexp);
    AddOutput(*arena_, args.shape.rows, kUnwrittenStatus, &answer.status, &args.status);
    return Run(args, answer);
  }

  absl::StatusOr<AttentionBackwardAnswer> AttentionSoftmaxBackward(
      const AttentionBackwardCall& call) {
    using Output = AttentionBackwardCall::Output;
    AttentionSoftmaxBackwardArgs args = call.args;
    AttentionBackwardAnswer answer{.d_scores = call.Before()};
    TensorView* over = nullptr;
    if (call.output == Output::kOverProbs) over = &args.probs;
    if (call.output == Output::kOverDProbs) over = &args.d_probs;
    if (over != &args.probs) Add(*arena_, call.probs, &args.probs);
    if (over != &args.d_probs) Add(*arena_, call.d_probs, &args.d_probs);
    Add(*arena_, &answer.d_scores, &args.d_scores, over);
    answer.d_sinks.assign(args.shape.heads, kUnwrittenFloat);
    if (!call.sinks.empty()) {
      arena_->In(call.sinks, &args.sinks);
      arena_->In(call.logsumexp, &args.logsumexp);
      arena_->Out(&answer.d_sinks, &args.d_sinks);
    }
    AddOutput(*arena_, args.shape.rows, kUnwrittenStatus, &answer.status, &args.status);
    return Run(args, answer);
  }

 private:
  explicit OpRunner(std::unique_ptr<Arena> arena) : arena_(std::move(arena)) {}

  template <typename Args, typename Answer>
  absl::StatusOr<Answer> Run(const Args& args, Answer& answer) {
    if (auto times = arena_->Run(args); !times.ok()) return times.status();
    return std::move(answer);
  }

  std::unique_ptr<Arena> arena_;
};

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_OP_RUNNER_H_

#include "bench/shards/call.h"

#include <cstring>

#include "kernels/sampling_rules.h"

namespace logitd::bench {
namespace {

constexpr int32_t kTopK = 20;

// Memory of a call in a slab of the first device: hidden states, parameters, answers.
class Layout {
 public:
  explicit Layout(const Slab& slab) : slab_(slab) {}

  template <class T>
  T* Take(int64_t count) {
    auto* const at = reinterpret_cast<T*>(slab_.device + next_);
    next_ += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return at;
  }
  template <class T>
  const T* Put(const std::vector<T>& values) {
    std::memcpy(slab_.host + next_, values.data(), values.size() * sizeof(T));
    return Take<T>(static_cast<int64_t>(values.size()));
  }
  size_t bytes() const { return next_; }

 private:
  const Slab slab_;
  size_t next_ = 0;
};

// Parameters of the rows of each op.
struct RowParams {
  explicit RowParams(const Case& c) : upstream(static_cast<size_t>(c.rows), 1.0f) {
    for (int64_t r = 0; r < c.rows; ++r) {
      topk.push_back({.first_entry = r * kTopK, .temperature = 1, .k = kTopK});
      SampleRow draw{};
      draw.active = 1;
      draw.seed = static_cast<uint64_t>(r);
      draw.temperature = 1;
      draw.top_k = 50;
      draw.top_p = 0.9f;
      draw.repetition = 1;
      draw.typical_p = 1;
      draw.first_mask_word = -1;
      sample.push_back(draw);
      draw.top_k = 0;
      draw.top_p = draw.typical_p = 1;
      unfiltered.push_back(draw);
      CrossEntropyRow score{};
      score.active = 1;
      score.temperature = 1;
      score.target = static_cast<int32_t>(r * 7919 % c.vocab);
      loss.push_back(score);
    }
  }
  std::vector<SoftmaxTopKRow> topk;
  std::vector<SampleRow> sample;
  std::vector<SampleRow> unfiltered;
  std::vector<CrossEntropyRow> loss;
  std::vector<float> upstream;  // of training
};

}  // namespace

Call::Call(const Case& c, const Slab& slab, const std::byte* states_end) : case_(c) {
  Layout layout(slab);
  const auto states = static_cast<size_t>(c.rows * c.hidden * kElement);
  std::memcpy(slab.host, states_end - states, states);
  hidden_ = {layout.Take<std::byte>(static_cast<int64_t>(states)), kDType, c.rows, c.hidden,
             c.hidden};
  params = layout.bytes();
  const RowParams rows(c);
  topk_rows_ = layout.Put(rows.topk);
  const std::vector<SampleRow>& sample =
      c.op == HeadOp::kSampleWhole ? rows.unfiltered : rows.sample;
  sample_rows_ = layout.Put(sample);
  max_kept_ = KeptTokens(sample.front());
  loss_rows_ = layout.Put(rows.loss);
  upstream_ = layout.Put(rows.upstream);
  first_answer = layout.bytes();
  floats_ = layout.Take<float>(c.rows * kTopK);
  ids_ = layout.Take<int32_t>(c.rows * kTopK);
  logsumexp_ = layout.Take<float>(c.rows);
  entropies_ = layout.Take<float>(c.rows);
  target_logprob_ = layout.Take<float>(c.rows);
  ranks_ = layout.Take<int32_t>(c.rows);
  support_size_ = layout.Take<int32_t>(c.rows);
  status_ = layout.Take<RowStatus>(c.rows);
  end = layout.bytes();
  if (c.op == HeadOp::kTraining) d_hidden = layout.Take<std::byte>(static_cast<int64_t>(states));
  bytes = layout.bytes();
  std::memset(slab.host + first_answer, 0, end - first_answer);
  std::memset(slab.host + end, 0xff, bytes - end);  // d_hidden: NaNs
}

absl::Status Call::Launch(Stream& stream, ShardedStream* sharded, const HeadView& head,
                          const std::vector<ShardGradient>& gradients) const {
  switch (case_.op) {
    case HeadOp::kTopK:
      return stream.Run(LinearTopKArgs{hidden_,
                                       head,
                                       {.rows = topk_rows_,
                                        .max_k = kTopK,
                                        .indices = ids_,
                                        .probs = floats_,
                                        .logsumexp = logsumexp_,
                                        .status = status_}});
    case HeadOp::kSample:
    case HeadOp::kSampleWhole:
      return stream.Run(LinearSampleArgs{hidden_,
                                         head,
                                         {.rows = sample_rows_,
                                          .edited = false,
                                          .tokens = ids_,
                                          .logprobs = floats_,
                                          .ranks = ranks_,
                                          .logsumexp = logsumexp_,
                                          .status = status_,
                                          .support_size = support_size_,
                                          .entropies = entropies_,
                                          .raw_entropies = entropies_},
                                         max_kept_});
    case HeadOp::kCrossEntropy:
      return stream.Run(LinearCrossEntropyArgs{hidden_,
                                               head,
                                               {.rows = loss_rows_,
                                                .want = 0,
                                                .max_top_logprobs = 0,
                                                .max_extra_ids = 0,
                                                .answers = {.loss = floats_,
                                                            .logsumexp = logsumexp_,
                                                            .target_logprob = target_logprob_,
                                                            .status = status_}}});
    case HeadOp::kTraining:
      return LaunchTraining(stream, sharded, head, gradients);
  }
  return absl::InternalError("no such op");
}

absl::Status Call::LaunchTraining(Stream& stream, ShardedStream* sharded, const HeadView& head,
                                  const std::vector<ShardGradient>& gradients) const {
  ShardedTrainingArgs args = {.training = {.gradient = {.hidden = hidden_,
                                                        .head = head,
                                                        .rows = loss_rows_,
                                                        .upstream = upstream_,
                                                        .d_hidden = {d_hidden, kDType, case_.rows,
                                                                     case_.hidden, case_.hidden}},
                                           .answers = {.loss = floats_,
                                                       .logsumexp = logsumexp_,
                                                       .target_logprob = target_logprob_,
                                                       .status = status_}},
                              .shards = gradients.data() + 1};
  if (sharded != nullptr) return sharded->ShardedTraining(args);
  args.training.gradient.d_weight = gradients.front().d_weight;
  return stream.Run(args.training);
}

}  // namespace logitd::bench

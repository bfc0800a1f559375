// A linear op of the bench: its memory in a slab, and how it is enqueued.
#ifndef LOGITD_BENCH_SHARDS_CALL_H_
#define LOGITD_BENCH_SHARDS_CALL_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/head.h"
#include "kernels/sharded_stream.h"

namespace logitd::bench {

enum class HeadOp { kTopK, kSample, kSampleWhole, kCrossEntropy, kTraining };
// Rows of linear_sample have top_k 50 and top_p 0.9, or no filter: then any token may be drawn.
constexpr const char* kOps[] = {"linear_topk", "linear_sample", "linear_sample_unfiltered",
                                "linear_cross_entropy", "linear_cross_entropy_training"};

struct Case {
  HeadOp op;
  int64_t rows;
  int64_t hidden;
  int64_t vocab;
};

constexpr DType kDType = DType::kBF16;
constexpr int64_t kElement = 2;

// Hidden states, parameters and answers of a call, one after another in a slab of the first device.
// All pointers are the device's.
struct Call {
  // Fills the host's side of the slab. The hidden states are the bytes before `states_end`.
  Call(const Case& c, const Slab& slab, const std::byte* states_end);

  // `sharded`: null, or `stream`, which then gets the head that is cut. `gradients`: of the whole
  // head, then of its shards; only for training.
  absl::Status Launch(Stream& stream, ShardedStream* sharded, const HeadView& head,
                      const std::vector<ShardGradient>& gradients) const;

  size_t params = 0;        // where they begin in the slab
  size_t first_answer = 0;  // where the answers begin, without gradients, and where they end
  size_t end = 0;
  size_t bytes = 0;  // of all, with d_hidden
  std::byte* d_hidden = nullptr;

 private:
  absl::Status LaunchTraining(Stream& stream, ShardedStream* sharded, const HeadView& head,
                              const std::vector<ShardGradient>& gradients) const;

  const Case case_;
  TensorView hidden_;
  const SoftmaxTopKRow* topk_rows_;
  const SampleRow* sample_rows_;
  int32_t max_kept_;
  const CrossEntropyRow* loss_rows_;
  const float* upstream_;
  float* floats_;
  int32_t* ids_;
  float* logsumexp_;
  float* entropies_;
  float* target_logprob_;
  int32_t* ranks_;
  int32_t* support_size_;
  RowStatus* status_;
};

}  // namespace logitd::bench

#endif  // LOGITD_BENCH_SHARDS_CALL_H_

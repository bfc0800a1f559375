// softmax_topk on the skeleton of rows: a block, or a cluster, takes a row.
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_TOPK_BLOCK_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_TOPK_BLOCK_CUH_

#include "kernels/cuda/rows/row_kernel.cuh"
#include "kernels/cuda/sampling/topk_row.cuh"

namespace logitd::cuda {

template <class T>
class TopKOp : public RowOp {
 public:
  using Element = T;
  using Params = TopKParams;
  using Cell = Stats;
  static constexpr bool kTops = true;

  __host__ __device__ static const TensorView& Logits(const Params& p) { return p.args.logits; }

  __device__ TopKOp(const Params& p, int64_t row) : ask_(p.args.rows[row]) {}
  __device__ bool Active() const { return ask_.k != 0; }
  __device__ int Tops() const { return ask_.k; }

  template <class Block>
  __device__ __forceinline__ float Read(RowStream<Block>& stream, const Part&, Stats* cells,
                                        const OpMemory<TopKOp, Block>& memory) {
    // Divisions in double are slow: this one while the first cells are on their way.
    log2e_over_temperature_ = kLog2E / ask_.temperature;
    exactly_ = RowResult::Log2EOver(ask_.temperature);
    return stream.Run({log2e_over_temperature_, cells}, memory.sketch);
  }

  // Called by all threads of the first block while others still send candidates.
  template <class Block>
  __device__ __forceinline__ void Meanwhile(const Params& p,
                                            const OpMemory<TopKOp, Block>& memory) {
    result_ = RowResult(MergeCells(memory.cells, p.cells, log2e_over_temperature_),
                        log2e_over_temperature_, exactly_);
  }

  template <class Block>
  __device__ __forceinline__ void FinishBlock(const Params& p, int64_t row_index, const Part&,
                                              const OpMemory<TopKOp, Block>& memory) {
    using Shape = typename Block::Pool;
    constexpr int kThreads = Block::kThreads;
    auto& s = Pool<Shape>();
    // The last warp of a cluster's block often has no key to rank.
    constexpr int kWriter = Block::kCluster ? Block::kWarps - 1 : 0;
    const auto write_row = [&] {
      if (threadIdx.x / 32 != kWriter) return;
      WriteRow<T>(p, row_index, ask_, result_, threadIdx.x % 32,
                  [&](int i) { return isnan(memory.cells[i].sum); });
    };
    if (!Block::kCluster) write_row();
    if (result_.Nan()) {
      EmitNothing(p.args, ask_, threadIdx.x, kThreads);
    } else {
      const int n = Trim<kThreads, Shape>(ask_.k, Shape::kPool / 2);
      int32_t* indices = p.args.indices + ask_.first_entry;
      float* probs = p.args.probs + ask_.first_entry;
      EmitByRank<kThreads>(s.pool, n, s.pool + Shape::kPool / 2, s.select, [&](int rank, Key key) {
        if (rank >= ask_.k) return;
        indices[rank] = KeyIndex(key);
        probs[rank] = result_.Probability(KeyLogit(key));
      });
    }
    if (Block::kCluster) write_row();
  }

 private:
  const SoftmaxTopKRow ask_;
  float log2e_over_temperature_;
  RowResult result_;
  double exactly_;  // log2(e) / temperature
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_TOPK_BLOCK_CUH_

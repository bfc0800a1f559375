// sample, the edit stage: bias, penalties and mask, applied while the row is read.
//
// A kernel before (edit_patches.cu) has sorted what a row's bias and history edit by cells, as
// patches. The edited row goes to scratch in f32, for later looks.
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_EDIT_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_EDIT_CUH_

#include "kernels/cuda/sampling/sample_row.cuh"

namespace logitd::cuda {

// A patch is a token to edit, in its cell: 10 bits of place, whether it has a bias, its sightings.
// Patches of a cell are stored where its edited logits will be, for they are read before those are
// written.
constexpr uint32_t kPatchSightings = (1u << 21) - 1;
constexpr uint32_t kPatchBias = 1u << 21;
constexpr int kPatchPlace = 22;
static_assert(2 * kSeenInPrompt - 1 <= kPatchSightings && kCell == 1 << (32 - kPatchPlace));

// Counts a sighting, which is 1, or sets it, where it is a flag.
__device__ __forceinline__ void AddSighting(uint32_t* sightings, uint32_t sighting) {
  if (sighting == 1) {
    atomicAdd(sightings, 1u);
  } else {
    atomicOr(sightings, sighting);
  }
}

// Enqueues the kernel that makes the patches of all rows of p.args. `early`: it may begin before
// the stream's earlier kernels have ended (LaunchShape).
cudaError_t MakePatches(const SampleParams& p, bool early, cudaStream_t stream);

// A row's edits, for the warps that read it.
struct Edits {
  const uint32_t* mask;      // null: none
  const int* patch_counts;   // of cells; null: no patches
  const float* bias_values;  // of tokens, where a patch says so
  float* edited;             // the row after edits; until a cell is written, its patches
  int end;                   // of the block's part of the row
  Penalties penalties;

  __device__ Edits(const SampleParams& p, const SampleRow& ask, int row, int part_end)
      : mask(ask.first_mask_word < 0 ? nullptr : p.args.mask_words + ask.first_mask_word),
        patch_counts(HasPatches(ask) ? p.patch_counts + static_cast<int64_t>(row) * p.cells
                                     : nullptr),
        bias_values(p.bias_values + row * p.edited_stride),
        edited(p.edited + row * p.edited_stride),
        end(part_end),
        penalties(ask) {}

  __device__ int PatchesOf(int first) const {
    return patch_counts != nullptr && first < end ? patch_counts[first / kCell] : 0;
  }
  __device__ uint32_t PatchAt(int first, int i) const {
    return reinterpret_cast<const uint32_t*>(edited)[first + i];
  }
  // The lane's word of the mask of the cell at `first`.
  __device__ uint32_t MaskWord(int first, int lane) const {
    const int word = first / 32 + lane;
    return mask != nullptr && word < MaskWords(end) ? mask[word] : ~0u;
  }
  // Applies a patch to the cell at `first`, whose logits are at `values`. -inf stays -inf.
  __device__ void Apply(uint32_t patch, int first, float* values) const {
    const int place = static_cast<int>(patch >> kPatchPlace);
    float x = values[place];
    if ((patch & kPatchBias) != 0) x = Biased(x, bias_values[first + place]);
    values[place] = penalties.Of(x, patch & kPatchSightings);
  }
  // Makes the lane's logits that the mask bans -inf. `word`: the lane's MaskWord().
  __device__ void Mask(uint32_t word, int lane, LaneCell<float>& y) const {
    if (mask == nullptr) return;
#pragma unroll
    for (int v = 0; v < kLaneElements / 4; ++v) {
      const uint32_t allowed = __shfl_sync(kFullWarp, word, 4 * v + lane / 8) >> (lane % 8 * 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if ((allowed & 1u << e) == 0) y.words[4 * v + e] = __float_as_uint(-kInfinity);
      }
    }
  }
  // Writes the lane's edited logits of the cell at `first`. Rows are padded to whole vectors.
  __device__ void Write(const LaneCell<float>& y, int first, int lane) const {
    uint4* to = reinterpret_cast<uint4*>(edited + first) + lane;
    const bool whole = first + kCell <= end;
#pragma unroll
    for (int v = 0; v < kLaneElements / 4; ++v) {
      if (whole || first + CellIndex<float>(lane, 4 * v) < end) to[32 * v] = y.Vector(v);
    }
  }
};

// What a lane has seen of a row: its largest logits as sent and after edits.
struct LaneBests {
  float raw;
  float edited;
};

// Reads the warp's cells of an edited row: writes the statistics of the row as sent and of the
// edited one, and those of the sketches that are not null. The edited logits are written where
// their sketch is. `cell_floats`: room for the warp's cell as floats, for 16-bit rows.
template <class Block>
__device__ __forceinline__ LaneBests ReadEdited(RowStream<Block>& stream, const Edits& edits,
                                                int begin, CellStats raw, CellStats own,
                                                EditPool::Sketch* raw_sketch,
                                                EditPool::Sketch* sketch, float* cell_floats) {
  using T = typename Block::Element;
  const int lane = threadIdx.x % 32;
  constexpr int kRound = Block::kWarps * kCell;
  int patch_count = edits.PatchesOf(stream.first());
  uint32_t patch = lane < patch_count ? edits.PatchAt(stream.first(), lane) : 0;
  uint32_t word = edits.MaskWord(stream.first(), lane);
  LaneBests bests{-kInfinity, -kInfinity};
  LaneCell<T> x;
  while (stream.Next(x)) {
    const int first = stream.first();
    const int at = (first - begin) / 32 + lane;
    const int count = patch_count;
    VectorMaxima<EditPool, T> raw_maxima(x);
    const float raw_max = raw_maxima.OfLane();
    if (raw_sketch != nullptr) raw_sketch[at] = raw_maxima.Sketch();
    const Stats raw_lane = LaneStats(x, raw_max, raw.log2e_over_temperature);
    LaneCell<float> y;
    const auto apply = [&](float* values) {
      if (lane < count) edits.Apply(patch, first, values);
      for (int i = lane + 32; i < count; i += 32)
        edits.Apply(edits.PatchAt(first, i), first, values);
      __syncwarp();
      LoadCell(values, lane, y);
      __syncwarp();
    };
    if constexpr (sizeof(T) == 4) {
      if (count > 0) {
        apply(stream.InShared());
      } else {
        y = x;
      }
    } else {
#pragma unroll
      for (int e = 0; e < kLaneElements; e += 4) {
        *reinterpret_cast<float4*>(cell_floats + CellIndex<T>(lane, e)) = {x[e], x[e + 1], x[e + 2],
                                                                           x[e + 3]};
      }
      __syncwarp();
      apply(cell_floats);
    }
    stream.Release();
    const uint32_t word_here = word;
    const int next = first + kRound;
    patch_count = edits.PatchesOf(next);
    patch = lane < patch_count ? edits.PatchAt(next, lane) : 0;
    word = edits.MaskWord(next, lane);
    edits.Mask(word_here, lane, y);
    VectorMaxima<EditPool, float> maxima(y);
    const float max = maxima.OfLane();
    if (sketch != nullptr) {
      edits.Write(y, first, lane);
      sketch[at] = maxima.Sketch();
    }
    const Stats raw_cell = MergeLanes(raw_lane, raw.log2e_over_temperature);
    const Stats own_cell =
        MergeLanes(LaneStats(y, max, own.log2e_over_temperature), own.log2e_over_temperature);
    if (lane == 0) {
      raw.cells[first / kCell] = raw_cell;
      own.cells[first / kCell] = own_cell;
    }
    bests.raw = fmaxf(bests.raw, raw_max);
    bests.edited = fmaxf(bests.edited, max);
  }
  return bests;
}

// Writes the edited logits of the cell at `first`, of a row that was read without writing them. By
// one warp. `values`: room for a cell in shared memory.
template <class T>
__device__ __noinline__ void WriteCell(const T* sent, Edits edits, int first, float* values) {
  AreInShared(values);
  const int lane = threadIdx.x % 32;
#pragma unroll 8
  for (int i = lane; i < kCell; i += 32)
    values[i] = first + i < edits.end ? ToFloat(sent[first + i]) : -kInfinity;
  __syncwarp();
  const int count = edits.PatchesOf(first);
  for (int i = lane; i < count; i += 32) edits.Apply(edits.PatchAt(first, i), first, values);
  __syncwarp();
  LaneCell<float> y;
  LoadCell(values, lane, y);
  edits.Mask(edits.MaskWord(first, lane), lane, y);
  edits.Write(y, first, lane);
  __syncwarp();
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_EDIT_CUH_

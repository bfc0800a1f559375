// sample, before a row is read: what its bias and history edit, sorted by cells, a patch for each
// token. A block a row. Tokens are counted in a table in shared memory; where they are too many for
// it, in device memory.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sampling/edit.cuh"

namespace logitd::cuda {
namespace {

constexpr int kThreads = 512;

struct PatchTable {
  static constexpr int kMaxSlots = 8192;
  static constexpr int kMaxTokens = kMaxSlots * 3 / 4;
  static constexpr uint32_t kFree = ~0u;
  uint32_t tokens[kMaxSlots];
  uint32_t sightings[kMaxSlots];
  int patches_of_cell[kMaxVocab / kCell];

  // `slots`: a power of two.
  __device__ void Add(uint32_t token, uint32_t sighting, uint32_t slots) {
    uint32_t slot = __umulhi(token * 2654435761u, slots);
    while (true) {
      const uint32_t held = atomicCAS(&tokens[slot], kFree, token);
      if (held == kFree || held == token) break;
      slot = (slot + 1) & (slots - 1);
    }
    AddSighting(&sightings[slot], sighting);
  }
};

// A row's parameters, read at once: most blocks do no more than look at them, and would wait for
// each that a condition reads.
__device__ __forceinline__ SampleRow ReadRow(const SampleRow& row) {
  struct {
    uint64_t words[sizeof(SampleRow) / sizeof(uint64_t)];
  } copy;
  const auto* from = reinterpret_cast<const uint64_t*>(&row);
#pragma unroll
  for (int i = 0; i < sizeof(SampleRow) / sizeof(uint64_t); ++i) copy.words[i] = from[i];
  return __builtin_bit_cast(SampleRow, copy);
}

__global__ void __launch_bounds__(kThreads, 3) PatchKernel(const __grid_constant__ SampleParams p) {
  extern __shared__ uint4 dynamic[];
  auto& table = *reinterpret_cast<PatchTable*>(dynamic);
  AwaitEarlierKernels();
  const SampleRow ask = ReadRow(p.args.rows[blockIdx.x]);
  if (ask.active == 0 || !HasPatches(ask) || IsEditedLate(p, ask) || IsIdle(p, blockIdx.x)) return;
  const int64_t at = blockIdx.x * p.edited_stride;
  uint32_t* counts = p.counts + at;
  uint32_t* patches = reinterpret_cast<uint32_t*>(p.edited + at);
  const SampleBias* bias = p.args.bias + ask.first_bias;
  const int32_t* history = p.args.history + ask.first_history;
  const int history_count = CountedHistory(ask);
  const int prompt = min(ask.prompt_tokens, history_count);
  const int bias_count = ask.bias_count;
  const int thread = threadIdx.x;
  const auto patch = [&](int token, uint32_t sightings) {
    const int cell = token / kCell;
    patches[cell * kCell + atomicAdd(&table.patches_of_cell[cell], 1)] =
        static_cast<uint32_t>(token % kCell) << kPatchPlace | sightings;
  };
  // Calls visit(token, sighting) for the thread's share of the history and of the bias.
  const auto each = [&](auto visit) {
    for (int i = thread; i < prompt; i += kThreads) visit(history[i], kSeenInPrompt);
    for (int i = prompt + thread; i < history_count; i += kThreads) visit(history[i], 1u);
    for (int i = thread; i < bias_count; i += kThreads) visit(bias[i].id, kPatchBias);
  };
  for (int cell = thread; cell < p.cells; cell += kThreads) table.patches_of_cell[cell] = 0;
  for (int i = thread; i < bias_count; i += kThreads)
    p.bias_values[at + bias[i].id] = bias[i].value;
  if (history_count <= PatchTable::kMaxTokens - bias_count) {
    int slots = kThreads;
    while (slots * 3 / 4 < history_count + bias_count) slots *= 2;
    for (int i = thread; i < slots; i += kThreads) {
      table.tokens[i] = PatchTable::kFree;
      table.sightings[i] = 0;
    }
    __syncthreads();
    each([&](int token, uint32_t sighting) { table.Add(token, sighting, slots); });
    __syncthreads();
    for (int i = thread; i < slots; i += kThreads) {
      if (table.tokens[i] != PatchTable::kFree)
        patch(static_cast<int>(table.tokens[i]), table.sightings[i]);
    }
  } else {
    each([&](int token, uint32_t) { counts[token] = 0; });
    __syncthreads();
    each([&](int token, uint32_t sighting) { AddSighting(&counts[token], sighting); });
    __syncthreads();
    each([&](int token, uint32_t) {
      const uint32_t sightings = atomicExch(&counts[token], 0u);
      if (sightings != 0) patch(token, sightings);  // else another of the same token has it
    });
  }
  __syncthreads();
  for (int cell = thread; cell < p.cells; cell += kThreads)
    p.patch_counts[static_cast<int64_t>(blockIdx.x) * p.cells + cell] = table.patches_of_cell[cell];
}

}  // namespace

cudaError_t MakePatches(const SampleParams& p, bool early, cudaStream_t stream) {
  return LaunchKernel(&PatchKernel,
                      {.grid = GridFor(p.args.logits.rows),
                       .threads = kThreads,
                       .shared_bytes = sizeof(PatchTable),
                       .early = early},
                      stream, p);
}

}  // namespace logitd::cuda

// The three most probable tokens of two rows, computed in this process: the ops without a server.
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels/backend.h"

namespace {

constexpr int kRows = 2, kVocab = 4, kTop = 3;

absl::Status Run() {
  // "auto" takes a GPU where there is one, and this build of logitd has CUDA.
  auto backend = logitd::CreateBackend("auto", {});
  if (!backend.ok()) return backend.status();
  auto stream = (*backend)->CreateStream();
  if (!stream.ok()) return stream.status();

  // One slab holds what the op reads and writes; on a GPU it has a copy on the device.
  struct Block {
    float logits[kRows * kVocab] = {0, 3, 1, 2, 5, 4, 7, 6};
    logitd::SoftmaxTopKRow rows[kRows] = {{.first_entry = 0, .temperature = 1, .k = kTop},
                                          {.first_entry = kTop, .temperature = 1, .k = kTop}};
    int32_t indices[kRows * kTop] = {};
    float probs[kRows * kTop] = {};
    float logsumexp[kRows] = {};
    logitd::RowStatus status[kRows] = {};
  } block;
  auto slab = (*backend)->AllocateSlab(sizeof(block));
  if (!slab.ok()) return slab.status();
  std::memcpy(slab->host, &block, sizeof(block));

  auto* device = reinterpret_cast<Block*>(slab->device);
  const logitd::SoftmaxTopKArgs args = {.logits = {.data = device->logits,
                                                   .dtype = logitd::DType::kF32,
                                                   .rows = kRows,
                                                   .cols = kVocab,
                                                   .row_stride = kVocab},
                                        .rows = device->rows,
                                        .max_k = kTop,
                                        .indices = device->indices,
                                        .probs = device->probs,
                                        .logsumexp = device->logsumexp,
                                        .status = device->status};
  absl::Status status = (*stream)->Upload(*slab, 0, sizeof(block));
  if (status.ok()) status = (*stream)->Run(args);
  if (status.ok()) status = (*stream)->Download(*slab, 0, sizeof(block));
  if (status.ok()) status = (*stream)->Wait().status();
  std::memcpy(&block, slab->host, sizeof(block));
  stream->reset();
  (*backend)->FreeSlab(*slab);
  if (!status.ok()) return status;
  for (int i = 0; i < kRows * kTop; ++i) {
    std::printf("%d %.4f%c", block.indices[i], block.probs[i], (i + 1) % kTop != 0 ? ' ' : '\n');
  }
  return absl::OkStatus();
}

}  // namespace

int main() {
  const absl::Status status = Run();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

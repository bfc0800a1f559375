// Small work that a stream does again and again, as graphs.
#ifndef LOGITD_KERNELS_CUDA_REPLAYS_H_
#define LOGITD_KERNELS_CUDA_REPLAYS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"

namespace logitd::cuda {

// The graphs of one stream. Each launch of a kernel takes the host 3 to 5 us; a graph of several
// takes less than one of them. A decode loop sends the same launches each time, with the same
// arguments, because what differs lies in memory. Not thread-safe.
class Replays {
 public:
  explicit Replays(cudaStream_t stream) : stream_(stream) {}
  // The stream is idle.
  ~Replays();
  Replays(const Replays&) = delete;
  Replays& operator=(const Replays&) = delete;

  // Enqueues what `enqueue` does: by calling it, or as a graph of an earlier call with the same
  // key. `key` says all that the launches depend on. `enqueue` uses the stream only, and no host
  // memory that may go. It is called twice where a graph cannot be made. `last_awaits`: the kernel
  // of the last launch itself waits for what the one before wrote, so it may begin while that one
  // ends.
  cudaError_t Run(const std::string& key, absl::FunctionRef<cudaError_t()> enqueue,
                  bool last_awaits = false);

  int64_t replayed() const { return replayed_; }  // runs of a graph

 private:
  // Keys are remembered from their first run on, and have a graph from the second.
  static constexpr size_t kMost = 32;

  struct Entry {
    std::string key;
    cudaGraphExec_t graph = nullptr;
    bool refused = false;  // no graph can be made
    int64_t used = 0;      // the run that used it last
  };
  Entry& Find(const std::string& key, bool* is_new);
  // Null: no graph can be made.
  cudaGraphExec_t Capture(absl::FunctionRef<cudaError_t()> enqueue, bool last_awaits);

  const cudaStream_t stream_;
  std::vector<Entry> entries_;
  int64_t runs_ = 0;
  int64_t replayed_ = 0;
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_REPLAYS_H_

// What streams of the CUDA backend are besides Stream, for work that joins several of them.
#ifndef LOGITD_KERNELS_CUDA_STREAM_H_
#define LOGITD_KERNELS_CUDA_STREAM_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "kernels/cuda/linear/shard_training.h"
#include "kernels/cuda/linear/shards.h"
#include "kernels/cuda/scratch.h"

namespace logitd::cuda {

// OK, UNAVAILABLE where the context still works, or INTERNAL. `what` was being done.
absl::Status ToStatus(cudaError_t error, std::string_view what);

// Writes what launchers must know of the thread's device.
absl::Status DescribeDevice(const cudaDeviceProp& properties, Scratch& scratch);

// True where the driver has the function, which is then in `function`. Nothing links the driver: a
// process starts without one.
bool FindInDriver(const char* name, void** function);
template <class Function>
bool FindInDriver(const char* name, Function& function) {
  return FindInDriver(name, reinterpret_cast<void**>(&function));
}

// Every stream of the CUDA backend is one.
class DeviceStream : public Stream {
 public:
  virtual int device() const = 0;
  virtual cudaStream_t native() const = 0;
  // How often small work ran as a graph.
  virtual int64_t replayed() const = 0;
  // Makes the stream's device the thread's, and ends the uploads: what is enqueued on native() next
  // comes after them, and counts as ops.
  virtual absl::Status BeginOps() = 0;
  // linear/shard_training.h. Between Begin and End the stream runs no other op.
  virtual bool TrainingFits(const ShardTrainingArgs& args) = 0;
  virtual absl::Status BeginTraining(const ShardTrainingArgs& args) = 0;
  virtual absl::Status EndTraining(
      const ShardTrainingArgs& args,
      absl::FunctionRef<cudaError_t(const MutableTensorView&)> hidden_done) = 0;
  // From now on Wait ends after `limit`, with DEADLINE_EXCEEDED, where work has not ended by then,
  // also work of calls that failed. The stream then still has that work.
  virtual void LimitWait(absl::Duration limit) = 0;
};

// A device that hangs: a call that waits for it would never return. From SetHung on, what frees
// memory or ends streams of the device leaves them as they are, and what would make some is
// UNAVAILABLE. Thread-safe.
void SetHung(int device);
bool IsHung(int device);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_STREAM_H_

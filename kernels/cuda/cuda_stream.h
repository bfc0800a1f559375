// A stream of the CUDA backend, and what it keeps until it enqueues it. Small work costs few calls
// of the driver: small copies are one launch, and small work that repeats is a graph. Its phases
// are timed by events, or by marks that its own kernels write.
//
// The methods are in cuda_stream.cu (its life, Wait, and the phases), cuda_stream_copies.cc (what
// it copies) and cuda_stream_ops.cc (what it computes).
#ifndef LOGITD_KERNELS_CUDA_CUDA_STREAM_H_
#define LOGITD_KERNELS_CUDA_CUDA_STREAM_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/cuda/gather.h"
#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/linear/routes.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/replays.h"
#include "kernels/cuda/stream.h"

namespace logitd::cuda {

class CudaStream final : public DeviceStream {
 public:
  static absl::StatusOr<std::unique_ptr<Stream>> Create(int device,
                                                        const cudaDeviceProp& properties,
                                                        StreamUse use);

  ~CudaStream() override;

  int device() const override { return device_; }
  int64_t replayed() const override { return replays_ == nullptr ? 0 : replays_->replayed(); }
  cudaStream_t native() const override { return stream_; }
  absl::Status BeginOps() override { return Enter(kComputing); }
  void LimitWait(absl::Duration limit) override { wait_limit_ = limit; }

  // Copies: cuda_stream_copies.cc.
  absl::Status Upload(const Slab& slab, size_t offset, size_t bytes) override;
  absl::Status Download(const Slab& slab, size_t offset, size_t bytes) override;
  absl::Status Fill(const Slab& slab, size_t offset, size_t bytes, std::byte* to) override;
  absl::Status Gather(absl::Span<const RowsCopy> copies) override;
  absl::Status Deliver(std::byte* to, const std::byte* from, size_t bytes) override;

  // Ops: cuda_stream_ops.cc.
  absl::Status RunOp(const Op& op) override;
  bool TrainingFits(const ShardTrainingArgs& args) override;
  absl::Status BeginTraining(const ShardTrainingArgs& args) override;
  absl::Status EndTraining(
      const ShardTrainingArgs& args,
      absl::FunctionRef<cudaError_t(const MutableTensorView&)> hidden_done) override;

  absl::StatusOr<StreamTimes> Wait() override;

 private:
  // An event marks the start of each phase.
  enum Phase { kUploading, kComputing, kDownloading, kDone, kPhases, kIdle = -1 };
  // Work is small, and may be a graph, with up to so many copies.
  static constexpr size_t kMostSmallCopies = 4;

  explicit CudaStream(int device) : device_(device) {}

  absl::Status StillRuns() const;

  // Waits until the stream has nothing to do, or has failed. False: the limit has passed.
  bool Settle();

  // Waits for the stream's end. cudaErrorNotReady: the limit has passed.
  cudaError_t Block();

  absl::Status Init(const cudaDeviceProp& properties, StreamUse use);

  // Work that is enqueued as a whole: uploads_, an op, a download. Until then nothing of it is.
  struct Small {
    std::string_view name;  // of the op
    absl::AnyInvocable<cudaError_t()> op;
    RowsCopy download = {};  // no rows: none
  };

  // True where an op on these logits is small work, and may be kept for RunDeferred.
  bool KeepsSmall(const TensorView& logits) const;

  // Enqueues what was kept, as a graph where it was the same before.
  absl::Status RunDeferred();

  cudaError_t EnqueueDeferred();

  // Enqueues what was kept, because other work follows it.
  absl::Status UndoDefer();

  // Enqueues an op. `launch` takes the arguments and the stream; before the stream it may take the
  // scratch, or products and the scratch. UNAVAILABLE where `op`'s route needs cuBLASLt and there
  // is none.
  template <class Launch, class Args>
  absl::Status Start(std::string_view name, const Launch& launch, const Args& args,
                     LinearOp op = {});

  // Whether a kernel uploads so many bytes, together with what is kept for it.
  bool KernelUploads(const std::byte* to, const std::byte* from, size_t bytes) const;

  // Whether the copy may share a launch with those that are kept.
  bool IsApart(const RowsCopy& copy) const;

  // Before a copy that is enqueued at once. Work that was asked for before it comes before it: an
  // op, and copies to the same place. After an op, the time of a copy counts as the op's.
  absl::Status EnterUpload(const RowsCopy& copy);

  // Rows of pinned host memory, no copy across the border of two pieces.
  cudaError_t CopyFromHost(const RowsCopy& copy);

  // Forgets the kept uploads.
  void DropUploads();

  // Small uploads that no Gather took.
  absl::Status FlushUploads();

  // One launch for all of them.
  absl::Status GatherUploads();

  // Work whose upload is kernels only is timed by marks that those kernels write, and its end is a
  // mark too. Four events would cost it 10 us: they are calls of the driver, and the device ends
  // one kernel before it takes an event and begins the next.
  void BeginByMarks();

  // For a download by a kernel. Without marks: none.
  Marks MarkDownload();

  // Before a download by a copy engine.
  absl::Status MarkCopy();

  // The marks of phases that have ended without them.
  absl::Status MarkUpTo(Phase phase);

  bool IsMarked() const { return __atomic_load_n(&marks_->done, __ATOMIC_ACQUIRE) == ends_; }

  StreamTimes TimesOfMarks() const;

  // Records the events of every phase up to `phase` that has not begun yet. The device is set each
  // time: the thread may have used another device's stream in between.
  absl::Status Enter(Phase phase);

  absl::Status Between(Phase begin, Phase end, int64_t& ns);

  const int device_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t events_[kPhases] = {};
  // Recorded only where a thread blocks: each end of such an event wakes a thread of the driver,
  // which takes 20 us of a core.
  cudaEvent_t blocking_ = nullptr;
  Phase phase_ = kIdle;
  std::vector<RowsCopy> uploads_;  // small ones, not enqueued yet
  size_t uploads_host_bytes_ = 0;  // what one launch would read of the host for them
  HostMarks* marks_ = nullptr;     // null: the stream only copies
  DeviceMarks* device_marks_ = nullptr;
  absl::Duration wait_limit_ = absl::InfiniteDuration();
  uint32_t ends_ = 0;      // the last value of HostMarks::done that was asked for
  bool gathers_ = false;   // uploads_ has copies of a Gather
  Small small_;            // without an op: nothing is kept
  std::string small_key_;  // all that small_.op depends on
  std::unique_ptr<Replays> replays_;
  // How the work since the last Wait is timed: by marks or by events; which marks were asked for.
  bool by_marks_ = false;
  bool upload_begun_ = false;
  bool upload_marked_ = false;
  bool download_begun_ = false;
  bool download_marked_ = false;
  Scratch scratch_;
  Products products_;
  absl::Status products_status_;  // not OK: cuBLASLt is missing; the answer of ops that need it
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_CUDA_STREAM_H_

// Batches that have begun, and the limits of what a device may begin.
#ifndef LOGITD_SERVER_ENGINE_RUNNING_H_
#define LOGITD_SERVER_ENGINE_RUNNING_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/engine/batch.h"
#include "server/engine/engine.h"
#include "server/engine/job.h"
#include "server/engine/run_slice.h"

namespace logitd::engine {

// A batch gets a slab of the device whose stream begins it, and stays on that device. It runs in
// slices, and between two slices it waits like any other work. Its priority drops by the time it
// has already run.
//
// Room for short work. While a device is at work, its last free slab is only for short interactive
// jobs; of two slabs, for interactive jobs up to kSlowSlice. Work that is expected to take slices
// longer than kSlowSlice does not begin one on the last free stream of a device, if it has several,
// nor on the last one of all devices. A light caller beside six that score makes 2.3 times as many
// calls so (bench/results/cpu/engine.json).
//
// Sharded heads. A batch on one runs on all devices together, and counts as work of the first. One
// slice of them runs at a time. When any device is lost, all work on sharded heads ends.
//
// Not thread-safe.
class RunningBatches {
 public:
  // `slabs`: the same number for each device, in the order of devices.
  RunningBatches(const EngineOptions& options, const SliceRules& rules, int devices,
                 const std::vector<Slab>& slabs);

  // True: some device that is not lost can run jobs of this key.
  bool CanRun(const BatchKey& key) const;
  // True: the device may begin a batch with this job now.
  bool MayBegin(int device, const Job& job) const;
  // A free slab of a device that may begin a batch.
  Batch* FreeBatch(int device);
  // The most urgent batch between two slices that the device may run. Null: there is none.
  Batch* Paused(int device);

  // The next slice of the batch begins, or has ended.
  void BeginSlice(Batch* batch);
  void EndSlice(Batch* batch);
  // The batch's jobs have all ended. Its slab is free, or kept by the answer.
  void End(Batch* batch);

  // False: the answer may not keep the batch's slab. Each device has as many for others as it has
  // streams.
  bool Keep(Batch* batch);
  void TakeBack(Batch* batch);

  void Lose(int device);
  bool lost(int device) const { return devices_[static_cast<size_t>(device)].lost; }
  // True: the device of the batch, or one of a sharded batch's, is lost.
  bool IsLost(const Batch& batch) const;

  void ForEach(Batch::State state, absl::FunctionRef<void(Batch*)> visit);
  std::optional<RunningBatch> Oldest(int64_t now_ns) const;
  int64_t kept() const { return kept_; }
  int64_t slabs_in_use() const;
  int64_t usable_slabs() const;

 private:
  struct Device {
    bool lost = false;
    int free = 0;     // slabs
    int at_work = 0;  // batches that run, or wait for their next slice
    int slow = 0;     // slices that may take longer than kSlowSlice
    int kept = 0;     // slabs that answers keep
  };

  Device& DeviceOf(const Batch& batch) { return devices_[static_cast<size_t>(batch.device)]; }
  bool MayBeSlow(int device) const;
  bool IsSlow(const Batch& batch) const;

  const EngineOptions options_;
  const SliceRules rules_;
  std::vector<Device> devices_;
  std::vector<Batch> batches_;
  const int slabs_of_each_;
  int devices_left_;
  int slow_ = 0;
  int64_t kept_ = 0;       // slabs
  bool sharding_ = false;  // a slice on a sharded head runs
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_RUNNING_H_

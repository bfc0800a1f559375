// The one fake device of the tests. Its memory is apart from the host's, so an op sees only what
// was uploaded. A test holds it, slows it, makes it fail, and reads what it ran.
#ifndef LOGITD_TESTS_FAKE_BACKEND_H_
#define LOGITD_TESTS_FAKE_BACKEND_H_

#include <any>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "tests/manual_clock.h"

namespace logitd {

// A device that is misused prints `what` and aborts.
void Require(bool condition, const char* what);

// Where a test holds the device or makes it fail. kUpload: Upload, Fill and Gather.
enum class FaultPoint { kAllocateDevice, kUpload, kOp, kWait };

// Thread-safe.
class FakeBackend final : public Backend {
 public:
  // One op that began.
  struct Ran {
    std::string tags;  // as given to FakeStream::Run
    int64_t rows = 0;
    size_t uploaded_bytes = 0;
    size_t gathered_bytes = 0;
  };

  explicit FakeBackend(DeviceInfo info = {.backend = "fake", .name = "fake"})
      : info_(std::move(info)) {}
  // Frees slabs that are left.
  ~FakeBackend() override;

  const DeviceInfo& device() const override { return info_; }
  absl::StatusOr<Slab> AllocateSlab(size_t bytes) override;
  void FreeSlab(const Slab& slab) override;
  absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes) override;
  void FreeDevice(const DeviceMemory& memory) override;
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream(StreamUse use) override;

  // Memory for slabs, and device memory besides them.
  void LimitSlabs(int slabs) { max_slabs_ = slabs; }
  void LimitDeviceBytes(size_t bytes) { max_device_bytes_ = bytes; }
  int live_slabs();
  size_t device_bytes();  // in use

  // From Hold to Release every thread that reaches `point` waits there.
  void Hold(FaultPoint point = FaultPoint::kOp);
  void Release();
  int held();  // threads that wait
  // Every op takes this long, and this much more for each of its rows. Streams report the latter.
  void SetOpTime(std::chrono::microseconds time);
  void SetRowTime(std::chrono::microseconds time);
  // These times pass on `clock`, without a sleep. Set before any stream runs.
  void UseClock(ManualClock* clock) { clock_ = clock; }
  // The next thread to reach `point` fails there with `status`.
  void FailNext(FaultPoint point, absl::Status status);
  // Asked at every point; wins over FailNext when not OK. Set before any stream runs.
  void SetFaults(std::function<absl::Status(FaultPoint)> faults) { faults_ = std::move(faults); }

  // Waits until `count` ops have begun since the start.
  void WaitForOps(size_t count);
  std::vector<Ran> log();  // every op that began, in order

 private:
  friend class FakeStream;
  absl::Status Reach(FaultPoint point, int64_t rows = 0);
  void Log(Ran ran);
  std::unique_ptr<Stream> CreateCpuStream();

  // A Fill that has not been waited for. Neither end of it may be freed.
  struct Filling {
    const void* stream;
    const std::byte* from;
    std::byte* to;
    size_t bytes;
  };
  bool IsFilling(const std::byte* memory, size_t bytes);

  const DeviceInfo info_;
  std::function<absl::Status(FaultPoint)> faults_;
  ManualClock* clock_ = nullptr;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<FaultPoint> hold_;
  int held_ = 0;
  std::chrono::microseconds op_time_{0};
  std::chrono::microseconds row_time_{0};
  std::vector<std::pair<FaultPoint, absl::Status>> next_faults_;
  std::vector<Ran> log_;
  std::vector<Filling> fills_;
  std::vector<Slab> slabs_;
  int max_slabs_ = 1 << 20;
  size_t device_bytes_ = 0;
  size_t max_device_bytes_ = SIZE_MAX;
  std::unique_ptr<Backend> cpu_;  // computes the real ops
};

// Checks the order of Stream: uploads, ops, downloads, then Wait, also after an error. Another
// order aborts. A Fill copies as late as a device may: in Wait. Memory that is freed before that
// aborts.
class FakeStream final : public Stream {
 public:
  // Without a backend the stream only records the arguments of its last op.
  explicit FakeStream(FakeBackend* backend = nullptr) : backend_(backend) {}
  absl::Status Upload(const Slab& slab, size_t offset, size_t bytes) override;
  absl::Status Download(const Slab& slab, size_t offset, size_t bytes) override;
  absl::Status Fill(const Slab& slab, size_t offset, size_t bytes, std::byte* to) override;
  absl::Status Gather(absl::Span<const RowsCopy> copies) override;
  absl::Status Deliver(std::byte* to, const std::byte* from, size_t bytes) override;
  absl::StatusOr<StreamTimes> Wait() override;

  absl::Status RunOp(const Op& op) override;

  // The arguments of the last op. Throws if that was another op.
  template <typename Args>
  const Args& last() const {
    return std::any_cast<const Args&>(last_);
  }

  using Stream::Run;
  // An op of the test's own: is logged as `tags`, waits and fails as the backend says, runs `body`.
  absl::Status Run(std::string tags, int64_t rows, absl::FunctionRef<absl::Status()> body);

 private:
  enum Phase { kIdle, kUploading, kComputing, kDownloading };
  void Enter(Phase phase);

  FakeBackend* const backend_;
  std::unique_ptr<Stream> cpu_;
  Phase phase_ = kIdle;
  size_t uploaded_bytes_ = 0;
  size_t gathered_bytes_ = 0;
  std::chrono::nanoseconds rows_time_{0};
  std::any last_;
};

}  // namespace logitd

#endif  // LOGITD_TESTS_FAKE_BACKEND_H_

// A device for tests: its memory is apart from the host's, so that only what is uploaded can be
// computed on; its op can be held, slowed and made to fail; and it keeps a log of what it ran.
#ifndef LOGITD_TESTS_ENGINE_FAKE_BACKEND_H_
#define LOGITD_TESTS_ENGINE_FAKE_BACKEND_H_

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "server/engine/job.h"

namespace logitd::engine {

// Parameters of a row of the op "digest". All zero: skip the row.
struct DigestRow {
  int64_t first_entry;
  int64_t first_note;
  int32_t entries;
  int32_t notes;
  uint32_t tag;  // which job the row is of; not 0
  uint32_t unused;
};

enum DigestAxis : size_t { kDigestRows = kRowAxis, kDigestEntries, kDigestNotes };

// What the op answers: per row a checksum of its payload, per entry one element of it, per row its
// tag plus the sum of its notes.
uint64_t Checksum(const std::byte* row, size_t bytes);
inline uint32_t EntryOf(const std::byte* row, int64_t row_elements, int32_t entry) {
  uint32_t element;
  std::memcpy(&element, row + (entry % row_elements) * sizeof(element), sizeof(element));
  return element + static_cast<uint32_t>(entry);
}

inline constexpr Array kDigestInputs[] = {{kDigestRows, sizeof(DigestRow)},
                                          {kDigestNotes, sizeof(uint32_t)}};
inline constexpr Array kDigestOutputs[] = {{kDigestRows, sizeof(uint64_t)},
                                           {kDigestEntries, sizeof(uint32_t)},
                                           {kDigestRows, sizeof(uint32_t)}};
extern const OpTraits kDigest;
inline constexpr const OpTraits* kFakeOps[] = {&kDigest};

// Where in a batch's run something goes wrong.
enum class FaultPoint { kUpload, kOp, kWait };

class FakeBackend final : public Backend {
 public:
  // One batch that ran, or tried to.
  struct Ran {
    std::string tags;  // of its rows, runs of one tag as one letter
    int64_t rows = 0;
    size_t uploaded_bytes = 0;
  };

  const DeviceInfo& device() const override { return info_; }
  absl::StatusOr<Slab> AllocateSlab(size_t bytes) override;
  void FreeSlab(const Slab& slab) override;
  absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes) override;
  void FreeDevice(const DeviceMemory& memory) override;
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream(StreamUse use) override;

  // There is memory for so many slabs.
  void LimitSlabs(int slabs) { max_slabs_ = slabs; }
  // Ops block from Hold to Release.
  void Hold();
  void Release();
  // Every op takes this long.
  void SetOpTime(std::chrono::microseconds time);
  // The next batch to reach `point` fails there with `status`.
  void FailNext(FaultPoint point, absl::Status status);
  // Asked at every point of every batch; wins over FailNext when not OK. Set before any stream
  // runs.
  void SetFaults(std::function<absl::Status(FaultPoint)> faults) { faults_ = std::move(faults); }

  // Waits until `count` ops have begun since the start.
  void WaitForOps(size_t count);
  std::vector<Ran> log();
  int live_slabs();
  // There is so much device memory beside slabs, and so much of it is taken.
  void LimitDeviceBytes(size_t bytes) { max_device_bytes_ = bytes; }
  size_t device_bytes();

 private:
  friend class FakeStream;
  absl::Status Fault(FaultPoint point);
  void BeginOp(Ran ran);

  // A copy that has not been waited for. Neither end of it may be freed.
  struct Filled {
    const void* stream;
    const std::byte* from;
    std::byte* to;
    size_t bytes;
  };
  bool Busy(const std::byte* memory, size_t bytes);

  DeviceInfo info_{.backend = "fake", .name = "fake"};
  std::function<absl::Status(FaultPoint)> faults_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
  std::chrono::microseconds op_time_{0};
  std::vector<std::pair<FaultPoint, absl::Status>> next_faults_;
  std::vector<Ran> log_;
  std::vector<Filled> fills_;
  int live_slabs_ = 0;
  int max_slabs_ = 1 << 20;
  size_t device_bytes_ = 0;
  size_t max_device_bytes_ = SIZE_MAX;
};

// Holds its user to the order of Stream: uploads, ops, downloads, then Wait, also after an error;
// anything else aborts. A Fill copies as late as a device may: when it is waited for;
// memory that is freed before that aborts.
class FakeStream final : public Stream {
 public:
  explicit FakeStream(FakeBackend* backend) : backend_(backend) {}
  absl::Status Upload(const Slab& slab, size_t offset, size_t bytes) override;
  absl::Status Download(const Slab& slab, size_t offset, size_t bytes) override;
  absl::Status Fill(const Slab& slab, size_t offset, size_t bytes, std::byte* to) override;
  absl::StatusOr<StreamTimes> Wait() override;
  absl::Status Digest(const BatchView& batch);
  // Any op: waits and fails as the backend says, then runs `body`.
  absl::Status Run(std::string tags, int64_t rows, absl::FunctionRef<void()> body);

 private:
  enum Phase { kIdle, kUploading, kComputing, kDownloading };
  void Enter(Phase phase);

  FakeBackend* const backend_;
  Phase phase_ = kIdle;
  size_t uploaded_bytes_ = 0;
};

}  // namespace logitd::engine

#endif  // LOGITD_TESTS_ENGINE_FAKE_BACKEND_H_

// An update of a head by rows in memory of others.
#ifndef LOGITD_SERVER_ENGINE_HEAD_UPDATE_H_
#define LOGITD_SERVER_ENGINE_HEAD_UPDATE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/types.h"
#include "server/engine/heads.h"
#include "server/engine/job.h"

namespace logitd::engine {

// The numbers of a head that rows replace.
enum class HeadPart : uint8_t {
  kWeight,  // [vocab, hidden], in the weight's dtype
  kBias,    // [vocab, 1], f32, as in HeadView
  kNorm,    // [1, hidden], f32, as in HeadView
};

struct HeadRows {
  HeadPart part = HeadPart::kWeight;
  DType dtype = DType::kF32;
  int64_t width = 0;      // elements of a row
  int64_t first = 0;      // the head's row that the first of them replaces
  int64_t count = 0;      // 1 or more
  size_t row_stride = 0;  // bytes between rows at `data`
  // The first row, in memory of `device`, as Devices counts, or of kAnyDevice: in host memory that
  // all devices copy from. Null: only `read` reaches the rows.
  const std::byte* data = nullptr;
  int device = kAnyDevice;
  // Copies `rows` of them from row `first` on, counted from 0, to `to` + i * `to_stride`; writes
  // nothing between. Only where `data` is null.
  std::function<void(int64_t first, int64_t rows, std::byte* to, size_t to_stride)> read;
};

// A new version of a head, which begins as a copy of the old one in memory of its own. Its end
// without Commit leaves the head as it was. Used by one thread at a time; ends before its Heads.
class HeadUpdate {
 public:
  ~HeadUpdate();
  HeadUpdate(const HeadUpdate&) = delete;
  HeadUpdate& operator=(const HeadUpdate&) = delete;

  // INVALID_ARGUMENT: the head has no such part, of this type and width, or not so many rows. Where
  // the rows lie does not matter.
  absl::Status CheckRows(const HeadRows& rows) const;

  // Copies the rows, which CheckRows has checked, to every device that holds them, and waits. What
  // others write there meanwhile may differ between devices. After an error only the end is left.
  // UNAVAILABLE: a device failed, or the rows lie on one that is lost. RESOURCE_EXHAUSTED: no
  // memory to copy through. INTERNAL: as for Heads::Load.
  absl::Status Write(const HeadRows& rows);

  // The new version takes the place of the old one: from here on Heads::Find returns it. Once.
  // ABORTED: the head was unloaded meanwhile.
  absl::StatusOr<std::shared_ptr<const Head>> Commit();

  // Heads counts the update by this error, unless a step failed before.
  void Fail(absl::Status why) { Remember(std::move(why)).IgnoreError(); }

  const Head& old() const { return *old_; }
  int64_t done_bytes() const { return done_bytes_; }  // of rows, each counted once

 private:
  friend class Heads;
  HeadUpdate(Heads* heads, std::shared_ptr<const Head> old, int64_t start_ns)
      : heads_(*heads), old_(std::move(old)), start_ns_(start_ns) {}

  // Begins: takes memory, and copies the old head.
  absl::Status Begin();
  absl::Status CopyRows(const HeadRows& rows);
  // The place of rows in the memory of a device.
  struct Place {
    std::byte* data = nullptr;
    size_t row_bytes;
    size_t row_stride;
  };
  // Copies `count` rows from row `from` of `rows` on to `to` on the device.
  absl::Status CopyTo(size_t device, const HeadRows& rows, int64_t from, int64_t count,
                      const Place& to);
  absl::Status CopyThroughHost(size_t device, const HeadRows& rows, int64_t from, int64_t count,
                               const Place& to);
  absl::Status Wait();
  absl::Status Remember(absl::Status status);

  Heads& heads_;
  const std::shared_ptr<const Head> old_;
  const int64_t start_ns_;
  std::vector<Head::Copy> copies_;                // by device
  std::vector<std::unique_ptr<Stream>> streams_;  // by device; null: it is lost
  int64_t done_bytes_ = 0;
  absl::Status failed_;
  bool ended_ = false;  // Heads knows
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_HEAD_UPDATE_H_

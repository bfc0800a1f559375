// Devices for leases in tests.
#ifndef LOGITD_TESTS_ARENA_FAKE_DEVICES_H_
#define LOGITD_TESTS_ARENA_FAKE_DEVICES_H_

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/arena/leases.h"

namespace logitd::arena {

// Devices 10, 11, ... whose memory is memory of this process.
class FakeDevices final : public ArenaDevices {
 public:
  explicit FakeDevices(int count) : lost_(static_cast<size_t>(count)) {}
  ~FakeDevices() override {
    EXPECT_EQ(made, 0);
    EXPECT_EQ(pinned, 0);
  }

  int count() const override { return static_cast<int>(lost_.size()); }
  bool lost(int device) const override { return lost_[static_cast<size_t>(device)]; }
  uint32_t number(int device) const override { return static_cast<uint32_t>(10 + device); }
  void Lose(int device) { lost_[static_cast<size_t>(device)] = true; }

  absl::StatusOr<std::unique_ptr<DeviceArena>> Make(int device, int64_t bytes) override {
    if (bytes > room) return absl::ResourceExhaustedError("device memory is full");
    return std::make_unique<Piece>(this, device, bytes);
  }
  std::shared_ptr<const void> Pin(std::byte* data, int64_t bytes) override {
    if (refuses_to_pin) return nullptr;
    ++pinned;
    first_pinned = *data;
    return {data, [this](std::byte*) { --pinned; }};
  }
  bool pins() const override { return true; }

  int64_t room = INT64_MAX;
  bool refuses_to_pin = false;
  std::atomic<int> made = 0;
  std::atomic<int> pinned = 0;
  std::byte first_pinned{255};

 private:
  class Piece final : public DeviceArena {
   public:
    Piece(FakeDevices* devices, int device, int64_t bytes)
        : devices_(devices), device_(device), memory_(static_cast<size_t>(bytes)) {
      ++devices_->made;
      fd_ = open("/dev/null", O_RDONLY | O_CLOEXEC);
    }
    ~Piece() override {
      if (fd_ >= 0) close(fd_);
      --devices_->made;
    }
    std::byte* data() const override { return const_cast<std::byte*>(memory_.data()); }
    int64_t bytes() const override { return static_cast<int64_t>(memory_.size()); }
    int device() const override { return device_; }
    ArenaDevice description() const override {
      return {.uuid = {1, 2, 3}, .number = devices_->number(device_)};
    }
    int TakeDescriptor() override { return std::exchange(fd_, -1); }
    absl::Status Write(int64_t offset, absl::Span<const std::byte> from) const override {
      std::memcpy(data() + offset, from.data(), from.size());
      return absl::OkStatus();
    }

   private:
    FakeDevices* const devices_;
    const int device_;
    std::vector<std::byte> memory_;
    int fd_;
  };

  std::vector<bool> lost_;
};

}  // namespace logitd::arena

#endif  // LOGITD_TESTS_ARENA_FAKE_DEVICES_H_

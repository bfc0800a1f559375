// Leases of memory of devices, and of host memory that devices copy from. The devices are fakes.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/arena/leases.h"
#include "tests/arena/fake_devices.h"

namespace logitd::arena {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kUnit = int64_t{2} << 20;

std::string_view IdOf(const LeaseId& id) {
  return {reinterpret_cast<const char*>(id.data()), id.size()};
}

int64_t OpenDescriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                       std::filesystem::directory_iterator());
}

TEST(DeviceArenasTest, ALeaseOfADeviceIsInUnitsAndNamesItsDevice) {
  FakeDevices devices(1);
  const int64_t before = OpenDescriptors();
  Leases leases({.max_bytes = 4096, .max_leases = 2, .max_device_bytes = 4 * kUnit}, &devices);
  const auto lease = leases.OpenOnDevice(0, kUnit + 1);
  ASSERT_TRUE(lease.ok()) << lease.status();
  EXPECT_EQ(lease->bytes, 2 * kUnit);
  ASSERT_TRUE(lease->device.has_value());
  EXPECT_EQ(lease->device->number, 10);
  EXPECT_EQ(lease->device->uuid[2], 3);
  EXPECT_EQ(OpenDescriptors(), before + 1);
  close(lease->fd);
  EXPECT_EQ(leases.device_bytes(), 2 * kUnit);
  EXPECT_EQ(leases.bytes(), 0);
  auto arena = leases.Find(IdOf(lease->id));
  ASSERT_TRUE(arena.ok());
  EXPECT_TRUE((*arena)->on_device());
  EXPECT_EQ((*arena)->device(), 0);
  const std::byte value{7};
  EXPECT_TRUE((*arena)->Write(5, {&value, 1}).ok());
  EXPECT_EQ((*arena)->address()[5], value);
  // A call that uses it keeps it from being freed.
  leases.End(lease->id);
  EXPECT_TRUE(leases.FreeEnded());
  EXPECT_EQ(devices.made, 1);
  arena->reset();
  EXPECT_FALSE(leases.FreeEnded());
  EXPECT_EQ(devices.made, 0);
  EXPECT_EQ(leases.device_bytes(), 0);
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST(DeviceArenasTest, WithoutADeviceTheyAreRefused) {
  Leases leases({.max_bytes = 4096, .max_leases = 2, .max_device_bytes = kUnit});
  const auto lease = leases.OpenOnDevice(0, 1);
  EXPECT_EQ(lease.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(lease.status().message()),
              HasSubstr("got kind 2 (memory of a GPU), allowed 1 (memory of the host)"));
}

TEST(DeviceArenasTest, RefusalsSayBothNumbersAndLeaveNothing) {
  FakeDevices devices(2);
  const int64_t before = OpenDescriptors();
  Leases leases({.max_bytes = 4096, .max_leases = 3, .max_device_bytes = 3 * kUnit}, &devices);
  const auto refusal = [&](uint32_t device, int64_t bytes) {
    const auto lease = leases.OpenOnDevice(device, bytes);
    return absl::StrCat(absl::StatusCodeToString(lease.status().code()), " ",
                        lease.status().message());
  };
  for (const int64_t bytes : {int64_t{-1}, int64_t{0}, 3 * kUnit + 1, INT64_MAX}) {
    EXPECT_THAT(refusal(0, bytes),
                HasSubstr(absl::StrCat("INVALID_ARGUMENT arena: got ", bytes,
                                       " bytes of a GPU to lease, allowed 1..", 3 * kUnit)));
  }
  EXPECT_THAT(refusal(10, 1), HasSubstr("NOT_FOUND arena: got device 9, allowed a device that"));
  const auto first = leases.OpenOnDevice(12, 2 * kUnit);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->device->number, 11);
  EXPECT_THAT(refusal(12, kUnit + 1),
              HasSubstr(absl::StrCat("RESOURCE_EXHAUSTED arena: got ", 2 * kUnit,
                                     " bytes of device 11 to lease, allowed ", kUnit, ": ",
                                     2 * kUnit, " of ", 3 * kUnit)));
  devices.room = 0;
  EXPECT_THAT(refusal(0, 1), HasSubstr("RESOURCE_EXHAUSTED device memory is full"));
  devices.room = INT64_MAX;
  // The other device has the fewest leased bytes.
  const auto second = leases.OpenOnDevice(0, 1);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second->device->number, 10);
  devices.Lose(0);
  EXPECT_THAT(refusal(11, 1), HasSubstr("NOT_FOUND arena: got device 10"));
  const auto third = leases.OpenOnDevice(0, 1);
  ASSERT_TRUE(third.ok());
  EXPECT_EQ(third->device->number, 11);
  EXPECT_THAT(refusal(0, 1), HasSubstr("got one lease more than the 3 in use, allowed 3"));
  leases.BeginDrain();
  EXPECT_THAT(refusal(0, 1), HasSubstr("UNAVAILABLE arena: the server is shutting down"));
  EXPECT_EQ(devices.made, 3);
  for (const auto* lease : {&*first, &*second, &*third}) {
    close(lease->fd);
    leases.End(lease->id);
  }
  EXPECT_FALSE(leases.FreeEnded());
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST(DeviceArenasTest, NoDeviceIsLeft) {
  FakeDevices devices(1);
  devices.Lose(0);
  Leases leases({.max_bytes = 4096, .max_leases = 3, .max_device_bytes = kUnit}, &devices);
  EXPECT_EQ(leases.OpenOnDevice(0, 1).status().code(), absl::StatusCode::kUnavailable);
}

// All pages are there before the client has the file, and devices see what it writes.
TEST(DeviceArenasTest, HostMemoryIsPinnedWithAllItsPages) {
  FakeDevices devices(1);
  Leases leases({.max_bytes = 1 << 20, .max_leases = 3}, &devices);
  const auto lease = leases.Open(10000);
  ASSERT_TRUE(lease.ok()) << lease.status();
  EXPECT_EQ(devices.pinned, 1);
  EXPECT_EQ(devices.first_pinned, std::byte{0});
  EXPECT_EQ(leases.bytes(), 12288);
  struct stat file = {};
  ASSERT_EQ(fstat(lease->fd, &file), 0);
  EXPECT_EQ(file.st_blocks * 512, 12288);
  auto arena = leases.Find(IdOf(lease->id));
  ASSERT_TRUE(arena.ok());
  EXPECT_FALSE((*arena)->on_device());
  ASSERT_NE((*arena)->address(), nullptr);
  const char text[] = "rows";
  ASSERT_EQ(pwrite(lease->fd, text, sizeof(text), 4094), ssize_t{sizeof(text)});
  EXPECT_STREQ(reinterpret_cast<const char*>((*arena)->address()) + 4094, text);
  close(lease->fd);
  leases.End(lease->id);
  EXPECT_TRUE(leases.FreeEnded());
  EXPECT_EQ(devices.pinned, 1);
  arena->reset();
  EXPECT_FALSE(leases.FreeEnded());
  EXPECT_EQ(devices.pinned, 0);
}

// The server pays for pinned pages, so a client that keeps the file must not keep them.
TEST(DeviceArenasTest, PinnedPagesLeaveAFileThatTheClientKeeps) {
  FakeDevices devices(1);
  auto remover = PageRemover::Start();
  ASSERT_TRUE(remover.ok()) << remover.status();
  Leases leases({.max_bytes = 1 << 20, .max_leases = 1}, &devices, remover->get());
  const auto lease = leases.Open(1 << 20);
  ASSERT_TRUE(lease.ok()) << lease.status();
  leases.End(lease->id);
  leases.FreeEnded();
  EXPECT_EQ(devices.pinned, 0);
  pollfd freed = {.fd = leases.freed_fd(), .events = POLLIN, .revents = 0};
  ASSERT_EQ(poll(&freed, 1, 20000), 1);
  leases.FreeEnded();
  EXPECT_EQ(leases.bytes(), 0);
  struct stat file = {};
  ASSERT_EQ(fstat(lease->fd, &file), 0);
  EXPECT_EQ(file.st_blocks, 0);
  close(lease->fd);
}

TEST(DeviceArenasTest, WhatCannotBePinnedIsReadByTheFile) {
  FakeDevices devices(1);
  devices.refuses_to_pin = true;
  Leases leases({.max_bytes = 1 << 20, .max_leases = 3}, &devices);
  const auto lease = leases.Open(4096);
  ASSERT_TRUE(lease.ok()) << lease.status();
  close(lease->fd);
  const auto arena = leases.Find(IdOf(lease->id));
  ASSERT_TRUE(arena.ok());
  EXPECT_EQ((*arena)->address(), nullptr);
  std::byte value{9};
  const absl::Span<std::byte> to(&value, 1);
  (*arena)->Read(4095, {&to, 1});
  EXPECT_EQ(value, std::byte{0});
}

}  // namespace
}  // namespace logitd::arena

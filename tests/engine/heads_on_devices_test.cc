// Heads on several devices.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/engine/devices.h"
#include "server/engine/heads.h"
#include "server/engine/metrics.h"
#include "tests/engine/heads_fixture.h"

namespace logitd::engine {
namespace {

using ::testing::HasSubstr;

// A second device beside backend_.
class HeadsOnTwoDevicesTest : public HeadsTest {
 protected:
  absl::StatusOr<std::shared_ptr<const Head>> LoadNamed() {
    return heads_on_two_.Load(Request("named.safetensors"), Always);
  }
  size_t BytesInUse() { return backend_.device_bytes() + second_.device_bytes(); }

  FakeBackend second_{{.backend = "fake", .number = 4, .name = "fake"}};
  std::shared_ptr<Devices> devices_ =
      std::make_shared<Devices>(std::vector<Backend*>{&backend_, &second_});
  Metrics metrics_of_two_{{}, std::vector<int>{0, 4}};
  Heads heads_on_two_{devices_, &metrics_of_two_};
};

TEST_F(HeadsOnTwoDevicesTest, EachDeviceHasACopy) {
  const auto head = LoadNamed();
  ASSERT_TRUE(head.ok()) << head.status();
  for (int device = 0; device < 2; ++device) {
    EXPECT_EQ(Wrong((*head)->view(device)), "") << device;
    for (int i = 0; i < 5; ++i) EXPECT_EQ((*head)->view(device).bias[i], Pattern(i, 0));
  }
  EXPECT_NE((*head)->view(0).weight.data, (*head)->view(1).weight.data);
  const auto bytes = static_cast<size_t>((*head)->info().device_bytes);
  EXPECT_EQ(backend_.device_bytes(), bytes);
  EXPECT_EQ(second_.device_bytes(), bytes);
  EXPECT_EQ(metrics_of_two_.Get(Gauge::kHeadBytes), static_cast<int64_t>(2 * bytes));
}

TEST_F(HeadsOnTwoDevicesTest, WithoutRoomOnOneThereIsNoHeadOnAny) {
  second_.LimitDeviceBytes(10);
  const absl::Status refused = LoadNamed().status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("device 4: no device memory"));
  EXPECT_EQ(BytesInUse(), 0u);
  EXPECT_EQ(metrics_of_two_.Get(Gauge::kHeadBytes), 0);
  EXPECT_TRUE(heads_on_two_.List().empty());
  second_.LimitDeviceBytes(SIZE_MAX);
  EXPECT_TRUE(LoadNamed().ok());
}

TEST_F(HeadsOnTwoDevicesTest, ACopyThatFailsLeavesNothingAndSaysWhichDeviceIsLost) {
  for (const FaultPoint point : {FaultPoint::kUpload, FaultPoint::kWait}) {
    second_.FailNext(point, absl::InternalError("sticky"));
    const absl::Status lost = LoadNamed().status();
    EXPECT_TRUE(absl::IsInternal(lost)) << lost;
    EXPECT_EQ(DeviceOf(lost), 1);
    EXPECT_EQ(BytesInUse(), 0u);
    EXPECT_EQ(backend_.live_slabs() + second_.live_slabs(), 0);
  }
}

TEST_F(HeadsOnTwoDevicesTest, ALostDeviceGetsNoCopy) {
  for (const int lost : {0, 1}) {
    devices_ = std::make_shared<Devices>(std::vector<Backend*>{&backend_, &second_});
    devices_->Lose(lost);
    Heads heads(devices_, nullptr);
    const auto head = heads.Load(Request("named.safetensors"), Always);
    ASSERT_TRUE(head.ok()) << head.status();
    EXPECT_EQ(Wrong((*head)->view()), "");
    EXPECT_EQ(&(*head)->view(), &(*head)->view(1 - lost));
    EXPECT_EQ((lost == 0 ? backend_ : second_).device_bytes(), 0u);
  }
  devices_->Lose(0);
  Heads heads(devices_, nullptr);
  EXPECT_TRUE(absl::IsInternal(heads.Load(Request("named.safetensors"), Always).status()));
}

// ---- Sharded heads, on simulated devices

class ShardedHeadsTest : public HeadsTest {
 protected:
  static constexpr int kDevices = 4;

  ShardedHeadsTest() {
    for (int i = 0; i < kDevices; ++i) {
      cpus_.push_back(CreateCpuBackend({.device = i, .cpu_threads = 1}).value());
      backends_.push_back(cpus_.back().get());
    }
    devices_ = std::make_shared<Devices>(backends_);
  }
  HeadRequest Sharded(const std::string& path) {
    HeadRequest request = Request(path, /*norm=*/true);
    request.shard = true;
    return request;
  }

  std::vector<std::unique_ptr<Backend>> cpus_;
  std::vector<Backend*> backends_;
  std::shared_ptr<Devices> devices_;
  Metrics metrics_of_all_{{}, std::vector<int>{0, 1, 2, 3}};
};

TEST_F(ShardedHeadsTest, EachDeviceHasItsOwnRowsAndTheWholeNorm) {
  Heads heads(devices_, &metrics_of_all_);
  HeadProgress last;
  const auto loaded = heads.Load(Sharded("wide"), [&](const HeadProgress& progress) {
    last = progress;
    return true;
  });
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const Head& head = **loaded;
  EXPECT_TRUE(head.sharded());
  // Three cells on four devices: 2500 tokens, of 2600 that are stored.
  const int64_t tokens[] = {1024, 1024, 452, 0};
  const HeadView& whole = head.view();
  EXPECT_EQ(&whole, &head.view(2));
  EXPECT_EQ(whole.vocab(), 2500);
  EXPECT_EQ(whole.hidden(), 3);
  EXPECT_NE(whole.bias, nullptr);
  EXPECT_NE(whole.norm, nullptr);
  ASSERT_EQ(whole.shard_count, kDevices);
  int64_t total = 0;
  for (int i = 0; i < kDevices; ++i) {
    const HeadView& part = whole.shards[i];
    ASSERT_EQ(part.vocab(), tokens[i]);
    if (tokens[i] > 0) {
      EXPECT_EQ(Wrong(part), "") << i;  // the pattern repeats after 64 rows
      for (int64_t t = 0; t < tokens[i]; ++t) ASSERT_EQ(part.bias[t], Pattern(t, 0)) << i;
      for (int64_t d = 0; d < 3; ++d) EXPECT_EQ(part.norm[d], Pattern(d, 0)) << i;
    }
    const auto bytes = static_cast<int64_t>(head.copies()[static_cast<size_t>(i)].memory.bytes);
    EXPECT_LE(bytes, head.info().device_bytes);
    EXPECT_EQ(heads.bytes(i), bytes);
    total += bytes;
  }
  EXPECT_EQ(heads.bytes(3), 0);
  EXPECT_EQ(metrics_of_all_.Get(Gauge::kHeadBytes), total);
  EXPECT_EQ(last.total_bytes, 2500 * (3 * 2 + 2) + 3 * 3 * 2);
  EXPECT_EQ(last.done_bytes, last.total_bytes);
}

TEST_F(ShardedHeadsTest, UnloadingGivesTheMemoryOfEveryDeviceBack) {
  Heads heads(devices_, &metrics_of_all_);
  ASSERT_TRUE(heads.Load(Sharded("wide"), Always).ok());
  EXPECT_GT(heads.bytes(2), 0);
  ASSERT_TRUE(heads.Unload("h").ok());
  for (int i = 0; i < kDevices; ++i) EXPECT_EQ(heads.bytes(i), 0) << i;
  EXPECT_EQ(metrics_of_all_.Get(Gauge::kHeadBytes), 0);
}

TEST_F(ShardedHeadsTest, TheLimitCountsWhatEachDeviceHolds) {
  const int64_t whole =
      (*Heads(devices_, nullptr).Load(Request("wide"), Always))->info().device_bytes;
  Heads heads(devices_, nullptr, whole / 2);
  EXPECT_TRUE(absl::IsResourceExhausted(heads.Load(Request("wide"), Always).status()));
  for (int i = 0; i < kDevices; ++i) EXPECT_EQ(heads.bytes(i), 0) << i;
  EXPECT_TRUE(heads.Load(Sharded("wide"), Always).ok());
  // The first device has no room for a second head, though the last is empty.
  HeadRequest second = Sharded("wide");
  second.name = "second";
  const absl::Status full = heads.Load(second, Always).status();
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
}

TEST_F(ShardedHeadsTest, WhereADeviceIsLostOrCannotThereIsASentence) {
  Heads heads(devices_, nullptr);
  devices_->Lose(2);
  const absl::Status lost = absl::FailedPreconditionError(
      "head h: shard: got 3 of 4 devices that serve, allowed all; a lost device comes back with a "
      "restart");
  EXPECT_EQ(heads.Load(Sharded("wide"), Always).status(), lost);
  EXPECT_EQ(heads.Check(Sharded("wide")), lost);
  const absl::Status cannot = absl::FailedPreconditionError(
      "head h: shard: got backend fake, allowed cpu or cuda, the same for all devices; on others "
      "each device holds the whole head");
  EXPECT_EQ(heads_.Check(Sharded("wide")), cannot);
  EXPECT_EQ(Load(Sharded("wide")).status(), cannot);
  EXPECT_TRUE(heads_.List().empty());
}

}  // namespace
}  // namespace logitd::engine

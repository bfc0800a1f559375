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

}  // namespace
}  // namespace logitd::engine

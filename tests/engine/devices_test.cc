// The engine's threads on several devices: all work at the same time, and what a lost device takes
// with it.
#include "server/engine/devices.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/activity.h"
#include "tests/engine/engine_fixture.h"

namespace logitd::engine {
namespace {

using ::testing::HasSubstr;

EngineOptions OneJobABatch() {
  EngineOptions options = SmallOptions();
  options.max_batch_rows = 1;
  return options;
}

class DevicesTest : public EngineFixture {
 protected:
  void Hold() {
    for (const auto& backend : backends_) backend->Hold();
  }
  int CountOfFailed() {
    int failed = 0;
    for (const auto& job : jobs_) {
      const absl::Status status = job->Wait();
      failed += status.ok() ? 0 : 1;
      EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
    }
    return failed;
  }
};

TEST_F(DevicesTest, EveryDeviceTakesItsShareOfWhatWaits) {
  Start(OneJobABatch(), /*devices=*/4);
  Hold();
  for (int i = 0; i < 20; ++i) Submit();
  WaitUntilHeld(4);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(Ran(i), 1u);
  // The other devices stand still, and keep only the batch that they run.
  device(1).Release();
  device(1).WaitForOps(17);
  for (const int i : {0, 2, 3}) EXPECT_EQ(Ran(i), 1u);
  for (const auto& backend : backends_) backend->Release();
  WaitIdle();
  EXPECT_EQ(CountOfFailed(), 0);
  const std::string page = Scrape(*metrics_);
  for (int i = 0; i < 4; ++i) {
    EXPECT_THAT(page, HasSubstr(absl::StrCat("logitd_device_rows_total{device=\"", 10 + i, "\"} ",
                                             Ran(i), "\n")));
  }
}

// Device 1 stands still with work that only it can do.
TEST_F(DevicesTest, BoundWorkWakesOnlyItsDevice) {
  Start(OneJobABatch(), /*devices=*/2);
  device(1).Hold();
  auto bound = Submit({.placed = true, .device = 1});
  WaitUntilHeld(1);
  auto waits = Submit({.placed = true, .device = 1});
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(Submit()->Wait().ok());
  EXPECT_FALSE(waits->status().has_value());
  device(1).Release();
  EXPECT_TRUE(waits->Wait().ok());
  EXPECT_EQ(Ran(0), 20u);
  EXPECT_EQ(Ran(1), 2u);
}

TEST_F(DevicesTest, ALostDeviceHarmsOnlyTheBatchesThatItRuns) {
  Start(OneJobABatch(), /*devices=*/2);
  Hold();
  device(1).FailNext(FaultPoint::kWait, absl::InternalError("sticky"));
  auto found = Submit({.placed = true, .device = 1});
  WaitUntilHeld(1);
  auto bound = Submit({.placed = true, .device = 1});
  for (int i = 0; i < 20; ++i) Submit();
  WaitUntilHeld(2);
  device(1).Release();
  EXPECT_THAT(found->Wait().ToString(), HasSubstr("UNAVAILABLE: the device failed: sticky"));
  EXPECT_EQ(bound->Wait(), absl::UnavailableError("device 11 is lost: sticky"));
  device(0).Release();
  WaitIdle();
  for (int i = 0; i < 20; ++i) Submit();  // it does not come back
  EXPECT_EQ(CountOfFailed(), 2);
  EXPECT_EQ(Ran(1), 1u);
  EXPECT_EQ(owner_told_, 0);
  EXPECT_EQ(devices_->left(), 1);
  WaitIdle();
  const std::string page = Scrape(*metrics_);
  for (const char* line :
       {"logitd_device_up{device=\"10\"} 1\n", "logitd_device_up{device=\"11\"} 0\n",
        "logitd_device_errors_total{device=\"11\",kind=\"lost\"} 1\n",
        "logitd_device_errors_total{device=\"10\",kind=\"lost\"} 0\n", "logitd_slabs 4\n"}) {
    EXPECT_THAT(page, HasSubstr(line));
  }
  // The last one ends the service.
  device(0).FailNext(FaultPoint::kOp, absl::InternalError("sticky"));
  EXPECT_TRUE(absl::IsUnavailable(Submit()->Wait()));
  EXPECT_TRUE(absl::IsUnavailable(Submit()->Wait()));
  engine_->Stop();
  EXPECT_EQ(owner_told_, 1);
  EXPECT_EQ(devices_->left(), 0);
}

TEST_F(DevicesTest, AnotherUserOfADeviceMayTellThatItIsLost) {
  Start(SmallOptions(), /*devices=*/2);
  device(0).Hold();
  auto runs = Submit({.placed = true, .device = 0});
  WaitUntilHeld(1);
  EXPECT_EQ(engine_->activity().Stalled(clock_.Nanos()), absl::ZeroDuration());
  engine_->DeviceLost(OfDevice(1, absl::InternalError("sticky")));
  EXPECT_FALSE(devices_->lost(0));
  EXPECT_TRUE(devices_->lost(1));
  clock_.Advance(absl::Milliseconds(5));
  EXPECT_EQ(engine_->activity().Stalled(clock_.Nanos()), absl::Milliseconds(5))
      << "only devices that serve count";
  engine_->DeviceLost(OfDevice(1, absl::InternalError("sticky")));
  EXPECT_EQ(owner_told_, 0);
  auto waits = Submit();
  engine_->DeviceLost(OfDevice(0, absl::InternalError("sticky")));
  EXPECT_EQ(owner_told_, 1);
  EXPECT_EQ(waits->status(), absl::UnavailableError("the device is lost: sticky"));
  device(0).Release();
  EXPECT_TRUE(runs->Wait().ok());  // its last slice had begun
  EXPECT_TRUE(absl::IsUnavailable(Submit()->Wait()));
}

}  // namespace
}  // namespace logitd::engine

// An engine with its threads, on fake devices and a clock that the test moves.
#ifndef LOGITD_TESTS_ENGINE_ENGINE_FIXTURE_H_
#define LOGITD_TESTS_ENGINE_ENGINE_FIXTURE_H_

#include <atomic>
#include <memory>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/engine/devices.h"
#include "server/engine/engine.h"
#include "server/engine/metrics.h"
#include "spdlog/spdlog.h"
#include "tests/engine/shift_job.h"
#include "tests/engine/test_job.h"
#include "tests/manual_clock.h"

namespace logitd::engine {

// Devices have the numbers 10, 11, ... At its end each job has got Done once, and no slab is left.
template <typename Device>
class EngineFixtureOn : public ::testing::Test {
 protected:
  // The engine logs what devices do wrong. Here they do so on purpose.
  EngineFixtureOn() { spdlog::set_level(spdlog::level::off); }
  ~EngineFixtureOn() override {
    for (const auto& backend : backends_) backend->Release();
    for (const auto& job : jobs_) job->Take();
    engine_.reset();
    if constexpr (std::is_same_v<Device, FakeBackend>) {
      for (const auto& backend : backends_) EXPECT_EQ(backend->live_slabs(), 0);
    }
    for (const auto& job : jobs_) {
      EXPECT_EQ(job->dones(), 1);
      EXPECT_FALSE(job->misused());
      EXPECT_EQ(job.use_count(), 1) << "the engine still holds the job";
    }
  }

  void Start(EngineOptions options = SmallOptions(kAllTestOps), int devices = 1,
             const ShardOptions& shards = {}) {
    std::vector<Backend*> backends;
    std::vector<int> numbers;
    for (int i = 0; i < devices; ++i) {
      numbers.push_back(10 + i);
      DeviceInfo info = {.backend = "fake", .number = 10 + i, .name = "fake"};
      if constexpr (std::is_same_v<Device, FakeBackend>) {
        backends_.push_back(std::make_unique<Device>(info));
        backends_.back()->UseClock(&clock_);
      } else {
        backends_.push_back(std::make_unique<Device>(info.number));
      }
      backends.push_back(backends_.back().get());
    }
    metrics_ = std::make_unique<Metrics>(kOpNames, numbers);
    devices_ = std::make_shared<Devices>(backends, NumaNodes(), shards);
    options.clock = &clock_;
    engine_ = Engine::Create(devices_, options, metrics_.get(), [this](const absl::Status& cause) {
                EXPECT_TRUE(absl::IsInternal(cause)) << cause;
                ++owner_told_;
              }).value();
  }

  std::shared_ptr<TestJob> Submit(const TestJob::Shape& shape = {}) {
    return Submit(std::make_shared<TestJob>(shape));
  }
  template <typename T>
  std::shared_ptr<T> Submit(std::shared_ptr<T> job) {
    jobs_.push_back(job);
    engine_->Submit(job);
    return job;
  }

  void WaitIdle() { EXPECT_TRUE(engine_->WaitIdle(absl::InfiniteFuture())); }
  // Waits until so many streams are held by the devices.
  void WaitUntilHeld(int streams) {
    const auto held = [&] {
      int sum = 0;
      for (const auto& backend : backends_) sum += backend->held();
      return sum;
    };
    while (held() < streams) std::this_thread::yield();
  }
  Device& device(int i = 0) { return *backends_[static_cast<size_t>(i)]; }
  size_t Ran(int i) { return device(i).log().size(); }

  static constexpr std::string_view kOpNames[] = {"digest", "shift"};
  ManualClock clock_;
  std::vector<std::unique_ptr<Device>> backends_;
  std::unique_ptr<Metrics> metrics_;
  std::shared_ptr<Devices> devices_;
  std::atomic<int> owner_told_ = 0;
  std::vector<std::shared_ptr<CheckedJob>> jobs_;
  std::unique_ptr<Engine> engine_;
};

using EngineFixture = EngineFixtureOn<FakeBackend>;

}  // namespace logitd::engine

#endif  // LOGITD_TESTS_ENGINE_ENGINE_FIXTURE_H_

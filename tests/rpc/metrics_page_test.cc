// Series that are read when they are asked for: of the process, of connections and of the GPU.
#include "server/metrics_page.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <ctime>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/time/clock.h"
#include "logitd/v1/server.grpc.pb.h"

#include "prometheus/text_serializer.h"
#include "server/gpu_metrics.h"
#include "tests/rpc/served_engine.h"

namespace logitd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// -1: the page has no such sample.
double Sample(const std::string& page, const std::string& name) {
  const size_t at = page.find("\n" + name + " ");
  double value = -1;
  if (at == std::string::npos) return value;
  const size_t begin = at + name.size() + 2;
  EXPECT_TRUE(absl::SimpleAtod(page.substr(begin, page.find('\n', begin) - begin), &value));
  return value;
}

std::function<std::string()> Page(
    std::shared_ptr<const ServerTraffic> traffic = std::make_shared<ServerTraffic>(),
    const std::vector<DeviceInfo>& devices = {{.backend = "fake"}}) {
  return MakeMetricsPage(engine::Metrics(), std::move(traffic), "1.2.3", "4.5", devices);
}

TEST(MetricsPageTest, SaysWhatRuns) {
  EXPECT_THAT(Page()(),
              HasSubstr("logitd_build_info{backend=\"fake\",grpc=\"4.5\",version=\"1.2.3\"} 1\n"));
}

TEST(MetricsPageTest, TheProcessUsesWhatItUses) {
  const auto page = Page();
  const std::string before = page();
  const double started = Sample(before, "process_start_time_seconds");
  EXPECT_NEAR(started, absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()), 3600);
  EXPECT_LE(started, absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()) + 2);
  EXPECT_GT(Sample(before, "process_max_fds"), Sample(before, "process_open_fds"));
  EXPECT_GT(Sample(before, "process_virtual_memory_bytes"),
            Sample(before, "process_resident_memory_bytes"));

  constexpr size_t kBytes = size_t{64} << 20;
  const std::clock_t busy = std::clock();  // so far
  std::vector<char> memory(kBytes, 1);
  for (size_t i = 0; std::clock() < CLOCKS_PER_SEC / 20 + busy; ++i) ++memory[i % kBytes];
  const std::string after = page();
  EXPECT_GE(Sample(after, "process_resident_memory_bytes"),
            Sample(before, "process_resident_memory_bytes") + 0.9 * kBytes);
  EXPECT_GE(Sample(after, "process_cpu_seconds_total"),
            Sample(before, "process_cpu_seconds_total") + 0.02);
  EXPECT_EQ(Sample(after, "process_start_time_seconds"), started);
}

TEST(MetricsPageTest, OpenFilesAreCounted) {
  const auto page = Page();
  // gRPC may still be closing sockets of the tests before this one, so the count has a few tries.
  double opened = 0;
  for (int i = 0; i < 20 && opened != 5; ++i) {
    const double before = Sample(page(), "process_open_fds");
    std::vector<int> descriptors;
    for (int j = 0; j < 5; ++j) descriptors.push_back(open("/dev/null", O_RDONLY));
    opened = Sample(page(), "process_open_fds") - before;
    for (const int fd : descriptors) close(fd);
  }
  EXPECT_EQ(opened, 5);
}

class TrafficTest : public rpc::ServedEngine {
 protected:
  TrafficTest() : ServedEngine(1 << 20, 4 << 20) {}
};

TEST_F(TrafficTest, IsThatOfTheServerAndStaysWhenTheServerEnds) {
  const auto traffic = std::make_shared<ServerTraffic>();
  const auto page = Page(traffic);
  EXPECT_EQ(Sample(page(), "logitd_received_bytes_total"), 0);
  const auto channel = Start();
  traffic->Set(server_.get());
  const auto stub = v1::Server::NewStub(channel);
  int64_t answers = 0;
  for (int i = 0; i < 20; ++i) {
    grpc::ClientContext context;
    v1::GetInfoResponse info;
    ASSERT_TRUE(stub->GetInfo(&context, v1::GetInfoRequest(), &info).ok());
    answers += static_cast<int64_t>(info.ByteSizeLong());
  }
  EXPECT_GT(Sample(page(), "logitd_received_bytes_total"), 20 * 9) << "a frame of each call";
  // An answer may be at its peer before the server has counted it.
  EXPECT_TRUE(
      testing::Becomes([&] { return Sample(page(), "logitd_sent_bytes_total") > answers; }));
  traffic->Set(nullptr);
  server_.reset();
  EXPECT_GT(Sample(page(), "logitd_received_bytes_total"), 20 * 9);
  EXPECT_GT(Sample(page(), "logitd_sent_bytes_total"), answers);
}

TEST(MetricsPageTest, WithoutAGpuItHasNoSeries) {
  EXPECT_THAT(Page()(), Not(HasSubstr("logitd_device_memory")));
  EXPECT_THAT(Page()(), Not(HasSubstr("logitd_device_utilization")));
}

// A driver with two GPUs, whose handles are the addresses of their names.
constexpr char kBus[] = "00000000:1b:00.0";
constexpr char kOtherBus[] = "00000000:2c:00.0";

DeviceInfo Gpu(int number, const std::string& bus) {
  return {.backend = "cuda", .number = number, .pci_bus_id = bus};
}

Nvml FakeDriver() {
  return {.init = [] { return 0; },
          .device_by_pci =
              [](const char* bus, void** device) {
                for (const char* known : {kBus, kOtherBus}) {
                  if (std::string(bus) != known) continue;
                  *device = const_cast<char*>(known);
                  return 0;
                }
                return 6;  // NVML_ERROR_NOT_FOUND
              },
          .memory =
              [](void* device, Nvml::Memory* out) {
                *out = {.total = 1000, .free = 300, .used = device == kBus ? 700u : 400u};
                return device == kBus || device == kOtherBus ? 0 : 2;
              },
          .utilization =
              [](void* device, Nvml::Utilization* out) {
                *out = {.gpu = device == kBus ? 25u : 75u, .memory = 99};
                return device == kBus || device == kOtherBus ? 0 : 2;
              }};
}

std::string Text(const GpuMetrics& gpu) {
  return "\n" + prometheus::TextSerializer().Serialize(gpu.Collect());
}

TEST(GpuMetricsTest, TellsWhatTheDriverTells) {
  const auto gpu = GpuMetrics::Create(FakeDriver(), {Gpu(0, kBus)});
  ASSERT_NE(gpu, nullptr);
  EXPECT_EQ(Sample(Text(*gpu), "logitd_device_memory_bytes{device=\"0\"}"), 1000);
  EXPECT_EQ(Sample(Text(*gpu), "logitd_device_memory_used_bytes{device=\"0\"}"), 700);
  EXPECT_EQ(Sample(Text(*gpu), "logitd_device_utilization{device=\"0\"}"), 0.25);
}

TEST(GpuMetricsTest, ASeriesBelongsToOneDevice) {
  const auto gpu = GpuMetrics::Create(
      FakeDriver(), {Gpu(5, kOtherBus), Gpu(1, "00000000:3d:00.0"), Gpu(3, kBus)});
  ASSERT_NE(gpu, nullptr);
  const std::string text = Text(*gpu);
  EXPECT_EQ(Sample(text, "logitd_device_memory_used_bytes{device=\"5\"}"), 400);
  EXPECT_EQ(Sample(text, "logitd_device_utilization{device=\"5\"}"), 0.75);
  EXPECT_EQ(Sample(text, "logitd_device_memory_used_bytes{device=\"3\"}"), 700);
  EXPECT_EQ(Sample(text, "logitd_device_utilization{device=\"3\"}"), 0.25);
  EXPECT_THAT(text, Not(HasSubstr("device=\"1\"")));
}

TEST(GpuMetricsTest, LeavesOutWhatTheDriverRefuses) {
  Nvml part_of_a_gpu = FakeDriver();
  part_of_a_gpu.utilization = [](void*, Nvml::Utilization*) { return 3; };  // NOT_SUPPORTED
  const auto gpu = GpuMetrics::Create(part_of_a_gpu, {Gpu(0, kBus)});
  ASSERT_NE(gpu, nullptr);
  EXPECT_EQ(Sample(Text(*gpu), "logitd_device_memory_bytes{device=\"0\"}"), 1000);
  EXPECT_THAT(Text(*gpu), Not(HasSubstr("logitd_device_utilization")));
}

TEST(GpuMetricsTest, WithoutADriverOrADeviceThereIsNone) {
  EXPECT_EQ(GpuMetrics::Create(std::nullopt, {Gpu(0, kBus)}), nullptr);
  EXPECT_EQ(GpuMetrics::Create(FakeDriver(), {Gpu(0, "")}), nullptr);
  EXPECT_EQ(GpuMetrics::Create(FakeDriver(), {Gpu(0, "00000000:1c:00.0")}), nullptr);
  Nvml broken = FakeDriver();
  broken.init = [] { return 9; };  // NVML_ERROR_DRIVER_NOT_LOADED
  EXPECT_EQ(GpuMetrics::Create(broken, {Gpu(0, kBus)}), nullptr);
  EXPECT_FALSE(Nvml::Load("libno-such-driver.so.1").has_value());
  EXPECT_FALSE(Nvml::Load("libm.so.6").has_value());  // a library without the functions
}

}  // namespace
}  // namespace logitd

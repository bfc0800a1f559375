// Long work on the real server: what ends with its callers, and who comes in between.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "logitd/v1/sampler.grpc.pb.h"
#include "tests/e2e/elements.h"
#include "tests/e2e/peers.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/topk_calls.h"

namespace logitd::e2e {
namespace {

constexpr int64_t kVocab = 262144;
constexpr int64_t kHidden = 64;
constexpr int64_t kRows = 65536;  // with this head, ten seconds or more on a few cores

// A file with a head of zeros, which takes no room on the disk.
class ZeroHead {
 public:
  ZeroHead() : path_(absl::StrCat(::testing::TempDir(), "/zero_head.", getpid())) {
    const int64_t bytes = kVocab * kHidden * 4;
    std::string header = absl::StrCat(R"({"lm_head.weight":{"dtype":"F32","shape":[)", kVocab, ",",
                                      kHidden, R"(],"data_offsets":[0,)", bytes, "]}}");
    header.resize((header.size() + 7) / 8 * 8, ' ');
    const auto size = static_cast<uint64_t>(header.size());
    std::ofstream out(path_, std::ios::binary);
    out.write(reinterpret_cast<const char*>(&size), sizeof(size));
    out << header;
    out.close();
    std::filesystem::resize_file(path_, sizeof(size) + size + static_cast<uint64_t>(bytes));
  }
  ~ZeroHead() { std::filesystem::remove(path_); }
  std::string flag() const { return absl::StrCat("--head=zero=", path_); }

 private:
  const std::string path_;
};

// Calls of many seconds, whose callers stay until Leave.
class LongCalls {
 public:
  LongCalls(const ServerProcess& server, int count) {
    v1::TopKRequest request;
    request.set_dtype(v1::DTYPE_F32);
    request.set_rows(kRows);
    request.set_head("zero");
    request.set_hidden_size(kHidden);
    request.set_hidden(std::string(kRows * kHidden * 4, '\0'));
    request.add_k(1);
    const grpc::ByteBuffer message = ToBuffer(request.SerializeAsString());
    for (int i = 0; i < count; ++i) {
      calls_.push_back(std::make_unique<GenericCall>(Connect(server.tcp()), kTopK));
      EXPECT_TRUE(calls_.back()->Start());
      EXPECT_TRUE(calls_.back()->Write(message, /*last=*/true));
    }
    EXPECT_TRUE(server.WaitForMetric(kSlices, '>', 2, absl::Minutes(1)));  // a sanitizer's are slow
    EXPECT_TRUE(server.WaitForMetric("logitd_slabs_in_use", '=', count));
  }
  void Leave() { calls_.clear(); }

  static constexpr const char* kSlices = "logitd_slices_total{op=\"linear_topk\"}";

 private:
  std::vector<std::unique_ptr<GenericCall>> calls_;
};

TEST(SlicesTest, CallsWithoutACallerGiveTheDeviceBackAtOnce) {
  const ZeroHead head;
  ServerProcess server({head.flag()});
  LongCalls calls(server, 2);

  // A short call comes in between.
  const absl::Time start = absl::Now();
  EXPECT_TRUE(SmallTopK(Connect(server.tcp())).ok());
  EXPECT_LT(absl::Now() - start, absl::Seconds(1));
  EXPECT_TRUE(server.WaitForMetric("logitd_slabs_in_use", '=', 2, absl::Seconds(1)));

  calls.Leave();
  EXPECT_TRUE(server.WaitForMetric("logitd_slabs_in_use", '=', 0, absl::Seconds(2)));
  EXPECT_EQ(server.Metric("logitd_stopped_total{op=\"linear_topk\"}"), 2);
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(absl::Seconds(3)), 0) << server.Log();
}

TEST(SlicesTest, TheEndOfTheGraceEndsWorkThatRuns) {
  const ZeroHead head;
  ServerProcess server({head.flag(), "--drain-grace=200ms"});
  LongCalls calls(server, 2);
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(absl::Seconds(4)), 0) << server.Log();
}

}  // namespace
}  // namespace logitd::e2e

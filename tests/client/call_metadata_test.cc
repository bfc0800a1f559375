// What the client tells the server about a call besides its message.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "client/client.h"
#include "tests/client/fake_server.h"
#include "tests/client/subprocess.h"
#include "tests/client/test_files.h"

namespace logitd {
namespace {

using testing::FakeServer;
using testing::RunBinary;

// Answers calls, and keeps what the last one stated.
class CallMetadataTest : public ::testing::Test {
 protected:
  std::string Stated(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    return stated_.count(name) == 0 ? "none" : stated_[name];
  }

  // The client's encoding may have some bytes more than the shortest one.
  void ExpectSizeStated() {
    int64_t bytes = 0;
    ASSERT_TRUE(absl::SimpleAtoi(Stated("logitd-payload-bytes"), &bytes));
    EXPECT_GE(bytes, message_bytes_);
    EXPECT_LE(bytes, message_bytes_ + 16);
  }

  client::TopKRequest Request() const {
    client::TopKRequest request = {
        .dtype = v1::DTYPE_F32, .rows = 1, .vocab = 4, .logits = {*logits_}, .owner = logits_};
    request.params.add_k(2);
    return request;
  }

  void TopK(client::ClientOptions options) {
    options.address = server_.address();
    const auto client = client::Client::Create(options);
    ASSERT_TRUE(client.ok());
    const auto result = (*client)->TopK(Request());
    ASSERT_TRUE(result.ok()) << result.status();
  }

  const std::shared_ptr<const std::string> logits_ = std::make_shared<std::string>(16, '\0');
  std::mutex mutex_;
  std::map<std::string, std::string> stated_;
  int64_t message_bytes_ = 0;
  FakeServer server_{[this](int, grpc::ServerContext* context, const v1::TopKRequest& request,
                            v1::TopKResponse* response) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stated_.clear();
      for (const auto& [name, value] : context->client_metadata()) {
        stated_[std::string(name.data(), name.size())] = std::string(value.data(), value.size());
      }
      message_bytes_ = static_cast<int64_t>(request.ByteSizeLong());
    }
    testing::ReferenceTopK(request, response);
    return grpc::Status::OK;
  }};
};

TEST_F(CallMetadataTest, ACallStatesTheSizeOfItsMessage) {
  TopK({});
  ExpectSizeStated();
  EXPECT_EQ(Stated("logitd-priority"), "none");
}

TEST_F(CallMetadataTest, SizesAndThePriorityCanBeChosen) {
  TopK({.priority = client::Priority::kBatch, .state_sizes = false});
  EXPECT_EQ(Stated("logitd-payload-bytes"), "none");
  EXPECT_EQ(Stated("logitd-priority"), "batch");
}

TEST_F(CallMetadataTest, NamesOfCallsAreSentAsTheyAreGiven) {
  constexpr char kParent[] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
  TopK({.request_id = "req-7", .traceparent = kParent});
  EXPECT_EQ(Stated("x-request-id"), "req-7");
  EXPECT_EQ(Stated("traceparent"), kParent);
  TopK({});
  EXPECT_EQ(Stated("x-request-id"), "none");
  EXPECT_EQ(Stated("traceparent"), "none");
}

TEST_F(CallMetadataTest, LogitctlSendsNamesToo) {
  const testing::TempDir dir;
  const std::string file = dir.Write("logits.npy", testing::NpyF32(1, 4, {1, 2, 3, 4}));
  const auto logitctl = [&](const std::string& id) {
    return RunBinary("logitctl", {"topk", "--logits", file, "--k", "1", "--addr", server_.address(),
                                  "--request-id", id});
  };
  const testing::Ran ran = logitctl("req-9");
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(Stated("x-request-id"), "req-9");
  EXPECT_EQ(logitctl("two words").code, 2);
}

TEST_F(CallMetadataTest, LoadBenchStatesTheSameInItsOpenLoop) {
  const std::vector<std::string> args = {"--addr",     server_.address(),
                                         "--rows",     "1",
                                         "--vocab",    "50",
                                         "--k",        "1",
                                         "--warmup",   "0",
                                         "--duration", "0.2",
                                         "--rate",     "100",
                                         "--priority", "batch"};
  EXPECT_EQ(RunBinary("load_bench", args).code, 0);
  ExpectSizeStated();
  EXPECT_EQ(Stated("logitd-priority"), "batch");
  std::vector<std::string> unstated = args;
  unstated.push_back("--no-stated-sizes");
  EXPECT_EQ(RunBinary("load_bench", unstated).code, 0);
  EXPECT_EQ(Stated("logitd-payload-bytes"), "none");
}

}  // namespace
}  // namespace logitd

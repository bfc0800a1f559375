// Suites of tests that share one server.
#ifndef LOGITD_TESTS_E2E_SHARED_SERVER_H_
#define LOGITD_TESTS_E2E_SHARED_SERVER_H_

#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "tests/e2e/peers.h"
#include "tests/e2e/server_process.h"

namespace logitd::e2e {

// The server must hold nothing after the suite, and drain.
class SharedServerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { StartServer({}); }
  static void StartServer(std::vector<std::string> flags) {
    server_ = std::make_unique<ServerProcess>(std::move(flags));
  }
  static void TearDownTestSuite() {
    EXPECT_TRUE(server_->WaitForMetric("logitd_slabs_kept", '=', 0));
    EXPECT_TRUE(server_->WaitForMetric(kHeldBytes, '=', 0));
    server_->Signal(SIGTERM);
    EXPECT_EQ(server_->Wait(absl::Seconds(20)), 0) << server_->Log();
    server_.reset();
  }

  static inline std::unique_ptr<ServerProcess> server_;
};

// Every test runs over TCP and over a Unix socket. Instantiate with ::testing::Bool() and
// TransportName.
class BothTransportsTest : public SharedServerTest, public ::testing::WithParamInterface<bool> {
 protected:
  const std::shared_ptr<grpc::Channel> channel_ =
      Connect(GetParam() ? server_->unix_socket() : server_->tcp());
};

inline std::string TransportName(const ::testing::TestParamInfo<bool>& info) {
  return info.param ? "unix" : "tcp";
}

}  // namespace logitd::e2e

#endif  // LOGITD_TESTS_E2E_SHARED_SERVER_H_

// A fixture with a real logitd, as a process of its own, and a client of it.
#ifndef LOGITD_TESTS_CLIENT_RUNNING_LOGITD_H_
#define LOGITD_TESTS_CLIENT_RUNNING_LOGITD_H_

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/client.h"
#include "tests/becomes.h"
#include "tests/client/subprocess.h"
#include "tests/client/test_files.h"

namespace logitd::testing {

// True: the server of `client` serves `service`, now or soon.
inline bool WaitUntilServing(client::Client& client, const std::string& service = "") {
  return Becomes([&] {
    const auto health = client.Health(service);
    return health.ok() && *health == client::ServingStatus::kServing;
  });
}

// The flags of a CPU server at `address`, quiet, with `more`.
inline std::vector<std::string> LogitdFlags(const std::string& address,
                                            const std::vector<std::string>& more) {
  std::vector<std::string> flags = {"--backend",        "cpu", "--listen",    address,
                                    "--metrics-listen", "off", "--log-level", "warn"};
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

class RunningLogitd : public ::testing::Test {
 protected:
  using Flags = std::vector<std::string>;

  // `flags` makes more of them, for which it may write files into the test's directory.
  explicit RunningLogitd(const std::function<Flags(const TempDir& dir)>& flags = nullptr,
                         const std::string& service = "")
      : daemon_("logitd", AllFlags(flags)), client_(Connect()) {
    EXPECT_TRUE(WaitUntilServing(*client_, service)) << "logitd does not serve";
  }

  std::unique_ptr<client::Client> Connect(client::ClientOptions options = {}) const {
    options.address = address_;
    options.deadline = absl::Seconds(20);
    return *client::Client::Create(options);
  }

  Ran Logitctl(std::vector<std::string> args) const {
    args.insert(args.end(), {"--addr", address_});
    return RunBinary("logitctl", args);
  }

  // The answer of a command that succeeds.
  nlohmann::json Json(std::vector<std::string> args) const {
    args.insert(args.end(), {"--format", "json"});
    const Ran ran = Logitctl(args);
    EXPECT_EQ(ran.code, 0) << ran.err;
    return nlohmann::json::parse(ran.out, nullptr, /*allow_exceptions=*/false);
  }

  TempDir dir_;
  const std::string address_ = "unix:" + dir_.path("socket");
  Daemon daemon_;
  std::unique_ptr<client::Client> client_;

 private:
  Flags AllFlags(const std::function<Flags(const TempDir& dir)>& flags) const {
    Flags all = flags == nullptr ? Flags() : flags(dir_);
    all.insert(all.end(), {"--max-request-bytes", "1MiB"});
    return LogitdFlags(address_, all);
  }
};

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_CLIENT_RUNNING_LOGITD_H_

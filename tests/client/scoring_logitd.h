// Servers with heads: a tiny one and the demo model's, or the tiny one and memory to lease.
#ifndef LOGITD_TESTS_CLIENT_SCORING_LOGITD_H_
#define LOGITD_TESTS_CLIENT_SCORING_LOGITD_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/arena.h"
#include "client/client.h"
#include "tests/becomes.h"
#include "tests/client/running_logitd.h"
#include "tests/client/test_files.h"
#include "tests/client/test_values.h"
#include "tests/tree.h"

namespace logitd::testing {

// Logits (a, b, -a - b) of a state (a, b).
inline std::string TinyHead(const TempDir& dir) {
  return dir.Write("tiny.safetensors",
                   Safetensors(R"({"w":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]}})",
                               BytesOf<float>({1, 0, 0, 1, -1, -1})));
}

class ScoringLogitd : public RunningLogitd {
 protected:
  ScoringLogitd()
      : RunningLogitd(
            [](const TempDir& dir) -> Flags {
              return {"--head", absl::StrCat("tiny=", TinyHead(dir)), "--head",
                      absl::StrCat("demo=", InTree("demo/model").string())};
            },
            "logitd.v1.Scorer") {}

  std::unique_ptr<client::Client> ConnectWith(int64_t message_bytes) const {
    return Connect({.score_message_bytes = message_bytes});
  }
};

// Leases memory on a socket of its own: 4 MiB, 4 leases.
class LeasingLogitd : public RunningLogitd {
 protected:
  explicit LeasingLogitd(const Flags& more = {})
      : RunningLogitd(
            [&more](const TempDir& dir) -> Flags {
              Flags flags = {"--arena-listen",
                             absl::StrCat("unix:", dir.path("arena")),
                             "--max-arena-bytes",
                             "4MiB",
                             "--max-leases",
                             "4",
                             "--head",
                             absl::StrCat("tiny=", TinyHead(dir))};
              flags.insert(flags.end(), more.begin(), more.end());
              return flags;
            },
            "logitd.v1.Scorer") {}

  std::string arena_address() const { return "unix:" + dir_.path("arena"); }

  // Waits until the server has freed what was there before.
  std::unique_ptr<client::Arena> Lease(int64_t bytes = int64_t{1} << 20) const {
    absl::StatusOr<std::unique_ptr<client::Arena>> arena;
    EXPECT_TRUE(Becomes([&] {
      arena = client::Arena::Lease(arena_address(), bytes);
      return !absl::IsResourceExhausted(arena.status());
    }));
    EXPECT_TRUE(arena.ok()) << arena.status();
    return arena.ok() ? *std::move(arena) : nullptr;
  }
  bool AllIsFree() const { return Lease(4 << 20) != nullptr; }
};

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_CLIENT_SCORING_LOGITD_H_

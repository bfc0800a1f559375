// A logitd with two heads to score with: a tiny one, and the demo model's.
#ifndef LOGITD_TESTS_CLIENT_SCORING_LOGITD_H_
#define LOGITD_TESTS_CLIENT_SCORING_LOGITD_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
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

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_CLIENT_SCORING_LOGITD_H_

// Properties of ops that hold on every backend, as rows of a table: each becomes a test of the CPU
// backend and one of the CUDA backend.
#ifndef LOGITD_TESTS_KERNELS_OP_CHECK_H_
#define LOGITD_TESTS_KERNELS_OP_CHECK_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/kernels/op_runner.h"

namespace logitd::testing {

// `failure` returns "" where the property holds, else what is wrong.
struct OpCheck {
  const char* name;  // of the test
  std::function<std::string(OpRunner&)> failure;
};

// The failures of all cases, one a line. Claims come with their names.
template <typename Cases>
std::string FailuresOf(OpRunner& runner, const Cases& cases,
                       std::string (*failure)(OpRunner&, const typename Cases::value_type&)) {
  std::string all;
  for (const auto& c : cases) {
    const std::string one = failure(runner, c);
    if (one.empty()) continue;
    if constexpr (requires { c.name; }) absl::StrAppend(&all, c.name, ": ");
    absl::StrAppend(&all, one, "\n");
  }
  return all;
}

// A check of each case of a table, which is made when the test runs.
template <typename Cases>
OpCheck ForAll(const char* name, Cases (*cases)(),
               std::string (*failure)(OpRunner&, const typename std::decay_t<Cases>::value_type&)) {
  return {name, [=](OpRunner& runner) { return FailuresOf(runner, cases(), failure); }};
}

// The seeds 1 to n.
template <uint64_t n>
std::vector<uint64_t> Seeds() {
  std::vector<uint64_t> seeds(n);
  std::iota(seeds.begin(), seeds.end(), 1);
  return seeds;
}

// Makes a test of every check, in the suite of `Fixture`, which has the runner.
template <typename Fixture>
bool RegisterChecks(const char* suite, const std::vector<OpCheck>& checks) {
  class CheckTest : public Fixture {
   public:
    explicit CheckTest(OpCheck check) : check_(std::move(check)) {}
    void TestBody() override { EXPECT_EQ(check_.failure(*this->runner_), ""); }

   private:
    const OpCheck check_;
  };
  for (const OpCheck& check : checks) {
    ::testing::RegisterTest(suite, check.name, nullptr, nullptr, __FILE__, __LINE__,
                            [check]() -> Fixture* { return new CheckTest(check); });
  }
  return true;
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_OP_CHECK_H_

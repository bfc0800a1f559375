// Every op's answers on the CPU backend are those recorded before, with each instruction set this
// machine has.
#include "tests/kernels/recorded_answers.h"

#include <gtest/gtest.h>

#include <string>

#include "hwy/targets.h"
#include "kernels/backend.h"

namespace logitd::testing {
namespace {

class RecordedAnswersCpuTest : public ::testing::TestWithParam<int64_t> {};

TEST_P(RecordedAnswersCpuTest, EveryOpKeepsItsBits) {
  hwy::SetSupportedTargetsForTest(GetParam());
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  auto backend = CreateBackend("cpu", {.cpu_threads = 2}).value();
  const std::string name = backend->device().name;  // "AVX2, 2 threads"
  CompareWithRecording("cpu-" + name.substr(0, name.find(',')),
                       RecordedAnswers(backend.get()).Lines());
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

std::vector<int64_t> Targets() {
  std::vector<int64_t> targets;
  for (int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) {
    targets.push_back(left & -left);
  }
  return targets;
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, RecordedAnswersCpuTest, ::testing::ValuesIn(Targets()),
                         [](const auto& info) { return hwy::TargetName(info.param); });

}  // namespace
}  // namespace logitd::testing

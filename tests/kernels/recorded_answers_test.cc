// Every op's answers on the CPU backend are those recorded before.
#include "tests/kernels/recorded_answers.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/kernels/cpu_test.h"

namespace logitd::testing {
namespace {

TEST(RecordedAnswersCpuTest, EveryOpKeepsItsBitsWithEveryInstructionSet) {
  ForEachInstructionSet([](OpRunner& runner) {
    const std::string name = runner.arena().device().name;  // "AVX2, 2 threads"
    CompareWithRecording("cpu-" + name.substr(0, name.find(',')), __VERSION__, runner);
  });
}

}  // namespace
}  // namespace logitd::testing

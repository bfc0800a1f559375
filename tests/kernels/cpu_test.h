// What tests of the CPU backend share: a fixture, and ways to vary instruction sets and threads.
#ifndef LOGITD_TESTS_KERNELS_CPU_TEST_H_
#define LOGITD_TESTS_KERNELS_CPU_TEST_H_

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "hwy/targets.h"
#include "kernels/backend.h"
#include "tests/kernels/op_runner.h"

namespace logitd::testing {

class CpuTest : public ::testing::Test {
 protected:
  std::unique_ptr<Backend> backend_ = CreateBackend("cpu", {.cpu_threads = 2}).value();
  std::unique_ptr<OpRunner> runner_ = OpRunner::Create(backend_.get()).value();
};

// Calls `body` with each instruction set this machine has, one after another.
inline void ForEachInstructionSet(const std::function<void(OpRunner&)>& body) {
  for (int64_t targets = hwy::SupportedTargets(); targets != 0; targets &= targets - 1) {
    hwy::SetSupportedTargetsForTest(targets & -targets);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    auto backend = CreateBackend("cpu", {.cpu_threads = 2}).value();
    SCOPED_TRACE(backend->device().name);
    body(*OpRunner::Create(backend.get()).value());
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

// Calls `body` with backends of 1, 3 and 7 threads.
inline void ForEachThreadCount(const std::function<void(OpRunner&)>& body) {
  for (int threads : {1, 3, 7}) {
    SCOPED_TRACE(absl::StrCat(threads, " threads"));
    auto backend = CreateBackend("cpu", {.cpu_threads = threads}).value();
    body(*OpRunner::Create(backend.get()).value());
  }
}

// Expects `good` of four streams of `backend` at once, several times each.
inline void ExpectOnFourStreams(Backend& backend,
                                const std::function<bool(OpRunner&, int stream)>& good) {
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int stream = 0; stream < 4; ++stream) {
    callers.emplace_back([&, stream] {
      auto runner = OpRunner::Create(&backend).value();
      for (int i = 0; i < 4; ++i) wrong += !good(*runner, stream);
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_CPU_TEST_H_

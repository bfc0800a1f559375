#include "kernels/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace logitd::cpu {
namespace {

TEST(ThreadPoolTest, CallsEveryItemOnceAndReturnsAfterTheLast) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (int64_t count : {0, 1, 2, 7, 1000}) {
      std::vector<int> calls(count);  // plain ints: the pool orders them before its return
      pool.ParallelFor(count, [&](int64_t i) { ++calls[i]; });
      EXPECT_EQ(calls, std::vector<int>(count, 1)) << threads << " threads, " << count << " items";
    }
  }
}

TEST(ThreadPoolTest, OneThreadRunsEverythingOnTheCaller) {
  ThreadPool pool(1);
  std::vector<std::thread::id> ids(8);
  pool.ParallelFor(8, [&](int64_t i) { ids[i] = std::this_thread::get_id(); });
  EXPECT_EQ(ids, std::vector<std::thread::id>(8, std::this_thread::get_id()));
}

TEST(ThreadPoolTest, ItemsRunAtOnce) {
  ThreadPool pool(3);
  std::atomic<int> here{0};
  // Each item waits for the other two: on fewer threads this does not end.
  pool.ParallelFor(3, [&](int64_t) {
    ++here;
    while (here < 3) std::this_thread::yield();
  });
  EXPECT_EQ(here, 3);
}

TEST(ThreadPoolTest, ALoopDoesNotWaitForAnotherCallersLoop) {
  ThreadPool pool(2);
  std::atomic<bool> release{false};
  std::atomic<int> held{0};
  std::thread holder([&] {
    // Both threads of the pool sit in this loop until the other caller's loop is done.
    pool.ParallelFor(2, [&](int64_t) {
      ++held;
      while (!release) std::this_thread::yield();
    });
  });
  while (held < 2) std::this_thread::yield();
  int64_t sum = 0;
  pool.ParallelFor(100, [&](int64_t i) { sum += i; });  // no helper is free: the caller does all
  EXPECT_EQ(sum, 4950);
  release = true;
  holder.join();
}

TEST(ThreadPoolTest, ManyCallersAtOnce) {
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&, t] {
      for (int round = 0; round < 200; ++round) {
        std::vector<int64_t> out(17 + t);
        pool.ParallelFor(out.size(), [&](int64_t i) { out[i] = i * round; });
        for (size_t i = 0; i < out.size(); ++i) wrong += out[i] != static_cast<int64_t>(i) * round;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace logitd::cpu

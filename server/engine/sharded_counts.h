// Counts that many threads change at the same time, each in memory of its own.
#ifndef LOGITD_SERVER_ENGINE_SHARDED_COUNTS_H_
#define LOGITD_SERVER_ENGINE_SHARDED_COUNTS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace logitd::engine {

// N counts. Add costs a few nanoseconds however many threads count: threads share a shard only
// where there are more than kShards of them. Thread-safe.
template <size_t N>
class ShardedCounts {
 public:
  void Add(size_t i, int64_t more) {
    shards_[ShardOfThread()].counts[i].fetch_add(more, std::memory_order_relaxed);
  }

  int64_t Sum(size_t i) const {
    int64_t sum = 0;
    for (const Shard& shard : shards_) sum += shard.counts[i].load(std::memory_order_relaxed);
    return sum;
  }

  // The sum of what was added since the last Take.
  int64_t Take(size_t i) {
    int64_t sum = 0;
    for (Shard& shard : shards_) sum += shard.counts[i].exchange(0, std::memory_order_relaxed);
    return sum;
  }

 private:
  static constexpr size_t kShards = 16;
  struct alignas(64) Shard {
    std::array<std::atomic<int64_t>, N> counts = {};
  };

  static size_t ShardOfThread() {
    static std::atomic<size_t> threads = 0;
    thread_local const size_t shard = threads.fetch_add(1, std::memory_order_relaxed) % kShards;
    return shard;
  }

  std::array<Shard, kShards> shards_;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_SHARDED_COUNTS_H_

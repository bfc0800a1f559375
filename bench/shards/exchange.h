// What it takes to bring blocks of bytes from several GPUs to the first, by the ways there are.
#ifndef LOGITD_BENCH_SHARDS_EXCHANGE_H_
#define LOGITD_BENCH_SHARDS_EXCHANGE_H_

#include <cstddef>
#include <string>
#include <vector>

namespace logitd::bench {

struct ExchangeTimes {
  // Median, by the first device's clock, from its signal that all may begin until it has the
  // blocks.
  double stores_us = 0;  // each device's kernel stores its block into the first one's memory
  double nccl_us = 0;    // one all-gather; 0: not measured
  std::string no_nccl;   // why not
};

// `bytes`: of the block of each device. Two events between devices are in both times.
ExchangeTimes TimeExchange(const std::vector<int>& devices, size_t bytes);

}  // namespace logitd::bench

#endif  // LOGITD_BENCH_SHARDS_EXCHANGE_H_

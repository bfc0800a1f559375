#include "bench/shards/exchange.h"

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <set>

namespace logitd::bench {
namespace {

constexpr int kThreads = 256;
constexpr int kWarm = 5;
constexpr int kRuns = 50;

__global__ void StoreKernel(const uint4* from, uint4* to, size_t count) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step)
    to[i] = from[i];
}

struct Device {
  int number;
  cudaStream_t stream;
  cudaEvent_t ended;
  std::byte* block;
  std::byte* gathered;  // of all devices
};

// The functions of NCCL that are used here, with its types as they are in memory.
struct Nccl {
  using Comm = void*;
  void* library = Open();
  int (*init_all)(Comm*, int,
                  const int*) = Find<int (*)(Comm*, int, const int*)>("ncclCommInitAll");
  int (*destroy)(Comm) = Find<int (*)(Comm)>("ncclCommDestroy");
  int (*begin)() = Find<int (*)()>("ncclGroupStart");
  int (*end)() = Find<int (*)()>("ncclGroupEnd");
  int (*all_gather)(const void*, void*, size_t, int, Comm, cudaStream_t) =
      Find<int (*)(const void*, void*, size_t, int, Comm, cudaStream_t)>("ncclAllGather");

  static void* Open() { return dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL); }
  template <class F>
  F Find(const char* name) const {
    return library == nullptr ? nullptr : reinterpret_cast<F>(dlsym(library, name));
  }
  bool ok() const { return init_all && destroy && begin && end && all_gather; }
};

// The median time of exchange(), which the first device's stream begins and ends.
template <class Exchange>
double MedianUs(std::vector<Device>& devices, const Exchange& exchange) {
  Device& first = devices.front();
  cudaSetDevice(first.number);
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<float> times;
  for (int i = 0; i < kWarm + kRuns; ++i) {
    cudaSetDevice(first.number);
    cudaEventRecord(begin, first.stream);
    for (size_t d = 1; d < devices.size(); ++d) {
      cudaSetDevice(devices[d].number);
      cudaStreamWaitEvent(devices[d].stream, begin, 0);
    }
    exchange();
    cudaSetDevice(first.number);
    cudaEventRecord(end, first.stream);
    for (Device& device : devices) {
      cudaSetDevice(device.number);
      cudaStreamSynchronize(device.stream);
    }
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i >= kWarm) times.push_back(ms * 1e3f);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  return times[kRuns / 2];
}

}  // namespace

ExchangeTimes TimeExchange(const std::vector<int>& numbers, size_t bytes) {
  std::vector<Device> devices;
  for (const int number : numbers) {
    Device device{.number = number};
    cudaSetDevice(number);
    if (number != numbers.front()) {
      cudaDeviceEnablePeerAccess(numbers.front(), 0);
      cudaGetLastError();
    }
    cudaStreamCreateWithFlags(&device.stream, cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&device.ended, cudaEventDisableTiming);
    cudaMalloc(&device.block, bytes);
    cudaMemset(device.block, 1, bytes);
    cudaMalloc(&device.gathered, bytes * numbers.size());
    cudaDeviceSynchronize();
    devices.push_back(device);
  }
  const auto blocks =
      static_cast<unsigned>(std::clamp<size_t>(bytes / sizeof(uint4) / kThreads, 1, 512));
  ExchangeTimes times;
  times.stores_us = MedianUs(devices, [&] {
    for (size_t d = 0; d < devices.size(); ++d) {
      cudaSetDevice(devices[d].number);
      StoreKernel<<<blocks, kThreads, 0, devices[d].stream>>>(
          reinterpret_cast<const uint4*>(devices[d].block),
          reinterpret_cast<uint4*>(devices.front().gathered + d * bytes), bytes / sizeof(uint4));
      if (d == 0) continue;
      cudaEventRecord(devices[d].ended, devices[d].stream);
      cudaStreamWaitEvent(devices.front().stream, devices[d].ended, 0);
    }
  });
  const Nccl nccl;
  std::vector<Nccl::Comm> comms(devices.size());
  if (std::set<int>(numbers.begin(), numbers.end()).size() < numbers.size()) {
    times.no_nccl = "not measured: a device is named twice";
  } else if (!nccl.ok()) {
    times.no_nccl = "not measured: no libnccl.so.2";
  } else if (nccl.init_all(comms.data(), static_cast<int>(numbers.size()), numbers.data()) != 0) {
    times.no_nccl = "not measured: no communicator";
  } else {
    constexpr int kInt8 = 0;  // ncclInt8
    times.nccl_us = MedianUs(devices, [&] {
      nccl.begin();
      for (size_t d = 0; d < devices.size(); ++d)
        nccl.all_gather(devices[d].block, devices[d].gathered, bytes, kInt8, comms[d],
                        devices[d].stream);
      nccl.end();
    });
    for (const Nccl::Comm comm : comms) nccl.destroy(comm);
  }
  for (Device& device : devices) {
    cudaSetDevice(device.number);
    cudaEventDestroy(device.ended);
    cudaStreamDestroy(device.stream);
    cudaFree(device.block);
    cudaFree(device.gathered);
  }
  cudaGetLastError();
  return times;
}

}  // namespace logitd::bench

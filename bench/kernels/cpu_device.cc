// The CPU as a device of the bench: the CPU backend's ops, and reads, copies and products by every
// core.
#ifdef LOGITD_WITH_OPENBLAS
#include <cblas.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bench/kernels/device.h"
#include "kernels/usable_cores.h"

namespace logitd::bench {
namespace {

constexpr int kRuns = 15;
constexpr int kWarmRuns = 2;
constexpr int kSlowRuns = 5;
constexpr int kSlowWarmRuns = 1;

// Runs body(thread, threads) on every core that the backend uses, at once.
template <class Body>
absl::Status OnAllCores(Body body) {
  const int threads = UsableCores();
  std::vector<std::thread> workers;
  for (int t = 1; t < threads; ++t) workers.emplace_back([&, t] { body(t, threads); });
  body(0, threads);
  for (std::thread& worker : workers) worker.join();
  return absl::OkStatus();
}

uint64_t XorOfWords(const uint64_t* words, size_t n) {
  uint64_t lanes[32] = {};  // a whole vector loop: the compiler keeps several loads in flight
  for (size_t i = 0; i + 32 <= n; i += 32) {
    for (int j = 0; j < 32; ++j) lanes[j] ^= words[i + j];
  }
  uint64_t all = 0;
  for (uint64_t lane : lanes) all ^= lane;
  return all;
}

class CpuDevice final : public Device {
 public:
  absl::Status Init() {
    LOGITD_RETURN_IF_ERROR(Use(CreateCpuBackend({})));
    // A few million normals, repeated: drawing 2 GiB of them takes longer than the bench.
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    normals_.resize(size_t{3} << 20);
    for (float& x : normals_) x = normal(random);
    return absl::OkStatus();
  }

#ifdef LOGITD_WITH_OPENBLAS
  // With the kernels that OpenBLAS chose: where it does not know the processor, they are slow ones.
  std::string name() const override {
    return Device::name() + ", OpenBLAS for " + openblas_get_corename();
  }
#endif
  size_t input_bytes() const override { return size_t{2} << 30; }
  DType product_dtype(DType) const override { return DType::kF32; }

  absl::Status CopyIn(std::byte* to, const void* from, size_t bytes) override {
    std::memcpy(to, from, bytes);
    return absl::OkStatus();
  }
  absl::Status FillNormals(DType dtype, std::byte* data, size_t bytes) override {
    std::vector<uint16_t> halves;
    const void* source = normals_.data();
    size_t source_bytes = normals_.size() * sizeof(float);
    if (dtype != DType::kF32) {
      // bf16 by truncation; read as f16 the same bits are ordinary numbers too.
      for (const float& x : normals_) {
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof(bits));
        halves.push_back(static_cast<uint16_t>(bits >> 16));
      }
      source = halves.data();
      source_bytes /= 2;
    }
    for (size_t at = 0; at < bytes; at += source_bytes)
      std::memcpy(data + at, source, std::min(source_bytes, bytes - at));
    return absl::OkStatus();
  }

  absl::Status Read(const std::byte* from, size_t bytes) override {
    const uint64_t* words = reinterpret_cast<const uint64_t*>(from);
    std::atomic<uint64_t> sink{0};
    return OnAllCores([&](int t, int threads) {
      const size_t share = bytes / sizeof(uint64_t) / threads;
      sink ^= XorOfWords(words + share * t, share);
    });
  }
  absl::Status Copy(std::byte* to, const std::byte* from, size_t bytes) override {
    return OnAllCores([&](int t, int threads) {
      const size_t share = bytes / threads;
      std::memcpy(to + share * t, from + share * t, share);
    });
  }
  absl::Status Run(const BareProduct& product) override {
#ifdef LOGITD_WITH_OPENBLAS
    const auto rows = static_cast<int>(product.rows), hidden = static_cast<int>(product.hidden);
    const auto* states = reinterpret_cast<const float*>(product.states);
    const auto* weight = reinterpret_cast<const float*>(product.weight);
    auto* logits = reinterpret_cast<float*>(product.logits);
    return OnAllCores([&](int t, int threads) {
      const int64_t begin = product.vocab * t / threads, end = product.vocab * (t + 1) / threads;
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, static_cast<int>(end - begin),
                  hidden, 1, states, hidden, weight + begin * product.hidden, hidden, 0,
                  logits + begin, static_cast<int>(product.logits_stride));
    });
#else
    return absl::UnimplementedError("built without OpenBLAS (Debian: libopenblas-serial-dev)");
#endif
  }

  absl::StatusOr<double> Time(const Repeat& repeat,
                              const std::function<absl::Status(int)>& launch) override {
    const int warm_runs = repeat.slow ? kSlowWarmRuns : kWarmRuns;
    // Short launches are timed more often: one interruption weighs more there.
    const int runs = warm_runs + (repeat.slow ? kSlowRuns : std::max(kRuns, repeat.launches));
    std::vector<double> us;
    for (int run = 0; run < runs; ++run) {
      const auto begin = std::chrono::steady_clock::now();
      LOGITD_RETURN_IF_ERROR(launch(run));
      if (auto times = stream_->Wait(); !times.ok()) return times.status();
      const std::chrono::duration<double, std::micro> taken =
          std::chrono::steady_clock::now() - begin;
      if (run >= warm_runs) us.push_back(taken.count());
    }
    return Median(std::move(us));
  }

 private:
  std::vector<float> normals_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> CreateCpuDevice() {
  auto device = std::make_unique<CpuDevice>();
  LOGITD_RETURN_IF_ERROR(device->Init());
  return device;
}

}  // namespace logitd::bench

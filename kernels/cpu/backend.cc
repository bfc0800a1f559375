// The CPU as a device: slabs are plain memory, copies do nothing, and an op is done when its call
// returns.
#include "kernels/backend.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/cpu/attention/attention_softmax.h"
#include "kernels/cpu/linear/linear.h"
#include "kernels/cpu/loss/cross_entropy.h"
#include "kernels/cpu/loss/divergence.h"
#include "kernels/cpu/sampling/sample.h"
#include "kernels/cpu/sampling/softmax_topk.h"
#include "kernels/cpu/sampling/verify.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/status_macros.h"
#include "kernels/usable_cores.h"

namespace logitd {
namespace {

constexpr int kMaxThreads = 1024;

// Memory of a stream's ops, by its type, and the flag of Stream::Watch.
using Memory = std::tuple<cpu::SketchScratch, cpu::SampleCallScratch, cpu::Buffer<double>,
                          cpu::LossScratch, cpu::DivergenceScratch, cpu::VerifyScratch,
                          cpu::LinearScratch, const std::atomic<bool>*>;

// An op's function, which is found by the arguments that it takes.
template <class Args, class... More>
class Function {
 public:
  constexpr explicit Function(void (*compute)(const Args&, cpu::ThreadPool&, More...))
      : compute_(compute) {}
  constexpr const Function& operator()(const Args&) const { return *this; }

  void Compute(const Args& args, cpu::ThreadPool& pool, Memory& memory) const {
    compute_(args, pool, std::get<std::remove_reference_t<More>>(memory)...);
  }

 private:
  void (*compute_)(const Args&, cpu::ThreadPool&, More...);
};

constexpr Overloaded kFunctions = {
    Function(&cpu::SoftmaxTopK),
    Function(&cpu::Sample),
    Function(&cpu::Verify),
    Function(&cpu::AttentionSoftmax),
    Function(&cpu::AttentionSoftmaxBackward),
    Function(&cpu::CrossEntropy),
    Function(&cpu::CrossEntropyBackward),
    Function(&cpu::CrossEntropyTraining),
    Function(&cpu::Divergence),
    Function(&cpu::LinearTopK),
    Function(&cpu::LinearSample),
    Function(&cpu::LinearVerify),
    Function(&cpu::LinearCrossEntropy),
    Function(&cpu::LinearCrossEntropyBackward),
    Function(&cpu::LinearCrossEntropyTraining),
    Function(&cpu::LinearDivergence),
    Function(&cpu::LinearDivergenceTraining),
    Function(&cpu::LinearTopKPartial),
    Function(&cpu::TopKMerge),
    Function(&cpu::LinearSamplePartial),
    Function(&cpu::LinearSampleMerge),
    Function(&cpu::LinearVerifyMerge),
    Function(&cpu::LinearDivergenceMerge),
    Function(&cpu::LinearCrossEntropyTargets),
    Function(&cpu::LinearCrossEntropyPartial),
    Function(&cpu::CrossEntropyMerge),
    Function(&cpu::LinearSupportMerge),
    Function(&cpu::LinearCrossEntropyBackwardPartial),
    Function(&cpu::LinearCrossEntropyBackwardMerge),
};

class CpuStream : public Stream {
 public:
  explicit CpuStream(cpu::ThreadPool* pool) : pool_(pool) {}

  absl::Status Upload(const Slab&, size_t, size_t) override { return absl::OkStatus(); }
  absl::Status Download(const Slab&, size_t, size_t) override { return absl::OkStatus(); }

  absl::Status Fill(const Slab& slab, size_t offset, size_t bytes, std::byte* to) override {
    std::memcpy(to, slab.host + offset, bytes);
    return absl::OkStatus();
  }

  absl::Status Gather(absl::Span<const RowsCopy> copies) override {
    for (const RowsCopy& copy : copies) {
      const bool together = copy.from_stride == copy.row_bytes && copy.to_stride == copy.row_bytes;
      const int64_t runs = together ? 1 : copy.rows;
      const size_t bytes =
          together ? copy.row_bytes * static_cast<size_t>(copy.rows) : copy.row_bytes;
      for (int64_t run = 0; run < runs; ++run) {
        const auto at = static_cast<size_t>(run);
        std::memcpy(copy.to + at * copy.to_stride, copy.from + at * copy.from_stride, bytes);
      }
    }
    return absl::OkStatus();
  }

  absl::Status RunOp(const Op& op) override {
    const auto start = std::chrono::steady_clock::now();
    std::get<const std::atomic<bool>*>(memory_) = abandoned();
    absl::Status status =
        RunIfKnown(op, [this](const auto& args) -> decltype(kFunctions(args), absl::OkStatus()) {
          kFunctions(args).Compute(args, *pool_, memory_);
          return absl::OkStatus();
        });
    const auto spent = std::chrono::steady_clock::now() - start;
    times_.kernel_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count();
    return status;
  }

  absl::StatusOr<StreamTimes> Wait() override { return std::exchange(times_, StreamTimes{}); }

 private:
  cpu::ThreadPool* pool_;
  Memory memory_;
  StreamTimes times_;
};

class CpuBackend : public Backend {
 public:
  CpuBackend(int number, int threads) : pool_(threads) {
    info_.backend = "cpu";
    info_.number = number;
    info_.is_host = true;
    info_.name =
        absl::StrFormat("%s, %d thread%s", cpu::SimdTarget(), threads, threads == 1 ? "" : "s");
    info_.memory_bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  }

  const DeviceInfo& device() const override { return info_; }

  absl::StatusOr<Slab> AllocateSlab(size_t bytes) override {
    absl::StatusOr<std::byte*> data = Map("slab", bytes);
    if (!data.ok()) return data.status();
    return Slab{.host = *data, .device = *data, .bytes = bytes};
  }
  void FreeSlab(const Slab& slab) override { munmap(slab.host, MappedBytes(slab.bytes)); }

  absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes) override {
    absl::StatusOr<std::byte*> data = Map("device memory", bytes);
    if (!data.ok()) return data.status();
    return DeviceMemory{.data = *data, .bytes = bytes};
  }
  void FreeDevice(const DeviceMemory& memory) override {
    munmap(memory.data, MappedBytes(memory.bytes));
  }

  absl::StatusOr<std::unique_ptr<Stream>> CreateStream(StreamUse) override {
    return std::make_unique<CpuStream>(&pool_);
  }

 private:
  // Mapped, not malloc'd: it is page-aligned, and a size that is not there fails here.
  absl::StatusOr<std::byte*> Map(std::string_view what, size_t bytes) const {
    void* data = MAP_FAILED;
    if (bytes <= static_cast<size_t>(std::numeric_limits<int64_t>::max())) {
      data = mmap(nullptr, MappedBytes(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                  -1, 0);
    }
    if (data == MAP_FAILED) {
      return absl::ResourceExhaustedError(absl::StrFormat(
          "%s: no memory for %d bytes; the machine has %d", what, bytes, info_.memory_bytes));
    }
    // Only advice: a kernel without huge pages gives small ones.
    (void)madvise(data, MappedBytes(bytes), MADV_HUGEPAGE);
    return static_cast<std::byte*>(data);
  }

  // mmap refuses an empty range.
  static size_t MappedBytes(size_t bytes) { return bytes == 0 ? 1 : bytes; }

  cpu::ThreadPool pool_;
  DeviceInfo info_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(const BackendOptions& options) {
  if (options.cpu_threads < 0 || options.cpu_threads > kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrFormat("cpu_threads: got %d, allowed 0..%d", options.cpu_threads, kMaxThreads));
  }
  return std::make_unique<CpuBackend>(
      options.device, options.cpu_threads == 0 ? UsableCores() : options.cpu_threads);
}

}  // namespace logitd

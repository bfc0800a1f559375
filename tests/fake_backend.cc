#include "tests/fake_backend.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>
#include <variant>

#include "absl/time/time.h"
#include "kernels/status_macros.h"

namespace logitd {

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fake device: %s\n", what);
  std::abort();
}

FakeBackend::~FakeBackend() {
  while (!slabs_.empty()) FreeSlab(Slab(slabs_.back()));
}

absl::StatusOr<Slab> FakeBackend::AllocateSlab(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (static_cast<int>(slabs_.size()) == max_slabs_) {
    return absl::ResourceExhaustedError("no memory for a slab");
  }
  Slab slab{.host = static_cast<std::byte*>(std::malloc(bytes)), .bytes = bytes};
  std::memset(slab.host, 0xA5, bytes);
  slab.device = info_.is_host ? slab.host : static_cast<std::byte*>(std::malloc(bytes));
  if (!info_.is_host) std::memset(slab.device, 0x5A, bytes);
  slabs_.push_back(slab);
  return slab;
}

void FakeBackend::FreeSlab(const Slab& slab) {
  std::lock_guard<std::mutex> lock(mutex_);
  Require(!IsFilling(slab.host, slab.bytes), "a slab is freed while a copy from it is under way");
  if (slab.device != slab.host) std::free(slab.device);
  std::free(slab.host);
  std::erase_if(slabs_, [&](const Slab& live) { return live.host == slab.host; });
}

bool FakeBackend::IsFilling(const std::byte* memory, size_t bytes) {
  const auto inside = [&](const std::byte* at) { return at >= memory && at < memory + bytes; };
  return std::any_of(fills_.begin(), fills_.end(),
                     [&](const Filling& fill) { return inside(fill.from) || inside(fill.to); });
}

absl::StatusOr<DeviceMemory> FakeBackend::AllocateDevice(size_t bytes) {
  LOGITD_RETURN_IF_ERROR(Reach(FaultPoint::kAllocateDevice));
  std::lock_guard<std::mutex> lock(mutex_);
  if (bytes > max_device_bytes_ - device_bytes_) {
    return absl::ResourceExhaustedError("no device memory");
  }
  device_bytes_ += bytes;
  return DeviceMemory{.data = static_cast<std::byte*>(std::malloc(bytes)), .bytes = bytes};
}

void FakeBackend::FreeDevice(const DeviceMemory& memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  Require(!IsFilling(memory.data, memory.bytes), "memory is freed while a copy to it is under way");
  std::free(memory.data);
  device_bytes_ -= memory.bytes;
}

size_t FakeBackend::device_bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return device_bytes_;
}

absl::StatusOr<std::unique_ptr<Stream>> FakeBackend::CreateStream(StreamUse) {
  return std::make_unique<FakeStream>(this);
}

std::unique_ptr<Stream> FakeBackend::CreateCpuStream() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (cpu_ == nullptr) cpu_ = *CreateCpuBackend({.cpu_threads = 1});
  return *cpu_->CreateStream();
}

void FakeBackend::Hold(FaultPoint point) {
  std::lock_guard<std::mutex> lock(mutex_);
  hold_ = point;
}

void FakeBackend::Release() {
  std::lock_guard<std::mutex> lock(mutex_);
  hold_.reset();
  changed_.notify_all();
}

int FakeBackend::held() {
  std::lock_guard<std::mutex> lock(mutex_);
  return held_;
}

void FakeBackend::SetOpTime(std::chrono::microseconds time) {
  std::lock_guard<std::mutex> lock(mutex_);
  op_time_ = time;
}

void FakeBackend::SetRowTime(std::chrono::microseconds time) {
  std::lock_guard<std::mutex> lock(mutex_);
  row_time_ = time;
}

void FakeBackend::FailNext(FaultPoint point, absl::Status status) {
  std::lock_guard<std::mutex> lock(mutex_);
  next_faults_.emplace_back(point, std::move(status));
}

void FakeBackend::WaitForOps(size_t count) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return log_.size() >= count; });
}

std::vector<FakeBackend::Ran> FakeBackend::log() {
  std::lock_guard<std::mutex> lock(mutex_);
  return log_;
}

int FakeBackend::live_slabs() {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(slabs_.size());
}

void FakeBackend::Log(Ran ran) {
  std::lock_guard<std::mutex> lock(mutex_);
  log_.push_back(std::move(ran));
  changed_.notify_all();
}

absl::Status FakeBackend::Reach(FaultPoint point, int64_t rows) {
  std::chrono::microseconds pause{0};
  {
    std::unique_lock<std::mutex> lock(mutex_);
    ++held_;
    changed_.wait(lock, [&] { return hold_ != point; });
    --held_;
    if (point == FaultPoint::kOp) pause = op_time_ + rows * row_time_;
  }
  if (pause.count() > 0 && clock_ != nullptr) {
    clock_->Advance(absl::FromChrono(pause));
  } else if (pause.count() > 0) {
    std::this_thread::sleep_for(pause);
  }
  if (faults_) LOGITD_RETURN_IF_ERROR(faults_(point));
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = next_faults_.begin(); it != next_faults_.end(); ++it) {
    if (it->first != point) continue;
    absl::Status status = std::move(it->second);
    next_faults_.erase(it);
    return status;
  }
  return absl::OkStatus();
}

void FakeStream::Enter(Phase phase) {
  Require(phase_ <= phase, "work of a batch before Wait has ended the batch before it");
  phase_ = phase;
}

absl::Status FakeStream::Upload(const Slab& slab, size_t offset, size_t bytes) {
  Enter(kUploading);
  LOGITD_RETURN_IF_ERROR(backend_->Reach(FaultPoint::kUpload));
  Require(offset + bytes <= slab.bytes, "a copy goes beyond its slab");
  std::memmove(slab.device + offset, slab.host + offset, bytes);
  uploaded_bytes_ += bytes;
  return absl::OkStatus();
}

absl::Status FakeStream::Fill(const Slab& slab, size_t offset, size_t bytes, std::byte* to) {
  Enter(kUploading);
  LOGITD_RETURN_IF_ERROR(backend_->Reach(FaultPoint::kUpload));
  Require(offset + bytes <= slab.bytes, "a copy goes beyond its slab");
  std::lock_guard<std::mutex> lock(backend_->mutex_);
  backend_->fills_.push_back(
      {.stream = this, .from = slab.host + offset, .to = to, .bytes = bytes});
  return absl::OkStatus();
}

absl::Status FakeStream::Gather(absl::Span<const RowsCopy> copies) {
  Enter(kUploading);
  LOGITD_RETURN_IF_ERROR(backend_->Reach(FaultPoint::kUpload));
  for (const RowsCopy& copy : copies) {
    for (int64_t r = 0; r < copy.rows; ++r) {
      std::memcpy(copy.to + static_cast<size_t>(r) * copy.to_stride,
                  copy.from + static_cast<size_t>(r) * copy.from_stride, copy.row_bytes);
    }
    gathered_bytes_ += static_cast<size_t>(copy.rows) * copy.row_bytes;
  }
  return absl::OkStatus();
}

absl::Status FakeStream::Deliver(std::byte* to, const std::byte* from, size_t bytes) {
  Enter(kDownloading);
  std::memcpy(to, from, bytes);
  return absl::OkStatus();
}

absl::Status FakeStream::Download(const Slab& slab, size_t offset, size_t bytes) {
  Enter(kDownloading);
  Require(offset + bytes <= slab.bytes, "a copy goes beyond its slab");
  std::memcpy(slab.host + offset, slab.device + offset, bytes);
  return absl::OkStatus();
}

absl::StatusOr<StreamTimes> FakeStream::Wait() {
  phase_ = kIdle;
  uploaded_bytes_ = 0;
  gathered_bytes_ = 0;
  {
    std::lock_guard<std::mutex> lock(backend_->mutex_);
    std::erase_if(backend_->fills_, [this](const FakeBackend::Filling& fill) {
      if (fill.stream == this) std::memcpy(fill.to, fill.from, fill.bytes);
      return fill.stream == this;
    });
  }
  const auto kernel = std::exchange(rows_time_, std::chrono::nanoseconds(0)).count();
  LOGITD_RETURN_IF_ERROR(backend_->Reach(FaultPoint::kWait));
  return StreamTimes{.h2d_ns = 1, .kernel_ns = 2 + kernel, .d2h_ns = 3};
}

absl::Status FakeStream::RunOp(const Op& op) {
  std::visit(
      [this](const auto* args) {
        if constexpr (requires { sizeof(*args); }) last_ = *args;
      },
      op);
  if (backend_ == nullptr) return absl::OkStatus();
  return Run("", 0, [&] {
    if (cpu_ == nullptr) cpu_ = backend_->CreateCpuStream();
    return cpu_->RunOp(op);
  });
}

absl::Status FakeStream::Run(std::string tags, int64_t rows,
                             absl::FunctionRef<absl::Status()> body) {
  Enter(kComputing);
  backend_->Log({.tags = std::move(tags),
                 .rows = rows,
                 .uploaded_bytes = uploaded_bytes_,
                 .gathered_bytes = gathered_bytes_});
  {
    std::lock_guard<std::mutex> lock(backend_->mutex_);
    rows_time_ += rows * backend_->row_time_;
  }
  LOGITD_RETURN_IF_ERROR(backend_->Reach(FaultPoint::kOp, rows));
  return body();
}

}  // namespace logitd

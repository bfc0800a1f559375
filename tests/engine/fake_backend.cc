#include "tests/engine/fake_backend.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>

namespace logitd::engine {
namespace {

// A device that is misused does not go on.
void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fake device: %s\n", what);
  std::abort();
}

}  // namespace

uint64_t Checksum(const std::byte* row, size_t bytes) {
  uint64_t sum = 14695981039346656037u;  // FNV-1a
  for (size_t i = 0; i < bytes; ++i) {
    sum = (sum ^ static_cast<uint64_t>(row[i])) * 1099511628211u;
  }
  return sum;
}

const OpTraits kDigest = {
    .name = "digest",
    .inputs = kDigestInputs,
    .outputs = kDigestOutputs,
    .enqueue =
        [](Stream& stream, const BatchView& batch) {
          return static_cast<FakeStream&>(stream).Digest(batch);
        },
};

absl::StatusOr<Slab> FakeBackend::AllocateSlab(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (live_slabs_ == max_slabs_) return absl::ResourceExhaustedError("no memory for a slab");
  ++live_slabs_;
  Slab slab{.host = static_cast<std::byte*>(std::malloc(bytes)),
            .device = static_cast<std::byte*>(std::malloc(bytes)),
            .bytes = bytes};
  std::memset(slab.host, 0xA5, bytes);
  std::memset(slab.device, 0x5A, bytes);
  return slab;
}

void FakeBackend::FreeSlab(const Slab& slab) {
  std::lock_guard<std::mutex> lock(mutex_);
  Require(!Busy(slab.host, slab.bytes), "a slab is freed while a copy from it is under way");
  std::free(slab.host);
  std::free(slab.device);
  --live_slabs_;
}

bool FakeBackend::Busy(const std::byte* memory, size_t bytes) {
  const auto inside = [&](const std::byte* at) { return at >= memory && at < memory + bytes; };
  return std::any_of(fills_.begin(), fills_.end(),
                     [&](const Filled& fill) { return inside(fill.from) || inside(fill.to); });
}

absl::StatusOr<DeviceMemory> FakeBackend::AllocateDevice(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (bytes > max_device_bytes_ - device_bytes_) {
    return absl::ResourceExhaustedError("no device memory");
  }
  device_bytes_ += bytes;
  return DeviceMemory{.data = static_cast<std::byte*>(std::malloc(bytes)), .bytes = bytes};
}

void FakeBackend::FreeDevice(const DeviceMemory& memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  Require(!Busy(memory.data, memory.bytes), "memory is freed while a copy to it is under way");
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

void FakeBackend::Hold() {
  std::lock_guard<std::mutex> lock(mutex_);
  held_ = true;
}

void FakeBackend::Release() {
  std::lock_guard<std::mutex> lock(mutex_);
  held_ = false;
  changed_.notify_all();
}

void FakeBackend::SetOpTime(std::chrono::microseconds time) {
  std::lock_guard<std::mutex> lock(mutex_);
  op_time_ = time;
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
  return live_slabs_;
}

absl::Status FakeBackend::Fault(FaultPoint point) {
  if (faults_) {
    if (absl::Status status = faults_(point); !status.ok()) return status;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = next_faults_.begin(); it != next_faults_.end(); ++it) {
    if (it->first != point) continue;
    absl::Status status = std::move(it->second);
    next_faults_.erase(it);
    return status;
  }
  return absl::OkStatus();
}

void FakeBackend::BeginOp(Ran ran) {
  std::unique_lock<std::mutex> lock(mutex_);
  log_.push_back(std::move(ran));
  changed_.notify_all();
  changed_.wait(lock, [&] { return !held_; });
  const auto time = op_time_;
  lock.unlock();
  if (time.count() > 0) std::this_thread::sleep_for(time);
}

void FakeStream::Enter(Phase phase) {
  Require(phase_ <= phase, "work of a batch before Wait has ended the one before it");
  phase_ = phase;
}

absl::Status FakeStream::Upload(const Slab& slab, size_t offset, size_t bytes) {
  Enter(kUploading);
  if (absl::Status status = backend_->Fault(FaultPoint::kUpload); !status.ok()) return status;
  Require(offset + bytes <= slab.bytes, "a copy goes beyond its slab");
  std::memcpy(slab.device + offset, slab.host + offset, bytes);
  uploaded_bytes_ += bytes;
  return absl::OkStatus();
}

absl::Status FakeStream::Fill(const Slab& slab, size_t offset, size_t bytes, std::byte* to) {
  Enter(kUploading);
  if (absl::Status status = backend_->Fault(FaultPoint::kUpload); !status.ok()) return status;
  Require(offset + bytes <= slab.bytes, "a copy goes beyond its slab");
  std::lock_guard<std::mutex> lock(backend_->mutex_);
  backend_->fills_.push_back(
      {.stream = this, .from = slab.host + offset, .to = to, .bytes = bytes});
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
  {
    std::lock_guard<std::mutex> lock(backend_->mutex_);
    std::erase_if(backend_->fills_, [this](const FakeBackend::Filled& fill) {
      if (fill.stream == this) std::memcpy(fill.to, fill.from, fill.bytes);
      return fill.stream == this;
    });
  }
  if (absl::Status status = backend_->Fault(FaultPoint::kWait); !status.ok()) return status;
  return StreamTimes{.h2d_ns = 1, .kernel_ns = 2, .d2h_ns = 3};
}

absl::Status FakeStream::Run(std::string tags, int64_t rows, absl::FunctionRef<void()> body) {
  Enter(kComputing);
  backend_->BeginOp({.tags = std::move(tags), .rows = rows, .uploaded_bytes = uploaded_bytes_});
  if (absl::Status status = backend_->Fault(FaultPoint::kOp); !status.ok()) return status;
  body();
  return absl::OkStatus();
}

absl::Status FakeStream::Digest(const BatchView& batch) {
  const auto* params = reinterpret_cast<const DigestRow*>(batch.inputs[0]);
  const auto* notes = reinterpret_cast<const uint32_t*>(batch.inputs[1]);
  std::string runs;
  for (int64_t r = 0; r < batch.rows(); ++r) {
    const char tag = params[r].tag == 0 ? '.' : static_cast<char>(params[r].tag);
    if (runs.empty() || runs.back() != tag) runs.push_back(tag);
  }
  return Run(std::move(runs), batch.rows(), [&] {
    auto* sums = reinterpret_cast<uint64_t*>(batch.outputs[0]);
    auto* entries = reinterpret_cast<uint32_t*>(batch.outputs[1]);
    auto* tags = reinterpret_cast<uint32_t*>(batch.outputs[2]);
    const size_t row_bytes = static_cast<size_t>(batch.row_elements) * SizeOf(batch.dtype);
    for (int64_t r = 0; r < batch.rows(); ++r) {
      if (params[r].tag == 0) continue;
      Require(params[r].entries <= batch.max_row_entries, "max_row_entries is too small");
      const std::byte* row = batch.payload + static_cast<size_t>(r) * batch.row_stride;
      sums[r] = Checksum(row, row_bytes);
      tags[r] = params[r].tag;
      if (batch.head != nullptr) tags[r] += static_cast<uint32_t>(batch.head->scale);
      Require(params[r].first_note + params[r].notes <= batch.counts[kDigestNotes],
              "a foreign note");
      for (int32_t n = 0; n < params[r].notes; ++n) tags[r] += notes[params[r].first_note + n];
      for (int32_t e = 0; e < params[r].entries; ++e) {
        entries[params[r].first_entry + e] = EntryOf(row, batch.row_elements, e);
      }
    }
  });
}

}  // namespace logitd::engine

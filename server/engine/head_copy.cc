#include "server/engine/head_copy.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "formats/half.h"
#include "kernels/status_macros.h"
#include "server/engine/devices.h"
#include "server/log/limited.h"

namespace logitd::engine {
namespace {

constexpr size_t kChunkBytes = size_t{8} << 20;  // one of two slabs that take turns
constexpr size_t kRowAlignment = 16;
constexpr size_t kPartAlignment = 256;
constexpr int kLogSteps = 10;  // log lines of a long load

size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// Some items of a tensor and their place in the memory of a device. An item is a row of a matrix,
// or a number that becomes a float there: (value + offset) * scale.
struct Items {
  const StoredTensor& tensor;
  size_t first;
  size_t count;
  size_t file_bytes;  // of an item
  size_t bytes;       // of an item on the device; not less
  size_t to;          // offset on the device
  bool numbers = false;
  float offset = 0;
  float scale = 1;
};

// Makes `count` items as on the device of those at `host`, which are as in the file. The last one
// comes first, so that none is overwritten before it is read.
void Expand(const Items& items, std::byte* host, size_t count) {
  const bool same = !items.numbers && items.bytes == items.file_bytes;
  for (size_t i = count; !same && i-- > 0;) {
    std::byte* const stored = host + i * items.file_bytes;
    std::byte* const to = host + i * items.bytes;
    if (!items.numbers) {
      std::memmove(to, stored, items.file_bytes);
      std::memset(to + items.file_bytes, 0, items.bytes - items.file_bytes);
      continue;
    }
    uint32_t bits = 0;
    std::memcpy(&bits, stored, items.file_bytes);
    const auto half = static_cast<uint16_t>(bits);
    const float value = items.tensor.dtype == DType::kF32    ? std::bit_cast<float>(bits)
                        : items.tensor.dtype == DType::kBF16 ? formats::BF16ToFloat(half)
                                                             : formats::F16ToFloat(half);
    const float expanded = (value + items.offset) * items.scale;
    std::memcpy(to, &expanded, sizeof(expanded));
  }
}

// Copies files to the memory of devices in chunks: while one is copied, the next is read.
class Copier {
 public:
  // copies[first] is the first that has a backend, which also lends the slabs.
  Copier(const std::vector<Head::Copy>& copies, size_t first, int64_t total_bytes,
         const std::string& name, absl::FunctionRef<bool(const HeadProgress&)> progress)
      : copies_(copies),
        first_(first),
        name_(name),
        report_(progress),
        progress_{.total_bytes = total_bytes},
        streams_(copies.size()) {}
  ~Copier() {
    Arrive().IgnoreError();
    for (const Slab& slab : slabs_) {
      if (slab.bytes > 0) copies_[first_].backend->FreeSlab(slab);
    }
  }
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  absl::Status Start(size_t chunk_bytes) {
    for (Slab& slab : slabs_) {
      absl::StatusOr<Slab> allocated = copies_[first_].backend->AllocateSlab(chunk_bytes);
      if (!allocated.ok()) return OfDevice(static_cast<int>(first_), allocated.status());
      slab = *allocated;
    }
    for (size_t i = first_; i < copies_.size(); ++i) {
      if (copies_[i].backend == nullptr) continue;
      auto stream = copies_[i].backend->CreateStream(StreamUse::kCopies);
      if (!stream.ok()) return OfDevice(static_cast<int>(i), stream.status());
      streams_[i] = *std::move(stream);
    }
    return absl::OkStatus();
  }

  // Copies the items to these devices.
  absl::Status Send(const std::vector<size_t>& devices, const Items& items) {
    const size_t most = slabs_[0].bytes / items.bytes;
    for (size_t done = 0; done < items.count;) {
      const size_t count = std::min(most, items.count - done);
      const size_t begin = (items.first + done) * items.file_bytes;
      std::byte* const host = slabs_[next_].host;
      LOGITD_RETURN_IF_ERROR(items.tensor.file->Read(
          items.tensor.offset + static_cast<int64_t>(begin), count * items.file_bytes, host));
      Expand(items, host, count);
      LOGITD_RETURN_IF_ERROR(Arrive());
      travelling_ = true;
      for (const size_t i : devices) {
        const absl::Status status =
            streams_[i]->Fill(slabs_[next_], 0, count * items.bytes,
                              copies_[i].memory.data + items.to + done * items.bytes);
        if (!status.ok()) return OfDevice(static_cast<int>(i), status);
      }
      next_ = 1 - next_;  // its copies have ended
      done += count;
      progress_.done_bytes += static_cast<int64_t>(count * items.file_bytes);
      // Finish reports the last chunk, after it has arrived.
      if (progress_.done_bytes < progress_.total_bytes) LOGITD_RETURN_IF_ERROR(Report());
    }
    return absl::OkStatus();
  }

  absl::Status Finish() {
    LOGITD_RETURN_IF_ERROR(Arrive());
    return Report();
  }

 private:
  // Waits for the copies on all devices, also where one fails.
  absl::Status Arrive() {
    absl::Status first;
    if (!std::exchange(travelling_, false)) return first;
    for (size_t i = 0; i < streams_.size(); ++i) {
      if (streams_[i] == nullptr) continue;
      first.Update(OfDevice(static_cast<int>(i), streams_[i]->Wait().status()));
    }
    return first;
  }

  absl::Status Report() {
    const auto step = static_cast<int>(progress_.done_bytes * kLogSteps / progress_.total_bytes);
    // A short load logs no progress.
    const bool long_enough = progress_.total_bytes > kLogSteps * static_cast<int64_t>(kChunkBytes);
    if (long_enough && step > logged_ && step < kLogSteps) {
      log::Limited(log::Source::kHeads, spdlog::level::info, "head {}: {}%, {} of {} MiB", name_,
                   step * 100 / kLogSteps, progress_.done_bytes >> 20, progress_.total_bytes >> 20);
    }
    logged_ = step;
    if (report_(progress_)) return absl::OkStatus();
    return absl::CancelledError(absl::StrFormat("the load was cancelled at %d of %d bytes",
                                                progress_.done_bytes, progress_.total_bytes));
  }

  const std::vector<Head::Copy>& copies_;
  const size_t first_;
  const std::string& name_;
  const absl::FunctionRef<bool(const HeadProgress&)> report_;
  HeadProgress progress_;
  int logged_ = 0;
  Slab slabs_[2];
  std::vector<std::unique_ptr<Stream>> streams_;  // by device
  int next_ = 0;                                  // the slab to fill
  bool travelling_ = false;                       // the other slab is being copied to the devices
};

}  // namespace

HeadLayout::HeadLayout(const HeadSource& source, const VocabShard& part)
    : first(static_cast<size_t>(part.first)),
      vocab(static_cast<size_t>(part.tokens)),
      hidden(static_cast<size_t>(source.weight.shape[1])),
      row_bytes(hidden * SizeOf(source.weight.dtype)),
      row_stride(RoundUp(row_bytes, kRowAlignment)),
      bias(RoundUp(vocab * row_stride, kPartAlignment)) {
  const bool has_norm = source.norm.has_value() && vocab > 0;
  norm = bias + (source.bias.has_value() ? RoundUp(vocab * sizeof(float), kPartAlignment) : 0);
  bytes = norm + (has_norm ? hidden * sizeof(float) : 0);
  file_bytes = static_cast<int64_t>(vocab * row_bytes);
  if (source.bias.has_value()) file_bytes += vocab * SizeOf(source.bias->dtype);
  if (has_norm) file_bytes += hidden * SizeOf(source.norm->dtype);
}

HeadView HeadLayout::View(const HeadSource& source, const std::byte* memory) const {
  const auto part = [&](const std::optional<StoredTensor>& tensor, size_t offset) {
    return tensor.has_value() ? reinterpret_cast<const float*>(memory + offset) : nullptr;
  };
  HeadView view = source.Shape();
  view.weight.data = memory;
  view.weight.rows = static_cast<int64_t>(vocab);
  view.weight.row_stride = static_cast<int64_t>(row_stride / SizeOf(source.weight.dtype));
  view.bias = part(source.bias, bias);
  view.norm = part(source.norm, norm);
  return view;
}

absl::Status CopyHead(const HeadSource& source, const std::vector<HeadLayout>& layouts,
                      const std::vector<Head::Copy>& copies, bool sharded, const std::string& name,
                      absl::FunctionRef<bool(const HeadProgress&)> progress) {
  std::vector<std::vector<size_t>> groups;  // devices that get the same
  int64_t file_bytes = 0;
  for (size_t i = 0; i < copies.size(); ++i) {
    if (copies[i].backend == nullptr) continue;
    if (sharded || groups.empty()) {
      groups.emplace_back();
      file_bytes += layouts[i].file_bytes;
    }
    groups.back().push_back(i);
  }
  Copier copier(copies, groups.front().front(), file_bytes, name, progress);
  LOGITD_RETURN_IF_ERROR(copier.Start(std::min(kChunkBytes, layouts.front().bytes)));
  for (const std::vector<size_t>& devices : groups) {
    const HeadLayout& layout = layouts[devices.front()];
    if (layout.vocab == 0) continue;
    LOGITD_RETURN_IF_ERROR(copier.Send(devices, {.tensor = source.weight,
                                                 .first = layout.first,
                                                 .count = layout.vocab,
                                                 .file_bytes = layout.row_bytes,
                                                 .bytes = layout.row_stride,
                                                 .to = 0}));
    // A model scales the biased logits. A HeadView adds its bias to the scaled logits.
    if (source.bias.has_value()) {
      LOGITD_RETURN_IF_ERROR(copier.Send(devices, {.tensor = *source.bias,
                                                   .first = layout.first,
                                                   .count = layout.vocab,
                                                   .file_bytes = SizeOf(source.bias->dtype),
                                                   .bytes = sizeof(float),
                                                   .to = layout.bias,
                                                   .numbers = true,
                                                   .scale = source.scale}));
    }
    if (source.norm.has_value()) {
      LOGITD_RETURN_IF_ERROR(copier.Send(devices, {.tensor = *source.norm,
                                                   .first = 0,
                                                   .count = layout.hidden,
                                                   .file_bytes = SizeOf(source.norm->dtype),
                                                   .bytes = sizeof(float),
                                                   .to = layout.norm,
                                                   .numbers = true,
                                                   .offset = source.norm_offset}));
    }
  }
  return copier.Finish();
}

}  // namespace logitd::engine

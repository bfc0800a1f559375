#include "server/engine/heads.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "formats/half.h"
#include "formats/safetensors.h"
#include "kernels/shards.h"
#include "kernels/status_macros.h"
#include "server/base/clock.h"
#include "server/engine/devices.h"
#include "server/engine/head_source.h"
#include "server/engine/metrics.h"
#include "server/log/limited.h"

namespace logitd::engine {
namespace {

constexpr size_t kMaxName = 128;
constexpr size_t kMaxPath = 4096;
constexpr size_t kMaxListed = 10;                // names in an error
constexpr size_t kChunkBytes = size_t{8} << 20;  // one of two slabs that take turns
constexpr size_t kRowAlignment = 16;
constexpr size_t kPartAlignment = 256;
constexpr absl::Duration kTurnPoll = absl::Milliseconds(100);
constexpr int kLogSteps = 10;  // log lines of a long load

size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

absl::Status Named(const std::string& name, const absl::Status& status) {
  absl::Status named(status.code(), absl::StrFormat("head %s: %s", name, status.message()));
  if (const std::optional<int> device = DeviceOf(status)) named = OfDevice(*device, named);
  return named;
}

absl::Status CheckRequest(const HeadRequest& request) {
  const bool good = std::all_of(request.name.begin(), request.name.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
  });
  if (!good || request.name.empty() || request.name.size() > kMaxName) {
    return absl::InvalidArgumentError(
        absl::StrFormat("name: got %s, allowed 1 to %d characters of A-Z, a-z, 0-9, '.', '_', '-'",
                        formats::Shown(request.name), kMaxName));
  }
  const bool one_line = std::none_of(request.path.begin(), request.path.end(), [](char c) {
    return absl::ascii_iscntrl(static_cast<unsigned char>(c));
  });
  if (!one_line || request.path.empty() || request.path.size() > kMaxPath) {
    return absl::InvalidArgumentError(
        absl::StrFormat("path: got %s of %d bytes, allowed 1 to %d without control characters",
                        formats::Shown(request.path), request.path.size(), kMaxPath));
  }
  if (!request.root.empty()) LOGITD_RETURN_IF_ERROR(CheckInRoot(request.root, request.path));
  if (request.vocab < 0 || request.vocab > kMaxVocab) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "vocab: got %d, allowed 1 to %d, or 0 for the model's own", request.vocab, kMaxVocab));
  }
  return absl::OkStatus();
}

void Widen(DType dtype, const std::byte* from, size_t count, float* to) {
  if (dtype == DType::kF32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  for (size_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, from + 2 * i, sizeof(bits));
    to[i] = dtype == DType::kBF16 ? formats::BF16ToFloat(bits) : formats::F16ToFloat(bits);
  }
}

// The parts of a head in the memory of a device that holds the tokens of `part`. A device without
// tokens holds nothing.
struct Layout {
  Layout(const HeadSource& source, const VocabShard& part)
      : first(static_cast<size_t>(part.first)), vocab(static_cast<size_t>(part.tokens)) {
    const size_t element = SizeOf(source.weight.dtype);
    hidden = static_cast<size_t>(source.weight.shape[1]);
    row_bytes = hidden * element;
    row_stride = RoundUp(row_bytes, kRowAlignment);
    bias = RoundUp(vocab * row_stride, kPartAlignment);
    norm = bias + (source.bias.has_value() ? RoundUp(vocab * sizeof(float), kPartAlignment) : 0);
    const bool has_norm = source.norm.has_value() && vocab > 0;
    bytes = norm + (has_norm ? hidden * sizeof(float) : 0);
    file_bytes = static_cast<int64_t>(vocab * row_bytes);
    if (source.bias.has_value()) file_bytes += vocab * SizeOf(source.bias->dtype);
    if (has_norm) file_bytes += hidden * SizeOf(source.norm->dtype);
  }

  HeadView View(const HeadSource& source, const std::byte* memory) const {
    const auto part = [&](const std::optional<StoredTensor>& tensor, size_t offset) {
      return tensor.has_value() ? reinterpret_cast<const float*>(memory + offset) : nullptr;
    };
    return {
        .weight = {.data = memory,
                   .dtype = source.weight.dtype,
                   .rows = static_cast<int64_t>(vocab),
                   .cols = source.weight.shape[1],
                   .row_stride = static_cast<int64_t>(row_stride / SizeOf(source.weight.dtype))},
        .bias = part(source.bias, bias),
        .norm = part(source.norm, norm),
        .norm_epsilon = source.norm_epsilon,
        .scale = source.scale,
        .softcap = source.softcap};
  }

  size_t first;  // the first token
  size_t vocab;  // tokens
  size_t hidden;
  size_t row_bytes;   // in the file
  size_t row_stride;  // bytes, on the device
  size_t bias;        // offset on the device
  size_t norm;        // offset on the device
  size_t bytes;       // on the device
  int64_t file_bytes;
};

// Memory of a head that is being loaded, on every device that is not lost. Freed unless Release is
// called.
class Allocation {
 public:
  struct Part {
    int device;
    DeviceMemory memory;
  };

  Allocation(const Devices& devices, Metrics* metrics) : devices_(devices), metrics_(metrics) {}
  ~Allocation() {
    for (const Part& part : parts_) {
      devices_.backend(part.device)->FreeDevice(part.memory);
      if (metrics_ != nullptr) metrics_->AddHeadBytes(part.device, -BytesOf(part));
    }
  }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  // `layouts`: by device.
  absl::Status Take(const std::vector<Layout>& layouts) {
    for (int device = 0; device < devices_.count(); ++device) {
      if (devices_.lost(device)) continue;
      const absl::StatusOr<DeviceMemory> memory =
          devices_.backend(device)->AllocateDevice(layouts[static_cast<size_t>(device)].bytes);
      if (!memory.ok()) return OfDevice(device, memory.status());
      parts_.push_back({device, *memory});
      if (metrics_ != nullptr) metrics_->AddHeadBytes(device, BytesOf(parts_.back()));
    }
    if (!parts_.empty()) return absl::OkStatus();
    return OfDevice(0, absl::InternalError("no device is left"));
  }
  const std::vector<Part>& parts() const { return parts_; }
  std::vector<Part> Release() { return std::exchange(parts_, {}); }

 private:
  static int64_t BytesOf(const Part& part) { return static_cast<int64_t>(part.memory.bytes); }

  const Devices& devices_;
  Metrics* const metrics_;
  std::vector<Part> parts_;
};

// Copies files to the memory of devices in chunks: while one is copied, the next is read.
class Copy {
 public:
  Copy(const Devices& devices, const std::vector<Allocation::Part>& parts,
       const HeadRequest& request, int64_t total_bytes,
       absl::FunctionRef<bool(const HeadProgress&)> progress)
      : devices_(devices),
        parts_(parts),
        slab_owner_(devices.backend(parts.front().device)),
        request_(request),
        report_(progress),
        progress_{.total_bytes = total_bytes} {}
  ~Copy() {
    Arrive().IgnoreError();
    for (const Slab& slab : slabs_) {
      if (slab.bytes > 0) slab_owner_->FreeSlab(slab);
    }
  }
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;

  absl::Status Start(size_t chunk_bytes) {
    for (Slab& slab : slabs_) {
      absl::StatusOr<Slab> allocated = slab_owner_->AllocateSlab(chunk_bytes);
      if (!allocated.ok()) return OfDevice(parts_.front().device, allocated.status());
      slab = *allocated;
    }
    for (const Allocation::Part& part : parts_) {
      absl::StatusOr<std::unique_ptr<Stream>> stream =
          devices_.backend(part.device)->CreateStream(StreamUse::kCopies);
      if (!stream.ok()) return OfDevice(part.device, stream.status());
      streams_.push_back(*std::move(stream));
    }
    return absl::OkStatus();
  }

  // What follows goes to these of the parts, [first, first + count).
  void SetParts(size_t first, size_t count) {
    first_part_ = first;
    end_part_ = first + count;
  }

  // Copies the weight's rows of `layout` to the start of the memory. A row starts every row_stride
  // bytes; fills the rest of it with zeros.
  absl::Status Rows(const StoredTensor& tensor, const Layout& layout) {
    const size_t row_bytes = layout.row_bytes;
    const size_t row_stride = layout.row_stride;
    const size_t most = slabs_[0].bytes / row_stride;
    for (size_t row = 0; row < layout.vocab;) {
      const size_t count = std::min(most, layout.vocab - row);
      std::byte* const host = slabs_[next_].host;
      LOGITD_RETURN_IF_ERROR(
          tensor.file->Read(tensor.offset + static_cast<int64_t>((layout.first + row) * row_bytes),
                            count * row_bytes, host));
      // Moves the rows apart, the last one first, so that none is overwritten before it is moved.
      for (size_t i = count; row_bytes < row_stride && i-- > 0;) {
        std::memmove(host + i * row_stride, host + i * row_bytes, row_bytes);
        std::memset(host + i * row_stride + row_bytes, 0, row_stride - row_bytes);
      }
      LOGITD_RETURN_IF_ERROR(Send(count * row_stride, row * row_stride, count * row_bytes));
      row += count;
    }
    return absl::OkStatus();
  }

  // Copies `count` values from number `begin` on, as float, to offset `to`: (value + offset) * scale.
  absl::Status Floats(const StoredTensor& tensor, size_t begin, size_t count, float offset,
                      float scale, size_t to) {
    const size_t element = SizeOf(tensor.dtype);
    const size_t most = slabs_[0].bytes / sizeof(float);
    std::vector<std::byte> stored(std::min(most, count) * element);
    for (size_t first = 0; first < count;) {
      const size_t some = std::min(most, count - first);
      LOGITD_RETURN_IF_ERROR(
          tensor.file->Read(tensor.offset + static_cast<int64_t>((begin + first) * element),
                            some * element, stored.data()));
      auto* const values = reinterpret_cast<float*>(slabs_[next_].host);
      Widen(tensor.dtype, stored.data(), some, values);
      for (size_t i = 0; i < some; ++i) values[i] = (values[i] + offset) * scale;
      LOGITD_RETURN_IF_ERROR(
          Send(some * sizeof(float), to + first * sizeof(float), some * element));
      first += some;
    }
    return absl::OkStatus();
  }

  absl::Status Finish() {
    LOGITD_RETURN_IF_ERROR(Arrive());
    return Report();
  }

 private:
  // Starts the copies of the filled slab. The copies of the other slab end before, so it is filled
  // next.
  absl::Status Send(size_t bytes, size_t to, size_t file_bytes) {
    LOGITD_RETURN_IF_ERROR(Arrive());
    travelling_ = true;
    for (size_t i = first_part_; i < end_part_; ++i) {
      const absl::Status status =
          streams_[i]->Fill(slabs_[next_], 0, bytes, parts_[i].memory.data + to);
      if (!status.ok()) return OfDevice(parts_[i].device, status);
    }
    next_ = 1 - next_;
    progress_.done_bytes += static_cast<int64_t>(file_bytes);
    // Finish reports the last chunk, after it has arrived.
    return progress_.done_bytes < progress_.total_bytes ? Report() : absl::OkStatus();
  }

  // Waits for the copies on all devices, also where one fails.
  absl::Status Arrive() {
    absl::Status first;
    if (!std::exchange(travelling_, false)) return first;
    for (size_t i = 0; i < streams_.size(); ++i) {
      first.Update(OfDevice(parts_[i].device, streams_[i]->Wait().status()));
    }
    return first;
  }

  absl::Status Report() {
    const auto step = static_cast<int>(progress_.done_bytes * kLogSteps / progress_.total_bytes);
    // A short load logs no progress.
    const bool long_enough = progress_.total_bytes > kLogSteps * static_cast<int64_t>(kChunkBytes);
    if (long_enough && step > logged_ && step < kLogSteps) {
      log::Limited(log::Source::kHeads, spdlog::level::info, "head {}: {}%, {} of {} MiB",
                   request_.name, step * 100 / kLogSteps, progress_.done_bytes >> 20,
                   progress_.total_bytes >> 20);
    }
    logged_ = step;
    if (report_(progress_)) return absl::OkStatus();
    return absl::CancelledError(absl::StrFormat("the load was cancelled at %d of %d bytes",
                                                progress_.done_bytes, progress_.total_bytes));
  }

  const Devices& devices_;
  const std::vector<Allocation::Part>& parts_;
  Backend* const slab_owner_;
  const HeadRequest& request_;
  const absl::FunctionRef<bool(const HeadProgress&)> report_;
  HeadProgress progress_;
  int logged_ = 0;
  Slab slabs_[2];
  std::vector<std::unique_ptr<Stream>> streams_;  // one for each part
  size_t first_part_ = 0;
  size_t end_part_ = 0;
  int next_ = 0;             // the slab to fill
  bool travelling_ = false;  // the other slab is being copied to the devices
};

// Copies a head to `parts`: one copy to all, where their layouts are the same, else to each its own.
// RESOURCE_EXHAUSTED: no memory to copy through.
absl::Status CopyAll(const Devices& devices, const HeadSource& source,
                     const std::vector<Layout>& layouts, const std::vector<Allocation::Part>& parts,
                     const HeadRequest& request,
                     absl::FunctionRef<bool(const HeadProgress&)> progress) {
  const size_t at_once = request.shard ? 1 : parts.size();
  int64_t file_bytes = 0;
  for (size_t i = 0; i < parts.size(); i += at_once) {
    file_bytes += layouts[static_cast<size_t>(parts[i].device)].file_bytes;
  }
  Copy copy(devices, parts, request, file_bytes, progress);
  LOGITD_RETURN_IF_ERROR(copy.Start(std::min(kChunkBytes, layouts.front().bytes)));
  for (size_t i = 0; i < parts.size(); i += at_once) {
    const Layout& layout = layouts[static_cast<size_t>(parts[i].device)];
    if (layout.vocab == 0) continue;
    copy.SetParts(i, at_once);
    LOGITD_RETURN_IF_ERROR(copy.Rows(source.weight, layout));
    // A model scales the biased logits. A HeadView adds its bias to the scaled logits.
    if (source.bias.has_value()) {
      LOGITD_RETURN_IF_ERROR(
          copy.Floats(*source.bias, layout.first, layout.vocab, 0.0f, source.scale, layout.bias));
    }
    if (source.norm.has_value()) {
      LOGITD_RETURN_IF_ERROR(
          copy.Floats(*source.norm, 0, layout.hidden, source.norm_offset, 1.0f, layout.norm));
    }
  }
  return copy.Finish();
}

}  // namespace

Head::Head(std::vector<Copy> copies, HeadInfo info, std::optional<HeadView> whole)
    : copies_(std::move(copies)), info_(std::move(info)), whole_(whole) {
  while (copies_[static_cast<size_t>(first_)].backend == nullptr) ++first_;
  if (!whole_.has_value()) return;
  for (const Copy& copy : copies_) shards_.push_back(copy.view);
  whole_->shards = shards_.data();
  whole_->shard_count = static_cast<int>(shards_.size());
}

Head::~Head() {
  for (const Copy& copy : copies_) {
    if (copy.backend != nullptr) copy.backend->FreeDevice(copy.memory);
  }
}

Heads::Heads(std::shared_ptr<const Devices> devices, Metrics* metrics, int64_t max_bytes)
    : devices_(std::move(devices)),
      metrics_(metrics),
      max_bytes_(max_bytes),
      bytes_(std::make_shared<std::vector<std::atomic<int64_t>>>(
          static_cast<size_t>(devices_->count()))) {}

Heads::Heads(Backend* backend, Metrics* metrics, int64_t max_bytes)
    : Heads(std::make_shared<const Devices>(std::vector<Backend*>{backend}), metrics, max_bytes) {}

absl::Status Heads::Check(const HeadRequest& request) const {
  LOGITD_RETURN_IF_ERROR(CheckRequest(request));
  LOGITD_RETURN_IF_ERROR(CheckShard(request));
  MutexLock lock(mutex_);
  return CheckNew(request.name);
}

// Whether the head may be sharded, if it is to be.
absl::Status Heads::CheckShard(const HeadRequest& request) const {
  if (!request.shard) return absl::OkStatus();
  if (absl::Status status = devices_->CheckCanShard().status(); !status.ok()) {
    return Named(request.name, status);
  }
  if (devices_->left() == devices_->count()) return absl::OkStatus();
  return Named(request.name, absl::FailedPreconditionError(absl::StrFormat(
                                 "shard: got %d of %d devices that serve, allowed all; a lost "
                                 "device comes back with a restart",
                                 devices_->left(), devices_->count())));
}

absl::Status Heads::CheckNew(const std::string& name) const {
  if (!heads_.contains(name)) return absl::OkStatus();
  return absl::AlreadyExistsError(
      absl::StrFormat("head %s is loaded, allowed another name, or unload it first", name));
}

absl::StatusOr<std::shared_ptr<const Head>> Heads::Load(
    const HeadRequest& request, absl::FunctionRef<bool(const HeadProgress&)> progress) {
  LOGITD_RETURN_IF_ERROR(CheckRequest(request));
  LOGITD_RETURN_IF_ERROR(CheckShard(request));
  const std::string& name = request.name;
  {
    MutexLock lock(mutex_);
    LOGITD_RETURN_IF_ERROR(CheckNew(name));
    if (!loading_.insert(name).second) {
      return absl::AlreadyExistsError(
          absl::StrFormat("head %s is being loaded, allowed another name", name));
    }
  }
  bool wanted = true;
  for (bool waiting = true; waiting;) {
    {
      MutexLock lock(mutex_);
      if (reading_) read_ended_.WaitFor(mutex_, kTurnPoll);
      waiting = reading_;
      if (!waiting) reading_ = true;
    }
    wanted = !waiting || progress({});
    if (!wanted) break;
  }
  absl::StatusOr<std::shared_ptr<const Head>> head =
      wanted ? Read(request, progress)
             : absl::CancelledError(
                   absl::StrFormat("head %s: the load was cancelled before its turn", name));
  {
    MutexLock lock(mutex_);
    loading_.erase(name);
    if (wanted) reading_ = false;
    if (head.ok()) heads_[name] = *head;
    if (head.ok() && metrics_ != nullptr)
      metrics_->Set(Gauge::kHeads, static_cast<int64_t>(heads_.size()));
    read_ended_.SignalAll();
  }
  if (!head.ok())
    log::Limited(log::Source::kHeads, spdlog::level::warn, "{}",
                 head.status().ToString(absl::StatusToStringMode::kWithNoExtraData));
  return head;
}

absl::StatusOr<std::shared_ptr<const Head>> Heads::Read(
    const HeadRequest& request, absl::FunctionRef<bool(const HeadProgress&)> progress) const {
  const int64_t start_ns = MonotonicNanos();
  const absl::StatusOr<HeadSource> source = OpenHeadSource(request);
  if (!source.ok()) return Named(request.name, source.status());
  HeadView shape = {.weight = {.dtype = source->weight.dtype,
                               .rows = source->vocab,
                               .cols = source->weight.shape[1]},
                    .norm_epsilon = source->norm_epsilon,
                    .scale = source->scale,
                    .softcap = source->softcap};
  if (absl::Status status = CheckHead(shape); !status.ok()) {
    return Named(request.name,
                 absl::Status(status.code(), absl::StrCat(request.path, ": ", status.message())));
  }
  const VocabShards cut = {.vocab = source->vocab, .count = devices_->count()};
  std::vector<Layout> layouts;
  for (int device = 0; device < devices_->count(); ++device) {
    layouts.emplace_back(*source, request.shard ? cut.at(device) : VocabShard{0, source->vocab});
  }
  const Layout& largest = layouts.front();  // or as large as others
  log::Limited(log::Source::kHeads, spdlog::level::info, "head {}: {} [{},{}] {} of {}, {} MiB{}",
               request.name, source->weight.name, source->vocab, largest.hidden,
               Name(source->weight.dtype), request.path, largest.bytes >> 20,
               request.shard ? absl::StrFormat(" on each of %d devices", devices_->count()) : "");
  for (const std::string& warning : source->warnings) {
    log::Limited(log::Source::kHeads, spdlog::level::warn, "head {}: {}", request.name, warning);
  }

  const auto no_memory = [&](const absl::Status& status) {
    const std::optional<int> device = DeviceOf(status);
    const std::string where = device.has_value() && devices_->count() > 1
                                  ? absl::StrCat(devices_->NameOf(*device), ": ")
                                  : "";
    absl::Status needs(status.code(), absl::StrFormat("needs %d bytes of device memory: %s%s",
                                                      largest.bytes, where, status.message()));
    return Named(request.name, device.has_value() ? OfDevice(*device, needs) : needs);
  };
  std::vector<int64_t> takes;  // by device
  for (int device = 0; device < devices_->count(); ++device) {
    const auto i = static_cast<size_t>(device);
    takes.push_back(devices_->lost(device) ? 0 : static_cast<int64_t>(layouts[i].bytes));
    if (const int64_t held = (*bytes_)[i]; takes[i] > max_bytes_ - held) {
      return Named(request.name,
                   absl::ResourceExhaustedError(absl::StrFormat(
                       "needs %d bytes of device memory, heads hold %d of %d (--max-head-bytes)",
                       takes[i], held, max_bytes_)));
    }
  }
  const auto add_bytes = [total = bytes_](const std::vector<int64_t>& bytes, int64_t sign) {
    for (size_t i = 0; i < bytes.size(); ++i) (*total)[i] += sign * bytes[i];
  };
  add_bytes(takes, 1);
  absl::Cleanup give_back = [&] { add_bytes(takes, -1); };
  Allocation memory(*devices_, metrics_);
  if (absl::Status status = memory.Take(layouts); !status.ok()) return no_memory(status);
  absl::Status copied = CopyAll(*devices_, *source, layouts, memory.parts(), request, progress);
  if (absl::IsResourceExhausted(copied)) return no_memory(copied);
  if (!copied.ok()) return Named(request.name, copied);
  const absl::Duration took = absl::Nanoseconds(MonotonicNanos() - start_ns);
  log::Limited(log::Source::kHeads, spdlog::level::info, "head {}: loaded in {:.2f} s",
               request.name, absl::ToDoubleSeconds(took));
  std::move(give_back).Cancel();
  std::vector<Head::Copy> copies(static_cast<size_t>(devices_->count()));
  for (const Allocation::Part& part : memory.Release()) {
    const auto i = static_cast<size_t>(part.device);
    copies[i] = {.backend = devices_->backend(part.device),
                 .memory = part.memory,
                 .view = layouts[i].View(*source, part.memory.data)};
  }
  std::optional<HeadView> whole;
  if (request.shard) {
    // The first device always has tokens. Of its pointers only matters which are null.
    whole = copies.front().view;
    whole->weight.data = nullptr;
    whole->weight.rows = source->vocab;
  }
  const auto largest_bytes = static_cast<int64_t>(largest.bytes);
  const auto unload = [metrics = metrics_, add_bytes, takes](const Head* head) {
    std::vector<int64_t> held;  // by device
    for (const Head::Copy& copy : head->copies()) {
      held.push_back(static_cast<int64_t>(copy.memory.bytes));
    }
    delete head;
    add_bytes(takes, -1);
    for (size_t i = 0; i < held.size() && metrics != nullptr; ++i) {
      if (held[i] > 0) metrics->AddHeadBytes(static_cast<int>(i), -held[i]);
    }
  };
  return std::shared_ptr<const Head>(new Head(std::move(copies),
                                              {.name = request.name,
                                               .path = request.path,
                                               .tensor = source->weight.name,
                                               .stored_vocab = source->weight.shape[0],
                                               .device_bytes = largest_bytes,
                                               .loaded = absl::Now(),
                                               .load_time = took,
                                               .warnings = source->warnings},
                                              whole),
                                     unload);
}

absl::Status Heads::Unload(std::string_view name) {
  std::shared_ptr<const Head> last;  // freed without the lock
  MutexLock lock(mutex_);
  const auto it = heads_.find(name);
  if (it == heads_.end()) return NoSuchHead(name);
  last = std::move(it->second);
  heads_.erase(it);
  if (metrics_ != nullptr) metrics_->Set(Gauge::kHeads, static_cast<int64_t>(heads_.size()));
  log::Limited(log::Source::kHeads, spdlog::level::info, "head {}: unloaded", name);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const Head>> Heads::Find(std::string_view name) const {
  MutexLock lock(mutex_);
  const auto it = heads_.find(name);
  if (it == heads_.end()) return NoSuchHead(name);
  return it->second;
}

std::vector<std::shared_ptr<const Head>> Heads::List() const {
  std::vector<std::shared_ptr<const Head>> list;
  MutexLock lock(mutex_);
  list.reserve(heads_.size());
  for (const auto& [name, head] : heads_) list.push_back(head);
  return list;
}

absl::Status Heads::NoSuchHead(std::string_view name) const {
  std::string names;
  size_t listed = 0;
  for (auto it = heads_.begin(); it != heads_.end() && listed < kMaxListed; ++it, ++listed) {
    absl::StrAppend(&names, listed > 0 ? ", " : "", it->first);
  }
  if (heads_.size() > listed) absl::StrAppendFormat(&names, " and %d more", heads_.size() - listed);
  const bool cut = name.size() > kMaxName;
  const std::string_view shown = name.substr(0, kMaxName);
  return absl::NotFoundError(absl::StrFormat("no head \"%s\"%s; loaded: %s",
                                             absl::CHexEscape({shown.data(), shown.size()}),
                                             cut ? "..." : "", names.empty() ? "none" : names));
}

}  // namespace logitd::engine

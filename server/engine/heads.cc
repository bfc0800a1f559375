#include "server/engine/heads.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "formats/safetensors.h"
#include "kernels/shards.h"
#include "kernels/status_macros.h"
#include "server/base/clock.h"
#include "server/engine/devices.h"
#include "server/engine/head_copy.h"
#include "server/engine/head_source.h"
#include "server/engine/head_update.h"
#include "server/engine/metrics.h"
#include "server/log/limited.h"

namespace logitd::engine {
namespace {

constexpr size_t kMaxName = 128;
constexpr size_t kMaxPath = 4096;
constexpr size_t kMaxListed = 10;      // names in an error
constexpr size_t kMaxUnloaded = 4096;  // names whose versions are kept
constexpr absl::Duration kTurnPoll = absl::Milliseconds(100);

// An error of the same code and device, with a longer text.
absl::Status Prefixed(std::string_view prefix, const absl::Status& status) {
  const absl::Status longer(status.code(), absl::StrFormat("%s: %s", prefix, status.message()));
  const std::optional<int> device = DeviceOf(status);
  return device.has_value() ? OfDevice(*device, longer) : longer;
}

absl::Status OfHead(std::string_view name, const absl::Status& status) {
  return status.ok() ? status : Prefixed(absl::StrCat("head ", std::string(name)), status);
}

// The error as its caller gets it, in the log too.
absl::Status Failed(std::string_view name, const absl::Status& status) {
  const absl::Status failed = OfHead(name, status);
  log::Limited(log::Source::kHeads, spdlog::level::warn, "{}",
               failed.ToString(absl::StatusToStringMode::kWithNoExtraData));
  return failed;
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

// OK: a file's head may take the place of another one.
absl::Status CheckSame(const HeadSource& source, const Head& old) {
  const HeadView& head = old.view();
  const auto shown = [](bool bias, DType dtype, int64_t vocab, int64_t hidden) {
    return absl::StrFormat("%s [%d,%d] %s bias", Name(dtype), vocab, hidden,
                           bias ? "with a" : "without a");
  };
  const std::string got =
      shown(source.bias.has_value(), source.weight.dtype, source.vocab, source.weight.shape[1]);
  const std::string allowed =
      shown(head.bias != nullptr, head.weight.dtype, head.vocab(), head.hidden());
  if (got == allowed) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("weight: got %s, allowed %s, as the head has; another shape needs another "
                      "name",
                      got, allowed));
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

Heads::Heads(std::shared_ptr<const Devices> devices, Metrics* metrics, int64_t max_bytes,
             int64_t first_update)
    : devices_(std::move(devices)),
      metrics_(metrics),
      max_bytes_(max_bytes),
      first_update_(first_update),
      bytes_(std::make_shared<std::vector<std::atomic<int64_t>>>(
          static_cast<size_t>(devices_->count()))) {}

Heads::Heads(Backend* backend, Metrics* metrics, int64_t max_bytes)
    : Heads(std::make_shared<const Devices>(std::vector<Backend*>{backend}), metrics, max_bytes) {}

absl::Status Heads::Check(const HeadRequest& request) const {
  LOGITD_RETURN_IF_ERROR(CheckRequest(request));
  LOGITD_RETURN_IF_ERROR(OfHead(request.name, CheckParts(request.shard)));
  MutexLock lock(mutex_);
  return CheckNew(request.name);
}

absl::Status Heads::CheckUpdate(const HeadRequest& request) const {
  LOGITD_RETURN_IF_ERROR(CheckRequest(request));
  MutexLock lock(mutex_);
  const auto it = heads_.find(request.name);
  return it == heads_.end() ? NoSuchHead(request.name) : CheckUnused(request.name);
}

// OK: a head may be sharded, if it is to be.
absl::Status Heads::CheckParts(bool sharded) const {
  if (!sharded) return absl::OkStatus();
  LOGITD_RETURN_IF_ERROR(devices_->CheckCanShard().status());
  if (devices_->left() < devices_->count()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "shard: got %d of %d devices that serve, allowed all; a lost device comes back with a "
        "restart",
        devices_->left(), devices_->count()));
  }
  return absl::OkStatus();
}

absl::Status Heads::CheckNew(const std::string& name) const {
  if (!heads_.contains(name)) return absl::OkStatus();
  return absl::AlreadyExistsError(
      absl::StrFormat("head %s is loaded, allowed another name, or unload it first", name));
}

absl::Status Heads::CheckUnused(const std::string& name) const {
  if (!loading_.contains(name)) return absl::OkStatus();
  if (!heads_.contains(name)) {
    return absl::AlreadyExistsError(
        absl::StrFormat("head %s is being loaded or updated, allowed another name", name));
  }
  return absl::AlreadyExistsError(
      absl::StrFormat("head %s is being updated, allowed one update at a time", name));
}

// The version of the next head of this name.
int64_t Heads::NextVersion(const std::string& name) const {
  const auto last = unloaded_.find(name);
  return (last == unloaded_.end() ? forgotten_ : last->second) + 1;
}

// Waits until no other load reads files. False: `progress` ended the wait.
bool Heads::TakeTurn(absl::FunctionRef<bool(const HeadProgress&)> progress) {
  do {
    MutexLock lock(mutex_);
    if (reading_) read_ended_.WaitFor(mutex_, kTurnPoll);
    if (!std::exchange(reading_, true)) return true;
  } while (progress({}));
  return false;
}

absl::StatusOr<std::shared_ptr<const Head>> Heads::Load(
    const HeadRequest& request, absl::FunctionRef<bool(const HeadProgress&)> progress) {
  LOGITD_RETURN_IF_ERROR(CheckRequest(request));
  LOGITD_RETURN_IF_ERROR(OfHead(request.name, CheckParts(request.shard)));
  const std::string& name = request.name;
  int64_t version;
  {
    MutexLock lock(mutex_);
    LOGITD_RETURN_IF_ERROR(CheckNew(name));
    LOGITD_RETURN_IF_ERROR(CheckUnused(name));
    loading_.insert(name);
    version = NextVersion(name);
  }
  const bool in_turn = TakeTurn(progress);
  absl::StatusOr<std::shared_ptr<const Head>> head =
      absl::CancelledError("the load was cancelled before its turn");
  if (in_turn) head = Read(request, version, /*old=*/nullptr, progress);
  if (in_turn) EndTurn();
  {
    MutexLock lock(mutex_);
    loading_.erase(name);
    if (head.ok()) {
      heads_[name] = *head;
      if (metrics_ != nullptr) metrics_->SetHeadVersion(name, version);
      unloaded_.erase(name);
      CountHeads();
    }
  }
  return head.ok() ? head : Failed(name, head.status());
}

void Heads::EndTurn() {
  MutexLock lock(mutex_);
  reading_ = false;
  read_ended_.SignalAll();
}

absl::StatusOr<std::shared_ptr<const Head>> Heads::ClaimUpdate(const std::string& name) {
  MutexLock lock(mutex_);
  const auto it = heads_.find(name);
  if (it == heads_.end()) return NoSuchHead(name);
  LOGITD_RETURN_IF_ERROR(CheckUnused(name));
  loading_.insert(name);
  return it->second;
}

absl::Status Heads::CountRefused(absl::Status why, int64_t start_ns) const {
  const double seconds = static_cast<double>(MonotonicNanos() - start_ns) * 1e-9;
  if (metrics_ != nullptr) metrics_->CountHeadUpdate(why.code(), seconds);
  return why;
}

absl::StatusOr<std::shared_ptr<const Head>> Heads::EndUpdate(
    const std::shared_ptr<const Head>& old, absl::StatusOr<std::shared_ptr<const Head>> head,
    int64_t start_ns) {
  const std::string& name = old->info().name;
  std::shared_ptr<const Head> dropped;  // freed without the lock
  {
    MutexLock lock(mutex_);
    loading_.erase(name);
    const auto it = heads_.find(name);
    const bool there = it != heads_.end() && it->second == old;
    if (head.ok() && there) {
      if (metrics_ != nullptr) metrics_->SetHeadVersion(name, (*head)->info().version);
      it->second = *head;  // the caller keeps the old one, so it is not freed under the lock
    } else if (head.ok()) {
      dropped = *std::move(head);
      head = absl::AbortedError("it was unloaded while it was updated");
    }
  }
  const double seconds = static_cast<double>(MonotonicNanos() - start_ns) * 1e-9;
  if (metrics_ != nullptr) metrics_->CountHeadUpdate(head.status().code(), seconds);
  if (!head.ok()) return Failed(name, head.status());
  log::Limited(log::Source::kHeads, spdlog::level::info, "head {}: version {} in {:.3f} s", name,
               (*head)->info().version, seconds);
  return head;
}

absl::StatusOr<std::shared_ptr<const Head>> Heads::Update(
    const HeadRequest& request, absl::FunctionRef<bool(const HeadProgress&)> progress) {
  const int64_t start_ns = MonotonicNanos();
  LOGITD_RETURN_IF_ERROR(CheckRequest(request));
  const absl::StatusOr<std::shared_ptr<const Head>> claimed = ClaimUpdate(request.name);
  if (!claimed.ok()) return CountRefused(claimed.status(), start_ns);
  const Head& old = **claimed;
  HeadRequest same = request;
  same.final_norm = old.view().norm != nullptr;
  same.vocab = old.info().asked_vocab;
  same.shard = old.sharded();
  const bool in_turn = TakeTurn(progress);
  absl::StatusOr<std::shared_ptr<const Head>> head =
      absl::CancelledError("the update was cancelled before its turn");
  if (in_turn) {
    const absl::Status parts = CheckParts(same.shard);
    head = parts.ok() ? Read(same, NextVersion(old), &old, progress) : parts;
    EndTurn();
  }
  return EndUpdate(*claimed, std::move(head), start_ns);
}

absl::StatusOr<std::unique_ptr<HeadUpdate>> Heads::BeginUpdate(const std::string& name) {
  const int64_t start_ns = MonotonicNanos();
  absl::StatusOr<std::shared_ptr<const Head>> old = ClaimUpdate(name);
  if (!old.ok()) return CountRefused(old.status(), start_ns);
  std::unique_ptr<HeadUpdate> update(new HeadUpdate(this, *std::move(old), start_ns));
  const absl::Status begun = update->Begin();
  if (!begun.ok()) return OfHead(name, begun);
  return update;
}

absl::StatusOr<std::shared_ptr<const Head>> Heads::Read(
    const HeadRequest& request, int64_t version, const Head* old,
    absl::FunctionRef<bool(const HeadProgress&)> progress) const {
  const int64_t start_ns = MonotonicNanos();
  const absl::StatusOr<HeadSource> source = OpenHeadSource(request);
  if (!source.ok()) return source.status();
  const HeadView shape = source->Shape();
  if (absl::Status status = CheckHead(shape); !status.ok()) return Prefixed(request.path, status);
  if (old != nullptr) {
    if (absl::Status status = CheckSame(*source, *old); !status.ok()) {
      return Prefixed(request.path, status);
    }
  }
  const VocabShards cut = {.vocab = source->vocab, .count = devices_->count()};
  std::vector<HeadLayout> layouts;  // by device
  for (int device = 0; device < devices_->count(); ++device) {
    layouts.emplace_back(*source, request.shard ? cut.at(device) : VocabShard{0, source->vocab});
  }
  const HeadLayout& largest = layouts.front();  // or as large as others
  log::Limited(log::Source::kHeads, spdlog::level::info, "head {}: {} [{},{}] {} of {}, {} MiB{}",
               request.name, source->weight.name, source->vocab, largest.hidden,
               Name(source->weight.dtype), request.path, largest.bytes >> 20,
               request.shard ? absl::StrFormat(" on each of %d devices", devices_->count()) : "");
  for (const std::string& warning : source->warnings) {
    log::Limited(log::Source::kHeads, spdlog::level::warn, "head {}: {}", request.name, warning);
  }

  std::vector<size_t> bytes;
  for (const HeadLayout& layout : layouts) bytes.push_back(layout.bytes);
  absl::StatusOr<std::vector<Head::Copy>> copies = Allocate(bytes);
  if (!copies.ok()) return copies.status();
  const absl::Status copied =
      CopyHead(*source, layouts, *copies, request.shard, request.name, progress);
  if (absl::IsResourceExhausted(copied)) return NoMemory(largest.bytes, copied);
  if (!copied.ok()) return copied;
  const absl::Duration took = absl::Nanoseconds(MonotonicNanos() - start_ns);
  log::Limited(log::Source::kHeads, spdlog::level::info, "head {}: loaded in {:.2f} s",
               request.name, absl::ToDoubleSeconds(took));
  for (size_t i = 0; i < layouts.size(); ++i) {
    Head::Copy& copy = (*copies)[i];
    if (copy.backend != nullptr) copy.view = layouts[i].View(*source, copy.memory.data);
  }
  std::optional<HeadView> whole;
  if (request.shard) {
    whole = shape;
    // The first device always has tokens. Of these pointers only matters which are null.
    whole->bias = copies->front().view.bias;
    whole->norm = copies->front().view.norm;
  }
  return std::make_shared<const Head>(*std::move(copies),
                                      HeadInfo{.name = request.name,
                                               .version = version,
                                               .path = request.path,
                                               .tensor = source->weight.name,
                                               .asked_vocab = request.vocab,
                                               .stored_vocab = source->weight.shape[0],
                                               .device_bytes = static_cast<int64_t>(largest.bytes),
                                               .loaded = absl::Now(),
                                               .load_time = took,
                                               .warnings = source->warnings},
                                      whole);
}

absl::StatusOr<std::vector<Head::Copy>> Heads::Allocate(const std::vector<size_t>& bytes) const {
  const size_t largest = *std::max_element(bytes.begin(), bytes.end());
  std::vector<Head::Copy> copies;
  bool any = false;
  for (int device = 0; device < devices_->count(); ++device) {
    Head::Copy& copy = copies.emplace_back();
    if (devices_->lost(device)) continue;
    any = true;
    const size_t needed = bytes[static_cast<size_t>(device)];
    const auto count = [device, total = bytes_, metrics = metrics_](int64_t change) {
      (*total)[static_cast<size_t>(device)] += change;
      if (metrics != nullptr) metrics->AddHeadBytes(device, change);
    };
    // Taken before it is allocated: another head may be in the making.
    count(static_cast<int64_t>(needed));
    const int64_t held = (*bytes_)[static_cast<size_t>(device)] - static_cast<int64_t>(needed);
    if (static_cast<int64_t>(needed) > max_bytes_ - held) {
      count(-static_cast<int64_t>(needed));
      return absl::ResourceExhaustedError(
          absl::StrFormat("needs %d bytes of device memory, heads hold %d of %d (--max-head-bytes)",
                          needed, held, max_bytes_));
    }
    Backend* const backend = devices_->backend(device);
    const absl::StatusOr<DeviceMemory> memory = backend->AllocateDevice(needed);
    if (!memory.ok()) {
      count(-static_cast<int64_t>(needed));
      return NoMemory(largest, OfDevice(device, memory.status()));
    }
    copy = {.backend = backend, .memory = *memory};
    copy.owned = {memory->data, [backend, memory = *memory, count](std::byte*) {
                    backend->FreeDevice(memory);
                    count(-static_cast<int64_t>(memory.bytes));
                  }};
  }
  if (any) return copies;
  return NoMemory(largest, OfDevice(0, absl::InternalError("no device is left")));
}

absl::Status Heads::NoMemory(size_t needed, const absl::Status& why) const {
  const std::optional<int> device = DeviceOf(why);
  const bool says_where = device.has_value() && devices_->count() > 1;
  return Prefixed(absl::StrFormat("needs %d bytes of device memory", needed),
                  says_where ? Prefixed(devices_->NameOf(*device), why) : why);
}

void Heads::CountHeads() const {
  if (metrics_ != nullptr) metrics_->Set(Gauge::kHeads, static_cast<double>(heads_.size()));
}

absl::Status Heads::Unload(std::string_view name) {
  std::shared_ptr<const Head> last;  // freed without the lock
  MutexLock lock(mutex_);
  const auto it = heads_.find(name);
  if (it == heads_.end()) return NoSuchHead(name);
  last = std::move(it->second);
  heads_.erase(it);
  if (unloaded_.size() == kMaxUnloaded) {
    for (const auto& [other, version] : unloaded_) forgotten_ = std::max(forgotten_, version);
    unloaded_.clear();
  }
  unloaded_[std::string(name)] = last->info().version;
  CountHeads();
  if (metrics_ != nullptr) metrics_->SetHeadVersion(std::string(name), 0);
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

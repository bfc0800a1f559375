#include "server/engine/head_update.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "kernels/checks.h"
#include "kernels/status_macros.h"
#include "server/base/clock.h"
#include "server/engine/devices.h"

namespace logitd::engine {
namespace {

constexpr size_t kStagedBytes = size_t{8} << 20;

std::string_view Name(HeadPart part) {
  return part == HeadPart::kWeight ? "weight" : part == HeadPart::kBias ? "bias" : "norm";
}

// A slab while its scope lasts.
class StagingSlab {
 public:
  explicit StagingSlab(Backend* backend) : backend_(backend) {}
  ~StagingSlab() {
    if (slab_.bytes > 0) backend_->FreeSlab(slab_);
  }
  absl::Status Allocate(size_t bytes) {
    absl::StatusOr<Slab> slab = backend_->AllocateSlab(bytes);
    if (slab.ok()) slab_ = *slab;
    return slab.status();
  }
  const Slab& operator*() const { return slab_; }

 private:
  Backend* const backend_;
  Slab slab_;
};

// The view of a head's memory, moved to a copy of that memory.
HeadView Moved(const Head::Copy& from, const std::byte* to) {
  HeadView view = from.view;
  const auto moved = [&](const auto* at) {
    return at == nullptr ? nullptr
                         : reinterpret_cast<decltype(at)>(
                               to + (reinterpret_cast<const std::byte*>(at) - from.memory.data));
  };
  view.weight.data = to;
  view.bias = moved(view.bias);
  view.norm = moved(view.norm);
  return view;
}

}  // namespace

HeadUpdate::~HeadUpdate() {
  if (ended_) return;
  streams_.clear();  // with the copies' memory gone first, the next update finds room
  copies_.clear();
  heads_
      .EndUpdate(old_, failed_.ok() ? absl::CancelledError("the update was cancelled") : failed_,
                 start_ns_)
      .IgnoreError();
}

absl::Status HeadUpdate::Remember(absl::Status status) {
  if (status.ok()) return status;
  Wait().IgnoreError();  // copies that were begun read and write memory that goes
  failed_.Update(status);
  return status;
}

absl::Status HeadUpdate::Begin() {
  LOGITD_RETURN_IF_ERROR(Remember(heads_.CheckParts(old_->sharded())));
  std::vector<size_t> bytes;
  for (const Head::Copy& copy : old_->copies()) bytes.push_back(copy.memory.bytes);
  absl::StatusOr<std::vector<Head::Copy>> copies = heads_.Allocate(bytes);
  if (!copies.ok()) return Remember(copies.status());
  copies_ = *std::move(copies);
  streams_.resize(copies_.size());
  for (size_t i = 0; i < copies_.size(); ++i) {
    if (copies_[i].backend == nullptr) continue;
    auto stream = copies_[i].backend->CreateStream(StreamUse::kCopies);
    if (!stream.ok()) return Remember(OfDevice(static_cast<int>(i), stream.status()));
    streams_[i] = *std::move(stream);
    const Head::Copy& from = old_->copies()[i];
    copies_[i].view = Moved(from, copies_[i].memory.data);
    if (from.memory.bytes == 0) continue;
    const RowsCopy all = {.from = from.memory.data,
                          .from_stride = from.memory.bytes,
                          .to = copies_[i].memory.data,
                          .to_stride = from.memory.bytes,
                          .row_bytes = from.memory.bytes,
                          .rows = 1,
                          .from_device = true};
    const absl::Status copied = streams_[i]->Gather({&all, 1});
    if (!copied.ok()) return Remember(OfDevice(static_cast<int>(i), copied));
  }
  return Remember(Wait());
}

absl::Status HeadUpdate::Wait() {
  absl::Status first;
  for (size_t i = 0; i < streams_.size(); ++i) {
    if (streams_[i] == nullptr) continue;
    first.Update(OfDevice(static_cast<int>(i), streams_[i]->Wait().status()));
  }
  return first;
}

absl::Status HeadUpdate::CheckRows(const HeadRows& rows) const {
  const HeadView& head = old_->view();
  const std::string_view part = Name(rows.part);
  if ((rows.part == HeadPart::kBias && head.bias == nullptr) ||
      (rows.part == HeadPart::kNorm && head.norm == nullptr)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "rows.part: got %s, allowed parts of head %s, which has none", part, old_->info().name));
  }
  const bool is_weight = rows.part == HeadPart::kWeight;
  const DType dtype = is_weight ? head.weight.dtype : DType::kF32;
  if (rows.dtype != dtype) {
    return absl::InvalidArgumentError(absl::StrFormat("rows.dtype: got %s, allowed %s, of the %s",
                                                      logitd::Name(rows.dtype), logitd::Name(dtype),
                                                      part));
  }
  const int64_t width = rows.part == HeadPart::kBias ? 1 : head.hidden();
  if (rows.width != width) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rows.width: got %d, allowed %d, of the %s", rows.width, width, part));
  }
  const int64_t all = rows.part == HeadPart::kNorm ? 1 : head.vocab();
  LOGITD_RETURN_IF_ERROR(CheckRange("rows.first_row", rows.first, 0, all - 1));
  return CheckRange("rows.rows", rows.count, 1, all - rows.first);
}

absl::Status HeadUpdate::Write(const HeadRows& rows) { return Remember(CopyRows(rows)); }

absl::Status HeadUpdate::CopyRows(const HeadRows& rows) {
  const bool is_norm = rows.part == HeadPart::kNorm;
  const size_t row_bytes = static_cast<size_t>(rows.width) * SizeOf(rows.dtype);
  int64_t device_first = 0;  // the part's first row on the device
  for (size_t i = 0; i < copies_.size(); ++i) {
    const HeadView& view = copies_[i].view;
    if (copies_[i].backend == nullptr || view.vocab() == 0) continue;
    const int64_t device_end = device_first + (is_norm ? 1 : view.vocab());
    const int64_t first = std::max(rows.first, device_first);
    const int64_t count = std::min(rows.first + rows.count, device_end) - first;
    if (count > 0) {
      const void* part = rows.part == HeadPart::kWeight ? view.weight.data
                         : rows.part == HeadPart::kBias ? view.bias
                                                        : view.norm;
      Place to = {.row_bytes = row_bytes, .row_stride = row_bytes};
      if (rows.part == HeadPart::kWeight) {
        to.row_stride = static_cast<size_t>(view.weight.row_stride) * SizeOf(rows.dtype);
      }
      // The memory is this object's own.
      to.data = const_cast<std::byte*>(static_cast<const std::byte*>(part)) +
                static_cast<size_t>(first - device_first) * to.row_stride;
      LOGITD_RETURN_IF_ERROR(CopyTo(i, rows, first - rows.first, count, to));
    }
    if (old_->sharded() && !is_norm) device_first = device_end;
  }
  LOGITD_RETURN_IF_ERROR(Wait());
  done_bytes_ += rows.count * static_cast<int64_t>(row_bytes);
  return absl::OkStatus();
}

absl::Status HeadUpdate::CopyTo(size_t device, const HeadRows& rows, int64_t from, int64_t count,
                                const Place& to) {
  const bool is_here = rows.device == static_cast<int>(device);
  if (rows.data == nullptr && copies_[device].backend->device().is_host) {
    rows.read(from, count, to.data, to.row_stride);
    return absl::OkStatus();
  }
  if (rows.data == nullptr || (rows.device != kAnyDevice && !is_here)) {
    return CopyThroughHost(device, rows, from, count, to);
  }
  RowsCopy copy = {.from = rows.data + static_cast<size_t>(from) * rows.row_stride,
                   .from_stride = rows.row_stride,
                   .to = to.data,
                   .to_stride = to.row_stride,
                   .row_bytes = to.row_bytes,
                   .rows = count,
                   .from_device = is_here};
  if (copy.from_stride == copy.row_bytes && copy.to_stride == copy.row_bytes) {  // one long row
    copy.row_bytes *= static_cast<size_t>(count);
    copy.from_stride = copy.to_stride = copy.row_bytes;
    copy.rows = 1;
  }
  return OfDevice(static_cast<int>(device), streams_[device]->Gather({&copy, 1}));
}

// Rows that the device cannot reach: those of another device, and of host memory that no device
// copies from.
absl::Status HeadUpdate::CopyThroughHost(size_t device, const HeadRows& rows, int64_t from,
                                         int64_t count, const Place& to) {
  const size_t lender = rows.data == nullptr ? device : static_cast<size_t>(rows.device);
  if (streams_[lender] == nullptr) {
    return absl::UnavailableError(absl::StrFormat("rows: got some on %s, which is lost",
                                                  heads_.devices_->NameOf(rows.device)));
  }
  const auto at_lender = [&](const absl::Status& status) {
    return OfDevice(static_cast<int>(lender), status);
  };
  StagingSlab slab(copies_[lender].backend);
  const size_t all_bytes = static_cast<size_t>(count) * to.row_stride;
  LOGITD_RETURN_IF_ERROR(at_lender(slab.Allocate(std::min(kStagedBytes, all_bytes))));
  // What is between rows stays zero.
  std::memset((*slab).host, 0, (*slab).bytes);
  if (rows.data != nullptr) {
    LOGITD_RETURN_IF_ERROR(at_lender(streams_[lender]->Upload(*slab, 0, (*slab).bytes)));
  }
  const auto most = static_cast<int64_t>((*slab).bytes / to.row_stride);
  for (int64_t done = 0; done < count; done += most) {
    const int64_t now = std::min(most, count - done);
    const size_t bytes = static_cast<size_t>(now) * to.row_stride;
    if (rows.data == nullptr) {
      rows.read(from + done, now, (*slab).host, to.row_stride);
    } else {
      const RowsCopy copy = {.from = rows.data + static_cast<size_t>(from + done) * rows.row_stride,
                             .from_stride = rows.row_stride,
                             .to = (*slab).device,
                             .to_stride = to.row_stride,
                             .row_bytes = to.row_bytes,
                             .rows = now,
                             .from_device = true};
      LOGITD_RETURN_IF_ERROR(at_lender(streams_[lender]->Gather({&copy, 1})));
      LOGITD_RETURN_IF_ERROR(at_lender(streams_[lender]->Download(*slab, 0, bytes)));
      LOGITD_RETURN_IF_ERROR(at_lender(streams_[lender]->Wait().status()));
    }
    const auto of_device = [&](const absl::Status& status) {
      return OfDevice(static_cast<int>(device), status);
    };
    LOGITD_RETURN_IF_ERROR(of_device(streams_[device]->Fill(
        *slab, 0, bytes, to.data + static_cast<size_t>(done) * to.row_stride)));
    LOGITD_RETURN_IF_ERROR(of_device(streams_[device]->Wait().status()));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const Head>> HeadUpdate::Commit() {
  HeadInfo info = old_->info();
  info.version = heads_.NextVersion(*old_);
  info.loaded = absl::Now();
  info.load_time = absl::Nanoseconds(MonotonicNanos() - start_ns_);
  std::optional<HeadView> whole;
  if (old_->sharded()) {
    whole = old_->view();
    // Of these pointers only matters which are null.
    whole->bias = copies_.front().view.bias;
    whole->norm = copies_.front().view.norm;
  }
  ended_ = true;
  return heads_.EndUpdate(
      old_, std::make_shared<const Head>(std::move(copies_), std::move(info), whole), start_ns_);
}

}  // namespace logitd::engine

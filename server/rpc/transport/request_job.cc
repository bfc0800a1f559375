#include "server/rpc/transport/request_job.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_format.h"
#include "kernels/status_macros.h"
#include "server/engine/batch.h"
#include "server/engine/devices.h"
#include "server/engine/places.h"
#include "server/engine/sync.h"

namespace logitd::rpc {
namespace {

// Beside the bytes of a message: its lists, a small answer.
constexpr int64_t kMessageOverhead = 8192;

// Payloads start at a multiple of this in memory, so that vectors read them.
constexpr size_t kPayloadAlignment = 64;

// Smaller answers are copied out of their slab: the copy is faster than a peer takes the answer.
constexpr int64_t kMinKeptBytes = int64_t{256} << 10;

// A stream copies rows of host memory from where they lie if each run of them is at least this
// long. Less is copied to the slab by the stream's thread. 64 rings of hidden states of 8 KiB make
// 1.08 times as many calls as with a border of 64 KiB (bench/results/h200/scheduler.json).
constexpr size_t kMinPlacedRun = size_t{4} << 10;
// Messages and answers of at least this much get a place; smaller ones are copied.
constexpr size_t kMinPlacedBytes = size_t{64} << 10;

// Bytes between the rows of an input in the slab.
size_t SlabStride(const Payload& input) {
  return input.padded ? engine::AlignUp(input.row_bytes) : input.row_bytes;
}

// The slab and the ticket of an answer that is sent from its slab, until it is sent.
struct KeptAnswer {
  std::shared_ptr<const void> slab;
  engine::Admission::Ticket ticket;
};

// The offset of the payload in a message that begins with `seen`: the first field that is not whole
// there. 0: not known.
size_t PayloadOffset(absl::Span<const std::byte> seen) {
  const Piece piece = seen;
  WireReader reader({&piece, 1});
  while (reader.remaining() > 0) {
    uint32_t tag = 0;
    uint64_t bytes = 0;
    if (!reader.ReadTag(&tag)) return 0;
    if (internal::TypeOf(tag) != internal::WireType::kLength) {
      if (!reader.SkipValue(tag, internal::kMaxGroupDepth)) return 0;
      continue;
    }
    if (!reader.ReadVarint(&bytes)) return 0;
    if (bytes > reader.remaining()) return reader.position();
    reader.Skip(bytes);
  }
  return 0;
}

}  // namespace

MessageMemory RequestJob::TakeMemory(size_t bytes, absl::Span<const std::byte> seen,
                                     engine::Places* places) {
  const size_t lead = bytes > seen.size() ? PayloadOffset(seen) % kPayloadAlignment : 0;
  std::shared_ptr<std::byte> memory;
  if (places != nullptr && bytes >= kMinPlacedBytes)
    memory = places->Take(bytes + kPayloadAlignment);
  const bool is_place = memory != nullptr;
  if (!is_place) {
    // Not aligned_alloc: glibc before 2.38 often finds no place in the memory of a freed message
    // for another one of its size, and the process grows by each message.
    memory.reset(static_cast<std::byte*>(std::malloc(bytes + kPayloadAlignment)), &std::free);
  }
  const size_t shift = (2 * kPayloadAlignment - lead -
                        reinterpret_cast<uintptr_t>(memory.get()) % kPayloadAlignment) %
                       kPayloadAlignment;
  std::byte* const at = memory.get() + shift;
  return {.bytes = {at, bytes}, .keep = std::move(memory), .is_place = is_place};
}

absl::Status RequestJob::CheckMessageSize(int64_t bytes, const CallHeaders& headers) const {
  if (bytes > max_message_bytes()) {
    environment_.metrics->CountRefused(engine::Refusal::kTooLarge, headers.caller.proof);
    if (environment_.door_metrics != nullptr) environment_.door_metrics->OnTooLarge();
    return absl::InvalidArgumentError(
        absl::StrFormat("request: got %d bytes, allowed 0..%d", bytes, max_message_bytes()));
  }
  absl::Status status = headers.CheckMessage(bytes);
  if (!status.ok())
    environment_.metrics->CountRefused(engine::Refusal::kInvalid, headers.caller.proof);
  return status;
}

RequestJob::RequestJob(const CallEnvironment& environment, std::unique_ptr<OpCodec> codec)
    : environment_(environment), codec_(std::move(codec)), started_ns_(engine::MonotonicNanos()) {}

int64_t RequestJob::age_ns() const { return engine::MonotonicNanos() - started_ns_; }

void RequestJob::Count(absl::StatusCode code) const {
  environment_.metrics->CountRequest(codec_->op().name, code, static_cast<double>(age_ns()) * 1e-9);
}

absl::Status RequestJob::Take(MessageMemory message, const CallHeaders& headers) {
  spec_.deadline = headers.deadline;
  spec_.caller = headers.caller;
  message_ = std::move(message);
  piece_ = message_.bytes;
  const auto refused_if = [&](absl::Status status, engine::Refusal reason) {
    if (!status.ok()) environment_.metrics->CountRefused(reason, headers.caller.proof);
    return status;
  };
  LOGITD_RETURN_IF_ERROR(
      refused_if(codec_->Parse(pieces(), environment_.engine->options().max_batch_rows, &spec_),
                 engine::Refusal::kInvalid));
  LOGITD_RETURN_IF_ERROR(refused_if(CheckFits(), engine::Refusal::kTooLarge));
  LOGITD_RETURN_IF_ERROR(TakeRows(headers.authorization, spec_.rows(), environment_.metrics));
  return refused_if(FindPlaces(), engine::Refusal::kInvalid);
}

// True if streams copy the payload from where it lies. Rows in device memory are always copied so.
// `row_stride`: between rows in the slab.
bool RequestJob::IsPlaced(const Payload& payload, size_t row_stride) const {
  if (payload.arena != nullptr && payload.arena->on_device()) return true;
  const bool in_message = payload.arena == nullptr;
  if (in_message ? !message_.is_place : payload.arena->address() == nullptr) return false;
  const auto stride = in_message ? payload.row_bytes : static_cast<size_t>(payload.arena_stride);
  const bool together = stride == payload.row_bytes && row_stride == payload.row_bytes;
  return (together ? payload.range.bytes : payload.row_bytes) >= kMinPlacedRun &&
         (!in_message ||
          payload.range.offset % 2 == reinterpret_cast<uintptr_t>(message_.bytes.data()) % 2);
}

engine::RowsPlace RequestJob::PlaceOf(const Payload& payload) const {
  engine::RowsPlace place = {
      .row_bytes = payload.row_bytes, .slab_stride = SlabStride(payload), .rows = payload.rows};
  if (payload.arena == nullptr) {
    place.data = message_.bytes.data() + payload.range.offset;
    place.row_stride = payload.row_bytes;
    place.steady = true;
  } else {
    place.data = payload.arena->address() + payload.arena_offset;
    place.row_stride = static_cast<size_t>(payload.arena_stride);
    place.on_device = payload.arena->on_device();
  }
  return place;
}

// Finds what streams copy from where it lies, and on which device they must do so.
absl::Status RequestJob::FindPlaces() {
  std::string_view on_device = "shared";  // the field of the rows that are on a device
  const auto find = [&](const Payload& payload, size_t row_stride) -> absl::Status {
    places_.emplace_back();
    if (!IsPlaced(payload, row_stride)) return absl::OkStatus();
    places_.back() = PlaceOf(payload);
    if (payload.arena == nullptr) {
      placed_in_message_ = true;
      return absl::OkStatus();
    }
    placed_in_.push_back(payload.arena);
    if (!payload.arena->on_device()) return absl::OkStatus();
    int& device = spec_.key.device;
    if (device != engine::kAnyDevice && device != payload.arena->device()) {
      const engine::Devices& devices = environment_.engine->devices();
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: got rows on %s, allowed on %s, where the rows of shared lie", payload.field,
          devices.NameOf(payload.arena->device()), devices.NameOf(device)));
    }
    device = payload.arena->device();
    if (!payload.field.empty()) on_device = payload.field;
    return absl::OkStatus();
  };
  LOGITD_RETURN_IF_ERROR(find(codec_->payload(), engine::RowStride(spec_.key)));
  for (const Payload& input : codec_->copied_inputs()) {
    LOGITD_RETURN_IF_ERROR(find(input, SlabStride(input)));
  }
  FindAnswerPlace();
  if (engine::IsSharded(spec_.key) && spec_.key.device > 0) {
    const engine::Devices& devices = environment_.engine->devices();
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: got memory of %s, allowed that of %s or of the host for a head "
                        "that is cut over the devices",
                        on_device, devices.NameOf(spec_.key.device), devices.NameOf(0)));
  }
  // With one device, rows of every origin share batches.
  if (environment_.engine->devices().count() == 1) spec_.key.device = engine::kAnyDevice;
  return absl::OkStatus();
}

// The stream writes a large answer to its lease where the device that runs the batch can. Otherwise
// WriteShared does.
void RequestJob::FindAnswerPlace() {
  SharedPlace place = codec_->shared_place();
  if (place.arena == nullptr || place.arena->address() == nullptr) return;
  if (place.arena->on_device()) {
    int& device = spec_.key.device;
    if (device == engine::kAnyDevice) device = place.arena->device();
    if (device != place.arena->device()) return;
  } else if (static_cast<size_t>(place.bytes) < kMinPlacedBytes) {
    return;
  }
  answer_place_ = const_cast<std::byte*>(place.arena->address()) + place.offset;
  placed_in_.push_back(std::move(place.arena));
}

// Makes --max-request-bytes exact: a batch may hold more than one request, and the limit on a whole
// message includes its small fields.
absl::Status RequestJob::CheckFits() const {
  const int64_t payload_bytes = spec_.size.payload_bytes;
  if (payload_bytes > environment_.max_payload_bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("payload and lists: got %d bytes, allowed 1..%d", payload_bytes,
                        environment_.max_payload_bytes));
  }
  return environment_.engine->CheckFits(spec_);
}

// An answer can be larger than its request, and a slow peer holds it for long.
int64_t RequestJob::needed_bytes() const {
  const int64_t bytes =
      static_cast<int64_t>(message_.bytes.size()) + kMessageOverhead + codec_->list_bytes();
  return std::min(std::max(bytes, codec_->answer_bytes()), max_message_bytes());
}

// `submitted_` and `dropped_` are sequentially consistent: if Drop does not see the job as
// submitted, Submit sees it as dropped. The engine ignores a Cancel of a job that it does not know
// yet.
bool RequestJob::BeginSubmit() {
  if (dropped_) return false;
  submitted_ = true;
  return true;
}

void RequestJob::Submit(std::shared_ptr<RequestJob> self, bool alone) {
  if (!BeginSubmit()) return;
  // `self` keeps this alive to the end.
  if (alone) {
    environment_.engine->SubmitAlone(self, [this] { EndedAlone(); });
  } else {
    environment_.engine->Submit(self);
  }
  if (dropped_) environment_.engine->Cancel(*this);
}

void RequestJob::Drop() {
  dropped_ = true;
  if (submitted_) environment_.engine->Cancel(*this);
}

void RequestJob::CopyRowsTo(std::byte* dst, size_t row_stride) {
  const auto in_slab = [this](size_t place) { return places_[place].data == nullptr; };
  if (in_slab(0)) {
    CopyRows(pieces(), codec_->payload(), dst, row_stride);
  }
  const absl::Span<const Payload> copied = codec_->copied_inputs();
  if (!copied.empty()) {
    std::array<size_t, engine::kMaxArrays> offsets;
    engine::LayOut(spec_.key.op->inputs, spec_.counts,
                   static_cast<size_t>(spec_.rows()) * row_stride, offsets.data());
    for (size_t i = 0; i < copied.size(); ++i) {
      if (!in_slab(i + 1)) continue;
      CopyRows(pieces(), copied[i], dst + offsets[i], SlabStride(copied[i]));
    }
  }
  codec_->PayloadCopied();
  if (placed_in_message_) return;
  FreeMessage();
  HoldAtMost(std::max(codec_->list_bytes(), codec_->answer_bytes()));
}

void RequestJob::Fail() {
  FreeMessage();
  HoldAtMost(0);
}

void RequestJob::FreeMessage() {
  message_ = {};
  piece_ = {};
}

void RequestJob::WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) {
  codec_->WriteInputs(inputs, first);
  if (!placed_in_message_) HoldAtMost(codec_->answer_bytes());
}

EncodedMessage RequestJob::Encode(const engine::JobAnswer& answer, int64_t receive_ns,
                                  const engine::JobTimes& times) {
  if (placed_in_message_) {
    FreeMessage();
    HoldAtMost(codec_->answer_bytes());
  }
  engine::JobAnswer sent{.outputs = answer.outputs};
  const bool in_message = codec_->shared_answer(answer).arena == nullptr;
  std::shared_ptr<KeptAnswer> kept;
  if (answer.keep != nullptr && in_message && codec_->answer_bytes() >= kMinKeptBytes) {
    kept = std::make_shared<KeptAnswer>(KeptAnswer{answer.keep, std::move(ticket_)});
    sent.keep = kept;
  }
  EncodedMessage message =
      codec_->Encode(sent, {.receive_ns = receive_ns, .total_ns = age_ns(), .job = times});
  sent.keep = nullptr;
  if (kept != nullptr && kept.use_count() == 1)
    ticket_ = std::move(kept->ticket);  // a copy is sent
  return message;
}

void RequestJob::WriteShared(const engine::JobAnswer& answer,
                             absl::AnyInvocable<void(const absl::Status&)> next) {
  SharedAnswer shared = codec_->shared_answer(answer);
  if (shared.arena == nullptr || answer_place_ != nullptr) return next(absl::OkStatus());
  std::shared_ptr<const void> keep = answer.keep;
  if (keep == nullptr) {  // the ticket pays for this copy
    auto copy = std::make_shared<std::string>(reinterpret_cast<const char*>(shared.bytes.data()),
                                              shared.bytes.size());
    shared.bytes = {reinterpret_cast<const std::byte*>(copy->data()), copy->size()};
    keep = std::move(copy);
  }
  environment_.writer->Write({.arena = std::move(shared.arena),
                              .offset = shared.offset,
                              .bytes = shared.bytes,
                              .keep = std::move(keep),
                              .wanted = [this] { return !dropped_; },
                              .done = std::move(next)});
}

void RequestJob::HoldAtMost(int64_t bytes) {
  if (bytes < ticket_.bytes()) ticket_.ShrinkTo(bytes);
}

}  // namespace logitd::rpc

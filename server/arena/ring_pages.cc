#include "server/arena/ring_pages.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"

namespace logitd::arena {
namespace {

// Bytes of a message that are read with its head.
constexpr size_t kShortMessage = 448;

absl::Status CheckSlot(const char* name, uint32_t bytes) {
  if (bytes >= kMinRingSlotBytes && bytes <= kMaxRingSlotBytes && bytes % kRingAlignment == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("ring.%s: got %d, allowed a multiple of %d from %d to %d", name, bytes,
                      kRingAlignment, kMinRingSlotBytes, kMaxRingSlotBytes));
}

absl::Status CheckHead(const RingEntry& head, uint32_t entry_bytes) {
  const bool known = head.method == static_cast<uint8_t>(RingMethod::kTopK) ||
                     head.method == static_cast<uint8_t>(RingMethod::kSample);
  if (!known || head.priority > 1 || head.unused != 0 || head.unused2 != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "ring: got a submission of method %d, priority %d and %d, %d in unused fields, allowed "
        "methods 1 and 2, priorities 0 and 1, and 0",
        head.method, head.priority, head.unused, head.unused2));
  }
  if (head.bytes <= entry_bytes - sizeof(RingEntry)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("ring: got a submission of %d bytes, allowed 0..%d", head.bytes,
                      entry_bytes - sizeof(RingEntry)));
}

}  // namespace

absl::Status CheckRing(const RingAsk& ask, size_t bytes, int64_t arena_bytes) {
  if (bytes != sizeof(ask) || ask.magic != kRingMagic || ask.unused != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "ring: got a request of %d bytes that begins with \"%s\" and has %d in its unused field, "
        "allowed %d, \"%s\" and 0",
        bytes, absl::CHexEscape(absl::string_view(ask.magic.data(), ask.magic.size())), ask.unused,
        sizeof(ask), absl::string_view(kRingMagic.data(), kRingMagic.size())));
  }
  if (ask.version != kRingVersion) {
    return absl::UnimplementedError(absl::StrFormat(
        "ring: got version %d of the protocol, allowed %d", ask.version, kRingVersion));
  }
  if (ask.slots < 1 || ask.slots > kMaxRingSlots) {
    return absl::InvalidArgumentError(
        absl::StrFormat("ring.slots: got %d, allowed 1..%d", ask.slots, kMaxRingSlots));
  }
  if (absl::Status status = CheckSlot("entry_bytes", ask.entry_bytes); !status.ok()) return status;
  if (absl::Status status = CheckSlot("answer_bytes", ask.answer_bytes); !status.ok()) {
    return status;
  }
  const uint64_t ring = RingBytes(ask.slots, ask.entry_bytes, ask.answer_bytes);
  const auto total = static_cast<uint64_t>(arena_bytes);
  if (ring > total || ask.offset > total - ring || ask.offset % kRingAlignment != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "ring.offset: got %d for a ring of %d bytes, allowed a multiple of %d, so that it lies in "
        "the lease of %d bytes",
        ask.offset, ring, kRingAlignment, total));
  }
  return absl::OkStatus();
}

void RingPages::Read(uint64_t offset, void* to, size_t bytes) const {
  const absl::Span<std::byte> span(static_cast<std::byte*>(to), bytes);
  arena_->Read(static_cast<int64_t>(shape_.offset + offset), {&span, 1});
}

uint8_t RingPages::ByteAt(uint64_t offset) const {
  uint8_t value = 0;
  Read(offset, &value, sizeof(value));
  return value;
}

absl::Status RingPages::Write(uint64_t offset, const void* from, size_t bytes) const {
  return arena_->Write(static_cast<int64_t>(shape_.offset + offset),
                       {static_cast<const std::byte*>(from), bytes});
}

uint64_t RingPages::SubmissionAt() const {
  return kSubmissionsAt + taken_ % shape_.slots * shape_.entry_bytes;
}

bool RingPages::Ready() const {
  return ByteAt(SubmissionAt() + offsetof(RingEntry, phase)) == RingPhase(taken_, shape_.slots);
}

absl::StatusOr<bool> RingPages::Take(RingRequest* request) {
  if (!Ready()) return false;
  RingFence();  // the phase first, then what it covers
  // The head, and with it most messages whole.
  std::array<char, sizeof(RingEntry) + kShortMessage> begin;
  const size_t read = std::min(begin.size(), size_t{shape_.entry_bytes});
  const uint64_t at = SubmissionAt();
  Read(at, begin.data(), read);
  RingEntry head;
  std::memcpy(&head, begin.data(), sizeof(head));
  if (absl::Status status = CheckHead(head, shape_.entry_bytes); !status.ok()) return status;
  *request = {.method = static_cast<RingMethod>(head.method),
              .is_batch = head.priority == 1,
              .tag = head.tag};
  constexpr uint64_t kLongest = uint64_t{365 * 24 * 3600} * 1000000;  // a year
  if (head.timeout_us != 0) {
    request->timeout =
        absl::Microseconds(static_cast<int64_t>(std::min(head.timeout_us, kLongest)));
  }
  const size_t have = std::min(size_t{head.bytes}, read - sizeof(head));
  request->message.reserve(head.bytes);
  request->message.assign(begin.data() + sizeof(head), have);
  request->message.resize(head.bytes);
  if (have < head.bytes) {
    Read(at + sizeof(head) + have, request->message.data() + have, head.bytes - have);
  }
  ++taken_;
  return true;
}

absl::Status RingPages::Post(const RingReply& reply) {
  absl::Status status = reply.status;
  if (status.ok() && reply.message.size() > max_message_bytes()) {
    status = absl::InternalError(absl::StrFormat("ring: got an answer of %d bytes, allowed %d",
                                                 reply.message.size(), max_message_bytes()));
  }
  const absl::string_view body = status.ok() ? absl::string_view(reply.message)
                                             : status.message().substr(0, max_message_bytes());
  const int64_t retry_ms = absl::ToInt64Milliseconds(reply.retry_after);
  const RingCompletion head = {
      .phase = 0,
      .code = static_cast<uint32_t>(status.code()),
      .bytes = static_cast<uint32_t>(body.size()),
      .retry_ms = static_cast<uint32_t>(std::clamp<int64_t>(retry_ms, 0, UINT32_MAX)),
      .tag = reply.tag};
  // All but the phase, and then it.
  constexpr size_t kPhase = offsetof(RingCompletion, phase) + sizeof(head.phase);
  slot_.assign(reinterpret_cast<const char*>(&head), sizeof(head));
  slot_.append(body.data(), body.size());
  const uint64_t at = kSubmissionsAt + uint64_t{shape_.slots} * shape_.entry_bytes +
                      posted_ % shape_.slots * shape_.answer_bytes;
  if (absl::Status written = Write(at + kPhase, slot_.data() + kPhase, slot_.size() - kPhase);
      !written.ok()) {
    return written;
  }
  RingFence();
  const uint8_t phase = RingPhase(posted_, shape_.slots);
  ++posted_;
  return Write(at, &phase, sizeof(phase));
}

absl::Status RingPages::SetAsleep(bool asleep) {
  const uint8_t value = asleep ? 1 : 0;
  return Write(kServerAsleepAt, &value, sizeof(value));
}

}  // namespace logitd::arena

#include "client/ring.h"

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/messages/codec.h"
#include "client/transport/clock.h"
#include "formats/arena_protocol.h"
#include "formats/ring_protocol.h"

namespace logitd::client {
namespace {

uint8_t Load(const char* at) {
  return __atomic_load_n(reinterpret_cast<const uint8_t*>(at), __ATOMIC_ACQUIRE);
}
void Store(char* at, uint8_t value) {
  __atomic_store_n(reinterpret_cast<uint8_t*>(at), value, __ATOMIC_RELEASE);
}

absl::Status Unavailable(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat("ring: ", what));
}

// A packet from the server: a RingAnswer with its text. False: it is not one.
bool ParseAnswer(absl::string_view packet, RingAnswer* answer, std::string* text) {
  if (packet.size() < sizeof(*answer)) return false;
  std::memcpy(answer, packet.data(), sizeof(*answer));
  packet.remove_prefix(sizeof(*answer));
  if (answer->magic != kRingMagic || answer->text_bytes != packet.size()) return false;
  *text = std::string(packet);
  return true;
}

absl::Time Now() { return SteadyClock().Now(); }

constexpr size_t kMaxPacket = sizeof(RingAnswer) + kMaxArenaText;

}  // namespace

int64_t Ring::Bytes(const RingOptions& options) {
  return static_cast<int64_t>(RingBytes(options.slots, options.entry_bytes, options.answer_bytes));
}

absl::StatusOr<std::unique_ptr<Ring>> Ring::Open(Arena* arena, int64_t offset,
                                                 const RingOptions& options) {
  const int64_t bytes = Bytes(options);
  if (arena->kind() != ArenaKind::kHost) {
    return absl::InvalidArgumentError(
        "ring: got an arena of a GPU, allowed one of the host; rows may lie in both");
  }
  if (options.slots < 1 || offset < 0 || bytes > arena->bytes() ||
      offset > arena->bytes() - bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("ring: got %d slots in %d bytes at offset %d, allowed 1 or more within the "
                        "arena's %d bytes",
                        options.slots, bytes, offset, arena->bytes()));
  }
  if (!arena->TakeRing()) {
    return absl::FailedPreconditionError(
        "ring: got an arena that has had its ring, allowed one for each lease");
  }
  char* const memory = arena->data() + offset;
  std::memset(memory, 0, static_cast<size_t>(bytes));
  const RingAsk ask = {.slots = options.slots,
                       .entry_bytes = options.entry_bytes,
                       .answer_bytes = options.answer_bytes,
                       .offset = static_cast<uint64_t>(offset)};
  const int socket = arena->socket();
  if (send(socket, &ask, sizeof(ask), MSG_NOSIGNAL) != ssize_t{sizeof(ask)}) {
    return Unavailable(absl::StrCat("cannot ask: ", std::strerror(errno)));
  }
  std::array<char, kMaxPacket> packet;
  ssize_t got = recv(socket, packet.data(), packet.size(), 0);
  while (got < 0 && errno == EINTR) got = recv(socket, packet.data(), packet.size(), 0);
  if (got == 0) return Unavailable("the lease has ended, or the server knows no rings");
  if (got < 0) return Unavailable(absl::StrCat("no answer: ", std::strerror(errno)));
  RingAnswer answer;
  std::string text;
  if (!ParseAnswer({packet.data(), static_cast<size_t>(got)}, &answer, &text)) {
    return absl::InternalError(
        absl::StrFormat("ring: got an answer of %d bytes that is not of this protocol", got));
  }
  if (answer.code != 0) {
    arena->GiveRing();
    return absl::Status(static_cast<absl::StatusCode>(answer.code), text);
  }
  return std::unique_ptr<Ring>(new Ring(arena, memory, options));
}

Ring::Ring(Arena* arena, char* memory, const RingOptions& options)
    : arena_(arena), memory_(memory), options_(options) {}

absl::Status Ring::Submit(const TopKRequest& request, uint64_t tag, absl::Duration timeout) {
  return Submit(RingMethod::kTopK, request, tag, timeout);
}

absl::Status Ring::Submit(const SampleRequest& request, uint64_t tag, absl::Duration timeout) {
  return Submit(RingMethod::kSample, request, tag, timeout);
}

template <typename Request>
absl::Status Ring::Submit(RingMethod method, const Request& request, uint64_t tag,
                          absl::Duration timeout) {
  if (!ended_.ok()) return ended_;
  if (submitted_ - completed_ >= options_.slots) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "ring: got one call more than the %d in flight, allowed %d (slots); Wait makes room",
        in_flight(), options_.slots));
  }
  const absl::StatusOr<grpc::ByteBuffer> encoded = EncodeRequest(request, request.owner);
  if (!encoded.ok()) return encoded.status();
  const size_t room = options_.entry_bytes - sizeof(RingEntry);
  if (encoded->Length() > room) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "ring: got a request of %d bytes, allowed %d (entry_bytes); rows belong into the arena",
        encoded->Length(), room));
  }
  std::vector<grpc::Slice> slices;
  if (!encoded->Dump(&slices).ok()) return absl::InternalError("ring: cannot read a message");
  char* const slot =
      memory_ + kSubmissionsAt + submitted_ % options_.slots * uint64_t{options_.entry_bytes};
  RingEntry head = {.method = static_cast<uint8_t>(method),
                    .priority = options_.priority == Priority::kBatch ? uint8_t{1} : uint8_t{0},
                    .bytes = static_cast<uint32_t>(encoded->Length()),
                    .tag = tag};
  if (timeout != absl::InfiniteDuration()) {
    head.timeout_us =
        static_cast<uint64_t>(std::max<int64_t>(1, absl::ToInt64Microseconds(timeout)));
  }
  // The phase stays as it is until all else is written.
  head.phase = Load(slot + offsetof(RingEntry, phase));
  std::memcpy(slot, &head, sizeof(head));
  char* to = slot + sizeof(head);
  for (const grpc::Slice& slice : slices) {
    std::memcpy(to, slice.begin(), slice.size());
    to += slice.size();
  }
  Store(slot + offsetof(RingEntry, phase), RingPhase(submitted_, options_.slots));
  ++submitted_;
  flights_.emplace_back(tag, Flight{method, Now()});
  RingFence();
  if (Load(memory_ + kServerAsleepAt) == 0) return absl::OkStatus();
  // A full socket has a doorbell in it.
  const char bell = 0;
  if (send(arena_->socket(), &bell, 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno != EAGAIN) {
    return Hear();
  }
  return absl::OkStatus();
}

char* Ring::completion() const {
  return memory_ + kSubmissionsAt + uint64_t{options_.slots} * options_.entry_bytes +
         completed_ % options_.slots * uint64_t{options_.answer_bytes};
}

bool Ring::Ready() const {
  return Load(completion() + offsetof(RingCompletion, phase)) ==
         RingPhase(completed_, options_.slots);
}

absl::Status Ring::Hear() {
  std::array<char, kMaxPacket> packet;
  for (bool reset = false;;) {
    const ssize_t got = recv(arena_->socket(), packet.data(), packet.size(), MSG_DONTWAIT);
    if (got == 1) continue;  // a doorbell
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return absl::OkStatus();
    // Said once, before what the server sent, where it left a doorbell unread.
    if (got < 0 && errno == ECONNRESET && !std::exchange(reset, true)) continue;
    RingAnswer answer;
    std::string text;
    const bool said =
        got > 0 && ParseAnswer({packet.data(), static_cast<size_t>(got)}, &answer, &text);
    ended_ = Unavailable(said ? absl::StrCat("it has ended: ", text) : "it has ended");
    return ended_;
  }
}

absl::Status Ring::WaitReady(absl::Time end) {
  const absl::Time spin_end = std::min(end, Now() + options_.spin);
  while (Now() < spin_end) {
    for (int i = 0; i < 32; ++i) {
      if (Ready()) return absl::OkStatus();
    }
    std::this_thread::yield();
  }
  while (true) {
    Store(memory_ + kClientAsleepAt, 1);
    RingFence();
    const bool ready = Ready();
    const absl::Duration left = end - Now();
    int got = 0;
    if (!ready && left > absl::ZeroDuration()) {
      const int64_t most = 60 * 60 * 1000;
      const int64_t ms =
          std::min(most, absl::ToInt64Milliseconds(absl::Ceil(left, absl::Milliseconds(1))));
      pollfd doorbell = {.fd = arena_->socket(), .events = POLLIN, .revents = 0};
      got = poll(&doorbell, 1, static_cast<int>(ms));
    }
    Store(memory_ + kClientAsleepAt, 0);
    if (ready || Ready()) return absl::OkStatus();
    if (got > 0) {
      if (absl::Status status = Hear(); !status.ok()) {
        return Ready() ? absl::OkStatus() : status;  // the last answers may still be there
      }
    } else if (Now() >= end) {
      return absl::DeadlineExceededError("ring: no answer came in time");
    }
  }
}

absl::StatusOr<RingResult> Ring::Wait(uint64_t* tag, absl::Duration timeout) {
  if (in_flight() == 0) return absl::FailedPreconditionError("ring: no call is in flight");
  if (absl::Status status = Ready() ? absl::OkStatus() : WaitReady(Now() + timeout); !status.ok()) {
    return status;
  }
  const char* const slot = completion();
  RingCompletion head;
  std::memcpy(&head, slot, sizeof(head));
  const auto flight = std::find_if(flights_.begin(), flights_.end(),
                                   [&head](const auto& one) { return one.first == head.tag; });
  if (head.bytes > options_.answer_bytes - sizeof(head) || flight == flights_.end()) {
    ended_ = Unavailable("got a completion that is not of this protocol");
    return ended_;
  }
  const Flight call = flight->second;
  flights_.erase(flight);
  const absl::string_view body(slot + sizeof(head), head.bytes);
  *tag = head.tag;
  RingResult result = {.tag = head.tag};
  absl::Status status;
  if (head.code != 0) {
    status = absl::Status(static_cast<absl::StatusCode>(head.code), body);
  } else {
    const grpc::Slice slice(body.data(), body.size());
    grpc::ByteBuffer message(&slice, 1);
    const auto decode = [&](auto* into) {
      using Result = typename std::remove_pointer_t<decltype(into)>::value_type;
      auto decoded = DecodeResponse<decltype(Result::answer)>(&message);
      status = decoded.status();
      if (!decoded.ok()) return;
      decoded->round_trip = Now() - call.begun;
      decoded->attempts = 1;
      *into = *std::move(decoded);
    };
    if (call.method == RingMethod::kTopK) {
      decode(&result.topk);
    } else {
      decode(&result.sample);
    }
  }
  ++completed_;
  if (!status.ok()) return status;
  return result;
}

template <typename Result, typename Request>
absl::StatusOr<Result> Ring::Call(const Request& request, std::optional<Result> RingResult::*result,
                                  absl::Duration timeout) {
  if (in_flight() > 0) {
    return absl::FailedPreconditionError("ring: got a call while others are in flight");
  }
  uint64_t tag = submitted_;
  if (absl::Status status = Submit(request, tag, timeout); !status.ok()) return status;
  absl::StatusOr<RingResult> answer = Wait(&tag);
  if (!answer.ok()) return answer.status();
  return *std::move((*answer).*result);
}

absl::StatusOr<TopKResult> Ring::TopK(const TopKRequest& request, absl::Duration timeout) {
  return Call<TopKResult>(request, &RingResult::topk, timeout);
}

absl::StatusOr<SampleResult> Ring::Sample(const SampleRequest& request, absl::Duration timeout) {
  return Call<SampleResult>(request, &RingResult::sample, timeout);
}

}  // namespace logitd::client

// A ring: calls of a decode loop through leased memory, without a socket between. Version 1, byte
// by byte. docs/operations.md ("Shared memory") says what either side may rely on.
//
// A client that has a lease (formats/arena_protocol.h) clears a part of its memory, then sends one
// RingAsk on the lease's connection. The server answers with one packet: a RingAnswer, then
// `text_bytes` bytes of UTF-8 text. If its code is 0 the ring is open, and ends with the lease.
// Otherwise the code is one of gRPC's, the text says why, and the lease stays.
//
// The ring's memory, from `offset` of the lease:
//
//   byte 0                      server_asleep: written by the server
//   byte 64                     client_asleep: written by the client
//   byte 128                    `slots` submissions, each of `entry_bytes`
//   after them                  `slots` completions, each of `answer_bytes`
//
// Submission number n (from 0) goes to slot n % slots. The client writes all of it, then its phase:
// RingPhase(n, slots). The server takes submissions in order as their phases appear. Completion
// number n goes to slot n % slots of the completions in the same way; completions come in any
// order, and `tag` tells which submission one answers. At most `slots` submissions may be without a
// completion that the client has read: so a slot is free when it is needed again, and neither side
// reads an index of the other. A phase is one byte, so it is never half-written.
//
// Doorbells are packets of one byte on the connection, in both directions. A side that is about to
// sleep sets its byte `..._asleep` to 1, looks at the next phase once more, waits for a packet, and
// sets the byte to 0. A side that has written a phase looks at the other's byte, and sends a packet
// if it is not
// 0. Between a write and the look that follows it stands a full memory fence, on both sides.
// A doorbell too many does no harm. No descriptor is shared for this: a peer that shares one (an
// eventfd) can change its flags, and so make the other's write wait.
//
// The server checks the head of a submission: an unknown method, a priority, bytes beyond the slot
// or a field that must be 0 ends the ring; so does any packet that is not a doorbell, for
// instance a second RingAsk. It says so with one more RingAnswer, and ends the lease.
// A doorbell may be unread then: the client's first read may fail with ECONNRESET, the next one
// works. What is wrong inside a message is an error of that call only, as over gRPC.
//
// Numbers are little-endian.
#ifndef LOGITD_FORMATS_RING_PROTOCOL_H_
#define LOGITD_FORMATS_RING_PROTOCOL_H_

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace logitd {

static_assert(std::endian::native == std::endian::little, "the structs are copied as they are");

inline constexpr std::array<char, 4> kRingMagic = {'L', 'D', 'R', 'G'};
inline constexpr uint32_t kRingVersion = 1;

inline constexpr uint32_t kMaxRingSlots = 256;
// The sizes of the slots of submissions and completions. Multiples of kRingAlignment.
inline constexpr uint32_t kMinRingSlotBytes = 128;
inline constexpr uint32_t kMaxRingSlotBytes = 65536;
inline constexpr uint32_t kRingAlignment = 64;

struct RingAsk {
  std::array<char, 4> magic = kRingMagic;
  uint32_t version = kRingVersion;
  uint32_t slots = 0;  // 1..kMaxRingSlots
  uint32_t entry_bytes = 0;
  uint32_t answer_bytes = 0;
  uint32_t unused = 0;  // must be 0
  uint64_t offset = 0;  // in the lease; a multiple of kRingAlignment
};
static_assert(sizeof(RingAsk) == 32);

struct RingAnswer {
  std::array<char, 4> magic = kRingMagic;
  uint32_t version = kRingVersion;  // that the server speaks
  uint32_t code = 0;                // gRPC's, 0: OK
  uint32_t text_bytes = 0;
};
static_assert(sizeof(RingAnswer) == 16);

// The fence of the protocol. Not std::atomic_thread_fence, which ThreadSanitizer does not know.
inline void RingFence() { __sync_synchronize(); }

inline constexpr size_t kServerAsleepAt = 0;
inline constexpr size_t kClientAsleepAt = 64;
inline constexpr size_t kSubmissionsAt = 128;

// The bytes of a ring in the lease.
constexpr uint64_t RingBytes(uint32_t slots, uint32_t entry_bytes, uint32_t answer_bytes) {
  return kSubmissionsAt + uint64_t{slots} * (uint64_t{entry_bytes} + answer_bytes);
}

// 1 and 2 in turn, one for each time around the ring. 0 is the phase of cleared memory.
constexpr uint8_t RingPhase(uint64_t number, uint32_t slots) {
  return static_cast<uint8_t>(1 + number / slots % 2);
}

enum class RingMethod : uint8_t {
  kTopK = 1,    // a logitd.v1.TopKRequest, answered by a TopKResponse
  kSample = 2,  // a logitd.v1.SampleRequest, answered by a SampleResponse
};

// The head of a submission; the message follows it.
struct RingEntry {
  uint8_t phase = 0;
  uint8_t method = 0;       // a RingMethod
  uint8_t priority = 0;     // 0: interactive, 1: batch
  uint8_t unused = 0;       // must be 0
  uint32_t bytes = 0;       // of the message
  uint64_t tag = 0;         // the client's own; comes back with the completion
  uint64_t timeout_us = 0;  // from when the server takes it; 0: no deadline
  uint64_t unused2 = 0;     // must be 0
};
static_assert(sizeof(RingEntry) == 32);

// The head of a completion; the answer's message follows it, or the error's text (UTF-8, cut where
// the slot ends).
struct RingCompletion {
  uint8_t phase = 0;
  std::array<uint8_t, 3> unused = {};
  uint32_t code = 0;  // gRPC's, 0: OK
  uint32_t bytes = 0;
  uint32_t retry_ms = 0;  // RESOURCE_EXHAUSTED: when to try again; 0: not said
  uint64_t tag = 0;
  uint64_t unused2 = 0;
};
static_assert(sizeof(RingCompletion) == 32);

}  // namespace logitd

#endif  // LOGITD_FORMATS_RING_PROTOCOL_H_

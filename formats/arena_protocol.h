// How a client leases shared memory from a server on its machine: version 1 of the protocol, byte by
// byte. docs/operations.md says what a client may rely on.
//
// The client connects to a Unix socket of type SOCK_SEQPACKET and sends one ArenaAsk. The server
// answers with one packet: an ArenaAnswer, then `text_bytes` bytes of UTF-8 text. If its code is 0,
// the packet carries a file descriptor (SCM_RIGHTS): a memfd of exactly `bytes` bytes that nobody
// can shrink, grow or seal. The client maps it, and names `lease` in its requests
// (logitd.v1.SharedRows). Otherwise the code is one of gRPC's and the text says why.
//
// The connection is the lease: the lease ends when the connection ends, from either side. After the
// answer it may open a ring (ring_protocol.h); nothing else is sent on it. Numbers are little-endian, and there is no padding. A refusal may come before
// the request was read: then a client's first read may say ECONNRESET, and the next one has it.
#ifndef LOGITD_FORMATS_ARENA_PROTOCOL_H_
#define LOGITD_FORMATS_ARENA_PROTOCOL_H_

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace logitd {

static_assert(std::endian::native == std::endian::little, "the structs are copied as they are");

inline constexpr std::array<char, 4> kArenaMagic = {'L', 'D', 'A', 'R'};
inline constexpr uint32_t kArenaVersion = 1;
inline constexpr uint32_t kHostArena = 1;  // the one kind of version 1: memory of the host

// Names a lease. Random: who knows it may use the memory in requests.
inline constexpr size_t kLeaseIdBytes = 16;
using LeaseId = std::array<unsigned char, kLeaseIdBytes>;

struct ArenaAsk {
  std::array<char, 4> magic = kArenaMagic;
  uint32_t version = kArenaVersion;
  uint32_t kind = kHostArena;
  uint32_t unused = 0;  // must be 0
  uint64_t bytes = 0;
};
static_assert(sizeof(ArenaAsk) == 24);

struct ArenaAnswer {
  std::array<char, 4> magic = kArenaMagic;
  uint32_t version = kArenaVersion;  // that the server speaks
  uint32_t code = 0;                 // gRPC's, 0: OK
  uint32_t text_bytes = 0;
  uint64_t bytes = 0;  // of the arena: what was asked for, rounded up to pages; 0 with an error
  LeaseId lease = {};
};
static_assert(sizeof(ArenaAnswer) == 40);

inline constexpr size_t kMaxArenaText = 1024;

}  // namespace logitd

#endif  // LOGITD_FORMATS_ARENA_PROTOCOL_H_

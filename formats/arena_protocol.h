// How a client leases shared memory from a server on its machine: version 1 of the protocol, byte
// by byte. docs/operations.md says what a client may rely on.
//
// The client connects to a Unix socket of type SOCK_SEQPACKET and sends one ArenaAsk. The server
// answers with one packet: an ArenaAnswer, then `text_bytes` bytes. If its code is 0, the packet
// carries a file descriptor (SCM_RIGHTS), and the client names `lease` in its requests
// (logitd.v1.SharedRows). The descriptor is
//   kHostArena  a memfd of exactly `bytes` bytes that nobody can shrink, grow or seal. The client
//               maps it. No bytes follow the ArenaAnswer.
//   kCudaArena  memory of a GPU: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR. The client gives it to
//               cuMemImportFromShareableHandle, on the device that ArenaDevice names, which follows
//               the ArenaAnswer, and maps it there.
// Otherwise the code is one of gRPC's and the text that follows, UTF-8, says why.
//
// The connection is the lease: the lease ends when the connection ends, from either side. When it
// has ended and no call uses it, the server takes all pages out of the memfd, which then reads as
// zeros also where the client still has it mapped. After the answer it may open a ring
// (ring_protocol.h), which a CUDA arena has no place for; nothing else is sent on it. Numbers are
// little-endian, and there is no padding. A refusal may come before the request was read: then a
// client's first read may fail with ECONNRESET, and the next one returns it.
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
// Kinds of memory. A server answers UNIMPLEMENTED to a kind that it does not have.
inline constexpr uint32_t kHostArena = 1;  // of the host
inline constexpr uint32_t kCudaArena = 2;  // of a GPU

// Names a lease. It is random, because whoever knows it may use the memory in requests.
inline constexpr size_t kLeaseIdBytes = 16;
using LeaseId = std::array<unsigned char, kLeaseIdBytes>;

struct ArenaAsk {
  std::array<char, 4> magic = kArenaMagic;
  uint32_t version = kArenaVersion;
  uint32_t kind = kHostArena;
  uint32_t device = 0;  // kCudaArena: 1 + the device's number; 0: the server chooses. Otherwise 0
  uint64_t bytes = 0;
};
static_assert(sizeof(ArenaAsk) == 24);

struct ArenaAnswer {
  std::array<char, 4> magic = kArenaMagic;
  uint32_t version = kArenaVersion;  // that the server speaks
  uint32_t code = 0;                 // gRPC's, 0: OK
  uint32_t text_bytes = 0;
  // The arena's size: what was asked for, rounded up to pages, on a GPU to 2 MiB; 0 with an error.
  uint64_t bytes = 0;
  LeaseId lease = {};
};
static_assert(sizeof(ArenaAnswer) == 40);

struct ArenaDevice {
  std::array<uint8_t, 16> uuid = {};  // as cuDeviceGetUuid tells it
  uint32_t number = 0;                // as the server's operator counts
  uint32_t unused = 0;
};
static_assert(sizeof(ArenaDevice) == 24);

inline constexpr size_t kMaxArenaText = 1024;

}  // namespace logitd

#endif  // LOGITD_FORMATS_ARENA_PROTOCOL_H_

#include "client/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cuda_memory.h"
#include "formats/arena_protocol.h"

namespace logitd::client {
namespace {

absl::Status Unavailable(const std::string& address, absl::string_view what) {
  return absl::UnavailableError(
      absl::StrCat("arena: ", address, ": ", what, ": ", std::strerror(errno)));
}

absl::StatusOr<sockaddr_un> ParseUnix(const std::string& address) {
  constexpr absl::string_view kScheme = "unix:";
  sockaddr_un parsed = {};
  parsed.sun_family = AF_UNIX;
  const absl::string_view path =
      absl::StartsWith(address, kScheme) ? absl::string_view(address).substr(kScheme.size()) : "";
  if (path.empty() || path.size() >= sizeof(parsed.sun_path)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("arena: got address \"%s\", allowed unix:PATH with a path of 1..%d bytes",
                        address, sizeof(parsed.sun_path) - 1));
  }
  std::memcpy(parsed.sun_path, path.data(), path.size());
  return parsed;
}

struct Received {
  ArenaAnswer answer;
  std::string text;
  int fd = -1;
};

// The server's one packet. False: there is none, or it is not of this protocol.
bool Receive(int socket, Received* received) {
  std::array<char, kMaxArenaText> text;
  std::array<iovec, 2> parts = {iovec{&received->answer, sizeof(received->answer)},
                                iovec{text.data(), text.size()}};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  msghdr message = {};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t bytes = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  // ECONNRESET: the server has closed the connection without reading the request. This is said
  // once, before the answer that it sent.
  for (int resets = 0; bytes < 0 && (errno == EINTR || (errno == ECONNRESET && resets++ == 0));) {
    bytes = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  }
  if (const cmsghdr* header = CMSG_FIRSTHDR(&message); bytes >= 0 && header != nullptr &&
                                                       header->cmsg_level == SOL_SOCKET &&
                                                       header->cmsg_type == SCM_RIGHTS) {
    std::memcpy(&received->fd, CMSG_DATA(header), sizeof(received->fd));
  }
  const auto size = static_cast<size_t>(std::max<ssize_t>(bytes, 0));
  if (size < sizeof(ArenaAnswer) || received->answer.magic != kArenaMagic ||
      received->answer.text_bytes != size - sizeof(ArenaAnswer)) {
    if (bytes >= 0) errno = EPROTO;
    return false;
  }
  received->text.assign(text.data(), received->answer.text_bytes);
  return true;
}

// A file that can shrink is refused: a write beyond its end would kill this process (SIGBUS).
bool IsWhole(int fd, uint64_t bytes) {
  struct stat file = {};
  const int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && fstat(fd, &file) == 0 &&
         static_cast<uint64_t>(file.st_size) >= bytes && bytes > 0;
}

absl::StatusOr<char*> MapFile(const ArenaAnswer& answer, int fd) {
  void* const data =
      mmap(nullptr, answer.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (data != MAP_FAILED) return static_cast<char*>(data);
  return absl::ResourceExhaustedError(absl::StrFormat(
      "arena: got %d bytes, which cannot be mapped: %s", answer.bytes, std::strerror(errno)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Arena>> Arena::Lease(const std::string& address, int64_t bytes,
                                                    absl::Duration timeout) {
  return Lease(address, bytes, ArenaKind::kHost, -1, timeout);
}

absl::StatusOr<std::unique_ptr<Arena>> Arena::Lease(const std::string& address, int64_t bytes,
                                                    ArenaKind kind, int device,
                                                    absl::Duration timeout) {
  const absl::StatusOr<sockaddr_un> at = ParseUnix(address);
  if (!at.ok()) return at.status();
  if (bytes < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("arena: got %d bytes to lease, allowed 1 or more", bytes));
  }
  const bool on_host = kind == ArenaKind::kHost;
  if (device < -1 || (on_host && device != -1)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "arena: got device %d, allowed -1, or a device's number for memory of a GPU", device));
  }
  const int socket = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (socket < 0) return Unavailable(address, "socket");
  absl::Cleanup close_socket = [socket] { close(socket); };
  const timeval time = absl::ToTimeval(std::max(timeout, absl::Milliseconds(1)));  // 0 is no limit
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time));
  setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof(time));
  if (connect(socket, reinterpret_cast<const sockaddr*>(&*at), sizeof(*at)) != 0) {
    return Unavailable(address, "cannot connect");
  }
  const ArenaAsk ask = {.kind = on_host ? kHostArena : kCudaArena,
                        .device = static_cast<uint32_t>(device + 1),
                        .bytes = static_cast<uint64_t>(bytes)};
  // A server that has already refused this peer no longer reads; its answer is there.
  const bool sent = send(socket, &ask, sizeof(ask), MSG_NOSIGNAL) == ssize_t{sizeof(ask)};
  Received received;
  const bool heard = Receive(socket, &received);
  absl::Cleanup close_fd = [&received] {
    if (received.fd >= 0) close(received.fd);
  };
  if (!heard) return Unavailable(address, sent ? "no answer" : "cannot ask");
  const ArenaAnswer& answer = received.answer;
  if (answer.code != 0) {
    return absl::Status(static_cast<absl::StatusCode>(answer.code), received.text);
  }
  const bool whole = on_host ? IsWhole(received.fd, answer.bytes)
                             : received.fd >= 0 && received.text.size() == sizeof(ArenaDevice);
  if (answer.version != kArenaVersion || answer.bytes < static_cast<uint64_t>(bytes) || !whole) {
    return absl::InternalError(absl::StrFormat(
        "arena: %s: got a lease of version %d and %d bytes, allowed version %d and a sealed memfd, "
        "or memory of a GPU, of at least %d bytes",
        address, answer.version, answer.bytes, kArenaVersion, bytes));
  }
  std::unique_ptr<CudaMemory> cuda;
  char* data = nullptr;
  if (on_host) {
    const absl::StatusOr<char*> mapped = MapFile(answer, received.fd);
    if (!mapped.ok()) return mapped.status();
    data = *mapped;
  } else {
    ArenaDevice from;
    std::memcpy(&from, received.text.data(), sizeof(from));
    absl::StatusOr<std::unique_ptr<CudaMemory>> mapped =
        CudaMemory::Map(received.fd, from.uuid, answer.bytes);
    if (!mapped.ok()) return mapped.status();
    cuda = *std::move(mapped);
    data = cuda->data();
  }
  std::move(close_socket).Cancel();
  return std::unique_ptr<Arena>(new Arena(socket, data, static_cast<int64_t>(answer.bytes),
                                          std::string(answer.lease.begin(), answer.lease.end()),
                                          std::move(cuda)));
}

Arena::Arena(int socket, char* data, int64_t bytes, std::string lease,
             std::unique_ptr<CudaMemory> cuda)
    : socket_(socket),
      data_(data),
      bytes_(bytes),
      lease_(std::move(lease)),
      cuda_(std::move(cuda)) {}

Arena::~Arena() {
  if (cuda_ == nullptr) munmap(data_, static_cast<size_t>(bytes_));
  shutdown(socket_, SHUT_RDWR);  // also ends the lease where a child process has the descriptor
  close(socket_);
}

bool Arena::Has(int64_t offset, size_t bytes) const {
  return offset >= 0 && offset <= bytes_ && bytes <= static_cast<uint64_t>(bytes_ - offset);
}

absl::Status Arena::Write(int64_t offset, absl::string_view from) {
  if (!Has(offset, from.size())) {
    return absl::OutOfRangeError(absl::StrFormat("arena: got %d bytes at %d, allowed within %d",
                                                 from.size(), offset, bytes_));
  }
  if (cuda_ != nullptr) return cuda_->Write(static_cast<size_t>(offset), from);
  std::copy(from.begin(), from.end(), data_ + offset);
  return absl::OkStatus();
}

absl::Status Arena::Read(int64_t offset, absl::Span<char> to) const {
  if (!Has(offset, to.size())) {
    return absl::OutOfRangeError(
        absl::StrFormat("arena: got %d bytes at %d, allowed within %d", to.size(), offset, bytes_));
  }
  if (cuda_ != nullptr) return cuda_->Read(static_cast<size_t>(offset), to);
  std::copy_n(data_ + offset, to.size(), to.begin());
  return absl::OkStatus();
}

bool Arena::Overlaps(absl::string_view bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(data_);
  const auto at = reinterpret_cast<uintptr_t>(bytes.data());
  return !bytes.empty() && at < begin + static_cast<size_t>(bytes_) && at + bytes.size() > begin;
}

absl::StatusOr<v1::SharedRows> Arena::Find(const std::vector<absl::string_view>& pieces,
                                           int64_t rows, int64_t row_bytes) const {
  std::vector<absl::string_view> runs;  // pieces that touch, as one
  uint64_t total = 0;
  for (const absl::string_view piece : pieces) {
    if (piece.empty()) continue;
    // As numbers: pointers into different memory do not compare.
    const auto offset =
        reinterpret_cast<uintptr_t>(piece.data()) - reinterpret_cast<uintptr_t>(data_);
    if (offset > static_cast<uint64_t>(bytes_) ||
        piece.size() > static_cast<uint64_t>(bytes_) - offset) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "arena: got a payload of %d bytes outside of it, allowed one in its %d bytes",
          piece.size(), bytes_));
    }
    total += piece.size();
    if (!runs.empty() && runs.back().data() + runs.back().size() == piece.data()) {
      runs.back() = absl::string_view(runs.back().data(), runs.back().size() + piece.size());
    } else {
      runs.push_back(piece);
    }
  }
  // The server cannot see where the payload ends: the rows must be exactly what the pieces hold.
  const bool fits = rows > 0 && row_bytes > 0 && total % static_cast<uint64_t>(row_bytes) == 0 &&
                    total / static_cast<uint64_t>(row_bytes) == static_cast<uint64_t>(rows);
  if (!fits) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "payload: got %d bytes in the arena, allowed %d rows of %d bytes", total, rows, row_bytes));
  }
  v1::SharedRows found;
  found.set_lease(lease_);
  found.set_offset(runs[0].data() - data_);
  if (runs.size() == 1) return found;
  const int64_t stride = runs[1].data() - runs[0].data();
  bool even = stride > row_bytes && runs.size() == static_cast<size_t>(rows);
  for (size_t i = 0; even && i < runs.size(); ++i) {
    even = runs[i].size() == static_cast<size_t>(row_bytes) &&
           runs[i].data() == runs[0].data() + static_cast<int64_t>(i) * stride;
  }
  if (!even) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "arena: got a payload in %d runs of memory, allowed one run, or %d rows of %d bytes at "
        "equal, ascending distances",
        runs.size(), rows, row_bytes));
  }
  found.set_row_stride(stride);
  return found;
}

}  // namespace logitd::client

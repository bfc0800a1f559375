// Any bytes in the memory of a ring, changed between the steps of the server: what it takes out
// lies within the message's bounds, what it puts there within the ring, and nothing else is
// touched.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "server/arena/ring_pages.h"

namespace {

using logitd::RingAsk;
using logitd::RingEntry;
using logitd::arena::Arena;
using logitd::arena::RingPages;
using logitd::arena::RingReply;
using logitd::arena::RingRequest;

constexpr size_t kBytes = 8192;
constexpr RingAsk kShape = {.slots = 3, .entry_bytes = 192, .answer_bytes = 128, .offset = 4096};

void Check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

struct Memory {
  Memory() {
    const int fd = memfd_create("fuzz", MFD_CLOEXEC);
    Check(fd >= 0 && ftruncate(fd, kBytes) == 0, "no memory");
    data = static_cast<char*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    arena = *Arena::Map(fd, kBytes);
  }
  char* data;
  std::shared_ptr<const Arena> arena;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto* const memory = new Memory;
  const size_t ring = logitd::RingBytes(kShape.slots, kShape.entry_bytes, kShape.answer_bytes);
  std::memset(memory->data, 0, kBytes);
  // The first 32 bytes are a request for a ring, too.
  RingAsk ask;
  std::memcpy(&ask, data, std::min(size, sizeof(ask)));
  if (logitd::arena::CheckRing(ask, size, kBytes).ok()) {
    Check(ask.offset + logitd::RingBytes(ask.slots, ask.entry_bytes, ask.answer_bytes) <= kBytes,
          "a ring beyond the lease");
  }
  RingPages pages(memory->arena, kShape);
  size_t at = 0;
  for (int step = 0; step < 12; ++step) {
    const size_t part = std::min(size - at, ring);
    std::memcpy(memory->data + kShape.offset, data + at, part);
    // Half of the steps have the phase that the server waits for.
    if (step % 2 == 0) {
      for (uint32_t slot = 0; slot < kShape.slots; ++slot) {
        memory->data[kShape.offset + logitd::kSubmissionsAt + slot * kShape.entry_bytes] =
            static_cast<char>(logitd::RingPhase(static_cast<uint64_t>(step / 2), kShape.slots));
      }
    }
    at += std::min<size_t>(part, 64);
    RingRequest request;
    const auto taken = pages.Take(&request);
    if (!taken.ok()) return 0;
    if (*taken) {
      Check(request.message.size() <= kShape.entry_bytes - sizeof(RingEntry), "a long message");
      Check(request.timeout > absl::ZeroDuration(), "a timeout of nothing");
      Check(pages.Post({.tag = request.tag, .message = request.message}).ok(), "no answer");
    }
    pages.client_asleep();
    Check(pages.SetAsleep(step % 2 == 0).ok(), "no flag");
  }
  for (size_t i = 0; i < kBytes; ++i) {
    const bool inside = i >= kShape.offset && i < kShape.offset + ring;
    Check(inside || memory->data[i] == 0, "a write outside of the ring");
  }
  return 0;
}

// Memory for large messages. Streams copy rows directly from it.
#ifndef LOGITD_SERVER_ENGINE_PLACES_H_
#define LOGITD_SERVER_ENGINE_PLACES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>

#include "server/engine/devices.h"

namespace logitd::engine {

// One range of addresses, handed out in runs of pages. Devices other than the host copy only from
// pinned memory, so the range is pinned for them, piece by piece on a thread of its own, and only
// pinned pieces are handed out. Thread-safe.
class Places {
 public:
  // Reserves `bytes` of addresses; memory is used when a run is first written, or pinned. `devices`
  // outlive it.
  Places(const Devices& devices, int64_t bytes);
  ~Places();
  Places(const Places&) = delete;
  Places& operator=(const Places&) = delete;

  // The smallest free run that has `bytes` bytes, on a page border. Null: there is none. The memory
  // may outlive this object.
  std::shared_ptr<std::byte> Take(size_t bytes);

  // Memory that is pinned, in bytes.
  int64_t pinned() const { return pinned_.load(std::memory_order_relaxed); }
  // Returns memory of free runs to the system, unless it is pinned.
  void GiveBack();

 private:
  class Runs;

  void Pin();
  void Unpin();

  const Devices& devices_;
  const size_t bytes_;
  const std::shared_ptr<Runs> runs_;
  std::atomic<int64_t> pinned_ = 0;
  std::atomic<bool> stop_ = false;
  std::thread pinner_;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_PLACES_H_

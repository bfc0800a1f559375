// Who holds how much room for messages, and whose waiting call is next. The arithmetic of the
// admission, without threads or time.
#ifndef LOGITD_SERVER_ENGINE_ROOM_H_
#define LOGITD_SERVER_ENGINE_ROOM_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "server/engine/caller.h"

namespace logitd::engine {

// All room is cut into parts. A charge is paid by one of them.
enum class RoomPart : uint8_t {
  kCommon,
  kSmall,  // for calls that ask for kSmallAsk or less
  kFirst,  // for callers that hold nothing: one largest message
};

// Not thread-safe. Each caller has a line for each priority; the order of the lines is start-time
// fair queueing (Goyal, Vin, Cheng 1996) of bytes by weight, interactive lines first.
class Room {
 public:
  // 1 MiB and small fields.
  static constexpr int64_t kSmallAsk = (int64_t{1} << 20) + (int64_t{64} << 10);
  using WaiterId = uint64_t;  // opaque; grows from call to call

  struct Ask {
    int64_t bytes = 0;
    bool needs_turn = false;
  };
  struct Holder;
  // The waiting calls of one caller and priority.
  struct Line {
    Holder* holder = nullptr;
    Priority priority = Priority::kInteractive;
    double start = 0;  // virtual time
    std::map<WaiterId, Ask> calls;
  };
  // Exists while the caller holds room or waits.
  struct Holder {
    uint64_t id = 0;
    double weight = 1;
    int64_t held = 0;
    int64_t asked = 0;  // by its waiting calls
    int charges = 0;    // not ended, those of 0 bytes included
    int waiting = 0;
    double served = 0;          // virtual time up to which it has had its share
    std::array<Line, 2> lines;  // by Priority
  };
  // The room of a call.
  struct Charge {
    Holder* holder = nullptr;
    RoomPart part = RoomPart::kCommon;
    int64_t bytes = 0;
    bool has_turn = false;
  };

  // `max_receiving`: bytes that are asked for by calls that have a turn; 0: any. So many calls may
  // always have one: `min_receiving_calls`.
  Room(int64_t max_message, int64_t max_held, int64_t max_receiving, int min_receiving_calls);

  Holder* HolderOf(const Caller& caller);
  // Ends a holder that holds nothing and does not wait.
  void Forget(Holder* holder);

  // Charges a call at once, unless other calls come first, no part has room for it or it is not its
  // turn.
  std::optional<Charge> TryTake(Holder* holder, const Ask& ask);
  // Puts a call at the end of its line.
  void Wait(Holder* holder, Priority priority, WaiterId waiter, const Ask& ask);
  // Takes a waiting call out of its line, without room. Its holder may be gone afterwards.
  void Leave(Holder* holder, Priority priority, WaiterId waiter);
  // The next call that has room and whose turn it is: it leaves its line and is charged. A call may
  // pass those that wait for room if it needs nothing of the common part, and those that wait for a
  // turn if it needs none. Cost: O(lines) where the first one may not go and small calls wait, or
  // the first part has room.
  std::optional<std::pair<WaiterId, Charge>> Grant();

  // The message of a charge is there, or does not count any longer.
  void EndTurn(Charge* charge);
  // Gives a charge back, except `kept` bytes. These move to the common part if they fit there.
  void Free(Charge* charge, int64_t kept);
  // Gives all of it back. Its holder may be gone afterwards.
  void End(Charge* charge);

  int64_t held() const { return held_; }
  // Bytes that waiting calls ask for.
  int64_t asked() const { return asked_; }
  // The first call waits because there is no room, not only because it is not its turn.
  bool IsShort() const;
  int waiting() const { return waiting_; }
  int holders() const { return static_cast<int>(holders_.size()); }

 private:
  struct Earlier {
    bool operator()(const Line* a, const Line* b) const;
  };

  int64_t& FreeOf(RoomPart part) { return free_[static_cast<size_t>(part)]; }
  bool Fits(RoomPart part, int64_t bytes) const {
    return bytes <= free_[static_cast<size_t>(part)];
  }
  // `common`: it may use the common part.
  std::optional<RoomPart> PartFor(const Holder& holder, int64_t bytes, bool common = true) const;
  bool NeedsTurn(const Holder& holder, const Ask& ask) const;
  bool HasTurn(const Ask& ask) const;
  Charge Take(Holder* holder, RoomPart part, const Ask& ask);
  void Remove(Line* line, WaiterId waiter, double start);

  std::array<int64_t, 3> free_;  // by RoomPart
  int64_t held_ = 0;
  int64_t asked_ = 0;
  int waiting_ = 0;
  int small_waiting_ = 0;  // of these, calls that ask for kSmallAsk or less
  const int64_t max_receiving_;
  const int min_receiving_calls_;
  int64_t receiving_bytes_ = 0;
  int receiving_calls_ = 0;
  double now_ = 0;  // virtual time: the start of the last call that was let in
  absl::flat_hash_map<uint64_t, std::unique_ptr<Holder>> holders_;
  std::set<Line*, Earlier> order_;  // the lines with calls
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_ROOM_H_

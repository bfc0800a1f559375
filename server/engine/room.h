// Who holds how much room for messages, and whose waiting call is next. The arithmetic of the
// admission, without threads or time.
#ifndef LOGITD_SERVER_ENGINE_ROOM_H_
#define LOGITD_SERVER_ENGINE_ROOM_H_

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "absl/container/flat_hash_map.h"
#include "server/engine/caller.h"

namespace logitd::engine {

// All room is cut into parts. A charge is paid by one of them.
enum class RoomPart : uint8_t {
  kCommon,
  kSmall,  // for calls that ask for kSmallAsk or less
  kFirst,  // for callers that hold nothing: one largest message
};

// Not thread-safe. `Waiter` is opaque here: an id that only grows.
class Room {
 public:
  // A message that its peer may send before it is asked for needs no turn.
  static constexpr int64_t kUnaskedBytes = int64_t{64} << 10;
  static constexpr int64_t kSmallAsk =
      (int64_t{1} << 20) + (int64_t{64} << 10);  // 1 MiB and small fields
  using WaiterId = uint64_t;
  struct Line;

  // Exists while the caller holds room or waits.
  struct Holder {
    uint64_t id;
    double weight;
    int64_t held = 0;
    int64_t asked = 0;  // by its waiting calls
    int charges = 0;    // not given back, those of 0 bytes included
    int waiting = 0;
    double served = 0;  // virtual time up to which it has had its share
    // The admission's: what its connection had received when it last looked, the rate up to then,
    // and the messages for which that suffices.
    int64_t seen_bytes = 0;
    int64_t seen_ns = 0;
    double rate = 0;  // bytes per second
    int receiving = 0;
    std::array<std::unique_ptr<Line>, 2> lines;  // by Priority; null until used
    ~Holder();
  };

  // A call's request.
  struct Ask {
    int64_t bytes = 0;      // of room
    int64_t receiving = 0;  // bytes that will be received; 0: it needs no turn
  };

  struct Next {
    WaiterId waiter;
    Holder* holder;
    Ask ask;
    RoomPart part;
  };

  // `max_receiving`: bytes of messages that are received at the same time; 0: any. So many calls may
  // always receive: `min_receiving_calls`.
  Room(int64_t max_message, int64_t max_held, int64_t max_receiving, int min_receiving_calls);
  ~Room();

  Holder* HolderOf(const Caller& caller);
  // Ends a holder that holds nothing and does not wait.
  void Forget(Holder* holder);

  // Charges a call at once, unless calls wait, no part has room for it or it is not its turn.
  std::optional<RoomPart> TryTake(Holder* holder, const Ask& ask);
  // Puts a call at the end of its line.
  void Wait(Holder* holder, Priority priority, WaiterId waiter, const Ask& ask);
  // Takes a call out of its line, without room. False: it does not wait.
  bool Leave(WaiterId waiter);
  // The next call that has room and whose turn it is: it leaves its line and is charged.
  std::optional<Next> Grant();
  // A message of Ask::receiving bytes is there, or does not count any longer.
  void EndTurn(int64_t receiving);

  // Gives `bytes` of a charge back. `kept`: what is left of the charge; it moves to the common part
  // if it fits there.
  void Free(Holder* holder, RoomPart* part, int64_t bytes, int64_t kept);
  // The charge is over, and holds 0 bytes. `holder` may be gone afterwards.
  void End(Holder* holder);

  int64_t held() const { return held_; }
  // Bytes that waiting calls ask for.
  int64_t asked() const { return asked_; }
  // A call waits because there is no room, not only because it is not its turn.
  bool IsShort() const;
  int waiting() const { return static_cast<int>(line_of_.size()); }
  int holders() const { return static_cast<int>(holders_.size()); }

 private:
  // The lowest is served first.
  struct Key {
    Priority priority;
    double start;  // virtual time
    WaiterId head;
    Line* line;
    friend auto operator<=>(const Key&, const Key&) = default;
  };

  bool Fits(RoomPart part, int64_t bytes) const {
    return bytes <= free_[static_cast<size_t>(part)];
  }
  std::optional<RoomPart> PartFor(const Holder& holder, int64_t bytes) const;
  bool IsTurn(const Holder& holder, int64_t receiving) const;
  void Charge(Holder* holder, RoomPart part, const Ask& ask);
  void List(Line* line);
  void Unlist(Line* line);
  void ListAll(Holder* holder);
  void UnlistAll(Holder* holder);
  Next Take(Line* line, RoomPart part);

  std::array<int64_t, 3> free_;  // by RoomPart
  int64_t held_ = 0;
  int64_t asked_ = 0;
  const int64_t max_receiving_;
  const int min_receiving_calls_;
  int64_t receiving_bytes_ = 0;
  int receiving_calls_ = 0;
  double now_ = 0;  // virtual time: the start of the last call that was let in
  absl::flat_hash_map<uint64_t, std::unique_ptr<Holder>> holders_;
  absl::flat_hash_map<WaiterId, Line*> line_of_;
  std::set<Key> order_;  // every line with a call
  std::set<Key> small_;  // of these, lines whose first call is small
  std::set<Key> first_;  // lines of callers that hold nothing
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_ROOM_H_

#include "server/engine/room.h"

#include <algorithm>
#include <utility>

namespace logitd::engine {
namespace {

constexpr int64_t kMinSmallPart = int64_t{4} << 20;

// Largest messages that must fit beside a part that is kept.
constexpr int64_t kMessagesBesideFirst = 3;
constexpr int64_t kMessagesBesideSmall = 3;

}  // namespace

// The waiting calls of one caller and priority, in order.
struct Room::Line {
  Holder* holder;
  Priority priority;
  double start = 0;
  std::map<WaiterId, Ask> calls;
  bool listed = false;

  Key key() { return {priority, start, calls.begin()->first, this}; }
};

Room::Holder::~Holder() = default;

Room::Room(int64_t max_message, int64_t max_held, int64_t max_receiving, int min_receiving_calls)
    : max_receiving_(max_receiving), min_receiving_calls_(min_receiving_calls) {
  int64_t common = max_held;
  const auto keep = [&](int64_t bytes, int64_t messages_beside) {
    if (common - bytes < messages_beside * max_message) return int64_t{0};
    common -= bytes;
    return bytes;
  };
  const int64_t first = keep(max_message, kMessagesBesideFirst);
  const int64_t small = keep(std::max(kMinSmallPart, max_held / 16), kMessagesBesideSmall);
  free_ = {common, small, first};
}

Room::~Room() = default;

Room::Holder* Room::HolderOf(const Caller& caller) {
  std::unique_ptr<Holder>& holder = holders_[caller.id];
  if (holder == nullptr) {
    holder = std::make_unique<Holder>();
    holder->id = caller.id;
  }
  holder->weight = caller.weight;
  return holder.get();
}

std::optional<RoomPart> Room::PartFor(const Holder& holder, int64_t bytes) const {
  if (bytes <= kSmallAsk && Fits(RoomPart::kSmall, bytes)) return RoomPart::kSmall;
  if (Fits(RoomPart::kCommon, bytes)) return RoomPart::kCommon;
  if (holder.held == 0 && Fits(RoomPart::kFirst, bytes)) return RoomPart::kFirst;
  return std::nullopt;
}

// A light caller does not wait for the messages of others, and no caller for tiny messages.
bool Room::IsTurn(const Holder& holder, int64_t receiving) const {
  return max_receiving_ == 0 || receiving <= kUnaskedBytes ||
         (holder.held == 0 && receiving <= kSmallAsk) || receiving_calls_ < min_receiving_calls_ ||
         receiving_bytes_ + receiving <= max_receiving_;
}

void Room::EndTurn(int64_t receiving) {
  receiving_bytes_ -= receiving;
  --receiving_calls_;
}

bool Room::IsShort() const {
  if (order_.empty()) return false;
  const Line& line = *order_.begin()->line;
  return !PartFor(*line.holder, line.calls.begin()->second.bytes).has_value();
}

void Room::Charge(Holder* holder, RoomPart part, const Ask& ask) {
  const int64_t bytes = ask.bytes;
  if (ask.receiving > 0) {
    receiving_bytes_ += ask.receiving;
    ++receiving_calls_;
  }
  free_[static_cast<size_t>(part)] -= bytes;
  held_ += bytes;
  ++holder->charges;
  const bool first = holder->held == 0 && bytes > 0;
  if (first) UnlistAll(holder);
  holder->held += bytes;
  holder->served = std::max(holder->served, now_) + static_cast<double>(bytes) / holder->weight;
  if (first) ListAll(holder);
}

std::optional<RoomPart> Room::TryTake(Holder* holder, const Ask& ask) {
  if (!order_.empty() || !IsTurn(*holder, ask.receiving)) return std::nullopt;
  const std::optional<RoomPart> part = PartFor(*holder, ask.bytes);
  if (!part.has_value()) return std::nullopt;
  now_ = std::max(now_, holder->served);
  Charge(holder, *part, ask);
  return part;
}

void Room::Wait(Holder* holder, Priority priority, WaiterId waiter, const Ask& ask) {
  asked_ += ask.bytes;
  holder->asked += ask.bytes;
  std::unique_ptr<Line>& line = holder->lines[static_cast<size_t>(priority)];
  if (line == nullptr) line = std::make_unique<Line>(Line{holder, priority});
  if (line->calls.empty()) line->start = std::max(now_, holder->served);
  line->calls.emplace(waiter, ask);
  line_of_.emplace(waiter, line.get());
  ++holder->waiting;
  if (line->calls.size() == 1) List(line.get());
}

bool Room::Leave(WaiterId waiter) {
  const auto it = line_of_.find(waiter);
  if (it == line_of_.end()) return false;
  Line* const line = it->second;
  line_of_.erase(it);
  Unlist(line);
  asked_ -= line->calls.at(waiter).bytes;
  line->holder->asked -= line->calls.at(waiter).bytes;
  line->calls.erase(waiter);
  List(line);
  --line->holder->waiting;
  Forget(line->holder);
  return true;
}

std::optional<Room::Next> Room::Grant() {
  if (order_.empty()) return std::nullopt;
  // The first of `lines`, if its call may go in.
  const auto first_of = [this](const std::set<Key>& lines,
                               std::optional<RoomPart> only) -> std::optional<Next> {
    if (lines.empty()) return std::nullopt;
    Line* const line = lines.begin()->line;
    const Ask& ask = line->calls.begin()->second;
    if (!IsTurn(*line->holder, ask.receiving)) return std::nullopt;
    std::optional<RoomPart> part = only;
    if (!only.has_value()) {
      part = PartFor(*line->holder, ask.bytes);
    } else if (!Fits(*only, ask.bytes)) {
      part = std::nullopt;
    }
    if (!part.has_value()) return std::nullopt;
    return Take(line, *part);
  };
  if (auto next = first_of(order_, std::nullopt); next.has_value()) return next;
  // Where the first in the order waits for the common part, others may pass it only in a part of
  // theirs. Where it only waits for its turn, they may pass it if they need no turn.
  const bool is_short = IsShort();
  const auto in = [is_short](RoomPart part) {
    return is_short ? std::optional<RoomPart>(part) : std::nullopt;
  };
  if (auto next = first_of(small_, in(RoomPart::kSmall)); next.has_value()) return next;
  return first_of(first_, in(RoomPart::kFirst));
}

Room::Next Room::Take(Line* line, RoomPart part) {
  Unlist(line);
  const auto call = line->calls.begin();
  const Next next = {call->first, line->holder, call->second, part};
  line->calls.erase(call);
  line_of_.erase(next.waiter);
  --next.holder->waiting;
  asked_ -= next.ask.bytes;
  next.holder->asked -= next.ask.bytes;
  now_ = std::max(now_, line->start);
  Charge(next.holder, part, next.ask);
  Unlist(line);  // where Charge has listed it
  line->start = next.holder->served;
  List(line);
  return next;
}

void Room::Free(Holder* holder, RoomPart* part, int64_t bytes, int64_t kept) {
  free_[static_cast<size_t>(*part)] += bytes;
  held_ -= bytes;
  const bool none = holder->held == bytes && bytes > 0;
  if (none) UnlistAll(holder);
  holder->held -= bytes;
  if (none) ListAll(holder);
  // Small charges stay where they are while a call waits for the common part: each of them would
  // keep it waiting a little longer.
  const bool may_move = *part == RoomPart::kFirst || order_.empty();
  if (*part != RoomPart::kCommon && may_move && Fits(RoomPart::kCommon, kept)) {
    free_[static_cast<size_t>(*part)] += kept;
    free_[static_cast<size_t>(RoomPart::kCommon)] -= kept;
    *part = RoomPart::kCommon;
  }
}

void Room::End(Holder* holder) {
  --holder->charges;
  Forget(holder);
}

void Room::Forget(Holder* holder) {
  if (holder->charges == 0 && holder->waiting == 0) holders_.erase(holder->id);
}

void Room::List(Line* line) {
  if (line->calls.empty() || line->listed) return;
  line->listed = true;
  const Key key = line->key();
  order_.insert(key);
  if (line->calls.begin()->second.bytes <= kSmallAsk) small_.insert(key);
  if (line->holder->held == 0) first_.insert(key);
}

void Room::Unlist(Line* line) {
  if (!line->listed) return;
  line->listed = false;
  const Key key = line->key();
  order_.erase(key);
  small_.erase(key);
  first_.erase(key);
}

void Room::ListAll(Holder* holder) {
  for (const auto& line : holder->lines) {
    if (line != nullptr) List(line.get());
  }
}

void Room::UnlistAll(Holder* holder) {
  for (const auto& line : holder->lines) {
    if (line != nullptr) Unlist(line.get());
  }
}

}  // namespace logitd::engine

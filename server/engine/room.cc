#include "server/engine/room.h"

#include <algorithm>
#include <tuple>

namespace logitd::engine {
namespace {

constexpr int64_t kMinSmallPart = int64_t{4} << 20;

// Largest messages that must fit beside a part that is kept.
constexpr int64_t kMessagesBeside = 3;

}  // namespace

Room::Room(int64_t max_message, int64_t max_held, int64_t max_receiving, int min_receiving_calls)
    : max_receiving_(max_receiving), min_receiving_calls_(min_receiving_calls) {
  int64_t common = max_held;
  const auto keep = [&](int64_t bytes) {
    if (common - bytes < kMessagesBeside * max_message) return int64_t{0};
    common -= bytes;
    return bytes;
  };
  const int64_t first = keep(max_message);
  const int64_t small = keep(std::max(kMinSmallPart, max_held / 16));
  free_ = {common, small, first};
}

bool Room::Earlier::operator()(const Line* a, const Line* b) const {
  const auto key = [](const Line* line) {
    return std::make_tuple(line->priority, line->start, line->calls.begin()->first);
  };
  return key(a) < key(b);
}

Room::Holder* Room::HolderOf(const Caller& caller) {
  std::unique_ptr<Holder>& holder = holders_[caller.id];
  if (holder == nullptr) {
    holder = std::make_unique<Holder>(Holder{.id = caller.id});
    for (const Priority priority : {Priority::kInteractive, Priority::kBatch}) {
      holder->lines[static_cast<size_t>(priority)] = {holder.get(), priority};
    }
  }
  holder->weight = caller.weight;
  return holder.get();
}

void Room::Forget(Holder* holder) {
  if (holder->charges == 0 && holder->waiting == 0) holders_.erase(holder->id);
}

std::optional<RoomPart> Room::PartFor(const Holder& holder, int64_t bytes, bool common) const {
  if (bytes <= kSmallAsk && Fits(RoomPart::kSmall, bytes)) return RoomPart::kSmall;
  if (common && Fits(RoomPart::kCommon, bytes)) return RoomPart::kCommon;
  if (holder.held == 0 && Fits(RoomPart::kFirst, bytes)) return RoomPart::kFirst;
  return std::nullopt;
}

// A light caller's small message does not wait for the messages of others.
bool Room::NeedsTurn(const Holder& holder, const Ask& ask) const {
  return ask.needs_turn && max_receiving_ > 0 && (holder.held > 0 || ask.bytes > kSmallAsk);
}

bool Room::HasTurn(const Ask& ask) const {
  return receiving_calls_ < min_receiving_calls_ || receiving_bytes_ + ask.bytes <= max_receiving_;
}

bool Room::IsShort() const {
  if (order_.empty()) return false;
  const Line& line = **order_.begin();
  return !PartFor(*line.holder, line.calls.begin()->second.bytes).has_value();
}

Room::Charge Room::Take(Holder* holder, RoomPart part, const Ask& ask) {
  FreeOf(part) -= ask.bytes;
  held_ += ask.bytes;
  holder->held += ask.bytes;
  ++holder->charges;
  holder->served = std::max(holder->served, now_) + static_cast<double>(ask.bytes) / holder->weight;
  if (ask.needs_turn) {
    receiving_bytes_ += ask.bytes;
    ++receiving_calls_;
  }
  return {.holder = holder, .part = part, .bytes = ask.bytes, .has_turn = ask.needs_turn};
}

std::optional<Room::Charge> Room::TryTake(Holder* holder, const Ask& ask) {
  const bool needs_turn = NeedsTurn(*holder, ask);
  const std::optional<RoomPart> part = PartFor(*holder, ask.bytes);
  const bool first = order_.empty()
                         ? !needs_turn || HasTurn(ask)
                         : !needs_turn && small_waiting_ == 0 && part == RoomPart::kSmall;
  if (!first || !part.has_value()) return std::nullopt;
  now_ = std::max(now_, holder->served);
  return Take(holder, *part, ask);
}

void Room::Wait(Holder* holder, Priority priority, WaiterId waiter, const Ask& ask) {
  asked_ += ask.bytes;
  holder->asked += ask.bytes;
  ++waiting_;
  ++holder->waiting;
  if (ask.bytes <= kSmallAsk) ++small_waiting_;
  Line& line = holder->lines[static_cast<size_t>(priority)];
  line.calls.emplace(waiter, ask);
  if (line.calls.size() > 1) return;
  line.start = std::max(now_, holder->served);
  order_.insert(&line);
}

// `start`: of the calls that are left in the line.
void Room::Remove(Line* line, WaiterId waiter, double start) {
  order_.erase(line);
  const auto call = line->calls.find(waiter);
  asked_ -= call->second.bytes;
  line->holder->asked -= call->second.bytes;
  --waiting_;
  --line->holder->waiting;
  if (call->second.bytes <= kSmallAsk) --small_waiting_;
  line->calls.erase(call);
  line->start = start;
  if (!line->calls.empty()) order_.insert(line);
}

void Room::Leave(Holder* holder, Priority priority, WaiterId waiter) {
  Line& line = holder->lines[static_cast<size_t>(priority)];
  Remove(&line, waiter, line.start);
  Forget(holder);
}

std::optional<std::pair<Room::WaiterId, Room::Charge>> Room::Grant() {
  bool room_waits = false;  // a call of the lines before waits for room
  bool turn_waits = false;
  for (Line* const line : order_) {
    const auto [waiter, ask] = *line->calls.begin();
    const std::optional<RoomPart> part = PartFor(*line->holder, ask.bytes, !room_waits);
    if (!part.has_value()) {
      room_waits = true;
      if (small_waiting_ == 0 && !Fits(RoomPart::kFirst, kSmallAsk + 1)) break;  // none may pass
    } else if (NeedsTurn(*line->holder, ask) && (turn_waits || !HasTurn(ask))) {
      turn_waits = true;
    } else {
      now_ = std::max(now_, line->start);
      const Charge charge = Take(line->holder, *part, ask);
      Remove(line, waiter, line->holder->served);
      return std::make_pair(waiter, charge);
    }
  }
  return std::nullopt;
}

void Room::EndTurn(Charge* charge) {
  if (!charge->has_turn) return;
  charge->has_turn = false;
  receiving_bytes_ -= charge->bytes;
  --receiving_calls_;
}

void Room::Free(Charge* charge, int64_t kept) {
  EndTurn(charge);
  const int64_t bytes = charge->bytes - kept;
  FreeOf(charge->part) += bytes;
  held_ -= bytes;
  charge->holder->held -= bytes;
  charge->bytes = kept;
  // Small charges stay where they are while a call waits for the common part: each of them would
  // keep it waiting a little longer.
  const bool may_move = charge->part == RoomPart::kFirst || order_.empty();
  if (!may_move || !Fits(RoomPart::kCommon, kept)) return;
  FreeOf(charge->part) += kept;
  FreeOf(RoomPart::kCommon) -= kept;
  charge->part = RoomPart::kCommon;
}

void Room::End(Charge* charge) {
  Free(charge, 0);
  --charge->holder->charges;
  Forget(charge->holder);
}

}  // namespace logitd::engine

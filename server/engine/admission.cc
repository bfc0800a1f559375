#include "server/engine/admission.h"

#include <algorithm>
#include <atomic>
#include <list>
#include <map>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_format.h"
#include "server/base/alarm.h"
#include "server/engine/metrics.h"
#include "server/engine/room.h"
#include "server/engine/sync.h"

namespace logitd::engine {
namespace {

// A peer may send so many bytes before it is asked to, and the message has some overhead.
constexpr int64_t kNeedsNoTurn = int64_t{80} << 10;

// How long a turn lasts for each byte.
constexpr double kTurnRate = 256 << 20;  // bytes per second

// Less than this is given back only when the call ends.
constexpr int64_t kFreed = int64_t{64} << 10;

absl::Status LateError() {
  return absl::DeadlineExceededError("the deadline passed before there was room for the message");
}

}  // namespace

absl::Status DrainingError() {
  return absl::UnavailableError(
      "the server is draining: it finishes admitted calls and takes no new ones");
}

// Guarded by the admission's lock. Only the ticket changes its bytes and its part, so it reads them
// without the lock.
struct Admission::Ticket::Charge : Room::Charge {
  State* state = nullptr;
  Proof proof = Proof::kNone;
  bool took_turn = false;               // the ticket's: the lock is needed to end it
  std::atomic<bool> receiving = false;  // the message comes; cleared without the lock
  std::weak_ptr<Sender> sender;
  absl::Time granted;
  bool told = false;                   // that it is too slow
  std::list<Charge*>::iterator place;  // in State::coming
};

struct Admission::State {
  using Charge = Ticket::Charge;
  struct Waiter {
    RoomAsk ask;
    Ready ready;
    Room::Holder* holder = nullptr;
  };
  using Waiters = std::map<WaiterId, Waiter>;

  State(const AdmissionOptions& options, Metrics* metrics)
      : options(options),
        metrics(metrics),
        room(options.max_request_bytes, options.max_held_bytes, options.max_receiving_bytes,
             options.min_receiving_calls) {
    if (metrics != nullptr) metrics->Set(Gauge::kHeldBytesLimit, options.max_held_bytes);
  }

  // `status`, counted.
  absl::Status Refused(Refusal reason, Proof proof, absl::Status status) const {
    if (metrics != nullptr) metrics->CountRefused(reason, proof);
    return status;
  }
  int64_t retry_ms() const { return absl::ToInt64Milliseconds(options.retry_delay); }

  // ---- a call enters

  Room::Ask Asked(const RoomAsk& ask) const {
    return {.bytes = std::min(ask.bytes, options.max_request_bytes),
            .needs_turn = ask.sender != nullptr && ask.bytes > kNeedsNoTurn};
  }

  // OK: it may have room, if there is some.
  absl::Status Check(const RoomAsk& ask, const Room::Holder& holder) const {
    const Proof proof = ask.caller.proof;
    if (draining && !ask.again) return Refused(Refusal::kDraining, proof, DrainingError());
    if (ask.deadline != absl::InfiniteFuture() && ask.deadline <= options.clock->Now()) {
      return Refused(Refusal::kDeadline, proof, LateError());
    }
    const int64_t bytes = Asked(ask).bytes;
    const int64_t quota = ask.caller.max_held_bytes;
    if (quota == 0 || holder.held + holder.asked + bytes <= quota) return absl::OkStatus();
    return Refused(
        Refusal::kQuotaBytes, proof,
        absl::ResourceExhaustedError(absl::StrFormat(
            "the caller's calls hold or wait for %d bytes and this one needs %d, allowed "
            "%d; retry after %d ms",
            holder.held + holder.asked, bytes, quota, retry_ms())));
  }

  // OK: it may wait.
  absl::Status CheckPlace(const RoomAsk& ask, const Room::Holder& holder) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    const int free_places = options.max_waiting_calls - room.waiting();
    const bool has_room = room.held() + room.asked() + Asked(ask).bytes <= options.max_held_bytes;
    if (holder.waiting < free_places || ask.again || has_room) return absl::OkStatus();
    return Refused(free_places > 0 ? Refusal::kCallerShare : Refusal::kLineFull, ask.caller.proof,
                   absl::ResourceExhaustedError(absl::StrFormat(
                       "held %d of %d bytes, %d of %d calls waiting, %d of this connection; retry "
                       "after %d ms",
                       room.held(), options.max_held_bytes, room.waiting(),
                       options.max_waiting_calls, holder.waiting, retry_ms())));
  }

  // nullopt: the call has to wait.
  std::optional<absl::StatusOr<Ticket>> Decide(const RoomAsk& ask)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    Room::Holder* const holder = room.HolderOf(ask.caller);
    absl::Status refusal = Check(ask, *holder);
    if (refusal.ok()) {
      if (const auto charge = room.TryTake(holder, Asked(ask))) return MakeTicket(ask, *charge);
      refusal = CheckPlace(ask, *holder);
    }
    room.Forget(holder);
    if (refusal.ok()) return std::nullopt;
    return refusal;
  }

  Ticket MakeTicket(const RoomAsk& ask, const Room::Charge& taken)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    Ticket ticket;
    Charge* const charge = new Charge{taken};
    ticket.charge_.reset(charge);
    charge->state = this;
    charge->proof = ask.caller.proof;
    charge->took_turn = taken.has_turn;
    charge->receiving = ask.sender != nullptr;
    charge->sender = ask.sender;
    charge->granted = options.clock->Now();
    charge->place = charge->receiving ? coming.insert(coming.end(), charge) : coming.end();
    return ticket;
  }

  // ---- the line

  void Wait(RoomAsk ask, Ready ready, WaiterId id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    Room::Holder* const holder = room.HolderOf(ask.caller);
    room.Wait(holder, ask.caller.priority, id, Asked(ask));
    waiters.emplace(id, Waiter{std::move(ask), std::move(ready), holder});
    alarm.RunBy(options.clock->Now() + kTick);
  }

  Waiter Leave(Waiters::iterator it) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    room.Leave(it->second.holder, it->second.ask.caller.priority, it->first);
    return std::move(waiters.extract(it).mapped());
  }

  struct Answer {
    Ready ready;
    absl::StatusOr<Ticket> answer;
  };
  using Answers = std::vector<Answer>;

  // Refuses the waiting calls of which `is` is true.
  template <typename Is>
  void RefuseIf(Is is, const absl::Status& refusal, Refusal reason, Answers& answers)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    for (auto it = waiters.begin(); it != waiters.end();) {
      const auto at = it++;
      if (!is(at->second.ask)) continue;
      Waiter waiter = Leave(at);
      answers.push_back(
          {std::move(waiter.ready), Refused(reason, waiter.ask.caller.proof, refusal)});
    }
  }

  // Makes a change under the lock, and lets in the waiting calls that have room then. Answers go
  // out without the lock. One thread at a time lets calls in: so answers go out in the order of the
  // lines, and a `ready` that drops its ticket at once does not recurse through the whole line.
  template <typename Change>
  void Update(Change change) {
    bool mine = false;
    for (bool first = true; first || mine; first = false) {
      Answers answers;
      {
        MutexLock lock(mutex);
        if (first) change(answers);
        if (mine || !granting) {
          const size_t others = answers.size();
          while (const auto next = room.Grant()) {
            Waiter waiter = std::move(waiters.extract(next->first).mapped());
            answers.push_back({std::move(waiter.ready), MakeTicket(waiter.ask, next->second)});
          }
          mine = granting = answers.size() > others;
        }
        if (metrics != nullptr) {
          metrics->Set(Gauge::kHeldBytes, room.held());
          metrics->Set(Gauge::kWaitingCalls, room.waiting());
        }
      }
      for (Answer& answer : answers) answer.ready(std::move(answer.answer));
    }
  }

  // ---- time

  // Returns when it is due again.
  absl::Time RunDue(absl::Time now) {
    absl::Time due = absl::InfiniteFuture();
    std::vector<Look> looks;
    Update([&](Answers& answers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
      RefuseIf([now](const RoomAsk& ask) { return ask.deadline <= now; }, LateError(),
               Refusal::kDeadline, answers);
      for (Charge* const charge : coming) {
        const auto bytes = static_cast<double>(charge->bytes);
        const absl::Duration turn = kTurn + absl::Seconds(bytes / kTurnRate);
        if (charge->has_turn && now - charge->granted >= turn) room.EndTurn(charge);
      }
      if (!room.IsShort() || options.min_receive_rate <= 0) {
        looked = absl::InfinitePast();
        seen_bytes.clear();
      } else if (now - looked >= kWindow) {
        looks = LookAtSenders();
      }
      if (!waiters.empty()) due = now + kTick;
    });
    for (const Look& look : looks) {
      if (!look.too_slow.ok()) look.sender->OnTooSlow(look.too_slow);
    }
    return due;
  }

  struct Look {
    std::shared_ptr<Sender> sender;  // its end must not come under the lock
    absl::Status too_slow;           // OK: it is not
  };

  std::vector<Look> LookAtSenders() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    struct Connection {
      std::optional<int64_t> rate;  // since it was last looked at
      int64_t messages = 0;
    };
    absl::flat_hash_map<uint64_t, Connection> connections;
    const absl::Time now = options.clock->Now();  // as late as the bytes are read
    const auto seen_before = std::exchange(seen_bytes, {});
    const absl::Time last_looked = std::exchange(looked, now);
    std::vector<Look> looks;
    for (Charge* const charge : coming) {
      std::shared_ptr<Sender> sender = charge->receiving ? charge->sender.lock() : nullptr;
      if (sender == nullptr) continue;
      const uint64_t id = sender->connection_id();
      const auto [it, first] = connections.try_emplace(id);
      Connection& connection = it->second;
      if (first) {
        const std::optional<int64_t> bytes = seen_bytes[id] = sender->connection_bytes();
        const auto before = seen_before.find(id);
        if (bytes.has_value() && before != seen_before.end() && before->second.has_value()) {
          connection.rate = static_cast<int64_t>(static_cast<double>(*bytes - *before->second) /
                                                 absl::ToDoubleSeconds(now - last_looked));
        }
      }
      looks.push_back({std::move(sender), absl::OkStatus()});
      if (!connection.rate.has_value() || charge->granted > last_looked) continue;
      if (*connection.rate >= ++connection.messages * options.min_receive_rate) continue;
      if (std::exchange(charge->told, true)) continue;
      looks.back().too_slow = Refused(
          Refusal::kSlowReceive, charge->proof,
          absl::ResourceExhaustedError(absl::StrFormat(
              "messages of this connection came at %d B/s, allowed at least %d B/s for each while "
              "other calls wait; retry after %d ms",
              *connection.rate, options.min_receive_rate, retry_ms())));
    }
    return looks;
  }

  const AdmissionOptions options;
  Metrics* const metrics;

  mutable Mutex mutex;
  Room room ABSL_GUARDED_BY(mutex);
  std::atomic<bool> draining = false;            // set under the lock
  bool granting ABSL_GUARDED_BY(mutex) = false;  // a thread is inside the loop of Update
  WaiterId next_id ABSL_GUARDED_BY(mutex) = 1;
  Waiters waiters ABSL_GUARDED_BY(mutex);
  // Charges whose message came later, in the order of their grants.
  std::list<Charge*> coming ABSL_GUARDED_BY(mutex);
  // While calls wait for room: the time of the last look, and what had come by then on each
  // connection with a message.
  absl::Time looked ABSL_GUARDED_BY(mutex) = absl::InfinitePast();
  absl::flat_hash_map<uint64_t, std::optional<int64_t>> seen_bytes ABSL_GUARDED_BY(mutex);
  Alarm alarm{*options.clock, [this](absl::Time now) { return RunDue(now); }};
};

void Admission::Ticket::End::operator()(Charge* charge) const {
  State& state = *charge->state;
  state.Update([&](State::Answers&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex) {
    if (charge->place != state.coming.end()) state.coming.erase(charge->place);
    state.room.End(charge);
  });
  delete charge;
}

void Admission::Ticket::ShrinkTo(int64_t bytes) {
  if (charge_ == nullptr) return;
  charge_->receiving = false;
  const bool stays =
      charge_->part != RoomPart::kFirst && !charge_->took_turn && charge_->bytes - bytes < kFreed;
  if (stays) return;
  charge_->took_turn = false;
  State& state = *charge_->state;
  state.Update([&](State::Answers&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex) {
    state.room.Free(charge_.get(), std::min(bytes, charge_->bytes));
  });
}

int64_t Admission::Ticket::bytes() const { return charge_ == nullptr ? 0 : charge_->bytes; }

Admission::Admission(const AdmissionOptions& options, Metrics* metrics)
    : state_(std::make_unique<State>(options, metrics)) {}

Admission::~Admission() { BeginDrain(); }

Admission::Entry Admission::Enter(RoomAsk ask, Ready ready) {
  Entry entry;
  state_->Update([&](State::Answers&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mutex) {
    entry.answer = state_->Decide(ask);
    if (entry.answer.has_value()) return;
    entry.waiter = state_->next_id++;
    state_->Wait(std::move(ask), std::move(ready), entry.waiter);
  });
  return entry;
}

bool Admission::Abandon(WaiterId id) {
  if (id == 0) return false;
  State::Waiter gone;  // destroyed after the lock: its captures may call back
  bool found = false;
  state_->Update([&](State::Answers&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mutex) {
    const auto it = state_->waiters.find(id);
    found = it != state_->waiters.end();
    if (found) gone = state_->Leave(it);
  });
  return found;
}

void Admission::BeginDrain() {
  state_->Update([&](State::Answers& answers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mutex) {
    state_->draining = true;
    if (state_->metrics != nullptr) state_->metrics->Set(Gauge::kDraining, 1);
    state_->RefuseIf([](const RoomAsk& ask) { return !ask.again; }, DrainingError(),
                     Refusal::kDraining, answers);
  });
}

bool Admission::draining() const { return state_->draining; }

int64_t Admission::held_bytes() const {
  MutexLock lock(state_->mutex);
  return state_->room.held();
}

int Admission::callers() const {
  MutexLock lock(state_->mutex);
  return state_->room.holders();
}

const AdmissionOptions& Admission::options() const { return state_->options; }

}  // namespace logitd::engine

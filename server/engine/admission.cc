#include "server/engine/admission.h"

#include <algorithm>
#include <atomic>
#include <list>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "server/base/alarm.h"
#include "server/engine/metrics.h"
#include "server/engine/room.h"
#include "server/engine/sync.h"

namespace logitd::engine {
namespace {

absl::Status LateError() {
  return absl::DeadlineExceededError("the deadline passed before there was room for the message");
}

// How long a turn lasts for each byte.
constexpr double kTurnRate = 256 << 20;  // bytes per second

// A message of unknown progress may take so long for each byte.
constexpr double kUnknownRate = 64 << 20;  // bytes per second

// A charge is lowered only by more than this part of the largest message, and this many bytes. Smaller
// rests are given back when the call ends: so a small call takes the lock twice, not five times.
constexpr int64_t kFreedParts = 1024;
constexpr int64_t kMostUnfreed = int64_t{64} << 10;

}  // namespace

absl::Status DrainingError() {
  return absl::UnavailableError(
      "the server is draining: it finishes admitted calls and takes no new ones");
}

// Guarded by the admission's lock, except the atomics. Only the ticket changes `bytes`, under the lock,
// once nobody can take its room back; so it reads them without the lock.
struct Admission::Ticket::Charge {
  Room::Holder* holder = nullptr;
  RoomPart part = RoomPart::kCommon;
  int64_t bytes = 0;
  std::atomic<int64_t> turn_bytes = 0;  // 0: has no turn, or not any longer
  absl::Time turn_end;
  bool between_messages = false;
  // The room waits between messages. Whoever clears this, the ticket or the timer, decides whether the
  // call keeps it.
  std::atomic<bool> takeable = false;
  Caller caller;
  std::function<std::optional<int64_t>()> received_bytes;
  std::function<void(const absl::Status&)> too_slow;
  absl::Time granted;
  absl::Time told = absl::InfinitePast();  // that it is too slow
  std::atomic<bool> receiving = true;      // its message is not there
  std::list<Charge*>::iterator place;      // in State::charges
};

struct Admission::State {
  using Charge = Ticket::Charge;

  struct Waiter {
    RoomAsk ask;
    Ready ready;
  };
  struct Answer {
    Ready ready;
    absl::StatusOr<Ticket> answer;
  };

  State(Admission* admission, const AdmissionOptions& options, Metrics* metrics)
      : admission(admission),
        options(options),
        metrics(metrics),
        room(options.max_request_bytes, options.max_held_bytes, options.max_receiving_bytes,
             options.min_receiving_calls) {
    if (metrics != nullptr) metrics->Set(Gauge::kHeldBytesLimit, options.max_held_bytes);
  }

  int64_t Charged(const RoomAsk& ask) const {
    if (ask.bytes <= 0) return options.max_request_bytes;
    return std::min(ask.bytes, options.max_request_bytes);
  }

  Room::Ask Asked(const RoomAsk& ask) const {
    const bool needs_turn = !ask.received && ask.receiving_bytes > Room::kUnaskedBytes;
    return {.bytes = Charged(ask), .receiving = needs_turn ? ask.receiving_bytes : 0};
  }

  // The charge may stay where `bytes` are needed. Room for callers that hold nothing goes back as soon
  // as the common part has room.
  bool MayStay(const Charge& charge, int64_t bytes) const {
    const int64_t most_unfreed = std::min(options.max_request_bytes / kFreedParts, kMostUnfreed);
    return charge.part != RoomPart::kFirst && bytes <= charge.bytes &&
           charge.bytes - bytes <= most_unfreed;
  }

  void Publish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    if (metrics == nullptr) return;
    metrics->Set(Gauge::kHeldBytes, room.held());
    metrics->Set(Gauge::kWaitingCalls, room.waiting());
  }

  void Count(Refusal reason, const Caller& caller) {
    if (metrics != nullptr) metrics->CountRefused(reason, caller.proof);
  }

  Ticket MakeTicket(RoomAsk& ask, Room::Holder* holder, RoomPart part)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    auto charge = std::make_unique<Charge>();
    charge->holder = holder;
    charge->part = part;
    charge->bytes = Charged(ask);
    charge->between_messages = ask.between_messages;
    charge->takeable = ask.between_messages;
    charge->caller = ask.caller;
    charge->received_bytes = std::move(ask.received_bytes);
    charge->too_slow = std::move(ask.too_slow);
    charge->granted = options.clock->Now();
    if (const int64_t bytes = Asked(ask).receiving; bytes > 0) {
      charge->turn_bytes = bytes;
      charge->turn_end =
          charge->granted + kTurn + absl::Seconds(static_cast<double>(bytes) / kTurnRate);
      turns.insert({charge->turn_end, charge.get()});
    }
    charge->place = charges.insert(charges.end(), charge.get());
    return Ticket(admission, std::move(charge));
  }

  // Takes a call out of the line, to be answered with a refusal.
  void Refuse(std::map<WaiterId, Waiter>::iterator it, absl::Status refusal, Refusal reason,
              std::vector<Answer>& answers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    Count(reason, it->second.ask.caller);
    deadlines.erase({it->second.ask.deadline, it->first});
    room.Leave(it->first);
    answers.push_back({std::move(it->second.ready), std::move(refusal)});
    waiters.erase(it);
  }

  static void Run(std::vector<Answer>& answers) {
    for (Answer& answer : answers) answer.ready(std::move(answer.answer));
    answers.clear();
  }

  // Lets in the waiting calls that have room. One thread at a time does so. So answers go out in
  // the order of the lines, and a `ready` that drops its ticket at once does not recurse through
  // the whole line.
  void LetIn() {
    std::vector<Answer> answers;
    {
      MutexLock lock(mutex);
      if (granting || room.waiting() == 0) return Publish();
      granting = true;
    }
    while (true) {
      {
        MutexLock lock(mutex);
        RefuseLate(options.clock->Now(), answers);
        while (const auto next = room.Grant()) {
          const auto it = waiters.find(next->waiter);
          deadlines.erase({it->second.ask.deadline, it->first});
          answers.push_back(
              {std::move(it->second.ready), MakeTicket(it->second.ask, next->holder, next->part)});
          waiters.erase(it);
        }
        if (answers.empty()) granting = false;
        Publish();
        if (answers.empty()) return;
      }
      Run(answers);
    }
  }

  void RefuseLate(absl::Time now, std::vector<Answer>& answers)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    while (!deadlines.empty() && deadlines.begin()->first <= now) {
      Refuse(waiters.find(deadlines.begin()->second), LateError(), Refusal::kDeadline, answers);
    }
  }

  // Gives room back. `kept`: what is left of the charge.
  void Free(Charge* charge, int64_t kept) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    room.Free(charge->holder, &charge->part, charge->bytes - kept, kept);
    charge->bytes = kept;
  }

  // After a change that made room. True: call LetIn, without the lock.
  bool MayLetIn() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    Publish();
    return room.waiting() > 0;
  }

  void EndTurn(Charge* charge) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    if (charge->turn_bytes == 0) return;
    turns.erase({charge->turn_end, charge});
    room.EndTurn(charge->turn_bytes.exchange(0));
  }

  // Gives everything back. The charge is destroyed next.
  void End(Charge* charge) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    EndTurn(charge);
    charges.erase(charge->place);
    Free(charge, 0);
    room.End(charge->holder);
  }

  absl::Status QuotaError(const Room::Holder& holder, const RoomAsk& ask, int64_t bytes) const {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "the caller's calls hold or wait for %d bytes and this one needs %d%s, allowed %d; retry "
        "after %d ms",
        holder.held + holder.asked, bytes,
        ask.bytes > 0 ? "" : " (the largest message: it states no size)", ask.caller.max_held_bytes,
        absl::ToInt64Milliseconds(options.retry_delay)));
  }

  std::optional<absl::StatusOr<Ticket>> Decide(RoomAsk& ask) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  WaiterId Wait(RoomAsk ask, Ready ready) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  absl::Time RunDue(absl::Time now);
  absl::Time NextDue() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void Look(absl::Time now, std::vector<std::function<void()>>& calls)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void CountAllowed(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  absl::Status TooSlow(const Charge& charge, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  Admission* const admission;
  const AdmissionOptions options;
  Metrics* const metrics;

  mutable Mutex mutex;
  Room room ABSL_GUARDED_BY(mutex);
  // Of tickets that GiveBackLater ended; the timer frees them.
  std::vector<std::unique_ptr<Charge>> given_back ABSL_GUARDED_BY(mutex);
  std::atomic<bool> draining = false;            // set under the lock
  bool granting ABSL_GUARDED_BY(mutex) = false;  // a thread is inside the loop of LetIn
  WaiterId next_id ABSL_GUARDED_BY(mutex) = 1;
  std::map<WaiterId, Waiter> waiters ABSL_GUARDED_BY(mutex);
  std::set<std::pair<absl::Time, WaiterId>> deadlines ABSL_GUARDED_BY(mutex);  // finite ones
  std::list<Charge*> charges ABSL_GUARDED_BY(mutex);  // in the order of their grants
  std::set<std::pair<absl::Time, Charge*>> turns ABSL_GUARDED_BY(mutex);  // by their end
  // Since when calls have waited for room without a break; InfiniteFuture: none waits.
  absl::Time waiting_since ABSL_GUARDED_BY(mutex) = absl::InfiniteFuture();
  absl::Time look_due ABSL_GUARDED_BY(mutex) = absl::InfiniteFuture();  // for slow messages
  Alarm alarm{*options.clock, [this](absl::Time now) { return RunDue(now); }};
};

// Does what is due. Returns when more will be.
absl::Time Admission::State::RunDue(absl::Time now) {
  std::vector<Answer> answers;
  std::vector<std::function<void()>> calls;
  {
    MutexLock lock(mutex);
    for (const auto& charge : std::exchange(given_back, {})) End(charge.get());
    RefuseLate(now, answers);
    while (!turns.empty() && turns.begin()->first <= now) EndTurn(turns.begin()->second);
    if (!room.IsShort()) {
      waiting_since = look_due = absl::InfiniteFuture();
    } else if (waiting_since == absl::InfiniteFuture()) {
      waiting_since = look_due = now;
    }
    if (look_due <= now) {
      Look(now, calls);
      look_due = now + kReceiveTick;
    }
    Publish();
  }
  Run(answers);
  for (const auto& call : calls) call();
  LetIn();
  MutexLock lock(mutex);
  return NextDue();
}

absl::Time Admission::State::NextDue() const {
  if (!given_back.empty()) return absl::InfinitePast();
  absl::Time due = look_due;
  if (!deadlines.empty()) due = std::min(due, deadlines.begin()->first);
  if (room.waiting() > 0 && !turns.empty()) due = std::min(due, turns.begin()->first);
  // Calls begin to wait for room: from now on messages must make progress.
  if (waiting_since == absl::InfiniteFuture() && room.IsShort()) due = absl::InfinitePast();
  return due;
}

// Counts, for each caller whose connection reports its bytes, how many messages its progress
// suffices for: Holder::receiving. The window of a caller starts again where it is over.
void Admission::State::CountAllowed(absl::Time now) {
  for (Charge* charge : charges) charge->holder->receiving = -1;  // not counted yet
  for (Charge* charge : charges) {
    Room::Holder& holder = *charge->holder;
    if (!charge->receiving || charge->received_bytes == nullptr || holder.receiving >= 0) continue;
    const int64_t now_ns = absl::ToUnixNanos(now);
    const int64_t begin_ns = absl::ToUnixNanos(waiting_since);
    holder.receiving = static_cast<int>(charges.size());
    const bool begins = holder.seen_ns < begin_ns;
    const double seconds = static_cast<double>(now_ns - holder.seen_ns) * 1e-9;
    if (!begins && seconds < absl::ToDoubleSeconds(kReceiveWindow)) continue;
    const std::optional<int64_t> bytes = charge->received_bytes();
    if (!bytes.has_value()) {
      holder.seen_ns = 0;  // its window begins again at the next look
      continue;
    }
    const int64_t more = *bytes - std::exchange(holder.seen_bytes, *bytes);
    if (begins) {
      holder.seen_ns = now_ns;
      continue;
    }
    holder.rate = static_cast<double>(more) / seconds;
    holder.seen_ns = now_ns;
    holder.receiving =
        static_cast<int>(std::min(holder.rate / static_cast<double>(options.min_receive_rate),
                                  static_cast<double>(charges.size())));
  }
}

// OK: the call may go on.
absl::Status Admission::State::TooSlow(const Charge& charge, absl::Time now) {
  const int64_t retry_ms = absl::ToInt64Milliseconds(options.retry_delay);
  if (charge.received_bytes != nullptr) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "messages of this connection came at %d B/s, allowed at least %d B/s for each while other "
        "calls wait; retry after %d ms",
        static_cast<int64_t>(charge.holder->rate), options.min_receive_rate, retry_ms));
  }
  const absl::Duration allowed =
      kReceiveWindow + absl::Seconds(static_cast<double>(charge.bytes) / kUnknownRate);
  if (now - charge.granted < allowed || now - waiting_since < kReceiveWindow) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(absl::StrFormat(
      "message not received within %d ms, allowed %d ms while other calls wait; retry after %d ms",
      absl::ToInt64Milliseconds(now - charge.granted), absl::ToInt64Milliseconds(allowed),
      retry_ms));
}

// Finds messages that come too slowly while calls wait.
void Admission::State::Look(absl::Time now, std::vector<std::function<void()>>& calls) {
  if (options.min_receive_rate > 0) CountAllowed(now);
  // In the order of their grants: where a caller's progress suffices for some, the newest end.
  for (Charge* charge : charges) {
    if (!charge->receiving) continue;
    if (charge->takeable) {
      if (now - charge->granted >= kReceiveWindow && charge->takeable.exchange(false)) {
        Free(charge, 0);
      }
      continue;
    }
    if (options.min_receive_rate <= 0 || charge->too_slow == nullptr) continue;
    if (now - charge->granted < kReceiveWindow) continue;
    if (charge->received_bytes != nullptr && charge->holder->receiving-- > 0) continue;
    const absl::Status why = TooSlow(*charge, now);
    if (why.ok()) continue;
    if (now - charge->told < kAgain) continue;
    if (std::exchange(charge->told, now) == absl::InfinitePast()) {
      Count(Refusal::kSlowReceive, charge->caller);
    }
    calls.push_back([too_slow = charge->too_slow, why] { too_slow(why); });
  }
}

Admission::Ticket::Ticket() = default;

Admission::Ticket::Ticket(Admission* admission, std::unique_ptr<Charge> charge)
    : admission_(admission), charge_(std::move(charge)) {}

Admission::Ticket::Ticket(Ticket&& other) noexcept = default;

Admission::Ticket& Admission::Ticket::operator=(Ticket&& other) noexcept {
  if (this != &other) {
    const Ticket old = std::move(*this);
    admission_ = other.admission_;
    charge_ = std::move(other.charge_);
  }
  return *this;
}

Admission::Ticket::~Ticket() {
  if (charge_ == nullptr) return;
  State& state = *admission_->state_;
  bool let_in = false;
  {
    MutexLock lock(state.mutex);
    state.End(charge_.get());
    let_in = state.MayLetIn();
  }
  if (let_in) state.LetIn();
}

bool Admission::Ticket::Comes(RoomAsk ask) {
  State& state = *admission_->state_;
  const bool kept = !charge_->between_messages || charge_->takeable.exchange(false);
  if (!kept || charge_->bytes < state.Charged(ask)) {
    *this = Ticket();
    return false;
  }
  if (charge_->between_messages && !ask.received) {
    MutexLock lock(state.mutex);
    charge_->granted = admission_->options().clock->Now();
    charge_->received_bytes = std::move(ask.received_bytes);
    charge_->too_slow = std::move(ask.too_slow);
  }
  return true;
}

bool Admission::Ticket::Received(int64_t bytes) {
  if (charge_ == nullptr) return false;
  State& state = *admission_->state_;
  bytes = std::min(bytes, state.options.max_request_bytes);
  if (charge_->turn_bytes == 0 && state.MayStay(*charge_, bytes)) {
    charge_->receiving = false;
    return true;
  }
  bool enough = false;
  bool let_in = false;
  {
    MutexLock lock(state.mutex);
    charge_->receiving = false;
    state.EndTurn(charge_.get());
    enough = bytes <= charge_->bytes;
    state.Free(charge_.get(), enough ? bytes : 0);
    let_in = state.MayLetIn();
  }
  if (!enough) *this = Ticket();
  if (let_in) state.LetIn();
  return enough;
}

void Admission::Ticket::ShrinkTo(int64_t bytes) {
  if (charge_ == nullptr || bytes >= charge_->bytes) return;
  State& state = *admission_->state_;
  if (state.MayStay(*charge_, bytes)) return;
  bool let_in = false;
  {
    MutexLock lock(state.mutex);
    state.Free(charge_.get(), bytes);
    let_in = state.MayLetIn();
  }
  if (let_in) state.LetIn();
}

void Admission::Ticket::GiveBackLater() {
  if (charge_ == nullptr) return;
  State& state = *admission_->state_;
  MutexLock lock(state.mutex);
  state.given_back.push_back(std::move(charge_));
  state.alarm.RunBy(absl::InfinitePast());
}

int64_t Admission::Ticket::bytes() const { return charge_ == nullptr ? 0 : charge_->bytes; }

Admission::Admission(const AdmissionOptions& options, Metrics* metrics)
    : state_(std::make_unique<State>(this, options, metrics)) {}

Admission::~Admission() {
  BeginDrain();
  std::vector<State::Answer> answers;
  {
    MutexLock lock(state_->mutex);
    while (!state_->waiters.empty()) {
      state_->Refuse(state_->waiters.begin(), DrainingError(), Refusal::kDraining, answers);
    }
  }
  state_->Run(answers);
}

std::optional<absl::StatusOr<Admission::Ticket>> Admission::TryEnter(RoomAsk& ask) {
  MutexLock lock(state_->mutex);
  auto answer = state_->Decide(ask);
  state_->Publish();
  return answer;
}

Admission::WaiterId Admission::Enter(RoomAsk ask, Ready ready) {
  State& state = *state_;
  std::optional<absl::StatusOr<Ticket>> answer;
  WaiterId id = 0;
  {
    MutexLock lock(state.mutex);
    answer = state.Decide(ask);
    if (!answer.has_value()) id = state.Wait(std::move(ask), std::move(ready));
    state.Publish();
  }
  if (answer.has_value()) {
    ready(*std::move(answer));
  } else {
    state.LetIn();  // it may fit into a part that the calls before it cannot use
  }
  return id;
}

// nullopt: the call has to wait.
std::optional<absl::StatusOr<Admission::Ticket>> Admission::State::Decide(RoomAsk& ask) {
  const Room::Ask asked = Asked(ask);
  if (draining && !ask.received) {
    Count(Refusal::kDraining, ask.caller);
    return DrainingError();
  }
  if (ask.deadline != absl::InfiniteFuture() && ask.deadline <= options.clock->Now()) {
    Count(Refusal::kDeadline, ask.caller);
    return LateError();
  }
  Room::Holder* const holder = room.HolderOf(ask.caller);
  const int64_t quota = ask.caller.max_held_bytes;
  if (quota > 0 && holder->held + holder->asked + asked.bytes > quota) {
    Count(Refusal::kQuotaBytes, ask.caller);
    absl::Status error = QuotaError(*holder, ask, asked.bytes);
    room.Forget(holder);
    return error;
  }
  if (const auto part = room.TryTake(holder, asked); part.has_value()) {
    return MakeTicket(ask, holder, *part);
  }
  const int free_places = options.max_waiting_calls - room.waiting();
  const bool has_room = room.held() + room.asked() + asked.bytes <= options.max_held_bytes;
  if (holder->waiting < free_places || ask.received || has_room) {
    room.Forget(holder);  // Wait makes it again
    return std::nullopt;
  }
  Count(free_places > 0 ? Refusal::kCallerShare : Refusal::kLineFull, ask.caller);
  absl::Status error = absl::ResourceExhaustedError(absl::StrFormat(
      "held %d of %d bytes, %d of %d calls waiting, %d of this connection; retry after %d ms",
      room.held(), options.max_held_bytes, room.waiting(), options.max_waiting_calls,
      holder->waiting, absl::ToInt64Milliseconds(options.retry_delay)));
  room.Forget(holder);
  return error;
}

Admission::WaiterId Admission::State::Wait(RoomAsk ask, Ready ready) {
  const WaiterId id = next_id++;
  room.Wait(room.HolderOf(ask.caller), ask.caller.priority, id, Asked(ask));
  const absl::Time deadline = ask.deadline;
  waiters.emplace(id, Waiter{std::move(ask), std::move(ready)});
  if (deadline != absl::InfiniteFuture()) deadlines.emplace(deadline, id);
  alarm.RunBy(NextDue());
  return id;
}

bool Admission::Abandon(WaiterId id) {
  State::Waiter gone;  // destroyed after the lock: its captures may call back
  {
    MutexLock lock(state_->mutex);
    auto it = state_->waiters.find(id);
    if (it == state_->waiters.end()) return false;
    gone = std::move(it->second);
    state_->deadlines.erase({gone.ask.deadline, id});
    state_->room.Leave(id);
    state_->waiters.erase(it);
  }
  state_->LetIn();  // calls that waited for this one may have room
  return true;
}

void Admission::BeginDrain() {
  std::vector<State::Answer> answers;
  {
    MutexLock lock(state_->mutex);
    if (!state_->draining && state_->metrics != nullptr) state_->metrics->Set(Gauge::kDraining, 1);
    state_->draining = true;
    for (auto it = state_->waiters.begin(); it != state_->waiters.end();) {
      const auto waiter = it++;
      if (waiter->second.ask.received) continue;
      state_->Refuse(waiter, DrainingError(), Refusal::kDraining, answers);
    }
    state_->Publish();
  }
  state_->Run(answers);
  state_->LetIn();
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

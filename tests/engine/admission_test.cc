#include "server/engine/admission.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace logitd::engine {
namespace {

// One call and the answer it got.
class OneCall {
 public:
  void Enter(Admission& admission, RoomAsk ask = {}) {
    id_ = admission.Enter(std::move(ask), [this](absl::StatusOr<Admission::Ticket> answer) {
      std::lock_guard<std::mutex> lock(mutex_);
      ++answers_;
      status_ = answer.status();
      if (answer.ok()) ticket_ = *std::move(answer);
      changed_.notify_all();
    });
  }
  absl::Status Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return answers_ > 0; });
    return status_;
  }
  int answers() {
    std::lock_guard<std::mutex> lock(mutex_);
    return answers_;
  }
  Admission::WaiterId id() const { return id_; }
  Admission::Ticket& ticket() { return ticket_; }
  bool admitted() { return answers() > 0 && Wait().ok(); }
  void Leave() {
    Admission::Ticket ticket;  // ends after the lock: that lets others in
    std::lock_guard<std::mutex> lock(mutex_);
    ticket = std::move(ticket_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int answers_ = 0;
  absl::Status status_;
  Admission::Ticket ticket_;
  Admission::WaiterId id_ = 0;
};

// A script of words "VERB:CALLER[:NUMBER]". Each call is of a caller of its own. The admission has room for two messages of 100 bytes
// and a line of three calls.
//   enter:a[:MS]  a enters, with a deadline MS from now    leave:a    a destroys its ticket
//   shrink:a:N    a's message holds N bytes                abandon:a  a leaves the line
//   late:a        waits until a gets DEADLINE_EXCEEDED     drain:-    the drain begins
// `answers`: the calls that got an answer by the end, by name. `held`: the bytes charged then.
struct Scenario {
  const char* name;
  const char* script;
  const char* answers;
  int64_t held;
};

void PrintTo(const Scenario& scenario, std::ostream* out) { *out << scenario.name; }

const Scenario kScenarios[] = {
    {"room_is_given_at_once", "enter:a enter:b", "a:OK b:OK", 200},
    {"calls_without_room_wait", "enter:a enter:b enter:c", "a:OK b:OK", 200},
    {"room_goes_to_the_first_in_line", "enter:a enter:b enter:c enter:d leave:a", "a:OK b:OK c:OK",
     200},
    {"a_later_call_does_not_overtake", "enter:a enter:b enter:c shrink:a:0 enter:d leave:c",
     "a:OK b:OK c:OK d:OK", 200},
    {"a_small_message_gives_room_back", "enter:a enter:b enter:c shrink:a:40 shrink:b:60",
     "a:OK b:OK c:OK", 200},
    {"a_call_waits_for_room_for_a_whole_message", "enter:a enter:b enter:c shrink:a:40 shrink:b:61",
     "a:OK b:OK", 101},
    {"room_is_given_back_once", "enter:a shrink:a:40 shrink:a:40 leave:a leave:a enter:b",
     "a:OK b:OK", 100},
    {"a_call_that_abandons_gets_no_answer", "enter:a enter:b enter:c enter:d abandon:c leave:a",
     "a:OK b:OK d:OK", 200},
    {"a_full_line_refuses", "enter:a enter:b enter:c enter:d enter:e enter:f",
     "a:OK b:OK f:RESOURCE_EXHAUSTED", 200},
    {"a_line_that_moved_on_takes_more", "enter:a enter:b enter:c enter:d enter:e leave:a enter:f",
     "a:OK b:OK c:OK", 200},
    {"a_passed_deadline_does_not_enter", "enter:a:-1", "a:DEADLINE_EXCEEDED", 0},
    {"a_deadline_ends_the_wait_without_room", "enter:a enter:b enter:c:60000 enter:d:10 late:d",
     "a:OK b:OK d:DEADLINE_EXCEEDED", 200},
    {"an_earlier_deadline_ends_its_call_first",
     "enter:a enter:b enter:c:30 enter:d:5 late:d late:c",
     "a:OK b:OK c:DEADLINE_EXCEEDED d:DEADLINE_EXCEEDED", 200},
    {"a_drain_answers_waiting_and_later_calls", "enter:a enter:b enter:c drain:- enter:d leave:a",
     "a:OK b:OK c:UNAVAILABLE d:UNAVAILABLE", 100},
};

class AdmissionScenarioTest : public ::testing::TestWithParam<Scenario> {};

TEST_P(AdmissionScenarioTest, Runs) {
  std::map<std::string, OneCall> callers;
  std::set<std::string> asked;  // those that get an answer in the end
  Admission admission({.max_request_bytes = 100, .max_held_bytes = 200, .max_waiting_calls = 3},
                      nullptr);
  std::istringstream words(GetParam().script);
  for (std::string word; words >> word;) {
    std::istringstream parts(word);
    std::string verb, name, number;
    std::getline(parts, verb, ':');
    std::getline(parts, name, ':');
    std::getline(parts, number, ':');
    OneCall& caller = callers[name];
    if (verb == "enter") {
      const absl::Time deadline = number.empty()
                                      ? absl::InfiniteFuture()
                                      : SteadyNow() + absl::Milliseconds(std::stoi(number));
      const uint64_t id = static_cast<uint64_t>(name[0]);
      asked.insert(name);
      caller.Enter(admission, {.caller = {.id = id}, .deadline = deadline});
    } else if (verb == "leave") {
      caller.Leave();
    } else if (verb == "shrink") {
      caller.ticket().ShrinkTo(std::stoi(number));
    } else if (verb == "abandon") {
      EXPECT_TRUE(admission.Abandon(caller.id()));
      EXPECT_FALSE(admission.Abandon(caller.id()));
      asked.erase(name);
    } else if (verb == "late") {
      EXPECT_TRUE(absl::IsDeadlineExceeded(caller.Wait()));
    } else if (verb == "drain") {
      EXPECT_FALSE(admission.draining());
      admission.BeginDrain();
      EXPECT_TRUE(admission.draining());
    } else {
      FAIL() << "unknown word " << word;
    }
  }
  std::string answers;
  for (auto& [name, caller] : callers) {
    if (caller.answers() == 0) continue;
    EXPECT_EQ(caller.answers(), 1) << name;
    absl::StrAppend(&answers, answers.empty() ? "" : " ", name, ":",
                    absl::StatusCodeToString(caller.Wait().code()));
  }
  EXPECT_EQ(answers, GetParam().answers);
  EXPECT_EQ(admission.held_bytes(), GetParam().held);
  for (auto& [name, caller] : callers) caller.Leave();
  admission.BeginDrain();
  for (const std::string& name : asked) (void)callers[name].Wait();  // another thread may answer
  for (auto& [name, caller] : callers) caller.Leave();
  EXPECT_EQ(admission.held_bytes(), 0);
}

INSTANTIATE_TEST_SUITE_P(All, AdmissionScenarioTest, ::testing::ValuesIn(kScenarios),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(AdmissionTest, ARefusalNamesBothLimitsAndTheDelay) {
  Admission admission({.max_request_bytes = int64_t{64} << 20,
                       .max_held_bytes = int64_t{1} << 30,
                       .max_waiting_calls = 1024},
                      nullptr);
  std::deque<OneCall> calls(15 + 1024 + 1);
  uint64_t id = 0;
  for (OneCall& call : calls) call.Enter(admission, {.caller = {.id = ++id}});
  EXPECT_EQ(calls.back().Wait().message(),
            "held 1006632960 of 1073741824 bytes, 1024 of 1024 calls waiting, 0 of this "
            "connection; retry after 50 ms");
  admission.BeginDrain();
  for (OneCall& call : calls) call.Leave();
}

TEST(AdmissionTest, TryEnterAnswersOnlyWhatIsKnownAtOnce) {
  Admission admission({.max_request_bytes = 100, .max_held_bytes = 100}, nullptr);
  RoomAsk ask = {.caller = {.id = 1}, .bytes = 80};
  auto first = admission.TryEnter(ask);
  ASSERT_TRUE(first.has_value() && first->ok());
  EXPECT_EQ(admission.held_bytes(), 80);
  RoomAsk second = {.caller = {.id = 2}, .bytes = 80};
  EXPECT_FALSE(admission.TryEnter(second).has_value());
  OneCall waits;
  waits.Enter(admission, second);
  EXPECT_EQ(waits.answers(), 0);
  first.reset();
  EXPECT_TRUE(waits.Wait().ok());
  admission.BeginDrain();
  const auto refused = admission.TryEnter(ask);
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->status(), DrainingError());
}

TEST(AdmissionTest, LessThanAThousandthOfTheLargestMessageStaysCharged) {
  constexpr int64_t kLargest = int64_t{1} << 20;
  Admission admission({.max_request_bytes = kLargest, .max_held_bytes = 4 * kLargest}, nullptr);
  OneCall call;
  call.Enter(admission, {.bytes = 5000});
  ASSERT_TRUE(call.admitted());
  EXPECT_TRUE(call.ticket().Received(4000));
  EXPECT_EQ(admission.held_bytes(), 5000);
  call.ticket().ShrinkTo(3977);
  EXPECT_EQ(admission.held_bytes(), 5000) << "1023 bytes";
  call.ticket().ShrinkTo(3975);
  EXPECT_EQ(admission.held_bytes(), 3975);
  call.Leave();
  EXPECT_EQ(admission.held_bytes(), 0);
}

TEST(AdmissionTest, RoomMadeOnAnotherThreadLetsTheNextCallIn) {
  Admission admission({.max_request_bytes = 1, .max_held_bytes = 1}, nullptr);
  OneCall a, b;
  a.Enter(admission);
  b.Enter(admission);
  EXPECT_NE(b.id(), 0u);
  std::thread([ticket = std::move(a.ticket())] {}).join();
  EXPECT_TRUE(b.Wait().ok());
  EXPECT_FALSE(admission.Abandon(b.id()));
  b.Leave();
}

TEST(AdmissionTest, GiveBackLaterLetsCallsInOnAnotherThread) {
  Admission admission({.max_request_bytes = 1, .max_held_bytes = 1}, nullptr);
  OneCall first;
  first.Enter(admission);
  std::atomic<std::thread::id> told;
  uint64_t id = 0;
  admission.Enter({.caller = {.id = ++id}}, [&](absl::StatusOr<Admission::Ticket> answer) {
    EXPECT_TRUE(answer.ok());
    told = std::this_thread::get_id();
  });
  Admission::Ticket ticket = std::move(first.ticket());
  ticket.GiveBackLater();
  EXPECT_EQ(ticket.bytes(), 0);
  ticket.GiveBackLater();  // nothing is left to give back
  while (told.load() == std::thread::id()) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_NE(told.load(), std::this_thread::get_id());
}

TEST(AdmissionTest, CallsThatDropTheirTicketsAtOnceDoNotRecurse) {
  Admission admission({.max_request_bytes = 1, .max_held_bytes = 1, .max_waiting_calls = 5000},
                      nullptr);
  OneCall first;
  first.Enter(admission);
  int depth = 0, deepest = 0, answered = 0;
  uint64_t id = 0;
  for (int i = 0; i < 5000; ++i) {
    admission.Enter({.caller = {.id = ++id}}, [&](absl::StatusOr<Admission::Ticket> answer) {
      deepest = std::max(deepest, ++depth);
      EXPECT_TRUE(answer.ok());
      answer = absl::UnknownError("dropped");
      ++answered;
      --depth;
    });
  }
  first.Leave();
  EXPECT_EQ(answered, 5000);
  EXPECT_EQ(deepest, 1);
  EXPECT_EQ(admission.held_bytes(), 0);
}

// Calls enter, shrink, leave, abandon and miss deadlines on many threads: the charges never exceed
// the limit, every call gets at most one answer, and no charge is left.
TEST(AdmissionTest, AStormNeverHoldsMoreThanAllowed) {
  constexpr int kThreads = 4;
  constexpr int kCalls = 1500;
  constexpr int64_t kMessage = 100;
  constexpr int64_t kLimit = 350;
  for (const uint32_t seed : {1u, 2u, 3u}) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    struct Call {
      std::atomic<int> told = 0;
      std::atomic<bool> abandoned = false;
    };
    std::deque<Call> calls(kThreads * kCalls);
    // The callers' own count of what they hold. Raised after a ticket comes and lowered before it
    // goes, so it is never more than what is charged.
    std::atomic<int64_t> held = 0;
    std::atomic<int64_t> most = 0;
    std::atomic<int> granted = 0;
    std::mutex mutex;
    std::vector<Admission::Ticket> tickets;
    {
      Admission admission(
          {.max_request_bytes = kMessage, .max_held_bytes = kLimit, .max_waiting_calls = 8},
          nullptr);
      std::vector<std::thread> threads;
      for (int t = 0; t < kThreads; ++t) {
        threads.emplace_back([&, t] {
          std::mt19937 random(seed * 100 + static_cast<uint32_t>(t));
          const auto below = [&](uint32_t n) { return static_cast<int64_t>(random() % n); };
          for (int i = 0; i < kCalls; ++i) {
            Call& call = calls[static_cast<size_t>(t * kCalls + i)];
            const absl::Time deadline = below(2) == 0
                                            ? absl::InfiniteFuture()
                                            : SteadyNow() + absl::Microseconds(below(300));
            const Admission::WaiterId id =
                admission.Enter({.caller = {.id = random() % 3},
                                 .deadline = deadline,
                                 .bytes = 1 + below(2 * kMessage)},
                                [&](absl::StatusOr<Admission::Ticket> answer) {
                                  ++call.told;
                                  if (!answer.ok()) return;
                                  ++granted;
                                  const int64_t now = held += answer->bytes();
                                  int64_t seen = most;
                                  while (now > seen && !most.compare_exchange_weak(seen, now)) {
                                  }
                                  std::lock_guard<std::mutex> lock(mutex);
                                  tickets.push_back(*std::move(answer));
                                });
            if (id != 0 && below(4) == 0) call.abandoned = admission.Abandon(id);
            Admission::Ticket ticket;
            {
              std::lock_guard<std::mutex> lock(mutex);
              if (!tickets.empty()) {
                ticket = std::move(tickets.back());
                tickets.pop_back();
              }
            }
            if (ticket.bytes() > 0 && below(2) == 0) {
              const int64_t shrunk = below(static_cast<uint32_t>(ticket.bytes()) + 1);
              held -= ticket.bytes() - shrunk;
              ticket.ShrinkTo(shrunk);
            }
            if (below(2) == 0) std::this_thread::yield();
            held -= ticket.bytes();
            if (admission.held_bytes() > kLimit) most = kLimit + 1;
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
      admission.BeginDrain();
      tickets.clear();
      EXPECT_EQ(admission.held_bytes(), 0);
    }
    EXPECT_LE(most, kLimit);
    EXPECT_GT(granted, 0);
    for (const Call& call : calls) ASSERT_EQ(call.told, call.abandoned ? 0 : 1);
  }
}

}  // namespace
}  // namespace logitd::engine

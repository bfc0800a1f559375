// Who gets room for a message, when, and what the others are told.
#include "server/engine/admission.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cctype>
#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/engine/metrics.h"
#include "tests/engine/test_job.h"
#include "tests/manual_clock.h"

namespace logitd::engine {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

// A connection, and one message that comes on it.
struct Wire {
  uint64_t id;
  int64_t bytes = 0;
  bool unread = false;
};
class Message final : public Sender {
 public:
  Message(const Wire* wire, std::function<void(const absl::Status&)> too_slow)
      : wire_(wire), too_slow_(std::move(too_slow)) {}
  uint64_t connection_id() const override { return wire_->id; }
  std::optional<int64_t> connection_bytes() const override {
    return wire_->unread ? std::nullopt : std::optional<int64_t>(wire_->bytes);
  }
  void OnTooSlow(const absl::Status& why) override { too_slow_(why); }

 private:
  const Wire* const wire_;
  const std::function<void(const absl::Status&)> too_slow_;
};

// Runs words VERB[:CALLER[*TIMES]][:NUMBER], and logs what calls are told. NUMBER is in units of
// bytes, or milliseconds; without it a call asks for a largest message.
//   enter  a call whose message is there      again  one that was let in before
//   send   a call whose message comes         pass   a call that leaves as soon as it is let in
//   until  a call with a deadline             leave  the caller's oldest ticket is destroyed
//   shrink that ticket holds less             abandon  the caller's oldest call leaves the line
//   come   bytes come on its connection       unread, read  the server is late to read it, or not
//   ms     time passes                        drain
// Log: "a" a call of a is let in, "!a" RESOURCE_EXHAUSTED, "~a" DEADLINE_EXCEEDED, "-a"
// UNAVAILABLE, "^a2" the second call of a is too slow; "a*3": three times. Capital letters: batch
// calls of that caller. w has twice the weight of others, q a quota of 150 units.
class Gate {
 public:
  explicit Gate(AdmissionOptions options, int64_t unit = 1, Metrics* metrics = nullptr)
      : unit_(unit), largest_(options.max_request_bytes) {
    options.clock = &clock_;
    admission_.emplace(options, metrics);
  }
  ~Gate() {
    admission_->BeginDrain();
    for (auto& [_, calls] : calls_) {
      for (Call& call : calls) call.ticket = {};
    }
    EXPECT_EQ(admission_->held_bytes(), 0);
    EXPECT_EQ(admission_->callers(), 0);
    for (const auto& [_, calls] : calls_) {
      for (const Call& call : calls) EXPECT_EQ(call.answers, call.abandoned ? 0 : 1);
    }
  }

  void Run(const std::string& script) {
    for (const absl::string_view word : absl::StrSplit(script, ' ')) {
      std::vector<std::string> parts = absl::StrSplit(word, ':');
      const std::string verb = parts[0];
      if (verb == "ms" || verb == "drain") parts.insert(parts.begin() + 1, "-");
      const std::vector<std::string> who = absl::StrSplit(parts[1], '*');
      const int times = who.size() > 1 ? std::stoi(who[1]) : 1;
      const std::optional<int64_t> number =
          parts.size() > 2 ? std::optional<int64_t>(std::stoi(parts[2])) : std::nullopt;
      for (int i = 0; i < times; ++i) Do(verb, who[0][0], number);
    }
  }
  std::string log() const {
    std::vector<std::string> runs;
    for (size_t i = 0; i < log_.size();) {
      size_t end = i;
      while (end < log_.size() && log_[end] == log_[i]) ++end;
      runs.push_back(end - i > 1 ? absl::StrCat(log_[i], "*", end - i) : log_[i]);
      i = end;
    }
    return absl::StrJoin(runs, " ");
  }
  Admission& admission() { return *admission_; }
  int64_t held() const { return admission_->held_bytes() / unit_; }
  const absl::Status& last() const { return last_; }  // refusal, or reason for being too slow

 private:
  struct Call {
    Admission::WaiterId waiter = 0;
    Admission::Ticket ticket;
    std::shared_ptr<Message> message;
    int answers = 0;
    bool abandoned = false;
  };

  void Do(const std::string& verb, char caller, std::optional<int64_t> number) {
    Wire& wire = wires_.try_emplace(caller, Wire{static_cast<uint64_t>(caller)}).first->second;
    if (verb == "ms") {
      for (int64_t ms = 0; ms < *number; ms += 5) clock_.Advance(absl::Milliseconds(5));
    } else if (verb == "drain") {
      admission_->BeginDrain();
      EXPECT_TRUE(admission_->draining());
    } else if (verb == "come") {
      wire.bytes += *number * unit_;
    } else if (verb == "read" || verb == "unread") {
      wire.unread = verb == "unread";
    } else if (verb == "leave") {
      First(caller, [](const Call& call) { return call.ticket.bytes() > 0; }).ticket = {};
    } else if (verb == "shrink") {
      First(caller, [](const Call& call) {
        return call.ticket.bytes() > 0;
      }).ticket.ShrinkTo(*number * unit_);
    } else if (verb == "abandon") {
      Call& call = First(caller, [](const Call& call) { return call.answers == 0; });
      EXPECT_TRUE(admission_->Abandon(call.waiter));
      EXPECT_FALSE(admission_->Abandon(call.waiter));
      call.abandoned = true;
    } else {
      Enter(verb, caller, number);
    }
  }
  template <typename Is>
  Call& First(char caller, Is is) {
    for (Call& call : calls_[caller]) {
      if (is(call)) return call;
    }
    ADD_FAILURE() << "no such call of " << caller;
    return calls_[caller].emplace_back();
  }

  void Enter(const std::string& verb, char name, std::optional<int64_t> number) {
    const auto id = static_cast<uint64_t>(std::tolower(name));
    RoomAsk ask = {.caller = {.id = id, .weight = name == 'w' ? 2.0 : 1.0}, .bytes = largest_};
    if (std::isupper(name) != 0) ask.caller.priority = Priority::kBatch;
    if (name == 'q') ask.caller.max_held_bytes = 150 * unit_;
    if (verb == "until") {
      ask.deadline = clock_.Now() + absl::Milliseconds(*number);
    } else if (number.has_value()) {
      ask.bytes = *number * unit_;
    }
    ask.again = verb == "again";
    Call& call = calls_[name].emplace_back();
    if (verb == "send") {
      call.message = std::make_shared<Message>(
          &wires_.at(name),
          [this, told = absl::StrCat("^", std::string(1, name), calls_[name].size())](
              const absl::Status& why) {
            EXPECT_TRUE(absl::IsResourceExhausted(why)) << why;
            last_ = why;
            log_.push_back(told);
          });
      ask.sender = call.message;
    }
    const bool passes = verb == "pass";
    auto ready = [this, name, passes, &call](absl::StatusOr<Admission::Ticket> answer) {
      ++call.answers;
      Log(name, answer.status());
      if (answer.ok() && !passes) call.ticket = *std::move(answer);
    };
    auto entry = admission_->Enter(std::move(ask), ready);
    call.waiter = entry.waiter;
    if (entry.answer.has_value()) ready(*std::move(entry.answer));
  }
  void Log(char name, const absl::Status& status) {
    std::string word(1, name);
    if (absl::IsResourceExhausted(status)) word.insert(0, "!");
    if (absl::IsDeadlineExceeded(status)) word.insert(0, "~");
    if (absl::IsUnavailable(status)) word.insert(0, "-");
    if (!status.ok()) last_ = status;
    log_.push_back(std::move(word));
  }

  const int64_t unit_;
  const int64_t largest_;
  ManualClock clock_;
  std::map<char, Wire> wires_;
  std::map<char, std::deque<Call>> calls_;
  std::vector<std::string> log_;
  absl::Status last_;
  std::optional<Admission> admission_;
};

const AdmissionOptions kTwo = {
    .max_request_bytes = 100 * kMiB, .max_held_bytes = 200 * kMiB, .max_waiting_calls = 3};
const AdmissionOptions kMany = {.max_request_bytes = 64 * kMiB, .max_held_bytes = 1024 * kMiB};
const AdmissionOptions kTurns = {.max_request_bytes = 64 * kMiB,
                                 .max_held_bytes = 1024 * kMiB,
                                 .max_waiting_calls = 4,
                                 .max_receiving_bytes = 4 * kMiB};
const AdmissionOptions kSenders = {
    .max_request_bytes = 100, .max_held_bytes = 300, .min_receive_rate = 4};

struct Scenario {
  const AdmissionOptions& options;
  const char* name;
  const char* script;
  const char* log;
  int64_t held;  // at the end, in units
};
void PrintTo(const Scenario& scenario, std::ostream* out) { *out << scenario.name; }

const Scenario kScenarios[] = {
    // Room for two messages of 100 MiB, and a line of three calls.
    {kTwo, "room_is_given_at_once", "enter:a enter:b", "a b", 200},
    {kTwo, "calls_without_room_wait", "enter:a enter:b enter:c", "a b", 200},
    {kTwo, "room_goes_to_the_first_in_line", "enter:a enter:b enter:c enter:d leave:a", "a b c",
     200},
    {kTwo, "a_later_call_does_not_overtake", "enter:a enter:b enter:c shrink:a:1 enter:d:50", "a b",
     101},
    {kTwo, "room_is_given_in_order", "enter:a enter:b enter:c enter:d leave:a leave:b", "a b c d",
     200},
    {kTwo, "a_small_message_gives_room_back", "enter:a enter:b enter:c shrink:a:40 shrink:b:60",
     "a b c", 200},
    {kTwo, "a_call_waits_for_all_its_room", "enter:a enter:b enter:c shrink:a:40 shrink:b:61",
     "a b", 101},
    {kTwo, "no_more_than_a_largest_message_is_charged", "enter:a:150 enter:b:150", "a b", 200},
    {kTwo, "room_is_given_back_once", "enter:a shrink:a:40 shrink:a:60 leave:a enter:b", "a b",
     100},
    {kTwo, "a_call_that_abandons_gets_no_answer",
     "enter:a enter:b enter:c enter:d abandon:c leave:a", "a b d", 200},
    {kTwo, "who_waited_for_a_call_that_left_gets_in",
     "enter:a enter:b:50 enter:c enter:d:50 abandon:c", "a b d", 200},
    {kTwo, "a_full_line_refuses", "enter:a enter:b enter:c enter:d enter:e enter:f", "a b !f", 200},
    {kTwo, "a_line_that_moved_on_takes_more",
     "enter:a enter:b enter:c enter:d enter:e leave:a enter:f", "a b c", 200},
    {kTwo, "one_caller_does_not_fill_the_line", "enter:a enter:b enter:c*3 enter:d leave:a leave:b",
     "a b !c c d", 200},
    {kTwo, "a_passed_deadline_does_not_enter", "until:a:-1", "~a", 0},
    {kTwo, "a_deadline_ends_the_wait", "enter:a enter:b until:c:60000 until:d:10 ms:60", "a b ~d",
     200},
    {kTwo, "an_earlier_deadline_comes_first", "enter:a enter:b until:c:130 until:d:5 ms:200",
     "a b ~d ~c", 200},
    {kTwo, "a_drain_answers_waiting_and_later_calls",
     "enter:a enter:b enter:c drain enter:d leave:a", "a b -c -d", 100},
    {kTwo, "a_drain_refuses_no_call_that_was_let_in",
     "enter:a enter:b again:c enter:d drain leave:a leave:b again:e", "a b -d c e", 200},
    {kTwo, "a_full_line_refuses_no_call_that_was_let_in",
     "enter:a enter:b enter:c enter:d enter:e again:f leave:a leave:b", "a b c d", 200},
    {kTwo, "a_quota_counts_what_a_caller_holds", "enter:q enter:q:51 enter:q:50", "q !q q", 150},
    {kTwo, "a_quota_counts_what_a_caller_waits_for", "enter:a enter:b enter:q enter:q:51", "a b !q",
     200},
    // Room for 16 messages of 64 MiB: 14, one for callers that hold nothing, 64 MiB for small
    // calls.
    {kMany, "a_light_caller_gets_in_beside_many_large_calls", "enter:a*40 enter:b", "a*14 b", 960},
    {kMany, "who_holds_room_does_not_take_the_last_part", "enter:a*40 pass:b*20", "a*14 b*20", 896},
    {kMany, "the_last_part_is_free_again_when_others_have_room",
     "enter:a*14 enter:b leave:a shrink:b:1 enter:a enter:c", "a*14 b c", 897},
    {kMany, "small_calls_pass_large_ones_that_wait", "enter:a*14 enter:b enter:c enter:d:1",
     "a*14 b d", 961},
    {kMany, "small_calls_do_not_starve_a_large_one", "enter:a*15 enter:b*100:1 leave:a",
     "a*14 b*64 a", 960},
    {kMany, "lines_take_turns_by_weight_and_batch_comes_last",
     "enter:o*14 enter:p pass:a*6 pass:Z*2 pass:b*2 pass:w*4 leave:o",
     "o*14 p a b w*2 a b w*2 a*4 Z*2", 896},
    // Turns: 4 MiB, or two messages, come at the same time. The room is as above.
    {kTurns, "messages_come_a_few_at_a_time", "send:a*8:2 shrink:a:2", "a*3", 6},
    {kTurns, "tiny_messages_and_a_light_callers_small_ones_need_no_turn",
     "send:a*8:2 send:b:1 send:b:0", "a*2 b*2", 5},
    {kTurns, "a_slow_message_loses_its_turn", "send:a:4 send:b:16 send:c:16 send:d:16 ms:100",
     "a b c", 36},
    {kTurns, "a_slow_message_may_be_slow_while_there_is_room",
     "send:a:4 send:b:16 send:c:16 send:d:16 ms:3000", "a b c d", 52},
    {kTurns, "who_waits_only_for_a_turn_is_not_refused", "send:a*20:2 leave:a*20", "a*20", 0},
    // Room for three messages of 100 bytes; senders must send 4 bytes a second.
    {kSenders, "a_silent_sender_is_left_alone_while_there_is_room", "send:a ms:5000", "a", 100},
    {kSenders, "a_silent_sender_has_half_a_second", "send:a enter:b*2 enter:c ms:540", "a b*2",
     300},
    {kSenders, "a_silent_sender_is_too_slow_after_half_a_second", "send:a enter:b*2 enter:c ms:555",
     "a b*2 ^a1", 300},
    {kSenders, "a_slow_sender_is_told_once", "send:a enter:b*2 enter:c ms:2600 leave:a ms:5000",
     "a b*2 ^a1 c", 300},
    {kSenders, "a_sender_that_moves_is_not_too_slow",
     "send:a enter:b*2 enter:c come:a:2 ms:500 come:a:2 ms:500 come:a:2 ms:500", "a b*2", 300},
    {kSenders, "a_sender_that_trickles_is_too_slow",
     "send:a enter:b*2 enter:c come:a:2 ms:500 come:a:1 ms:500 come:a:1 ms:500", "a b*2 ^a1", 300},
    {kSenders, "progress_suffices_for_the_oldest_messages",
     "send:a*3 enter:c ms:400 come:a:5 ms:200", "a*3 ^a3", 300},
    {kSenders, "each_connection_is_judged_by_itself",
     "send:a*2 send:b enter:c ms:400 come:a:5 ms:200", "a*2 b ^b1", 300},
    {kSenders, "a_new_message_is_not_judged_before_a_whole_window",
     "send:a enter:b*2 send:c enter:d ms:400 leave:a ms:600", "a b*2 c", 300},
    {kSenders, "a_new_message_is_judged_after_a_whole_window",
     "send:a enter:b*2 send:c enter:d ms:400 leave:a ms:700", "a b*2 c ^c1", 300},
    {kSenders, "a_sender_is_not_judged_while_the_server_is_late",
     "send:a enter:b*2 enter:c unread:a ms:1200 read:a ms:800", "a b*2", 300},
    {kSenders, "a_sender_is_judged_again_when_the_server_reads",
     "send:a enter:b*2 enter:c unread:a ms:1200 read:a ms:900", "a b*2 ^a1", 300},
    {kSenders, "a_message_that_is_there_is_not_too_slow",
     "send:a shrink:a:100 enter:b*2 enter:c ms:5000", "a b*2", 300},
};

class ScenarioTest : public ::testing::TestWithParam<Scenario> {};
TEST_P(ScenarioTest, Runs) {
  const AdmissionOptions& options = GetParam().options;
  Gate gate(options, options.max_request_bytes < kMiB ? 1 : kMiB);
  gate.Run(GetParam().script);
  EXPECT_EQ(gate.log(), GetParam().log);
  EXPECT_EQ(gate.held(), GetParam().held);
}
INSTANTIATE_TEST_SUITE_P(All, ScenarioTest, ::testing::ValuesIn(kScenarios),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(AdmissionTest, WithoutARateNobodyIsTooSlow) {
  Gate gate({.max_request_bytes = 100, .max_held_bytes = 100, .min_receive_rate = 0});
  gate.Run("send:a enter:b ms:5000");
  EXPECT_EQ(gate.log(), "a");
}

// ---- what a caller reads, and an operator

TEST(AdmissionTest, TextsGiveBothNumbersAndTheDelay) {
  Gate gate({.max_request_bytes = 200, .max_held_bytes = 300, .max_waiting_calls = 2});
  gate.Run("send:a:100 enter:b enter:c:1 enter:d:1 enter:e:1");
  EXPECT_EQ(gate.last().message(),
            "held 300 of 300 bytes, 2 of 2 calls waiting, 0 of this connection; retry after 50 ms");
  gate.Run("ms:600");
  EXPECT_EQ(
      gate.last().message(),
      "messages of this connection came at 0 B/s, allowed at least 1048576 B/s for each while "
      "other calls wait; retry after 50 ms");
  gate.Run("enter:q:160");
  EXPECT_EQ(
      gate.last().message(),
      "the caller's calls hold or wait for 0 bytes and this one needs 160, allowed 150; retry "
      "after 50 ms");
}

TEST(AdmissionTest, ChargesAndRefusalsAreCounted) {
  Metrics metrics{{}};
  Gate gate({.max_request_bytes = 200, .max_held_bytes = 200, .max_waiting_calls = 2}, 1, &metrics);
  const auto expect = [&metrics](std::initializer_list<const char*> samples) {
    const std::string page = Scrape(metrics);
    for (const char* sample : samples) {
      EXPECT_THAT(page, HasSubstr(absl::StrCat("\nlogitd_", sample, "\n")));
    }
  };
  gate.Run("send:a enter:b*2 enter:c enter:d enter:q:151 until:e:-1 ms:3000");
  expect({"held_bytes 200", "held_bytes_limit 200", "waiting_calls 2", "draining 0",
          "refused_total{identity=\"none\",reason=\"caller_share\"} 1",
          "refused_total{identity=\"none\",reason=\"line_full\"} 1",
          "refused_total{identity=\"none\",reason=\"quota_bytes\"} 1",
          "refused_total{identity=\"none\",reason=\"deadline\"} 1",
          "refused_total{identity=\"none\",reason=\"slow_receive\"} 1"});
  gate.Run("drain enter:f leave:a");
  EXPECT_EQ(gate.log(), "a !b !d !q ~e ^a1 -b -c -f");
  expect({"held_bytes 0", "waiting_calls 0", "draining 1",
          "refused_total{identity=\"none\",reason=\"draining\"} 3"});
}

TEST(AdmissionTest, ARestOfLessThan64KiBStaysCharged) {
  Gate gate({.max_request_bytes = kMiB, .max_held_bytes = 4 * kMiB});
  gate.Run("enter:a:200000 shrink:a:134465");
  EXPECT_EQ(gate.held(), 200'000);
  gate.Run("shrink:a:134464");
  EXPECT_EQ(gate.held(), 134'464);
}

TEST(AdmissionTest, CallsThatDropTheirTicketsAtOnceDoNotRecurse) {
  Admission admission({.max_request_bytes = 1, .max_held_bytes = 1, .max_waiting_calls = 5000},
                      nullptr);
  auto first = admission.Enter({.bytes = 1}, nullptr);
  int depth = 0, deepest = 0, answered = 0;
  for (uint64_t id = 1; id <= 5000; ++id) {
    admission.Enter({.caller = {.id = id}, .bytes = 1},
                    [&](absl::StatusOr<Admission::Ticket> answer) {
                      deepest = std::max(deepest, ++depth);
                      EXPECT_TRUE(answer.ok());
                      answer = absl::UnknownError("dropped");
                      ++answered;
                      --depth;
                    });
  }
  first.answer.reset();
  EXPECT_EQ(answered, 5000);
  EXPECT_EQ(deepest, 1);
}

// Calls enter, shrink, leave, abandon and miss deadlines on many threads: the charges never exceed
// the limit, every call gets at most one answer, and no charge is left.
TEST(AdmissionTest, AStormNeverHoldsMoreThanAllowed) {
  constexpr int kThreads = 4;
  constexpr int kCalls = 1500;
  constexpr int64_t kMessage = 100 * kMiB;
  constexpr int64_t kLimit = 350 * kMiB;
  for (const uint32_t seed : {1u, 2u, 3u}) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::deque<std::atomic<int>> answers(kThreads * kCalls);
    // The callers' own count of what they hold. Raised after a ticket comes and lowered before it
    // goes, so it is never more than what is charged.
    std::atomic<int64_t> held = 0;
    std::atomic<bool> too_much = false;
    std::atomic<int> granted = 0;
    std::mutex mutex;
    std::vector<Admission::Ticket> tickets;
    {
      ManualClock clock;
      Admission admission({.max_request_bytes = kMessage,
                           .max_held_bytes = kLimit,
                           .max_waiting_calls = 8,
                           .clock = &clock},
                          nullptr);
      const auto work = [&](int thread) {
        std::mt19937 random(seed * 100 + static_cast<uint32_t>(thread));
        const auto below = [&](uint32_t n) { return static_cast<int64_t>(random() % n); };
        for (int i = 0; i < kCalls; ++i) {
          std::atomic<int>& told = answers[static_cast<size_t>(thread * kCalls + i)];
          const auto ready = [&](absl::StatusOr<Admission::Ticket> answer) {
            ++told;
            if (!answer.ok()) return;
            ++granted;
            if ((held += answer->bytes()) > kLimit) too_much = true;
            std::lock_guard<std::mutex> lock(mutex);
            tickets.push_back(*std::move(answer));
          };
          clock.Advance(absl::Microseconds(100));
          auto entry = admission.Enter(
              {.caller = {.id = random() % 3},
               .deadline = below(2) == 0 ? absl::InfiniteFuture()
                                         : clock.Now() + absl::Milliseconds(below(3)),
               .bytes = 1 + below(static_cast<uint32_t>(2 * kMessage))},
              ready);
          if (entry.answer.has_value()) ready(*std::move(entry.answer));
          if (entry.waiter != 0 && below(4) == 0 && admission.Abandon(entry.waiter)) ++told;
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
          if (admission.held_bytes() > kLimit) too_much = true;
        }
      };
      std::vector<std::thread> threads;
      for (int t = 0; t < kThreads; ++t) threads.emplace_back(work, t);
      for (std::thread& thread : threads) thread.join();
      admission.BeginDrain();
      tickets.clear();
      EXPECT_EQ(admission.held_bytes(), 0);
    }
    EXPECT_FALSE(too_much);
    EXPECT_GT(granted, 0);
    for (const std::atomic<int>& told : answers) ASSERT_EQ(told, 1) << "an answer, or it abandoned";
  }
}

}  // namespace
}  // namespace logitd::engine

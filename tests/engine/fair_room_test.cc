// Who gets room when there is not enough: lines by caller, parts kept free, slow peers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "server/engine/admission.h"
#include "server/engine/metrics.h"
#include "tests/engine/test_job.h"

namespace logitd::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

// One call: where it stands, and its room.
class Peer {
 public:
  Peer(Admission* admission, uint64_t caller, RoomAsk ask = {}) {
    ask.caller.id = caller;
    admission->Enter(std::move(ask), [this](absl::StatusOr<Admission::Ticket> answer) {
      const std::lock_guard<std::mutex> lock(mutex_);
      status_ = answer.status();
      if (answer.ok()) ticket_ = *std::move(answer);
      answered_ = true;
      changed_.notify_all();
    });
  }
  // A call is answered sooner or later, if only by a drain.
  ~Peer() { EXPECT_TRUE(Wait(absl::Seconds(10))); }
  bool in() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return answered_ && status_.ok();
  }
  absl::Status status() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return answered_ ? status_ : absl::UnknownError("waits");
  }
  bool WaitIn(absl::Duration timeout = absl::Seconds(5)) { return Wait(timeout) && in(); }
  Admission::Ticket& ticket() { return ticket_; }
  void Leave() { ticket_ = {}; }

 private:
  bool Wait(absl::Duration timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, absl::ToChronoMilliseconds(timeout), [&] { return answered_; });
  }

  std::mutex mutex_;  // not Abseil's, which ThreadSanitizer does not see into
  std::condition_variable changed_;
  bool answered_ = false;
  absl::Status status_;
  Admission::Ticket ticket_;
};

// What slow calls were told.
class Told {
 public:
  RoomAsk Ask(std::string name, std::function<std::optional<int64_t>()> received_bytes = nullptr,
              int64_t bytes = 0) {
    return {.bytes = bytes,
            .received_bytes = std::move(received_bytes),
            .too_slow = [this, name](const absl::Status& why) {
              EXPECT_TRUE(absl::IsResourceExhausted(why)) << why;
              const std::lock_guard<std::mutex> lock(mutex_);
              texts_.push_back(name + ": " + std::string(why.message()));
              changed_.notify_all();
            }};
  }
  bool WaitFor(size_t count, absl::Duration timeout = absl::Seconds(5)) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, absl::ToChronoMilliseconds(timeout),
                             [&] { return texts_.size() >= count; });
  }
  std::vector<std::string> texts() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return texts_;
  }
  std::string Name(size_t i) { return texts()[i].substr(0, texts()[i].find(':')); }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> texts_;
};

AdmissionOptions Rooms(int64_t messages) {
  return {.max_request_bytes = 64 * kMiB, .max_held_bytes = messages * 64 * kMiB};
}

TEST(FairRoomTest, ALightCallerGetsInBesideManyLargeCalls) {
  Admission admission(Rooms(16), nullptr);
  std::deque<Peer> heavy;
  for (int i = 0; i < 40; ++i) heavy.emplace_back(&admission, 1);
  EXPECT_FALSE(heavy.back().in());
  Peer light(&admission, 2);
  EXPECT_TRUE(light.in());
  // What it needs after its message came moves to the common part, when there is room.
  EXPECT_TRUE(light.ticket().Received(kMiB));
  heavy.front().Leave();
  admission.BeginDrain();
}

TEST(FairRoomTest, ACallerOfHeldRoomDoesNotTakeTheLastPart) {
  Admission admission(Rooms(16), nullptr);
  std::deque<Peer> heavy;
  for (int i = 0; i < 40; ++i) heavy.emplace_back(&admission, 1);
  for (int i = 0; i < 20; ++i) {
    Peer light(&admission, 2);
    EXPECT_TRUE(light.in()) << i;
  }
  admission.BeginDrain();
}

TEST(FairRoomTest, SmallCallsPassLargeOnesThatWait) {
  Admission admission(Rooms(16), nullptr);
  std::deque<Peer> large;
  for (uint64_t i = 0; i < 40; ++i) large.emplace_back(&admission, i);
  Peer also_large(&admission, 50);
  EXPECT_FALSE(also_large.in());
  Peer small(&admission, 51, {.bytes = kMiB});
  EXPECT_TRUE(small.in());
  admission.BeginDrain();
}

// The small part is 64 MiB. What does not fit into it waits for the large call.
TEST(FairRoomTest, SmallCallsDoNotStarveALargeOne) {
  Admission admission(Rooms(16), nullptr);
  std::deque<Peer> large;
  for (uint64_t i = 0; i < 16; ++i) large.emplace_back(&admission, 1);
  EXPECT_FALSE(large.back().in());
  std::deque<Peer> small;
  for (uint64_t i = 0; i < 100; ++i) {
    small.emplace_back(&admission, 2, RoomAsk{.bytes = kMiB});
    if (small.back().in()) {
      EXPECT_TRUE(small.back().ticket().Received(kMiB));
    }
  }
  EXPECT_TRUE(small[63].WaitIn());
  EXPECT_FALSE(small[64].in());
  large.front().Leave();
  EXPECT_TRUE(large[14].WaitIn());
  admission.BeginDrain();
}

TEST(FairRoomTest, LinesTakeTurnsByWeight) {
  Admission admission({.max_request_bytes = 100, .max_held_bytes = 100}, nullptr);
  auto first = std::make_unique<Peer>(&admission, 9);
  std::string order;
  const auto ask = [&](char name, double weight, Priority priority) {
    admission.Enter(
        {.caller = {.id = static_cast<uint64_t>(name), .weight = weight, .priority = priority}},
        [&order, name](absl::StatusOr<Admission::Ticket> answer) {
          ASSERT_TRUE(answer.ok());
          order += name;  // and gives the room back
        });
  };
  for (int i = 0; i < 6; ++i) ask('a', 1, Priority::kInteractive);
  for (int i = 0; i < 2; ++i) ask('z', 1, Priority::kBatch);
  for (int i = 0; i < 2; ++i) ask('b', 1, Priority::kInteractive);
  for (int i = 0; i < 4; ++i) ask('c', 2, Priority::kInteractive);
  first.reset();
  EXPECT_EQ(order.substr(12), "zz");
  // While all three wait: a turn of a and of b, and two of c.
  const std::string mixed = order.substr(0, 8);
  EXPECT_EQ(std::count(mixed.begin(), mixed.end(), 'a'), 2) << order;
  EXPECT_EQ(std::count(mixed.begin(), mixed.end(), 'b'), 2) << order;
  EXPECT_EQ(std::count(mixed.begin(), mixed.end(), 'c'), 4) << order;
}

TEST(FairRoomTest, OneCallerCannotFillTheLine) {
  Metrics metrics{{}};
  Admission admission(Rooms(1), &metrics);
  std::deque<Peer> crowd;
  for (int i = 0; i < 1100; ++i) crowd.emplace_back(&admission, 1);
  EXPECT_TRUE(absl::IsResourceExhausted(crowd.back().status()));
  EXPECT_THAT(crowd.back().status().message(), HasSubstr("512 of this connection"));
  EXPECT_THAT(Scrape(metrics),
              HasSubstr("logitd_refused_total{identity=\"none\",reason=\"caller_share\"} 587\n"));
  Peer other(&admission, 2);
  EXPECT_FALSE(absl::IsResourceExhausted(other.status()));
  // And the other caller's turn comes before those of the many.
  crowd.front().Leave();
  EXPECT_TRUE(other.in());
  other.Leave();
  EXPECT_TRUE(crowd[1].in());
  admission.BeginDrain();
}

TEST(FairRoomTest, CallersAreForgottenWhenTheyHoldNothing) {
  Admission admission(Rooms(1), nullptr);
  for (uint64_t i = 0; i < 1000; ++i) Peer(&admission, i).Leave();
  EXPECT_EQ(admission.callers(), 0);
  {
    Peer holds(&admission, 1);
    Peer waits(&admission, 2);
    EXPECT_EQ(admission.callers(), 2);
    admission.BeginDrain();
    EXPECT_EQ(admission.callers(), 1);
  }
  EXPECT_EQ(admission.callers(), 0);
}

TEST(FairRoomTest, ADrainAnswersNoCallWhoseMessageIsThere) {
  Admission admission(Rooms(1), nullptr);
  Peer holds(&admission, 1);
  Peer received(&admission, 2, {.received = true});
  Peer unread(&admission, 3);
  admission.BeginDrain();
  EXPECT_TRUE(absl::IsUnavailable(unread.status()));
  holds.Leave();
  EXPECT_TRUE(received.WaitIn());
  Peer late(&admission, 4, {.received = true});
  received.Leave();
  EXPECT_TRUE(late.WaitIn());
}

// --- turns

AdmissionOptions Turns() {
  AdmissionOptions options = Rooms(16);
  options.max_receiving_bytes = 4 * kMiB;
  return options;
}

RoomAsk Sized(int64_t bytes) { return {.bytes = bytes, .receiving_bytes = bytes}; }

TEST(FairRoomTest, MessagesAreReceivedAFewAtATime) {
  Admission admission(Turns(), nullptr);
  std::deque<Peer> calls;
  for (int i = 0; i < 8; ++i) calls.emplace_back(&admission, 1, Sized(2 * kMiB));
  EXPECT_TRUE(calls[1].in());
  EXPECT_FALSE(calls[2].in());
  EXPECT_TRUE(calls[0].ticket().Received(2 * kMiB));
  EXPECT_TRUE(calls[2].in());
  EXPECT_FALSE(calls[3].in());
  // Tiny messages, those of a light caller, and those of unknown size do not wait.
  Peer tiny(&admission, 1, Sized(64 << 10));
  Peer light(&admission, 2, Sized(kMiB));
  EXPECT_TRUE(light.in());
  admission.BeginDrain();
}

TEST(FairRoomTest, ASlowPeerDoesNotKeepItsTurn) {
  Told told;
  Admission admission(Turns(), nullptr);
  Peer slow(&admission, 1, told.Ask("slow", nullptr, 4 * kMiB));
  Peer slower(&admission, 2, Sized(16 * kMiB));
  Peer slowest(&admission, 3, Sized(16 * kMiB));
  Peer next(&admission, 4, Sized(16 * kMiB));
  EXPECT_FALSE(next.in());
  EXPECT_TRUE(next.WaitIn(absl::Seconds(1)));
  // No call was short of room, so none was too slow.
  EXPECT_FALSE(told.WaitFor(1, absl::Milliseconds(700)));
}

// They do not take places from calls that wait for room.
TEST(FairRoomTest, CallsThatOnlyWaitForTheirTurnAreNotRefused) {
  AdmissionOptions options = Turns();
  options.max_waiting_calls = 4;
  Admission admission(options, nullptr);
  std::deque<Peer> calls;
  for (int i = 0; i < 100; ++i) calls.emplace_back(&admission, 1, Sized(2 * kMiB));
  for (Peer& call : calls) {
    ASSERT_TRUE(call.WaitIn());
    call.Leave();
  }
}

// --- slow peers

TEST(FairRoomTest, ASlowMessageIsToldOnlyWhileOthersWait) {
  Metrics metrics{{}};
  Told told;
  Admission admission(Rooms(1), &metrics);
  Peer slow(&admission, 1, told.Ask("slow", nullptr, 32 * kMiB));
  absl::SleepFor(absl::Milliseconds(700));
  EXPECT_FALSE(told.WaitFor(1, absl::ZeroDuration()));
  Peer waits(&admission, 2);
  const absl::Time since = SteadyNow();
  EXPECT_TRUE(told.WaitFor(1));
  EXPECT_GE(SteadyNow() - since, absl::Milliseconds(450));
  EXPECT_THAT(told.texts()[0], HasSubstr("allowed 1000 ms while other calls wait"));
  // It is told again while it holds its room, but not at once, and it is counted once.
  const absl::Time first = SteadyNow();
  EXPECT_TRUE(told.WaitFor(2));
  EXPECT_GE(SteadyNow() - first, Admission::kAgain - absl::Milliseconds(200));
  EXPECT_THAT(Scrape(metrics),
              HasSubstr("logitd_refused_total{identity=\"none\",reason=\"slow_receive\"} 1\n"));
  slow.Leave();
  EXPECT_TRUE(waits.WaitIn());
  admission.BeginDrain();
}

TEST(FairRoomTest, AConnectionMayReceiveWhatItsProgressSufficesFor) {
  Told told;
  AdmissionOptions options = Rooms(4);
  options.min_receive_rate = 10 * kMiB;
  Admission admission(options, nullptr);
  const absl::Time start = SteadyNow();
  // 25 MiB/s suffice for two messages of 10 MiB/s.
  const auto fast = [start] {
    return static_cast<int64_t>(absl::ToDoubleSeconds(SteadyNow() - start) * 25 * kMiB);
  };
  Peer a(&admission, 1, told.Ask("a", fast));
  Peer b(&admission, 1, told.Ask("b", fast));
  Peer c(&admission, 1, told.Ask("c", fast));
  ASSERT_TRUE(c.in());
  Peer d(&admission, 2, told.Ask("silent", [] { return int64_t{3}; }));
  Peer waits(&admission, 3);
  ASSERT_TRUE(told.WaitFor(2));
  std::set<std::string> names = {told.Name(0), told.Name(1)};
  EXPECT_THAT(names, ElementsAre("c", "silent"));
  for (const std::string& text : told.texts()) {
    if (text[0] == 's') {
      EXPECT_THAT(text, HasSubstr("at 0 B/s, allowed at least 10485760 B/s"));
    }
  }
  c.Leave();
  d.Leave();
  EXPECT_TRUE(waits.WaitIn());
  admission.BeginDrain();
}

TEST(FairRoomTest, AConnectionIsNotTooSlowWhileItsBytesWaitUnread) {
  Told told;
  Admission admission(Rooms(1), nullptr);
  std::atomic<bool> unread = true;
  Peer late(&admission, 1, told.Ask("late", [&]() -> std::optional<int64_t> {
    if (unread) return std::nullopt;
    return 3;
  }));
  Peer waits(&admission, 2);
  EXPECT_FALSE(told.WaitFor(1, absl::Milliseconds(1200)));
  unread = false;  // from here on it is the peer that is silent
  const absl::Time since = SteadyNow();
  EXPECT_TRUE(told.WaitFor(1));
  EXPECT_GE(SteadyNow() - since, absl::Milliseconds(450));
  late.Leave();
  EXPECT_TRUE(waits.WaitIn());
  admission.BeginDrain();
}

TEST(FairRoomTest, NoRateMeansNoLimit) {
  Told told;
  AdmissionOptions options = Rooms(1);
  options.min_receive_rate = 0;
  Admission admission(options, nullptr);
  Peer slow(&admission, 1, told.Ask("slow", nullptr, kMiB));
  Peer waits(&admission, 2);
  EXPECT_FALSE(told.WaitFor(1, absl::Milliseconds(900)));
  admission.BeginDrain();
}

TEST(FairRoomTest, RoomOfIdleStreamsIsTakenBackWhileOthersWait) {
  Admission admission(Rooms(4), nullptr);
  std::deque<Peer> idle;
  for (uint64_t i = 0; i < 4; ++i) {
    idle.emplace_back(&admission, i, RoomAsk{.between_messages = true});
  }
  const int64_t held = admission.held_bytes();
  absl::SleepFor(absl::Milliseconds(700));
  EXPECT_EQ(admission.held_bytes(), held);
  const absl::Time since = SteadyNow();
  Peer honest(&admission, 9);
  EXPECT_TRUE(honest.WaitIn());
  EXPECT_LT(SteadyNow() - since, absl::Milliseconds(400));
  // The message of such a stream has to ask for its room again.
  EXPECT_FALSE(idle[0].ticket().Received(kMiB));
  honest.Leave();
  Peer again(&admission, 0, {.bytes = kMiB, .received = true});
  EXPECT_TRUE(again.WaitIn());
  admission.BeginDrain();
}

TEST(FairRoomTest, RoomOfAMessageThatComesIsNotTakenBack) {
  Admission admission(Rooms(4), nullptr);
  std::deque<Peer> idle;
  for (uint64_t i = 0; i < 4; ++i) {
    idle.emplace_back(&admission, i, RoomAsk{.bytes = kMiB, .between_messages = true});
  }
  EXPECT_TRUE(idle[0].ticket().Comes({.bytes = kMiB}));
  EXPECT_TRUE(idle[1].ticket().Comes({.bytes = kMiB, .received = true}));
  const int64_t held = admission.held_bytes();
  EXPECT_FALSE(idle[2].ticket().Comes({.bytes = kMiB + 1})) << "it has less";
  EXPECT_EQ(admission.held_bytes(), held - kMiB) << "and gave it back";
  std::deque<Peer> others;
  for (uint64_t i = 10; i < 20; ++i) others.emplace_back(&admission, i);
  const int64_t full = admission.held_bytes();
  const absl::Time end = SteadyNow() + absl::Seconds(20);
  while (admission.held_bytes() == full && SteadyNow() < end) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_FALSE(idle[3].ticket().Comes({.bytes = kMiB})) << "it was taken back";
  EXPECT_TRUE(idle[0].ticket().Received(kMiB));
  EXPECT_TRUE(idle[1].ticket().Received(kMiB));
  admission.BeginDrain();
}

}  // namespace
}  // namespace logitd::engine

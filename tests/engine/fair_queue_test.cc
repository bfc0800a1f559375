#include "server/engine/fair_queue.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace logitd::engine {
namespace {

struct Item {
  struct Links {
    Item* child = nullptr;
    Item* next = nullptr;
    Item* previous = nullptr;
  };
  Urgency urgency;
  Links links;
};

struct ItemLinks {
  static Item::Links& Of(Item& item) { return item.links; }
  static bool Before(const Item& a, const Item& b) { return a.urgency < b.urgency; }
};

TEST(FairHeapTest, TheTopIsAlwaysTheLeast) {
  std::mt19937 random(7);
  for (int round = 0; round < 20; ++round) {
    std::vector<Item> items(300);
    FairHeap<Item, ItemLinks> heap;
    std::set<std::pair<double, Item*>> inside;
    uint64_t sequence = 0;
    for (int step = 0; step < 3000; ++step) {
      Item* item = &items[random() % items.size()];
      const auto at = inside.find({item->urgency.start, item});
      if (at != inside.end()) {
        heap.Remove(item);
        inside.erase(at);
      } else if (random() % 8 == 0 && !inside.empty()) {
        inside.erase({heap.top()->urgency.start, heap.top()});
        heap.Remove(heap.top());
      } else {
        item->urgency = {.start = static_cast<double>(random() % 1000), .sequence = ++sequence};
        heap.Push(item);
        inside.insert({item->urgency.start, item});
      }
      ASSERT_EQ(heap.top() == nullptr, inside.empty());
      if (heap.top() != nullptr) {
        ASSERT_EQ(heap.top()->urgency.start, inside.begin()->first);
      }
    }
  }
}

TEST(UrgencyTest, PriorityComesFirstThenStartThenArrival) {
  const Urgency in_order[] = {{Priority::kInteractive, 1, 9},
                              {Priority::kInteractive, 2, 3},
                              {Priority::kInteractive, 2, 4},
                              {Priority::kBatch, 0, 1}};
  EXPECT_TRUE(std::is_sorted(std::begin(in_order), std::end(in_order)));
}

TEST(FairClockTest, ACallerPaysForItsOwnWorkByItsWeight) {
  FairClock clock;
  const Caller light = {.id = 1};
  const Caller heavy = {.id = 2, .weight = 2};
  EXPECT_EQ(clock.Arrive(light, false, 100), 0);
  EXPECT_EQ(clock.Arrive(light, false, 100), 100);
  EXPECT_EQ(clock.Arrive(heavy, false, 100), 0);
  EXPECT_EQ(clock.Arrive(heavy, false, 100), 50);
}

TEST(FairClockTest, ACallerThatWasIdleComesBeforeAFloodAndSavesUpNothing) {
  FairClock clock;
  const Caller flood = {.id = 1};
  double last = 0;
  for (int i = 0; i < 100; ++i) last = clock.Arrive(flood, false, 10);
  clock.Serve(500);
  const Caller light = {.id = 2};
  EXPECT_EQ(clock.Arrive(light, false, 10), 500);
  EXPECT_EQ(clock.Arrive(light, false, 10), 510);
  EXPECT_GT(last, 510);
}

TEST(FairClockTest, ACallersLongAndBatchWorkDoesNotDelayItsOtherWork) {
  FairClock clock;
  for (int i = 0; i < 10; ++i) clock.Arrive({.id = 1}, true, 1000);
  for (int i = 0; i < 10; ++i) clock.Arrive({.id = 1, .priority = Priority::kBatch}, false, 1000);
  EXPECT_EQ(clock.Arrive({.id = 1}, false, 1), 0);
}

TEST(FairClockTest, AWrongEstimateIsPaidForLater) {
  FairClock clock;
  const Caller caller = {.id = 1};
  clock.Arrive(caller, false, 10);
  clock.Correct(caller, false, 90);
  EXPECT_EQ(clock.Arrive(caller, false, 10), 100);
  clock.Correct({.id = 2}, false, 90);  // forgotten, or never seen: nothing happens
  EXPECT_EQ(clock.Arrive({.id = 2}, false, 1), 0);
}

TEST(FairClockTest, CallersWhoseWorkIsServedAreForgotten) {
  FairClock clock;
  for (uint64_t id = 0; id < 100000; ++id) clock.Serve(clock.Arrive({.id = id}, false, 10) + 10);
  EXPECT_LT(clock.accounts(), 1000u);
}

TEST(FairClockTest, CallersWithoutServiceAreBounded) {
  FairClock clock;
  for (uint64_t id = 0; id < 300000; ++id) clock.Arrive({.id = id}, false, 10);
  EXPECT_LE(clock.accounts(), size_t{1} << 17);
}

TEST(FairClockTest, AfterAPauseAllCallersAreEqual) {
  FairClock clock;
  clock.Arrive({.id = 1}, false, 1000);
  clock.Idle();
  EXPECT_EQ(clock.Arrive({.id = 2}, false, 1), clock.Arrive({.id = 1}, false, 1));
}

}  // namespace
}  // namespace logitd::engine

// Whatever happens to jobs, in whatever order, each ends once. A World checks that, and what holds in every state.
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "tests/engine/world.h"

namespace logitd::engine {
namespace {

// Of the schedule that runs. Printed also where that crashes, or does not end.
char name[512];

void SetName(const std::string& of) {
  absl::SNPrintF(name, sizeof(name), "%s\n", of);
  for (const int each : {SIGSEGV, SIGALRM}) {
    std::signal(each, [](int signal) {
      static_cast<void>(!write(STDERR_FILENO, name, std::strlen(name)));
      std::signal(signal, SIG_DFL);
      std::raise(signal);
    });
  }
  alarm(of.empty() ? 0 : 60);
}

// Every sequence of kDepth events, in a world of two devices where jobs run, wait, are between two slices and keep an
// answer.
TEST(SchedulesTest, EverySequenceOfEvents) {
  constexpr const char* kStart =
      "k alone keep; take 0; end 0; p 4x25 due30; take 0; end 0; r 4x25; take 1; w 5x1; b d1 batch";
  constexpr const char* kEvents[] = {"s",       "l 4x25 due22", "try 0",    "try 1",    "end 0",
                                     "end 1",   "cancel p",     "cancel r", "cancel w", "drop k",
                                     "pass 11", "late 11",      "lose 0",   "lose 1",   "close"};
  constexpr int kDepth = 4;
  int sequences = 1;
  for (int i = 0; i < kDepth; ++i) sequences *= static_cast<int>(std::size(kEvents));
  for (int sequence = 0; sequence < sequences && !::testing::Test::HasFailure(); ++sequence) {
    std::string script = kStart;
    int digits = sequence;
    for (int i = 0; i < kDepth; ++i, digits /= static_cast<int>(std::size(kEvents))) {
      absl::StrAppend(&script, ";", kEvents[static_cast<size_t>(digits) % std::size(kEvents)]);
    }
    SCOPED_TRACE(script);
    SetName(script);
    World world({.devices = 2, .slabs = 3});
    world.Run(script);
    world.Drain();
  }
  SetName("");
}

class Schedule {
 public:
  explicit Schedule(uint32_t seed) : random_(seed) {}

  void Run() {
    World world({.devices = 1 + Below(3),
                 .streams = 1 + Below(3),
                 .slabs = 1 + Below(3),
                 .max_rows = 100,
                 .delay = absl::Milliseconds(Below(4) == 0 ? 3 : 0)});
    const bool may_lose = Below(3) == 0;
    for (int step = 0; step < 120; ++step) Step(world, may_lose);
    world.Drain();
  }

 private:
  int Below(int n) { return static_cast<int>(random_() % static_cast<uint32_t>(n)); }
  bool OneIn(int n) { return Below(n) == 0; }

  void Step(World& world, bool may_lose) {
    const int stream = Below(world.streams());
    const auto job = [&] { return static_cast<size_t>(Below(static_cast<int>(world.jobs()))); };
    switch (Below(14)) {
      case 0:
      case 1:
      case 2:
        return Submit(world);
      case 3:
        return SubmitExclusive(world);
      case 4:
      case 5:
      case 6:
        world.Take(stream);
        return;
      case 7:
      case 8:
        world.RunSlice(stream);
        if (!OneIn(4)) world.GiveBack(stream);
        return;
      case 9:
        return world.GiveBack(stream);
      case 10:
        if (world.jobs() > 0) world.Cancel(job());
        return;
      case 11:
        if (world.jobs() > 0) world.Drop(job());
        return;
      case 12:
        world.Advance(absl::Milliseconds(Below(5)));
        if (OneIn(2)) world.MakeDue();
        return world.Settle();
      default:
        return Fail(world, may_lose);
    }
  }

  Caller AnyCaller() {
    return {.id = static_cast<uint64_t>(Below(3)),
            .weight = 1.0 + Below(2),
            .priority = OneIn(4) ? Priority::kBatch : Priority::kInteractive};
  }
  absl::Time AnyDeadline(const World& world) {
    return world.now() + (OneIn(3) ? absl::Milliseconds(Below(40) - 1) : absl::InfiniteDuration());
  }

  void Submit(World& world) {
    TestJob::Shape shape{.tag = static_cast<uint32_t>(world.jobs()) + 1,
                         .row_elements = 4 + Below(2),
                         .rows = 1 + (OneIn(4) ? Below(100) : Below(4)),
                         .entries_per_row = Below(3),
                         .notes_per_row = Below(2),
                         .deadline = AnyDeadline(world),
                         .caller = AnyCaller(),
                         .whole = OneIn(8)};
    if (OneIn(4)) {
      shape.head = world.HeadOf(1 + Below(2), /*sharded=*/world.devices() > 1 && OneIn(2));
    } else if (OneIn(4)) {
      shape.placed = true;
      shape.device = Below(world.devices());
    }
    world.Submit(shape);
  }

  void SubmitExclusive(World& world) {
    world.Submit(ShiftJob::Shape{.tag = static_cast<uint32_t>(world.jobs()) + 1,
                                 .rows = 1 + Below(30),
                                 .notes = Below(4),
                                 .in_place = OneIn(2),
                                 .keep = OneIn(2),
                                 .placed = OneIn(3),
                                 .caller = AnyCaller(),
                                 .deadline = AnyDeadline(world)});
  }

  void Fail(World& world, bool may_lose) {
    constexpr FaultPoint kPoints[] = {FaultPoint::kUpload, FaultPoint::kOp, FaultPoint::kWait};
    if (may_lose && OneIn(12)) return world.Lose(Below(world.devices()));
    if (OneIn(200)) return world.Close();
    if (!OneIn(20)) return;
    world.Fail(
        Below(world.devices()), kPoints[Below(3)],
        may_lose && OneIn(3) ? absl::InternalError("sticky") : absl::UnavailableError("hiccup"));
  }

  std::minstd_rand random_;
};

TEST(SchedulesTest, RandomSequencesOfEvents) {
  for (uint32_t seed = 1; seed <= 3000 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    SetName(absl::StrCat("seed ", seed));
    Schedule(seed).Run();
  }
  SetName("");
}

}  // namespace
}  // namespace logitd::engine

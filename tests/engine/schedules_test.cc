// Whatever happens to jobs, in whatever order, each ends once. A World checks that, and what holds
// in every state.
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "tests/engine/random_jobs.h"
#include "tests/engine/world.h"

namespace logitd::engine {
namespace {

// The name of the schedule that runs. It is printed on a failure, a crash and a hang.
char name[512];

void SetName(const std::string& of) {
  absl::SNPrintF(name, sizeof(name), "%s\n", of);
  constexpr int kSignals[] = {SIGSEGV, SIGALRM};
  static struct sigaction usual[std::size(kSignals)];
  struct sigaction print = {};
  print.sa_handler = [](int signal) {
    static_cast<void>(!write(STDERR_FILENO, name, std::strlen(name)));
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  };
  for (size_t i = 0; i < std::size(kSignals); ++i) {
    struct sigaction before;
    sigaction(kSignals[i], of.empty() ? &usual[i] : &print, &before);
    if (before.sa_handler != print.sa_handler) usual[i] = before;
  }
  alarm(of.empty() ? 0 : 60);
}

// Every sequence of kDepth events, in a world of two devices where jobs run, wait, are between two
// slices and keep an answer.
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

class Schedule : RandomJobs {
 public:
  explicit Schedule(uint32_t seed) : RandomJobs(seed) {}

  void Run() {
    World world({.devices = 1 + Below(3),
                 .streams = 1 + Below(3),
                 .slabs = 1 + Below(3),
                 .max_rows = 100,
                 .delay = absl::Milliseconds(Below(4) == 0 ? 3 : 0)});
    const bool may_lose = OneIn(3);
    for (int step = 0; step < 120; ++step) Step(world, may_lose);
    world.Drain();
  }

 private:
  void Step(World& world, bool may_lose) {
    const int stream = Below(world.streams());
    const int what = Below(14);
    if (what < 4 || world.jobs() == 0) return Submit(world);
    const auto job = static_cast<size_t>(Below(static_cast<int>(world.jobs())));
    if (what < 7) {
      world.Take(stream);
    } else if (what < 9) {
      world.RunSlice(stream);
      if (!OneIn(4)) world.GiveBack(stream);
    } else if (what == 9) {
      world.GiveBack(stream);
    } else if (what == 10) {
      world.Cancel(job);
    } else if (what == 11) {
      world.Drop(job);
    } else if (what == 12) {
      world.Advance(absl::Milliseconds(Below(5)));
      if (OneIn(2)) world.MakeDue();
      return world.Settle();
    } else {
      Fail(world, may_lose);
    }
    if (!OneIn(4)) world.Settle();
  }

  void Submit(World& world) {
    TestJob::Shape shape{.tag = static_cast<uint32_t>(world.jobs()) + 1};
    if (OneIn(4)) {
      shape.head = world.HeadOf(1 + Below(2), /*sharded=*/world.devices() > 1 && OneIn(2));
    } else if (OneIn(4)) {
      shape.placed = true;
      shape.device = Below(world.devices());
    }
    world.Submit(Next(shape, /*most_rows=*/100, world.now() - absl::Milliseconds(1),
                      absl::Milliseconds(40)));
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

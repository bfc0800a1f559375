// Long work in slices, and who runs in between: fairness, priorities, room for short work. Times
// are those of a fake device that takes a given time for each row.
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/costs.h"
#include "server/engine/engine.h"
#include "server/engine/metrics.h"
#include "tests/engine/test_job.h"

namespace logitd::engine {
namespace {

using ::testing::HasSubstr;
using Shape = TestJob::Shape;

constexpr int64_t kWide = 8;  // elements of a row that takes kRow
constexpr auto kRow = std::chrono::milliseconds(1);
constexpr absl::Duration kSlice = absl::Milliseconds(10);

EngineOptions SliceOptions(int streams) {
  EngineOptions options = SmallOptions();
  options.streams = streams;
  options.slabs_per_stream = 4 / streams;
  options.slab_payload_bytes = 1 << 20;
  options.slab_answer_bytes = 1 << 20;
  options.max_batch_rows = 20000;
  options.max_slice = kSlice;
  return options;
}

class SlicesTest : public ::testing::Test {
 protected:
  ~SlicesTest() override {
    backend_.Release();
    engine_.reset();
    EXPECT_EQ(backend_.live_slabs(), 0);
    for (const auto& job : jobs_) {
      EXPECT_EQ(job->dones(), 1);
      EXPECT_FALSE(job->misused());
    }
  }

  // Starts the engine, and lets it learn what a row costs.
  void Start(const EngineOptions& options = SliceOptions(1)) {
    auto engine =
        Engine::Create(&backend_, options, &metrics_, [](const absl::Status&) { FAIL(); });
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    backend_.SetRowTime(kRow);
    for (const Priority priority : {Priority::kInteractive, Priority::kBatch}) {
      ASSERT_TRUE(Submit({.tag = 't', .caller = {.id = 99, .priority = priority}})->Wait().ok());
    }
    ASSERT_TRUE(engine_->WaitIdle(SteadyNow() + absl::Seconds(5)));
    learned_ = backend_.log().size();
  }

  std::shared_ptr<TestJob> Submit(Shape shape) {
    if (shape.row_elements == 4) shape.row_elements = kWide;
    auto job = std::make_shared<TestJob>(shape);
    jobs_.push_back(job);
    engine_->Submit(job);
    return job;
  }

  // The rows of other jobs that ran from now until the last slice with `tag`, the job's own. A busy
  // machine stretches times, but not this.
  int64_t RowsBefore(TestJob& job, char tag) {
    const size_t begin = Slices().size();
    job.Wait().IgnoreError();
    const std::vector<FakeBackend::Ran> slices = Slices();
    size_t own = slices.size();
    while (own > 0 && slices[own - 1].tags.find(tag) == std::string::npos) --own;
    EXPECT_GT(own, 0u) << "no slice has the tag " << tag;
    int64_t rows = 0;
    for (size_t i = begin; i + 1 < own; ++i) rows += slices[i].rows;
    return rows;
  }

  // How long the job takes from now on.
  static absl::Duration TimeOf(TestJob& job) {
    const absl::Time start = SteadyNow();
    job.Wait().IgnoreError();
    return SteadyNow() - start;
  }

  void WaitForSlices(size_t count) { backend_.WaitForOps(learned_ + count); }

  // The slices since Start.
  std::vector<FakeBackend::Ran> Slices() {
    std::vector<FakeBackend::Ran> log = backend_.log();
    log.erase(log.begin(), log.begin() + static_cast<std::ptrdiff_t>(learned_));
    return log;
  }
  int64_t RowsOf(const std::string& tags) {
    int64_t rows = 0;
    for (const FakeBackend::Ran& ran : Slices()) rows += ran.tags == tags ? ran.rows : 0;
    return rows;
  }

  double Metric(const std::string& name) {
    const std::string text = Scrape(metrics_);
    const size_t at = text.find("\n" + name + " ");
    return at == std::string::npos ? -1 : std::stod(text.substr(at + name.size() + 2));
  }

  FakeBackend backend_;
  Metrics metrics_{std::vector<std::string_view>{"digest"}};
  std::unique_ptr<Engine> engine_;
  std::vector<std::shared_ptr<TestJob>> jobs_;
  size_t learned_ = 0;
};

TEST_F(SlicesTest, AShortJobRunsBetweenTheSlicesOfALongOne) {
  Start();
  auto longer = Submit({.tag = 'l', .rows = 10000});  // ten seconds
  WaitForSlices(3);
  auto other_key = Submit({.tag = 's', .row_elements = 5});
  EXPECT_LE(RowsBefore(*other_key, 's'), 100);
  auto same_key = Submit({.tag = 'k'});
  EXPECT_LE(RowsBefore(*same_key, 'k'), 100);
  EXPECT_EQ(other_key->status(), absl::OkStatus());
  EXPECT_EQ(same_key->status(), absl::OkStatus());
  EXPECT_FALSE(longer->status().has_value());
  for (const FakeBackend::Ran& ran : Slices()) EXPECT_LE(ran.rows, 15);
  engine_->Cancel(*longer);
}

TEST_F(SlicesTest, AnswersOfCutJobsAreThoseOfWholeOnes) {
  Start();
  backend_.SetRowTime(std::chrono::microseconds(200));
  std::vector<std::shared_ptr<TestJob>> jobs;
  for (uint32_t tag = 'a'; tag < 'f'; ++tag) {
    jobs.push_back(Submit({.tag = tag,
                           .rows = 150 + tag % 7,
                           .entries_per_row = static_cast<int32_t>(tag % 4),
                           .notes_per_row = static_cast<int32_t>(tag % 3)}));
  }
  for (const auto& job : jobs) EXPECT_TRUE(job->Wait().ok());
  EXPECT_TRUE(engine_->WaitIdle(SteadyNow() + absl::Seconds(5)));
  EXPECT_GT(Slices().size(), jobs.size());
  EXPECT_EQ(Metric("logitd_slices_total{op=\"digest\"}"),
            2.0 + static_cast<double>(Slices().size()));
  size_t uploads = 0;
  for (const FakeBackend::Ran& ran : Slices()) uploads += ran.uploaded_bytes > 0 ? 1 : 0;
  EXPECT_LE(uploads, jobs.size()) << "a batch is uploaded once";
}

TEST_F(SlicesTest, AJobWithoutACallerEndsAtTheNextSlice) {
  Start();
  auto job = Submit({.rows = 10000});
  WaitForSlices(2);
  engine_->Cancel(*job);
  EXPECT_LT(TimeOf(*job), absl::Seconds(5));  // of ten
  EXPECT_EQ(job->status()->code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(engine_->WaitIdle(SteadyNow() + absl::Seconds(5)));
  EXPECT_LT(Slices().size(), 30u);
  EXPECT_EQ(Metric("logitd_stopped_total{op=\"digest\"}"), 1);
  EXPECT_TRUE(Submit({})->Wait().ok());
}

TEST_F(SlicesTest, AJobWhoseDeadlinePassesEndsAtTheNextSlice) {
  Start();
  auto job = Submit({.rows = 10000, .deadline = SteadyNow() + absl::Milliseconds(60)});
  EXPECT_LT(TimeOf(*job), absl::Seconds(5));  // of ten
  EXPECT_EQ(job->status()->code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(job->status()->message()), HasSubstr("while it ran"));
  EXPECT_TRUE(engine_->WaitIdle(SteadyNow() + absl::Seconds(5)));
}

// Each job checks its own answer, whose place depends on the lists of the jobs before it.
TEST_F(SlicesTest, AJobThatEndsBetweenSlicesLeavesTheOthersTheirAnswers) {
  Start();
  auto blocker = Submit({.tag = 'x', .rows = 9});
  std::vector<std::shared_ptr<TestJob>> jobs;
  for (uint32_t tag : {'a', 'b', 'c', 'd'}) {
    jobs.push_back(Submit({.tag = tag, .rows = 30, .entries_per_row = 3, .notes_per_row = 2}));
  }
  WaitForSlices(2);
  engine_->Cancel(*jobs[1]);
  engine_->Cancel(*jobs[3]);
  EXPECT_TRUE(jobs[0]->Wait().ok());
  EXPECT_EQ(jobs[1]->Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(jobs[2]->Wait().ok());
  EXPECT_EQ(jobs[3]->Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(RowsOf("d"), 0) << "rows at the end are skipped";
  EXPECT_TRUE(blocker->Wait().ok());
}

TEST_F(SlicesTest, CloseEndsARunningJobAtTheNextSlice) {
  Start();
  auto job = Submit({.rows = 10000});
  WaitForSlices(2);
  const absl::Time start = SteadyNow();
  engine_->Stop();
  EXPECT_LT(SteadyNow() - start, absl::Seconds(5));  // of ten
  EXPECT_EQ(job->Wait().code(), absl::StatusCode::kUnavailable);
}

TEST_F(SlicesTest, AFailedSliceFailsItsBatch) {
  Start();
  auto job = Submit({.rows = 100});
  WaitForSlices(2);
  backend_.FailNext(FaultPoint::kWait, absl::UnavailableError("hiccup"));
  EXPECT_EQ(job->Wait().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Submit({})->Wait().ok());
}

TEST_F(SlicesTest, AWholeJobIsNotCut) {
  Start();
  EXPECT_TRUE(Submit({.rows = 45, .whole = true})->Wait().ok());
  ASSERT_EQ(Slices().size(), 1u);
  EXPECT_EQ(Slices()[0].rows, 45);
}

TEST_F(SlicesTest, TheFirstSliceOfAnUnknownKindIsSmall) {
  EngineOptions options = SliceOptions(1);
  options.slab_payload_bytes = 64 << 20;
  auto engine = Engine::Create(&backend_, options, &metrics_, [](const absl::Status&) {});
  engine_ = *std::move(engine);
  EXPECT_TRUE(Submit({.row_elements = 65536, .rows = 64})->Wait().ok());
  EXPECT_EQ(backend_.log()[0].rows, 4);  // of 256 KiB each
}

TEST_F(SlicesTest, ABatchOnAHeadIsCutWhereOneReadOfTheHeadEnds) {
  Start();
  const auto head = MakeHead({&backend_}, /*scale=*/1);
  EXPECT_TRUE(Submit({.tag = 'h', .row_elements = kWide, .rows = 200, .head = head})->Wait().ok());
  std::vector<int64_t> rows;
  for (const FakeBackend::Ran& ran : Slices()) rows.push_back(ran.rows);
  EXPECT_THAT(rows, ::testing::ElementsAre(64, 64, 64, 8));
}

TEST_F(SlicesTest, CallersShareAStreamByWeight) {
  Start();
  constexpr Caller kOne = {.id = 1, .weight = 1};
  constexpr Caller kThree = {.id = 2, .weight = 3};
  auto first = Submit({.tag = 'a', .rows = 1000, .caller = kOne});
  auto second = Submit({.tag = 'b', .rows = 1000, .caller = kThree});
  WaitForSlices(40);
  const double a = static_cast<double>(RowsOf("a"));
  const double b = static_cast<double>(RowsOf("b"));
  EXPECT_GT(b / a, 2.0) << a << " and " << b;
  EXPECT_LT(b / a, 4.5) << a << " and " << b;
  engine_->Cancel(*first);
  engine_->Cancel(*second);
}

// The flood waits for slabs and has more jobs than the light caller; it came first.
TEST_F(SlicesTest, AFloodDoesNotDelayALightCaller) {
  for (int streams : {1, 2}) {
    SCOPED_TRACE(absl::StrCat(streams, " streams"));
    engine_.reset();
    Start(SliceOptions(streams));
    std::vector<std::shared_ptr<TestJob>> flood;
    for (int i = 0; i < 40; ++i) flood.push_back(Submit({.tag = 'f', .rows = 200, .caller = {1}}));
    WaitForSlices(4);
    std::vector<int64_t> rows;
    for (int i = 0; i < 5; ++i) {
      rows.push_back(RowsBefore(*Submit({.tag = 's', .rows = 2, .caller = {2}}), 's'));
    }
    std::sort(rows.begin(), rows.end());
    EXPECT_LE(rows[2], 60);
    EXPECT_LE(rows[4], 150);
    EXPECT_FALSE(flood.back()->status().has_value());
    for (const auto& job : flood) engine_->Cancel(*job);
  }
}

TEST_F(SlicesTest, AFloodOfShortJobsDoesNotDelayALightCaller) {
  EngineOptions options = SliceOptions(2);
  options.max_batch_rows = 8;  // each batch is full with one job
  Start(options);
  std::vector<std::shared_ptr<TestJob>> flood;
  for (int i = 0; i < 200; ++i) flood.push_back(Submit({.tag = 'f', .rows = 8, .caller = {1}}));
  EXPECT_LE(RowsBefore(*Submit({.tag = 's', .row_elements = 5, .caller = {2}}), 's'), 100);
  EXPECT_FALSE(flood.back()->status().has_value());
  for (const auto& job : flood) engine_->Cancel(*job);
}

TEST_F(SlicesTest, BatchWorkRunsOnlyWhenNoInteractiveWorkWaits) {
  Start();
  constexpr Caller kBatch = {.id = 1, .weight = 100, .priority = Priority::kBatch};
  auto batch = Submit({.tag = 'b', .rows = 300, .caller = kBatch});
  WaitForSlices(3);
  auto inter = Submit({.tag = 'i', .rows = 60, .caller = {.id = 2}});
  auto more = Submit({.tag = 'j', .rows = 60, .caller = {.id = 3}});
  const size_t begin = Slices().size();
  EXPECT_TRUE(inter->Wait().ok());
  EXPECT_TRUE(more->Wait().ok());
  const std::vector<FakeBackend::Ran> slices = Slices();
  size_t end = slices.size();
  while (end > begin && slices[end - 1].tags == "b") --end;  // after all interactive work
  int64_t rows = 0;
  for (size_t i = begin; i < end; ++i) rows += slices[i].tags == "b" ? slices[i].rows : 0;
  EXPECT_LE(rows, 30) << "at most the slice that ran, and the next of the log";
  EXPECT_FALSE(batch->status().has_value());
  engine_->Cancel(*batch);
}

TEST_F(SlicesTest, BatchWorkDoesNotShareABatchWithInteractiveWork) {
  Start();
  backend_.Hold();
  auto running = Submit({.tag = 'x'});
  WaitForSlices(1);
  auto batch = Submit({.tag = 'b', .caller = {.id = 1, .priority = Priority::kBatch}});
  auto inter = Submit({.tag = 'i', .caller = {.id = 1}});
  backend_.Release();
  EXPECT_TRUE(batch->Wait().ok());
  EXPECT_TRUE(inter->Wait().ok());
  ASSERT_EQ(Slices().size(), 3u);
  EXPECT_EQ(Slices()[1].tags, "i");
  EXPECT_EQ(Slices()[2].tags, "b");
}

TEST_F(SlicesTest, LongJobsLeaveASlabForShortOnes) {
  Start();  // four slabs
  std::vector<std::shared_ptr<TestJob>> longer;
  for (uint64_t i = 0; i < 6; ++i) {
    longer.push_back(Submit({.tag = 'l', .rows = 1000, .caller = {.id = i}}));
  }
  WaitForSlices(20);
  EXPECT_EQ(Metric("logitd_slabs_in_use"), 3);
  EXPECT_EQ(Metric("logitd_queued_jobs"), 3);
  EXPECT_LE(RowsBefore(*Submit({.tag = 's', .caller = {.id = 7}}), 's'), 60);
  for (const auto& job : longer) engine_->Cancel(*job);
}

TEST_F(SlicesTest, SlowSlicesLeaveAStreamForOthers) {
  Start(SliceOptions(2));
  auto first = Submit({.tag = 'w', .rows = 300, .whole = true});
  auto second = Submit({.tag = 'w', .rows = 300, .whole = true});
  WaitForSlices(1);
  EXPECT_LE(RowsBefore(*Submit({.tag = 's', .caller = {.id = 5}}), 's'), 100);
  EXPECT_FALSE(first->status().has_value() && second->status().has_value());
  EXPECT_TRUE(first->Wait().ok());
  EXPECT_TRUE(second->Wait().ok());
}

TEST_F(SlicesTest, CostsAreThoseOfTheRowsThatRan) {
  Start();
  EXPECT_TRUE(Submit({.rows = 30})->Wait().ok());
  BatchKey key = {.op = &kDigest, .dtype = DType::kF32, .row_elements = kWide};
  const auto twenty_rows = [&] { return absl::Nanoseconds(20 * engine_->costs().PerRow(key)); };
  EXPECT_GE(twenty_rows(), absl::Milliseconds(19));
  EXPECT_LE(twenty_rows(), absl::Milliseconds(21));
  // Another shape of the op: by bytes.
  key.row_elements = 2 * kWide;
  EXPECT_GE(twenty_rows(), absl::Milliseconds(38));
  EXPECT_LE(twenty_rows(), absl::Milliseconds(42));
}

// Jobs end while their batch runs, waits and is taken again, on several streams.
TEST_F(SlicesTest, UnderRandomCancelsEveryJobEndsOnce) {
  EngineOptions options = SliceOptions(3);
  options.slabs_per_stream = 2;
  options.max_slice = absl::Microseconds(200);
  Start(options);
  backend_.SetRowTime(std::chrono::microseconds(20));
  std::vector<std::thread> threads;
  std::vector<std::vector<std::shared_ptr<TestJob>>> all(4);
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      uint32_t x = t + 1;
      const auto below = [&x](uint32_t n) { return (x = x * 1664525u + 1013904223u) / 65536 % n; };
      for (uint32_t i = 0; i < 150; ++i) {
        Shape shape{.tag = 1 + t * 1000 + i,
                    .row_elements = 5 + below(2),
                    .rows = 1 + below(100),
                    .entries_per_row = static_cast<int32_t>(below(3)),
                    .notes_per_row = static_cast<int32_t>(below(3)),
                    .caller = {.id = t, .weight = 1.0 + t}};
        if (below(3) == 0) shape.deadline = SteadyNow() + absl::Microseconds(below(20000));
        if (below(5) == 0) shape.caller.priority = Priority::kBatch;
        if (below(9) == 0) shape.whole = true;
        auto job = std::make_shared<TestJob>(shape);
        all[t].push_back(job);
        engine_->Submit(job);
        if (below(3) == 0) engine_->Cancel(*all[t][below(i + 1)]);
        if (below(4) == 0) absl::SleepFor(absl::Microseconds(below(1000)));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(engine_->WaitIdle(SteadyNow() + absl::Seconds(20)));
  std::map<absl::StatusCode, int> ends;
  for (const auto& mine : all) {
    for (const auto& job : mine) {
      ASSERT_EQ(job->dones(), 1);
      ASSERT_FALSE(job->misused());
      ++ends[job->status()->code()];
    }
  }
  EXPECT_GT(ends[absl::StatusCode::kOk], 50);
  EXPECT_GT(ends[absl::StatusCode::kCancelled], 10);
  const absl::Time end = SteadyNow() + absl::Seconds(5);
  while (Metric("logitd_slabs_in_use") > 0 && SteadyNow() < end) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(Metric("logitd_slabs_in_use"), 0);
}

}  // namespace
}  // namespace logitd::engine

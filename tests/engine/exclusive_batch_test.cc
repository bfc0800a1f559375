// Exclusive ops, whose batches hold one job: inputs copied with the payload, answers in place, and
// answers kept after Done.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/batch.h"
#include "server/engine/engine.h"
#include "server/engine/metrics.h"
#include "tests/engine/test_job.h"

namespace logitd::engine {
namespace {

using ::testing::HasSubstr;

enum ShiftAxis : size_t { kShiftRows = kRowAxis, kShiftElements, kShiftNotes };

// The op "shift" adds a note and the call's number to every element of the payload, and writes one
// number a row.
constexpr Array kShiftInputs[] = {{kShiftNotes, sizeof(uint32_t)}, {kShiftNotes, sizeof(uint32_t)}};
constexpr Array kShiftOutputs[] = {{kShiftElements, sizeof(uint32_t)},
                                   {kShiftRows, sizeof(uint64_t)}};

const OpTraits kShift = {
    .name = "shift", .inputs = kShiftInputs, .outputs = kShiftOutputs, .exclusive_batch = true};
constexpr const OpTraits* kShiftOps[] = {&kShift};

class ShiftCall final : public ExclusiveCall {
 public:
  explicit ShiftCall(uint32_t add) : add_(add) {}
  absl::Status Enqueue(Stream& stream, const BatchView& batch) const override {
    const auto run = [&] {
      const auto* in = reinterpret_cast<const uint32_t*>(batch.payload);
      const auto* copied = reinterpret_cast<const uint32_t*>(batch.inputs[0]);
      const auto* written = reinterpret_cast<const uint32_t*>(batch.inputs[1]);
      const int64_t skipped = batch.first_row * batch.row_elements;
      auto* out = reinterpret_cast<uint32_t*>(batch.outputs[0]) + skipped;
      const int64_t notes = batch.counts[kShiftNotes];
      for (int64_t i = 0; i < batch.rows() * batch.row_elements; ++i) {
        const int64_t n = notes == 0 ? 0 : (skipped + i) % notes;
        const uint32_t note = notes == 0 ? 0 : copied[n] ^ written[n];
        out[i] = in[i] + add_ + note;
      }
      for (int64_t r = 0; r < batch.rows(); ++r) {
        reinterpret_cast<uint64_t*>(batch.outputs[1])[r] =
            static_cast<uint64_t>(batch.first_row + r) + add_;
      }
      return absl::OkStatus();
    };
    return static_cast<FakeStream&>(stream).Run(std::string(1, static_cast<char>(add_)),
                                                batch.rows(), run);
  }

 private:
  const uint32_t add_;
};

class ShiftJob final : public CheckedJob {
 public:
  struct Shape {
    uint32_t tag = 'a';
    int64_t rows = 1;
    int64_t row_elements = 5;
    int64_t notes = 0;
    bool in_place = false;
    bool keep = false;
    bool placed = false;  // the payload and the first input lie elsewhere
  };

  explicit ShiftJob(const Shape& shape) : shape_(shape), call_(shape.tag) {
    keep_answer = shape.keep;
    spec_.key = {.op = &kShift, .dtype = DType::kF32, .row_elements = shape.row_elements};
    spec_.counts[kShiftRows] = shape.rows;
    spec_.counts[kShiftElements] = shape.rows * shape.row_elements;
    spec_.counts[kShiftNotes] = shape.notes;
    spec_.in_place = shape.in_place;
    spec_.call = &call_;
    spec_.size = SizeOfJob(spec_);
    if (shape.placed) Place();
  }

  absl::Span<const RowsPlace> places() const override { return places_; }

  void CopyRowsTo(std::byte* dst, size_t row_stride) override {
    Check(row_stride == static_cast<size_t>(shape_.row_elements) * 4);
    if (shape_.placed) return;
    for (int64_t i = 0; i < elements(); ++i) {
      const uint32_t value = In(i);
      std::memcpy(dst + i * 4, &value, 4);
    }
    size_t offsets[kMaxArrays];
    LayOut(kShiftInputs, spec_.counts, static_cast<size_t>(spec_.rows()) * row_stride, offsets);
    for (int64_t i = 0; i < shape_.notes; ++i) {
      const uint32_t value = Note(i);
      std::memcpy(dst + offsets[0] + i * 4, &value, 4);
    }
  }

  void WriteInputs(absl::Span<std::byte* const> inputs, const AxisCounts& first) override {
    Check(first == AxisCounts{});
    for (int64_t i = 0; i < shape_.notes; ++i) {
      const auto value = static_cast<uint32_t>(i);
      std::memcpy(inputs[1] + i * 4, &value, 4);
    }
  }

 private:
  int64_t elements() const { return shape_.rows * shape_.row_elements; }
  uint32_t In(int64_t i) const { return static_cast<uint32_t>(i) * 2654435761u + shape_.tag; }
  uint32_t Note(int64_t i) const { return static_cast<uint32_t>(i) * 40503u + 7; }

  void Place() {
    for (int64_t i = 0; i < elements(); ++i) payload_.push_back(In(i));
    for (int64_t i = 0; i < shape_.notes; ++i) notes_.push_back(Note(i));
    const auto place = [](const std::vector<uint32_t>& values, int64_t rows) {
      const size_t row_bytes = values.size() * 4 / static_cast<size_t>(rows);
      return RowsPlace{.data = reinterpret_cast<const std::byte*>(values.data()),
                       .row_stride = row_bytes,
                       .row_bytes = row_bytes,
                       .rows = rows};
    };
    places_.push_back(place(payload_, shape_.rows));
    if (shape_.notes > 0) places_.push_back(place(notes_, 1));
  }

  bool IsRight(absl::Span<const absl::Span<const std::byte>> outputs) const override {
    if (outputs.size() != 2 || outputs[0].size() != static_cast<size_t>(elements()) * 4 ||
        outputs[1].size() != static_cast<size_t>(shape_.rows) * 8) {
      return false;
    }
    for (int64_t i = 0; i < elements(); ++i) {
      const int64_t n = shape_.notes == 0 ? 0 : i % shape_.notes;
      const uint32_t note = shape_.notes == 0 ? 0 : Note(n) ^ static_cast<uint32_t>(n);
      const uint32_t want = In(i) + shape_.tag + note;
      if (std::memcmp(outputs[0].data() + i * 4, &want, 4) != 0) return false;
    }
    for (int64_t r = 0; r < shape_.rows; ++r) {
      const uint64_t want = static_cast<uint64_t>(r) + shape_.tag;
      if (std::memcmp(outputs[1].data() + r * 8, &want, 8) != 0) return false;
    }
    return true;
  }

  const Shape shape_;
  const ShiftCall call_;
  std::vector<uint32_t> payload_;
  std::vector<uint32_t> notes_;
  std::vector<RowsPlace> places_;
};

class ExclusiveBatchTest : public ::testing::Test {
 protected:
  ~ExclusiveBatchTest() override {
    backend_.Release();
    for (const auto& job : jobs_) job->Take();
    engine_.reset();
    EXPECT_EQ(backend_.live_slabs(), 0);
    for (const auto& job : jobs_) {
      EXPECT_EQ(job->dones(), 1);
      EXPECT_FALSE(job->misused());
    }
  }

  void Start(const EngineOptions& options = SmallOptions(kShiftOps)) {
    auto engine =
        Engine::Create(&backend_, options, &metrics_, [](const absl::Status&) { FAIL(); });
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
  }

  std::shared_ptr<ShiftJob> Submit(const ShiftJob::Shape& shape) {
    auto job = std::make_shared<ShiftJob>(shape);
    jobs_.push_back(job);
    engine_->Submit(job);
    return job;
  }

  double Gauge(const std::string& name) {
    const std::string text = Scrape(metrics_);
    const size_t at = text.find("\n" + name + " ");
    return at == std::string::npos ? -1 : std::stod(text.substr(at + name.size() + 2));
  }
  bool WaitForGauge(const std::string& name, double value) {
    const absl::Time end = SteadyNow() + absl::Seconds(10);
    while (Gauge(name) != value) {
      if (SteadyNow() > end) return false;
      absl::SleepFor(absl::Milliseconds(1));
    }
    return true;
  }

  FakeBackend backend_;
  Metrics metrics_{{}};
  std::unique_ptr<Engine> engine_;
  std::vector<std::shared_ptr<ShiftJob>> jobs_;
};

TEST_F(ExclusiveBatchTest, EachJobRunsInItsOwnBatch) {
  Start();
  backend_.Hold();
  for (uint32_t tag : {'a', 'b', 'c', 'd', 'e', 'f'}) Submit({.tag = tag});
  backend_.Release();
  std::string order;
  for (const auto& job : jobs_) EXPECT_TRUE(job->Wait().ok());
  for (const FakeBackend::Ran& ran : backend_.log()) order += ran.tags;
  EXPECT_EQ(order, "abcdef");
}

TEST_F(ExclusiveBatchTest, RowsHaveNoPaddingAndInputsMayBeCopiedWithThem) {
  Start();
  for (const bool in_place : {false, true}) {
    EXPECT_TRUE(
        Submit({.rows = 7, .row_elements = 3, .notes = 5, .in_place = in_place})->Wait().ok());
  }
  // 7 rows of 12 bytes, rounded up to 96, then the notes twice: 20 bytes rounded up to 32, and 20.
  for (const FakeBackend::Ran& ran : backend_.log()) EXPECT_EQ(ran.uploaded_bytes, 96 + 32 + 20);
}

TEST_F(ExclusiveBatchTest, PayloadAndInputsThatHaveAPlaceAreNotUploaded) {
  Start();
  for (const bool in_place : {false, true}) {
    EXPECT_TRUE(
        Submit({.rows = 7, .row_elements = 3, .notes = 5, .in_place = in_place, .placed = true})
            ->Wait()
            .ok());
  }
  // The payload is not uploaded. The second input is, and what little lies between: bytes 84 to 148.
  for (const FakeBackend::Ran& ran : backend_.log()) {
    EXPECT_EQ(ran.uploaded_bytes, 64);
    EXPECT_EQ(ran.gathered_bytes, 84 + 20);
  }
}

TEST_F(ExclusiveBatchTest, OnlyBytesBoundTheRowsAndAnAnswerInPlaceCostsNone) {
  EngineOptions options = SmallOptions(kShiftOps);
  options.slab_answer_bytes = 1024;
  Start(options);
  // More rows than max_batch_rows. The answer in place is as large as the payload.
  EXPECT_TRUE(Submit({.rows = 128, .row_elements = 8, .in_place = true})->Wait().ok());
  const absl::Status aside = Submit({.rows = 128, .row_elements = 8})->Wait();
  EXPECT_EQ(aside.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(aside.message()), HasSubstr("answer: got 5120 bytes for 128 rows"));
  const absl::Status large = Submit({.rows = 129, .row_elements = 8, .in_place = true})->Wait();
  EXPECT_THAT(std::string(large.message()),
              HasSubstr("payload: got 4128 bytes (129 rows of 8 f32 elements"));
}

TEST_F(ExclusiveBatchTest, JobsOfManyRowsWaitForSlabsLikeOtherJobs) {
  EngineOptions options = SmallOptions(kShiftOps);
  options.slab_answer_bytes = 1024;
  Start(options);
  backend_.Hold();
  // More jobs than slabs, each with more rows than max_batch_rows.
  for (int i = 0; i < 9; ++i) Submit({.rows = 128, .row_elements = 8, .in_place = true});
  EXPECT_GT(Gauge("logitd_queued_jobs"), 0);
  backend_.Release();
  for (const auto& job : jobs_) EXPECT_TRUE(job->Wait().ok());
  EXPECT_TRUE(WaitForGauge("logitd_slabs_in_use", 0));
}

TEST_F(ExclusiveBatchTest, AKeptAnswerStaysWhileOthersRun) {
  Start();
  for (const bool in_place : {false, true}) {
    auto kept = Submit({.tag = 'k', .rows = 9, .in_place = in_place, .keep = true});
    ASSERT_TRUE(kept->Wait().ok());
    EXPECT_TRUE(WaitForGauge("logitd_slabs_in_use", 1));
    EXPECT_TRUE(WaitForGauge("logitd_slabs_kept", 1));
    for (int i = 0; i < 20; ++i) EXPECT_TRUE(Submit({.tag = 'o', .rows = 60})->Wait().ok());
    EXPECT_TRUE(kept->KeptIsRight());
    kept->Take();
    EXPECT_TRUE(WaitForGauge("logitd_slabs_kept", 0));
    EXPECT_TRUE(WaitForGauge("logitd_slabs_in_use", 0));
  }
}

TEST_F(ExclusiveBatchTest, KeptAnswersLeaveEveryStreamASlab) {
  Start();  // four slabs, one stream
  std::vector<std::shared_ptr<ShiftJob>> kept;
  for (int i = 0; i < 5; ++i) {
    kept.push_back(Submit({.tag = 'k', .rows = 3, .keep = true}));
    ASSERT_TRUE(kept.back()->Wait().ok());
    EXPECT_EQ(kept.back()->could_keep(), i < 3) << i;
  }
  kept[1]->Take();
  auto next = Submit({.tag = 'n', .keep = true});
  ASSERT_TRUE(next->Wait().ok());
  EXPECT_TRUE(next->could_keep());
  EXPECT_TRUE(kept[0]->KeptIsRight());
  EXPECT_TRUE(kept[2]->KeptIsRight());
}

TEST_F(ExclusiveBatchTest, AFailedBatchKeepsNothing) {
  Start();
  for (FaultPoint point : {FaultPoint::kUpload, FaultPoint::kOp, FaultPoint::kWait}) {
    backend_.FailNext(point, absl::UnavailableError("hiccup"));
    auto job = Submit({.keep = true});
    EXPECT_EQ(job->Wait().code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(job->Take(), nullptr);
  }
  EXPECT_TRUE(WaitForGauge("logitd_slabs_in_use", 0));
}

TEST_F(ExclusiveBatchTest, TheEngineWaitsForKeptAnswers) {
  Start();
  auto kept = Submit({.tag = 'k', .rows = 9, .keep = true});
  ASSERT_TRUE(kept->Wait().ok());
  std::atomic<bool> dropped = false;
  std::thread transport([&] {
    absl::SleepFor(absl::Milliseconds(50));
    EXPECT_TRUE(kept->KeptIsRight());
    dropped = true;
    kept->Take();
  });
  engine_.reset();
  EXPECT_TRUE(dropped);
  transport.join();
}

// Cancelled and failed jobs, and answers dropped at once, later, on another thread or never read:
// every slab comes back exactly once. Otherwise two jobs would write to one slab.
TEST_F(ExclusiveBatchTest, AStormLeavesEverySlabFree) {
  EngineOptions options = SmallOptions(kShiftOps);
  options.streams = 2;
  options.slabs_per_stream = 2;
  std::atomic<int> calls = 0;
  backend_.SetFaults([&calls](FaultPoint) -> absl::Status {
    if (calls.fetch_add(1) % 23 != 7) return absl::OkStatus();
    return absl::UnavailableError("hiccup");
  });
  backend_.SetOpTime(std::chrono::microseconds(30));
  Start(options);
  constexpr int kThreads = 4;
  constexpr int kJobs = 200;
  std::mutex mutex;
  std::vector<std::shared_ptr<ShiftJob>> all;
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t + 1);
      std::vector<std::shared_ptr<ShiftJob>> holding;
      for (uint32_t i = 0; i < kJobs; ++i) {
        auto job = std::make_shared<ShiftJob>(
            ShiftJob::Shape{.tag = 1 + t * kJobs + i,
                            .rows = 1 + static_cast<int64_t>(random() % 40),
                            .row_elements = 1 + static_cast<int64_t>(random() % 9),
                            .notes = static_cast<int64_t>(random() % 6),
                            .in_place = random() % 2 == 0,
                            .keep = random() % 3 != 0});
        engine_->Submit(job);
        if (random() % 5 == 0) engine_->Cancel(*job);
        if (random() % 2 == 0) job->Wait().IgnoreError();
        holding.push_back(job);
        if (random() % 4 == 0) {
          for (const auto& held : holding) {
            if (!held->Wait().ok() || !held->could_keep()) continue;
            if (auto keep = held->Take()) keep.reset();
          }
          holding.clear();
        }
        std::lock_guard<std::mutex> lock(mutex);
        all.push_back(job);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(engine_->WaitIdle(SteadyNow() + absl::Seconds(20)));
  int kept = 0;
  for (const auto& job : all) {
    EXPECT_EQ(job->dones(), 1);
    EXPECT_FALSE(job->misused());
    if (job->could_keep()) ++kept;
    job->Take();
  }
  EXPECT_GT(kept, kJobs / 4);
  EXPECT_TRUE(WaitForGauge("logitd_slabs_in_use", 0));
  EXPECT_EQ(Gauge("logitd_slabs_kept"), 0);
}

}  // namespace
}  // namespace logitd::engine

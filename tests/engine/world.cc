#include "tests/engine/world.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"

namespace logitd::engine {
namespace {

// "due20" -> 20 for the key "due".
bool Number(absl::string_view word, absl::string_view key, int* number) {
  return absl::StartsWith(word, key) && absl::SimpleAtoi(word.substr(key.size()), number);
}

// A step's number. 0: it has none.
int NumberOf(const std::vector<std::string>& words) {
  int number = 0;
  return words.size() > 1 && absl::SimpleAtoi(words[1], &number) ? number : 0;
}

int64_t CountOf(RunningBatches& batches, Batch::State state, auto counts) {
  int64_t count = 0;
  batches.ForEach(state, [&](Batch* batch) { count += counts(*batch) ? 1 : 0; });
  return count;
}

}  // namespace

World::World(const Options& options)
    : options_(options),
      engine_options_(EngineOptionsOf(options)),
      slabs_(MakeDevices()),
      scheduler_(engine_options_, kRules, options.devices, slabs_, costs_) {
  for (const auto& backend : backends_) {
    for (int i = 0; i < options.streams; ++i) {
      seats_.emplace_back().stream = backend->CreateStream(StreamUse::kOps).value();
    }
  }
  costs_.Ran({.op = &kDigest, .dtype = DType::kF32, .row_elements = 4}, 1, 16, kRow);
}

World::~World() {
  Close();
  for (int stream = 0; stream < streams(); ++stream) {
    RunSlice(stream);
    GiveBack(stream);
  }
  Settle();
  for (const Known& known : jobs_) {
    known.job->Take();
    CheckEnd(known);
  }
  EXPECT_TRUE(scheduler_.idle());
  EXPECT_EQ(scheduler_.waiting(), 0);
  EXPECT_EQ(scheduler_.running().slabs_in_use(), 0);
  EXPECT_EQ(scheduler_.running().kept(), 0);
}

EngineOptions World::EngineOptionsOf(const Options& options) {
  EngineOptions engine = SmallOptions(kAllTestOps);
  engine.streams = options.streams;
  engine.slabs_per_stream = options.slabs;
  engine.max_batch_rows = options.max_rows;
  engine.slab_payload_bytes = options.payload;
  engine.slab_answer_bytes = options.answer;
  engine.max_batch_delay = options.delay;
  return engine;
}

std::vector<Slab> World::MakeDevices() {
  std::vector<Slab> slabs;
  for (int device = 0; device < options_.devices; ++device) {
    backends_.push_back(std::make_unique<FakeBackend>(
        DeviceInfo{.backend = "fake", .name = "fake", .is_host = options_.on_host}));
    backends_.back()->UseClock(&clock_);
    backends_.back()->SetRowTime(absl::ToChronoMicroseconds(kRow));
    for (int i = 0; i < options_.streams * options_.slabs; ++i) {
      slabs.push_back(backends_.back()->AllocateSlab(layout_.bytes).value());
    }
  }
  return slabs;
}

std::shared_ptr<const Head> World::HeadOf(int scale, bool sharded) {
  std::shared_ptr<const Head>& head = heads_[{scale, sharded}];
  if (head != nullptr) return head;
  std::vector<Backend*> backends;
  for (const auto& backend : backends_) backends.push_back(backend.get());
  return head = MakeHead(backends, static_cast<float>(scale), sharded);
}

// ---- the language

void World::Run(absl::string_view script) {
  for (const absl::string_view step : absl::StrSplit(script, ';')) {
    std::vector<std::string> words = absl::StrSplit(step, ' ', absl::SkipEmpty());
    SCOPED_TRACE(step);
    ASSERT_FALSE(words.empty());
    int times = 0;
    const bool repeats = absl::SimpleAtoi(words[0], &times);
    if (repeats) words.erase(words.begin());
    for (int i = 0; i < (repeats ? times : 1); ++i) {
      Step(words);
      Settle();
    }
  }
}

void World::Step(const std::vector<std::string>& words) {
  const std::string& verb = words[0];
  const int number = NumberOf(words);
  if (verb == "take" || verb == "none") {
    EXPECT_EQ(Take(number), verb == "take");
  } else if (verb == "try") {
    Take(number);
  } else if (verb == "end") {
    RunSlice(number);
    GiveBack(number);
  } else if (verb == "run" && words.size() == 1) {
    Drain();
  } else if (verb == "run") {
    for (int i = 0; i < number; ++i) {
      RunSlice(i % streams());
      GiveBack(i % streams());
      EXPECT_TRUE(Take(i % streams()));
    }
  } else if (verb == "pass" || verb == "late") {
    Advance(absl::Milliseconds(number));
    if (verb == "pass") MakeDue();
  } else if (verb == "cancel") {
    Cancel(Find(words.at(1)[0]));
  } else if (verb == "drop") {
    Drop(Find(words.at(1)[0]));
  } else if (verb == "lose") {
    Lose(number);
  } else if (verb == "close") {
    Close();
  } else if (verb == "fail") {
    const std::string& where = words.at(1);
    Fail(0,
         where == "upload" ? FaultPoint::kUpload
         : where == "op"   ? FaultPoint::kOp
                           : FaultPoint::kWait,
         words.at(2) == "internal" ? absl::InternalError("sticky")
                                   : absl::UnavailableError("hiccup"));
  } else {
    ASSERT_EQ(verb.size(), 1u) << "unknown step";
    SubmitWords(words);
  }
}

void World::SubmitWords(const std::vector<std::string>& words) {
  TestJob::Shape shape{.tag = static_cast<uint32_t>(words[0][0])};
  ShiftJob::Shape alone{.tag = shape.tag};
  bool exclusive = false;
  int number = 0;
  for (size_t i = 1; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (absl::ascii_isdigit(static_cast<unsigned char>(word[0]))) {
      const std::vector<std::string> dims = absl::StrSplit(word, 'x');
      ASSERT_TRUE(absl::SimpleAtoi(dims.at(0), &shape.row_elements));
      ASSERT_TRUE(absl::SimpleAtoi(dims.at(1), &shape.rows));
    } else if (Number(word, "due", &number)) {
      shape.deadline = now() + absl::Milliseconds(number);
    } else if (Number(word, "d", &number)) {
      shape.device = number;
      shape.placed = true;
    } else if (Number(word, "k", &number)) {
      shape.entries_per_row = number;
    } else if (Number(word, "n", &number)) {
      shape.notes_per_row = number;
      alone.notes = number;
    } else if (Number(word, "h", &number) || Number(word, "s", &number)) {
      shape.head = HeadOf(number, word[0] == 's');
    } else if (Number(word, "c", &number)) {
      shape.caller.id = static_cast<uint64_t>(number);
    } else if (Number(word, "w", &number)) {
      shape.caller.weight = number;
    } else if (word == "batch") {
      shape.caller.priority = Priority::kBatch;
    } else if (word == "alone") {
      exclusive = true;
    } else {
      bool* const flag = word == "whole"      ? &shape.whole
                         : word == "steady"   ? &shape.steady
                         : word == "placed"   ? &shape.placed
                         : word == "in_place" ? &alone.in_place
                         : word == "keep"     ? &alone.keep
                                              : nullptr;
      ASSERT_NE(flag, nullptr) << word;
      *flag = true;
    }
  }
  if (!exclusive) return Submit(std::make_shared<TestJob>(shape));
  alone.rows = shape.rows;
  alone.row_elements = shape.row_elements;
  alone.placed = shape.placed;
  alone.caller = shape.caller;
  alone.deadline = shape.deadline;
  Submit(std::make_shared<ShiftJob>(alone));
}

size_t World::Find(char name) const {
  for (size_t i = 0; i < jobs_.size(); ++i) {
    if (jobs_[i].job->tag() == static_cast<uint32_t>(name)) return i;
  }
  ADD_FAILURE() << "no job " << name;
  return 0;
}

std::string World::Failures() const {
  std::vector<std::string> failures;
  for (const Known& known : jobs_) {
    const std::optional<absl::Status> status = known.job->status();
    if (status.has_value() && status->ok()) continue;
    failures.push_back(
        absl::StrCat(std::string(1, static_cast<char>(known.job->tag())), ":",
                     status.has_value() ? absl::StatusCodeToString(status->code()) : "-"));
  }
  return absl::StrJoin(failures, " ");
}

// ---- what happens

void World::Submit(std::shared_ptr<CheckedJob> job) {
  const size_t index = jobs_.size();
  job->on_done = [this, index](const absl::Status&) { jobs_[index].ended = now(); };
  jobs_.push_back({.job = job});
  scheduler_.Submit(std::move(job), clock_.Nanos());
}

bool World::Take(int stream) {
  Seat& seat = seats_[static_cast<size_t>(stream)];
  if (seat.batch != nullptr) return false;
  const int device = DeviceOf(stream);
  const bool has_work = scheduler_.HasWork(device, clock_.Nanos());
  Batch* const batch = scheduler_.Take(device, clock_.Nanos());
  EXPECT_TRUE(has_work || batch == nullptr);
  if (batch == nullptr) return false;
  seat.batch = batch;
  seat.ran = false;
  seat.jobs.clear();
  if (!slices_.empty()) slices_.push_back('|');
  for (const Slot& slot : batch->slots) {
    seat.jobs.push_back(slot.job);
    slices_.push_back(static_cast<char>(static_cast<const CheckedJob*>(slot.job)->tag()));
  }
  CheckTaken(*batch, device, !batch->progress.begun);
  return true;
}

void World::RunSlice(int stream) {
  Seat& seat = seats_[static_cast<size_t>(stream)];
  if (seat.batch == nullptr || seat.ran) return;
  seat.ran = true;
  Batch* const batch = seat.batch;
  JobTimes oldest;
  const absl::Status status = engine::RunSlice(
      *seat.stream, layout_, kRules, costs_, *batch,
      [&](const absl::Status&) { Lose(DeviceOf(stream)); },
      [&]() -> std::shared_ptr<const void> {
        if (!scheduler_.running().Keep(batch)) return nullptr;
        return {batch->slab.host,
                [this, batch](const void*) { scheduler_.running().TakeBack(batch); }};
      },
      &oldest);
  failed_ = failed_ || !status.ok();
}

void World::GiveBack(int stream) {
  Seat& seat = seats_[static_cast<size_t>(stream)];
  if (!seat.ran) return;
  seat.ran = false;
  seat.jobs.clear();
  scheduler_.GiveBack(std::exchange(seat.batch, nullptr), now());
}

void World::Cancel(size_t job) {
  Known& known = jobs_[job];
  known.cancelled = known.cancelled || known.job->dones() == 0;
  scheduler_.Cancel(known.job.get());
}

void World::MakeDue() {
  scheduler_.MakeDue(now());
  Settle();
  for (const Known& known : jobs_) {
    if (known.job->dones() > 0 || IsRunning(*known.job)) continue;
    ASSERT_GT(known.job->spec().deadline, now()) << "a deadline was forgotten";
  }
}

void World::Fail(int device, FaultPoint point, absl::Status status) {
  this->device(device).FailNext(point, std::move(status));
}

void World::Lose(int device) {
  if (scheduler_.running().lost(device) || devices_left_ == 0) return;
  failed_ = true;
  if (--devices_left_ == 0) return Close();
  scheduler_.Lose(device, "lost", now());
}

void World::Close() {
  closed_ = true;
  scheduler_.Close("closed", now());
}

void World::Drain() {
  int stuck = 0;
  while (!scheduler_.idle() && stuck < 100) {
    bool any = false;
    for (int stream = 0; stream < streams(); ++stream) {
      RunSlice(stream);
      GiveBack(stream);
      any = Take(stream) || any;
    }
    Settle();
    stuck = any ? 0 : stuck + 1;
    if (any || scheduler_.idle()) continue;
    ASSERT_LT(scheduler_.next_due(), absl::FromUnixNanos(WaitingJobs::kNever))
        << "a job waits for nothing";
    if (scheduler_.next_due() > now()) Advance(scheduler_.next_due() - now());
    MakeDue();
  }
  ASSERT_LT(stuck, 100) << "a job waits for ever";
}

// ---- what holds in every state

bool World::IsRunning(const Job& job) const {
  return std::any_of(seats_.begin(), seats_.end(), [&](const Seat& seat) {
    return std::find(seat.jobs.begin(), seat.jobs.end(), &job) != seat.jobs.end();
  });
}

void World::Settle() {
  JobList ended = scheduler_.TakeEnded();
  const int64_t count = ended.size;
  while (Job* job = ended.PopFront()) Scheduler::Tell(job, clock_.Nanos());
  scheduler_.Told(count);
  int64_t left = 0;
  for (const Known& known : jobs_) {
    if (known.job->dones() > 0 || IsRunning(*known.job)) continue;
    ++left;
    const JobSpec& spec = known.job->spec();
    ASSERT_FALSE(known.cancelled) << "its caller has left";
    ASSERT_FALSE(closed_) << "the engine is closed";
    ASSERT_TRUE(scheduler_.running().CanRun(spec.key)) << "no device can run it";
    ASSERT_LE(scheduler_.next_due(), spec.deadline);
    CheckShortWork(spec);
  }
  const int64_t paused =
      CountOf(scheduler_.running(), Batch::State::kPaused, [&](const Batch& batch) {
        EXPECT_FALSE(scheduler_.running().IsLost(batch));
        return true;
      });
  ASSERT_EQ(left, scheduler_.waiting() + paused) << "a job is lost, or counted twice";
}

// A short interactive job that is due waits only for a stream or a slab.
void World::CheckShortWork(const JobSpec& spec) {
  if (spec.rows() > 4 || spec.caller.priority == Priority::kBatch || IsSharded(spec.key) ||
      options_.delay > absl::ZeroDuration() || spec.deadline <= now()) {
    return;
  }
  for (int stream = 0; stream < streams(); ++stream) {
    const int device = DeviceOf(stream);
    if (seats_[static_cast<size_t>(stream)].batch != nullptr || scheduler_.running().lost(device) ||
        scheduler_.running().FreeBatch(device) == nullptr ||
        (spec.key.device != kAnyDevice && spec.key.device != device)) {
      continue;
    }
    ASSERT_TRUE(scheduler_.HasWork(device, clock_.Nanos())) << "a short job waits for nothing";
  }
}

void World::CheckTaken(const Batch& batch, int device, bool is_new) {
  const BatchKey key = batch.slots.front().job->spec().key;
  ASSERT_EQ(batch.device, device);
  ASSERT_FALSE(scheduler_.running().lost(device)) << "a lost device runs something";
  ASSERT_TRUE(batch.slots.size() == 1 || (is_new && !key.op->exclusive_batch));
  for (const Slot& slot : batch.slots) {
    const JobSpec& spec = slot.job->spec();
    ASSERT_TRUE(spec.key == key) << "keys are mixed";
    ASSERT_EQ(spec.caller.priority, batch.slots.front().job->spec().caller.priority);
    ASSERT_TRUE(spec.key.device == kAnyDevice || spec.key.device == device);
    ASSERT_TRUE(!is_new || spec.deadline > now()) << "a late job runs";
  }
  if (IsSharded(key)) {
    ASSERT_EQ(device, 0);
    ASSERT_EQ(devices_left_, devices());
    const auto sharded = [](const Batch& b) { return IsSharded(b.slots.front().job->spec().key); };
    int64_t running = 0;
    for (const Seat& seat : seats_) {
      running += seat.batch != nullptr && !seat.ran && sharded(*seat.batch) ? 1 : 0;
    }
    ASSERT_EQ(running, 1) << "two slices on sharded heads run at a time";
  }
  if (is_new) CheckRoom(batch, device);
}

// RunningBatches, "Room for short work": `batch` has just begun.
void World::CheckRoom(const Batch& batch, int device) {
  using State = Batch::State;
  RunningBatches& running = scheduler_.running();
  const auto here = [&](const Batch& other) { return other.device == device; };
  const int64_t at_work =
      CountOf(running, State::kRunning, here) + CountOf(running, State::kPaused, here);
  if (running.FreeBatch(device) == nullptr && at_work > 1) {
    const Slot& first = batch.slots.front();
    ASSERT_EQ(first.job->spec().caller.priority, Priority::kInteractive)
        << "batch work has the last slab";
    const int64_t most = kRowNs * (options_.streams * options_.slabs == 2 ? 50 : 10);
    ASSERT_LE(first.cost_ns, static_cast<double>(most)) << "long work has the last slab";
  }
  const auto slow = [&](const Batch& other) {  // by its estimate, and in truth
    return other.whole && other.rows > 50 && !running.lost(other.device) &&
           other.slots.front().cost_ns > 50.0 * kRowNs;
  };
  if (!slow(batch)) return;
  const auto slow_here = [&](const Batch& other) { return here(other) && slow(other); };
  ASSERT_LE(CountOf(running, State::kRunning, slow_here), std::max(1, options_.streams - 1));
  ASSERT_LE(CountOf(running, State::kRunning, slow),
            std::max(1, options_.streams * devices_left_ - 1));
}

// The job got Done once, with a status that has a cause.
void World::CheckEnd(const Known& known) const {
  using Code = absl::StatusCode;
  CheckedJob& job = *known.job;
  SCOPED_TRACE(absl::StrCat("job ", job.tag()));
  ASSERT_EQ(job.dones(), 1);
  ASSERT_FALSE(job.misused());
  ASSERT_EQ(known.job.use_count(), 1) << "the engine still holds the job";
  const Code code = job.status()->code();
  const bool fits = CheckFits(job.spec(), engine_options_).ok();
  const bool has_cause = code == Code::kOk                 ? !known.cancelled && fits
                         : code == Code::kCancelled        ? known.cancelled
                         : code == Code::kDeadlineExceeded ? job.spec().deadline <= known.ended
                         : code == Code::kInvalidArgument  ? !fits
                         : code == Code::kUnavailable      ? failed_ || closed_
                                                           : false;
  ASSERT_TRUE(has_cause) << *job.status();
}

}  // namespace logitd::engine

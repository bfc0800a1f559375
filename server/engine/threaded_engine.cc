#include "server/engine/threaded_engine.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/sharded_stream.h"
#include "spdlog/spdlog.h"

namespace logitd::engine {
namespace {

// How long the destructor waits for kept answers. The transport drops them when its connections
// end.
constexpr absl::Duration kKeptAnswersTimeout = absl::Seconds(5);

// A job that is expected to take longer is not run by the thread that submits it: beside it, two
// hand-overs are nothing.
constexpr absl::Duration kMostAlone = absl::Microseconds(300);

// Counts the threads inside a public call, from before it first uses the object to after it last
// does.
class CallerScope {
 public:
  explicit CallerScope(std::atomic<int>& callers) : callers_(callers) {
    callers_.fetch_add(1, std::memory_order_relaxed);
  }
  ~CallerScope() { callers_.fetch_sub(1, std::memory_order_release); }

 private:
  std::atomic<int>& callers_;
};

}  // namespace

SlabPool::~SlabPool() {
  for (size_t i = 0; i < slabs_.size(); ++i) owners_[i]->FreeSlab(slabs_[i]);
}

absl::Status SlabPool::Add(Backend* backend, size_t bytes) {
  absl::StatusOr<Slab> slab = backend->AllocateSlab(bytes);
  if (!slab.ok()) return slab.status();
  slabs_.push_back(*slab);
  owners_.push_back(backend);
  return absl::OkStatus();
}

ThreadedEngine::ThreadedEngine(Parts parts, const EngineOptions& options, const SliceRules& rules,
                               Metrics* metrics,
                               absl::AnyInvocable<void(absl::Status)> on_device_lost)
    : options_(options),
      layout_(options),
      rules_(rules),
      clock_(*options.clock),
      on_host_(parts.devices->info(0).is_host),
      metrics_(metrics),
      on_device_lost_(std::move(on_device_lost)),
      parts_(std::move(parts)),
      activity_(static_cast<int>(parts_.streams.size()), options.ops),
      desk_(std::make_shared<ReturnDesk>()),
      scheduler_(options_, rules_, parts_.devices->count(), parts_.slabs->slabs(), costs_),
      idle_(parts_.devices->count(), options.streams, options.idle_spin),
      alarm_(*options.clock,
             [this](absl::Time) {
               absl::Time next;
               Change([&](int64_t now_ns) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                 scheduler_.MakeDue(absl::FromUnixNanos(now_ns));
                 next = scheduler_.next_due();
               });
               return next;
             }),
      moved_(options.clock->WhenMoved([this] {
        MutexLock lock(mutex_);
        all_done_.SignalAll();
        all_back_.SignalAll();
      })) {
  {
    MutexLock lock(desk_->mutex);
    desk_->engine = this;
  }
  if (metrics_ != nullptr) {
    metrics_->Set(Gauge::kSlabs, static_cast<double>(parts_.slabs->slabs().size()));
  }
  for (int stream = 0; stream < static_cast<int>(parts_.streams.size()); ++stream) {
    threads_.emplace_back([this, stream] {
      const CpuScope near(parts_.devices->cpus(stream / options_.streams));
      Batch* batch = nullptr;
      while ((batch = Next(stream, batch)) != nullptr) Count(Run(stream, *batch));
    });
  }
}

ThreadedEngine::~ThreadedEngine() {
  Stop();
  {
    MutexLock lock(mutex_);
    const absl::Time deadline = clock_.Now() + kKeptAnswersTimeout;
    while (scheduler_.running().kept() > 0 && clock_.Now() < deadline) {
      all_back_.WaitUntil(mutex_, clock_, deadline);
    }
  }
  {
    MutexLock lock(desk_->mutex);
    desk_->engine = nullptr;  // an answer that is dropped later does not touch the engine
  }
  MutexLock lock(mutex_);
  if (scheduler_.running().kept() == 0) return;
  spdlog::error("the transport still keeps answers after {} s; their slabs are not freed",
                absl::ToInt64Seconds(kKeptAnswersTimeout));
  parts_.slabs->Leave();
}

absl::Status ThreadedEngine::CheckFits(const JobSpec& spec) const {
  return engine::CheckFits(spec, options_);
}

// ---- changes of the state

// Runs `change` under the lock; then streams that have work are woken, and jobs that have ended are
// told.
void ThreadedEngine::Change(absl::FunctionRef<void(int64_t now_ns)> change) {
  const int64_t now_ns = clock_.Nanos();
  JobList ended;
  {
    MutexLock lock(mutex_);
    change(now_ns);
    ended = scheduler_.TakeEnded();
    Announce(now_ns);
  }
  TellEnded(ended);
}

void ThreadedEngine::Submit(absl::Span<std::shared_ptr<Job>> jobs) {
  CallerScope scope(callers_);
  Change([&](int64_t now_ns) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (std::shared_ptr<Job>& job : jobs) scheduler_.Submit(std::move(job), now_ns);
  });
}

void ThreadedEngine::SubmitAlone(std::shared_ptr<Job> job, absl::FunctionRef<void()> ended) {
  CallerScope scope(callers_);
  int stream = 0;
  Batch* batch = nullptr;
  Change([&](int64_t now_ns) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const Job& alone = *job;
    scheduler_.Submit(std::move(job), now_ns);
    batch = Borrow(alone, &stream);
  });
  if (batch == nullptr) return;
  const Ran ran = Run(stream, *batch);
  Change([&](int64_t now_ns) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    scheduler_.GiveBack(batch, absl::FromUnixNanos(now_ns));
    if (scheduler_.idle()) all_done_.SignalAll();
    idle_.TakeBack(stream);
  });
  const bool failed = !ran.status.ok();
  if (failed) Count(ran);  // whoever acts on a lost device need not wait for `ended`
  ended();
  if (!failed) Count(ran);
}

// Lends an idle stream, and its batch, for a job that is the only one. Null: it is not brief, or no
// stream is idle. On the host each thread that runs ops keeps memory for them, so there is none.
Batch* ThreadedEngine::Borrow(const Job& job, int* stream) {
  const BatchKey& key = job.spec().key;
  if (on_host_ || IsSharded(key) || !scheduler_.IsAloneAndBrief(job, kMostAlone)) return nullptr;
  *stream = idle_.Lend(key.device);
  if (*stream == IdleStreams::kNone) return nullptr;
  Batch* const batch = scheduler_.Take(idle_.DeviceOf(*stream), clock_.Nanos());
  if (batch == nullptr) idle_.TakeBack(*stream);
  return batch;
}

void ThreadedEngine::Cancel(const Job& job) {
  CallerScope scope(callers_);
  Change([&](int64_t) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    // The job is constant to its caller, except the place that the engine keeps in it.
    scheduler_.Cancel(const_cast<Job*>(&job));
  });
}

void ThreadedEngine::TellEnded(JobList ended) {
  if (ended.first == nullptr) return;
  const int64_t now_ns = clock_.Nanos();
  const int64_t count = ended.size;
  while (Job* job = ended.PopFront()) {
    if (Scheduler::HasBegun(*job) && metrics_ != nullptr) {
      metrics_->CountStopped(job->spec().key.op->name);
    }
    Scheduler::Tell(job, now_ns);
  }
  MutexLock lock(mutex_);
  scheduler_.Told(count);
  if (scheduler_.idle()) all_done_.SignalAll();
}

// For streams. Tells jobs that have ended, without the lock. False: there were none, and the lock
// was held all the time.
bool ThreadedEngine::TellEndedUnlocked() {
  const JobList ended = scheduler_.TakeEnded();
  if (ended.first == nullptr) return false;
  mutex_.Unlock();
  TellEnded(ended);
  mutex_.Lock();
  return true;
}

// After a change: has what is due done in time, wakes a stream if there is work for one, and sets
// the metrics.
void ThreadedEngine::Announce(int64_t now_ns, int except) {
  alarm_.RunBy(scheduler_.next_due());
  idle_.WakeOne([&](int device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(
                    mutex_) { return scheduler_.HasWork(device, now_ns); },
                except);
  if (metrics_ == nullptr) return;
  metrics_->Set(Gauge::kSlabsInUse, static_cast<double>(scheduler_.running().slabs_in_use()));
  metrics_->Set(Gauge::kSlabsKept, static_cast<double>(scheduler_.running().kept()));
  metrics_->Set(Gauge::kQueuedJobs, static_cast<double>(scheduler_.waiting()));
}

// ---- threads

// Gives a batch back after a slice (null at first) and waits for the next one, which may be the
// same. Null: the engine stops, or the device is lost.
Batch* ThreadedEngine::Next(int stream, Batch* given_back) {
  mutex_.Lock();
  const int device = idle_.DeviceOf(stream);
  if (given_back != nullptr) {
    scheduler_.GiveBack(given_back, clock_.Now());
    if (scheduler_.idle()) all_done_.SignalAll();
    TellEndedUnlocked();
  }
  idle_.Begin(stream);
  Batch* batch = nullptr;
  bool may_poll = true;
  while (!stopping_ && !scheduler_.running().lost(device)) {
    const int64_t now_ns = clock_.Nanos();
    idle_.Look(stream);
    if (!idle_.lent(stream)) batch = scheduler_.Take(device, now_ns);
    const bool again = TellEndedUnlocked();
    if (batch != nullptr) break;
    if (again) continue;
    Announce(now_ns, stream);
    idle_.Sleep(mutex_, stream, may_poll);
    may_poll = false;
  }
  idle_.End(stream);
  Announce(clock_.Nanos());
  mutex_.Unlock();
  return batch;
}

// ---- slices

// Runs a slice of the batch on stream `stream`, or on that over all devices.
ThreadedEngine::Ran ThreadedEngine::Run(int index, Batch& batch) {
  const int device = index / options_.streams;
  const bool sharded = batch.sharded;
  Stream& stream = sharded ? *parts_.over_all : *parts_.streams[static_cast<size_t>(index)];
  const int64_t begun_ns = clock_.Nanos();
  // On all devices, and the only slice of its kind: as much as the server can do.
  const int as_many = sharded ? static_cast<int>(parts_.streams.size()) : 1;
  activity_.Begin(index, batch.key.op, begun_ns, as_many);
  Ran ran = {.op = batch.key.op->name, .device = device, .sharded = sharded};
  ran.status = RunSlice(
      stream, layout_, rules_, costs_, batch,
      [this, device](const absl::Status& cause) {
        const std::vector<int> failed = FailedShards(cause);
        if (failed.empty()) Lose(device, cause);
        for (const int each : failed) Lose(each, cause);
      },
      [this, &batch] { return Keep(&batch); }, &ran.oldest);
  const int64_t ended_ns = clock_.Nanos();
  ran.rows = batch.progress.slice_rows;
  ran.ns = ended_ns - begun_ns;
  activity_.End(index, ran.rows, ended_ns);
  return ran;
}

void ThreadedEngine::Count(const Ran& ran) {
  if (ran.status.ok()) {
    if (metrics_ == nullptr) return;
    if (ran.rows > 0) {
      metrics_->CountSlice(ran.op, ran.sharded ? Metrics::kAllDevices : ran.device, ran.rows,
                           static_cast<double>(ran.ns) * 1e-9);
    }
    if (ran.oldest.batch_rows > 0) metrics_->CountBatch(ran.op, ran.oldest);
    return;
  }
  const bool lost = absl::IsInternal(ran.status);
  std::vector<int> failed = FailedShards(ran.status);
  if (failed.empty()) failed.push_back(ran.device);
  std::vector<std::string> names;
  for (const int device : failed) {
    if (metrics_ != nullptr) metrics_->CountDeviceError(device, lost);
    names.push_back(devices().NameOf(device));
  }
  spdlog::error("{} failed a batch of {} with {} rows: {}", absl::StrJoin(names, ", "), ran.op,
                ran.oldest.batch_rows,
                ran.status.ToString(absl::StatusToStringMode::kWithNoExtraData));
  // Last: the owner may end the process in it, and by now the jobs have their answers.
  if (lost) TellOwner(ran.status);
}

// JobAnswer::keep. Null: too many slabs are kept already.
std::shared_ptr<const void> ThreadedEngine::Keep(Batch* batch) {
  {
    MutexLock lock(mutex_);
    if (!scheduler_.running().Keep(batch)) return nullptr;
    Announce(clock_.Nanos());
  }
  return {batch->slab.host, [desk = desk_, batch](const void*) {
            MutexLock lock(desk->mutex);
            ThreadedEngine* const engine = desk->engine;
            if (engine == nullptr) return;
            engine->Change([&](int64_t) ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine->mutex_) {
              engine->scheduler_.running().TakeBack(batch);
              if (engine->scheduler_.running().kept() == 0) engine->all_back_.SignalAll();
            });
          }};
}

// ---- devices

void ThreadedEngine::DeviceLost(const absl::Status& cause) {
  const int device = engine::DeviceOf(cause).value_or(0);
  Lose(device, cause);
  if (metrics_ != nullptr) metrics_->CountDeviceError(device, /*lost=*/true);
  TellOwner(cause);
}

// Takes the device out. Does nothing if it is out already.
void ThreadedEngine::Lose(int device, const absl::Status& cause) {
  if (!parts_.devices->Lose(device)) return;
  const int left = devices().left();
  const std::string name = devices().NameOf(device);
  for (int i = 0; i < options_.streams; ++i) activity_.Remove(device * options_.streams + i);
  Change([&](int64_t now_ns) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const absl::Time now = absl::FromUnixNanos(now_ns);
    if (left > 0) {
      scheduler_.Lose(device, absl::StrCat(name, " is lost: ", cause.message()), now);
    } else {
      scheduler_.Close(absl::StrCat("the device is lost: ", cause.message()), now);
    }
    idle_.WakeAll();
    if (metrics_ != nullptr && left > 0) {
      metrics_->Set(Gauge::kSlabs, static_cast<double>(scheduler_.running().usable_slabs()));
    }
  });
  if (metrics_ != nullptr) metrics_->SetDeviceLost(device);
  // The owner says so where none is left.
  if (left > 0) {
    spdlog::error("{} is lost, {} of {} devices serve on: {}", name, left, devices().count(),
                  cause.ToString(absl::StatusToStringMode::kWithNoExtraData));
  }
}

void ThreadedEngine::TellOwner(const absl::Status& cause) {
  if (devices().left() == 0 && !told_.exchange(true)) on_device_lost_(cause);
}

// ---- the end

bool ThreadedEngine::WaitIdle(absl::Time deadline) {
  CallerScope scope(callers_);
  MutexLock lock(mutex_);
  while (!scheduler_.idle() && clock_.Now() < deadline) {
    all_done_.WaitUntil(mutex_, clock_, deadline);
  }
  return scheduler_.idle();
}

std::optional<RunningBatch> ThreadedEngine::OldestRunning() {
  CallerScope scope(callers_);
  MutexLock lock(mutex_);
  return scheduler_.running().Oldest(clock_.Nanos());
}

void ThreadedEngine::Stop() {
  std::call_once(stop_once_, [this] {
    Change([&](int64_t now_ns) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      scheduler_.Close("the engine has stopped", absl::FromUnixNanos(now_ns));
      stopping_ = true;
      idle_.WakeAll();
    });
    for (std::thread& thread : threads_) thread.join();
    {
      MutexLock lock(mutex_);
      while (!scheduler_.idle()) all_done_.Wait(mutex_);  // the alarm's thread may tell jobs
    }
    while (callers_.load(std::memory_order_acquire) > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  });
}

}  // namespace logitd::engine

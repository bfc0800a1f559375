// The engine without threads: its scheduler, and streams that run what it says when a test says so.
#ifndef LOGITD_TESTS_ENGINE_WORLD_H_
#define LOGITD_TESTS_ENGINE_WORLD_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "server/engine/scheduler.h"
#include "tests/engine/shift_job.h"
#include "tests/engine/test_job.h"
#include "tests/manual_clock.h"

namespace logitd::engine {

// Batches really run, on fake devices, so that jobs check their answers. A row takes kRow, a slice
// about ten rows. Time passes only with the slices and where a test says so. Streams are counted
// over all devices, one device after another.
//
// Every step checks what holds in every state: see Settle and CheckTaken. At its end a world ends
// all its jobs, and checks that each got Done once, with a status that has a cause, and that no
// slab is left in use.
class World {
 public:
  static constexpr int64_t kRowNs = 1'000'000;
  static constexpr absl::Duration kRow = absl::Nanoseconds(kRowNs);

  struct Options {
    int devices = 1;
    int streams = 1;  // of each device
    int slabs = 4;    // of each stream
    int64_t max_rows = 64;
    int64_t payload = 4096;
    int64_t answer = 4096;
    absl::Duration delay = absl::ZeroDuration();  // EngineOptions::max_batch_delay
    bool on_host = false;
  };
  explicit World(const Options& options);
  ~World();

  // Runs a script. Its steps are separated by ';'. A number before a step repeats it.
  //   x [VxR] [...]    submits job x, R rows of V elements (4x1), with
  //                      kN nN       entries and notes of each row (1, 0)
  //                      hN sN       a head with scale N; one that is cut over the devices
  //                      cN wN       its caller, and the caller's weight (0, 1)
  //                      batch whole placed steady    Priority::kBatch, JobSpec::whole, RowsPlace
  //                      dN          only device N can read its rows
  //                      dueN        its deadline, in ms from now
  //                      alone in_place keep    an exclusive job; answered over its payload; kept
  //   take/none/try S  stream S (0) begins a slice / finds no work / does either
  //   end S            its slice ends
  //   run [N]          streams take turns until nothing is left, or for N slices
  //   pass/late MS     time passes, and what is due happens / does not happen yet
  //   cancel x         its caller leaves
  //   drop x           gives its answer back
  //   fail upload|op|wait unavailable|internal    the next slice that gets there fails
  //   lose D / close   device D is lost / the engine closes
  void Run(absl::string_view script);

  // The slices in the order they began, by their jobs: "a|bc|a".
  const std::string& slices() const { return slices_; }
  // Jobs that have not ended with OK: "b:CANCELLED", "c:-" for one that has not ended.
  std::string Failures() const;
  TestJob& job(char name) const { return static_cast<TestJob&>(*jobs_.at(Find(name)).job); }
  ShiftJob& shift_job(char name) const { return static_cast<ShiftJob&>(*jobs_.at(Find(name)).job); }

  void Submit(std::shared_ptr<CheckedJob> job);
  // The stream begins a slice. False: it runs one, or there is nothing for it.
  bool Take(int stream);
  // Two steps of a slice: it ends, with Done of its jobs if it was the last; the stream gives its
  // batch back.
  void RunSlice(int stream);
  void GiveBack(int stream);
  void Cancel(size_t job);
  void Drop(size_t job) { jobs_[job].job->Take(); }
  void Advance(absl::Duration by) { clock_.Advance(by); }
  void MakeDue();
  void Fail(int device, FaultPoint point, absl::Status status);
  void Lose(int device);
  void Close();
  // Tells jobs that have ended. Then every job that is left waits, runs or is between two slices,
  // and has a reason to wait.
  void Settle();
  // Runs everything that is left.
  void Drain();

  size_t jobs() const { return jobs_.size(); }
  int devices() const { return options_.devices; }
  int streams() const { return static_cast<int>(seats_.size()); }
  absl::Time now() const { return clock_.Now(); }
  Scheduler& scheduler() { return scheduler_; }
  FakeBackend& device(int i) { return *backends_[static_cast<size_t>(i)]; }
  std::shared_ptr<const Head> HeadOf(int scale, bool sharded);

 private:
  static constexpr SliceRules kRules = {.max_slice_ns = 10 * kRowNs, .linear_rows = 64};
  struct Known {
    std::shared_ptr<CheckedJob> job;
    bool cancelled = false;
    absl::Time ended = absl::InfiniteFuture();
  };
  struct Seat {
    std::unique_ptr<Stream> stream;
    Batch* batch = nullptr;
    bool ran = false;  // its slice
    std::vector<const Job*> jobs;
  };

  static EngineOptions EngineOptionsOf(const Options& options);
  std::vector<Slab> MakeDevices();
  void Step(const std::vector<std::string>& words);
  void SubmitWords(const std::vector<std::string>& words);
  size_t Find(char name) const;
  int DeviceOf(int stream) const { return stream / options_.streams; }
  bool IsRunning(const Job& job) const;
  void CheckTaken(const Batch& batch, int device, bool is_new);
  void CheckRoom(const Batch& batch, int device);
  void CheckShortWork(const JobSpec& spec);
  void CheckEnd(const Known& known) const;

  const Options options_;
  const EngineOptions engine_options_;
  const SlabLayout layout_{engine_options_};
  ManualClock clock_;
  std::vector<std::unique_ptr<FakeBackend>> backends_;
  const std::vector<Slab> slabs_;
  Costs costs_;
  std::map<std::pair<int, bool>, std::shared_ptr<const Head>> heads_;
  std::vector<Known> jobs_;
  Scheduler scheduler_;
  std::vector<Seat> seats_;
  std::string slices_;
  int devices_left_ = options_.devices;
  bool failed_ = false;  // a device, once
  bool closed_ = false;
};

}  // namespace logitd::engine

#endif  // LOGITD_TESTS_ENGINE_WORLD_H_

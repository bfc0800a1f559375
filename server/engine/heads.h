// Output heads on the devices, by name.
#ifndef LOGITD_SERVER_ENGINE_HEADS_H_
#define LOGITD_SERVER_ENGINE_HEADS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "kernels/head.h"
#include "server/engine/sync.h"

namespace logitd::engine {

class Devices;
class HeadUpdate;
class Metrics;
struct HeadLayout;

// A head's description.
struct HeadInfo {
  std::string name;
  // 1 after the first load of a name. An update makes it one higher, and so does a load after an
  // unload; the first update of a name raises it to `first_update` of Heads, if that is more.
  int64_t version = 1;
  std::string path;          // as the last request with a path gave it
  std::string tensor;        // the weight's name in that file, e.g. "lm_head.weight"
  int64_t asked_vocab = 0;   // HeadRequest::vocab
  int64_t stored_vocab = 0;  // rows in the file; more than the head's if the weight is padded
  int64_t device_bytes = 0;  // on each device; of a sharded head the most on any
  absl::Time loaded;         // or updated
  absl::Duration load_time;  // of the load or the update
  std::vector<std::string> warnings;  // of the path: what was found and may not be meant
};

// A head: a copy on each device, or sharded, which means that each device has a part of the
// vocabulary (kernels/shards.h). Immutable, hence thread-safe. Its memory is freed with the last
// reference.
class Head {
 public:
  // The head, or its part, on one device. No backend: the device was lost before the head was
  // loaded.
  struct Copy {
    Backend* backend = nullptr;
    DeviceMemory memory;
    HeadView view;
    std::shared_ptr<std::byte> owned;  // the memory, until it is freed
  };

  // `copies`: one for each device; at least one has a backend, which outlives this. `whole`: the
  // shape of a sharded head, whose parts all have a backend; none: each copy is whole.
  Head(std::vector<Copy> copies, HeadInfo info, std::optional<HeadView> whole = std::nullopt);
  Head(const Head&) = delete;
  Head& operator=(const Head&) = delete;

  bool sharded() const { return whole_.has_value(); }

  // The copy on a device that was not lost when the head was loaded; a sharded head as a whole.
  const HeadView& view(int device) const {
    return whole_.has_value() ? *whole_ : copies_[static_cast<size_t>(device)].view;
  }
  // Any copy: all are equal except for their addresses.
  const HeadView& view() const { return view(first_); }
  const HeadInfo& info() const { return info_; }

  // The head, or its parts, by device.
  const std::vector<Copy>& copies() const { return copies_; }

 private:
  const std::vector<Copy> copies_;
  int first_ = 0;  // the first copy that there is
  const HeadInfo info_;
  std::vector<HeadView> shards_;  // of a sharded head; whole_ points to them
  std::optional<HeadView> whole_;
};

// The source of a head.
struct HeadRequest {
  std::string name;         // 1..128 of [A-Za-z0-9._-]
  std::string path;         // a safetensors file, or a folder of a Hugging Face model
  std::string root;         // see data_file.h
  bool final_norm = false;  // also load the final RMSNorm: callers send states from before it
  int64_t vocab = 0;        // rows to keep of a padded weight; 0: the config's vocab_size, or all
  bool shard = false;       // cut the vocabulary over all devices
};

struct HeadProgress {
  int64_t done_bytes = 0;
  int64_t total_bytes = 0;
};

// Thread-safe. Loads and updates from files run one after another; no other call waits for them.
// Heads that Find returned may outlive this.
class Heads {
 public:
  // `metrics` may be null. It and the backends of `devices` outlive this and every Head.
  // `max_bytes`: the most memory that all heads together take on each device, unloaded ones that
  // jobs still use included. `first_update`: updates get no lower version. It differs between
  // processes, so that an updated version never means other weights after a restart.
  Heads(std::shared_ptr<const Devices> devices, Metrics* metrics,
        int64_t max_bytes = std::numeric_limits<int64_t>::max(), int64_t first_update = 2);
  // With one device.
  Heads(Backend* backend, Metrics* metrics,
        int64_t max_bytes = std::numeric_limits<int64_t>::max());

  // Reads and checks a head, and copies it to every device that is not lost, or to each its part of
  // a head that is to be sharded; then lists it. The weight is read once. `progress` runs on this
  // thread from time to time and once at the end; while another load runs, with total_bytes 0. If
  // it returns false, the load ends with CANCELLED.
  //
  // No error changes the loaded heads: INVALID_ARGUMENT (the name, or a file's content: file,
  // field, got, allowed), NOT_FOUND, PERMISSION_DENIED (a file, or a path outside the root),
  // ALREADY_EXISTS (the name is loaded, or being loaded or updated), FAILED_PRECONDITION (a head
  // that is to be sharded, on a backend that cannot, or where a device is lost), RESOURCE_EXHAUSTED
  // (more than max_bytes, or no device memory; the text says how much the head needs), UNAVAILABLE
  // (a read or a device failed), INTERNAL (a device is lost, and DeviceOf says which: the caller
  // tells the engine, and may load again while devices are left).
  absl::StatusOr<std::shared_ptr<const Head>> Load(
      const HeadRequest& request, absl::FunctionRef<bool(const HeadProgress&)> progress);

  // The errors of Load that need no look at a file.
  absl::Status Check(const HeadRequest& request) const;

  // Loads a new version of a head, beside the old one, and then lists it in its place: Find returns
  // one or the other, complete on all devices. Jobs that have the old one keep it. final_norm,
  // vocab and shard of `request` are not read: they are those of the head's load. The settings are
  // those of the new file.
  //
  // An error leaves the old head: those of Load, INVALID_ARGUMENT also where the file's head has
  // another dtype, vocab, hidden or bias; NOT_FOUND (no such head), ALREADY_EXISTS (it is being
  // updated), ABORTED (it was unloaded meanwhile).
  absl::StatusOr<std::shared_ptr<const Head>> Update(
      const HeadRequest& request, absl::FunctionRef<bool(const HeadProgress&)> progress);

  // The errors of Update that need no look at a file.
  absl::Status CheckUpdate(const HeadRequest& request) const;

  // The same by rows in memory (head_update.h). It waits for no file. Errors: those of Update, as
  // far as they are not about files; they leave the old head.
  absl::StatusOr<std::unique_ptr<HeadUpdate>> BeginUpdate(const std::string& name);

  // From here on Find does not return the head. Jobs that have it keep it. NOT_FOUND lists the
  // loaded names.
  absl::Status Unload(std::string_view name);

  // NOT_FOUND lists the loaded names.
  absl::StatusOr<std::shared_ptr<const Head>> Find(std::string_view name) const;

  // By ascending name.
  std::vector<std::shared_ptr<const Head>> List() const;

  // Memory of all Head objects, and of loads and updates, on a device.
  int64_t bytes(int device) const { return (*bytes_)[static_cast<size_t>(device)]; }

 private:
  friend class HeadUpdate;

  bool TakeTurn(absl::FunctionRef<bool(const HeadProgress&)> progress);
  // Ends the turn of TakeTurn.
  void EndTurn();
  // `old`: the head that it is to replace; null: none.
  absl::StatusOr<std::shared_ptr<const Head>> Read(
      const HeadRequest& request, int64_t version, const Head* old,
      absl::FunctionRef<bool(const HeadProgress&)> progress) const;
  // Memory on every device that is not lost. `bytes`: by device.
  absl::StatusOr<std::vector<Head::Copy>> Allocate(const std::vector<size_t>& bytes) const;
  // The head, whose name then nobody else loads or updates until EndUpdate.
  absl::StatusOr<std::shared_ptr<const Head>> ClaimUpdate(const std::string& name);
  int64_t NextVersion(const Head& old) const {
    return std::max(old.info().version + 1, first_update_);
  }
  // Counts an update that did not begin. Returns `why`.
  absl::Status CountRefused(absl::Status why, int64_t start_ns) const;
  // Lists `head`, which replaces `old`, if it is OK; counts and logs. Returns it, or its error.
  absl::StatusOr<std::shared_ptr<const Head>> EndUpdate(
      const std::shared_ptr<const Head>& old, absl::StatusOr<std::shared_ptr<const Head>> head,
      int64_t start_ns);
  absl::Status CheckParts(bool sharded) const;
  absl::Status NoMemory(size_t needed, const absl::Status& why) const;
  absl::Status CheckNew(const std::string& name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status NoSuchHead(std::string_view name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t NextVersion(const std::string& name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckUnused(const std::string& name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CountHeads() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<const Devices> devices_;
  Metrics* const metrics_;
  const int64_t max_bytes_;
  const int64_t first_update_;
  // Memory by device, of all Head objects and of those in the making. Heads keep it.
  const std::shared_ptr<std::vector<std::atomic<int64_t>>> bytes_;
  mutable Mutex mutex_;
  CondVar read_ended_;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;  // a thread is in Read
  // Names that are loaded or updated.
  std::set<std::string, std::less<>> loading_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<const Head>, std::less<>> heads_ ABSL_GUARDED_BY(mutex_);
  // The last versions of unloaded names. Those that are forgotten, so that there are never too
  // many, were at most `forgotten_`.
  std::map<std::string, int64_t, std::less<>> unloaded_ ABSL_GUARDED_BY(mutex_);
  int64_t forgotten_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_HEADS_H_

// Files that are read again when they change.
#ifndef LOGITD_SERVER_DOOR_WATCHED_FILES_H_
#define LOGITD_SERVER_DOOR_WATCHED_FILES_H_

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace logitd::door {

// Files whose contents belong together, for instance a certificate and its key.
struct FileGroup {
  std::string name;  // for the log
  std::vector<std::string> paths;
  // Uses the contents, in the order of the paths. An error leaves what was used before.
  std::function<absl::Status(const std::vector<std::string>& contents)> use;
  // After each use. Also after a read that failed, the first time that it failed so.
  std::function<void(bool used)> on_read;
};

// Looks at the contents, not at times or inodes: so it sees every way to replace a file, links
// included (Kubernetes swaps a link to a directory). Thread-safe.
class WatchedFiles {
 public:
  static constexpr size_t kMaxBytes = size_t{4} << 20;  // of a file

  explicit WatchedFiles(std::vector<FileGroup> groups, absl::Duration period = absl::Seconds(1));
  ~WatchedFiles();
  WatchedFiles(const WatchedFiles&) = delete;
  WatchedFiles& operator=(const WatchedFiles&) = delete;

  // Reads and uses all files. The first error, with the group's name. Once, before Start.
  absl::Status Load();
  // From here on a thread reads them again in each period, and logs what it cannot use, once.
  void Start();

 private:
  struct Watched {
    FileGroup group;
    std::string digest;  // of the contents that were tried last
    std::string error;   // of the last look; empty: none
  };

  void Run();
  // Uses the files if they changed.
  static absl::Status Look(Watched& watched, bool* changed);

  const absl::Duration period_;
  std::vector<Watched> watched_;  // of Load, then of the thread
  absl::Mutex mutex_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_WATCHED_FILES_H_

// Files that are read again when they change.
#ifndef LOGITD_SERVER_DOOR_WATCHED_FILES_H_
#define LOGITD_SERVER_DOOR_WATCHED_FILES_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/base/alarm.h"
#include "server/base/clock.h"

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

  static constexpr absl::Duration kPeriod = absl::Seconds(1);

  // `clock` outlives this.
  explicit WatchedFiles(std::vector<FileGroup> groups, Clock& clock = SteadyClock());

  // Reads and uses all files. The first error, with the group's name. Once, before Start.
  absl::Status Load();
  // From here on they are read again in each period, and what cannot be used is logged, once.
  void Start();

 private:
  struct Watched {
    FileGroup group;
    std::string digest;  // of the contents that were tried last
    std::string error;   // of the last look; empty: none
  };

  void LookAtAll();
  // Uses the files if they changed.
  static absl::Status Look(Watched& watched, bool* changed);

  Clock& clock_;
  std::vector<Watched> watched_;  // of Load, then of `look_`
  Alarm look_;
};

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_WATCHED_FILES_H_

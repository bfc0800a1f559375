#include "client/cli/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/session.h"

namespace logitd::cli {
namespace {

// 0, or the errno that says why not.
int WhyNotWritable(const char* path) {
  struct stat info = {};
  const bool exists = stat(path, &info) == 0;
  if (exists && S_ISDIR(info.st_mode)) return EISDIR;
  // To open a device or a pipe may do something, or wait.
  if (exists && !S_ISREG(info.st_mode)) return access(path, W_OK) == 0 ? 0 : errno;
  const int fd = open(path, O_WRONLY | O_CLOEXEC | (exists ? 0 : O_CREAT | O_EXCL), 0666);
  if (fd < 0) return errno;
  close(fd);
  if (!exists) unlink(path);
  return 0;
}

}  // namespace

absl::Status CheckWritable(absl::string_view flag, const std::string& path) {
  const int error = WhyNotWritable(path.c_str());
  if (error == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s: got %s (%s), allowed a file that can be written", flag, path, std::strerror(error)));
}

int OutputFileLost(const absl::Status& status) {
  Complain(absl::StrCat("output was lost: ", status.message()));
  return kExitCallFailed;
}

}  // namespace logitd::cli

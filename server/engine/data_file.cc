#include "server/engine/data_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "formats/lfs_pointer.h"
#include "kernels/status_macros.h"

namespace logitd::engine {
namespace {

absl::Status SystemError(const std::string& path, int error) {
  const std::string text = absl::StrCat(path, ": ", strerror(error));
  if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(text);
  if (error == EACCES || error == EPERM) return absl::PermissionDeniedError(text);
  if (error == ENAMETOOLONG || error == ELOOP) return absl::InvalidArgumentError(text);
  return absl::UnavailableError(text);
}

absl::Status LeavesRoot(const std::string& given) {
  constexpr size_t kMaxShown = 1024;
  return absl::PermissionDeniedError(absl::StrFormat(
      "path: got \"%s\", allowed a path that stays in the server's --head-root, also through links",
      given.substr(0, kMaxShown)));
}

absl::Status CheckPrefix(const std::filesystem::path& path, const std::string& root,
                         const std::string& given) {
  const std::filesystem::path prefix = root;
  if (std::mismatch(prefix.begin(), prefix.end(), path.begin(), path.end()).first == prefix.end()) {
    return absl::OkStatus();
  }
  return LeavesRoot(given);
}

// Opens `path`, which has no "..", below the folder `root`, part by part, and follows no link. -1
// with errno.
int OpenBeneath(int root, const std::filesystem::path& path, int flags) {
  int fd = openat(root, ".", O_PATH | O_DIRECTORY | O_CLOEXEC);
  for (auto part = path.begin(); fd >= 0 && part != path.end(); ++part) {
    const bool last = std::next(part) == path.end();
    const int next =
        openat(fd, part->c_str(), O_NOFOLLOW | (last ? flags : O_PATH | O_DIRECTORY | O_CLOEXEC));
    const int error = errno;
    close(fd);
    errno = error;
    fd = next;
  }
  return fd;
}

absl::StatusOr<int> OpenIn(const std::string& root, const std::string& path, int flags) {
  namespace fs = std::filesystem;
  flags |= O_CLOEXEC;
  if (root.empty()) {
    const int fd = open(path.c_str(), flags);
    return fd >= 0 ? absl::StatusOr<int>(fd) : SystemError(path, errno);
  }
  LOGITD_RETURN_IF_ERROR(CheckInRoot(root, path));
  std::error_code error;
  const fs::path real = fs::canonical(fs::path(root) / path, error);
  if (error) return SystemError(path, error.value());
  LOGITD_RETURN_IF_ERROR(CheckPrefix(real, root, path));
  const int folder = open(root.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return SystemError(path, errno);
  const absl::Cleanup close_folder = [&] { close(folder); };
  const int fd = OpenBeneath(folder, real.lexically_relative(root), flags);
  if (fd >= 0) return fd;
  // `real` had no link, so a part of it has become one.
  if (errno == ELOOP || errno == ENOTDIR) return LeavesRoot(path);
  return SystemError(path, errno);
}

}  // namespace

absl::Status CheckInRoot(const std::string& root, const std::string& path) {
  return CheckPrefix((std::filesystem::path(root) / path).lexically_normal(), root, path);
}

bool IsFolder(const std::string& root, const std::string& path) {
  const absl::StatusOr<int> fd = OpenIn(root, path, O_PATH | O_DIRECTORY);
  if (fd.ok()) close(*fd);
  return fd.ok();
}

absl::StatusOr<std::shared_ptr<const DataFile>> DataFile::Open(const std::string& root,
                                                               const std::string& path) {
  // Non-blocking: the path may be a pipe, whose open would wait for its other end.
  const absl::StatusOr<int> fd = OpenIn(root, path, O_RDONLY | O_NONBLOCK);
  if (!fd.ok()) return fd.status();
  absl::Cleanup close_fd = [&] { close(*fd); };
  struct stat info;
  if (fstat(*fd, &info) != 0) return SystemError(path, errno);
  if (!S_ISREG(info.st_mode)) return FileError(path, "not a regular file");
  std::shared_ptr<const DataFile> file(new DataFile(path, *fd, info.st_size));
  std::move(close_fd).Cancel();
  if (file->bytes() < formats::kMaxLfsPointer) {
    std::string text(static_cast<size_t>(file->bytes()), '\0');
    LOGITD_RETURN_IF_ERROR(file->Read(0, text.size(), text.data()));
    LOGITD_RETURN_IF_ERROR(formats::CheckNoLfsPointer(path, text));
  }
  return file;
}

DataFile::DataFile(std::string path, int fd, int64_t bytes)
    : path_(std::move(path)), fd_(fd), bytes_(bytes) {}

DataFile::~DataFile() { close(fd_); }

absl::Status DataFile::Read(int64_t offset, size_t bytes, void* to) const {
  char* out = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t got = pread(fd_, out, bytes, offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return absl::UnavailableError(absl::StrCat(path_, ": ", strerror(errno)));
    if (got == 0) {
      return absl::UnavailableError(absl::StrFormat(
          "%s: ends at byte %d of %d: it was cut while it was read", path_, offset, bytes_));
    }
    out += got;
    offset += got;
    bytes -= static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadFile(const std::string& root, const std::string& path,
                                     int64_t max_bytes) {
  absl::StatusOr<std::shared_ptr<const DataFile>> file = DataFile::Open(root, path);
  if (!file.ok()) return file.status();
  if ((*file)->bytes() > max_bytes) {
    return FileError(path, "got %d bytes, allowed up to %d", (*file)->bytes(), max_bytes);
  }
  std::string text(static_cast<size_t>((*file)->bytes()), '\0');
  LOGITD_RETURN_IF_ERROR((*file)->Read(0, text.size(), text.data()));
  return text;
}

}  // namespace logitd::engine

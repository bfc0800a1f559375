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

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
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

absl::Status CheckPrefix(const std::filesystem::path& path, const std::string& root,
                         const std::string& given) {
  constexpr size_t kMaxShown = 1024;
  const std::filesystem::path prefix = root;
  if (std::mismatch(prefix.begin(), prefix.end(), path.begin(), path.end()).first == prefix.end()) {
    return absl::OkStatus();
  }
  return absl::PermissionDeniedError(absl::StrFormat(
      "path: got \"%s\", allowed a path that stays in the server's --head-root, also through links",
      given.substr(0, kMaxShown)));
}

}  // namespace

absl::Status FileError(std::string_view path, std::string_view what) {
  return absl::InvalidArgumentError(absl::StrFormat("%s: %s", path, what));
}

absl::Status CheckInRoot(const std::string& root, const std::string& path) {
  return CheckPrefix((std::filesystem::path(root) / path).lexically_normal(), root, path);
}

absl::StatusOr<std::string> Locate(const std::string& root, const std::string& path) {
  if (root.empty()) return path;
  LOGITD_RETURN_IF_ERROR(CheckInRoot(root, path));
  std::error_code error;
  const std::filesystem::path real =
      std::filesystem::canonical(std::filesystem::path(root) / path, error);
  if (error) return SystemError(path, error.value());
  LOGITD_RETURN_IF_ERROR(CheckPrefix(real, root, path));
  return real.string();
}

absl::StatusOr<std::shared_ptr<const DataFile>> DataFile::Open(const std::string& root,
                                                               const std::string& path) {
  const absl::StatusOr<std::string> located = Locate(root, path);
  if (!located.ok()) return located.status();
  // Non-blocking: the path may be a pipe, whose open would wait for its other end.
  const int fd = open(located->c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return SystemError(path, errno);
  struct stat info;
  if (fstat(fd, &info) != 0) {
    const int error = errno;
    close(fd);
    return SystemError(path, error);
  }
  if (!S_ISREG(info.st_mode)) {
    close(fd);
    return FileError(path, "not a regular file");
  }
  return std::shared_ptr<const DataFile>(new DataFile(path, fd, info.st_size));
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
    return FileError(
        path, absl::StrFormat("got %d bytes, allowed up to %d", (*file)->bytes(), max_bytes));
  }
  std::string text(static_cast<size_t>((*file)->bytes()), '\0');
  LOGITD_RETURN_IF_ERROR((*file)->Read(0, text.size(), text.data()));
  return text;
}

}  // namespace logitd::engine

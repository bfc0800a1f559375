#include "server/door/watched_files.h"

#include <openssl/sha.h>
#include <spdlog/spdlog.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace logitd::door {
namespace {

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) {
    return absl::NotFoundError(absl::StrCat(path, ": got no file, allowed a file that exists"));
  }
  std::ifstream file(path, std::ios::binary);
  std::string contents(WatchedFiles::kMaxBytes + 1, '\0');
  file.read(contents.data(), static_cast<std::streamsize>(contents.size()));
  if (!file.eof() && file.fail()) {
    return absl::UnavailableError(absl::StrCat(path, ": ", std::strerror(errno)));
  }
  contents.resize(static_cast<size_t>(file.gcount()));
  if (contents.size() > WatchedFiles::kMaxBytes) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: got more than %d bytes, allowed at most so many", path, WatchedFiles::kMaxBytes));
  }
  return contents;
}

// Instead of the contents, so that no second copy of a key stays in memory.
std::string DigestOf(const std::vector<std::string>& contents) {
  std::string digests;
  for (const std::string& content : contents) {
    unsigned char digest[SHA256_DIGEST_LENGTH];
    SHA256(reinterpret_cast<const unsigned char*>(content.data()), content.size(), digest);
    digests.append(reinterpret_cast<const char*>(digest), sizeof(digest));
  }
  return digests;
}

}  // namespace

WatchedFiles::WatchedFiles(std::vector<FileGroup> groups, Clock& clock)
    : clock_(clock), look_(clock, [this](absl::Time now) {
        LookAtAll();
        return now + kPeriod;
      }) {
  for (FileGroup& group : groups) watched_.push_back({.group = std::move(group)});
}

absl::Status WatchedFiles::Look(Watched& watched, bool* changed) {
  *changed = false;
  std::vector<std::string> contents;
  for (const std::string& path : watched.group.paths) {
    absl::StatusOr<std::string> content = ReadFile(path);
    if (!content.ok()) {
      // The old contents may come back: then they are used again, and the file is no longer stale.
      watched.digest.clear();
      return content.status();
    }
    contents.push_back(*std::move(content));
  }
  std::string digest = DigestOf(contents);
  if (digest == watched.digest) return absl::OkStatus();
  *changed = true;
  watched.digest = std::move(digest);
  return watched.group.use(contents);
}

absl::Status WatchedFiles::Load() {
  for (Watched& watched : watched_) {
    bool changed = false;
    if (absl::Status s = Look(watched, &changed); !s.ok()) {
      return absl::Status(s.code(), absl::StrCat(watched.group.name, ": ", s.message()));
    }
    watched.group.on_read(true);
  }
  return absl::OkStatus();
}

void WatchedFiles::Start() { look_.RunBy(clock_.Now() + kPeriod); }

void WatchedFiles::LookAtAll() {
  for (Watched& watched : watched_) {
    bool changed = false;
    const absl::Status status = Look(watched, &changed);
    const std::string error(status.message());
    const bool news = changed || (!status.ok() && error != watched.error);
    if (!news) continue;
    watched.error = error;
    watched.group.on_read(status.ok());
    if (status.ok()) {
      spdlog::info("read again after a change: {}", watched.group.name);
    } else {
      spdlog::error("{}: what it holds now cannot be used, so what was read before stays: {}",
                    watched.group.name, error);
    }
  }
}

}  // namespace logitd::door

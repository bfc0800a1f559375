#include "formats/lfs_pointer.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_format.h"

namespace logitd::formats {
namespace {

// The first line without its version, now and before Git LFS had its name.
constexpr std::string_view kFirstLines[] = {"version https://git-lfs.github.com/spec/",
                                            "version https://hawser.github.com/spec/"};

}  // namespace

absl::Status CheckNoLfsPointer(std::string_view path, std::string_view text) {
  if (std::none_of(std::begin(kFirstLines), std::end(kFirstLines),
                   [&](std::string_view line) { return text.starts_with(line); })) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s: got a Git LFS pointer, allowed the file that it stands for: fetch it with git lfs pull",
      path));
}

}  // namespace logitd::formats

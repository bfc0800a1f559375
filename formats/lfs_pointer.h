// Pointers of Git LFS.
#ifndef LOGITD_FORMATS_LFS_POINTER_H_
#define LOGITD_FORMATS_LFS_POINTER_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"

namespace logitd::formats {

// A pointer has fewer bytes than this.
inline constexpr int64_t kMaxLfsPointer = 1024;

// INVALID_ARGUMENT with `path` if `text`, a whole file or its first bytes, is a pointer: what a
// clone without Git LFS has in place of a large file. Thread-safe.
//
// Source: github.com/git-lfs/git-lfs, docs/spec.md.
absl::Status CheckNoLfsPointer(std::string_view path, std::string_view text);

}  // namespace logitd::formats

#endif  // LOGITD_FORMATS_LFS_POINTER_H_

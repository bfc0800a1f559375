// Files of the repository that tests read as data.
#ifndef LOGITD_TESTS_TREE_H_
#define LOGITD_TESTS_TREE_H_

#include <filesystem>
#include <string>

namespace logitd::testing {

// `path` is relative to the repository's root. In a bundle, where the test lies in bin/, the copy
// next to bin/; otherwise the source tree's.
inline std::filesystem::path InTree(const std::string& path) {
  const auto bundled =
      std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path() / path;
  return std::filesystem::exists(bundled) ? bundled
                                          : std::filesystem::path(LOGITD_SOURCE_DIR) / path;
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_TREE_H_

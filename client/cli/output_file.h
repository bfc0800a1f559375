// Files that logitctl writes. They are checked before the work, so that a wrong path loses no work.
#ifndef LOGITD_CLIENT_CLI_OUTPUT_FILE_H_
#define LOGITD_CLIENT_CLI_OUTPUT_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace logitd::cli {

// Checks that the file at `path`, the value of `flag`, can be written, and changes nothing: a file
// that exists stays as it is, and none is created. Devices and pipes are not opened.
// INVALID_ARGUMENT: it cannot be written.
absl::Status CheckWritable(absl::string_view flag, const std::string& path);

// For a file that could not be written after all: complains that it is lost, and returns the exit
// code.
int OutputFileLost(const absl::Status& status);

}  // namespace logitd::cli

#endif  // LOGITD_CLIENT_CLI_OUTPUT_FILE_H_

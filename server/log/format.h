// How a log line is written.
#ifndef LOGITD_SERVER_LOG_FORMAT_H_
#define LOGITD_SERVER_LOG_FORMAT_H_

#include <spdlog/formatter.h>

#include <cstddef>
#include <memory>

namespace logitd::log {

enum class Format {
  kText,  // time, level, message
  kJson,  // one object a line with time, level and message
};

// Bytes of a message that are written. A longer one ends with "..." and its size.
inline constexpr size_t kMaxMessage = 4096;

// A message is one line and valid UTF-8, whatever it holds: a peer may have chosen parts of it.
// Control characters, line separators and bytes that are not UTF-8 are written as \xNN, in JSON as
// \\xNN, which a reader of the JSON sees as \xNN.
std::unique_ptr<spdlog::formatter> MakeFormatter(Format format);

}  // namespace logitd::log

#endif  // LOGITD_SERVER_LOG_FORMAT_H_

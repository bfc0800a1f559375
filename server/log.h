// The log's destination and format.
#ifndef LOGITD_SERVER_LOG_H_
#define LOGITD_SERVER_LOG_H_

#include <string>

namespace logitd {

// Sends spdlog's default logger to standard error. `level`: debug, info, warn, error
// or off. `format`: "text" or "json", see log/format.h.
// Call it before the first thread starts.
void SetUpLogging(const std::string& level, const std::string& format);

}  // namespace logitd

#endif  // LOGITD_SERVER_LOG_H_

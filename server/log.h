// The log's destination and format.
#ifndef LOGITD_SERVER_LOG_H_
#define LOGITD_SERVER_LOG_H_

#include <string>

namespace logitd {

// Sends spdlog's default logger and gRPC's log to standard error. `level`: debug, info, warn, error
// or off. `format`: "text" or "json", see log/format.h. Lines of gRPC are limited, see log/limited.h.
// Call it before the first thread starts.
void SetUpLogging(const std::string& level, const std::string& format);

// Drops gRPC's log from here on: gRPC logs the end of its sockets as errors, and its threads may
// outlive the logger. Any thread.
void GrpcIsEnding();

}  // namespace logitd

#endif  // LOGITD_SERVER_LOG_H_

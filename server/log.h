// Where log lines go, and how they look.
#ifndef LOGITD_SERVER_LOG_H_
#define LOGITD_SERVER_LOG_H_

#include <string>

namespace logitd {

// Sends spdlog's default logger, and what gRPC has to say, to standard error. `level`: debug, info,
// warn, error or off. `format`: "text", or "json" for one object a line with time, level and
// message. Before the first thread.
void SetUpLogging(const std::string& level, const std::string& format);

// From here on gRPC is not listened to: it takes the end of its sockets for errors, and its threads
// may outlive the logger. Any thread.
void GrpcIsEnding();

}  // namespace logitd

#endif  // LOGITD_SERVER_LOG_H_

// The life of the server: starts the line, waits for a signal, drains, ends.
#ifndef LOGITD_SERVER_SERVE_H_
#define LOGITD_SERVER_SERVE_H_

#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "server/config.h"

namespace logitd {

using MakeBackend = absl::FunctionRef<absl::StatusOr<std::unique_ptr<Backend>>()>;

// Returns the exit code: 0 drained, 1 could not start. When the device is lost, or does not end a
// batch when all else has ended, it does not return, since what stands on it cannot be taken down
// safely, but ends the process with 3. Once a process;
// call it before there are threads, for it blocks SIGTERM and SIGINT, which it waits for.
// `make_backend` runs once.
int Serve(const Config& config, MakeBackend make_backend);

}  // namespace logitd

#endif  // LOGITD_SERVER_SERVE_H_

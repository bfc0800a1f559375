// The life of the server: it starts, waits for a signal, drains and ends.
#ifndef LOGITD_SERVER_SERVE_H_
#define LOGITD_SERVER_SERVE_H_

#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "server/config.h"

namespace logitd {

// At least one device.
using MakeBackends = absl::FunctionRef<absl::StatusOr<std::vector<std::unique_ptr<Backend>>>()>;

// Returns the exit code: 0 drained, 1 could not start, 2 a flag is bad or a file that it names. If
// all devices are lost, or one does not end a batch when everything else has ended, it ends the
// process with 3 instead: objects that use a lost device cannot be destroyed safely. If some are
// lost, it ends the process with 0 after the drain. `make_backends` runs once.
//
// Once a process. Call it before other threads start: it blocks SIGTERM, SIGINT, SIGUSR1 and
// SIGUSR2 and waits for them. SIGUSR1 sets the log's level to debug, SIGUSR2 back to what it was.
int Serve(const Config& config, MakeBackends make_backends);

}  // namespace logitd

#endif  // LOGITD_SERVER_SERVE_H_

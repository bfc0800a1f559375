// How the process ends: exit codes, and ends without destroying what a lost device holds up.
#ifndef LOGITD_SERVER_EXIT_H_
#define LOGITD_SERVER_EXIT_H_

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/engine/devices.h"
#include "server/engine/engine.h"

namespace logitd {

// Time for encoded answers to reach their peers, and for health watchers to see the change. Calls
// that come meanwhile are refused.
inline constexpr absl::Duration kLastWrites = absl::Milliseconds(250);

// Says why. Returns the exit code.
int CannotStart(const absl::Status& status);

// Ends the process without destroying objects that use the lost device, which could hang or crash.
// The end of the process closes every connection.
[[noreturn]] void LeaveLostDevice();

// Ends the process after a drain without destroying objects that use a lost device.
[[noreturn]] void LeaveAfterLoss();

// Ends the process when a stream thread cannot be joined because its batch does not end. The exit
// code is that of a lost device: the next batch would probably hang too.
[[noreturn]] void LeaveBatch(const engine::RunningBatch& batch, const engine::Devices& devices);

// Ends the process when the thread that loads heads cannot be joined because the disk or the device
// does not answer.
[[noreturn]] void LeaveLoad();

}  // namespace logitd

#endif  // LOGITD_SERVER_EXIT_H_

#include "server/exit.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "absl/time/clock.h"

namespace logitd {
namespace {

constexpr int kCannotStart = 1;
constexpr int kBadInput = 2;
constexpr int kDeviceLost = 3;
// Longest time for the process to end after the device was lost, even if its driver hangs.
constexpr unsigned kDeviceLostSeconds = 10;

// Whether the fault is in a flag, or in a file that a flag names: a later start would fail in the
// same way. An address in use, memory, or a device that does not answer may be there later.
bool IsBadInput(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsNotFound(status) ||
         absl::IsPermissionDenied(status) || absl::IsFailedPrecondition(status) ||
         absl::IsOutOfRange(status) || absl::IsUnimplemented(status);
}

}  // namespace

int CannotStart(const absl::Status& status) {
  spdlog::error("the server cannot start: {}", status.ToString());
  return IsBadInput(status) ? kBadInput : kCannotStart;
}

void LeaveLostDevice() {
  alarm(kDeviceLostSeconds);
  absl::SleepFor(kLastWrites);
  spdlog::error("the process ends: the device was lost");
  std::_Exit(kDeviceLost);
}

void LeaveAfterLoss() {
  spdlog::default_logger()->flush();
  std::_Exit(EXIT_SUCCESS);
}

void LeaveBatch(const engine::RunningBatch& batch, const engine::Devices& devices) {
  const std::string name = devices.count() == 1 ? "the device" : devices.NameOf(batch.device);
  spdlog::error("the process ends: a batch of {} with {} rows has been on {} for {}", batch.op,
                batch.rows, name,
                absl::FormatDuration(absl::Trunc(batch.age, absl::Milliseconds(1))));
  std::_Exit(kDeviceLost);
}

void LeaveLoad() {
  spdlog::warn("the process ends: a load of a head did not end in time");
  std::_Exit(EXIT_SUCCESS);
}

}  // namespace logitd

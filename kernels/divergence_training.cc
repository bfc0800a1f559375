#include "kernels/divergence_training.h"

#include "absl/strings/str_format.h"
#include "kernels/checks.h"
#include "kernels/status_macros.h"

namespace logitd {

absl::Status CheckDivergenceTraining(const DivergenceTrainingRequest& request) {
  LOGITD_RETURN_IF_ERROR(CheckDivergence(request.rows));
  LOGITD_RETURN_IF_ERROR(
      CheckRange("kind", static_cast<int32_t>(request.kind), 0, kDivergenceLosses - 1));
  if (!(request.beta > 0 && request.beta < 1)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("beta: got %g, allowed above 0 and below 1", request.beta));
  }
  if (request.head_has_norm) {
    return absl::InvalidArgumentError("norm: got one in the student's head, allowed none");
  }
  return absl::OkStatus();
}

}  // namespace logitd

#include "kernels/divergence.h"

#include "kernels/checks.h"
#include "kernels/status_macros.h"

namespace logitd {

absl::Status CheckDivergence(const DivergenceRequest& request) {
  LOGITD_RETURN_IF_ERROR(CheckRange("vocab", request.vocab, 1, kMaxVocab));
  LOGITD_RETURN_IF_ERROR(CheckActive(request.params));
  LOGITD_RETURN_IF_ERROR(
      CheckParams<DivergenceRow>(kDivergenceParams, request.params, request.vocab));
  for (size_t r = 0; r < request.params.size(); ++r) {
    LOGITD_RETURN_IF_ERROR(CheckTarget(r, request.params[r].target, request.vocab));
  }
  return absl::OkStatus();
}

}  // namespace logitd

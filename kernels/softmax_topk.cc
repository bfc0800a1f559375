#include "kernels/softmax_topk.h"

#include "kernels/checks.h"
#include "kernels/status_macros.h"

namespace logitd {

absl::Status CheckSoftmaxTopK(const SoftmaxTopKRequest& request) {
  LOGITD_RETURN_IF_ERROR(CheckRange("vocab", request.vocab, 1, kMaxVocab));
  return CheckParams<SoftmaxTopKRow>(kSoftmaxTopKParams, request.params, request.vocab);
}

}  // namespace logitd

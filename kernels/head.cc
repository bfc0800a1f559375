#include "kernels/head.h"

#include <cmath>
#include <string_view>

#include "absl/strings/str_format.h"
#include "kernels/checks.h"
#include "kernels/status_macros.h"

namespace logitd {
namespace {

absl::Status CheckNumber(std::string_view field, float got, bool good, std::string_view allowed) {
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("%s: got %g, allowed %s", field, got, allowed));
}

}  // namespace

absl::Status CheckHead(const HeadView& head) {
  LOGITD_RETURN_IF_ERROR(CheckDType("weight dtype", head.weight.dtype));
  LOGITD_RETURN_IF_ERROR(CheckRange("vocab", head.vocab(), 1, kMaxVocab));
  LOGITD_RETURN_IF_ERROR(CheckRange("hidden", head.hidden(), 1, kMaxHidden));
  LOGITD_RETURN_IF_ERROR(CheckNumber("scale", head.scale, std::isfinite(head.scale), "finite"));
  LOGITD_RETURN_IF_ERROR(CheckNumber("softcap", head.softcap,
                                     std::isfinite(head.softcap) && head.softcap >= 0,
                                     "finite and >= 0"));
  return CheckNumber("norm_epsilon", head.norm_epsilon,
                     std::isfinite(head.norm_epsilon) && head.norm_epsilon >= 0, "finite and >= 0");
}

absl::Status CheckHidden(const HiddenShape& shape, const HeadView& head) {
  LOGITD_RETURN_IF_ERROR(CheckDType("dtype", shape.dtype));
  if (shape.dtype != head.weight.dtype) {
    return absl::InvalidArgumentError(absl::StrFormat("dtype: got %s, allowed %s (the head's)",
                                                      Name(shape.dtype), Name(head.weight.dtype)));
  }
  if (shape.hidden != head.hidden()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("hidden: got %d, allowed %d (the head's)", shape.hidden, head.hidden()));
  }
  return CheckPayload({.field = "hidden states",
                       .bytes = shape.payload_bytes,
                       .rows = shape.rows,
                       .cols_name = "hidden",
                       .cols = shape.hidden,
                       .dtype = shape.dtype});
}

}  // namespace logitd

#include "server/rpc/codecs/logits_or_hidden.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/checks.h"
#include "kernels/head.h"
#include "kernels/status_macros.h"
#include "logitd/v1/sampler.pb.h"
#include "logitd/v1/scorer.pb.h"
#include "server/rpc/codecs/dtype.h"

namespace logitd::rpc {
namespace {

// Choice tells hidden states by their number, which must be the same in every request.
constexpr uint32_t kHiddenNumber = v1::TopKRequest::kHiddenFieldNumber;
static_assert(v1::SampleRequest::kHiddenFieldNumber == int{kHiddenNumber});
static_assert(v1::ScoreRequest::kHiddenFieldNumber == int{kHiddenNumber});
static_assert(v1::VerifyRequest::kLogitsFieldNumber != int{kHiddenNumber});

constexpr size_t kMaxHeadName = 128;

}  // namespace

absl::Status CheckHeadName(std::string_view name) {
  if (name.size() <= kMaxHeadName) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("head: got a name of %d bytes, allowed 1..%d", name.size(), kMaxHeadName));
}

absl::Status LogitsOrHidden::Read(const InputFields& fields, int64_t max_rows,
                                  const FindHead& find_head) {
  std::shared_ptr<const engine::Head> head;
  LOGITD_RETURN_IF_ERROR(CheckHeadName(fields.head));
  if (!fields.head.empty()) {
    absl::StatusOr<std::shared_ptr<const engine::Head>> found = find_head(fields.head);
    if (!found.ok()) return found.status();
    head = *std::move(found);
  }
  return Read(fields, max_rows, std::move(head));
}

absl::Status LogitsOrHidden::Read(const InputFields& fields, int64_t max_rows,
                                  std::shared_ptr<const engine::Head> head) {
  const bool hidden = fields.input.number == kHiddenNumber;
  if (hidden != (head != nullptr)) {
    return absl::InvalidArgumentError(
        hidden
            ? "head: got none with hidden states, allowed a loaded head"
            : absl::StrFormat("head: got \"%s\", but the input is %s; allowed only with hidden "
                              "states",
                              head->info().name, fields.input.number == 0 ? "missing" : "logits"));
  }
  LOGITD_RETURN_IF_ERROR(DTypeFromWire("dtype", fields.dtype, &dtype_));
  const auto bytes = static_cast<int64_t>(fields.input.range.bytes);
  if (hidden) {
    const HeadView& view = head->view();
    vocab_ = view.vocab();
    row_elements_ = view.hidden();
    LOGITD_RETURN_IF_ERROR(CheckHidden({.dtype = dtype_,
                                        .rows = fields.rows,
                                        .hidden = fields.hidden_size,
                                        .payload_bytes = bytes},
                                       view));
    if (fields.vocab != 0 && fields.vocab != vocab_) {
      return absl::InvalidArgumentError(
          absl::StrFormat("vocab: got %d, allowed %d, which is that of head %s, or 0", fields.vocab,
                          vocab_, head->info().name));
    }
  } else {
    vocab_ = fields.vocab;
    row_elements_ = vocab_;
    if (fields.hidden_size != 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("hidden_size: got %d, allowed 0 with logits", fields.hidden_size));
    }
    LOGITD_RETURN_IF_ERROR(CheckLogits(
        {.dtype = dtype_, .rows = fields.rows, .vocab = vocab_, .payload_bytes = bytes}));
  }
  LOGITD_RETURN_IF_ERROR(CheckRange("rows", fields.rows, 1, max_rows));
  payload_ = {.range = fields.input.range,
              .rows = fields.rows,
              .row_bytes = static_cast<size_t>(row_elements_) * SizeOf(dtype_)};
  head_ = std::move(head);
  return absl::OkStatus();
}

engine::BatchKey LogitsOrHidden::Key(const engine::OpTraits& op) const {
  return {.op = &op, .dtype = dtype_, .row_elements = row_elements_, .head = head_.get()};
}

}  // namespace logitd::rpc

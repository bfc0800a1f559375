#include "server/rpc/codecs/logits_or_hidden.h"

#include <limits>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "kernels/checks.h"
#include "kernels/head.h"
#include "kernels/status_macros.h"
#include "logitd/v1/sampler.pb.h"
#include "logitd/v1/scorer.pb.h"
#include "server/rpc/codecs/dtype.h"

namespace logitd::rpc {
namespace {

// Choice tells what it holds by the number, which must be the same in every request.
constexpr uint32_t kHiddenNumber = v1::TopKRequest::kHiddenFieldNumber;
static_assert(v1::SampleRequest::kHiddenFieldNumber == int{kHiddenNumber});
static_assert(v1::VerifyRequest::kHiddenFieldNumber == int{kHiddenNumber});
static_assert(v1::ScoreRequest::kHiddenFieldNumber == int{kHiddenNumber});
static_assert(v1::DivergenceRequest::kHiddenFieldNumber == int{kHiddenNumber});
static_assert(v1::TopKResponse::kHeadVersionFieldNumber == int{kHeadVersionNumber});
static_assert(v1::SampleResponse::kHeadVersionFieldNumber == int{kHeadVersionNumber});
static_assert(v1::VerifyResponse::kHeadVersionFieldNumber == int{kHeadVersionNumber});
static_assert(v1::ScoreResponse::kHeadVersionFieldNumber == int{kHeadVersionNumber});
constexpr uint32_t kSharedNumber = v1::TopKRequest::kSharedFieldNumber;
static_assert(v1::SampleRequest::kSharedFieldNumber == int{kSharedNumber});
static_assert(v1::ScoreRequest::kSharedFieldNumber == int{kSharedNumber});
static_assert(v1::DivergenceRequest::kSharedFieldNumber == int{kSharedNumber});
static_assert(v1::VerifyRequest::kSharedFieldNumber == int{kSharedNumber});

constexpr size_t kMaxHeadName = 128;

absl::Status CheckVersion(int64_t demanded, const engine::Head* head) {
  LOGITD_RETURN_IF_ERROR(
      CheckRange("head_version", demanded, 0, std::numeric_limits<int64_t>::max()));
  if (demanded == 0) return absl::OkStatus();
  if (head == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrFormat("head_version: got %d, allowed only with hidden states", demanded));
  }
  const engine::HeadInfo& info = head->info();
  if (demanded == info.version) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("head_version: got %d, allowed %d, which head %s has, or 0", demanded,
                      info.version, info.name));
}

absl::Status RefuseHead(std::string_view name, uint32_t input) {
  return absl::InvalidArgumentError(absl::StrFormat(
      "head: got \"%s\", but the input is %s; allowed only with hidden states",
      absl::CHexEscape({name.data(), name.size()}), input == 0 ? "missing" : "logits"));
}

}  // namespace

absl::Status CheckHeadName(std::string_view name) {
  if (name.size() <= kMaxHeadName) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("head: got a name of %d bytes, allowed 1..%d", name.size(), kMaxHeadName));
}

absl::Status LogitsOrHidden::Read(Pieces pieces, const InputFields& fields, int64_t max_rows,
                                  const Finders& find) {
  std::shared_ptr<const engine::Head> head;
  LOGITD_RETURN_IF_ERROR(CheckHeadName(fields.head));
  if (!fields.head.empty()) {
    const uint32_t input = fields.input.number;
    if (input != kHiddenNumber && input != kSharedNumber) return RefuseHead(fields.head, input);
    absl::StatusOr<std::shared_ptr<const engine::Head>> found = find.head(fields.head);
    if (!found.ok()) return found.status();
    head = *std::move(found);
  }
  return Read(pieces, fields, max_rows, find.lease, std::move(head));
}

absl::Status LogitsOrHidden::Read(Pieces pieces, const InputFields& fields, int64_t max_rows,
                                  const FindLease& find_lease,
                                  std::shared_ptr<const engine::Head> head) {
  const bool shared = fields.input.number == kSharedNumber;
  const bool hidden = shared ? head != nullptr : fields.input.number == kHiddenNumber;
  if (hidden && head == nullptr) {
    return absl::InvalidArgumentError("head: got none with hidden states, allowed a loaded head");
  }
  if (head != nullptr && !hidden) return RefuseHead(head->info().name, fields.input.number);
  LOGITD_RETURN_IF_ERROR(CheckVersion(fields.head_version, head.get()));
  LOGITD_RETURN_IF_ERROR(DTypeFromWire("dtype", fields.dtype, &dtype_));
  LOGITD_RETURN_IF_ERROR(CheckRange("rows", fields.rows, 1, max_rows));
  const HeadView* const view = hidden ? &head->view() : nullptr;
  // A lease has no size of its own to compare with: the shape says how many bytes there must be.
  // The product may wrap around only where the checks refuse the shape before they compare.
  const int64_t elements = hidden ? view->hidden() : fields.vocab;
  const auto bytes = static_cast<int64_t>(
      shared ? static_cast<uint64_t>(fields.rows) * static_cast<uint64_t>(elements) * SizeOf(dtype_)
             : fields.input.range.bytes);
  if (hidden) {
    vocab_ = view->vocab();
    row_elements_ = view->hidden();
    LOGITD_RETURN_IF_ERROR(CheckHidden({.dtype = dtype_,
                                        .rows = fields.rows,
                                        .hidden = fields.hidden_size,
                                        .payload_bytes = bytes},
                                       *view));
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
  payload_ = {.range = fields.input.range,
              .rows = fields.rows,
              .row_bytes = static_cast<size_t>(row_elements_) * SizeOf(dtype_)};
  if (shared) {
    LOGITD_RETURN_IF_ERROR(LocateRows("shared", pieces, fields.input.message.parts, SizeOf(dtype_),
                                      find_lease, &payload_));
  }
  head_ = std::move(head);
  return absl::OkStatus();
}

engine::BatchKey LogitsOrHidden::Key(const engine::OpTraits& op) const {
  return {.op = &op, .dtype = dtype_, .row_elements = row_elements_, .head = head_.get()};
}

}  // namespace logitd::rpc

#include "server/rpc/codecs/row_input.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/checks.h"
#include "kernels/status_macros.h"
#include "logitd/v1/sampler.pb.h"
#include "logitd/v1/scorer.pb.h"
#include "server/rpc/codecs/codec_parts.h"

namespace logitd::rpc {
namespace {

// The tables go by numbers; these are what they must be, in every request.
template <typename Request>
constexpr bool HasInputNumbers() {
  return Request::kDtypeFieldNumber == 1 && Request::kRowsFieldNumber == 2 &&
         Request::kVocabFieldNumber == 3 && Request::kHeadFieldNumber == 4 &&
         Request::kHiddenSizeFieldNumber == 5 &&
         Request::kHiddenFieldNumber == int{kHiddenFieldNumber} &&
         Request::kLogitsFieldNumber == int{kLogitsFieldNumber};
}
static_assert(HasInputNumbers<v1::TopKRequest>());
static_assert(HasInputNumbers<v1::SampleRequest>());
static_assert(HasInputNumbers<v1::ScoreRequest>());
static_assert(v1::VerifyRequest::kLogitsFieldNumber == int{kLogitsFieldNumber});

constexpr size_t kMaxHeadName = 128;

}  // namespace

absl::Status CheckHeadName(std::string_view name) {
  if (name.size() <= kMaxHeadName) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("head: got a name of %d bytes, allowed 1..%d", name.size(), kMaxHeadName));
}

absl::Status RowInput::Read(const RowInputFields& fields, int64_t max_rows,
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

absl::Status RowInput::Read(const RowInputFields& fields, int64_t max_rows,
                            std::shared_ptr<const engine::Head> head) {
  const bool hidden = fields.input.number == kHiddenFieldNumber;
  if (hidden != (head != nullptr)) {
    return absl::InvalidArgumentError(
        hidden
            ? "head: none named, but the input is hidden states; allowed: a loaded head"
            : absl::StrFormat("head: got \"%s\", but the input is %s; allowed with hidden states",
                              head->info().name, fields.input.number == 0 ? "missing" : "logits"));
  }
  LOGITD_RETURN_IF_ERROR(ReadDType(fields.dtype, &dtype_));
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
      return absl::InvalidArgumentError(absl::StrFormat(
          "hidden_size: got %d, allowed 0, for the input is logits", fields.hidden_size));
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

void RowInput::FillKey(const engine::OpTraits& of_logits, const engine::OpTraits& of_hidden,
                       engine::BatchKey* key) const {
  *key = {.op = head_ == nullptr ? &of_logits : &of_hidden,
          .dtype = dtype_,
          .row_elements = row_elements_,
          .head = head_.get()};
}

TensorView PayloadOf(const engine::BatchView& batch) {
  return {.data = batch.payload,
          .dtype = batch.dtype,
          .rows = batch.rows(),
          .cols = batch.row_elements,
          .row_stride = static_cast<int64_t>(batch.row_stride / SizeOf(batch.dtype))};
}

}  // namespace logitd::rpc

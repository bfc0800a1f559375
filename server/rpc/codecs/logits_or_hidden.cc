#include "server/rpc/codecs/logits_or_hidden.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/checks.h"
#include "kernels/head.h"
#include "kernels/status_macros.h"
#include "logitd/v1/sampler.pb.h"
#include "logitd/v1/scorer.pb.h"
#include "logitd/v1/types.pb.h"
#include "server/rpc/codecs/dtype.h"

namespace logitd::rpc {
namespace {

// Choice tells what it holds by the number, which must be the same in every request.
constexpr uint32_t kHiddenNumber = v1::TopKRequest::kHiddenFieldNumber;
static_assert(v1::SampleRequest::kHiddenFieldNumber == int{kHiddenNumber});
static_assert(v1::ScoreRequest::kHiddenFieldNumber == int{kHiddenNumber});
static_assert(v1::VerifyRequest::kLogitsFieldNumber != int{kHiddenNumber});
constexpr uint32_t kSharedNumber = v1::TopKRequest::kSharedFieldNumber;
static_assert(v1::SampleRequest::kSharedFieldNumber == int{kSharedNumber});
static_assert(v1::ScoreRequest::kSharedFieldNumber == int{kSharedNumber});
static_assert(v1::VerifyRequest::kSharedFieldNumber == int{kSharedNumber});

// One occurrence of a SharedRows.
struct SharedPart {
  ByteRange lease = {.piece = kNoPiece};  // in the part
  int64_t offset = 0;
  int64_t row_stride = 0;

  static constexpr size_t kNoPiece = std::numeric_limits<size_t>::max();
};

constexpr NamedField<SharedPart> kSharedFields[] = {
    {"shared.lease", &SharedPart::lease},
    {"shared.offset", &SharedPart::offset},
    {"shared.row_stride", &SharedPart::row_stride},
};

constexpr size_t kMaxHeadName = 128;

}  // namespace

absl::Status CheckHeadName(std::string_view name) {
  if (name.size() <= kMaxHeadName) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("head: got a name of %d bytes, allowed 1..%d", name.size(), kMaxHeadName));
}

absl::Status ParseSharedFields(Pieces pieces, const Choice& input, SharedFields* fields) {
  static const auto* const table =
      new auto(FieldTable<SharedPart>(v1::SharedRows::descriptor()).Add(kSharedFields));
  for (const ByteRange& range : input.message.parts) {
    const std::vector<Piece> own = PiecesOf(pieces, range);
    SharedPart part = {.offset = fields->offset, .row_stride = fields->row_stride};
    // None of the fields is a list.
    LOGITD_RETURN_IF_ERROR(ParseMessage<SharedPart>(own, *table, /*max_list=*/1, &part));
    fields->offset = part.offset;
    fields->row_stride = part.row_stride;
    if (part.lease.piece == SharedPart::kNoPiece) continue;
    fields->lease_bytes = part.lease.bytes;
    part.lease.bytes = std::min(part.lease.bytes, kLeaseIdBytes);
    fields->lease.resize(part.lease.bytes);
    CopyRange(own, part.lease, fields->lease.data());
  }
  return absl::OkStatus();
}

absl::Status LogitsOrHidden::Read(Pieces pieces, const InputFields& fields, int64_t max_rows,
                                  const Finders& find) {
  std::shared_ptr<const engine::Head> head;
  LOGITD_RETURN_IF_ERROR(CheckHeadName(fields.head));
  if (!fields.head.empty()) {
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
  if (hidden != (head != nullptr)) {
    return absl::InvalidArgumentError(
        hidden
            ? "head: got none with hidden states, allowed a loaded head"
            : absl::StrFormat("head: got \"%s\", but the input is %s; allowed only with hidden "
                              "states",
                              head->info().name, fields.input.number == 0 ? "missing" : "logits"));
  }
  LOGITD_RETURN_IF_ERROR(DTypeFromWire("dtype", fields.dtype, &dtype_));
  const HeadView* const view = hidden ? &head->view() : nullptr;
  // A lease has no size of its own to compare with: the shape says how many bytes there must be. The
  // product may wrap around only where the checks refuse the shape before they compare.
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
  LOGITD_RETURN_IF_ERROR(CheckRange("rows", fields.rows, 1, max_rows));
  payload_ = {.range = fields.input.range,
              .rows = fields.rows,
              .row_bytes = static_cast<size_t>(row_elements_) * SizeOf(dtype_)};
  if (shared) LOGITD_RETURN_IF_ERROR(Locate(pieces, fields.input, find_lease));
  head_ = std::move(head);
  return absl::OkStatus();
}
absl::Status LogitsOrHidden::Locate(Pieces pieces, const Choice& input,
                                    const FindLease& find_lease) {
  SharedFields fields;
  LOGITD_RETURN_IF_ERROR(ParseSharedFields(pieces, input, &fields));
  if (find_lease == nullptr) {
    return absl::NotFoundError(
        "shared: got rows in a lease, allowed only where the server has --arena-listen");
  }
  if (fields.lease_bytes != kLeaseIdBytes) {
    return absl::InvalidArgumentError(absl::StrFormat("shared.lease: got %d bytes, allowed %d",
                                                      fields.lease_bytes, kLeaseIdBytes));
  }
  absl::StatusOr<std::shared_ptr<const arena::Arena>> arena = find_lease(fields.lease);
  if (!arena.ok()) return arena.status();
  const int64_t total = (*arena)->bytes();
  const auto element = static_cast<int64_t>(SizeOf(dtype_));
  const auto row_bytes = static_cast<int64_t>(payload_.row_bytes);
  const int64_t stride = fields.row_stride == 0 ? row_bytes : fields.row_stride;
  if (stride < row_bytes || stride % element != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "shared.row_stride: got %d, allowed 0, or a multiple of %d from %d, the bytes of a row",
        fields.row_stride, element, row_bytes));
  }
  // By division: the product of rows and stride may be beyond 64 bits.
  const int64_t rows = payload_.rows;
  if (row_bytes > total || (total - row_bytes) / stride < rows - 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "shared: got %d rows of %d bytes at distances of %d, allowed what fits into "
        "the %d bytes of the lease",
        rows, row_bytes, stride, total));
  }
  const int64_t last = total - row_bytes - (rows - 1) * stride;
  if (fields.offset < 0 || fields.offset > last || fields.offset % element != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "shared.offset: got %d, allowed a multiple of %d from 0 to %d: %d rows of %d bytes in a "
        "lease of %d",
        fields.offset, element, last, rows, stride, total));
  }
  payload_.range = {.bytes = static_cast<size_t>(rows) * payload_.row_bytes};
  payload_.arena = *std::move(arena);
  payload_.arena_offset = fields.offset;
  payload_.arena_stride = stride;
  return absl::OkStatus();
}

engine::BatchKey LogitsOrHidden::Key(const engine::OpTraits& op) const {
  return {.op = &op, .dtype = dtype_, .row_elements = row_elements_, .head = head_.get()};
}

}  // namespace logitd::rpc

#include "server/rpc/codecs/sequence.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "kernels/checks.h"
#include "kernels/cross_entropy.h"
#include "kernels/status_macros.h"
#include "logitd/v1/scorer.pb.h"
#include "server/rpc/codecs/answer_fields.h"

namespace logitd::rpc {
namespace {

constexpr int64_t kDefaultIgnoreIndex = -100;
// So that the sum of three counts up to it, and of the rows to come, does not overflow.
constexpr int64_t kMaxOffset = int64_t{1} << 60;

// The numbers of the fields are the same in all messages of totals.
using Totals = v1::ScoreTotals;
constexpr uint32_t kFirstValue = Totals::kLossSumFieldNumber;
static_assert(Totals::kPerplexityFieldNumber == kFirstValue + 3);
static_assert(v1::DivergenceTotals::kRowsFieldNumber == int{Totals::kRowsFieldNumber});
static_assert(v1::DivergenceTotals::kFaultyFieldNumber == int{Totals::kFaultyFieldNumber});
static_assert(v1::DivergenceTotals::kForwardKlSumFieldNumber == kFirstValue);
static_assert(v1::DivergenceTotals::kReverseKlMeanFieldNumber == kFirstValue + 3);

constexpr size_t kMaxTotalsBytes = 8 * (1 + kMaxVarintSize);
static_assert(kMaxTotalsBytes + kMaxLengthHead <= kMaxTotalsFieldBytes);

}  // namespace

absl::Status RowByRow(std::string_view name) {
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: got none, allowed values in every message: the sequence's first one "
                      "gave them row by row",
                      name));
}

absl::Status InheritInput(const InputFields& first, InputFields* own) {
  LOGITD_RETURN_IF_ERROR(InheritSame("dtype", first.dtype, &own->dtype));
  LOGITD_RETURN_IF_ERROR(InheritSame("vocab", first.vocab, &own->vocab));
  LOGITD_RETURN_IF_ERROR(CheckHeadName(own->head));
  if (first.head.empty() && !own->head.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "head: got %s, allowed none: the sequence's first message had logits", own->head));
  }
  LOGITD_RETURN_IF_ERROR(InheritSame("head", first.head, &own->head));
  return InheritSame("hidden_size", first.hidden_size, &own->hidden_size);
}

void Shorten(AnyLists* params) {
  for (AnyList& any : *params) {
    std::visit(
        [](auto& list) {
          list.resize(std::min<size_t>(list.size(), 2));
          list.shrink_to_fit();
        },
        any);
  }
}

absl::Status ReadOffset(const std::optional<int64_t>& offset, const Nested& totals,
                        const SequencePlace& place, int64_t* row) {
  *row = offset.value_or(place.next_row);
  if (!place.begun) return CheckRange("offset", *row, 0, kMaxOffset);
  if (*row != place.next_row) {
    return absl::InvalidArgumentError(
        absl::StrFormat("offset: got %d, allowed %d, where the message before it ended, or none",
                        *row, place.next_row));
  }
  if (!totals.parts.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "totals: got some at row %d, allowed only in the first message of a stream", *row));
  }
  return absl::OkStatus();
}

absl::Status ReadTargets(const IdList& targets, const std::optional<int64_t>& ignore_index,
                         int64_t vocab, std::vector<int32_t>* read) {
  const int64_t ignored = ignore_index.value_or(kDefaultIgnoreIndex);
  read->clear();
  read->reserve(targets.size());
  for (const int32_t target : targets) {
    if (target != ignored && (target < 0 || target >= vocab)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("targets: got %d at row %d, allowed 0..%d, or %d (ignore_index)", target,
                          read->size(), vocab - 1, ignored));
    }
    read->push_back(target == ignored ? kIgnoredTarget : target);
  }
  return absl::OkStatus();
}

absl::Status CheckCounts(const SequenceCounts& counts, int64_t offset) {
  LOGITD_RETURN_IF_ERROR(CheckRange("totals.counted", counts.counted, 0, offset));
  LOGITD_RETURN_IF_ERROR(CheckRange("totals.ignored", counts.ignored, 0, offset));
  LOGITD_RETURN_IF_ERROR(CheckRange("totals.faulty", counts.faulty, 0, offset));
  LOGITD_RETURN_IF_ERROR(CheckRange("totals.rows", counts.rows, 0, offset));
  const int64_t sum = counts.counted + counts.ignored + counts.faulty;
  if (counts.rows == sum) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("totals.rows: got %d, allowed %d: counted %d + ignored %d + faulty %d",
                      counts.rows, sum, counts.counted, counts.ignored, counts.faulty));
}

absl::Status CheckSums(const SequenceCounts& counts, double first, double second) {
  if (std::isnan(first) || std::isnan(second)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "totals: got sums %g and %g, allowed numbers and infinities", first, second));
  }
  if (counts.counted == 0 && (first != 0 || second != 0)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "totals: got sums %g and %g, allowed 0 and 0 where counted is 0", first, second));
  }
  return absl::OkStatus();
}

void AddCounts(const SequenceCounts& part, SequenceCounts* totals) {
  totals->rows += part.rows;
  totals->counted += part.counted;
  totals->ignored += part.ignored;
  totals->faulty += part.faulty;
}

void AppendTotals(uint32_t number, const SequenceCounts& counts,
                  const std::array<double, 4>& values, EncodedMessage* answer) {
  std::array<uint8_t, kMaxTotalsBytes> bytes;
  WireWriter fields(bytes.data());
  fields.VarintField(Totals::kRowsFieldNumber, counts.rows);
  fields.VarintField(Totals::kCountedFieldNumber, counts.counted);
  fields.VarintField(Totals::kIgnoredFieldNumber, counts.ignored);
  fields.VarintField(Totals::kFaultyFieldNumber, counts.faulty);
  for (uint32_t i = 0; i < values.size(); ++i) fields.DoubleField(kFirstValue + i, values[i]);
  const auto size = static_cast<size_t>(fields.at() - bytes.data());
  answer->Append(EncodedMessage::Make(kMaxTotalsFieldBytes, [&](WireWriter& writer) {
    writer.LengthHead(number, size);
    writer.Raw(bytes.data(), size);
  }));
}

}  // namespace logitd::rpc

// Sequences of rows that come as the messages of a stream: what later messages inherit from the
// first, where each begins, and totals over their rows. A call is a stream of one message.
#ifndef LOGITD_SERVER_RPC_CODECS_SEQUENCE_H_
#define LOGITD_SERVER_RPC_CODECS_SEQUENCE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/row_params.h"
#include "kernels/types.h"
#include "server/rpc/codecs/field_table.h"
#include "server/rpc/codecs/logits_or_hidden.h"
#include "server/rpc/wire/encoded_message.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc {

// ---- What later messages inherit. Each returns INVALID_ARGUMENT with field, got, allowed.

// The error where the first message gave a field row by row, and a later one does not have it.
absl::Status RowByRow(std::string_view name);

// A value that a later message may only repeat.
template <typename T>
absl::Status InheritSame(std::string_view name, const T& first, T* own) {
  if (*own == T()) *own = first;
  if (*own == first) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(std::string(name), ": got ", *own, ", allowed ",
                                                 first,
                                                 ", as in the sequence's first message, or none"));
}

// dtype, vocab, head and hidden_size.
absl::Status InheritInput(const InputFields& first, InputFields* own);

// The lists of parameters that a later message does not send.
template <typename Row>
absl::Status InheritParams(RowParams<Row> params, const AnyLists& first, AnyLists* own) {
  for (size_t i = 0; i < first.size(); ++i) {
    const bool is_sent = std::visit([](const auto& list) { return !list.empty(); }, (*own)[i]);
    if (is_sent) continue;
    const size_t values = std::visit([](const auto& list) { return list.size(); }, first[i]);
    if (values > 1) return RowByRow(params[i].name);
    (*own)[i] = first[i];
  }
  return absl::OkStatus();
}

// Leaves of every list with a value for each row two values.
void Shorten(AnyLists* params);

// ---- Where a message begins

struct SequencePlace {
  bool begun = false;  // the first message has been read
  int64_t next_row = 0;
};

// The row that a message begins with. `totals`: as the message has them. INVALID_ARGUMENT: another
// row than `place` says, or totals after the first message.
absl::Status ReadOffset(const std::optional<int64_t>& offset, const Nested& totals,
                        const SequencePlace& place, int64_t* row);

// ---- Targets

// The targets of rows with kIgnoredTarget for those that are `ignore_index`, whose default is -100.
// INVALID_ARGUMENT naming the first row whose target is none of 0..vocab-1.
absl::Status ReadTargets(const IdList& targets, const std::optional<int64_t>& ignore_index,
                         int64_t vocab, std::vector<int32_t>* read);

// ---- Totals

// The first fields of messages of totals. The next four are two sums, and what is derived.
struct SequenceCounts {
  int64_t rows = 0;
  int64_t counted = 0;
  int64_t ignored = 0;
  int64_t faulty = 0;
};
inline constexpr NamedField<SequenceCounts> kCountsFields[] = {
    {"totals.rows", &SequenceCounts::rows},
    {"totals.counted", &SequenceCounts::counted},
    {"totals.ignored", &SequenceCounts::ignored},
    {"totals.faulty", &SequenceCounts::faulty},
};

// INVALID_ARGUMENT: not the counts of `offset` rows or fewer.
absl::Status CheckCounts(const SequenceCounts& counts, int64_t offset);
// INVALID_ARGUMENT: a NaN, or a sum over no counted rows that is not 0.
absl::Status CheckSums(const SequenceCounts& counts, double first, double second);

void AddCounts(const SequenceCounts& part, SequenceCounts* totals);

// The totals of rows with `status`. `is_ignored(r)`: row r is not counted. `add(r, &totals)` adds
// the sums of a counted row.
template <typename Totals, typename IsIgnored, typename Add>
Totals TotalsOf(absl::Span<const RowStatus> status, IsIgnored is_ignored, Add add) {
  Totals totals;
  totals.rows = static_cast<int64_t>(status.size());
  for (size_t r = 0; r < status.size(); ++r) {
    if (status[r].code != RowCode::kOk) {
      ++totals.faulty;
    } else if (is_ignored(r)) {
      ++totals.ignored;
    } else {
      ++totals.counted;
      add(r, &totals);
    }
  }
  return totals;
}

// The bytes that AppendTotals adds, at most.
inline constexpr size_t kMaxTotalsFieldBytes = 128;

// Adds field `number` to an answer: totals with the sums and the derived values, in their order.
void AppendTotals(uint32_t number, const SequenceCounts& counts,
                  const std::array<double, 4>& values, EncodedMessage* answer);

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_SEQUENCE_H_

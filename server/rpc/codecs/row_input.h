// What the rows of a request are: logits, or hidden states of a head. Shared by the codecs of the
// ops that have a linear form.
#ifndef LOGITD_SERVER_RPC_CODECS_ROW_INPUT_H_
#define LOGITD_SERVER_RPC_CODECS_ROW_INPUT_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/head.h"
#include "kernels/types.h"
#include "server/engine/heads.h"
#include "server/engine/job.h"
#include "server/rpc/transport/copier.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc {

// As engine::Heads::Find. Thread-safe.
using FindHead =
    std::function<absl::StatusOr<std::shared_ptr<const engine::Head>>(std::string_view name)>;

// Fields 1 to 15 of a request, as they lie in the message.
struct RowInputFields {
  int32_t dtype = 0;  // logitd.v1.DType
  int64_t rows = 0;
  int64_t vocab = 0;
  std::string head;
  int64_t hidden_size = 0;
  Choice input;
};

inline constexpr uint32_t kHiddenFieldNumber = 14;
inline constexpr uint32_t kLogitsFieldNumber = 15;

// The table of M, an RowInputFields or more: of requests that take logits alone, and what those that
// take hidden states have beside.
template <typename M>
constexpr std::array<Field<M>, 4> LogitsFieldTable() {
  return {{{1, "dtype", &M::dtype},
           {2, "rows", &M::rows},
           {3, "vocab", &M::vocab},
           {kLogitsFieldNumber, "logits", &M::input}}};
}
template <typename M>
constexpr std::array<Field<M>, 3> HiddenFieldTable() {
  return {{{4, "head", &M::head},
           {5, "hidden_size", &M::hidden_size},
           {kHiddenFieldNumber, "hidden", &M::input}}};
}

// INVALID_ARGUMENT: longer than any head's name, so that no text has to repeat it.
absl::Status CheckHeadName(std::string_view name);

// The input of one request. Keeps its head.
class RowInput {
 public:
  // What the other parameters are checked against is known afterwards. `find_head` may be null
  // where hidden states cannot come. INVALID_ARGUMENT naming the field, the value and what is
  // allowed; NOT_FOUND: no such head.
  absl::Status Read(const RowInputFields& fields, int64_t max_rows, const FindHead& find_head);

  // As above, of a message of a sequence whose head is known; null: of logits.
  absl::Status Read(const RowInputFields& fields, int64_t max_rows,
                    std::shared_ptr<const engine::Head> head);

  // Of the hidden states' op where there is a head.
  void FillKey(const engine::OpTraits& of_logits, const engine::OpTraits& of_hidden,
               engine::BatchKey* key) const;

  DType dtype() const { return dtype_; }
  int64_t rows() const { return payload_.rows; }
  int64_t vocab() const { return vocab_; }
  const Payload& payload() const { return payload_; }
  const std::shared_ptr<const engine::Head>& head() const { return head_; }  // null: logits

  // What the logits take, or would.
  int64_t logits_bytes() const { return rows() * vocab_ * static_cast<int64_t>(SizeOf(dtype_)); }

 private:
  DType dtype_ = DType::kF32;
  int64_t vocab_ = 0;
  int64_t row_elements_ = 0;
  Payload payload_;
  std::shared_ptr<const engine::Head> head_;
};

// The payload of a batch.
TensorView PayloadOf(const engine::BatchView& batch);

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_ROW_INPUT_H_

// The rows of a request, logits or hidden states of a head, and where they lie: in the message or
// in a lease. For the ops that have a linear form.
#ifndef LOGITD_SERVER_RPC_CODECS_LOGITS_OR_HIDDEN_H_
#define LOGITD_SERVER_RPC_CODECS_LOGITS_OR_HIDDEN_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/types.h"
#include "server/engine/heads.h"
#include "server/engine/job.h"
#include "server/rpc/codecs/field_table.h"
#include "server/rpc/codecs/payload.h"
#include "server/rpc/codecs/shared_rows.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc {

// As engine::Heads::Find. Thread-safe.
using FindHead =
    std::function<absl::StatusOr<std::shared_ptr<const engine::Head>>(std::string_view name)>;

// Finds what requests refer to by name.
struct Finders {
  FindHead head;    // null where hidden states cannot come
  FindLease lease;  // null: the server leases nothing
};

// Fields 1 to 15 of a request, as they are in the message.
struct InputFields {
  int32_t dtype = 0;  // logitd.v1.DType
  int64_t rows = 0;
  int64_t vocab = 0;
  std::string head;
  int64_t hidden_size = 0;
  int64_t head_version = 0;  // 0: any
  Choice input;              // logits, hidden or shared
};

// The fields of every request.
inline constexpr NamedField<InputFields> kLogitsFields[] = {{"dtype", &InputFields::dtype},
                                                            {"rows", &InputFields::rows},
                                                            {"vocab", &InputFields::vocab},
                                                            {"shared", &InputFields::input},
                                                            {"logits", &InputFields::input}};
// The fields of requests that may have hidden states.
inline constexpr NamedField<InputFields> kHiddenFields[] = {
    {"head", &InputFields::head},
    {"hidden_size", &InputFields::hidden_size},
    {"head_version", &InputFields::head_version},
    {"hidden", &InputFields::input}};

// The version of the head in the answers to such requests.
inline constexpr uint32_t kHeadVersionNumber = 30;

// INVALID_ARGUMENT: longer than the name of any head, so that no text has to repeat it.
absl::Status CheckHeadName(std::string_view name);

// The input of one request. Keeps its head, and its lease until DropLease.
class LogitsOrHidden {
 public:
  // Checks the input of a message that lies in `pieces`; afterwards vocab() and the others are
  // known. INVALID_ARGUMENT naming the field, the value and what is allowed; NOT_FOUND: no such
  // head, or no such lease. FAILED_PRECONDITION: the head has another version than the message
  // demands.
  absl::Status Read(Pieces pieces, const InputFields& fields, int64_t max_rows,
                    const Finders& find);

  // As above, for a later message of a sequence: `head` is the sequence's, null with logits.
  absl::Status Read(Pieces pieces, const InputFields& fields, int64_t max_rows,
                    const FindLease& find_lease, std::shared_ptr<const engine::Head> head);

  // Jobs of `op` with equal keys may share a batch.
  engine::BatchKey Key(const engine::OpTraits& op) const;

  int64_t rows() const { return payload_.rows; }
  int64_t vocab() const { return vocab_; }
  DType dtype() const { return dtype_; }
  int64_t row_elements() const { return row_elements_; }  // vocab, or the head's hidden
  const Payload& payload() const { return payload_; }
  const std::shared_ptr<const engine::Head>& head() const { return head_; }  // null: logits
  int64_t head_version() const { return head_ == nullptr ? 0 : head_->info().version; }
  // The payload was copied: a lease is no longer needed.
  void DropLease() { payload_.arena.reset(); }

 private:
  DType dtype_ = DType::kF32;
  int64_t vocab_ = 0;
  int64_t row_elements_ = 0;
  Payload payload_;
  std::shared_ptr<const engine::Head> head_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_LOGITS_OR_HIDDEN_H_

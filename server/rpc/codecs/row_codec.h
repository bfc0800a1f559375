// The common part of the codecs of ops on logits or hidden states.
#ifndef LOGITD_SERVER_RPC_CODECS_ROW_CODEC_H_
#define LOGITD_SERVER_RPC_CODECS_ROW_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/types/span.h"
#include "server/engine/job.h"
#include "server/ops/job_rows.h"
#include "server/rpc/codecs/answer_fields.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/codecs/logits_or_hidden.h"

namespace logitd::rpc {

// `Rows`: the rows of a job with their lists, from server/ops.
template <typename Rows>
class RowCodec : public OpCodec {
 public:
  const engine::OpTraits& op() const final { return input_.head() == nullptr ? *op_ : *linear_; }
  int64_t answer_bytes() const final { return answer_bytes_; }
  int64_t list_bytes() const final { return ops::BytesOf(rows_); }
  Payload payload() const final { return input_.payload(); }
  void PayloadCopied() override { input_.DropLease(); }
  void WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) final {
    ops::WriteInputs(rows_, inputs, first);
  }

 protected:
  // `linear`: the op on hidden states; where it has none, the op itself.
  RowCodec(const engine::OpTraits& op, const engine::OpTraits& linear, Finders find)
      : find_(std::move(find)), op_(&op), linear_(&linear) {}

  // Before FillSpec: takes variants of the ops.
  void UseOps(const engine::OpTraits& op, const engine::OpTraits& linear) {
    op_ = &op;
    linear_ = &linear;
  }

  // The end of Parse: the rows have been checked. `more_bytes`: fields without an output array.
  // `reference`: the head of second hidden states.
  void FillSpec(engine::JobSpec* spec, int64_t more_bytes = 0,
                const engine::Head* reference = nullptr) {
    engine::BatchKey key = input_.Key(op());
    key.reference_head = reference;
    ops::FillSpec(rows_, key, spec);
    answer_bytes_ = MaxAnswerBytes(*spec) + more_bytes;
  }

  const Finders find_;
  LogitsOrHidden input_;
  Rows rows_;
  int64_t answer_bytes_ = 0;

 private:
  const engine::OpTraits* op_;
  const engine::OpTraits* linear_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_ROW_CODEC_H_

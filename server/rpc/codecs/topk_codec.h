// Sampler.TopK: proto <-> rows of softmax_topk, or of linear_topk where hidden states come.
#ifndef LOGITD_SERVER_RPC_CODECS_TOPK_CODEC_H_
#define LOGITD_SERVER_RPC_CODECS_TOPK_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "server/engine/job.h"
#include "server/ops/softmax_topk.h"
#include "server/rpc/codecs/logits_or_hidden.h"
#include "server/rpc/codecs/row_codec.h"
#include "server/rpc/codecs/row_values.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc {

// TopKRequest as it is in the message.
struct TopKFields : InputFields {
  AnyLists params = ListsFor(kSoftmaxTopKParams);
};

// As ParseMessage. Checks only the encoding, not the values.
absl::Status ParseTopKFields(Pieces pieces, size_t max_list, TopKFields* fields);

class TopKCodec final : public RowCodec<ops::SoftmaxTopKRows> {
 public:
  explicit TopKCodec(Finders find)
      : RowCodec(ops::kSoftmaxTopKTraits, ops::kLinearTopKTraits, std::move(find)) {}

  absl::Status Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) override;
  EncodedMessage Encode(const engine::JobAnswer& answer, const CallTimes& times) override;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_TOPK_CODEC_H_

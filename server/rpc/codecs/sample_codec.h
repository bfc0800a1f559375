// Sampler.Sample: proto <-> rows of sample, or of linear_sample where hidden states come. The codec
// of Sampler.Verify shares most of it.
#ifndef LOGITD_SERVER_RPC_CODECS_SAMPLE_CODEC_H_
#define LOGITD_SERVER_RPC_CODECS_SAMPLE_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/engine/job.h"
#include "server/ops/sample.h"
#include "server/rpc/codecs/field_table.h"
#include "server/rpc/codecs/logits_or_hidden.h"
#include "server/rpc/codecs/row_codec.h"
#include "server/rpc/codecs/row_values.h"
#include "server/rpc/wire/reader.h"
#include "server/rpc/wire/writer.h"

namespace logitd::rpc {

// SampleRequest as it is in the message; a VerifyRequest has the same fields.
struct SampleFields : InputFields {
  AnyLists params = ListsFor(kSampleParams);
  Int32List history_count;
  IdList history;
  Int32List logit_bias_count;
  IdList logit_bias_ids;
  ValueList logit_bias;
  Int32List extra_count;
  IdList extra_ids;
  ByteRange allowed_tokens;
  IdList allowed_tokens_mask;
};

inline constexpr NamedField<SampleFields> kSampleListFields[] = {
    {"history_count", &SampleFields::history_count},
    {"history", &SampleFields::history},
    {"logit_bias_count", &SampleFields::logit_bias_count},
    {"logit_bias_ids", &SampleFields::logit_bias_ids},
    {"logit_bias", &SampleFields::logit_bias},
    {"extra_count", &SampleFields::extra_count},
    {"extra_ids", &SampleFields::extra_ids},
    {"allowed_tokens", &SampleFields::allowed_tokens},
    {"allowed_tokens_mask", &SampleFields::allowed_tokens_mask},
};

// As ParseMessage. Checks only the encoding, not the values.
absl::Status ParseSampleFields(Pieces pieces, size_t max_list, SampleFields* fields);

// The common part of Sample and Verify.
//
// Fills the rows of `input` and takes the lists out of `fields`. INVALID_ARGUMENT: fields that
// contradict each other, by name; values are checked by CheckSample.
absl::Status BuildSampleRows(Pieces pieces, const LogitsOrHidden& input, SampleFields* fields,
                             ops::SampleRows* rows);
// Fields 1 to 15 of a SampleResponse.
void WriteSampleAnswer(const ops::SampleRows& rows, const engine::JobAnswer& answer,
                       const CallTimes& times, WireWriter& writer);
// Fields 31 on, which an answer has only where a row asks for them.
void WriteSampleWanted(const ops::SampleRows& rows, const engine::JobAnswer& answer,
                       WireWriter& writer);

class SampleCodec final : public RowCodec<ops::SampleRows> {
 public:
  explicit SampleCodec(Finders find)
      : RowCodec(ops::kSampleTraits, ops::kLinearSampleTraits, std::move(find)) {}

  absl::Status Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) override;
  EncodedMessage Encode(const engine::JobAnswer& answer, const CallTimes& times) override;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_SAMPLE_CODEC_H_

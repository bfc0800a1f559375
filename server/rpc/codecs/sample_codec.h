// Sampler.Sample: proto <-> sample job, or linear_sample where hidden states come. Sampler.Verify's
// codec shares most of it.
#ifndef LOGITD_SERVER_RPC_CODECS_SAMPLE_CODEC_H_
#define LOGITD_SERVER_RPC_CODECS_SAMPLE_CODEC_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/sample.h"
#include "server/engine/job.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/codecs/row_input.h"
#include "server/rpc/wire/reader.h"
#include "server/rpc/wire/writer.h"

namespace logitd::rpc {

// Axes and arrays of the op; those of verify follow them.
enum SampleAxis : size_t {
  kSampleRows = engine::kRowAxis,
  kSampleHistory,
  kSampleBias,
  kSampleExtraIds,
  kSampleMaskWords,
  kSampleTopEntries,
  kSampleExtraEntries,
  kSampleAxes
};

enum SampleInput : size_t {
  kSampleInRows,
  kSampleInHistory,
  kSampleInBias,
  kSampleInExtraIds,
  kSampleInMaskWords,
  kSampleInputs
};

enum SampleOutput : size_t {
  kSampleTokens,
  kSampleLogprobs,
  kSampleRanks,
  kSampleLogsumexp,
  kSampleStatus,
  kSampleTopIds,
  kSampleTopLogprobs,
  kSampleExtraLogprobs,
  kSampleOutputs
};

inline constexpr std::array<engine::Array, kSampleInputs> kSampleInputArrays = {{
    {kSampleRows, sizeof(SampleRow)},
    {kSampleHistory, sizeof(int32_t)},
    {kSampleBias, sizeof(SampleBias)},
    {kSampleExtraIds, sizeof(int32_t)},
    {kSampleMaskWords, sizeof(uint32_t)},
}};

inline constexpr std::array<engine::Array, kSampleOutputs> kSampleOutputArrays = {{
    {kSampleRows, sizeof(int32_t)},        // kSampleTokens
    {kSampleRows, sizeof(float)},          // kSampleLogprobs
    {kSampleRows, sizeof(int32_t)},        // kSampleRanks
    {kSampleRows, sizeof(float)},          // kSampleLogsumexp
    {kSampleRows, sizeof(RowStatus)},      // kSampleStatus
    {kSampleTopEntries, sizeof(int32_t)},  // kSampleTopIds
    {kSampleTopEntries, sizeof(float)},    // kSampleTopLogprobs
    {kSampleExtraEntries, sizeof(float)},  // kSampleExtraLogprobs
}};

extern const engine::OpTraits kSampleTraits;
extern const engine::OpTraits kLinearSampleTraits;

// The op's arguments for a batch whose first arrays are those above.
SampleArgs SampleArgsOf(const engine::BatchView& batch);

// SampleRequest as it lies in the message; also what a VerifyRequest begins with.
struct SampleFields : RowInputFields {
  Uint64List seed;
  Uint64List position;
  FloatList temperature;
  Int32List top_k;
  FloatList top_p;
  FloatList min_p;
  FloatList repetition_penalty;
  FloatList presence_penalty;
  FloatList frequency_penalty;
  Int32List top_logprobs;
  Int32List logprob_mode;  // logitd.v1.LogprobMode
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

// The parameters in the table of M, a SampleFields or more.
template <typename M>
constexpr std::array<Field<M>, 20> SampleParameterTable() {
  return {{{16, "seed", &M::seed},
           {17, "position", &M::position},
           {18, "temperature", &M::temperature},
           {19, "top_k", &M::top_k},
           {20, "top_p", &M::top_p},
           {21, "min_p", &M::min_p},
           {22, "repetition_penalty", &M::repetition_penalty},
           {23, "presence_penalty", &M::presence_penalty},
           {24, "frequency_penalty", &M::frequency_penalty},
           {25, "top_logprobs", &M::top_logprobs},
           {26, "logprob_mode", &M::logprob_mode},
           {27, "history_count", &M::history_count},
           {28, "history", &M::history},
           {29, "logit_bias_count", &M::logit_bias_count},
           {30, "logit_bias_ids", &M::logit_bias_ids},
           {31, "logit_bias", &M::logit_bias},
           {32, "extra_count", &M::extra_count},
           {33, "extra_ids", &M::extra_ids},
           {34, "allowed_tokens", &M::allowed_tokens},
           {35, "allowed_tokens_mask", &M::allowed_tokens_mask}}};
}

// As ParseMessage. Checks the encoding alone, not the values.
absl::Status ParseSampleFields(Pieces pieces, size_t max_list, SampleFields* fields);

// The rows of a request, with their lists: what Sample and Verify have in common. Used as OpCodec
// is.
class SampleBody {
 public:
  // Takes the lists out of `fields`, and the masks out of the message. Fills the counts of `spec`.
  // As RowInput::Read, and INVALID_ARGUMENT: fields that contradict each other, by name; what a value
  // must be is for CheckSample to say, which the caller runs on request().
  absl::Status Build(Pieces pieces, int64_t max_rows, const FindHead& find_head,
                     SampleFields* fields, engine::JobSpec* spec);

  SampleRequest request() const;
  const RowInput& input() const { return input_; }
  int64_t rows() const { return input_.rows(); }
  int64_t list_bytes() const;
  int64_t answer_bytes() const;

  // Of the first kSampleInputs arrays. Afterwards the lists are gone.
  void WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first);

  // Fields 1 to 15 of a SampleResponse.
  void Encode(absl::Span<const absl::Span<const std::byte>> outputs, const CallTimes& times,
              WireWriter& writer) const;

 private:
  absl::Status BuildLists(SampleFields* fields);
  absl::Status BuildMasks(Pieces pieces, const SampleFields& fields);

  RowInput input_;
  absl::InlinedVector<SampleRow, 1> rows_;  // places count from the job's own first elements
  IdList history_;
  std::vector<SampleBias> bias_;
  IdList extra_ids_;
  std::vector<uint32_t> mask_words_;
  int64_t top_entries_ = 0;
  int64_t extra_entries_ = 0;
};

class SampleCodec final : public OpCodec {
 public:
  explicit SampleCodec(FindHead find_head) : find_head_(std::move(find_head)) {}

  const engine::OpTraits& op() const override {
    return body_.input().head() == nullptr ? kSampleTraits : kLinearSampleTraits;
  }
  absl::Status Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) override;
  int64_t answer_bytes() const override { return body_.answer_bytes(); }
  int64_t list_bytes() const override { return body_.list_bytes(); }
  Payload payload() const override { return body_.input().payload(); }
  void WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) override {
    body_.WriteInputs(inputs, first);
  }
  grpc::ByteBuffer Encode(const engine::JobAnswer& answer, const CallTimes& times) override;

 private:
  const FindHead find_head_;
  SampleBody body_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_SAMPLE_CODEC_H_

// The hand-written readers of SampleRequest and VerifyRequest against the generated ones: same
// bytes in, same verdict and same fields out; and what the codecs then write stays where it
// belongs.
#ifndef LOGITD_TESTS_FUZZ_COMPARE_SAMPLE_REQUEST_H_
#define LOGITD_TESTS_FUZZ_COMPARE_SAMPLE_REQUEST_H_

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "logitd/v1/sampler.pb.h"
#include "server/rpc/codecs/sample_codec.h"
#include "server/rpc/codecs/verify_codec.h"
#include "tests/fuzz/field_comparison.h"
#include "tests/rpc/one_head.h"

namespace logitd::rpc::testing {

template <typename Request>
void CompareShared(const Request& expected, const SampleFields& ours, FieldComparison* compare) {
  compare->Params(expected, kSampleParams, ours.params);
  compare->List("history_count", expected.history_count(), ours.history_count);
  compare->List("history", expected.history(), ours.history);
  compare->List("logit_bias_count", expected.logit_bias_count(), ours.logit_bias_count);
  compare->List("logit_bias_ids", expected.logit_bias_ids(), ours.logit_bias_ids);
  compare->List("logit_bias", expected.logit_bias(), ours.logit_bias);
  compare->List("extra_count", expected.extra_count(), ours.extra_count);
  compare->List("extra_ids", expected.extra_ids(), ours.extra_ids);
  compare->Bytes("allowed_tokens", expected.allowed_tokens(), ours.allowed_tokens);
  compare->List("allowed_tokens_mask", expected.allowed_tokens_mask(), ours.allowed_tokens_mask);
}

inline void Compare(const v1::SampleRequest& expected, const SampleFields& ours,
                    FieldComparison* compare) {
  compare->Input(expected, ours);
  CompareShared(expected, ours, compare);
}

inline void Compare(const v1::VerifyRequest& expected, const VerifyFields& ours,
                    FieldComparison* compare) {
  compare->Input(expected, ours);
  CompareShared(expected, ours, compare);
  compare->List("sequence_rows", expected.sequence_rows(), ours.sequence_rows);
  compare->List("drafts", expected.drafts(), ours.drafts);
  compare->List("draft_kind", expected.draft_kind(), ours.draft_kind);
  compare->List("draft_count", expected.draft_count(), ours.draft_count);
  compare->List("draft_ids", expected.draft_ids(), ours.draft_ids);
  compare->Bytes("draft_probs", expected.draft_probs(), ours.draft_probs);
  compare->Note("block_verification", ours.block_verification == expected.block_verification());
}

// Runs what a server would up to the op, into memory of exactly the size that the job asked for.
template <typename Codec>
void WriteEverything(Pieces pieces) {
  const OneHead head;
  Codec codec(head.Find());
  engine::JobSpec spec;
  if (!codec.Parse(pieces, /*max_rows=*/64, &spec).ok()) return;
  std::vector<std::unique_ptr<std::byte[]>> memory;
  std::vector<std::byte*> inputs;
  for (const engine::Array& array : codec.op().inputs) {
    memory.push_back(
        std::make_unique<std::byte[]>(static_cast<size_t>(spec.counts[array.axis]) * array.bytes));
    inputs.push_back(memory.back().get());
  }
  codec.WriteInputs(inputs, {});
}

// Parses a message as two of one stream.
template <typename Codec, typename Sequence>
void ReadTwice(std::string_view bytes) {
  const OneHead head;
  const auto sequence = std::make_shared<Sequence>();
  const Piece piece(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
  for (int message = 0; message < 2; ++message) {
    Codec codec(head.Find(), sequence);
    engine::JobSpec spec;
    if (!codec.Parse(Pieces(&piece, 1), /*max_rows=*/64, &spec).ok()) break;
  }
}

// As Disagreement; and what the codec writes stays where it belongs.
template <typename Request, typename Codec, typename Fields>
std::string SampleDisagreement(std::string_view bytes,
                               absl::Status (*parse)(Pieces, size_t, Fields*)) {
  return Disagreement<Request, Fields>(bytes, parse, [](Pieces pieces) {
    WriteEverything<Codec>(pieces);
    return std::string();
  });
}

inline std::string SampleRequestDisagreement(std::string_view bytes) {
  return SampleDisagreement<v1::SampleRequest, SampleCodec>(bytes, &ParseSampleFields);
}
inline std::string VerifyRequestDisagreement(std::string_view bytes) {
  return SampleDisagreement<v1::VerifyRequest, VerifyCodec>(bytes, &ParseVerifyFields);
}

}  // namespace logitd::rpc::testing

#endif  // LOGITD_TESTS_FUZZ_COMPARE_SAMPLE_REQUEST_H_

// The hand-written readers of SampleRequest and VerifyRequest against the generated ones: same
// bytes in, same verdict and same fields out; and what the codecs then write stays where it
// belongs.
#ifndef LOGITD_TESTS_FUZZ_COMPARE_SAMPLE_REQUEST_H_
#define LOGITD_TESTS_FUZZ_COMPARE_SAMPLE_REQUEST_H_

#include <google/protobuf/stubs/logging.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "logitd/v1/sampler.pb.h"
#include "server/rpc/codecs/row_input.h"
#include "server/rpc/codecs/sample_codec.h"
#include "server/rpc/codecs/verify_codec.h"
#include "tests/fuzz/compare_topk_request.h"
#include "tests/rpc/one_head.h"

namespace logitd::rpc::testing {

// Collects the name of the first field that differs.
class FieldComparison {
 public:
  explicit FieldComparison(Pieces pieces) : pieces_(pieces) {}

  template <typename Expected, typename Ours>
  void List(const char* name, const Expected& expected, const Ours& ours) {
    bool same = static_cast<size_t>(expected.size()) == ours.size();
    for (size_t i = 0; same && i < ours.size(); ++i) {
      if constexpr (std::is_same_v<typename Ours::value_type, float>) {
        same = std::bit_cast<uint32_t>(expected.Get(static_cast<int>(i))) ==
               std::bit_cast<uint32_t>(ours[i]);
      } else {
        same = static_cast<typename Ours::value_type>(expected.Get(static_cast<int>(i))) == ours[i];
      }
    }
    Note(name, same);
  }
  void Bytes(const char* name, const std::string& expected, const ByteRange& ours) {
    std::string bytes(ours.bytes, '\0');
    if (!bytes.empty()) CopyRange(pieces_, ours, bytes.data());
    Note(name, bytes == expected);
  }
  void Note(const char* name, bool same) {
    if (!same && text_.empty()) text_ = absl::StrCat(name, " differs");
  }
  const std::string& text() const { return text_; }

 private:
  const Pieces pieces_;
  std::string text_;
};

template <typename Request>
void CompareShared(const Request& expected, const SampleFields& ours, FieldComparison* compare) {
  compare->Note("dtype", ours.dtype == static_cast<int>(expected.dtype()));
  compare->Note("rows", ours.rows == expected.rows());
  compare->Note("vocab", ours.vocab == expected.vocab());
  compare->Note("input",
                static_cast<int>(ours.input.number) == static_cast<int>(expected.input_case()));
  compare->List("seed", expected.seed(), ours.seed);
  compare->List("position", expected.position(), ours.position);
  compare->List("temperature", expected.temperature(), ours.temperature);
  compare->List("top_k", expected.top_k(), ours.top_k);
  compare->List("top_p", expected.top_p(), ours.top_p);
  compare->List("min_p", expected.min_p(), ours.min_p);
  compare->List("repetition_penalty", expected.repetition_penalty(), ours.repetition_penalty);
  compare->List("presence_penalty", expected.presence_penalty(), ours.presence_penalty);
  compare->List("frequency_penalty", expected.frequency_penalty(), ours.frequency_penalty);
  compare->List("top_logprobs", expected.top_logprobs(), ours.top_logprobs);
  compare->List("logprob_mode", expected.logprob_mode(), ours.logprob_mode);
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

// Of requests that take hidden states.
template <typename Request>
void CompareHidden(const Request& expected, const RowInputFields& ours, FieldComparison* compare) {
  compare->Note("head", ours.head == expected.head());
  compare->Note("hidden_size", ours.hidden_size == expected.hidden_size());
  compare->Bytes("input", expected.has_hidden() ? expected.hidden() : expected.logits(),
                 ours.input.range);
}

inline void Compare(const v1::SampleRequest& expected, const SampleFields& ours,
                    FieldComparison* compare) {
  CompareShared(expected, ours, compare);
  CompareHidden(expected, ours, compare);
}

inline void Compare(const v1::VerifyRequest& expected, const VerifyFields& ours,
                    FieldComparison* compare) {
  CompareShared(expected, ours, compare);
  compare->Bytes("logits", expected.logits(), ours.input.range);
  compare->List("sequence_rows", expected.sequence_rows(), ours.sequence_rows);
  compare->List("drafts", expected.drafts(), ours.drafts);
  compare->List("draft_kind", expected.draft_kind(), ours.draft_kind);
  compare->List("draft_count", expected.draft_count(), ours.draft_count);
  compare->List("draft_ids", expected.draft_ids(), ours.draft_ids);
  compare->Bytes("draft_probs", expected.draft_probs(), ours.draft_probs);
}

template <typename Codec>
Codec MakeCodec(const OneHead& head) {
  if constexpr (std::is_constructible_v<Codec, FindHead>) {
    return Codec(head.Find());
  } else {
    return Codec();
  }
}

// Runs what a server would up to the op, into memory of exactly the size that the job asked for.
template <typename Codec>
void WriteEverything(Pieces pieces) {
  const OneHead head;
  Codec codec = MakeCodec<Codec>(head);
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

// Empty if the two agree on `bytes`, in one piece, byte by byte, and in two ways between.
template <typename Request, typename Codec, typename Fields>
std::string SampleDisagreement(std::string_view bytes,
                               absl::Status (*parse)(Pieces, size_t, Fields*)) {
  const google::protobuf::LogSilencer silence;  // as in compare_topk_request.h
  Request expected;
  const bool expected_ok = expected.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  for (size_t most : {bytes.size(), size_t{1}, size_t{3}, size_t{17}}) {
    const std::vector<Piece> pieces = Cut(bytes, most, static_cast<uint32_t>(bytes.size() + most));
    Fields fields;
    const absl::Status status = parse(pieces, std::numeric_limits<size_t>::max(), &fields);
    if (status.ok() != expected_ok) {
      return absl::StrCat("generated code ", expected_ok ? "accepts" : "refuses",
                          ", ours: ", status.ToString());
    }
    if (!expected_ok) continue;
    FieldComparison compare(pieces);
    Compare(expected, fields, &compare);
    if (!compare.text().empty()) {
      return absl::StrCat(compare.text(), " (pieces of at most ", most, " bytes)");
    }
    WriteEverything<Codec>(pieces);
  }
  return "";
}

inline std::string SampleRequestDisagreement(std::string_view bytes) {
  return SampleDisagreement<v1::SampleRequest, SampleCodec>(bytes, &ParseSampleFields);
}
inline std::string VerifyRequestDisagreement(std::string_view bytes) {
  return SampleDisagreement<v1::VerifyRequest, VerifyCodec>(bytes, &ParseVerifyFields);
}

}  // namespace logitd::rpc::testing

#endif  // LOGITD_TESTS_FUZZ_COMPARE_SAMPLE_REQUEST_H_

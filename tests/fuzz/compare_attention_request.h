// The hand-written readers of the Attention service's requests against the generated ones: same
// bytes in, same verdict and same fields out; and what the codec then copies and points at stays
// within what it asked for.
#ifndef LOGITD_TESTS_FUZZ_COMPARE_ATTENTION_REQUEST_H_
#define LOGITD_TESTS_FUZZ_COMPARE_ATTENTION_REQUEST_H_

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "logitd/v1/attention.pb.h"
#include "server/engine/batch.h"
#include "server/rpc/codecs/attention_codec.h"
#include "server/rpc/codecs/payload.h"
#include "tests/fuzz/field_comparison.h"

namespace logitd::rpc::testing {

// Every name is that of one lease of 4096 bytes.
inline absl::StatusOr<std::shared_ptr<const arena::Arena>> FindOneLease(std::string_view) {
  static const auto* const arena = [] {
    const int fd = memfd_create("lease", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, 4096) != 0) std::abort();
    return new std::shared_ptr<const arena::Arena>(*arena::Arena::Map(fd, 4096));
  }();
  return *arena;
}

inline bool SameFloat(bool has, float expected, const std::optional<float>& ours) {
  return has == ours.has_value() &&
         (!has || std::bit_cast<uint32_t>(expected) == std::bit_cast<uint32_t>(*ours));
}
inline bool SameInt(bool has, int64_t expected, const std::optional<int64_t>& ours) {
  return has == ours.has_value() && (!has || expected == *ours);
}

template <typename Request>
void CompareCommon(const Request& expected, const AttentionFields& ours, FieldComparison* compare) {
  compare->Note("dtype", ours.dtype == static_cast<int>(expected.dtype()));
  compare->Note("batch", ours.batch == expected.batch());
  compare->Note("heads", ours.heads == expected.heads());
  compare->Note("queries", ours.queries == expected.queries());
  compare->Note("keys", ours.keys == expected.keys());
  compare->Note("scale", SameFloat(expected.has_scale(), expected.scale(), ours.scale));
  compare->Note("window_left",
                SameInt(expected.has_window_left(), expected.window_left(), ours.window_left));
  compare->Note("window_right",
                SameInt(expected.has_window_right(), expected.window_right(), ours.window_right));
  compare->List("sinks", expected.sinks(), ours.sinks);
  compare->Note("out_dtype", ours.out_dtype == static_cast<int>(expected.out_dtype()));
  compare->Note("shared_rows", ours.shared_rows == expected.shared_rows());
  compare->Note("input",
                static_cast<int>(ours.payload.number) == static_cast<int>(expected.input_case()));
  if (expected.has_shared()) compare->Shared(expected.shared(), ours.payload);
  compare->Note("shared_output", expected.has_shared_output() == (ours.output.number != 0));
  if (expected.has_shared_output()) compare->Shared(expected.shared_output(), ours.output);
}

inline void Compare(const v1::AttentionSoftmaxRequest& expected, const AttentionFields& ours,
                    FieldComparison* compare) {
  CompareCommon(expected, ours, compare);
  compare->Bytes("scores", expected.scores(), ours.payload.range);
  compare->Note("mask_kind", ours.mask_kind == static_cast<int>(expected.mask_kind()));
  compare->Note("mask_dtype", ours.mask_dtype == static_cast<int>(expected.mask_dtype()));
  compare->List("mask_shape", expected.mask_shape(), ours.mask_shape);
  compare->Bytes("mask", expected.mask(), ours.mask);
  compare->Note("want_logsumexp", ours.want_logsumexp == expected.want_logsumexp());
}

inline void Compare(const v1::AttentionSoftmaxBackwardRequest& expected,
                    const AttentionFields& ours, FieldComparison* compare) {
  CompareCommon(expected, ours, compare);
  compare->Bytes("probs", expected.probs(), ours.payload.range);
  compare->Note("gradient", static_cast<int>(ours.d_probs.number) ==
                                static_cast<int>(expected.gradient_case()));
  if (expected.has_shared_d_probs()) compare->Shared(expected.shared_d_probs(), ours.d_probs);
  compare->Bytes("d_probs", expected.d_probs(), ours.d_probs.range);
  compare->Bytes("logsumexp", expected.logsumexp(), ours.logsumexp);
}

// Runs what a server would up to the op, into memory of exactly the size that the job asked for.
// Empty, or which part of the mask is outside of what was copied.
inline std::string PrepareEverything(AttentionDirection direction, Pieces pieces, bool stream) {
  auto tensor = stream ? std::make_shared<AttentionTensor>() : nullptr;
  AttentionCodec codec(direction, FindOneLease, tensor);
  engine::JobSpec spec;
  if (!codec.Parse(pieces, /*max_rows=*/64, &spec).ok()) return "";
  const size_t row_stride = engine::RowStride(spec.key);
  const size_t payload = static_cast<size_t>(spec.rows()) * row_stride;
  std::array<size_t, engine::kMaxArrays> offsets;
  const absl::Span<const engine::Array> arrays = codec.op().inputs;
  const size_t bytes = engine::LayOut(arrays, spec.counts, payload, offsets.data());
  const auto memory = std::make_unique<std::byte[]>(bytes);
  CopyRows(pieces, codec.payload(), memory.get(), row_stride);
  std::vector<std::byte*> inputs;
  for (size_t i = 0; i < arrays.size(); ++i) inputs.push_back(memory.get() + offsets[i]);
  for (size_t i = 0; i < codec.copied_inputs().size(); ++i) {
    const Payload& input = codec.copied_inputs()[i];
    if (input.range.bytes != static_cast<size_t>(spec.counts[arrays[i].axis]) * arrays[i].bytes) {
      return absl::StrCat("input ", i, " has ", input.range.bytes, " bytes");
    }
    CopyRows(pieces, input, inputs[i], input.row_bytes);
  }
  codec.WriteInputs(inputs, {});

  const auto& call = dynamic_cast<const ops::AttentionCall&>(*spec.call);
  const AttentionMask& mask = call.mask;
  if (mask.kind == MaskKind::kNone) return "";
  const int64_t element =
      mask.kind == MaskKind::kBool ? 1 : static_cast<int64_t>(SizeOf(mask.dtype));
  for (int64_t r = 0; r < call.shape.rows; ++r) {
    const int64_t row = call.shape.first_row + r;
    const int64_t head = row / call.shape.queries;
    const int64_t at = head / call.shape.heads * mask.batch_stride +
                       head % call.shape.heads * mask.head_stride +
                       row % call.shape.queries * mask.query_stride - mask.origin;
    if (at < 0 || (at + call.shape.keys) * element > spec.counts[ops::kAttentionMaskBytes]) {
      return absl::StrCat("row ", row, " looks at mask element ", at);
    }
  }
  return "";
}

template <typename Request>
std::string AttentionDisagreement(AttentionDirection direction, std::string_view bytes) {
  const auto parse = [direction](Pieces pieces, size_t max_list, AttentionFields* fields) {
    return ParseAttentionFields(direction, pieces, max_list, fields);
  };
  return Disagreement<Request, AttentionFields>(bytes, parse, [direction](Pieces pieces) {
    const std::string text = PrepareEverything(direction, pieces, /*stream=*/false);
    return text.empty() ? PrepareEverything(direction, pieces, /*stream=*/true) : text;
  });
}

// Empty if the two agree on `bytes` as either request, in one piece, byte by byte, and in two ways
// between.
inline std::string AttentionDisagreement(std::string_view bytes) {
  std::string text =
      AttentionDisagreement<v1::AttentionSoftmaxRequest>(AttentionDirection::kForward, bytes);
  if (!text.empty()) return "forward: " + text;
  text = AttentionDisagreement<v1::AttentionSoftmaxBackwardRequest>(AttentionDirection::kBackward,
                                                                    bytes);
  return text.empty() ? "" : "backward: " + text;
}

}  // namespace logitd::rpc::testing

#endif  // LOGITD_TESTS_FUZZ_COMPARE_ATTENTION_REQUEST_H_

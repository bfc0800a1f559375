// Attention requests and what becomes of them in the codec, for its tests.
#ifndef LOGITD_TESTS_RPC_ATTENTION_REQUESTS_H_
#define LOGITD_TESTS_RPC_ATTENTION_REQUESTS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "logitd/v1/attention.pb.h"
#include "server/rpc/codecs/attention_codec.h"
#include "tests/rpc/one_head.h"

namespace logitd::rpc {

using Forward = v1::AttentionSoftmaxRequest;
using Backward = v1::AttentionSoftmaxBackwardRequest;

inline constexpr int64_t kMaxRows = 100;

// Bytes that tell their place.
inline std::string Numbered(int64_t bytes, int first = 0) {
  std::string out(static_cast<size_t>(bytes), '\0');
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<char>(first + i);
  return out;
}

template <typename Request>
Request Shaped(int64_t batch, int64_t heads, int64_t queries, int64_t keys) {
  Request request;
  request.set_dtype(v1::DTYPE_F16);
  request.set_batch(batch);
  request.set_heads(heads);
  request.set_queries(queries);
  request.set_keys(keys);
  return request;
}

// B 2, H 3, Sq 4, Sk 5 in f16: 24 rows of 10 bytes.
inline Forward Scores() {
  Forward request = Shaped<Forward>(2, 3, 4, 5);
  request.set_scores(Numbered(240));
  return request;
}

inline Backward Gradient() {
  Backward request = Shaped<Backward>(2, 3, 4, 5);
  request.set_probs(Numbered(240));
  request.set_d_probs(Numbered(240, 7));
  return request;
}

template <typename Request>
void SetMaskShape(std::vector<int64_t> shape, Request* request) {
  request->clear_mask_shape();
  for (int64_t size : shape) request->add_mask_shape(size);
}

inline Forward BoolMasked(std::vector<int64_t> shape) {
  Forward request = Scores();
  request.set_mask_kind(v1::MASK_KIND_BOOL);
  SetMaskShape(shape, &request);
  request.set_mask(Numbered(shape[0] * shape[1] * shape[2] * shape[3], 100));
  return request;
}

struct Parsed {
  explicit Parsed(const Forward& request, std::shared_ptr<AttentionTensor> tensor = nullptr)
      : Parsed(request.SerializeAsString(), AttentionDirection::kForward, std::move(tensor)) {}
  explicit Parsed(const Backward& request, std::shared_ptr<AttentionTensor> tensor = nullptr)
      : Parsed(request.SerializeAsString(), AttentionDirection::kBackward, std::move(tensor)) {}
  Parsed(std::string message, AttentionDirection direction, std::shared_ptr<AttentionTensor> tensor)
      : bytes(std::move(message)),
        piece(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()),
        codec(direction, lent.Find().lease, std::move(tensor)),
        status(codec.Parse(pieces(), kMaxRows, &spec)) {}
  Parsed(const Parsed&) = delete;

  Pieces pieces() const { return Pieces(&piece, 1); }
  const ops::AttentionCall& call() const {
    return dynamic_cast<const ops::AttentionCall&>(*spec.call);
  }
  std::string Copied(size_t input) const {
    const ByteRange range = codec.copied_inputs()[input].range;
    std::string out(range.bytes, '\0');
    if (!out.empty()) CopyRange(pieces(), range, out.data());
    return out;
  }
  std::vector<float> Sinks() {
    std::vector<float> sinks(static_cast<size_t>(spec.counts[ops::kAttentionSinks]));
    std::vector<std::byte*> inputs(codec.op().inputs.size());
    inputs.back() = reinterpret_cast<std::byte*>(sinks.data());
    codec.WriteInputs(inputs, {});
    return sinks;
  }

  std::string bytes;
  Piece piece;
  testing::OneHead lent;
  AttentionCodec codec;
  engine::JobSpec spec;
  absl::Status status;
};

}  // namespace logitd::rpc

#endif  // LOGITD_TESTS_RPC_ATTENTION_REQUESTS_H_

// The Attention service's codec: proto in, job parts out, and back.
#include "server/rpc/codecs/attention_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "logitd/v1/attention.pb.h"
#include "tests/fake_backend.h"
#include "tests/fuzz/compare_attention_request.h"
#include "tests/rpc/attention_requests.h"
#include "tests/rpc/judged.h"

namespace logitd::rpc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(AttentionCodecTest, WhatIsNotSetIsThePlainSoftmaxInPlace) {
  const Parsed p(Scores());
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.spec.key.op, &ops::kAttentionSoftmaxTraits);
  EXPECT_EQ(p.spec.key.dtype, DType::kF16);
  EXPECT_EQ(p.spec.key.row_elements, 5);
  EXPECT_EQ(p.spec.rows(), 24);
  EXPECT_EQ(p.spec.counts[ops::kAttentionOutBytes], 240);
  EXPECT_EQ(p.spec.counts[ops::kAttentionSinks], 0);
  EXPECT_EQ(p.spec.counts[ops::kAttentionLogsumexps], 0);
  EXPECT_EQ(p.spec.counts[ops::kAttentionMaskBytes], 0);
  EXPECT_TRUE(p.spec.in_place);
  EXPECT_EQ(p.call().out_dtype, DType::kF16);
  EXPECT_EQ(p.call().scale, 1.0f);
  EXPECT_EQ(p.call().window.left, AttentionWindow::kUnbounded);
  EXPECT_EQ(p.call().window.right, AttentionWindow::kUnbounded);
  EXPECT_EQ(p.call().mask.kind, MaskKind::kNone);
  EXPECT_EQ(p.call().shape.batch, 2);
  EXPECT_EQ(p.call().shape.heads, 3);
  EXPECT_EQ(p.call().shape.queries, 4);
  EXPECT_EQ(p.call().shape.first_row, 0);
}

TEST(AttentionCodecTest, ParametersReachTheCall) {
  Forward request = Scores();
  request.set_scale(0);  // set, though it is the default of a float
  request.set_window_left(0);
  request.set_window_right(7);
  request.set_out_dtype(v1::DTYPE_F32);
  request.set_want_logsumexp(true);
  for (float sink : {0.0f, 1.5f, -std::numeric_limits<float>::infinity()}) request.add_sinks(sink);
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.call().scale, 0.0f);
  EXPECT_EQ(p.call().window.left, 0);
  EXPECT_EQ(p.call().window.right, 7);
  EXPECT_EQ(p.call().out_dtype, DType::kF32);
  EXPECT_FALSE(p.spec.in_place);
  EXPECT_EQ(p.spec.counts[ops::kAttentionOutBytes], 480);
  EXPECT_EQ(p.spec.counts[ops::kAttentionLogsumexps], 24);
  EXPECT_THAT(p.Sinks(), ElementsAre(0.0f, 1.5f, -std::numeric_limits<float>::infinity()));
}

TEST(AttentionCodecTest, AMaskIsStridedAsItsShapeSays) {
  struct Case {
    std::vector<int64_t> shape;
    int64_t batch, head, query;
  };
  for (const Case& c :
       {Case{{1, 1, 1, 5}, 0, 0, 0}, Case{{2, 3, 4, 5}, 60, 20, 5}, Case{{1, 3, 4, 5}, 0, 20, 5},
        Case{{2, 1, 4, 5}, 20, 0, 5}, Case{{2, 3, 1, 5}, 15, 5, 0}, Case{{1, 1, 4, 5}, 0, 0, 5}}) {
    const Forward request = BoolMasked(c.shape);
    const Parsed p(request);
    ASSERT_TRUE(p.status.ok()) << p.status;
    EXPECT_EQ(p.call().mask.kind, MaskKind::kBool);
    EXPECT_EQ(p.call().mask.batch_stride, c.batch);
    EXPECT_EQ(p.call().mask.head_stride, c.head);
    EXPECT_EQ(p.call().mask.query_stride, c.query);
    EXPECT_EQ(p.call().mask.origin, 0);
    EXPECT_EQ(p.Copied(ops::kAttentionInMask.index), request.mask());
    EXPECT_EQ(p.spec.counts[ops::kAttentionMaskBytes], static_cast<int64_t>(request.mask().size()));
  }
}

TEST(AttentionCodecTest, TheGradientHasItsThreeInputs) {
  Backward request = Gradient();
  Parsed plain(request);
  ASSERT_TRUE(plain.status.ok()) << plain.status;
  EXPECT_EQ(plain.spec.key.op, &ops::kAttentionSoftmaxBackwardTraits);
  EXPECT_TRUE(plain.spec.in_place);
  EXPECT_EQ(plain.Copied(ops::kAttentionBackwardInDProbs.index), request.d_probs());
  EXPECT_EQ(plain.spec.counts[ops::kAttentionLogsumexps], 0);

  for (float sink : {0.0f, 1.5f, 2.0f}) request.add_sinks(sink);
  request.set_logsumexp(Numbered(24 * 4, 50));
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.Copied(ops::kAttentionBackwardInLogsumexp.index), request.logsumexp());
  EXPECT_EQ(p.spec.counts[ops::kAttentionLogsumexps], 24);
  EXPECT_EQ(p.spec.counts[ops::kAttentionSinks], 3);
  EXPECT_THAT(p.Sinks(), ElementsAre(0.0f, 1.5f, 2.0f));
}

// --- streams

TEST(AttentionCodecTest, MessagesOfAStreamContinueTheTensor) {
  auto tensor = std::make_shared<AttentionTensor>();
  Forward first = Scores();
  first.set_scale(0.5f);
  first.set_window_right(0);
  first.add_sinks(1);
  first.add_sinks(2);
  first.add_sinks(3);
  first.set_scores(Numbered(10 * 7));
  Parsed a(first, tensor);
  ASSERT_TRUE(a.status.ok()) << a.status;
  EXPECT_EQ(a.call().shape.first_row, 0);
  EXPECT_EQ(a.call().shape.rows, 7);
  Forward next;
  next.set_scores(Numbered(10 * 16));
  Parsed b(next, tensor);
  ASSERT_TRUE(b.status.ok()) << b.status;
  EXPECT_EQ(b.call().shape.first_row, 7);
  EXPECT_EQ(b.call().shape.rows, 16);
  EXPECT_EQ(b.call().scale, 0.5f);
  EXPECT_EQ(b.call().window.right, 0);
  EXPECT_THAT(b.Sinks(), ElementsAre(1, 2, 3));
  next.set_scores(Numbered(10));
  const Parsed c(next, tensor);
  ASSERT_TRUE(c.status.ok()) << c.status;
  EXPECT_EQ(c.call().shape.first_row, 23);
  // The tensor is complete: the next message is the first of another, with a shape of its own.
  EXPECT_EQ(Parsed(next, tensor).status.code(), absl::StatusCode::kInvalidArgument);
  Forward other = Shaped<Forward>(1, 1, 2, 5);
  other.set_scores(Numbered(20));
  const Parsed d(other, tensor);
  ASSERT_TRUE(d.status.ok()) << d.status;
  EXPECT_EQ(d.call().shape.first_row, 0);
  EXPECT_EQ(d.call().scale, 1.0f);
}

TEST(AttentionCodecTest, AMessageOfAStreamBringsTheMaskRowsItUses) {
  struct Case {
    const char* why;
    std::vector<int64_t> shape;
    int64_t rows_before, rows;  // of the message
    int64_t first, count;       // rows of the mask
  };
  // 2 x 3 heads of 4 queries.
  const Case cases[] = {
      {"one_for_all", {1, 1, 1, 5}, 5, 9, 0, 1},
      {"as_the_scores", {2, 3, 4, 5}, 5, 9, 5, 9},
      {"for_every_head_within_one", {1, 1, 4, 5}, 5, 2, 1, 2},
      {"for_every_head_over_two", {1, 1, 4, 5}, 6, 3, 0, 4},
      {"an_item_a_row", {2, 1, 1, 5}, 4, 8, 0, 1},
      {"an_item_a_row_both", {2, 1, 1, 5}, 8, 8, 0, 2},
      {"an_item_a_row_the_second", {2, 1, 1, 5}, 12, 12, 1, 1},
      {"a_head_a_row", {1, 3, 1, 5}, 5, 4, 1, 2},
      {"a_head_a_row_over_items", {1, 3, 1, 5}, 11, 2, 0, 3},
      {"items_and_queries", {2, 1, 4, 5}, 13, 3, 5, 3},
      {"items_and_queries_over_both", {2, 1, 4, 5}, 11, 2, 3, 2},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.why);
    auto tensor = std::make_shared<AttentionTensor>();
    Forward request = BoolMasked(c.shape);
    tensor->header.dtype = v1::DTYPE_F16;
    tensor->header.batch = 2;
    tensor->header.heads = 3;
    tensor->header.queries = 4;
    tensor->header.keys = 5;
    tensor->header.mask_kind = v1::MASK_KIND_BOOL;
    tensor->header.mask_shape.assign(c.shape.begin(), c.shape.end());
    tensor->next_row = c.rows_before;
    Forward message;
    message.set_scores(Numbered(10 * c.rows));
    message.set_mask(
        request.mask().substr(static_cast<size_t>(5 * c.first), static_cast<size_t>(5 * c.count)));
    const AttentionTensor before = *tensor;
    const Parsed p(message, tensor);
    ASSERT_TRUE(p.status.ok()) << p.status;
    EXPECT_EQ(p.call().mask.origin, 5 * c.first);
    EXPECT_EQ(p.Copied(ops::kAttentionInMask.index), message.mask());
    *tensor = before;
    message.set_mask(message.mask() + "x");
    EXPECT_THAT(
        std::string(Parsed(message, tensor).status.message()),
        HasSubstr(absl::StrCat("mask: got ", 5 * c.count + 1, " bytes, allowed ", 5 * c.count,
                               ": rows ", c.first, " to ", c.first + c.count - 1)));
  }
}

TEST(AttentionCodecTest, AStreamIsToldWhatDoesNotContinueIt) {
  const auto refusal = [](const Forward& message) {
    auto tensor = std::make_shared<AttentionTensor>();
    Forward first = Scores();
    first.set_scores(Numbered(10 * 20));
    EXPECT_TRUE(Parsed(first, tensor).status.ok());
    const absl::Status status = Parsed(message, tensor).status;
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  Forward message;
  EXPECT_THAT(refusal(message), HasSubstr("scores: got 0 bytes at row 20"));
  message.set_scores(Numbered(15));
  EXPECT_THAT(refusal(message),
              HasSubstr("scores: got 15 bytes at row 20, allowed 1..4 whole rows of "
                        "10 bytes"));
  message.set_scores(Numbered(50));
  EXPECT_THAT(refusal(message), HasSubstr("allowed 1..4 whole rows of 10 bytes"));
  message.set_scores(Numbered(40));
  message.set_scale(2);
  EXPECT_THAT(refusal(message),
              HasSubstr("message: got a shape or a parameter at row 20 of a tensor"));
}

TEST(AttentionCodecTest, AStreamsShapeIsCheckedAsACallsIs) {
  const auto refusal = [](void (*change)(Forward*)) {
    Forward message = Scores();
    message.set_scores(Numbered(10));
    change(&message);
    return std::string(Parsed(message, std::make_shared<AttentionTensor>()).status.message());
  };
  EXPECT_EQ(refusal([](Forward*) {}), "");
  EXPECT_THAT(refusal([](Forward* r) { r->set_keys(0); }), HasSubstr("keys: got 0"));
  EXPECT_THAT(refusal([](Forward* r) { r->set_keys(1 << 21); }), HasSubstr("keys: got 2097152"));
  EXPECT_THAT(refusal([](Forward* r) { r->set_batch(0); }), HasSubstr("batch: got 0"));
  EXPECT_THAT(refusal([](Forward* r) { r->set_queries(-1); }), HasSubstr("queries: got -1"));
}

// The part of the mask that a message brings, against a count row by row.
TEST(AttentionCodecTest, TheMaskRowsOfAMessageAreThoseOfEveryRow) {
  uint32_t seed = 12345;
  const auto draw = [&seed](uint32_t below) {
    seed = seed * 1664525u + 1013904223u;
    return static_cast<int64_t>((seed >> 8) % below);
  };
  for (int round = 0; round < 2000; ++round) {
    const int64_t full[] = {1 + draw(3), 1 + draw(3), 1 + draw(3), 1 + draw(2)};
    std::vector<int64_t> shape(full, full + 4);
    for (size_t axis = 0; axis < 3; ++axis) {
      if (draw(2) == 0) shape[axis] = 1;
    }
    const int64_t total = full[0] * full[1] * full[2];
    const int64_t first = draw(static_cast<uint32_t>(total));
    const int64_t rows = 1 + draw(static_cast<uint32_t>(total - first));
    int64_t low = std::numeric_limits<int64_t>::max();
    int64_t high = 0;
    for (int64_t row = first; row < first + rows; ++row) {
      const int64_t item = row / full[2] / full[1];
      const int64_t head = row / full[2] % full[1];
      const int64_t query = row % full[2];
      const int64_t at =
          ((shape[0] == 1 ? 0 : item) * shape[1] + (shape[1] == 1 ? 0 : head)) * shape[2] +
          (shape[2] == 1 ? 0 : query);
      low = std::min(low, at);
      high = std::max(high, at + 1);
    }
    auto tensor = std::make_shared<AttentionTensor>();
    tensor->header.dtype = v1::DTYPE_F16;
    tensor->header.batch = full[0];
    tensor->header.heads = full[1];
    tensor->header.queries = full[2];
    tensor->header.keys = full[3];
    tensor->header.mask_kind = v1::MASK_KIND_BOOL;
    tensor->header.mask_shape.assign(shape.begin(), shape.end());
    tensor->next_row = first;
    Forward message;
    if (first == 0) {  // begins the tensor, with its fields
      message = Shaped<Forward>(full[0], full[1], full[2], full[3]);
      message.set_mask_kind(v1::MASK_KIND_BOOL);
      SetMaskShape(shape, &message);
    }
    message.set_scores(Numbered(2 * full[3] * rows));
    message.set_mask(Numbered(full[3] * (high - low)));
    const Parsed p(message, tensor);
    ASSERT_TRUE(p.status.ok()) << "round " << round << ": " << p.status;
    EXPECT_EQ(p.call().mask.origin, full[3] * low) << "round " << round;
  }
}

// --- refusals

const testing::Refused<Forward> kRefusedAttention[] = {
    {"no_dtype", [](Forward* r) { r->clear_dtype(); }, "dtype: got 0"},
    {"no_scores", [](Forward* r) { r->clear_scores(); }, "scores: got 0 bytes"},
    {"keys_0", [](Forward* r) { r->set_keys(0); }, "keys: got 0"},
    {"keys_beyond", [](Forward* r) { r->set_keys((1 << 20) + 1); }, "keys: got 1048577"},
    {"heads_negative", [](Forward* r) { r->set_heads(-3); }, "heads: got -3"},
    {"sizes_that_overflow",
     [](Forward* r) {
       r->set_batch(int64_t{1} << 40);
       r->set_queries(int64_t{1} << 40);
     },
     "batch"},
    {"scale_nan", [](Forward* r) { r->set_scale(std::nanf("")); }, "scale: got nan"},
    {"window_negative", [](Forward* r) { r->set_window_left(-2); },
     "window_left: got -2, allowed >= 0, or -1 for unbounded"},
    {"mask_kind_of_the_future", [](Forward* r) { r->set_mask_kind(static_cast<v1::MaskKind>(3)); },
     "mask_kind: got 3"},
    {"mask_without_kind", [](Forward* r) { r->clear_mask_kind(); },
     "mask_shape: got 4 values, allowed 0"},
    {"mask_bytes_without_kind",
     [](Forward* r) {
       r->clear_mask_kind();
       r->clear_mask_shape();
     },
     "mask: got 20 bytes, allowed 0"},
    {"mask_shape_of_two",
     [](Forward* r) {
       SetMaskShape({4, 5}, r);
     },
     "mask_shape: got 2 values, allowed 4"},
    {"mask_shape_that_fits_nothing",
     [](Forward* r) {
       SetMaskShape({1, 2, 4, 5}, r);
     },
     "mask_shape: got 2 for heads, allowed 1, 3"},
    {"mask_shape_negative",
     [](Forward* r) {
       SetMaskShape({1, 1, -4, 5}, r);
     },
     "mask_shape: got -4"},
    {"mask_short", [](Forward* r) { r->mutable_mask()->pop_back(); }, "mask: got 19 bytes"},
    {"mask_dtype_of_a_bool", [](Forward* r) { r->set_mask_dtype(v1::DTYPE_F16); },
     "mask_dtype: got 2 with mask_kind 1, allowed only with MASK_KIND_ADDITIVE"},
    {"additive_without_dtype", [](Forward* r) { r->set_mask_kind(v1::MASK_KIND_ADDITIVE); },
     "mask_dtype: got 0"},
    {"sinks_of_two_for_three_heads",
     [](Forward* r) {
       r->add_sinks(0);
       r->add_sinks(0);
     },
     "sinks: got 2 values"},
    {"out_dtype_of_another_half", [](Forward* r) { r->set_out_dtype(v1::DTYPE_BF16); },
     "out_dtype: got bf16"},
    {"out_dtype_of_the_future", [](Forward* r) { r->set_out_dtype(static_cast<v1::DType>(9)); },
     "out_dtype: got 9"}};

TEST(AttentionCodecTest, RequestsAreRefusedNamingTheField) {
  testing::ExpectRefused(BoolMasked({1, 1, 4, 5}), kRefusedAttention,
                         [](const Forward& request) { return Parsed(request).status; });
}

TEST(AttentionCodecTest, TheGradientsInputsMustAgree) {
  const auto refusal = [](void (*change)(Backward*)) {
    Backward request = Gradient();
    change(&request);
    const absl::Status status = Parsed(request).status;
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(refusal([](Backward* r) { r->mutable_d_probs()->pop_back(); }),
              HasSubstr("d_probs: got 239 bytes, allowed 240, as many as probs"));
  EXPECT_THAT(refusal([](Backward* r) { r->mutable_probs()->pop_back(); }),
              HasSubstr("probs: got 239 bytes"));
  EXPECT_THAT(refusal([](Backward* r) { r->set_logsumexp(Numbered(96)); }),
              HasSubstr("logsumexp: got 96 bytes, allowed 0"));
  EXPECT_THAT(refusal([](Backward* r) {
                for (int i = 0; i < 3; ++i) r->add_sinks(0);
              }),
              HasSubstr("logsumexp: got 0 bytes, allowed 96"));
  EXPECT_THAT(refusal([](Backward* r) { r->set_out_dtype(v1::DTYPE_F32); }),
              HasSubstr("out_dtype: got f32"));
}

// --- answers

template <typename T>
absl::Span<const std::byte> Bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(T)};
}

const CallTimes kTimes = {.receive_ns = 1,
                          .total_ns = int64_t{1} << 40,
                          .job = {.copy_ns = 2, .queue_ns = 3, .kernel_ns = 5, .batch_rows = 7}};

TEST(AttentionCodecTest, AnswerIsWhatGeneratedCodeReads) {
  Forward request = Scores();
  request.set_out_dtype(v1::DTYPE_F32);
  request.set_want_logsumexp(true);
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  std::vector<float> probs(120);
  for (size_t i = 0; i < probs.size(); ++i) probs[i] = static_cast<float>(i) / 8;
  std::vector<float> logsumexp(24, 1.25f);
  std::vector<RowStatus> status(24);
  status[3] = {RowCode::kNanLogit, 4};
  status[23] = {RowCode::kEmptySupport, -1};
  const absl::Span<const std::byte> outputs[] = {Bytes(probs), Bytes(logsumexp), Bytes(status)};
  const std::string bytes = p.codec.Encode({.outputs = outputs}, kTimes).ToString();
  EXPECT_LE(static_cast<int64_t>(bytes.size()), p.codec.answer_bytes());
  v1::AttentionSoftmaxResponse response;
  ASSERT_TRUE(response.ParseFromString(bytes));
  EXPECT_EQ(response.first_row(), 0);
  EXPECT_EQ(response.rows(), 24);
  EXPECT_EQ(response.dtype(), v1::DTYPE_F32);
  EXPECT_THAT(response.fault_rows(), ElementsAre(3, 23));
  EXPECT_THAT(response.fault_status(),
              ElementsAre(v1::ROW_STATUS_NAN_LOGIT, v1::ROW_STATUS_EMPTY_SUPPORT));
  EXPECT_THAT(response.fault_positions(), ElementsAre(4, -1));
  EXPECT_EQ(response.probs(), std::string(reinterpret_cast<const char*>(probs.data()), 480));
  EXPECT_EQ(response.logsumexp(), std::string(reinterpret_cast<const char*>(logsumexp.data()), 96));
  EXPECT_EQ(response.timings().kernel_ns(), 5);
  EXPECT_EQ(response.timings().total_ns(), int64_t{1} << 40);
  EXPECT_EQ(response.SerializeAsString(), bytes);
}

TEST(AttentionCodecTest, AnswerOfTheGradientIsWhatGeneratedCodeReads) {
  auto tensor = std::make_shared<AttentionTensor>();
  Backward first = Gradient();
  first.set_probs(Numbered(10));
  first.set_d_probs(Numbered(10));
  for (float sink : {0.0f, 1.5f, 2.0f}) first.add_sinks(sink);
  first.set_logsumexp(Numbered(4));
  ASSERT_TRUE(Parsed(first, tensor).status.ok());
  Backward second;
  second.set_probs(Numbered(230));
  second.set_d_probs(Numbered(230));
  second.set_logsumexp(Numbered(92));
  Parsed p(second, tensor);
  ASSERT_TRUE(p.status.ok()) << p.status;
  std::vector<uint16_t> d_scores(115, 77);
  std::vector<double> d_sinks = {0.5, -0.25, 1e-300};
  std::vector<RowStatus> status(23, {RowCode::kNanLogit, 1});  // the most there can be to say
  const absl::Span<const std::byte> outputs[] = {Bytes(d_scores), Bytes(d_sinks), Bytes(status)};
  const std::string bytes = p.codec.Encode({.outputs = outputs}, kTimes).ToString();
  EXPECT_LE(static_cast<int64_t>(bytes.size()), p.codec.answer_bytes());
  v1::AttentionSoftmaxBackwardResponse response;
  ASSERT_TRUE(response.ParseFromString(bytes));
  EXPECT_EQ(response.first_row(), 1);
  EXPECT_EQ(response.rows(), 23);
  EXPECT_EQ(response.fault_rows_size(), 23);
  EXPECT_EQ(response.fault_rows(22), 23);
  EXPECT_THAT(response.d_sinks(), ElementsAre(0.5, -0.25, 1e-300));
  EXPECT_EQ(response.d_scores(), std::string(reinterpret_cast<const char*>(d_scores.data()), 230));
  EXPECT_EQ(response.SerializeAsString(), bytes);
}

TEST(AttentionCodecTest, AKeptAnswerLeavesFromWhereItLies) {
  Parsed p(Scores());
  std::vector<uint16_t> probs(120, 9);
  std::vector<RowStatus> status(24);
  const absl::Span<const std::byte> outputs[] = {Bytes(probs), {}, Bytes(status)};
  auto keep = std::make_shared<int>(0);
  {
    EncodedMessage answer = p.codec.Encode({.outputs = outputs, .keep = keep}, kTimes);
    const auto parts = answer.Release();
    ASSERT_EQ(parts.size(), 2u);
    EXPECT_EQ(static_cast<const void*>(parts[1].span.data()), probs.data());
    EXPECT_EQ(keep.use_count(), 2);
  }
  EXPECT_EQ(keep.use_count(), 1);
}

// --- the op

TEST(AttentionCodecTest, EnqueueHandsTheBatchToTheOp) {
  alignas(16) std::byte memory[256];
  std::byte* const inputs[] = {memory, memory + 16, memory + 32};
  std::byte* const outputs[] = {memory + 48, memory + 64, memory + 80};
  ops::AttentionCall call;
  call.shape = {.batch = 1, .heads = 2, .queries = 2, .keys = 5, .first_row = 1, .rows = 3};
  call.out_dtype = DType::kF32;
  call.scale = 0.25f;
  call.window.right = 0;
  call.mask.kind = MaskKind::kAdditive;
  call.mask.dtype = DType::kBF16;
  call.mask.origin = 5;
  engine::BatchView batch{.dtype = DType::kBF16,
                          .counts = {3},
                          .row_elements = 5,
                          .row_stride = 10,
                          .payload = memory + 96,
                          .inputs = inputs,
                          .outputs = outputs};
  for (const auto axis :
       {ops::kAttentionOutBytes, ops::kAttentionMaskBytes, ops::kAttentionDProbBytes}) {
    batch.counts[axis] = 1;
  }
  FakeStream stream;
  ASSERT_TRUE(call.Enqueue(stream, batch).ok());
  {
    const auto& args = stream.last<AttentionSoftmaxArgs>();
    EXPECT_EQ(args.scores.data, memory + 96);
    EXPECT_EQ(args.scores.dtype, DType::kBF16);
    EXPECT_EQ(args.scores.row_stride, 5);
    EXPECT_EQ(args.shape.first_row, 1);
    EXPECT_EQ(args.scale, 0.25f);
    EXPECT_EQ(args.window.right, 0);
    EXPECT_EQ(args.mask.data, memory);
    EXPECT_EQ(args.mask.origin, 5);
    EXPECT_EQ(args.sinks, nullptr);
    EXPECT_EQ(args.logsumexp, nullptr);
    EXPECT_EQ(args.probs.data, memory + 48);
    EXPECT_EQ(args.probs.dtype, DType::kF32);
    EXPECT_EQ(static_cast<const void*>(args.status), memory + 80);
  }
  batch.counts[ops::kAttentionSinks] = 2;
  batch.counts[ops::kAttentionLogsumexps] = 3;
  ASSERT_TRUE(call.Enqueue(stream, batch).ok());
  EXPECT_EQ(static_cast<const void*>(stream.last<AttentionSoftmaxArgs>().sinks), memory + 16);
  EXPECT_EQ(static_cast<const void*>(stream.last<AttentionSoftmaxArgs>().logsumexp), memory + 64);
  call.backward = true;
  ASSERT_TRUE(call.Enqueue(stream, batch).ok());
  {
    const auto& args = stream.last<AttentionSoftmaxBackwardArgs>();
    EXPECT_EQ(args.probs.data, memory + 96);
    EXPECT_EQ(args.d_probs.data, memory);
    EXPECT_EQ(static_cast<const void*>(args.logsumexp), memory + 16);
    EXPECT_EQ(static_cast<const void*>(args.sinks), memory + 32);
    EXPECT_EQ(args.d_scores.data, memory + 48);
    EXPECT_EQ(static_cast<const void*>(args.d_sinks), memory + 64);
    EXPECT_EQ(static_cast<const void*>(args.status), memory + 80);
  }
}

// --- the reader, with generated code as the judge

// Messages with every field.
std::vector<std::string> FullMessages() {
  Forward forward = BoolMasked({1, 3, 4, 5});
  forward.set_scale(0.5f);
  forward.set_window_left(3);
  forward.set_window_right(-1);
  forward.set_out_dtype(v1::DTYPE_F32);
  forward.set_want_logsumexp(true);
  Forward right = forward;
  right.clear_window_right();
  for (int i = 0; i < 3; ++i) right.add_sinks(static_cast<float>(i));
  Forward additive = right;
  additive.set_mask_kind(v1::MASK_KIND_ADDITIVE);
  additive.set_mask_dtype(v1::DTYPE_BF16);
  additive.set_mask(Numbered(120));
  Backward backward = Gradient();
  backward.set_scale(2);
  backward.set_window_right(0);
  for (int i = 0; i < 3; ++i) backward.add_sinks(static_cast<float>(i));
  backward.set_logsumexp(Numbered(96));
  return {forward.SerializeAsString(), right.SerializeAsString(), additive.SerializeAsString(),
          backward.SerializeAsString()};
}

TEST(AttentionWireTest, MessagesAreJudgedAsGeneratedCodeJudgesThem) {
  const std::vector<std::string> messages = FullMessages();
  for (const std::string& message : messages) {
    testing::ExpectCutAgrees(message, &testing::AttentionDisagreement);
  }
  // Mostly the small fields, which lie before and after the payload.
  testing::ExpectDamagedAgree(messages, 4000, &testing::AttentionDisagreement, /*head=*/24);
  testing::ExpectCorpusAgrees("attention_request_fuzz", &testing::AttentionDisagreement);
}

}  // namespace
}  // namespace logitd::rpc

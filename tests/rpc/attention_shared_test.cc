// Attention requests whose rows or answers lie in a lease: what the codec takes and refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "logitd/v1/attention.pb.h"
#include "server/rpc/codecs/attention_codec.h"
#include "tests/rpc/attention_requests.h"
#include "tests/rpc/one_head.h"

namespace logitd::rpc {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kLeaseBytes = testing::OneHead::kLeaseBytes;

v1::SharedRows At(int64_t offset, int64_t row_stride = 0) {
  v1::SharedRows rows;
  rows.set_lease(std::string(testing::OneHead::kLease));
  rows.set_offset(offset);
  rows.set_row_stride(row_stride);
  return rows;
}

// As Scores, but in the lease.
Forward SharedScores(int64_t offset, int64_t row_stride = 0) {
  Forward request = Shaped<Forward>(2, 3, 4, 5);
  *request.mutable_shared() = At(offset, row_stride);
  return request;
}

TEST(AttentionSharedTest, RowsAndTheAnswerHaveTheirPlaceInTheLease) {
  Forward request = SharedScores(20, 16);
  *request.mutable_shared_output() = At(1000);
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.spec.rows(), 24);
  EXPECT_EQ(p.codec.payload().range.bytes, 240u);
  EXPECT_EQ(p.codec.payload().arena_offset, 20);
  EXPECT_EQ(p.codec.payload().arena_stride, 16);
  std::string probs(240, 'p');
  std::vector<RowStatus> status(24);
  const absl::Span<const std::byte> outputs[] = {
      {reinterpret_cast<const std::byte*>(probs.data()), probs.size()},
      {},
      {reinterpret_cast<const std::byte*>(status.data()), status.size() * sizeof(RowStatus)}};
  const engine::JobAnswer answer{.outputs = outputs};
  const SharedAnswer shared = p.codec.shared_answer(answer);
  ASSERT_NE(shared.arena, nullptr);
  EXPECT_EQ(shared.offset, 1000);
  EXPECT_EQ(shared.bytes.data(), outputs[0].data());
  EXPECT_EQ(shared.bytes.size(), 240u);
  v1::AttentionSoftmaxResponse response;
  ASSERT_TRUE(response.ParseFromString(p.codec.Encode(answer, {}).ToString()));
  EXPECT_EQ(response.output_bytes(), 240);
  EXPECT_EQ(response.probs(), "");
  p.codec.PayloadCopied();
  EXPECT_EQ(p.codec.payload().arena, nullptr);
  EXPECT_NE(p.codec.shared_answer(answer).arena, nullptr);
}

TEST(AttentionSharedTest, AnAnswerOfAnotherTypeTakesItsOwnBytes) {
  Forward request = SharedScores(0);
  request.set_out_dtype(v1::DTYPE_F32);
  *request.mutable_shared_output() = At(kLeaseBytes - 480);
  EXPECT_TRUE(Parsed(request).status.ok());
  *request.mutable_shared_output() = At(kLeaseBytes - 476);
  EXPECT_EQ(Parsed(request).status.code(), absl::StatusCode::kInvalidArgument);
}

TEST(AttentionSharedTest, TheGradientTakesEachInputFromWhereItIs) {
  Backward request = Gradient();
  *request.mutable_shared_d_probs() = At(240);
  Parsed one(request);
  ASSERT_TRUE(one.status.ok()) << one.status;
  EXPECT_EQ(one.codec.payload().arena, nullptr);
  EXPECT_EQ(one.codec.copied_inputs()[0].arena_offset, 240);
  EXPECT_EQ(one.codec.copied_inputs()[0].range.bytes, 240u);
  *request.mutable_shared() = At(0);
  *request.mutable_shared_output() = At(480);
  Parsed both(request);
  ASSERT_TRUE(both.status.ok()) << both.status;
  EXPECT_EQ(both.codec.payload().range.bytes, 240u);
}

TEST(AttentionSharedTest, MessagesOfAStreamSayHowManyRowsTheyBring) {
  auto tensor = std::make_shared<AttentionTensor>();
  Forward first = SharedScores(0);
  first.set_shared_rows(20);
  const Parsed begin(first, tensor);
  ASSERT_TRUE(begin.status.ok()) << begin.status;
  EXPECT_EQ(begin.spec.rows(), 20);
  EXPECT_EQ(tensor->next_row, 20);
  const AttentionTensor before = *tensor;
  Forward message;
  *message.mutable_shared() = At(0);
  message.set_shared_rows(5);
  EXPECT_THAT(std::string(Parsed(message, tensor).status.message()),
              HasSubstr("shared_rows: got 5 at row 20, allowed 0, or 1..4"));
  *tensor = before;
  message.set_shared_rows(-1);
  EXPECT_THAT(std::string(Parsed(message, tensor).status.message()),
              HasSubstr("shared_rows: got -1"));
  *tensor = before;
  message.clear_shared_rows();
  const Parsed rest(message, tensor);
  ASSERT_TRUE(rest.status.ok()) << rest.status;
  EXPECT_EQ(rest.spec.rows(), 4);
  EXPECT_EQ(tensor->next_row, 0);
}

TEST(AttentionSharedTest, RefusalsNameTheFieldAndRunNothing) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const auto with_output = [](int64_t offset, int64_t row_stride = 0) {
    Forward request = SharedScores(1024);
    *request.mutable_shared_output() = At(offset, row_stride);
    return request;
  };
  const auto shaped = [](int64_t batch, int64_t heads, int64_t queries, int64_t keys) {
    Forward request = Shaped<Forward>(batch, heads, queries, keys);
    *request.mutable_shared() = At(0);
    return request;
  };
  Forward rows_without = Scores();
  rows_without.set_shared_rows(24);
  Forward few_rows = SharedScores(0);
  few_rows.set_shared_rows(23);
  Forward strange = SharedScores(0);
  strange.mutable_shared()->set_lease("abcdefghijklmnop");
  Forward strange_output = SharedScores(0);
  *strange_output.mutable_shared_output() = strange.shared();
  const struct {
    Forward request;
    std::string text;
    absl::StatusCode code = absl::StatusCode::kInvalidArgument;
  } kCases[] = {
      {SharedScores(1), "shared.offset: got 1, allowed a multiple of 2 from 0 to 3856"},
      {SharedScores(3858), "shared.offset: got 3858"},
      {SharedScores(-2), "shared.offset: got -2"},
      {SharedScores(kMost - 1), "shared.offset: got 9223372036854775806"},
      {SharedScores(0, 8), "shared.row_stride: got 8, allowed 0, or a multiple of 2 from 10"},
      {SharedScores(0, kMost - 1),
       "shared: got 24 rows of 10 bytes at distances of 922337203685477"},
      {with_output(1), "shared_output.offset: got 1, allowed a multiple of 2 from 0 to 3856"},
      {with_output(3858), "shared_output.offset: got 3858"},
      {with_output(-2), "shared_output.offset: got -2"},
      {with_output(kMost - 1), "shared_output.offset: got 9223372036854775806"},
      {with_output(0, 10), "shared_output.row_stride: got 10, allowed 0"},
      {with_output(1024),
       "shared_output: got bytes 1024 to 1263 of the lease, where shared has 1024"},
      {with_output(1262), "shared_output: got bytes 1262 to 1501"},
      {with_output(786), "shared_output: got bytes 786 to 1025"},
      {rows_without, "shared_rows: got 24 without shared"},
      {few_rows, "shared_rows: got 23 at row 0, allowed 0, or 24..24"},
      {strange, "no such lease", absl::StatusCode::kNotFound},
      {strange_output, "no such lease", absl::StatusCode::kNotFound},
      // Small messages with enormous shapes.
      {shaped(1, 1, int64_t{1} << 40, 1 << 20), "shared: got 1099511627776 rows"},
      {shaped(int64_t{1} << 60, 1, 1, 1), "shared: got 1152921504606846976 rows"},
      {shaped(kMost, kMost, kMost, 1 << 20), "queries: got 9223372036854775807"},
      {shaped(kMost, 1, 1, 1), "batch: got 9223372036854775807"},
      {shaped(1, 1, 1, kMost), "keys: got 9223372036854775807"},
      {shaped(-1, 1, 1, 1), "batch: got -1"},
      {shaped(1, 1, 1, 4096), "shared: got 1 rows of 8192 bytes"},
  };
  for (const auto& refused : kCases) {
    const absl::Status status = Parsed(refused.request).status;
    EXPECT_EQ(status.code(), refused.code) << refused.text << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(refused.text));
  }
  EXPECT_TRUE(Parsed(with_output(1264)).status.ok());
  EXPECT_TRUE(Parsed(with_output(784)).status.ok());
}

TEST(AttentionSharedTest, TheGradientsOutputStaysApartFromBothInputs) {
  Backward request = Shaped<Backward>(2, 3, 4, 5);
  *request.mutable_shared() = At(0);
  *request.mutable_shared_d_probs() = At(1000);
  *request.mutable_shared_output() = At(1200);
  EXPECT_THAT(std::string(Parsed(request).status.message()),
              HasSubstr("where shared_d_probs has 1000 to 1239"));
  *request.mutable_shared_output() = At(238);
  EXPECT_THAT(std::string(Parsed(request).status.message()),
              HasSubstr("where shared has 0 to 239"));
  *request.mutable_shared_output() = At(240);
  EXPECT_TRUE(Parsed(request).status.ok());
  request.mutable_shared_d_probs()->set_offset(1);
  EXPECT_THAT(std::string(Parsed(request).status.message()),
              HasSubstr("shared_d_probs.offset: got 1"));
}

TEST(AttentionSharedTest, AServerThatLeasesNothingSaysSo) {
  const std::string bytes = SharedScores(0).SerializeAsString();
  const Piece piece(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
  AttentionCodec codec(AttentionDirection::kForward);
  engine::JobSpec spec;
  const absl::Status status = codec.Parse(Pieces(&piece, 1), kMaxRows, &spec);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("--arena-listen"));
}

}  // namespace
}  // namespace logitd::rpc

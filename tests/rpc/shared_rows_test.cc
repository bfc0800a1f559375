// Requests whose rows lie in a lease: what the codecs take and refuse.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "logitd/v1/sampler.pb.h"
#include "logitd/v1/scorer.pb.h"
#include "server/rpc/codecs/payload.h"
#include "server/rpc/codecs/score_codec.h"
#include "server/rpc/codecs/topk_codec.h"
#include "tests/rpc/one_head.h"

namespace logitd::rpc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::OneHead;

constexpr int64_t kMaxRows = 100;
constexpr int64_t kLeaseBytes = OneHead::kLeaseBytes;

v1::TopKRequest Request(int64_t rows, int64_t vocab, int64_t offset = 0, int64_t row_stride = 0) {
  v1::TopKRequest request;
  request.set_dtype(v1::DTYPE_F32);
  request.set_rows(rows);
  request.set_vocab(vocab);
  request.mutable_shared()->set_lease(std::string(OneHead::kLease));
  request.mutable_shared()->set_offset(offset);
  request.mutable_shared()->set_row_stride(row_stride);
  request.add_k(1);
  return request;
}

struct Parsed : testing::ParsedAs<TopKCodec, v1::TopKRequest> {
  template <typename Message>
  explicit Parsed(const Message& message) : ParsedAs(message) {
    for (int i = 0; i < kLeaseBytes; ++i) heads.leased()[i] = static_cast<std::byte>(i % 251);
  }

  // Rows as they arrive in a slab without space between them.
  std::vector<int> Copied() {
    const Payload payload = codec.payload();
    std::vector<std::byte> slab(payload.range.bytes);
    CopyRows(pieces(), payload, slab.data(), payload.row_bytes);
    std::vector<int> values;
    for (const std::byte value : slab) values.push_back(static_cast<int>(value));
    return values;
  }
};

TEST(SharedRowsTest, RowsAreCopiedFromTheirPlaceInTheLease) {
  Parsed dense(Request(2, 1, /*offset=*/8));
  ASSERT_TRUE(dense.status.ok()) << dense.status;
  EXPECT_EQ(dense.spec.size.payload_bytes, 8);
  EXPECT_THAT(dense.Copied(), ElementsAre(8, 9, 10, 11, 12, 13, 14, 15));

  Parsed spaced(Request(2, 1, /*offset=*/4, /*row_stride=*/12));
  ASSERT_TRUE(spaced.status.ok()) << spaced.status;
  EXPECT_THAT(spaced.Copied(), ElementsAre(4, 5, 6, 7, 16, 17, 18, 19));
}

TEST(SharedRowsTest, WithAHeadTheyAreHiddenStates) {
  v1::TopKRequest request = Request(3, 0);
  request.set_head("h");
  request.set_hidden_size(2);
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.spec.key.op, &ops::kLinearTopKTraits);
  EXPECT_EQ(p.spec.key.row_elements, 2);
}

TEST(SharedRowsTest, TheWholeLeaseMayBeUsedAndNothingBeyond) {
  EXPECT_TRUE(Parsed(Request(4, kLeaseBytes / 16)).status.ok());
  EXPECT_TRUE(Parsed(Request(1, 1, kLeaseBytes - 4)).status.ok());
  EXPECT_TRUE(Parsed(Request(2, 1, 0, kLeaseBytes - 4)).status.ok());
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  const struct {
    v1::TopKRequest request;
    std::string text;
  } kCases[] = {
      {Request(5, kLeaseBytes / 16), "shared: got 5 rows of 1024 bytes at distances of 1024"},
      {Request(1, kLeaseBytes), "shared: got 1 rows of 16384 bytes"},
      {Request(1, 1, kLeaseBytes),
       "shared.offset: got 4096, allowed a multiple of 4 from 0 to 4092"},
      {Request(1, 1, kLeaseBytes - 3), "shared.offset: got 4093"},
      {Request(1, 1, 2), "shared.offset: got 2, allowed a multiple of 4"},
      {Request(1, 1, -4), "shared.offset: got -4"},
      {Request(1, 1, kMost), "shared.offset: got 9223372036854775807"},
      {Request(1, 1, kLeast), "shared.offset: got -9223372036854775808"},
      {Request(2, 1, 4, kLeaseBytes - 4),
       "shared.offset: got 4, allowed a multiple of 4 from 0 to 0"},
      {Request(2, 1, 0, kLeaseBytes), "shared: got 2 rows of 4 bytes at distances of 4096"},
      {Request(2, 4, 0, 12), "shared.row_stride: got 12, allowed 0, or a multiple of 4 from 16"},
      {Request(2, 1, 0, 6), "shared.row_stride: got 6"},
      {Request(2, 1, 0, -4), "shared.row_stride: got -4"},
      {Request(2, 1, 0, kMost), "shared.row_stride: got 9223372036854775807"},
      {Request(100, 1, 0, kMost - 3),
       "shared: got 100 rows of 4 bytes at distances of 92233720368547"},
      {Request(100, 1, 0, kLeaseBytes), "shared: got 100 rows"},
  };
  for (const auto& refused : kCases) {
    const absl::Status status = Parsed(refused.request).status;
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << refused.text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(refused.text));
  }
}

TEST(SharedRowsTest, ShapesAreCheckedAsThoseOfBytesThatWereSent) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const struct {
    v1::TopKRequest request;
    std::string text;
  } kCases[] = {
      {Request(0, 1), "rows: got 0"},
      {Request(-1, 1), "rows: got -1"},
      {Request(kMost, 1 << 20), "rows: got 9223372036854775807"},
      {Request(int64_t{1} << 42, 1 << 20), "rows: got 4398046511104"},
      {Request(kMaxRows + 1, 1), "rows: got 101, allowed 1..100"},
      {Request(1, 0), "vocab: got 0"},
      {Request(1, kMost), "vocab: got 9223372036854775807"},
  };
  for (const auto& refused : kCases) {
    const absl::Status status = Parsed(refused.request).status;
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << refused.text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(refused.text));
  }
}

TEST(SharedRowsTest, ForeignLeasesAndBadIdsAreRefused) {
  v1::TopKRequest request = Request(1, 1);
  for (const std::string& id : {std::string(), std::string("short"), std::string(17, 'x')}) {
    request.mutable_shared()->set_lease(id);
    const absl::Status status = Parsed(request).status;
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat("shared.lease: got ", id.size(), " bytes, allowed 16")));
  }
  request.mutable_shared()->set_lease(std::string(16, 'x'));
  EXPECT_EQ(Parsed(request).status.code(), absl::StatusCode::kNotFound);
}

TEST(SharedRowsTest, TheRequestKeepsTheLeaseUntilItsRowsAreCopied) {
  const std::string bytes = Request(1, 1).SerializeAsString();
  const Piece piece(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
  OneHead lent;
  const auto watch = lent.watch_lease();
  {
    TopKCodec codec(lent.Find());
    engine::JobSpec spec;
    ASSERT_TRUE(codec.Parse(Pieces(&piece, 1), kMaxRows, &spec).ok());
    lent.EndLease();
    EXPECT_FALSE(watch.expired());
    codec.PayloadCopied();
    EXPECT_TRUE(watch.expired());
  }
}

// Rows of a slab may be further apart than their bytes, and so may those of a lease.
TEST(SharedRowsTest, EveryDistanceOfRowsIsCopied) {
  for (const int64_t stride : {int64_t{0}, int64_t{4}, int64_t{12}}) {
    for (const size_t slab_stride : {size_t{4}, size_t{16}}) {
      Parsed p(Request(100, 1, 8, stride));
      ASSERT_TRUE(p.status.ok()) << p.status;
      std::vector<std::byte> slab(100 * slab_stride, std::byte{0xee});
      CopyRows({}, p.codec.payload(), slab.data(), slab_stride);
      for (int64_t row = 0; row < 100; ++row) {
        const auto from = static_cast<size_t>(8 + row * (stride == 0 ? 4 : stride));
        const std::byte* const copied = &slab[static_cast<size_t>(row) * slab_stride];
        EXPECT_EQ(std::memcmp(copied, p.heads.leased() + from, 4), 0)
            << "row " << row << ", distances " << stride << " and " << slab_stride;
        if (slab_stride > 4) {
          EXPECT_EQ(copied[4], std::byte{0xee});
        }
      }
    }
  }
}

// Occurrences of the field are read as the generated parser reads them.
TEST(SharedRowsTest, TheLastInputOfTheOneofCounts) {
  v1::TopKRequest with_logits = Request(1, 1, 8);
  v1::TopKRequest logits_only;
  logits_only.set_logits(std::string(4, 'l'));
  Parsed logits_last(with_logits.SerializeAsString() + logits_only.SerializeAsString());
  ASSERT_TRUE(logits_last.status.ok()) << logits_last.status;
  EXPECT_THAT(logits_last.Copied(), ElementsAre('l', 'l', 'l', 'l'));
  v1::TopKRequest shared_only;
  *shared_only.mutable_shared() = with_logits.shared();
  Parsed shared_last(with_logits.SerializeAsString() + logits_only.SerializeAsString() +
                     shared_only.SerializeAsString());
  ASSERT_TRUE(shared_last.status.ok()) << shared_last.status;
  EXPECT_THAT(shared_last.Copied(), ElementsAre(8, 9, 10, 11));
}

TEST(SharedRowsTest, PartsOfOneFieldAreMerged) {
  v1::TopKRequest more;
  more.mutable_shared()->set_offset(12);
  Parsed merged(Request(1, 1, 8).SerializeAsString() + more.SerializeAsString());
  ASSERT_TRUE(merged.status.ok()) << merged.status;
  EXPECT_THAT(merged.Copied(), ElementsAre(12, 13, 14, 15));
  // Another input in between: the earlier part is gone, and with it the lease.
  v1::TopKRequest logits;
  logits.set_logits("1234");
  Parsed cut(Request(1, 1, 8).SerializeAsString() + logits.SerializeAsString() +
             more.SerializeAsString());
  EXPECT_EQ(cut.status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(cut.status.message()), HasSubstr("shared.lease: got 0 bytes"));
}

TEST(SharedRowsTest, EachMessageOfASequenceNamesItsRows) {
  OneHead lent;
  const auto sequence = std::make_shared<ScoreSequence>();
  for (int i = 0; i < 2; ++i) {
    v1::ScoreRequest request;
    request.set_dtype(v1::DTYPE_F32);
    request.set_rows(1);
    request.set_vocab(1);
    request.mutable_shared()->set_lease(std::string(OneHead::kLease));
    request.mutable_shared()->set_offset(4 * i);
    request.add_targets(0);
    const std::string bytes = request.SerializeAsString();
    const Piece piece(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
    ScoreCodec codec(lent.Find(), sequence);
    engine::JobSpec spec;
    const absl::Status status = codec.Parse(Pieces(&piece, 1), kMaxRows, &spec);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(codec.payload().arena_offset, 4 * i);
  }
}

}  // namespace
}  // namespace logitd::rpc

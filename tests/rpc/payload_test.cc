// The copy into a slab writes every byte of a row and none between rows.
#include "server/rpc/codecs/payload.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "tests/fuzz/field_comparison.h"

namespace logitd::rpc {
namespace {

std::string Copied(Pieces pieces, const Payload& payload, size_t row_stride) {
  std::string out((static_cast<size_t>(payload.rows) - 1) * row_stride + payload.row_bytes, '.');
  CopyRows(pieces, payload, reinterpret_cast<std::byte*>(out.data()), row_stride);
  return out;
}

TEST(PayloadTest, RowsAcrossPiecesAreCopiedToTheirStride) {
  const std::string bytes = "abcdef";
  for (size_t most = 1; most <= bytes.size(); ++most) {
    const std::vector<Piece> pieces = testing::Cut(bytes, most, 7);
    const Payload payload = {.range = {.bytes = 6}, .rows = 3, .row_bytes = 2};
    EXPECT_EQ(Copied(pieces, payload, 4), "ab..cd..ef") << most;
    EXPECT_EQ(Copied(pieces, payload, 2), "abcdef") << most;
  }
}

TEST(PayloadTest, APayloadMayStartInsideAPiece) {
  const std::string bytes = "xxabcdefxx";
  const std::vector<Piece> pieces = testing::Cut(bytes, bytes.size(), 1);
  WireReader reader(pieces);
  ASSERT_TRUE(reader.Skip(2));
  const Payload payload = {.range = reader.Here(6), .rows = 2, .row_bytes = 3};
  EXPECT_EQ(Copied(pieces, payload, 5), "abc..def");
}

// Pieces and rows end at different bytes.
TEST(PayloadTest, EveryByteComesToItsPlace) {
  std::mt19937 random(5);
  for (const auto& [rows, row_bytes, stride] :
       {std::tuple<int64_t, size_t, size_t>{7, 99'999, 100'000},
        {3, 250'002, 250'002},
        {1, 500'001, 500'008},
        {7'000, 100, 112}}) {
    std::string bytes(static_cast<size_t>(rows) * row_bytes, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    const std::vector<Piece> pieces = testing::Cut(bytes, 10'000, 3);
    const Payload payload = {
        .range = {.bytes = bytes.size()}, .rows = rows, .row_bytes = row_bytes};
    std::string expected(static_cast<size_t>(rows - 1) * stride + row_bytes, '.');
    for (int64_t row = 0; row < rows; ++row) {
      expected.replace(static_cast<size_t>(row) * stride, row_bytes, bytes,
                       static_cast<size_t>(row) * row_bytes, row_bytes);
    }
    EXPECT_TRUE(Copied(pieces, payload, stride) == expected) << rows << " rows of " << row_bytes;
  }
}

}  // namespace
}  // namespace logitd::rpc

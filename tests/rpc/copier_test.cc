// The copy into a slab writes every byte of a row and none between rows, with and without helpers.
#include "server/rpc/transport/copier.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/fuzz/field_comparison.h"

namespace logitd::rpc {
namespace {

std::string CopyTo(Copier& copier, Pieces pieces, const Payload& payload, size_t row_stride) {
  std::string out((static_cast<size_t>(payload.rows) - 1) * row_stride + payload.row_bytes, '.');
  copier.Copy(pieces, payload, reinterpret_cast<std::byte*>(out.data()), row_stride);
  return out;
}

TEST(CopierTest, RowsAcrossPiecesAreCopiedToTheirStride) {
  Copier copier(0);
  const std::string bytes = "abcdef";
  for (size_t most = 1; most <= bytes.size(); ++most) {
    const std::vector<Piece> pieces = testing::Cut(bytes, most, 7);
    const Payload payload = {.range = {.bytes = 6}, .rows = 3, .row_bytes = 2};
    EXPECT_EQ(CopyTo(copier, pieces, payload, 4), "ab..cd..ef") << most;
    EXPECT_EQ(CopyTo(copier, pieces, payload, 2), "abcdef") << most;
  }
}

TEST(CopierTest, APayloadMayStartInsideAPiece) {
  Copier copier(0);
  const std::string bytes = "xxabcdefxx";
  const std::vector<Piece> pieces = testing::Cut(bytes, bytes.size(), 1);
  WireReader reader(pieces);
  ASSERT_TRUE(reader.Skip(2));
  const Payload payload = {.range = reader.Here(6), .rows = 2, .row_bytes = 3};
  EXPECT_EQ(CopyTo(copier, pieces, payload, 5), "abc..def");
}

// Parts, pieces and rows end at different bytes, and two callers share the helpers.
TEST(CopierTest, HelpersCopyEveryByteToItsPlace) {
  Copier helped(3);
  std::mt19937 random(5);
  for (const auto& [rows, row_bytes, stride] :
       {std::tuple<int64_t, size_t, size_t>{7, 999'999, 1'000'000},
        {3, 2'500'002, 2'500'002},
        {1, 5'000'001, 5'000'008},
        {70'000, 100, 112}}) {
    std::string bytes(static_cast<size_t>(rows) * row_bytes, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    const std::vector<Piece> pieces = testing::Cut(bytes, 100'000, 3);
    const Payload payload = {
        .range = {.bytes = bytes.size()}, .rows = rows, .row_bytes = row_bytes};
    std::string expected(static_cast<size_t>(rows - 1) * stride + row_bytes, '.');
    for (int64_t row = 0; row < rows; ++row) {
      expected.replace(static_cast<size_t>(row) * stride, row_bytes, bytes,
                       static_cast<size_t>(row) * row_bytes, row_bytes);
    }
    std::string other;
    std::thread second([&] { other = CopyTo(helped, pieces, payload, stride); });
    const bool same = CopyTo(helped, pieces, payload, stride) == expected;
    second.join();
    EXPECT_TRUE(same) << rows << " rows of " << row_bytes;
    EXPECT_TRUE(other == expected) << rows << " rows of " << row_bytes;
  }
}

}  // namespace
}  // namespace logitd::rpc

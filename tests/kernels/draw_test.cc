// The random bits and the integer arithmetic of a draw.
#include "kernels/draw.h"

#include <gtest/gtest.h>

#include <random>

namespace logitd {
namespace {

// Known answers of Random123's kat_vectors, philox4x32 10.
TEST(DrawTest, PhiloxGivesItsAuthorsKnownAnswers) {
  struct Known {
    uint64_t key, counter_low, counter_high;
    uint32_t want[4];
  };
  constexpr Known kKnown[] = {
      {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {0x299f31d0a4093822,
       0x85a308d3243f6a88,
       0x0370734413198a2e,
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const Known& known : kKnown) {
    const PhiloxBlock got = Philox4x32(known.key, known.counter_low, known.counter_high);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(got.word[i], known.want[i]) << i;
  }
  EXPECT_EQ(UniformBits(0, 0), 0xe169c58d6627e8d5u);
}

TEST(DrawTest, MulHighIsTheUpperHalfOfTheProduct) {
  EXPECT_EQ(MulHigh(~uint64_t{0}, ~uint64_t{0}), ~uint64_t{1});
  EXPECT_EQ(MulHigh(uint64_t{1} << 63, 2), 1u);
  EXPECT_EQ(MulHigh(~uint64_t{0}, 1), 0u);
  std::mt19937_64 random(1);
  for (int i = 0; i < 10000; ++i) {
    const uint64_t a = random() >> random() % 64, b = random() >> random() % 64;
    EXPECT_EQ(MulHigh(a, b), static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64));
  }
}

}  // namespace
}  // namespace logitd

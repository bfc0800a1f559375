#include "formats/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace logitd::formats {
namespace {

TEST(HalfTest, EveryF16SurvivesTheWayToFloatAndBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = F16ToFloat(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(F16ToFloat(FloatToF16(value)))) << bits;
    } else {
      EXPECT_EQ(FloatToF16(value), bits);
    }
  }
}

TEST(HalfTest, EveryBF16SurvivesTheWayToFloatAndBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = BF16ToFloat(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(BF16ToFloat(FloatToBF16(value)))) << bits;
    } else {
      EXPECT_EQ(FloatToBF16(value), bits);
    }
  }
}

TEST(HalfTest, KnownValues) {
  EXPECT_EQ(F16ToFloat(0x3c00), 1.0f);
  EXPECT_EQ(F16ToFloat(0xc000), -2.0f);
  EXPECT_EQ(F16ToFloat(0x7bff), 65504.0f);
  EXPECT_EQ(F16ToFloat(0x0001), 0x1p-24f);
  EXPECT_EQ(F16ToFloat(0x7c00), std::numeric_limits<float>::infinity());
  EXPECT_EQ(BF16ToFloat(0x3f80), 1.0f);
}

TEST(HalfTest, RoundsToNearestTiesToEven) {
  EXPECT_EQ(FloatToF16(1.0f + 0x1p-11f), 0x3c00);      // half way: even is below
  EXPECT_EQ(FloatToF16(1.0f + 3 * 0x1p-11f), 0x3c02);  // half way: even is above
  EXPECT_EQ(FloatToF16(1.0f + 0x1p-11f + 0x1p-20f), 0x3c01);
  EXPECT_EQ(FloatToF16(65519.0f), 0x7bff);
  EXPECT_EQ(FloatToF16(65520.0f), 0x7c00);
  EXPECT_EQ(FloatToF16(0x1p-25f), 0x0000);  // half of the smallest: even is zero
  EXPECT_EQ(FloatToF16(3 * 0x1p-25f), 0x0002);
  EXPECT_EQ(FloatToBF16(1.0f + 0x1p-8f), 0x3f80);
  EXPECT_EQ(FloatToBF16(1.0f + 3 * 0x1p-8f), 0x3f82);
}

}  // namespace
}  // namespace logitd::formats

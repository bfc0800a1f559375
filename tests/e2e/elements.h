// Logits as bytes in the three types of the wire.
#ifndef LOGITD_TESTS_E2E_ELEMENTS_H_
#define LOGITD_TESTS_E2E_ELEMENTS_H_

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "logitd/v1/types.pb.h"

namespace logitd::e2e {

inline size_t Width(v1::DType dtype) { return dtype == v1::DTYPE_F32 ? 4 : 2; }

inline float Decode(v1::DType dtype, const char* at) {
  uint32_t bits = 0;
  std::memcpy(&bits, at, Width(dtype));
  if (dtype == v1::DTYPE_BF16) bits <<= 16;
  if (dtype != v1::DTYPE_F16) return std::bit_cast<float>(bits);
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  const int exponent = static_cast<int>(bits >> 10 & 0x1f);
  const auto mantissa = static_cast<float>(bits & 0x3ff);
  if (exponent == 31) {
    return mantissa != 0 ? std::numeric_limits<float>::quiet_NaN()
                         : sign * std::numeric_limits<float>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

inline std::vector<double> Decode(v1::DType dtype, const std::string& bytes) {
  std::vector<double> values(bytes.size() / Width(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = Decode(dtype, bytes.data() + i * Width(dtype));
  }
  return values;
}

// Rounds towards zero. The tests' references read the encoded values, so the rounding is free.
inline std::string Encode(v1::DType dtype, const std::vector<double>& values) {
  std::string bytes;
  for (double value : values) {
    const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(value));
    uint32_t out = bits;
    if (dtype == v1::DTYPE_BF16) out = bits >> 16;
    if (dtype == v1::DTYPE_F16) {
      const int exponent = static_cast<int>(bits >> 23 & 0xff) - 127 + 15;
      const uint32_t sign = bits >> 16 & 0x8000;
      if (std::isnan(value)) {
        out = 0x7e00;
      } else if (exponent >= 31) {
        out = sign | 0x7c00;
      } else {
        out = exponent <= 0 ? sign
                            : sign | static_cast<uint32_t>(exponent) << 10 | (bits >> 13 & 0x3ff);
      }
    }
    bytes.append(reinterpret_cast<const char*>(&out), Width(dtype));
  }
  return bytes;
}

template <typename T = float>
std::vector<T> Normal(int64_t size, uint32_t seed, T width = 2) {
  std::mt19937 random(seed);
  std::normal_distribution<T> normal(0, width);
  std::vector<T> values(static_cast<size_t>(size));
  for (T& value : values) value = normal(random);
  return values;
}

}  // namespace logitd::e2e

#endif  // LOGITD_TESTS_E2E_ELEMENTS_H_

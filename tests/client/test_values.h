// Values and requests that many of the client's tests send.
#ifndef LOGITD_TESTS_CLIENT_TEST_VALUES_H_
#define LOGITD_TESTS_CLIENT_TEST_VALUES_H_

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <random>
#include <vector>

#include "absl/strings/string_view.h"
#include "logitd/v1/sampler.pb.h"

namespace logitd::testing {

inline std::vector<float> Normal(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> values(static_cast<size_t>(size));
  for (float& value : values) value = normal(random);
  return values;
}

inline absl::string_view ViewOf(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

inline std::vector<float> FloatsOf(absl::string_view bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

inline v1::TopKRequest TopKParams(std::initializer_list<int32_t> k,
                                  std::initializer_list<float> temperature = {}) {
  v1::TopKRequest params;
  params.mutable_k()->Add(k.begin(), k.end());
  params.mutable_temperature()->Add(temperature.begin(), temperature.end());
  return params;
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_CLIENT_TEST_VALUES_H_

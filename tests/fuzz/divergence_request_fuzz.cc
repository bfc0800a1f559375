// Any bytes: the hand-written reader of DivergenceRequest accepts and reads what generated code
// does, and the codec writes no further than it said.
#include <cstdio>
#include <cstdlib>

#include "tests/fuzz/compare_divergence_request.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text = logitd::rpc::testing::DivergenceRequestDisagreement(
      std::string_view(reinterpret_cast<const char*>(data), size));
  if (!text.empty()) {
    std::fprintf(stderr, "%s\n", text.c_str());
    std::abort();
  }
  return 0;
}

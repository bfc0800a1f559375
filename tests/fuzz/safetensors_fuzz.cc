// Any bytes as a safetensors file: what is accepted lies inside the data, fills it, does not
// overlap, and has the bytes of its shape and dtype. Sizes are reckoned here in 128 bits.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string_view>
#include <vector>

#include "formats/safetensors.h"

namespace {

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "accepted: %s\n", what);
  std::abort();
}

struct Bits {
  const char* dtype;
  int bits;
};
constexpr Bits kBits[] = {{"F32", 32}, {"F16", 16}, {"BF16", 16}, {"I64", 64}, {"BOOL", 8}};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using logitd::formats::kSafetensorsPrefix;
  const std::string_view file(reinterpret_cast<const char*>(data), size);
  const auto length = logitd::formats::SafetensorsHeaderBytes(
      "f", file.substr(0, kSafetensorsPrefix), static_cast<int64_t>(size));
  if (!length.ok()) return 0;
  Require(*length >= 0 && kSafetensorsPrefix + *length <= static_cast<int64_t>(size),
          "a header beyond the file");
  const int64_t data_bytes = static_cast<int64_t>(size) - kSafetensorsPrefix - *length;
  const auto header = logitd::formats::ParseSafetensorsHeader(
      "f", file.substr(kSafetensorsPrefix, static_cast<size_t>(*length)), data_bytes);
  if (!header.ok()) {
    Require(header.status().message().size() < 2000, "an error without bound");
    return 0;
  }
  Require(!header->tensors.empty(), "a file without a tensor");
  std::vector<int> covered(static_cast<size_t>(data_bytes), 0);
  for (const auto& entry : header->tensors) {
    const logitd::formats::SafetensorsTensor& tensor = entry.second;
    Require(tensor.begin >= 0 && tensor.bytes >= 0 && tensor.begin <= data_bytes &&
                tensor.bytes <= data_bytes - tensor.begin,
            "a tensor beyond the data");
    for (int64_t i = 0; i < tensor.bytes; ++i) ++covered[static_cast<size_t>(tensor.begin + i)];
    const auto* row = std::find_if(std::begin(kBits), std::end(kBits),
                                   [&](const Bits& b) { return tensor.dtype == b.dtype; });
    if (row == std::end(kBits)) continue;
    unsigned __int128 bits = static_cast<unsigned>(row->bits);
    for (int64_t dim : tensor.shape) {
      Require(dim >= 0, "a negative dimension");
      Require(bits == 0 || static_cast<unsigned __int128>(dim) <= ~uint64_t{0} / bits,
              "a shape that overflows");
      bits *= static_cast<unsigned __int128>(dim);
    }
    Require(bits == static_cast<unsigned __int128>(tensor.bytes) * 8, "a shape of another size");
  }
  Require(std::all_of(covered.begin(), covered.end(), [](int times) { return times == 1; }),
          "data of two tensors, or of none");
  return 0;
}

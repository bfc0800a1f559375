// The header of a safetensors file: its tensors, with their type, shape and place.
//
// The format: 8 bytes, the length of the header, little-endian; the header, a JSON object; the
// data. The tensors fill the data from its start to the end of the file, without a gap. A file is
// not trusted. A header that is returned has been checked in full: every tensor is inside the data,
// none overlaps another, and each has as many bytes as its shape and dtype need. An error is
// INVALID_ARGUMENT with the file, the tensor, the value and what is allowed, in bounded text.
//
// Source: huggingface.co/docs/safetensors.
#ifndef LOGITD_FORMATS_SAFETENSORS_H_
#define LOGITD_FORMATS_SAFETENSORS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace logitd::formats {

// The format's own limit on a header, bytes.
inline constexpr int64_t kMaxSafetensorsHeader = 100'000'000;

// Bytes before the header, which hold its length.
inline constexpr int64_t kSafetensorsPrefix = 8;

struct SafetensorsTensor {
  std::string dtype;           // as in the file; `bytes` is not checked against an unknown one
  std::vector<int64_t> shape;  // outermost first, each 0 or more
  int64_t begin = 0;           // in the data, bytes
  int64_t bytes = 0;
};

struct SafetensorsHeader {
  std::map<std::string, SafetensorsTensor, std::less<>> tensors;  // one or more
  std::map<std::string, std::string, std::less<>> metadata;       // of "__metadata__"
};

// Bytes of the header of a file with `file_bytes`. first_bytes: its first kSafetensorsPrefix bytes,
// or fewer where it has fewer. The data starts at kSafetensorsPrefix + the result. More than `most`
// are refused. Thread-safe.
absl::StatusOr<int64_t> SafetensorsHeaderBytes(std::string_view path, std::string_view first_bytes,
                                               int64_t file_bytes,
                                               int64_t most = kMaxSafetensorsHeader);

// `text`: the header. `data_bytes`: bytes of the file after it. For any text, memory is in
// proportion to its length. Thread-safe.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view path,
                                                         std::string_view text, int64_t data_bytes);

// "[2,3]"
std::string ShapeName(const std::vector<int64_t>& shape);

// A name from a file, for an error text: quoted, on one line, of bounded length.
std::string Shown(std::string_view name);

}  // namespace logitd::formats

#endif  // LOGITD_FORMATS_SAFETENSORS_H_

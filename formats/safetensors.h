// The header of a safetensors file: which tensors it holds, of what type and shape, and where.
//
// The format: 8 bytes, the length of the header, little-endian; the header, a JSON object; the
// data, which the tensors fill from its start to the end of the file, without a gap. Nothing of a
// file is trusted. What is returned has been checked in whole: every tensor lies inside the data,
// none overlaps another, and each has the bytes that its shape and dtype say. An error is
// INVALID_ARGUMENT and names file, tensor, what it got and what is allowed, in bounded text.
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

// The format's own limit.
inline constexpr int64_t kMaxSafetensorsHeader = 100'000'000;

// Of the length before the header.
inline constexpr int64_t kSafetensorsPrefix = 8;

struct SafetensorsTensor {
  std::string dtype;           // as in the file; one that the format does not know has no size
  std::vector<int64_t> shape;  // outermost first, each 0 or more
  int64_t begin = 0;           // in the data, bytes
  int64_t bytes = 0;
};

struct SafetensorsHeader {
  std::map<std::string, SafetensorsTensor, std::less<>> tensors;  // one or more
  std::map<std::string, std::string, std::less<>> metadata;       // of "__metadata__"
};

// Bytes of the header of a file of `file_bytes`, from its first bytes, of which there are as many
// as it has or kSafetensorsPrefix. The data starts at kSafetensorsPrefix + that. More than `most`
// are refused. Thread-safe.
absl::StatusOr<int64_t> SafetensorsHeaderBytes(std::string_view path, std::string_view first_bytes,
                                               int64_t file_bytes,
                                               int64_t most = kMaxSafetensorsHeader);

// `text`: the header. `data_bytes`: what the file has behind it. Needs memory in proportion to
// the text, whatever that says. Thread-safe.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view path,
                                                         std::string_view text, int64_t data_bytes);

// "[2,3]"
std::string ShapeName(const std::vector<int64_t>& shape);

// A name out of a file, to be shown: quoted, on one line, of bounded length.
std::string Shown(std::string_view name);

}  // namespace logitd::formats

#endif  // LOGITD_FORMATS_SAFETENSORS_H_

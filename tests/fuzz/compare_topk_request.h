// The hand-written reader of TopKRequest against the generated one: same bytes in, same verdict and
// same fields out.
#ifndef LOGITD_TESTS_FUZZ_COMPARE_TOPK_REQUEST_H_
#define LOGITD_TESTS_FUZZ_COMPARE_TOPK_REQUEST_H_

#include <google/protobuf/stubs/logging.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "logitd/v1/sampler.pb.h"
#include "server/rpc/codecs/topk_codec.h"
#include "server/rpc/transport/copier.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc::testing {

// Cuts `bytes` into pieces of 0 to `most` bytes, in a way that `seed` decides.
inline std::vector<Piece> Cut(std::string_view bytes, size_t most, uint32_t seed) {
  std::vector<Piece> pieces;
  const auto* at = reinterpret_cast<const std::byte*>(bytes.data());
  size_t left = bytes.size();
  while (left > 0) {
    seed = seed * 1664525u + 1013904223u;
    const size_t size = std::min<size_t>(left, (seed >> 8) % (most + 1));
    pieces.emplace_back(at, size);
    at += size;
    left -= size;
  }
  return pieces;
}

// Empty if the two agree on `bytes`, seen through `pieces`; otherwise what they disagree on.
inline std::string Disagreement(std::string_view bytes, Pieces pieces) {
  const google::protobuf::LogSilencer silence;  // generated code logs a head that is not UTF-8
  v1::TopKRequest expected;
  const bool expected_ok = expected.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  TopKFields fields;
  const absl::Status status = ParseTopKFields(pieces, std::numeric_limits<size_t>::max(), &fields);
  if (status.ok() != expected_ok) {
    return absl::StrCat("generated code ", expected_ok ? "accepts" : "refuses",
                        ", ours: ", status.ToString());
  }
  if (!expected_ok) return "";
  if (fields.dtype != static_cast<int>(expected.dtype())) {
    return absl::StrCat("dtype ", expected.dtype(), " ours ", fields.dtype);
  }
  if (fields.rows != expected.rows()) {
    return absl::StrCat("rows ", expected.rows(), " ours ", fields.rows);
  }
  if (fields.vocab != expected.vocab()) {
    return absl::StrCat("vocab ", expected.vocab(), " ours ", fields.vocab);
  }
  if (!std::equal(fields.k.begin(), fields.k.end(), expected.k().begin(), expected.k().end())) {
    return absl::StrCat("k of ", expected.k_size(), " values, ours of ", fields.k.size());
  }
  if (!std::equal(fields.temperature.begin(), fields.temperature.end(),
                  expected.temperature().begin(), expected.temperature().end(),
                  [](float a, float b) {
                    return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
                  })) {
    return absl::StrCat("temperature of ", expected.temperature_size(), " values, ours of ",
                        fields.temperature.size());
  }
  if (fields.head != expected.head()) return absl::StrCat("head of ", expected.head().size());
  if (fields.hidden_size != expected.hidden_size()) {
    return absl::StrCat("hidden_size ", expected.hidden_size(), " ours ", fields.hidden_size);
  }
  if (static_cast<int>(fields.input.number) != static_cast<int>(expected.input_case())) {
    return absl::StrCat("input ", expected.input_case(), " ours ", fields.input.number);
  }
  std::string input(fields.input.range.bytes, '\0');
  Copier(/*helpers=*/0)
      .Copy(pieces, {.range = fields.input.range, .rows = 1, .row_bytes = input.size()},
            reinterpret_cast<std::byte*>(input.data()), input.size());
  const std::string& sent = expected.has_hidden() ? expected.hidden() : expected.logits();
  if (input != sent) {
    return absl::StrCat("input of ", sent.size(), " bytes, ours of ", input.size());
  }
  return "";
}

// As above, in one piece, byte by byte, and in two ways between.
inline std::string Disagreement(std::string_view bytes) {
  for (size_t most : {bytes.size(), size_t{1}, size_t{3}, size_t{17}}) {
    const std::vector<Piece> pieces = Cut(bytes, most, static_cast<uint32_t>(bytes.size() + most));
    if (std::string text = Disagreement(bytes, pieces); !text.empty()) {
      return absl::StrCat(text, " (pieces of at most ", most, " bytes)");
    }
  }
  return "";
}

}  // namespace logitd::rpc::testing

#endif  // LOGITD_TESTS_FUZZ_COMPARE_TOPK_REQUEST_H_

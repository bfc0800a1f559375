// What the comparisons of hand-written readers with generated ones share.
#ifndef LOGITD_TESTS_FUZZ_FIELD_COMPARISON_H_
#define LOGITD_TESTS_FUZZ_FIELD_COMPARISON_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/reflection.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/row_params.h"
#include "logitd/v1/types.pb.h"
#include "server/rpc/codecs/logits_or_hidden.h"
#include "server/rpc/codecs/sequence.h"
#include "server/rpc/codecs/shared_rows.h"
#include "server/rpc/wire/reader.h"

#if __has_include(<google/protobuf/stubs/logging.h>)  // up to protobuf 3.21
#include <google/protobuf/stubs/logging.h>
#endif

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

// Collects the name of the first field that differs.
class FieldComparison {
 public:
  explicit FieldComparison(Pieces pieces) : pieces_(pieces) {}

  template <typename Expected, typename Ours>
  void List(const char* name, const Expected& expected, const Ours& ours) {
    bool same = static_cast<size_t>(expected.size()) == ours.size();
    for (size_t i = 0; same && i < ours.size(); ++i) {
      if constexpr (std::is_same_v<typename Ours::value_type, float>) {
        same = std::bit_cast<uint32_t>(expected.Get(static_cast<int>(i))) ==
               std::bit_cast<uint32_t>(ours[i]);
      } else {
        same = static_cast<typename Ours::value_type>(expected.Get(static_cast<int>(i))) == ours[i];
      }
    }
    Note(name, same);
  }
  void Bytes(const char* name, const std::string& expected, const ByteRange& ours) {
    std::string bytes(ours.bytes, '\0');
    if (!bytes.empty()) CopyRange(pieces_, ours, bytes.data());
    Note(name, bytes == expected);
  }
  void Optional(const char* name, bool has, int64_t expected, const std::optional<int64_t>& ours) {
    Note(name, ours.has_value() == has && ours.value_or(0) == expected);
  }
  void Double(const char* name, double expected, double ours) {
    Note(name, std::bit_cast<uint64_t>(expected) == std::bit_cast<uint64_t>(ours));
  }
  // The counts of a message of totals.
  template <typename Totals>
  void Counts(const Totals& expected, const SequenceCounts& ours) {
    Note("totals.rows", ours.rows == expected.rows());
    Note("totals.counted", ours.counted == expected.counted());
    Note("totals.ignored", ours.ignored == expected.ignored());
    Note("totals.faulty", ours.faulty == expected.faulty());
  }
  void Note(const char* name, bool same) {
    if (!same && text_.empty()) text_ = absl::StrCat(name, " differs");
  }
  const std::string& text() const { return text_; }

  // The parameters of rows, as list i of `ours` for parameter i of `params`.
  template <typename Row, size_t N>
  void Params(const google::protobuf::Message& expected, const RowParam<Row> (&params)[N],
              const AnyLists& ours) {
    for (size_t i = 0; i < N; ++i) {
      const std::string name(params[i].name);
      const auto* field = expected.GetDescriptor()->FindFieldByName(name);
      std::visit(
          [&]<typename Values>(const Values& values) {
            const auto sent =
                expected.GetReflection()->template GetRepeatedFieldRef<typename Values::value_type>(
                    expected, field);
            List(name.c_str(), sent, values);
          },
          ours[i]);
    }
  }

  // The shape of an input of logits or hidden states.
  template <typename Request>
  void Shape(const Request& expected, const InputFields& ours) {
    Note("dtype", ours.dtype == static_cast<int>(expected.dtype()));
    Note("rows", ours.rows == expected.rows());
    Note("vocab", ours.vocab == expected.vocab());
    Note("input", static_cast<int>(ours.input.number) == static_cast<int>(expected.input_case()));
    if (!expected.has_shared()) return;
    Shared(expected.shared(), ours.input);
  }

  // A SharedRows.
  void Shared(const v1::SharedRows& expected, const Choice& ours) {
    SharedFields shared;
    Note("shared", ParseSharedFields(pieces_, ours.message.parts, &shared).ok());
    Note("shared.lease", shared.lease_bytes == expected.lease().size() &&
                             shared.lease == expected.lease().substr(0, kLeaseIdBytes));
    Note("shared.offset", shared.offset == expected.offset());
    Note("shared.row_stride", shared.row_stride == expected.row_stride());
  }

  // The same with the input itself, for requests that may have hidden states.
  template <typename Request>
  void Input(const Request& expected, const InputFields& ours) {
    Shape(expected, ours);
    Note("head", ours.head == expected.head());
    Note("hidden_size", ours.hidden_size == expected.hidden_size());
    Note("head_version", ours.head_version == expected.head_version());
    Bytes("input", expected.has_hidden() ? expected.hidden() : expected.logits(), ours.input.range);
  }

 private:
  const Pieces pieces_;
  std::string text_;
};

// Empty if `parse` and the generated reader agree on `bytes`, in one piece, byte by byte, and in
// two ways between: same verdict and, by Compare, same fields. `after(pieces)` runs where they
// accept the message, and returns what is wrong.
template <typename Request, typename Fields, typename Parse, typename After>
std::string Disagreement(std::string_view bytes, Parse parse, After after) {
#if __has_include(<google/protobuf/stubs/logging.h>)
  const google::protobuf::LogSilencer silence;  // generated code logs a head that is not UTF-8
#endif
  Request expected;
  const bool expected_ok = expected.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  for (size_t most : {bytes.size(), size_t{1}, size_t{3}, size_t{17}}) {
    const std::vector<Piece> pieces = Cut(bytes, most, static_cast<uint32_t>(bytes.size() + most));
    Fields fields;
    const absl::Status status = parse(pieces, std::numeric_limits<size_t>::max(), &fields);
    if (status.ok() != expected_ok) {
      return absl::StrCat("generated code ", expected_ok ? "accepts" : "refuses",
                          ", ours: ", status.ToString());
    }
    if (!expected_ok) continue;
    FieldComparison compare(pieces);
    Compare(expected, fields, &compare);
    if (!compare.text().empty()) {
      return absl::StrCat(compare.text(), " (pieces of at most ", most, " bytes)");
    }
    if (std::string text = after(pieces); !text.empty()) return text;
  }
  return "";
}

}  // namespace logitd::rpc::testing

#endif  // LOGITD_TESTS_FUZZ_FIELD_COMPARISON_H_

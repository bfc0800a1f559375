// Reads protobuf messages where they lie, in one piece of memory or in several.
//
// A message is described by a table of fields (see Field), so that the next one costs a table. What
// is accepted and what the fields hold equals the generated parser of protobuf 3.21 (proto3
// semantics): fields in any order, unknown fields and groups skipped, the last value of a singular
// field wins, repeated numbers packed or not and in several runs. tests/fuzz compares the two. A
// `bytes` field is located, not copied.
//
// Nothing here owns memory or is thread-safe.
#ifndef LOGITD_SERVER_RPC_WIRE_READER_H_
#define LOGITD_SERVER_RPC_WIRE_READER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/types/span.h"

namespace logitd::rpc {

// The message, piece after piece. Pieces may be empty.
using Piece = absl::Span<const std::byte>;
using Pieces = absl::Span<const Piece>;

// A run of message bytes: `bytes` of them from byte `offset` of piece `piece` on, over as many
// pieces as it takes.
struct ByteRange {
  size_t piece = 0;
  size_t offset = 0;
  size_t bytes = 0;
};

// The values of a parameter: usually one for all rows, otherwise one for each row. A list with more
// values than rows is refused.
using Int32List = absl::InlinedVector<int32_t, 2>;    // varints
using Uint64List = absl::InlinedVector<uint64_t, 2>;  // fixed64
using FloatList = absl::InlinedVector<float, 2>;
using BoolList = absl::InlinedVector<bool, 2>;  // varints

// One such list of several, each with values of its own type.
using AnyList = std::variant<Int32List, Uint64List, FloatList, BoolList>;
inline constexpr size_t kMaxParams = 24;  // of a row, without an allocation
using AnyLists = absl::InlinedVector<AnyList, kMaxParams>;
template <typename M>
struct ListOf {
  AnyLists M::*lists;
  size_t index;
};

// The sizes of a tensor; varints.
using Int64List = absl::InlinedVector<int64_t, 4>;

// Values that rows have any number of. The message's size is their only bound.
using IdList = std::vector<int32_t>;  // sfixed32
using ValueList = std::vector<float>;

// A message in the message: every occurrence of it, for a table of its own (ParseNested). No more
// than rows are read.
struct Nested {
  absl::InlinedVector<ByteRange, 1> parts;
};

// The content of a oneof of `bytes` and messages: the fields share one member, and the last on the
// wire wins.
struct Choice {
  uint32_t number = 0;  // of the field; 0: none was there
  ByteRange range;      // of a field of bytes
  // Of a message: its occurrences after the last other field of the oneof.
  Nested message;
};

// One field of message M. The member's type decides how the field is read: int32_t, int64_t and
// bool are varints (int32, int64, enum, bool). An optional member tells whether the field was sent.
template <typename M>
struct Field {
  uint32_t number;
  std::string_view name;
  using Member =
      std::variant<int32_t M::*, int64_t M::*, bool M::*, double M::*, std::string M::*,
                   std::optional<int64_t> M::*, std::optional<float> M::*, ByteRange M::*,
                   Choice M::*, Nested M::*, Int32List M::*, Int64List M::*, Uint64List M::*,
                   FloatList M::*, IdList M::*, ValueList M::*, ListOf<M>>;
  Member member;
  bool is_message = false;  // for a Choice
};

// Copies the bytes of `range` to `dst`.
void CopyRange(Pieces pieces, const ByteRange& range, void* dst);

// The bytes of `range`, as pieces of their own.
std::vector<Piece> PiecesOf(Pieces pieces, const ByteRange& range);

// A place in a message, moving forward. Errors are INVALID_ARGUMENT with the offset in the message.
class WireReader {
 public:
  explicit WireReader(Pieces pieces);

  size_t position() const { return position_; }
  size_t remaining() const { return total_ - position_; }

  // Each returns false, and leaves the place unspecified, when the message ends first or the
  // encoding is not valid.
  bool ReadVarint(uint64_t* value);
  bool ReadTag(uint32_t* tag);
  bool ReadLength(size_t* length);  // at most what remains
  bool Read(void* dst, size_t bytes);
  bool Skip(size_t bytes);
  // Skips the value whose tag was `tag`, groups with all that is in them; no group deeper than
  // `depth`.
  bool SkipValue(uint32_t tag, int depth);
  // The next `bytes` bytes; does not move.
  ByteRange Here(size_t bytes) const;

 private:
  // One of a single byte, as most are. False, and nothing is read: it is longer, or in the next
  // piece.
  bool ReadShortVarint(uint64_t* value);
  bool ReadVarintSlow(int max_bytes, uint64_t* value);
  // Moves to the next piece that has bytes.
  void NextPiece();

  Pieces pieces_;
  size_t piece_ = 0;
  const std::byte* at_ = nullptr;   // in pieces_[piece_]
  const std::byte* end_ = nullptr;  // of pieces_[piece_]
  size_t position_ = 0;
  size_t total_ = 0;
};

namespace internal {

enum class WireType : uint32_t {
  kVarint = 0,
  kFixed64 = 1,
  kLength = 2,
  kStart = 3,
  kEnd = 4,
  kFixed32 = 5
};

inline constexpr int kMaxGroupDepth = 100;

constexpr WireType TypeOf(uint32_t tag) { return static_cast<WireType>(tag & 7); }

absl::Status Malformed(std::string_view field, size_t offset);
absl::Status TooLong(std::string_view field, size_t max_list);

// Each reads one occurrence. kSkip: the wire type is not one the field takes; generated code then
// treats the field as unknown, and so do we.
enum class Outcome { kRead, kSkip, kBad, kTooLong };
Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, int32_t* value);
Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, int64_t* value);
Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, bool* value);
Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, double* value);
Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, std::string* value);
Outcome ReadValue(WireReader& reader, WireType type, size_t max_list,
                  std::optional<int64_t>* value);
Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, std::optional<float>* value);
Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, ByteRange* value);
Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, Nested* value);
Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, Int32List* value);
Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, Int64List* value);
Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, Uint64List* value);
Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, FloatList* value);
Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, IdList* value);
Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, ValueList* value);
Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, AnyList* value);
// `number` and `is_message`: of the field.
Outcome ReadChoice(WireReader& reader, WireType type, size_t max_list, uint32_t number,
                   bool is_message, Choice* value);

// The member of `message` that a field goes to.
template <typename M, typename T>
T& PlaceOf(M* message, T M::*member) {
  return message->*member;
}
template <typename M>
AnyList& PlaceOf(M* message, const ListOf<M>& list) {
  return (message->*list.lists)[list.index];
}

}  // namespace internal

// Fills `message` from `pieces`. Fields not in `fields` are skipped. INVALID_ARGUMENT naming the
// field and the offset at which its occurrence starts, when the message is not valid protobuf.
// `depth`: of groups in groups.
template <typename M>
absl::Status ParseMessage(Pieces pieces, absl::Span<const Field<M>> fields, size_t max_list,
                          M* message, int depth = internal::kMaxGroupDepth) {
  WireReader reader(pieces);
  while (reader.remaining() > 0) {
    const size_t start = reader.position();
    uint32_t tag = 0;
    if (!reader.ReadTag(&tag)) return internal::Malformed("tag", start);
    const uint32_t number = tag >> 3;
    internal::Outcome outcome = internal::Outcome::kSkip;
    std::string_view name = "unknown field";
    for (const Field<M>& field : fields) {
      if (field.number != number) continue;
      name = field.name;
      outcome = std::visit(
          [&](auto member) {
            auto& value = internal::PlaceOf(message, member);
            const internal::WireType type = internal::TypeOf(tag);
            if constexpr (std::is_same_v<decltype(value), Choice&>) {
              return internal::ReadChoice(reader, type, max_list, number, field.is_message, &value);
            } else {
              return internal::ReadValue(reader, type, max_list, &value);
            }
          },
          field.member);
      break;
    }
    if (outcome == internal::Outcome::kSkip) {
      outcome = reader.SkipValue(tag, depth) ? internal::Outcome::kRead : internal::Outcome::kBad;
    }
    if (outcome == internal::Outcome::kTooLong) return internal::TooLong(name, max_list);
    if (outcome == internal::Outcome::kBad) return internal::Malformed(name, start);
  }
  return absl::OkStatus();
}

// Fills `message` from all occurrences of it in a message that was parsed from `pieces`, one over
// the other. `fields` has no message in it.
template <typename M>
absl::Status ParseNested(Pieces pieces, const Nested& nested, absl::Span<const Field<M>> fields,
                         size_t max_list, M* message) {
  for (const ByteRange& part : nested.parts) {
    const std::vector<Piece> own = PiecesOf(pieces, part);
    absl::Status status =
        ParseMessage<M>(own, fields, max_list, message, internal::kMaxGroupDepth - 1);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_WIRE_READER_H_

#include "server/rpc/wire/reader.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <cstring>

#include "absl/strings/str_format.h"
#include "formats/utf8.h"

namespace logitd::rpc {

static_assert(std::endian::native == std::endian::little, "elements travel little-endian");

namespace {

// The generated parser refuses lengths that its 16 bytes of slop could push past INT_MAX.
constexpr uint64_t kMaxLength = INT_MAX - 16;
constexpr int kMaxVarintBytes = 10;
constexpr int kMaxTagBytes = 5;

}  // namespace

WireReader::WireReader(Pieces pieces) : pieces_(pieces) {
  for (const Piece& piece : pieces) total_ += piece.size();
  if (!pieces_.empty()) {
    at_ = pieces_[0].data();
    end_ = at_ + pieces_[0].size();
  }
}

void WireReader::NextPiece() {
  while (at_ == end_ && piece_ + 1 < pieces_.size()) {
    ++piece_;
    at_ = pieces_[piece_].data();
    end_ = at_ + pieces_[piece_].size();
  }
}

bool WireReader::ReadVarintSlow(int max_bytes, uint64_t* value) {
  uint64_t result = 0;
  for (int i = 0; i < max_bytes; ++i) {
    if (remaining() == 0) return false;
    NextPiece();
    const auto byte = static_cast<uint64_t>(*at_++);
    ++position_;
    result |= (byte & 0x7f) << (7 * i);
    if (byte < 0x80) {
      *value = result;
      return true;
    }
  }
  return false;
}

bool WireReader::ReadShortVarint(uint64_t* value) {
  if (at_ == end_ || static_cast<uint8_t>(*at_) >= 0x80) return false;
  *value = static_cast<uint64_t>(*at_++);
  ++position_;
  return true;
}

bool WireReader::ReadVarint(uint64_t* value) {
  return ReadShortVarint(value) || ReadVarintSlow(kMaxVarintBytes, value);
}

bool WireReader::ReadTag(uint32_t* tag) {
  uint64_t value = 0;
  if (!ReadShortVarint(&value) && !ReadVarintSlow(kMaxTagBytes, &value)) return false;
  *tag = static_cast<uint32_t>(
      value);  // like the generated parser, drops what a fifth byte has too much
  return (*tag >> 3) != 0;
}

bool WireReader::ReadLength(size_t* length) {
  uint64_t value = 0;
  if (!ReadShortVarint(&value) && !ReadVarintSlow(kMaxTagBytes, &value)) return false;
  if (value > kMaxLength || value > remaining()) return false;
  *length = static_cast<size_t>(value);
  return true;
}

bool WireReader::Read(void* dst, size_t bytes) {
  if (bytes > remaining()) return false;
  auto* to = static_cast<std::byte*>(dst);
  position_ += bytes;
  while (bytes > 0) {
    NextPiece();
    const size_t run = std::min(bytes, static_cast<size_t>(end_ - at_));
    std::memcpy(to, at_, run);
    to += run;
    at_ += run;
    bytes -= run;
  }
  return true;
}

bool WireReader::Skip(size_t bytes) {
  if (bytes > remaining()) return false;
  position_ += bytes;
  while (bytes > 0) {
    NextPiece();
    const size_t run = std::min(bytes, static_cast<size_t>(end_ - at_));
    at_ += run;
    bytes -= run;
  }
  return true;
}

bool WireReader::SkipValue(uint32_t tag, int depth) {
  uint64_t varint = 0;
  size_t length = 0;
  switch (internal::TypeOf(tag)) {
    case internal::WireType::kVarint:
      return ReadVarint(&varint);
    case internal::WireType::kFixed64:
      return Skip(8);
    case internal::WireType::kLength:
      return ReadLength(&length) && Skip(length);
    case internal::WireType::kFixed32:
      return Skip(4);
    case internal::WireType::kStart:
      if (depth == 0) return false;
      for (uint32_t inner = 0; ReadTag(&inner);) {
        if (internal::TypeOf(inner) == internal::WireType::kEnd) return inner >> 3 == tag >> 3;
        if (!SkipValue(inner, depth - 1)) return false;
      }
      return false;
    case internal::WireType::kEnd:
      return false;
  }
  return false;  // wire types 6 and 7
}

ByteRange WireReader::Here(size_t bytes) const {
  return {.piece = piece_,
          .offset = pieces_.empty() ? 0 : static_cast<size_t>(at_ - pieces_[piece_].data()),
          .bytes = bytes};
}

void CopyRange(Pieces pieces, const ByteRange& range, void* dst) {
  auto* to = static_cast<std::byte*>(dst);
  size_t left = range.bytes;
  size_t offset = range.offset;
  for (size_t i = range.piece; left > 0; ++i, offset = 0) {
    const size_t run = std::min(left, pieces[i].size() - offset);
    std::memcpy(to, pieces[i].data() + offset, run);
    to += run;
    left -= run;
  }
}

std::vector<Piece> PiecesOf(Pieces pieces, const ByteRange& range) {
  std::vector<Piece> own;
  size_t left = range.bytes;
  size_t offset = range.offset;
  for (size_t i = range.piece; left > 0; ++i, offset = 0) {
    const size_t run = std::min(left, pieces[i].size() - offset);
    own.push_back(pieces[i].subspan(offset, run));
    left -= run;
  }
  return own;
}

namespace internal {

absl::Status Malformed(std::string_view field, size_t offset) {
  return absl::InvalidArgumentError(absl::StrFormat(
      "malformed message: %s at byte %d is truncated or not valid protobuf", field, offset));
}

absl::Status TooLong(std::string_view field, size_t max_list) {
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: got more than %d values, allowed one for each row, at most %d", field,
                      max_list, max_list));
}

Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, int64_t* value) {
  if (type != WireType::kVarint) return Outcome::kSkip;
  uint64_t raw = 0;
  if (!reader.ReadVarint(&raw)) return Outcome::kBad;
  *value = static_cast<int64_t>(raw);
  return Outcome::kRead;
}

Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, int32_t* value) {
  int64_t wide = 0;
  const Outcome outcome = ReadValue(reader, type, max_list, &wide);
  if (outcome == Outcome::kRead) *value = static_cast<int32_t>(wide);
  return outcome;
}

Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, bool* value) {
  int64_t wide = 0;
  const Outcome outcome = ReadValue(reader, type, max_list, &wide);
  if (outcome == Outcome::kRead) *value = wide != 0;
  return outcome;
}

Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, double* value) {
  if (type != WireType::kFixed64) return Outcome::kSkip;
  return reader.Read(value, sizeof(*value)) ? Outcome::kRead : Outcome::kBad;
}

Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, std::string* value) {
  if (type != WireType::kLength) return Outcome::kSkip;
  size_t length = 0;
  if (!reader.ReadLength(&length)) return Outcome::kBad;
  value->resize(length);
  const bool good = reader.Read(value->data(), length) && formats::IsUtf8(*value);
  return good ? Outcome::kRead : Outcome::kBad;
}

Outcome ReadValue(WireReader& reader, WireType type, size_t max_list,
                  std::optional<int64_t>* value) {
  int64_t read = 0;
  const Outcome outcome = ReadValue(reader, type, max_list, &read);
  if (outcome == Outcome::kRead) *value = read;
  return outcome;
}

Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, std::optional<float>* value) {
  if (type != WireType::kFixed32) return Outcome::kSkip;
  float read = 0;
  if (!reader.Read(&read, sizeof(read))) return Outcome::kBad;
  *value = read;
  return Outcome::kRead;
}

Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, ByteRange* value) {
  if (type != WireType::kLength) return Outcome::kSkip;
  size_t length = 0;
  if (!reader.ReadLength(&length)) return Outcome::kBad;
  *value = reader.Here(length);
  return reader.Skip(length) ? Outcome::kRead : Outcome::kBad;
}

Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, Nested* value) {
  ByteRange part;
  const Outcome outcome = ReadValue(reader, type, max_list, &part);
  if (outcome != Outcome::kRead) return outcome;
  if (value->parts.size() == max_list) return Outcome::kTooLong;
  value->parts.push_back(part);
  return outcome;
}

Outcome ReadChoice(WireReader& reader, WireType type, size_t max_list, uint32_t number,
                   bool is_message, Choice* value) {
  if (!is_message) {
    const Outcome outcome = ReadValue(reader, type, max_list, &value->range);
    if (outcome == Outcome::kRead) value->number = number;
    return outcome;
  }
  size_t length = 0;
  if (type != WireType::kLength) return Outcome::kSkip;
  if (!reader.ReadLength(&length)) return Outcome::kBad;
  if (value->number != number) value->message.parts.clear();
  value->number = number;
  value->range = {};
  if (value->message.parts.size() == max_list) return Outcome::kTooLong;
  value->message.parts.push_back(reader.Here(length));
  // A part that does not count in the end must be well-formed too, as for the generated parser.
  const size_t end = reader.position() + length;
  while (reader.position() < end) {
    uint32_t tag = 0;
    if (!reader.ReadTag(&tag) || !reader.SkipValue(tag, kMaxGroupDepth - 1)) return Outcome::kBad;
  }
  return reader.position() == end ? Outcome::kRead : Outcome::kBad;
}

namespace {

// Packed or not.
template <typename List>
Outcome ReadVarints(WireReader& reader, WireType type, size_t max_list, List* value) {
  const bool packed = type == WireType::kLength;
  if (!packed && type != WireType::kVarint) return Outcome::kSkip;
  size_t length = 0;
  if (packed && !reader.ReadLength(&length)) return Outcome::kBad;
  const size_t end = reader.position() + (packed ? length : 1);
  while (reader.position() < end) {
    uint64_t raw = 0;
    if (!reader.ReadVarint(&raw)) return Outcome::kBad;
    if (value->size() == max_list) return Outcome::kTooLong;
    value->push_back(static_cast<typename List::value_type>(raw));
  }
  return !packed || reader.position() == end ? Outcome::kRead : Outcome::kBad;
}

// Packed or not, of a type whose bytes are those on the wire.
template <typename List>
Outcome ReadFixed(WireReader& reader, WireType type, size_t max_list, List* value) {
  using T = typename List::value_type;
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  const WireType single = sizeof(T) == 4 ? WireType::kFixed32 : WireType::kFixed64;
  const bool packed = type == WireType::kLength;
  if (!packed && type != single) return Outcome::kSkip;
  size_t length = sizeof(T);
  if (packed && !reader.ReadLength(&length)) return Outcome::kBad;
  if (length % sizeof(T) != 0 || length > reader.remaining()) return Outcome::kBad;
  const size_t old = value->size();
  if (length / sizeof(T) > max_list - old) return Outcome::kTooLong;
  if (!packed && value->capacity() == old) value->reserve(2 * old + 2);
  value->resize(old + length / sizeof(T));
  return reader.Read(value->data() + old, length) ? Outcome::kRead : Outcome::kBad;
}

}  // namespace

Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, Int32List* value) {
  return ReadVarints(reader, type, max_list, value);
}

Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, Int64List* value) {
  return ReadVarints(reader, type, max_list, value);
}

Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, Uint64List* value) {
  return ReadFixed(reader, type, max_list, value);
}

Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, FloatList* value) {
  return ReadFixed(reader, type, max_list, value);
}

Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, IdList* value) {
  return ReadFixed(reader, type, std::numeric_limits<size_t>::max(), value);
}

Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, ValueList* value) {
  return ReadFixed(reader, type, std::numeric_limits<size_t>::max(), value);
}

Outcome ReadValue(WireReader& reader, WireType type, size_t max_list, AnyList* value) {
  struct ReadList {
    Outcome operator()(Int32List& list) { return ReadVarints(reader, type, max_list, &list); }
    Outcome operator()(BoolList& list) { return ReadVarints(reader, type, max_list, &list); }
    Outcome operator()(Uint64List& list) { return ReadFixed(reader, type, max_list, &list); }
    Outcome operator()(FloatList& list) { return ReadFixed(reader, type, max_list, &list); }
    WireReader& reader;
    WireType type;
    size_t max_list;
  };
  return std::visit(ReadList{reader, type, max_list}, *value);
}

}  // namespace internal

}  // namespace logitd::rpc

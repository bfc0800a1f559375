// The header lists that a peer sends, from their compressed form (HPACK): their size and their
// fields.
//
// The size that matters is that of the list after decompression: one byte on the wire can stand for
// a field of 4 KiB. gRPC 1.51 counts it anew in every frame of a list, and does not count it at all
// before the peer has confirmed the limit. So it is counted here too.
// Source: RFC 7541 (HPACK); RFC 9113, section 6.5.2 (the size of a list).
#ifndef LOGITD_SERVER_DOOR_HEADER_LIST_H_
#define LOGITD_SERVER_DOOR_HEADER_LIST_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"

namespace logitd::door {

// A field of a list. The views live until the next call of Begin or Read.
struct HeaderField {
  std::string_view name;
  std::string_view value;
};

// Memory: the peer's table, about 24 KiB at most and 1 KiB for usual peers, and the last list, up to
// kMostText. Cost: one step for each byte of a length, one for each bit of a string in Huffman code,
// and a copy of each field. Not thread-safe.
class HeaderList {
 public:
  // A list may have so many bytes of names and values. Of a larger one only the size is known, and
  // fields that it adds to the table are lost: its connection must end.
  static constexpr size_t kMostText = size_t{32} << 10;

  // Starts the next list of the connection.
  void Begin();

  // Reads the next bytes of the list. False for bytes that no encoder sends: a number beyond 32
  // bits. References to fields that do not exist are left to gRPC, and count as much as the largest
  // field of the table.
  bool Read(absl::Span<const uint8_t> bytes);

  // For each field that began: its name, its value and 32 bytes. A string counts when its length is
  // known, so a list is known to be too large before its bytes have come.
  size_t bytes() const { return bytes_; }

  // All of the list has been read, and every field in it exists.
  bool whole() const {
    return valid_ && step_ == Step::kField && !unknown_ && text_.size() < kMostText;
  }
  // The fields of a whole list, in order.
  size_t size() const { return spans_.size(); }
  HeaderField operator[](size_t i) const {
    const Text& span = spans_[i];
    const std::string_view text = std::string_view(text_).substr(span.begin);
    return {.name = text.substr(0, span.name_bytes),
            .value = text.substr(span.name_bytes, span.value_bytes)};
  }

 private:
  struct Field {
    uint32_t name_bytes;
    uint32_t bytes;    // name, value and 32 bytes
    std::string text;  // name and value
  };
  // A field of this list, in `text_`.
  struct Text {
    uint32_t begin;
    uint32_t name_bytes;
    uint32_t value_bytes;
  };
  // What is known of a field that a list refers to.
  struct Found {
    uint32_t name_bytes;
    uint32_t bytes;
    std::string_view name;
    std::string_view value;
  };
  // What gRPC advertises for the table (SETTINGS_HEADER_TABLE_SIZE), its default.
  static constexpr size_t kAdvertisedTable = 4096;
  // gRPC counts a binary value in its table without its base64, and some encoders count it one byte
  // shorter than it is sent. With twice the room, no field that the peer still knows is missing.
  static constexpr size_t kTableRoom = 2;

  enum class Step { kField, kNumber, kStringHead, kString };
  // What the number that is read is for.
  enum class Number { kIndexed, kNameIndex, kTableSize, kNameLength, kValueLength };

  void StartField(uint8_t byte);
  void StartNumber(Number purpose, uint8_t byte, int prefix_bits);
  void FinishNumber();
  void StartString(uint32_t wire_bytes);
  void FinishString();
  void FinishField();
  void EndField(uint32_t name_bytes);
  void ReadHuffman(uint8_t byte);
  void Count(size_t bytes) { bytes_ += bytes; }
  void Keep(std::string_view text) {
    if (text_.size() < kMostText) text_ += text.substr(0, kMostText - text_.size());
  }
  Found Find(uint32_t index);
  void Shrink(size_t bytes);

  size_t bytes_ = 0;
  Step step_ = Step::kField;
  bool valid_ = true;

  Number purpose_ = Number::kIndexed;
  uint64_t number_ = 0;
  int shift_ = 0;

  bool huffman_ = false;
  uint32_t left_ = 0;         // bytes of the string that have not come
  uint32_t string_size_ = 0;  // of the decoded string, so far
  uint32_t code_ = 0;         // bits of the next Huffman code
  int code_bits_ = 0;

  bool is_name_ = false;  // the string is a field's name
  bool add_ = false;      // the field goes into the table
  uint32_t name_bytes_ = 0;

  std::string text_;  // of the list's fields, up to kMostText
  std::vector<Text> spans_;
  uint32_t field_begin_ = 0;  // of the field that is read, in `text_`
  bool unknown_ = false;      // the list refers to a field that does not exist

  std::deque<Field> table_;  // the newest first
  size_t table_bytes_ = 0;
  size_t table_limit_ = kTableRoom * kAdvertisedTable;
};

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_HEADER_LIST_H_

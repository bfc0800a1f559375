// The size of the header lists that a peer sends, counted from their compressed form (HPACK).
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

#include "absl/types/span.h"

namespace logitd::door {

// Keeps the sizes of the fields in the peer's table, not the fields themselves: about 2 KiB at most.
// Cost: one step for each byte of a length, one for each bit of a string in Huffman code, and one
// for each other string. Not thread-safe.
class HeaderList {
 public:
  // Starts the next list of the connection.
  void Begin();

  // Reads the next bytes of the list. False for bytes that no encoder sends: a number beyond 32
  // bits. References to fields that do not exist are left to gRPC, and count as much as the largest
  // field of the table.
  bool Read(absl::Span<const uint8_t> bytes);

  // For each field that began: its name, its value and 32 bytes. A string counts when its length is
  // known, so a list is known to be too large before its bytes have come.
  size_t bytes() const { return bytes_; }

 private:
  struct Field {
    uint32_t name_bytes;
    uint32_t bytes;  // name, value and 32 bytes
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
  void CountHuffman(uint8_t byte);
  void Count(size_t bytes) { bytes_ += bytes; }
  Field Find(uint32_t index) const;
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

  std::deque<Field> table_;  // the newest first
  size_t table_bytes_ = 0;
  size_t table_limit_ = kTableRoom * kAdvertisedTable;
};

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_HEADER_LIST_H_

#include "server/door/header_list.h"

#include <algorithm>
#include <array>
#include <iterator>

namespace logitd::door {
namespace {

constexpr uint32_t kFieldOverhead = 32;

struct StaticField {
  uint8_t name_bytes;
  uint8_t value_bytes;
};
// The fields 1 to 61 of RFC 7541, appendix A.
constexpr StaticField kStatic[] = {
    {10, 0}, {7, 3},  {7, 4},  {5, 1},  {5, 11}, {7, 4},  {7, 5},   {7, 3},  {7, 3},
    {7, 3},  {7, 3},  {7, 3},  {7, 3},  {7, 3},  {14, 0}, {15, 13}, {15, 0}, {13, 0},
    {6, 0},  {27, 0}, {3, 0},  {5, 0},  {13, 0}, {13, 0}, {19, 0},  {16, 0}, {16, 0},
    {14, 0}, {16, 0}, {13, 0}, {12, 0}, {6, 0},  {4, 0},  {4, 0},   {6, 0},  {7, 0},
    {4, 0},  {4, 0},  {8, 0},  {17, 0}, {13, 0}, {8, 0},  {19, 0},  {13, 0}, {4, 0},
    {8, 0},  {12, 0}, {18, 0}, {19, 0}, {5, 0},  {7, 0},  {7, 0},   {11, 0}, {6, 0},
    {10, 0}, {25, 0}, {17, 0}, {10, 0}, {4, 0},  {3, 0},  {16, 0}};
static_assert(std::size(kStatic) == 61);

// The Huffman code of RFC 7541, appendix B, is canonical: the number of codes of each length is
// enough to find where a symbol ends.
constexpr int kMaxCodeBits = 30;
constexpr std::array<uint32_t, kMaxCodeBits + 1> kCodes = [] {
  std::array<uint32_t, kMaxCodeBits + 1> codes = {};
  codes[5] = 10;
  codes[6] = 26;
  codes[7] = 32;
  codes[8] = 6;
  codes[10] = 5;
  codes[11] = 3;
  codes[12] = 2;
  codes[13] = 6;
  codes[14] = 2;
  codes[15] = 3;
  codes[19] = 3;
  codes[20] = 8;
  codes[21] = 13;
  codes[22] = 26;
  codes[23] = 29;
  codes[24] = 12;
  codes[25] = 4;
  codes[26] = 15;
  codes[27] = 19;
  codes[28] = 29;
  codes[30] = 4;
  return codes;
}();
constexpr std::array<uint32_t, kMaxCodeBits + 1> kFirstCode = [] {
  std::array<uint32_t, kMaxCodeBits + 1> first = {};
  for (int bits = 1; bits <= kMaxCodeBits; ++bits) {
    first[bits] = (first[bits - 1] + kCodes[bits - 1]) << 1;
  }
  return first;
}();
static_assert(kFirstCode[kMaxCodeBits] + kCodes[kMaxCodeBits] == 1U << kMaxCodeBits,
              "the code is complete");

}  // namespace

void HeaderList::Begin() {
  bytes_ = 0;
  step_ = Step::kField;
  valid_ = true;
}

bool HeaderList::Read(absl::Span<const uint8_t> bytes) {
  size_t i = 0;
  while (i < bytes.size() && valid_) {
    switch (step_) {
      case Step::kField:
        StartField(bytes[i++]);
        break;
      case Step::kNumber: {
        const uint8_t byte = bytes[i++];
        number_ += static_cast<uint64_t>(byte & 0x7f) << shift_;
        shift_ += 7;
        if (number_ > UINT32_MAX || shift_ > 56) valid_ = false;
        if ((byte & 0x80) == 0) FinishNumber();
        break;
      }
      case Step::kStringHead:
        huffman_ = (bytes[i] & 0x80) != 0;
        StartNumber(is_name_ ? Number::kNameLength : Number::kValueLength, bytes[i++], 7);
        break;
      case Step::kString: {
        const size_t run = std::min<size_t>(left_, bytes.size() - i);
        if (huffman_) {
          for (const uint8_t byte : bytes.subspan(i, run)) CountHuffman(byte);
        }
        i += run;
        left_ -= static_cast<uint32_t>(run);
        if (left_ == 0) FinishString();
        break;
      }
    }
  }
  return valid_;
}

void HeaderList::StartField(uint8_t byte) {
  add_ = false;
  if ((byte & 0x80) != 0) {
    StartNumber(Number::kIndexed, byte, 7);
  } else if ((byte & 0x40) != 0) {
    add_ = true;
    StartNumber(Number::kNameIndex, byte, 6);
  } else if ((byte & 0x20) != 0) {
    StartNumber(Number::kTableSize, byte, 5);
  } else {
    StartNumber(Number::kNameIndex, byte, 4);
  }
}

void HeaderList::StartNumber(Number purpose, uint8_t byte, int prefix_bits) {
  purpose_ = purpose;
  const uint32_t mask = (1U << prefix_bits) - 1;
  number_ = byte & mask;
  shift_ = 0;
  if (number_ == mask) {
    step_ = Step::kNumber;
  } else {
    FinishNumber();
  }
}

void HeaderList::FinishNumber() {
  if (!valid_) return;
  const auto number = static_cast<uint32_t>(number_);
  step_ = Step::kField;
  switch (purpose_) {
    case Number::kIndexed:
      Count(Find(number).bytes);
      break;
    case Number::kNameIndex:
      Count(kFieldOverhead);
      is_name_ = number == 0;
      if (!is_name_) {
        name_bytes_ = Find(number).name_bytes;
        Count(name_bytes_);
      }
      step_ = Step::kStringHead;
      break;
    case Number::kTableSize:
      table_limit_ = kTableRoom * std::min<size_t>(number, kAdvertisedTable);
      Shrink(table_limit_);
      break;
    case Number::kNameLength:
    case Number::kValueLength:
      StartString(number);
      break;
  }
}

void HeaderList::StartString(uint32_t wire_bytes) {
  left_ = wire_bytes;
  string_size_ = huffman_ ? 0 : wire_bytes;
  code_ = 0;
  code_bits_ = 0;
  if (!huffman_) Count(wire_bytes);
  step_ = Step::kString;
  if (left_ == 0) FinishString();
}

void HeaderList::CountHuffman(uint8_t byte) {
  for (int bit = 7; bit >= 0; --bit) {
    code_ = code_ << 1 | (byte >> bit & 1U);
    ++code_bits_;
    // Codes of a length start at kFirstCode; longer codes are larger.
    if (code_ - kFirstCode[code_bits_] >= kCodes[code_bits_]) continue;
    ++string_size_;
    Count(1);
    code_ = 0;
    code_bits_ = 0;
  }
}

void HeaderList::FinishString() {
  if (is_name_) {
    name_bytes_ = string_size_;
    is_name_ = false;
    step_ = Step::kStringHead;
  } else {
    step_ = Step::kField;
    FinishField();
  }
}

void HeaderList::FinishField() {
  if (!add_) return;
  const size_t size = size_t{name_bytes_} + string_size_ + kFieldOverhead;
  if (size > table_limit_) {
    Shrink(0);
    return;
  }
  Shrink(table_limit_ - size);
  table_.push_front({.name_bytes = name_bytes_, .bytes = static_cast<uint32_t>(size)});
  table_bytes_ += size;
}

HeaderList::Field HeaderList::Find(uint32_t index) const {
  if (index >= 1 && index <= std::size(kStatic)) {
    const StaticField& field = kStatic[index - 1];
    return {.name_bytes = field.name_bytes,
            .bytes = uint32_t{field.name_bytes} + field.value_bytes + kFieldOverhead};
  }
  const size_t at = size_t{index} - std::size(kStatic) - 1;
  if (index > std::size(kStatic) && at < table_.size()) return table_[at];
  return {.name_bytes = kAdvertisedTable, .bytes = kAdvertisedTable};
}

void HeaderList::Shrink(size_t bytes) {
  while (table_bytes_ > bytes) {
    table_bytes_ -= table_.back().bytes;
    table_.pop_back();
  }
}

}  // namespace logitd::door

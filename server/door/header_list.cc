#include "server/door/header_list.h"

#include <algorithm>

#include "server/door/hpack_tables.h"

namespace logitd::door {
namespace {

constexpr uint32_t kFieldOverhead = 32;

}  // namespace

void HeaderList::Begin() {
  bytes_ = 0;
  step_ = Step::kField;
  valid_ = true;
  text_.clear();
  spans_.clear();
  unknown_ = false;
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
          for (const uint8_t byte : bytes.subspan(i, run)) ReadHuffman(byte);
        } else {
          Keep({reinterpret_cast<const char*>(bytes.data()) + i, run});
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
  field_begin_ = static_cast<uint32_t>(text_.size());
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
    case Number::kIndexed: {
      const Found found = Find(number);
      Count(found.bytes);
      Keep(found.name);
      Keep(found.value);
      EndField(found.name_bytes);
      break;
    }
    case Number::kNameIndex:
      Count(kFieldOverhead);
      is_name_ = number == 0;
      if (!is_name_) {
        const Found found = Find(number);
        name_bytes_ = found.name_bytes;
        Count(name_bytes_);
        Keep(found.name);
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

void HeaderList::ReadHuffman(uint8_t byte) {
  for (int bit = 7; bit >= 0; --bit) {
    code_ = code_ << 1 | (byte >> bit & 1U);
    ++code_bits_;
    const uint32_t at = code_ - kFirstCode[code_bits_];
    if (at >= kCodes[code_bits_]) continue;
    const uint32_t symbol = kFirstSymbol[code_bits_] + at;
    ++string_size_;
    Count(1);
    if (symbol >= kSymbols.size()) {
      unknown_ = true;  // EOS
    } else {
      const char byte = static_cast<char>(kSymbols[symbol]);
      Keep({&byte, 1});
    }
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
  EndField(name_bytes_);
  if (!add_) return;
  const size_t size = size_t{name_bytes_} + string_size_ + kFieldOverhead;
  if (size > table_limit_) {
    Shrink(0);
    return;
  }
  Shrink(table_limit_ - size);
  table_.push_front({.name_bytes = name_bytes_,
                     .bytes = static_cast<uint32_t>(size),
                     .text = text_.substr(field_begin_)});
  table_bytes_ += size;
}

void HeaderList::EndField(uint32_t name_bytes) {
  const size_t bytes = text_.size() - field_begin_;
  if (text_.size() >= kMostText || bytes < name_bytes) return;  // not whole
  spans_.push_back({.begin = field_begin_,
                    .name_bytes = name_bytes,
                    .value_bytes = static_cast<uint32_t>(bytes - name_bytes)});
}

HeaderList::Found HeaderList::Find(uint32_t index) {
  if (index >= 1 && index <= kStaticFields.size()) {
    const StaticField& field = kStaticFields[index - 1];
    return {.name_bytes = static_cast<uint32_t>(field.name.size()),
            .bytes = static_cast<uint32_t>(field.name.size() + field.value.size()) + kFieldOverhead,
            .name = field.name,
            .value = field.value};
  }
  const size_t at = size_t{index} - kStaticFields.size() - 1;
  if (index > kStaticFields.size() && at < table_.size()) {
    const Field& field = table_[at];
    const std::string_view text = field.text;
    const size_t name_bytes = std::min<size_t>(field.name_bytes, text.size());
    return {.name_bytes = field.name_bytes,
            .bytes = field.bytes,
            .name = text.substr(0, name_bytes),
            .value = text.substr(name_bytes)};
  }
  unknown_ = true;
  return {.name_bytes = kAdvertisedTable, .bytes = kAdvertisedTable, .name = {}, .value = {}};
}

void HeaderList::Shrink(size_t bytes) {
  while (table_bytes_ > bytes) {
    table_bytes_ -= table_.back().bytes;
    table_.pop_back();
  }
}

}  // namespace logitd::door

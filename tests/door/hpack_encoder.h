// An encoder of header lists (HPACK) for tests. It uses every way to write a field, at random.
#ifndef LOGITD_TESTS_DOOR_HPACK_ENCODER_H_
#define LOGITD_TESTS_DOOR_HPACK_ENCODER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace logitd::door {

using HeaderFields = std::vector<std::pair<std::string, std::string>>;

class HpackEncoder {
 public:
  // `inserts`: of 100 fields that could be added to the table, so many are.
  HpackEncoder(uint32_t seed, int inserts) : random_(seed), inserts_(inserts) {}

  std::string Encode(const HeaderFields& fields) {
    std::string out;
    for (const auto& field : fields) EncodeField(field, &out);
    return out;
  }

 private:
  static constexpr size_t kStaticFields = 61;
  static constexpr size_t kTable = 4096;

  static void Number(size_t number, int bits, uint8_t flags, std::string* out) {
    const size_t mask = (size_t{1} << bits) - 1;
    if (number < mask) {
      out->push_back(static_cast<char>(flags | number));
      return;
    }
    out->push_back(static_cast<char>(flags | mask));
    for (number -= mask; number >= 128; number /= 128) {
      out->push_back(static_cast<char>(128 | number % 128));
    }
    out->push_back(static_cast<char>(number));
  }
  static void Text(const std::string& text, std::string* out) {
    Number(text.size(), 7, 0, out);
    *out += text;
  }

  void EncodeField(const std::pair<std::string, std::string>& field, std::string* out) {
    size_t same_name = 0;
    if (field.first == ":path") same_name = 4;
    if (field.first == ":method") same_name = 2;
    if (field == std::pair<std::string, std::string>{":method", "POST"}) {
      return Number(3, 7, 0x80, out);
    }
    for (size_t i = 0; i < table_.size(); ++i) {
      if (table_[i] == field && random_() % 8 != 0) {
        return Number(kStaticFields + 1 + i, 7, 0x80, out);
      }
      if (table_[i].first == field.first && random_() % 2 == 0) same_name = kStaticFields + 1 + i;
    }
    const bool add = static_cast<int>(random_() % 100) < inserts_;
    if (add) {
      Number(same_name, 6, 0x40, out);
    } else {
      Number(same_name, 4, random_() % 4 == 0 ? 0x10 : 0, out);
    }
    if (same_name == 0) Text(field.first, out);
    Text(field.second, out);
    if (!add) return;
    table_.push_front(field);
    bytes_ += field.first.size() + field.second.size() + 32;
    while (bytes_ > kTable) {
      bytes_ -= table_.back().first.size() + table_.back().second.size() + 32;
      table_.pop_back();
    }
  }

  std::mt19937 random_;
  const int inserts_;
  std::deque<std::pair<std::string, std::string>> table_;
  size_t bytes_ = 0;
};

}  // namespace logitd::door

#endif  // LOGITD_TESTS_DOOR_HPACK_ENCODER_H_

// Writes protobuf fields one after another into memory that is known to be large enough.
#ifndef LOGITD_SERVER_RPC_WIRE_WRITER_H_
#define LOGITD_SERVER_RPC_WIRE_WRITER_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace logitd::rpc {

constexpr size_t VarintSize(uint64_t value) {
  size_t bytes = 1;
  while (value >= 0x80) {
    value >>= 7;
    ++bytes;
  }
  return bytes;
}

inline constexpr size_t kMaxVarintSize = 10;

// Owns nothing. The caller has counted.
class WireWriter {
 public:
  explicit WireWriter(uint8_t* at) : at_(at) {}

  uint8_t* at() const { return at_; }

  void Varint(uint64_t value) {
    while (value >= 0x80) {
      *at_++ = static_cast<uint8_t>(value | 0x80);
      value >>= 7;
    }
    *at_++ = static_cast<uint8_t>(value);
  }

  // A singular varint field; zero, the default, is left out.
  void VarintField(uint32_t number, int64_t value) {
    if (value == 0) return;
    Varint(uint64_t{number} << 3);
    Varint(static_cast<uint64_t>(value));
  }

  // A singular double field; +0, the default, is left out.
  void DoubleField(uint32_t number, double value) {
    if (std::bit_cast<uint64_t>(value) == 0) return;
    Varint((uint64_t{number} << 3) | 1);
    Fixed(value);
  }

  // The head of a packed, bytes or message field.
  void LengthHead(uint32_t number, size_t length) {
    Varint((uint64_t{number} << 3) | 2);
    Varint(length);
  }

  void Raw(const void* from, size_t bytes) {
    std::memcpy(at_, from, bytes);
    at_ += bytes;
  }

  template <typename T>
  void Fixed(T value) {
    Raw(&value, sizeof(value));
  }

 private:
  uint8_t* at_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_WIRE_WRITER_H_

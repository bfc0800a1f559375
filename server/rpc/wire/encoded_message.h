// A message that goes out, as it is written to the socket.
#ifndef LOGITD_SERVER_RPC_WIRE_ENCODED_MESSAGE_H_
#define LOGITD_SERVER_RPC_WIRE_ENCODED_MESSAGE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "server/http2/stream.h"
#include "server/rpc/wire/writer.h"

namespace logitd::rpc {

// gRPC puts five bytes before a message: whether it is compressed, and its length.
inline constexpr size_t kPrefixBytes = 5;

// The parts of one message, with room for its prefix. Movable. Not thread-safe.
class EncodedMessage {
 public:
  EncodedMessage() = default;

  // A message of at most `max_bytes`, which `write` writes with a WireWriter.
  template <typename Write>
  static EncodedMessage Make(int64_t max_bytes, Write write) {
    auto memory =
        std::make_shared_for_overwrite<std::byte[]>(kPrefixBytes + static_cast<size_t>(max_bytes));
    std::byte* const begin = memory.get() + kPrefixBytes;
    WireWriter writer(reinterpret_cast<uint8_t*>(begin));
    write(writer);
    const auto bytes = static_cast<size_t>(reinterpret_cast<std::byte*>(writer.at()) - begin);
    EncodedMessage message;
    message.parts_.push_back({{begin, bytes}, std::move(memory)});
    message.bytes_ = bytes;
    return message;
  }
  static EncodedMessage Copy(std::string_view bytes) {
    return Make(static_cast<int64_t>(bytes.size()),
                [bytes](WireWriter& writer) { writer.Raw(bytes.data(), bytes.size()); });
  }

  // Adds bytes at the end. Not to an empty object.
  void Append(http2::Bytes part) {
    bytes_ += part.span.size();
    if (!part.span.empty()) parts_.push_back(std::move(part));
  }
  void Append(const EncodedMessage& tail) {
    for (const http2::Bytes& part : tail.parts_) Append(part);
  }

  bool empty() const { return parts_.empty(); }
  int64_t bytes() const { return static_cast<int64_t>(bytes_); }  // without the prefix

  // All of it, without the prefix.
  std::string ToString() const {
    std::string all;
    all.reserve(bytes_);
    for (const http2::Bytes& part : parts_) {
      all.append(reinterpret_cast<const char*>(part.span.data()), part.span.size());
    }
    return all;
  }

  // Its parts, with the prefix at the start of the first one. Once.
  absl::InlinedVector<http2::Bytes, 2> Release() {
    http2::Bytes& first = parts_.front();
    auto* const prefix = const_cast<std::byte*>(first.span.data()) - kPrefixBytes;
    prefix[0] = std::byte{0};
    for (size_t i = 1; i < kPrefixBytes; ++i) {
      prefix[i] = static_cast<std::byte>(bytes_ >> (8 * (kPrefixBytes - 1 - i)));
    }
    first.span = {prefix, first.span.size() + kPrefixBytes};
    return std::move(parts_);
  }

 private:
  absl::InlinedVector<http2::Bytes, 2> parts_;
  size_t bytes_ = 0;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_WIRE_ENCODED_MESSAGE_H_

#include "tests/e2e/frames.h"

#include <poll.h>
#include <sys/socket.h>

#include <stdexcept>

#include "absl/time/clock.h"

namespace logitd::e2e {
namespace {

constexpr size_t kHeadBytes = 9;

}  // namespace

void AppendBigEndian(std::string* out, uint32_t value, int bytes) {
  for (int i = bytes - 1; i >= 0; --i) out->push_back(static_cast<char>(value >> (8 * i)));
}

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, std::string_view payload) {
  std::string frame;
  AppendBigEndian(&frame, static_cast<uint32_t>(payload.size()), 3);
  frame.push_back(static_cast<char>(type));
  frame.push_back(static_cast<char>(flags));
  AppendBigEndian(&frame, stream, 4);
  frame += payload;
  return frame;
}

FrameReader::FrameReader(int fd) : fd_(fd) {
  nghttp2_hd_inflater* inflater = nullptr;
  if (nghttp2_hd_inflate_new(&inflater) != 0) throw std::runtime_error("nghttp2_hd_inflate_new");
  inflater_.reset(inflater);
}

std::string FrameReader::ReadFields(std::string_view block) {
  std::string text;
  for (bool final = false; !final;) {
    nghttp2_nv field;
    int flags = 0;
    const ssize_t read = nghttp2_hd_inflate_hd2(inflater_.get(), &field, &flags,
                                                reinterpret_cast<const uint8_t*>(block.data()),
                                                block.size(), /*in_final=*/1);
    if (read < 0) throw std::runtime_error(nghttp2_strerror(static_cast<int>(read)));
    block.remove_prefix(static_cast<size_t>(read));
    if ((flags & NGHTTP2_HD_INFLATE_EMIT) != 0) {
      text.append(reinterpret_cast<const char*>(field.name), field.namelen);
      text += ": ";
      text.append(reinterpret_cast<const char*>(field.value), field.valuelen);
      text += '\n';
    }
    final = (flags & NGHTTP2_HD_INFLATE_FINAL) != 0;
  }
  nghttp2_hd_inflate_end_headers(inflater_.get());
  return text;
}

bool FrameReader::TakeFrame(ServerFrame* frame) {
  if (bytes_.size() < kHeadBytes) return false;
  const auto byte = [this](size_t i) { return static_cast<uint8_t>(bytes_[i]); };
  const size_t size = size_t{byte(0)} << 16 | size_t{byte(1)} << 8 | byte(2);
  if (bytes_.size() < kHeadBytes + size) return false;
  frame->type = byte(3);
  frame->stream =
      uint32_t{byte(5)} << 24 | uint32_t{byte(6)} << 16 | uint32_t{byte(7)} << 8 | byte(8);
  frame->text = bytes_.substr(kHeadBytes, size);
  // The table of fields changes with each list, so all of them are read.
  if (frame->type == kHeaders) frame->text = ReadFields(frame->text);
  bytes_.erase(0, kHeadBytes + size);
  return true;
}

bool FrameReader::Find(absl::FunctionRef<bool(const ServerFrame&)> wanted, absl::Duration timeout) {
  const absl::Time end = absl::Now() + timeout;
  while (true) {
    ServerFrame frame;
    while (TakeFrame(&frame)) {
      if (wanted(frame)) return true;
    }
    if (ended_ || absl::Now() >= end) return false;
    pollfd waiting = {fd_, POLLIN, 0};
    if (poll(&waiting, 1, 5) <= 0) continue;
    char buffer[65536];
    const ssize_t got = recv(fd_, buffer, sizeof(buffer), 0);
    if (got <= 0) {
      ended_ = true;
    } else {
      bytes_.append(buffer, static_cast<size_t>(got));
    }
  }
}

}  // namespace logitd::e2e

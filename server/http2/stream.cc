#include "server/http2/stream.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "server/http2/connection.h"

namespace logitd::http2 {
namespace {

using NvList = absl::InlinedVector<nghttp2_nv, 8>;

// Of pairs of a name and a value, which it refers to.
template <typename Pairs>
NvList ListOf(const Pairs& fields) {
  NvList list;
  for (const auto& [name, value] : fields) {
    list.push_back({.name = reinterpret_cast<uint8_t*>(const_cast<char*>(name.data())),
                    .value = reinterpret_cast<uint8_t*>(const_cast<char*>(value.data())),
                    .namelen = name.size(),
                    .valuelen = value.size(),
                    .flags = NGHTTP2_NV_FLAG_NONE});
  }
  return list;
}

}  // namespace

void HeaderList::Add(std::string_view name, std::string_view value) {
  constexpr size_t kUsual = 384;  // of gRPC's clients: one allocation
  if (text_.empty()) text_.reserve(kUsual);
  text_.append(name);
  const auto name_end = static_cast<uint32_t>(text_.size());
  text_.append(value);
  ends_.push_back({name_end, static_cast<uint32_t>(text_.size())});
}

Field HeaderList::operator[](size_t i) const {
  const uint32_t begin = i == 0 ? 0 : ends_[i - 1].value;
  const std::string_view text = text_;
  return {text.substr(begin, ends_[i].name - begin),
          text.substr(ends_[i].name, ends_[i].value - ends_[i].name)};
}

std::string_view HeaderList::Find(std::string_view name) const {
  for (size_t i = 0; i < size(); ++i) {
    if (const Field field = (*this)[i]; field.name == name) return field.value;
  }
  return {};
}

size_t Stream::max_header_list() const { return connection_->limits_.max_header_list; }

void Stream::Grant(int64_t bytes) {
  if (connection_->session_ == nullptr || peer_ended_) return;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - (1 << 20);
  while (bytes > granted_) {
    const auto more = static_cast<int32_t>(std::min(bytes - granted_, kMost));
    if (nghttp2_submit_window_update(connection_->session_, NGHTTP2_FLAG_NONE, id_, more) != 0)
      return;
    granted_ += more;
  }
  connection_->Wake();
}

void Stream::ReturnPadding(size_t bytes) {
  constexpr size_t kWorthReturning = size_t{16} << 10;
  padding_ += bytes;
  if (padding_ < kWorthReturning || peer_ended_) return;
  nghttp2_submit_window_update(connection_->session_, NGHTTP2_FLAG_NONE, id_,
                               static_cast<int32_t>(std::exchange(padding_, 0)));
  connection_->Wake();
}

bool Stream::HoldEarly(int64_t bytes) {
  const Connection& connection = *connection_;
  const int64_t held = connection.account_.early.load(std::memory_order_relaxed);
  if (held + bytes > connection.limits_.max_early_bytes || connection.over()) return false;
  early_ += bytes;
  connection_->Hold(&connection_->account_.early, bytes);
  return true;
}

void Stream::ReleaseEarly() {
  connection_->Hold(&connection_->account_.early, -early_);
  early_ = 0;
}

void Stream::HoldUnpaid(int64_t more) {
  unpaid_bytes_ += more;
  connection_->Hold(&connection_->account_.unsent, more);
}

void Stream::CountMessage() { connection_->tiny_.Add(2); }

void Stream::Respond(absl::Span<const Field> headers) {
  if (connection_->session_ == nullptr || std::exchange(responded_, true)) return;
  const NvList list = ListOf(headers);
  const nghttp2_data_provider body = {.source = {.ptr = this},
                                      .read_callback = &Connection::ReadBody};
  nghttp2_submit_response(connection_->session_, id_, list.data(), list.size(), &body);
  connection_->Wake();
}

void Stream::Send(Bytes bytes) {
  if (connection_->session_ == nullptr || ended_) return;
  if (unsent_bytes_ == 0) moved_ns_ = connection_->loop_->now_ns();
  unsent_bytes_ += static_cast<int64_t>(bytes.span.size());
  if (bytes.payer == Payer::kConnection) HoldUnpaid(static_cast<int64_t>(bytes.span.size()));
  unsent_.push_back(std::move(bytes));
  if (std::exchange(deferred_, false)) nghttp2_session_resume_data(connection_->session_, id_);
  connection_->Wake();
}

void Stream::End(absl::Span<const Field> trailers) {
  if (connection_->session_ == nullptr || std::exchange(ended_, true)) return;
  if (unsent_bytes_ == 0) moved_ns_ = connection_->loop_->now_ns();
  if (!responded_) {
    responded_ = true;
    const NvList list = ListOf(trailers);
    nghttp2_submit_response(connection_->session_, id_, list.data(), list.size(), nullptr);
  } else {
    for (const Field& field : trailers) trailers_.emplace_back(field.name, field.value);
    if (std::exchange(deferred_, false)) nghttp2_session_resume_data(connection_->session_, id_);
  }
  connection_->Wake();
}

void Stream::SubmitTrailers() {
  const NvList list = ListOf(trailers_);
  nghttp2_submit_trailer(connection_->session_, id_, list.data(), list.size());
}

void Stream::Reset(uint32_t error) {
  if (connection_->session_ == nullptr) return;
  nghttp2_submit_rst_stream(connection_->session_, NGHTTP2_FLAG_NONE, id_, error);
  connection_->Wake();
}

}  // namespace logitd::http2

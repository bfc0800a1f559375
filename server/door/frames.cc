#include "server/door/frames.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "server/door/answer.h"
#include "server/door/call_timeout.h"

namespace logitd::door {
namespace {

constexpr size_t kPrefaceBytes = 24;  // "PRI * HTTP/2.0...", which gRPC checks

enum Type : uint8_t {
  kData = 0,
  kHeaders = 1,
  kReset = 3,
  kSettings = 4,
  kPing = 6,
  kWindowUpdate = 8,
  kContinuation = 9,
};
constexpr uint8_t kEndStream = 1;  // of DATA and HEADERS
constexpr uint8_t kAck = 1;        // of SETTINGS and PING
constexpr uint8_t kEndHeaders = 4;
constexpr uint8_t kPadded = 8;
constexpr uint8_t kPriority = 0x20;
constexpr size_t kPriorityBytes = 5;
constexpr uint32_t kCancel = 8;  // why a stream is reset

constexpr int64_t kTinyUnit = 1024;
constexpr int64_t kControlPerFrame = 4;
constexpr int64_t kRefillNs = 10'000'000;
constexpr int64_t kPeriodNs = 1'000'000'000;

// Small frames of a refused call that cost nothing: its message, and an end without bytes.
constexpr int64_t kRefusedTiny = 2;

// The grants of calls are for payloads. Frames around them cost a quarter more at most.
constexpr int64_t kAskedShare = 4;

}  // namespace

Frames::Frames(const FrameLimits& limits, int64_t now_ns, EarlyRoom* room)
    : limits_(limits),
      windows_(room),
      refilled_ns_(now_ns),
      tiny_{.left = limits.tiny_frames * kTinyUnit, .most = limits.tiny_frames * kTinyUnit},
      control_{.left = limits.control_frames, .most = limits.control_frames},
      pings_{.left = limits.pings * limits.min_ping_interval_ns,
             .most = limits.pings * limits.min_ping_interval_ns},
      pings_ns_(now_ns),
      resets_{.left = limits.resets, .most = limits.resets},
      period_ns_(now_ns) {
  in_.skip = kPrefaceBytes;
}

bool Frames::Direction::TakeHead(absl::Span<const uint8_t>* bytes) {
  const size_t run = std::min(kHeadBytes - head_bytes, bytes->size());
  std::copy_n(bytes->begin(), run, head.begin() + head_bytes);
  head_bytes += run;
  bytes->remove_prefix(run);
  if (head_bytes < kHeadBytes) return false;
  head_bytes = 0;
  skip = size_t{head[0]} << 16 | size_t{head[1]} << 8 | head[2];
  type = head[3];
  flags = head[4];
  stream = (uint32_t{head[5]} & 0x7f) << 24 | uint32_t{head[6]} << 16 | uint32_t{head[7]} << 8 |
           uint32_t{head[8]};
  return true;
}

Limit Frames::Received(absl::Span<const uint8_t> bytes, int64_t now_ns) {
  return Read(bytes, now_ns, nullptr);
}

Limit Frames::Received(absl::Span<const uint8_t> bytes, int64_t now_ns, Judge judge) {
  return Read(bytes, now_ns, &judge);
}

void Frames::BeginRead() {
  read_ = 0;
  edits_.clear();
}

Limit Frames::Read(absl::Span<const uint8_t> bytes, int64_t now_ns, const Judge* judge) {
  Refill(now_ns);
  now_ns_ = now_ns;
  while (!bytes.empty() && broken_ == Limit::kNone) {
    if (in_.skip == 0) {
      const size_t left = bytes.size();
      if (in_.head_bytes == 0) frame_bytes_ = 0;
      const bool whole = in_.TakeHead(&bytes);
      Advance(left - bytes.size());
      // What the frame is shows with its last byte.
      if (rewrites_) TakeOut(left - bytes.size());
      if (!whole) break;
      ++frames_;
      hidden_ = false;
      BeginFrame();
      if (rewrites_ && !IsHeaders() && !hidden_) {
        PutIn({reinterpret_cast<const char*>(in_.head.data()), kHeadBytes});
      }
      if (in_.skip == 0 && IsHeaders()) EndHeaderFrame(judge);
      continue;
    }
    const absl::Span<const uint8_t> run = bytes.subspan(0, in_.skip);
    bytes.remove_prefix(run.size());
    in_.skip -= run.size();
    Advance(run.size());
    if (in_.type == kData) {
      const auto stream = streams_.find(in_.stream);
      if (stream != streams_.end()) {
        ReadMessages(&stream->second, run);
      } else {  // the server may have ended it inside a prefix
        const size_t begin = read_ - run.size();
        Replace(begin, begin, std::exchange(held_, {}));
      }
      if (in_.skip == 0 && ending_.stream != 0) EndTooLarge();
    } else if (IsHeaders()) {
      if (rewrites_) TakeOut(run.size());
      ReadHeaders(run);
      if (in_.skip == 0) EndHeaderFrame(judge);
    }
  }
  windows_.Settle(now_ns_);
  return broken_;
}

bool Frames::IsHeaders() const { return in_.type == kHeaders || in_.type == kContinuation; }

// A frame with a header list, or a part of it, has ended.
void Frames::EndHeaderFrame(const Judge* judge) {
  if (in_headers_ || broken_ != Limit::kNone) return;
  const uint32_t opens = std::exchange(opens_, 0);
  if (judge != nullptr && opens != 0 && MayJudge() && (*judge)(opens, ends_, headers_)) {
    EndStream(opens);
    RefuseList();
    return;
  }
  if (opens != 0) SetTimeout(opens);
  if (!rewrites_) return;
  // gRPC, which knows no padding of lists, would end the connection too.
  if (!headers_.whole() || padded_) return Break(Limit::kHeaderFormat);
  const std::string block = EncodeList(headers_);
  std::string frame;
  AppendFrameHead(block.size(), kHeaders, kEndHeaders | (ends_ ? kEndStream : 0), in_.stream,
                  &frame);
  PutIn(frame + block);
  if (opens != 0 && !ends_ && windows_.closed()) windows_.Grant(opens);
}

// gRPC does not get the list that has ended. Where it was is the end of a frame of gRPC's.
void Frames::RefuseList() {
  last_stream_ = seen_before_;
  --opened_;
  ++refused_;
  // As for an answer. The frames of its message and its reset still come.
  control_.Give(kControlPerFrame);
  tiny_.Give(kRefusedTiny * kTinyUnit);
  if (!rewrites_) TakeOut(frame_bytes_);
  rewrites_ = true;
  Edit& edit = edits_.back();
  edit.frame = std::min(edit.frame, edit.put.size());
  CloseWindows();
}

// As the list of a call that passes says it.
void Frames::SetTimeout(uint32_t stream) {
  for (size_t i = 0; i < headers_.size(); ++i) {
    if (headers_[i].name != kTimeout) continue;
    const std::optional<int64_t> timeout_ns = ParseTimeout(headers_[i].value);
    if (timeout_ns.has_value()) streams_[stream].timeout_end_ns = now_ns_ + *timeout_ns;
    return;
  }
}

// A list in one frame, all of it in this read, unless no frame goes to gRPC as it came.
bool Frames::MayJudge() const {
  const bool here = rewrites_ || (continuations_ == 0 && frame_bytes_ <= read_);
  return here && headers_.whole() && !padded_;
}

void Frames::Replace(size_t begin, size_t end, std::string_view put) {
  if (begin == end && put.empty()) return;
  if (edits_.empty() || edits_.back().end != begin) {
    edits_.push_back({.begin = begin, .end = begin});
  }
  edits_.back().end = end;
  edits_.back().put += put;
}

void Frames::Offer(absl::Span<const iovec> parts) {
  size_t seen = offered_;
  offered_ = 0;
  // gRPC writes each frame that is changed in one piece. Of two pieces, the first may have been sent.
  field_.at = {};
  offered_type_ = nullptr;
  for (const iovec& part : parts) {
    absl::Span<uint8_t> bytes(static_cast<uint8_t*>(part.iov_base), part.iov_len);
    offered_ += bytes.size();
    const size_t known = std::min(seen, bytes.size());
    seen -= known;
    ReadOffer(bytes.subspan(known));
  }
  // Where calls end in this offer, the connection's window is larger.
  if (connection_field_.whole > 0) connection_field_.Write(0, windows_.TakeConnection());
  connection_field_ = {};
  windows_.Settle(now_ns_);
}

void Frames::ReadOffer(absl::Span<uint8_t> bytes) {
  while (!bytes.empty()) {
    if (offer_.skip == 0) {
      constexpr size_t kTypeAt = 3;
      if (offer_.head_bytes == 0) offered_type_ = nullptr;
      if (offer_.head_bytes <= kTypeAt && offer_.head_bytes + bytes.size() > kTypeAt) {
        offered_type_ = &bytes[kTypeAt - offer_.head_bytes];
      }
      absl::Span<const uint8_t> rest = bytes;
      const bool whole = offer_.TakeHead(&rest);
      bytes = bytes.last(rest.size());
      if (whole) BeginOffer(offered_type_);
      continue;
    }
    const size_t run = field_.whole == 0 ? std::min(offer_.skip, bytes.size()) : 1;
    if (field_.whole > 0) {
      field_.at[field_.bytes] = bytes.data();
      field_.value[field_.bytes] = bytes.front();
      if (++field_.bytes == field_.whole) EndOfferedField();
    }
    offer_.skip -= run;
    bytes.remove_prefix(run);
  }
}

void Frames::BeginOffer(uint8_t* type) {
  const bool acks = (offer_.flags & kAck) != 0;
  field_ = {};
  if (offer_.type == kHeaders || offer_.type == kContinuation) {
    offered_headers_ = (offer_.flags & kEndHeaders) == 0;
  }
  switch (offer_.type) {
    case kSettings:
      if (!acks) {
        windows_.OffersSettings();
        field_.whole = 6;
      } else if (offered_confirmations_ < unconfirmed_.size()) {
        const bool own = unconfirmed_[offered_confirmations_++];
        if (own && type != nullptr) *type = kIgnored;
      }
      break;
    case kWindowUpdate:
      field_.whole = 4;
      break;
    case kData:
    case kHeaders:
      if ((offer_.flags & kEndStream) == 0) break;
      [[fallthrough]];
    case kReset:
      if (const auto stream = streams_.find(offer_.stream); stream != streams_.end()) {
        windows_.Ended(&stream->second.window);
      }
      break;
    default:
      break;
  }
}

void Frames::EndOfferedField() {
  const Field field = std::exchange(field_, {.whole = field_.whole});
  const auto number = [&field](size_t begin, size_t end) {
    uint32_t value = 0;
    for (size_t i = begin; i < end; ++i) value = value << 8 | field.value[i];
    return value;
  };
  if (offer_.type == kSettings) {
    constexpr uint32_t kInitialWindowSize = 4;
    if (number(0, 2) != kInitialWindowSize) return;
    const uint32_t window = windows_.OffersInitialWindow(number(2, 6));
    if (field.writable()) field.Write(2, window);
  } else if (offer_.stream == 0 && !field.writable()) {
    windows_.GivesConnection(number(0, 4));
  } else if (offer_.stream == 0) {
    // Where there are several, all but the last give what they must.
    if (connection_field_.whole > 0) connection_field_.Write(0, windows_.TakeConnection());
    windows_.OffersConnection(number(0, 4));
    connection_field_ = field;
  } else if (const auto stream = streams_.find(offer_.stream); stream != streams_.end()) {
    windows_.Asked(&stream->second.window, number(0, 4));
  }
}

bool Frames::Field::writable() const {
  return std::all_of(at.begin(), at.begin() + whole,
                     [](const uint8_t* byte) { return byte != nullptr; });
}

void Frames::Field::Write(size_t begin, uint32_t value) const {
  for (size_t i = 0; i < 4; ++i) {
    *at[begin + i] = static_cast<uint8_t>(value >> (24 - 8 * i));
  }
}

void Frames::Sent(absl::Span<const uint8_t> bytes) {
  offered_ -= std::min(offered_, bytes.size());
  while (!bytes.empty()) {
    const size_t run = std::min(out_.skip, bytes.size());
    bytes.remove_prefix(run);
    out_.skip -= run;
    if (!bytes.empty() && out_.TakeHead(&bytes)) BeginSentFrame();
  }
}

void Frames::Refill(int64_t now_ns) {
  const int64_t ns = std::min<int64_t>(now_ns - refilled_ns_, 1'000'000'000);
  if (ns < kRefillNs) return;
  refilled_ns_ = now_ns;
  const auto share = [ns](int64_t rate) { return rate * (ns / 1000) / 1'000'000; };
  tiny_.Give(share(limits_.tiny_rate * kTinyUnit));
  control_.Give(share(limits_.control_rate));
  resets_.Give(share(limits_.reset_rate));
  if (now_ns - period_ns_ >= kPeriodNs) {
    period_ns_ = now_ns;
    asked_ -= std::exchange(given_up_then_, std::exchange(given_up_, 0));
  }
}

void Frames::BeginFrame() {
  // gRPC sees a rewritten list only when it is whole, so what may not stand inside one is found here.
  if (rewrites_) {
    const bool continues = in_.type == kContinuation;
    if (continues != in_headers_ || (continues && in_.stream != list_stream_)) {
      return Break(Limit::kHeaderFormat);
    }
  }
  switch (in_.type) {
    case kData:
      BeginData();
      break;
    case kHeaders:
      BeginHeaders(/*continuation=*/false);
      break;
    case kContinuation:
      BeginHeaders(/*continuation=*/true);
      break;
    case kReset:
      // The peer also resets streams that have ended here. Those cost nothing.
      if (!streams_.contains(in_.stream)) {
        TakeControl();
      } else {
        const bool is_over = now_ns_ >= streams_[in_.stream].timeout_end_ns;
        EndStream(in_.stream);
        if (!is_over && !resets_.Take(1)) Break(Limit::kResets);
      }
      break;
    case kSettings:
      if ((in_.flags & kAck) == 0) {
        unconfirmed_.push_back(false);
      } else if (in_.skip == 0) {
        hidden_ = windows_.TakeAcknowledgement();
      }
      [[fallthrough]];
    case kPing:
      TakeControl();
      if ((in_.flags & kAck) != 0) break;
      if (in_.type == kPing) TakePing();
      if (++unread_answers_ > limits_.unread_answers) Break(Limit::kUnreadAnswers);
      break;
    default:
      TakeControl();
  }
}

void Frames::CloseWindows() {
  if (windows_.closed() || windows_.changing()) return;
  windows_.Close();
  for (const auto& [stream, state] : streams_) windows_.Grant(stream);
}

void Frames::BeginHeaders(bool continuation) {
  control_.Give(kControlPerFrame);
  if (!continuation) {
    list_stream_ = in_.stream;
    headers_.Begin();
    continuations_ = 0;
    header_bytes_ = 0;
    priority_bytes_ = (in_.flags & kPriority) != 0 ? kPriorityBytes : 0;
    ends_ = (in_.flags & kEndStream) != 0;
    padded_ = (in_.flags & kPadded) != 0;
    opens_ = 0;
    if (in_.stream > last_stream_ && in_.stream % 2 == 1) {
      seen_before_ = std::exchange(last_stream_, in_.stream);
      opens_ = in_.stream;
      streams_.try_emplace(in_.stream);
      ++opened_;
      if (open() > int64_t{limits_.max_streams} + limits_.streams_slack) Break(Limit::kStreams);
    }
  } else if (++continuations_ > limits_.max_continuations) {
    Break(Limit::kContinuations);
  }
  in_headers_ = (in_.flags & kEndHeaders) == 0;
  header_bytes_ += in_.skip;
  if (header_bytes_ > limits_.max_header_block) Break(Limit::kHeaderBlock);
}

void Frames::ReadHeaders(absl::Span<const uint8_t> bytes) {
  const size_t priority = std::min(priority_bytes_, bytes.size());
  priority_bytes_ -= priority;
  bytes.remove_prefix(priority);
  const bool valid = headers_.Read(bytes);
  const bool split = in_headers_ || continuations_ > 0;
  if (headers_.bytes() > (split ? limits_.max_split_list : limits_.max_header_list)) {
    Break(Limit::kHeaderList);
  }
  if (!valid) Break(Limit::kHeaderFormat);
}

void Frames::BeginData() {
  control_.Give(kControlPerFrame);
  message_bytes_ += static_cast<int64_t>(in_.skip);
  tiny_.Give(static_cast<int64_t>(in_.skip));
  const auto found = streams_.find(in_.stream);
  Windows::Stream* const window = found == streams_.end() ? nullptr : &found->second.window;
  if (!windows_.Received(window, static_cast<int64_t>(in_.skip))) Break(Limit::kUnasked);
  bool free = in_.skip >= limits_.tiny_frame;
  if (found != streams_.end()) {
    Stream& stream = found->second;
    const bool ends = in_.skip == 0 && (in_.flags & kEndStream) != 0;
    if (in_.skip > 0 && stream.frames < 2) {
      ++stream.frames;
      free = free || stream.unread_frames < limits_.unread_frames;
    }
    ++stream.unread_frames;
    free = free || ends;
    stream.under_way += limits_.frame_cost;
    under_way_ += limits_.frame_cost;
  }
  if (!free && !tiny_.Take(kTinyUnit)) Break(Limit::kTinyFrames);
}

void Frames::ReadMessages(Stream* stream, absl::Span<const uint8_t> bytes) {
  while (!bytes.empty() && broken_ == Limit::kNone) {
    size_t run = 0;
    if (stream->prefix_bytes < kPrefixBytes) {
      run = ReadPrefix(stream, bytes);
    } else {
      run = std::min<size_t>(stream->left, bytes.size());
      stream->left -= static_cast<uint32_t>(run);
    }
    bytes.remove_prefix(run);
    stream->under_way += static_cast<int64_t>(run);
    under_way_ += static_cast<int64_t>(run);
    CheckUnasked();
    if (stream->prefix_bytes < kPrefixBytes || stream->left > 0) continue;
    EndMessage(stream);
    // What follows in this frame is the next message's first frame.
    if (!bytes.empty()) stream->frames = 1;
  }
}

// `bytes`: the rest of what was read of the frame. Returns how many of them are the prefix's: a byte
// that says whether the message is compressed, and four with its length.
size_t Frames::ReadPrefix(Stream* stream, absl::Span<const uint8_t> bytes) {
  const size_t begin = read_ - bytes.size();
  const size_t run = std::min(kPrefixBytes - stream->prefix_bytes, bytes.size());
  std::copy_n(bytes.begin(), run, stream->prefix.begin() + stream->prefix_bytes);
  stream->prefix_bytes += static_cast<uint8_t>(run);
  const std::string held = std::exchange(held_, {});
  const size_t not_passed = held.size() + run;  // the last bytes of the prefix
  const size_t left_in_frame = in_.skip + bytes.size() - run;
  if (stream->prefix_bytes < kPrefixBytes) {
    if (left_in_frame == 0) {
      Replace(begin, begin, held);
    } else {
      Replace(begin, begin + run, {});
      const auto* const first = reinterpret_cast<const char*>(bytes.data());
      held_ = held + std::string(first, run);
    }
    return run;
  }
  const auto& prefix = stream->prefix;
  stream->left = uint32_t{prefix[1]} << 24 | uint32_t{prefix[2]} << 16 | uint32_t{prefix[3]} << 8 |
                 uint32_t{prefix[4]};
  if (stream->left <= limits_.max_message) {
    windows_.Began(int64_t{stream->left} + kPrefixBytes, now_ns_);
    Replace(begin, begin, held);
    return run;
  }
  // In two frames, gRPC has a part of the length already, and would believe it.
  if (not_passed < kPrefixBytes) {
    Break(Limit::kUnasked);
    return run;
  }
  ending_ = {.stream = in_.stream, .bytes = stream->left, .ended = (in_.flags & kEndStream) != 0};
  const size_t shorter = left_in_frame + 1;
  std::string shorter_prefix;
  for (const int bits : {32, 24, 16, 8, 0}) {
    shorter_prefix.push_back(static_cast<char>(uint64_t{shorter} >> bits));
  }
  Replace(begin, begin + run, shorter_prefix);
  return run;
}

// The frame with the length of a message that is too large has ended.
void Frames::EndTooLarge() {
  TooLarge ended = std::exchange(ending_, {});
  const auto stream = streams_.find(ended.stream);
  if (stream == streams_.end()) return;  // the server has ended it meanwhile
  ended.answered = stream->second.answered;
  EndStream(ended.stream);
  std::string frames;
  AppendReset(ended.stream, kCancel, &frames);
  AppendFrameHead(0, kSettings, 0, 0, &frames);
  PutIn(frames);
  unconfirmed_.push_back(true);
  resets_of_grpc_.push_back(ended);
  ++too_large_calls_;
  // It cost gRPC a call, as one that its peer cancels.
  if (!resets_.Take(1)) Break(Limit::kResets);
}

// gRPC has confirmed SETTINGS. If they are the door's, it has read the reset before them.
void Frames::ConfirmedByGrpc() {
  if (unconfirmed_.empty()) return;
  const bool own = unconfirmed_.front();
  unconfirmed_.pop_front();
  offered_confirmations_ -= std::min<size_t>(offered_confirmations_, 1);
  if (!own) {
    if (unread_answers_ > 0) --unread_answers_;
    return;
  }
  if (resets_of_grpc_.front().stream != 0) too_large_.push_back(resets_of_grpc_.front());
  resets_of_grpc_.pop_front();
}

void Frames::EndMessage(Stream* stream) {
  under_way_ -= stream->under_way;
  *stream = {.answered = stream->answered,
             .unread_frames = stream->unread_frames,
             .window = stream->window,
             .timeout_end_ns = stream->timeout_end_ns};
}

void Frames::CheckUnasked() {
  const int64_t allowed = asked_ + asked_ / kAskedShare + open() * limits_.unasked_stream +
                          limits_.unasked_slack + std::max(windows_.early_room(), windows_.early());
  if (under_way_ > allowed) Break(Limit::kUnasked);
}

void Frames::TakeControl() {
  if (!control_.Take(1)) Break(Limit::kControlFrames);
}

// Time for pings is added here: Refill counts at most a second, and two pings are further apart.
void Frames::TakePing() {
  pings_.Give(std::max<int64_t>(now_ns_ - pings_ns_, 0));
  pings_ns_ = now_ns_;
  if (!pings_.Take(limits_.min_ping_interval_ns)) Break(Limit::kPings);
}

void Frames::BeginSentFrame() {
  const bool acks = (out_.flags & kAck) != 0;
  if (out_.type == kHeaders || out_.type == kContinuation) {
    sent_headers_ = (out_.flags & kEndHeaders) == 0;
  }
  for (TooLarge& call : resets_of_grpc_) {
    if (call.stream != out_.stream || call.stream == 0) continue;
    const bool ends = out_.type == kReset || (out_.flags & kEndStream) != 0;
    if (out_.type == kHeaders) call.answered = true;
    if (ends && out_.type <= kReset) call.stream = 0;
  }
  switch (out_.type) {
    case kData:
    case kHeaders:
      control_.Give(kControlPerFrame);
      pings_.Give(limits_.min_ping_interval_ns);
      if ((out_.flags & kEndStream) != 0) {
        resets_.Give(1);
        EndStream(out_.stream);
      } else if (const auto stream = streams_.find(out_.stream); stream != streams_.end()) {
        stream->second.answered = true;
      }
      break;
    case kReset:
      EndStream(out_.stream);
      break;
    case kWindowUpdate:
      if (const auto stream = streams_.find(out_.stream); stream != streams_.end()) {
        stream->second.unread_frames = 0;
      }
      break;
    case kSettings:
      if (acks) ConfirmedByGrpc();
      break;
    case kIgnored:
      ConfirmedByGrpc();
      break;
    case kPing:
      if (acks && unread_answers_ > 0) --unread_answers_;
      break;
    default:
      break;
  }
}

void Frames::EndStream(uint32_t id) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) return;
  under_way_ -= found->second.under_way;
  windows_.Ended(&found->second.window);
  streams_.erase(found);
}

}  // namespace logitd::door

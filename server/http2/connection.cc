#include "server/http2/connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace logitd::http2 {
namespace {

// Most that one connection reads in a turn, so that it does not keep others waiting: about 50 us.
constexpr size_t kReadPerTurn = size_t{512} << 10;
// A read goes to the stream's own memory if so much of the frame is left.
constexpr size_t kLeastDirect = size_t{16} << 10;
// Such a read may take this much beyond the frame: the next frame's head and a little of it.
constexpr size_t kAfterDirect = size_t{4} << 10;
// Limits of one write.
constexpr size_t kWriteBytes = size_t{1} << 20;
constexpr size_t kWritePieces = 256;
constexpr int kWritesPerTurn = 2;
constexpr double kVisitsPerFrame = 16;
// A shorter body is copied behind its frame's head.
constexpr size_t kCopiedBody = size_t{2} << 10;

// Memory of a stream and its owner beside the header list, measured and rounded up: 3.7 KiB for
// Score.
constexpr int64_t kOverhead = 4096;
constexpr int64_t kOwnBytes = 2048;  // of a connection: its object, its names, its timer's place
constexpr int64_t kTickNs = 1'000'000'000;
constexpr double kControlFramesPerBody = 4;

int64_t Nanos(absl::Duration time) {
  return time == absl::InfiniteDuration() ? std::numeric_limits<int64_t>::max() / 4
                                          : absl::ToInt64Nanoseconds(time);
}

// Adds to a count that only this thread writes.
void Add(std::atomic<int64_t>* count, int64_t more) {
  count->store(count->load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
}

// Spreads the ends of connections that began together.
int64_t WithJitter(int64_t ns, uint64_t id) {
  return ns - ns / 10 + static_cast<int64_t>(id * 7919 % 1024) * (ns / 5 / 1024);
}

}  // namespace

int64_t Account::held() const {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  return session.load(kRelaxed) + tls.load(kRelaxed) + headers.load(kRelaxed) +
         early.load(kRelaxed) + unsent.load(kRelaxed);
}

// ---- the connection's life

Connection::Connection(Loop* loop, ConnectionHost* host, Held* held, const Limits& limits,
                       const Times& times, int fd, PeerInfo peer, std::unique_ptr<TlsSession> tls)
    : loop_(loop),
      host_(host),
      held_(held),
      limits_(limits),
      times_(times),
      fd_(fd),
      peer_(std::move(peer)),
      tls_(std::move(tls)),
      handshaking_(tls_ != nullptr),
      begun_ns_(loop->now_ns()),
      age_ends_ns_(begun_ns_ + WithJitter(Nanos(times.max_age), peer_.id)),
      idle_since_ns_(begun_ns_),
      received_ns_(begun_ns_),
      control_(limits.control_frames, limits.control_rate, begun_ns_),
      pings_(limits.pings, 1 / std::max(1e-9, absl::ToDoubleSeconds(limits.min_ping_interval)),
             begun_ns_),
      tiny_(limits.tiny_frames, limits.tiny_rate, begun_ns_),
      resets_(limits.resets, limits.reset_rate, begun_ns_),
      tick_([this] { Tick(); }),
      stop_([this] { StopLate(); }) {
  Hold(&account_.session, kOwnBytes);
  CountTls();
}

Connection::~Connection() { Close(); }

void Connection::Start() {
  loop_->Watch(this, fd_, EPOLLIN);
  SetTick();
  if (!handshaking_) StartSession();
}

void Connection::ContinueHandshake() {
  if (!host_->TakeHandshake()) return;  // epoll tells again
  const TlsSession::Step step = tls_->Handshake();
  CountTls();
  switch (step) {
    case TlsSession::Step::kWantRead:
      return loop_->Change(this, fd_, EPOLLIN);
    case TlsSession::Step::kWantWrite:
      return loop_->Change(this, fd_, EPOLLOUT);
    case TlsSession::Step::kFailed:
      host_->OnHandshake(this, tls_->failure(), tls_->failure_text());
      return Close();
    case TlsSession::Step::kDone:
      break;
  }
  handshaking_ = false;
  begun_ns_ = loop_->now_ns();
  host_->OnHandshake(this, HandshakeEnd::kOk, "");
  peer_.certificate_names = tls_->CertificateNames();
  loop_->Change(this, fd_, EPOLLIN);
  StartSession();
  ReadSome();  // what TLS has read ahead wakes no epoll
}

void Connection::Drain() {
  if (fd_ < 0 || std::exchange(draining_, true)) return;
  if (session_ == nullptr) return Close();
  // The first GOAWAY names the highest stream that can be: calls on their way are still taken.
  nghttp2_submit_shutdown_notice(session_);
  drained_ns_ = loop_->now_ns();
  Wake();
}

void Connection::Close(Cut cut) {
  if (fd_ < 0) return;
  if (cut_ == Cut::kNone) cut_ = told_ && cut == Cut::kNone ? Cut::kProtocol : cut;
  if (feeding_) {  // nghttp2 is on the stack: the next read ends it
    shutdown(fd_, SHUT_RDWR);
    return;
  }
  if (std::exchange(closing_, true)) return;
  if (session_ != nullptr && cut_ != Cut::kNone && !told_ && pieces_.empty()) {
    SubmitReason();
    Fill();
    WriteOut();  // as far as it goes
  }
  const std::shared_ptr<Connection> self = shared_from_this();
  tick_.Cancel();
  stop_.Cancel();
  loop_->Unwatch(fd_);
  if (tls_ != nullptr) {
    if (!handshaking_) tls_->SendEnd();
    tls_->Release();
  }
  close(fd_);
  fd_ = -1;
  data_stream_ = nullptr;
  auto streams = std::move(streams_);
  streams_.clear();
  for (auto& [id, stream] : streams) {
    if (auto events = std::exchange(stream->events_, nullptr)) events->OnClosed(Closed::kLostPeer);
  }
  nghttp2_session_del(session_);
  session_ = nullptr;
  pieces_.clear();
  Hold(&account_.session, -kOwnBytes);
  for (std::atomic<int64_t>* count :
       {&account_.tls, &account_.headers, &account_.early, &account_.unsent}) {
    Hold(count, -count->load(std::memory_order_relaxed));
  }
  held_->Flush();
  account_.streams = 0;
  host_->OnConnectionClosed(this, cut_);
  loop_->Retire(self);
}

void Connection::SubmitReason() {
  // With this text gRPC's clients ping half as often on their next connection.
  const std::string_view text = cut_ == Cut::kPings ? "too_many_pings" : NameOf(cut_).name;
  nghttp2_submit_goaway(session_, NGHTTP2_FLAG_NONE,
                        nghttp2_session_get_last_proc_stream_id(session_),
                        cut_ == Cut::kProtocol ? NGHTTP2_PROTOCOL_ERROR : NGHTTP2_ENHANCE_YOUR_CALM,
                        reinterpret_cast<const uint8_t*>(text.data()), text.size());
}

// ---- reading

void Connection::OnReady(uint32_t events) {
  if (fd_ < 0) return;
  if (handshaking_) return ContinueHandshake();
  if ((events & EPOLLOUT) != 0) {
    blocked_ = false;
    loop_->Change(this, fd_, EPOLLIN);
    Wake();
  }
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0 && !reads_on_) ReadSome();
}

absl::Span<std::byte> Connection::DirectRoom() {
  if (data_stream_ == nullptr || data_left_ < kLeastDirect) return {};
  const absl::Span<std::byte> room = data_stream_->events_->Room(kLeastDirect);
  return room.size() < kLeastDirect ? absl::Span<std::byte>()
                                    : room.first(std::min(room.size(), data_left_));
}

void Connection::ReadSome() {
  if (fd_ < 0) return;  // closed after this task was posted; only the task keeps it alive
  const std::shared_ptr<Connection> self = shared_from_this();
  for (size_t left = kReadPerTurn; fd_ >= 0;) {
    absl::Span<std::byte> room = DirectRoom();
    room = room.first(std::min(room.size(), left));
    absl::Span<std::byte> rest = loop_->read_scratch();
    if (!room.empty()) rest = rest.first(kAfterDirect);
    iovec parts[2] = {{room.data(), room.size()}, {rest.data(), rest.size()}};
    const absl::Span<const iovec> all = absl::MakeConstSpan(parts).subspan(room.empty() ? 1 : 0);
    bool drained = false;
    ssize_t got = 0;
    if (tls_ != nullptr) {
      got = tls_->Read(all, &drained);
    } else {
      got = readv(fd_, all.data(), static_cast<int>(all.size()));
      drained = got < static_cast<ssize_t>(room.size() + rest.size());
    }
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) break;
    if (got <= 0) return Close();
    const auto bytes = static_cast<size_t>(got);
    Add(&account_.received, got);
    Add(&held_->received, got);
    received_ns_ = loop_->now_ns();
    pinged_ns_ = 0;
    const size_t direct = std::min(bytes, room.size());
    if (direct > 0 && !Feed(room.first(direct))) return;
    if (bytes > direct && !Feed(rest.first(bytes - direct))) return;
    if (drained) break;
    left -= std::min(left, bytes);
    if (left < kLeastDirect) {
      // Bytes that TLS has read ahead wake no epoll.
      if (tls_ != nullptr && !std::exchange(reads_on_, true)) {
        loop_->Post([self] {
          self->reads_on_ = false;
          self->ReadSome();
        });
      }
      break;
    }
  }
  CountTls();
  Wake();
}

// False: the connection is closed.
bool Connection::Feed(absl::Span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const absl::Span<const std::byte> next = heads_.Next(&bytes);
    ssize_t taken = 0;
    if (!next.empty()) {
      feeding_ = true;
      taken = nghttp2_session_mem_recv(session_, reinterpret_cast<const uint8_t*>(next.data()),
                                       next.size());
      feeding_ = false;
    }
    if (heads_.TakeLeftOut() && cut_ == Cut::kNone) CountControl({.type = NGHTTP2_RST_STREAM});
    if (taken >= 0 && cut_ == Cut::kNone) continue;
    if (cut_ == Cut::kNone) cut_ = taken == NGHTTP2_ERR_FLOODED ? Cut::kUnread : Cut::kProtocol;
    Close(cut_);
    return false;
  }
  return true;
}

int Connection::Refuse(Cut cut) {
  cut_ = cut;
  return NGHTTP2_ERR_CALLBACK_FAILURE;
}

int Connection::CountControl(const nghttp2_frame_hd& frame) {
  const int64_t now_ns = loop_->now_ns();
  const bool asks = frame.type == NGHTTP2_PING && (frame.flags & NGHTTP2_FLAG_ACK) == 0;
  if (asks && !pings_.Take(now_ns)) return Refuse(Cut::kPings);
  const size_t visited = frame.type == NGHTTP2_SETTINGS ? streams_.size() : 0;
  const bool allowed = control_.Take(now_ns, 1 + static_cast<double>(visited) / kVisitsPerFrame);
  return allowed ? 0 : Refuse(Cut::kControlFrames);
}

Stream* Connection::Find(int32_t id) {
  const auto it = streams_.find(id);
  return it == streams_.end() ? nullptr : it->second.get();
}

bool Connection::Misplaced(const nghttp2_frame_hd& frame) const {
  if (frame.type == NGHTTP2_PRIORITY) return frame.stream_id == 0;
  return frame.type == NGHTTP2_HEADERS &&
         std::any_of(gaps_.begin(), gaps_.end(), [&frame](const Gap& gap) {
           return frame.stream_id >= gap.first && frame.stream_id < gap.end;
         });
}

int Connection::OnBeginFrame(const nghttp2_frame_hd* frame) {
  data_stream_ = nullptr;
  if (Misplaced(*frame)) return Refuse(Cut::kProtocol);
  if (frame->type != NGHTTP2_DATA && frame->type != NGHTTP2_HEADERS) {
    if (frame->type == NGHTTP2_RST_STREAM) {
      const Stream* const stream = Find(frame->stream_id);
      if (stream != nullptr && !stream->ended_ && !resets_.Take(loop_->now_ns())) {
        return Refuse(Cut::kResets);
      }
    }
    return CountControl(*frame);
  }
  control_.Add(kControlFramesPerBody);
  if (frame->type == NGHTTP2_HEADERS) return 0;
  tiny_.Add(static_cast<double>(frame->length) / 1024);
  if (frame->length < limits_.tiny_frame && !tiny_.Take(loop_->now_ns())) {
    return Refuse(Cut::kTinyFrames);
  }
  Stream* const stream = Find(frame->stream_id);
  if (stream == nullptr || stream->events_ == nullptr || stream->ended_) return 0;
  if ((frame->flags & NGHTTP2_FLAG_PADDED) != 0) return 0;
  data_stream_ = stream;
  data_left_ = frame->length;
  return 0;
}

int Connection::OnBeginHeaders(const nghttp2_frame* frame) {
  if (frame->headers.cat != NGHTTP2_HCAT_REQUEST) return 0;
  const int32_t next = last_stream_ + 2;
  const int32_t id = frame->hd.stream_id;
  if (id > next && gaps_.size() < kGaps) gaps_.push_back({next, id});
  last_stream_ = id;
  auto stream = std::make_unique<Stream>(this, id);
  stream->granted_ = limits_.early_window;
  stream->moved_ns_ = loop_->now_ns();
  stream->counted_ = kOverhead;
  if (over()) stream->refusal_ = Refusal::kMemory;
  streams_[id] = std::move(stream);
  account_.streams.store(static_cast<int>(streams_.size()), std::memory_order_relaxed);
  Hold(&account_.headers, kOverhead);
  return 0;
}

int Connection::OnHeader(const nghttp2_frame* frame, const uint8_t* name, size_t name_bytes,
                         const uint8_t* value, size_t value_bytes, uint8_t) {
  Stream* const stream = Find(frame->hd.stream_id);
  if (stream == nullptr) return 0;
  stream->header_list_bytes_ += name_bytes + value_bytes + 32;
  if (stream->header_list_bytes_ > limits_.hard_header_list) return Refuse(Cut::kHeaderList);
  if (frame->headers.cat != NGHTTP2_HCAT_REQUEST) return 0;  // trailers, which nobody reads
  if (stream->header_list_bytes_ > limits_.max_header_list) stream->refusal_ = Refusal::kHeaderList;
  if (stream->refusal_ != Refusal::kNone) return 0;
  stream->headers_.Add({reinterpret_cast<const char*>(name), name_bytes},
                       {reinterpret_cast<const char*>(value), value_bytes});
  return 0;
}

int Connection::OnFrame(const nghttp2_frame* frame) {
  if (frame->hd.type == NGHTTP2_SETTINGS) preface_ = true;
  if (frame->hd.type != NGHTTP2_HEADERS && frame->hd.type != NGHTTP2_DATA) return 0;
  Stream* const stream = Find(frame->hd.stream_id);
  if (stream == nullptr) return 0;
  const bool ends = (frame->hd.flags & NGHTTP2_FLAG_END_STREAM) != 0;
  if (ends) stream->peer_ended_ = true;
  if (frame->hd.type == NGHTTP2_DATA) {
    stream->ReturnPadding(frame->data.padlen);
  } else if (!control_.Take(loop_->now_ns(),
                            static_cast<double>(stream->header_list_bytes_ / 1024))) {
    return Refuse(Cut::kControlFrames);
  }
  if (frame->hd.type == NGHTTP2_HEADERS && frame->headers.cat == NGHTTP2_HCAT_REQUEST) {
    stream->counted_ += static_cast<int64_t>(stream->headers_.held_bytes());
    Hold(&account_.headers, static_cast<int64_t>(stream->headers_.held_bytes()));
    stream->events_ = host_->OnStream(stream);
  }
  // A copy: OnEnd may end the stream.
  const std::shared_ptr<StreamEvents> events = stream->ended_ ? nullptr : stream->events_;
  if (ends && events != nullptr) events->OnEnd();
  return 0;
}

int Connection::OnData(uint8_t, int32_t id, const uint8_t* data, size_t bytes) {
  nghttp2_session_consume_connection(session_, bytes);
  Stream* const stream = Find(id);
  if (stream == nullptr) return 0;
  if (stream == data_stream_) data_left_ -= std::min(data_left_, bytes);
  if (stream->ended_ || stream->events_ == nullptr) return 0;
  const std::shared_ptr<StreamEvents> events = stream->events_;
  events->OnBody({reinterpret_cast<const std::byte*>(data), bytes});
  return 0;
}

void Connection::OnStreamClose(int32_t id, uint32_t error) {
  const auto it = streams_.find(id);
  if (it == streams_.end()) return;
  const std::unique_ptr<Stream> stream = std::move(it->second);
  streams_.erase(it);
  if (data_stream_ == stream.get()) data_stream_ = nullptr;
  account_.streams.store(static_cast<int>(streams_.size()), std::memory_order_relaxed);
  Hold(&account_.headers, -stream->counted_);
  stream->HoldUnpaid(-stream->unpaid_bytes_);
  stream->ReleaseEarly();
  if (streams_.empty()) idle_since_ns_ = loop_->now_ns();
  if (stream->events_ == nullptr) return;
  const bool whole = stream->ended_ && stream->unsent_.empty() && error == NGHTTP2_NO_ERROR;
  stream->events_->OnClosed(whole ? Closed::kEnded : Closed::kReset);
}

// ---- writing

void Connection::OnFrameSent(const nghttp2_frame* frame) {
  if (frame->hd.type == NGHTTP2_GOAWAY && frame->goaway.error_code != NGHTTP2_NO_ERROR)
    told_ = true;
  if (frame->hd.type != NGHTTP2_HEADERS && frame->hd.type != NGHTTP2_DATA) return;
  control_.Add(kControlFramesPerBody);
  pings_.Add(1);
  if ((frame->hd.flags & NGHTTP2_FLAG_END_STREAM) == 0) return;
  resets_.Add(1);
  Stream* const stream = Find(frame->hd.stream_id);
  if (stream == nullptr || stream->peer_ended_) return;
  stream->stop_ns_ = loop_->now_ns() + Nanos(times_.stop);
  if (!stop_.set()) loop_->timers().Set(&stop_, stream->stop_ns_);
}

ssize_t Connection::ReadBody(nghttp2_session*, int32_t, uint8_t*, size_t most, uint32_t* flags,
                             nghttp2_data_source* source, void*) {
  auto* const stream = static_cast<Stream*>(source->ptr);
  *flags |= NGHTTP2_DATA_FLAG_NO_COPY;
  const auto unsent = static_cast<size_t>(stream->unsent_bytes_);
  if (unsent == 0 && !stream->ended_) {
    stream->deferred_ = true;
    return NGHTTP2_ERR_DEFERRED;
  }
  if (unsent <= most && stream->ended_) {
    *flags |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM;
    stream->SubmitTrailers();
  }
  return static_cast<ssize_t>(std::min(unsent, most));
}

// Adds a DATA frame to the write: its head, and `bytes` of the stream's body.
int Connection::SendBody(nghttp2_frame*, const uint8_t* head, size_t bytes,
                         nghttp2_data_source* source) {
  auto* const stream = static_cast<Stream*>(source->ptr);
  if (full()) return NGHTTP2_ERR_WOULDBLOCK;
  constexpr size_t kHead = 9;
  Append(head, kHead);
  stream->unsent_bytes_ -= static_cast<int64_t>(bytes);
  stream->moved_ns_ = loop_->now_ns();
  while (bytes > 0) {
    Bytes& first = stream->unsent_.front();
    const absl::Span<const std::byte> left = first.span.subspan(stream->sent_of_first_);
    const size_t run = std::min(bytes, left.size());
    if (run <= kCopiedBody) {
      Append(left.data(), run);
    } else {
      pieces_.push_back({left.data(), run, first.keep, first.payer == Payer::kKeep});
      filled_ += run;
      queued_ += run;
    }
    if (first.payer == Payer::kConnection) stream->HoldUnpaid(-static_cast<int64_t>(run));
    bytes -= run;
    stream->sent_of_first_ += run;
    if (run < left.size()) return 0;
    stream->sent_of_first_ = 0;
    if (first.ends_message) marks_.push_back({queued_, stream->id_});
    stream->unsent_.erase(stream->unsent_.begin());
  }
  return 0;
}

void Connection::Append(const void* data, size_t bytes) {
  std::byte* const to = loop_->write_scratch().data() + scratch_used_;
  std::memcpy(to, data, bytes);
  scratch_used_ += bytes;
  filled_ += bytes;
  queued_ += bytes;
  if (!pieces_.empty() && pieces_.back().keep == nullptr &&
      pieces_.back().data + pieces_.back().bytes == to) {
    pieces_.back().bytes += bytes;
  } else {
    pieces_.push_back({to, bytes, nullptr, false});
  }
}

bool Connection::full() const {
  // The most that is appended at once: a frame of nghttp2's, or a short body with its head.
  constexpr size_t kReserve = size_t{64} << 10;
  return filled_ >= kWriteBytes || pieces_.size() >= kWritePieces ||
         scratch_used_ + kReserve > Loop::kScratchBytes;
}

void Connection::Fill() {
  scratch_used_ = filled_ = 0;
  while (!full()) {
    const uint8_t* data = nullptr;
    const ssize_t bytes = nghttp2_session_mem_send(session_, &data);
    if (bytes < 0) cut_ = Cut::kProtocol;
    if (bytes <= 0) return;
    Append(data, static_cast<size_t>(bytes));
  }
}

void Connection::KeepRest() {
  std::vector<std::byte> rest;  // pieces point into it; a move does not move a vector's bytes
  size_t bytes = 0;
  size_t kept = 0;  // by this connection only
  for (const Piece& piece : pieces_) {
    if (piece.keep == nullptr)
      bytes += piece.bytes;
    else if (!piece.paid)
      kept += piece.bytes;
  }
  rest.reserve(bytes);
  for (Piece& piece : pieces_) {
    if (piece.keep != nullptr) continue;
    const size_t at = rest.size();
    rest.insert(rest.end(), piece.data, piece.data + piece.bytes);
    piece.data = rest.data() + at;
  }
  rest_ = std::move(rest);
  HoldRest(static_cast<int64_t>(bytes + kept));
}

void Connection::HoldRest(int64_t bytes) {
  Hold(&account_.unsent, bytes - std::exchange(rest_bytes_, bytes));
}

bool Connection::WriteOut() {
  while (!pieces_.empty()) {
    iovec parts[kWritePieces];
    const size_t count = std::min(pieces_.size(), kWritePieces);
    for (size_t i = 0; i < count; ++i) {
      parts[i] = {const_cast<std::byte*>(pieces_[i].data), pieces_[i].bytes};
    }
    ssize_t sent = 0;
    if (tls_ != nullptr) {
      sent = tls_->Write(absl::MakeConstSpan(parts, count));
    } else {
      msghdr message = {};
      message.msg_iov = parts;
      message.msg_iovlen = count;
      sent = sendmsg(fd_, &message, MSG_NOSIGNAL);
    }
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno != EAGAIN) {
      pieces_.clear();
      Close();
      return false;
    }
    if (sent < 0) {
      KeepRest();
      blocked_ = true;
      blocked_ns_ = loop_->now_ns();
      loop_->Change(this, fd_, EPOLLIN | EPOLLOUT);
      return false;
    }
    CountWritten(static_cast<size_t>(sent));
  }
  if (rest_bytes_ > 0) {
    HoldRest(0);
    std::vector<std::byte>().swap(rest_);
  }
  return true;
}

void Connection::CountWritten(size_t bytes) {
  Add(&account_.sent, static_cast<int64_t>(bytes));
  Add(&held_->sent, static_cast<int64_t>(bytes));
  written_ += bytes;
  size_t whole = 0;
  while (whole < pieces_.size() && pieces_[whole].bytes <= bytes) bytes -= pieces_[whole++].bytes;
  pieces_.erase(pieces_.begin(), pieces_.begin() + static_cast<ptrdiff_t>(whole));
  if (bytes > 0) {
    pieces_.front().data += bytes;
    pieces_.front().bytes -= bytes;
  }
  size_t past = 0;
  while (past < marks_.size() && marks_[past].at <= written_) {
    Stream* const stream = Find(marks_[past++].stream);
    if (stream != nullptr && stream->events_ != nullptr) stream->events_->OnSent();
  }
  marks_.erase(marks_.begin(), marks_.begin() + static_cast<ptrdiff_t>(past));
}

void Connection::OnTurnEnd() {
  held_->Flush();
  if (fd_ < 0 || session_ == nullptr || blocked_) return;
  const std::shared_ptr<Connection> self = shared_from_this();
  // The rest of the last write goes first.
  if (!pieces_.empty() && !WriteOut()) return;
  bool all = false;
  ending_turn_ = true;  // a Wake means the next round
  for (int i = 0; i < kWritesPerTurn && !all; ++i) {
    Fill();
    if (cut_ != Cut::kNone) return Close(cut_);
    all = pieces_.empty();
    if (!all && !WriteOut()) break;
  }
  ending_turn_ = false;
  CountTls();
  if (fd_ < 0 || blocked_) return;
  // The rest waits for the next turn, so that other connections get theirs.
  if (!all) loop_->Post([self] { self->Wake(); });
  EndIfDone();
}

void Connection::Wake() {
  if (!ending_turn_ && fd_ >= 0) loop_->AtTurnEnd(this);
}

void Connection::EndIfDone() {
  const bool over =
      nghttp2_session_want_read(session_) == 0 && nghttp2_session_want_write(session_) == 0;
  if (over || (going_away_ && streams_.empty())) Close();
}

void Connection::CountTls() {
  if (tls_ == nullptr || fd_ < 0) return;
  Hold(&account_.tls, tls_->held_bytes() - account_.tls.load(std::memory_order_relaxed));
}

// Gives back memory that a busy time has left.
void Connection::Shrink() {
  if (!streams_.empty() || !pieces_.empty()) return;
  decltype(streams_)().swap(streams_);
  pieces_.shrink_to_fit();
  marks_.shrink_to_fit();
}

// ---- times

void Connection::SetTick() {
  const int64_t shortest = std::min(
      {Nanos(times_.send), Nanos(times_.preface), Nanos(times_.handshake), Nanos(times_.max_idle),
       Nanos(times_.max_age), Nanos(times_.keepalive), Nanos(times_.keepalive_timeout)});
  loop_->timers().Set(&tick_,
                      loop_->now_ns() + std::clamp(shortest / 4, int64_t{1'000'000}, kTickNs));
}

void Connection::Tick() {
  const int64_t now_ns = loop_->now_ns();
  const auto over = [now_ns](int64_t since_ns, absl::Duration time) {
    return now_ns - since_ns >= Nanos(time);
  };
  if (handshaking_) {
    if (over(begun_ns_, times_.handshake)) {
      host_->OnHandshake(this, HandshakeEnd::kTimeout, "it took too long");
      return Close();
    }
    return SetTick();
  }
  if (!preface_ && over(begun_ns_, times_.preface)) return Close();
  if (blocked_ && over(blocked_ns_, times_.send)) return Close(Cut::kUnread);
  if (pinged_ns_ == 0 && over(received_ns_, times_.keepalive)) {
    pinged_ns_ = now_ns;
    nghttp2_submit_ping(session_, NGHTTP2_FLAG_NONE, nullptr);
    Wake();
  } else if (pinged_ns_ != 0 && over(pinged_ns_, times_.keepalive_timeout)) {
    return Close(Cut::kKeepalive);
  }
  if (now_ns >= age_ends_ns_ || (streams_.empty() && over(idle_since_ns_, times_.max_idle)))
    Drain();
  if (draining_ && !going_away_ && now_ns - drained_ns_ >= kTickNs) {
    going_away_ = true;
    nghttp2_submit_goaway(session_, NGHTTP2_FLAG_NONE,
                          nghttp2_session_get_last_proc_stream_id(session_), NGHTTP2_NO_ERROR,
                          nullptr, 0);
    Wake();
  }
  CheckStuck();
  Shrink();
  SetTick();
}

// Tells peers to stop whose requests still go on some time after the end of the response.
void Connection::StopLate() {
  int64_t next_ns = 0;
  for (const auto& [id, stream] : streams_) {
    if (stream->stop_ns_ == 0 || stream->peer_ended_) continue;
    if (stream->stop_ns_ <= loop_->now_ns()) {
      nghttp2_submit_rst_stream(session_, NGHTTP2_FLAG_NONE, id, NGHTTP2_NO_ERROR);
    } else if (next_ns == 0 || stream->stop_ns_ < next_ns) {
      next_ns = stream->stop_ns_;
    }
  }
  if (next_ns != 0) loop_->timers().Set(&stop_, next_ns);
  Wake();
}

// Resets the streams whose peer has taken nothing of their response for too long.
void Connection::CheckStuck() {
  absl::InlinedVector<int32_t, 8> stuck;
  for (const auto& [id, stream] : streams_) {
    if ((stream->unsent_bytes_ > 0 || stream->ended_) &&
        loop_->now_ns() - stream->moved_ns_ >= Nanos(times_.send)) {
      stuck.push_back(id);
    }
  }
  for (const int32_t id : stuck) {
    if (Stream* const stream = Find(id)) stream->Reset(NGHTTP2_CANCEL);
  }
}

}  // namespace logitd::http2

// What gRPC reads and writes on a connection: the account, and the calls that are answered here.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/door/answer.h"
#include "server/door/connection.h"
#include "server/door/edit.h"

namespace logitd::door {
namespace {

// Tried and dropped, bench/results/cpu/overload_lines.json: pauses of 2 and 5 ms between the reads of a
// connection whose calls are refused (SO_RCVLOWAT), and a window for all of the message in place of
// 64 KiB where a call passes. Neither got more calls done.
//
// Calls that one read may refuse, so that the answers are bounded: about 64 KiB.
constexpr size_t kMostRefused = 256;

// Bytes of answers that may wait for a peer that does not read. Twice what refusals can make.
constexpr size_t kMostWaiting = size_t{128} << 10;

// Wide windows that no large message used for so long go to a connection that wants them.
constexpr int64_t kUnusedNs = 1'000'000'000;

constexpr uint32_t kEnhanceYourCalm = 11;  // HTTP/2's number

// Calls `read` for the first `bytes` of `parts`.
template <typename Read>
void ForEachPart(absl::Span<const iovec> parts, size_t bytes, Read read) {
  for (const iovec& part : parts) {
    if (bytes == 0) return;
    const size_t run = std::min(bytes, part.iov_len);
    read(absl::MakeConstSpan(static_cast<const uint8_t*>(part.iov_base), run));
    bytes -= run;
  }
}

// Tells the reader how many bytes the kernel still has, as TCP_INQ asks for: 0 saves gRPC a read
// that would find nothing. Otherwise it says nothing, and gRPC reads on until there is nothing.
void TellInQueue(msghdr* message, bool drained) {
  cmsghdr* const control = drained ? CMSG_FIRSTHDR(message) : nullptr;
  if (control == nullptr || message->msg_controllen < CMSG_SPACE(sizeof(int))) {
    message->msg_controllen = 0;
    return;
  }
  const int left = 0;
  *control = {.cmsg_len = CMSG_LEN(sizeof(left)), .cmsg_level = SOL_TCP, .cmsg_type = TCP_CM_INQ};
  std::memcpy(CMSG_DATA(control), &left, sizeof(left));
  message->msg_controllen = CMSG_SPACE(sizeof(left));
}

// The kernel says that it has no more bytes. If some come, it wakes the reader.
bool SaysNothingLeft(msghdr& message) {
  for (cmsghdr* at = CMSG_FIRSTHDR(&message); at != nullptr; at = CMSG_NXTHDR(&message, at)) {
    if (at->cmsg_level != SOL_TCP || at->cmsg_type != TCP_CM_INQ) continue;
    int left = 1;
    std::memcpy(&left, CMSG_DATA(at), sizeof(left));
    return left == 0;
  }
  return false;
}

ssize_t ReadTls(TlsSession& session, msghdr* message) {
  bool drained = false;
  const ssize_t got = session.Read({message->msg_iov, message->msg_iovlen}, &drained);
  TellInQueue(message, drained);
  message->msg_flags = 0;
  return got;
}

// The end of a call, for its peer. A call that has headers of an answer can only be reset.
void AppendTooLarge(const Frames::TooLarge& call, uint32_t most, std::string* out) {
  constexpr int kInvalidArgument = 3;
  // gRPC's clients make RESOURCE_EXHAUSTED of this reason.
  if (call.answered) return AppendReset(call.stream, kEnhanceYourCalm, out);
  const std::string fields = EncodeStatus(
      kInvalidArgument,
      absl::StrCat("message: got ", call.bytes, " bytes, allowed 0..", most,
                   ", which is --max-request-bytes and a little; send fewer rows a call"));
  AppendEnd(call.stream, fields, call.ended, out);
}

absl::Span<const iovec> PartsOf(const msghdr& message) {
  return {message.msg_iov, message.msg_iovlen};
}

}  // namespace

ssize_t Connection::ReadSome(int fd, msghdr* message, int flags) {
  TlsSession* const session = tls();
  return session != nullptr ? ReadTls(*session, message) : syscall(SYS_recvmsg, fd, message, flags);
}

ssize_t Connection::Receive(int fd, msghdr* message, int flags) {
  if (answers_wait_) {
    absl::MutexLock lock(&send_mutex_);
    WriteAnswers(fd);
  }
  const auto control_room = message->msg_controllen;
  std::vector<Frames::Edit> edits;
  std::vector<Refused> refused;
  // A read of which nothing is left for gRPC is followed by another one, unless there is nothing to
  // read: the kernel may not wake it again. Each such read has a part of a header list or of a
  // message's length, whose size is limited.
  while (ready_.empty()) {
    message->msg_controllen = control_room;
    const ssize_t got = ReadSome(fd, message, flags);
    if (got <= 0) return got;
    const auto bytes = static_cast<size_t>(got);
    const bool drained = tls() == nullptr && SaysNothingLeft(*message);
    bool tells = false;
    if (!Account(fd, PartsOf(*message), bytes, &edits, &refused, &tells)) {
      errno = ECONNRESET;
      return -1;
    }
    const size_t left =
        edits.empty() ? bytes : ApplyEdits(PartsOf(*message), bytes, edits, &ready_);
    if (!refused.empty() || tells) Answer(fd, std::exchange(refused, {}));
    if (!ready_.empty()) message->msg_controllen = 0;  // there is more than the kernel has
    if (left > 0) return static_cast<ssize_t>(left);
    if (drained && ready_.empty()) {
      errno = EAGAIN;
      return -1;
    }
  }
  const size_t copied = CopyToParts(ready_, PartsOf(*message));
  ready_.erase(0, copied);
  message->msg_controllen = 0;
  message->msg_flags = 0;
  return static_cast<ssize_t>(copied);
}

bool Connection::Account(int fd, absl::Span<const iovec> parts, size_t bytes,
                         std::vector<Frames::Edit>* edits, std::vector<Refused>* refused,
                         bool* tells) {
  received_.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  const int64_t now = absl::GetCurrentTimeNanos();
  const bool may_refuse = !turnstile_.empty() && !answers_wait_ && !owner_->ended_;
  const int64_t turnstile_now = may_refuse ? MonotonicNanos() : 0;
  const auto judge = [&](uint32_t stream, bool ends, const HeaderList& list) {
    if (!may_refuse || refused->size() >= kMostRefused) return false;
    std::optional<Turnstile::Answer> answer = turnstile_.Ask(list, turnstile_now);
    if (!answer.has_value()) return false;
    refused->push_back({.stream = stream, .ended = ends, .answer = *std::move(answer)});
    return true;
  };
  Limit broken = Limit::kNone;
  int64_t too_large = 0;
  bool lacks_room = false;
  {
    absl::MutexLock lock(&mutex_);
    if (cut_ != Limit::kNone) return false;
    frames_.BeginRead();
    if (turnstile_.empty()) frames_.EndRefusals();
    ForEachPart(parts, bytes,
                [&](absl::Span<const uint8_t> part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                  broken = frames_.Received(part, now, judge);
                });
    std::swap(*edits, frames_.edits());
    *tells = frames_.has_replies();
    lacks_room = frames_.TakeLackOfRoom();
    too_large =
        frames_.too_large_calls() - std::exchange(too_large_calls_, frames_.too_large_calls());
  }
  if (too_large > 0) owner_->CountTooLarge(static_cast<size_t>(too_large));
  if (lacks_room) owner_->ReclaimEarlyRoom();
  if (broken == Limit::kNone) return true;
  if (broken == Limit::kPings) TellTooManyPings(fd);
  Cut(broken);
  return false;
}

void Connection::TellTooManyPings(int fd) {
  absl::MutexLock lock(&send_mutex_);
  AppendGoAway(kEnhanceYourCalm, "too_many_pings", &answers_);
  WriteAnswers(fd);
}

void Connection::Answer(int fd, const std::vector<Refused>& refused) {
  std::string frames;
  constexpr size_t kRoom = 300;  // for usual answers
  frames.reserve(refused.size() * kRoom);
  for (const Refused& call : refused) {
    AppendEnd(call.stream, call.answer.fields, call.ended, &frames);
  }
  bool unread = false;
  {
    absl::MutexLock lock(&send_mutex_);
    answers_ += frames;
    WriteAnswers(fd);
    unread = answers_.size() - answered_ > kMostWaiting;
  }
  if (unread) Cut(Limit::kUnreadAnswers);
  for (const Refused& call : refused) {
    call.answer.judge->OnRefused(call.answer.reason, call.answer.echoed);
  }
}

void Connection::WriteAnswers(int fd) {
  TlsSession* const session = tls();
  if (!answers_begun_) {
    bool may_begin = session == nullptr || !session->HasUnfinishedWrite();
    absl::MutexLock lock(&mutex_);
    may_begin = may_begin && frames_.between_sent_frames();
    answers_wait_ = !may_begin && (!answers_.empty() || frames_.has_replies());
    if (!may_begin) return;
    if (frames_.has_replies()) {
      answers_ += frames_.TakeReplies();
      answers_begun_ = true;  // they come before all that gRPC offers from here on
    }
  }
  if (answers_.empty()) return;
  iovec part = {answers_.data() + answered_, answers_.size() - answered_};
  const msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
  const ssize_t put = session != nullptr
                          ? session->Write({&part, 1})
                          : syscall(SYS_sendmsg, fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (put > 0) CountAnswered(static_cast<size_t>(put));
  const bool failed = put < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR;
  if (failed) CountAnswered(answers_.size() - answered_);
  answers_begun_ =
      answers_begun_ || answered_ > 0 || (session != nullptr && session->HasUnfinishedWrite());
  answers_begun_ = answers_begun_ && !answers_.empty();
  answers_wait_ = !answers_.empty();
}

void Connection::CountAnswered(size_t bytes) {
  answered_ += bytes;
  sent_.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  if (answered_ < answers_.size()) return;
  std::string().swap(answers_);
  answered_ = 0;
  answers_begun_ = false;
}

ssize_t Connection::Send(int fd, const msghdr* message, int flags) {
  absl::MutexLock lock(&send_mutex_);
  if (!answers_.empty()) WriteAnswers(fd);
  if (answers_begun_) {
    errno = EAGAIN;
    return -1;
  }
  TlsSession* const session = tls();
  const absl::Span<const iovec> parts = PartsOf(*message);
  bool may_follow = false;
  {
    absl::MutexLock frames_lock(&mutex_);
    frames_.Offer(parts);
    may_follow = frames_.offers_whole_frames();
    if (may_follow && answers_.empty()) answers_ = frames_.TakeReplies();
  }
  if (may_follow && session == nullptr && !answers_.empty() && parts.size() < IOV_MAX) {
    return SendBoth(fd, *message, flags);
  }
  const ssize_t put =
      session != nullptr ? session->Write(parts) : syscall(SYS_sendmsg, fd, message, flags);
  const int error = errno;
  if (put > 0) CountSent(parts, static_cast<size_t>(put));
  WriteAnswers(fd);
  errno = error;
  return put;
}

// Answers that come after gRPC's bytes, in one write with them.
ssize_t Connection::SendBoth(int fd, const msghdr& message, int flags) {
  const absl::Span<const iovec> parts = PartsOf(message);
  size_t bytes = 0;
  for (const iovec& part : parts) bytes += part.iov_len;
  std::vector<iovec> all(parts.begin(), parts.end());
  all.push_back({.iov_base = answers_.data(), .iov_len = answers_.size()});
  msghdr both = message;
  both.msg_iov = all.data();
  both.msg_iovlen = all.size();
  const ssize_t put = syscall(SYS_sendmsg, fd, &both, flags);
  if (put <= 0) {
    answers_wait_ = true;
    return put;
  }
  const size_t grpcs = std::min(static_cast<size_t>(put), bytes);
  CountSent(parts, grpcs);
  CountAnswered(static_cast<size_t>(put) - grpcs);
  answers_begun_ = answered_ > 0;
  if (!answers_.empty()) WriteAnswers(fd);
  return static_cast<ssize_t>(grpcs);
}

bool Connection::NarrowIfUnused(int64_t now_ns) {
  absl::MutexLock send_lock(&send_mutex_);
  int fd = -1;
  {
    absl::MutexLock lock(&mutex_);
    const Windows& windows = frames_.windows();
    if (fd_ < 0 || !windows.wide() || windows.changing()) return false;
    if (now_ns - windows.last_large_ns() < kUnusedNs) return false;
    frames_.Narrow();
    fd = fd_;
  }
  WriteAnswers(fd);
  return true;
}

void Connection::CountSent(absl::Span<const iovec> parts, size_t bytes) {
  sent_.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  std::vector<Frames::TooLarge> too_large;
  const uint32_t most = owner_->options().frames.max_message;
  absl::MutexLock lock(&mutex_);
  ForEachPart(parts, bytes,
              [&](absl::Span<const uint8_t> part)
                  ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { frames_.Sent(part); });
  std::swap(too_large, frames_.too_large());
  for (const Frames::TooLarge& call : too_large) AppendTooLarge(call, most, &answers_);
}

}  // namespace logitd::door

// Rings: what the server's side takes out of shared memory, what it puts there, and when it stops.
#include "server/arena/ring.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/sockios.h>
#include <poll.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "tests/arena/held_file.h"
#include "tests/becomes.h"
#include "tests/manual_clock.h"

namespace logitd::arena {
namespace {

using ::logitd::testing::Becomes;
using ::testing::HasSubstr;

constexpr int64_t kArenaBytes = 1 << 16;
constexpr RingAsk kShape = {.slots = 4, .entry_bytes = 256, .answer_bytes = 192, .offset = 4096};

int OpenDescriptors() {
  return static_cast<int>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                                        std::filesystem::directory_iterator()));
}

// The memory of a lease, as the server and as a client sees it. The client is written by hand, so
// that it can break the protocol.
class Peer {
 public:
  explicit Peer(const RingAsk& shape = kShape) : shape_(shape) {
    fd_ = memfd_create("ring", MFD_CLOEXEC);
    EXPECT_EQ(ftruncate(fd_, kArenaBytes), 0);
    data_ =
        static_cast<char*>(mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0));
    arena_ = *Arena::Map(fd_, kArenaBytes);
  }
  ~Peer() { munmap(data_, kArenaBytes); }

  const std::shared_ptr<const Arena>& arena() const { return arena_; }
  int fd() const { return fd_; }
  char* data() const { return data_; }
  char* ring() const { return data_ + shape_.offset; }
  char* submission(uint64_t n) const {
    return ring() + kSubmissionsAt + n % shape_.slots * shape_.entry_bytes;
  }
  char* completion(uint64_t n) const {
    return ring() + kSubmissionsAt + shape_.slots * shape_.entry_bytes +
           n % shape_.slots * shape_.answer_bytes;
  }
  void Submit(uint64_t n, const std::string& message, RingEntry head = {.method = 1}) const {
    if (head.bytes == 0) head.bytes = static_cast<uint32_t>(message.size());
    head.tag = 1000 + n;
    std::memcpy(submission(n), &head, sizeof(head));
    std::memcpy(submission(n) + sizeof(head), message.data(), message.size());
    __atomic_store_n(submission(n), static_cast<char>(RingPhase(n, shape_.slots)),
                     __ATOMIC_RELEASE);
  }
  bool Completed(uint64_t n) const {
    return __atomic_load_n(completion(n), __ATOMIC_ACQUIRE) ==
           static_cast<char>(RingPhase(n, shape_.slots));
  }
  RingCompletion Head(uint64_t n) const {
    RingCompletion head;
    std::memcpy(&head, completion(n), sizeof(head));
    return head;
  }
  std::string Body(uint64_t n) const {
    return {completion(n) + sizeof(RingCompletion), Head(n).bytes};
  }
  bool ServerAsleep() const { return __atomic_load_n(ring() + kServerAsleepAt, __ATOMIC_SEQ_CST); }
  void SetAsleep(bool asleep) const {
    __atomic_store_n(ring() + kClientAsleepAt, static_cast<char>(asleep), __ATOMIC_SEQ_CST);
  }

 private:
  const RingAsk shape_;
  int fd_;  // the arena's
  char* data_;
  std::shared_ptr<const Arena> arena_;
};

TEST(RingAskTest, RingsThatCannotBeAreRefused) {
  struct Case {
    RingAsk ask;
    std::string text;
  };
  const auto with = [](auto change) {
    RingAsk ask = kShape;
    change(ask);
    return ask;
  };
  const Case cases[] = {
      {with([](RingAsk& a) {
         a.magic = {'L', 'D', 'A', 'R'};
       }),
       "begins with \"LDAR\""},
      {with([](RingAsk& a) { a.unused = 1; }), "has 1 in its unused field"},
      {with([](RingAsk& a) { a.version = 2; }), "got version 2 of the protocol, allowed 1"},
      {with([](RingAsk& a) { a.slots = 0; }), "ring.slots: got 0, allowed 1..256"},
      {with([](RingAsk& a) { a.slots = 257; }), "ring.slots: got 257"},
      {with([](RingAsk& a) { a.entry_bytes = 64; }), "ring.entry_bytes: got 64"},
      {with([](RingAsk& a) { a.entry_bytes = 65600; }), "ring.entry_bytes: got 65600"},
      {with([](RingAsk& a) { a.entry_bytes = 129; }), "ring.entry_bytes: got 129"},
      {with([](RingAsk& a) { a.answer_bytes = 0; }), "ring.answer_bytes: got 0"},
      {with([](RingAsk& a) { a.offset = 1; }), "ring.offset: got 1"},
      {with([](RingAsk& a) { a.offset = kArenaBytes; }), "ring.offset: got 65536"},
      {with([](RingAsk& a) { a.offset = UINT64_MAX - 63; }),
       "ring.offset: got 18446744073709551552"},
      {with([](RingAsk& a) {
         a.slots = 256;
         a.entry_bytes = 65536;
       }),
       "ring.offset: got 4096"},
  };
  for (const Case& c : cases) {
    const absl::Status status = CheckRing(c.ask, sizeof(c.ask), kArenaBytes);
    EXPECT_FALSE(status.ok()) << c.text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.text));
  }
  EXPECT_FALSE(CheckRing(kShape, 31, kArenaBytes).ok());
  EXPECT_FALSE(CheckRing(kShape, 33, kArenaBytes).ok());
  EXPECT_TRUE(CheckRing(kShape, sizeof(kShape), kArenaBytes).ok());
  RingAsk last = kShape;
  last.offset = kArenaBytes - RingBytes(4, 256, 192);
  EXPECT_TRUE(CheckRing(last, sizeof(last), kArenaBytes).ok());
  last.offset += 64;
  EXPECT_FALSE(CheckRing(last, sizeof(last), kArenaBytes).ok());
}

TEST(RingPagesTest, SubmissionsComeInOrderAroundTheRing) {
  const Peer peer;
  RingPages pages(peer.arena(), kShape);
  RingRequest request;
  for (uint64_t n = 0; n < 20; ++n) {
    EXPECT_FALSE(pages.Ready());
    EXPECT_FALSE(*pages.Take(&request)) << n;
    peer.Submit(n, absl::StrCat("message ", n),
                {.method = 2, .priority = static_cast<uint8_t>(n % 2), .timeout_us = n});
    ASSERT_TRUE(pages.Ready());
    ASSERT_TRUE(*pages.Take(&request)) << n;
    EXPECT_EQ(request.message, absl::StrCat("message ", n));
    EXPECT_EQ(request.tag, 1000 + n);
    EXPECT_EQ(request.method, RingMethod::kSample);
    EXPECT_EQ(request.is_batch, n % 2 == 1);
    EXPECT_EQ(request.timeout, n == 0 ? absl::InfiniteDuration() : absl::Microseconds(n));
  }
}

TEST(RingPagesTest, AMessageOfAnyLengthComesWhole) {
  constexpr RingAsk kLong = {.slots = 2, .entry_bytes = 4096, .answer_bytes = 192, .offset = 64};
  const Peer peer(kLong);
  RingPages pages(peer.arena(), kLong);
  RingRequest request;
  uint64_t n = 0;
  for (const size_t bytes : {0, 1, 447, 448, 449, 2000, 4064}) {
    std::string message(bytes, '\0');
    for (size_t i = 0; i < bytes; ++i) message[i] = static_cast<char>(i * 7 + bytes);
    peer.Submit(n++, message);
    ASSERT_TRUE(*pages.Take(&request)) << bytes;
    EXPECT_EQ(request.message, message);
  }
}

TEST(RingPagesTest, CompletionsSayWhoseTheyAreAndWhatWentWrong) {
  const Peer peer;
  RingPages pages(peer.arena(), kShape);
  EXPECT_EQ(pages.max_message_bytes(), 160u);
  for (uint64_t n = 0; n < 12; ++n) {
    EXPECT_FALSE(peer.Completed(n));
    const RingReply reply =
        n % 3 == 0   ? RingReply{.tag = n, .message = std::string(160, 'a')}
        : n % 3 == 1 ? RingReply{.tag = n,
                                 .status = absl::ResourceExhaustedError(std::string(500, 'e')),
                                 .retry_after = absl::Milliseconds(7)}
                     : RingReply{.tag = n, .message = std::string(161, 'a')};
    EXPECT_TRUE(pages.Post(reply).ok());
    ASSERT_TRUE(peer.Completed(n));
    EXPECT_EQ(peer.Head(n).tag, n);
    const auto code = static_cast<absl::StatusCode>(peer.Head(n).code);
    if (n % 3 == 0) {
      EXPECT_EQ(code, absl::StatusCode::kOk);
      EXPECT_EQ(peer.Body(n), std::string(160, 'a'));
    } else if (n % 3 == 1) {
      EXPECT_EQ(code, absl::StatusCode::kResourceExhausted);
      EXPECT_EQ(peer.Head(n).retry_ms, 7u);
      EXPECT_EQ(peer.Body(n), std::string(160, 'e'));
    } else {
      EXPECT_EQ(code, absl::StatusCode::kInternal);
      EXPECT_THAT(peer.Body(n), HasSubstr("got an answer of 161 bytes, allowed 160"));
    }
  }
  // Nothing else was written.
  for (int64_t i = 0; i < 4096; ++i) ASSERT_EQ(peer.data()[i], 0);
  const auto end = static_cast<int64_t>(4096 + RingBytes(4, 256, 192));
  for (int64_t i = end; i < kArenaBytes; ++i) ASSERT_EQ(peer.data()[i], 0);
}

TEST(RingPagesTest, HeadsThatBreakTheProtocolAreToldApart) {
  const struct {
    RingEntry head;
    std::string text;
  } kCases[] = {
      {{.method = 0}, "method 0"},
      {{.method = 3}, "method 3"},
      {{.method = 1, .priority = 2}, "priority 2"},
      {{.method = 1, .unused = 1}, "1, 0 in unused fields"},
      {{.method = 1, .unused2 = 9}, "0, 9 in unused fields"},
      {{.method = 1, .bytes = 225}, "225 bytes, allowed 0..224"},
      {{.method = 1, .bytes = UINT32_MAX}, "4294967295 bytes"},
  };
  for (const auto& broken : kCases) {
    const Peer peer;
    RingPages pages(peer.arena(), kShape);
    peer.Submit(0, "", broken.head);
    RingRequest request;
    const absl::Status status = pages.Take(&request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(broken.text));
  }
  const Peer peer;
  RingPages pages(peer.arena(), kShape);
  peer.Submit(0, std::string(224, 'x'));
  RingRequest request;
  EXPECT_TRUE(*pages.Take(&request));
  EXPECT_EQ(request.message, std::string(224, 'x'));
}

// Answers with the message itself, in reverse where the test asks for it. A thread that has nothing
// to do sleeps only when the test lets time pass.
class EchoRings : public ::testing::Test {
 protected:
  struct Work final : RingWork {
    void Drop() override { dropped = true; }
    std::atomic<bool> dropped = false;
  };

  EchoRings() { before_ = OpenDescriptors(); }
  ~EchoRings() override {
    rings_.reset();
    held_.clear();
    if (client_ >= 0) close(client_);
    // The last thread lets go of its descriptors just after the ring is counted as ended.
    EXPECT_TRUE(Becomes([this] { return OpenDescriptors() == before_; }))
        << OpenDescriptors() - before_ << " descriptors are left";
  }

  // True: `condition` comes true while time passes.
  bool InTime(const std::function<bool()>& condition) {
    return Becomes([&] {
      clock_.Advance(absl::Milliseconds(1));
      return condition();
    });
  }
  bool FallsAsleep(const Peer& peer) {
    return InTime([&] { return peer.ServerAsleep(); });
  }

  std::unique_ptr<Rings> MakeRings(int cores) {
    return std::make_unique<Rings>(
        [this](const std::shared_ptr<Ring>& ring, uint64_t serial, RingRequest request) {
          return Serve(ring, serial, std::move(request));
        },
        cores, clock_);
  }

  std::shared_ptr<Ring> Open(const Peer& peer) {
    int sockets[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets), 0);
    client_ = sockets[0];
    auto ring = rings_->Open(peer.arena(), kShape, sockets[1], {.pid = 1, .uid = 2, .gid = 3});
    EXPECT_TRUE(ring.ok()) << ring.status();
    close(sockets[1]);
    return *ring;
  }

  std::shared_ptr<RingWork> Serve(const std::shared_ptr<Ring>& ring, uint64_t serial,
                                  RingRequest request) {
    auto work = std::make_shared<Work>();
    auto answer = [ring, serial, tag = request.tag, message = request.message] {
      if (message.starts_with("make")) {
        const auto make = [ring, message] {
          return absl::StrCat(ring->IsOwnThread() ? "made " : "made by another thread ", message);
        };
        return ring->Complete(serial, {.tag = tag}, nullptr, make);
      }
      ring->Complete(serial, {.tag = tag, .message = "echo " + message}, nullptr);
    };
    absl::MutexLock lock(&mutex_);
    alone_.push_back(request.alone);
    if (hold_) {
      held_.push_back({work, answer});
    } else {
      answer();
      if (request.alone) ring->PostNow();
    }
    return work;
  }

  // From here on calls wait for AnswerHeldInReverse.
  void Hold() {
    absl::MutexLock lock(&mutex_);
    hold_ = true;
  }
  void AnswerHeldInReverse() {
    std::vector<std::function<void()>> answers;
    {
      absl::MutexLock lock(&mutex_);
      for (auto it = held_.rbegin(); it != held_.rend(); ++it) answers.push_back(it->second);
      held_.clear();
    }
    for (const auto& answer : answers) answer();
  }
  size_t held() {
    absl::MutexLock lock(&mutex_);
    return held_.size();
  }

  void Bell() const {
    const char bell = 0;
    EXPECT_EQ(send(client_, &bell, 1, MSG_NOSIGNAL), 1);
  }

  int before_ = 0;
  int client_ = -1;
  absl::Mutex mutex_;
  bool hold_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<bool> alone_ ABSL_GUARDED_BY(mutex_);  // of each call
  std::vector<std::pair<std::shared_ptr<Work>, std::function<void()>>> held_;
  ManualClock clock_;
  std::unique_ptr<Rings> rings_ = MakeRings(/*cores=*/2);
};

TEST_F(EchoRings, ManyCallsAroundTheRingWhileItSpinsAndAfterItSlept) {
  const Peer peer;
  Open(peer);
  for (uint64_t n = 0; n < 300; ++n) {
    const bool sleeps = n % 100 == 99;
    ASSERT_EQ(sleeps ? FallsAsleep(peer) : peer.ServerAsleep(), sleeps) << n;
    peer.Submit(n, absl::StrCat(n));
    if (sleeps) Bell();
    ASSERT_TRUE(Becomes([&] { return peer.Completed(n); })) << n;
    EXPECT_EQ(peer.Body(n), absl::StrCat("echo ", n));
    EXPECT_EQ(peer.Head(n).tag, 1000 + n);
  }
}

TEST_F(EchoRings, CallsOneAtATimeAreAloneUntilTwoComeTogether) {
  const Peer peer;
  Open(peer);
  uint64_t n = 0;
  const auto run = [&](uint64_t together) {
    for (uint64_t i = 0; i < together; ++i) peer.Submit(n + i, "x");
    RingFence();
    if (peer.ServerAsleep()) Bell();
    n += together;
    ASSERT_TRUE(Becomes([&] { return peer.Completed(n - 1); })) << n;
    ASSERT_TRUE(FallsAsleep(peer));  // it has looked for the next call, and found none
  };
  const auto alone = [&](uint64_t call) -> bool {
    absl::MutexLock lock(&mutex_);
    return alone_[call];
  };
  for (int i = 0; i < 20; ++i) run(1);
  EXPECT_FALSE(alone(0));
  EXPECT_FALSE(alone(14));
  EXPECT_TRUE(alone(15));
  EXPECT_TRUE(alone(19));
  run(2);
  EXPECT_FALSE(alone(21)) << "it waited while the one before it ran";
  for (int i = 0; i < 20; ++i) run(1);
  EXPECT_FALSE(alone(22));
  EXPECT_FALSE(alone(36));
  EXPECT_TRUE(alone(41));
}

TEST_F(EchoRings, NoMoreCallsRunThanTheRingHasSlots) {
  const Peer peer;
  Hold();
  Open(peer);
  for (uint64_t n = 0; n < 4; ++n) peer.Submit(n, absl::StrCat(n));
  Bell();
  ASSERT_TRUE(Becomes([&] { return held() == 4; }));
  for (uint64_t n = 4; n < 8; ++n) peer.Submit(n, absl::StrCat(n));  // against the rules
  Bell();
  ASSERT_TRUE(Becomes([&] {
    int unread = 0;
    return ioctl(client_, SIOCOUTQ, &unread) == 0 && unread == 0;
  }));
  ASSERT_TRUE(FallsAsleep(peer));  // it has looked
  EXPECT_EQ(held(), 4u);
  AnswerHeldInReverse();
  ASSERT_TRUE(Becomes([&] { return held() == 4; }));
  for (uint64_t n = 0; n < 4; ++n) {
    ASSERT_TRUE(Becomes([&] { return peer.Completed(n); }));
    EXPECT_EQ(peer.Body(n), absl::StrCat("echo ", 3 - n));
  }
}

TEST_F(EchoRings, TheRingsThreadMakesMessagesThatAreNotMadeYet) {
  const Peer peer;
  Hold();
  const auto ring = Open(peer);
  EXPECT_FALSE(ring->IsOwnThread());
  for (uint64_t n = 0; n < 2; ++n) peer.Submit(n, absl::StrCat("make ", n));
  Bell();
  ASSERT_TRUE(Becomes([&] { return held() == 2; }));
  AnswerHeldInReverse();
  for (uint64_t n = 0; n < 2; ++n) {
    ASSERT_TRUE(Becomes([&] { return peer.Completed(n); }));
    EXPECT_EQ(peer.Body(n), absl::StrCat("made make ", 1 - n));
  }
}

TEST_F(EchoRings, ADoorbellWakesAClientThatSleeps) {
  const Peer peer;
  Hold();
  Open(peer);
  peer.SetAsleep(true);
  peer.Submit(0, "x");
  Bell();
  ASSERT_TRUE(Becomes([&] { return held() == 1; }));
  AnswerHeldInReverse();
  pollfd doorbell = {.fd = client_, .events = POLLIN, .revents = 0};
  ASSERT_EQ(poll(&doorbell, 1, 20000), 1);
  EXPECT_TRUE(peer.Completed(0));
}

TEST_F(EchoRings, APeerThatBreaksTheProtocolIsToldWhyAndCutOff) {
  const Peer peer;
  Open(peer);
  peer.Submit(0, "", {.method = 77});
  Bell();
  std::array<char, 2048> packet;
  // The server may never read that doorbell. So ECONNRESET may come too, before its message or
  // after it.
  ssize_t got = recv(client_, packet.data(), packet.size(), 0);
  if (got < 0) got = recv(client_, packet.data(), packet.size(), 0);
  ASSERT_GT(got, ssize_t{sizeof(RingAnswer)});
  RingAnswer answer;
  std::memcpy(&answer, packet.data(), sizeof(answer));
  EXPECT_EQ(answer.magic, kRingMagic);
  EXPECT_EQ(static_cast<absl::StatusCode>(answer.code), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(packet.data() + sizeof(answer), answer.text_bytes),
              HasSubstr("method 77"));
  const ssize_t end = recv(client_, packet.data(), packet.size(), 0);
  EXPECT_TRUE(end == 0 || (end < 0 && errno == ECONNRESET)) << end << ", errno " << errno;
  EXPECT_TRUE(Becomes([&] { return rings_->open() == 0; }));
}

// The answer that the server sends a peer before it cuts the peer off.
RingAnswer LastWord(int client, std::string* text) {
  pollfd ready = {.fd = client, .events = POLLIN, .revents = 0};
  EXPECT_EQ(poll(&ready, 1, 20000), 1) << "the peer hears nothing";
  std::array<char, 2048> packet = {};
  const ssize_t got = recv(client, packet.data(), packet.size(), MSG_DONTWAIT);
  EXPECT_GT(got, ssize_t{sizeof(RingAnswer)});
  RingAnswer answer;
  std::memcpy(&answer, packet.data(), sizeof(answer));
  text->assign(packet.data() + sizeof(answer), answer.text_bytes);
  return answer;
}

// Its pages are not there, for a client as for the server: the kernel gives none.
TEST_F(EchoRings, APeerWhoseRingCannotBeWrittenIsToldWhyAndCutOff) {
  const Peer peer;
  ASSERT_EQ(ftruncate(peer.fd(), kShape.offset), 0);
  Open(peer);
  EXPECT_TRUE(InTime([&] { return rings_->open() == 0; }));
  std::string text;
  const RingAnswer answer = LastWord(client_, &text);
  EXPECT_EQ(static_cast<absl::StatusCode>(answer.code), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(text, HasSubstr("cannot be written to the lease"));
}

TEST_F(EchoRings, APeerThatHoldsItsFileIsServedAndItsRingEnds) {
  const Peer peer;
  HeldFile held(peer.fd());
  if (!held.holds()) GTEST_SKIP() << HeldFile::kUnavailable;
  Open(peer);
  peer.Submit(0, "x");
  Bell();
  EXPECT_TRUE(Becomes([&] { return peer.Completed(0); }));
  EXPECT_TRUE(rings_->Stop(absl::Seconds(20)));
}

TEST_F(EchoRings, APeerThatLeavesEndsItsRingAndDropsItsWork) {
  const Peer peer;
  Hold();
  Open(peer);
  for (uint64_t n = 0; n < 3; ++n) peer.Submit(n, "x");
  Bell();
  ASSERT_TRUE(Becomes([&] { return held() == 3; }));
  close(client_);
  client_ = -1;
  ASSERT_TRUE(InTime([&] { return rings_->open() == 0; }));
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [work, answer] : held_) EXPECT_TRUE(work->dropped);
  }
  AnswerHeldInReverse();  // late answers go nowhere
  for (uint64_t n = 0; n < 3; ++n) EXPECT_FALSE(peer.Completed(n));
}

TEST_F(EchoRings, TheEndOfTheServerEndsRingsThatSleepAndThatRun) {
  const Peer peer;
  const Peer other;
  Hold();
  const auto ring = Open(peer);
  peer.Submit(0, "x");
  ASSERT_TRUE(Becomes([&] { return held() == 1; }));
  ASSERT_TRUE(FallsAsleep(peer));
  const int client = std::exchange(client_, -1);
  Open(other);
  EXPECT_FALSE(other.ServerAsleep());
  rings_.reset();
  close(client);
  absl::MutexLock lock(&mutex_);
  EXPECT_TRUE(held_[0].first->dropped);
}

// While one of these lives, this process gets no new thread: a stack is as large as the address
// space.
class NoNewThreads {
 public:
  NoNewThreads() {
    pthread_getattr_default_np(&usual_);
    pthread_attr_t none;
    pthread_attr_init(&none);
    pthread_attr_setstacksize(&none, size_t{1} << 47);
    EXPECT_EQ(pthread_setattr_default_np(&none), 0);
    pthread_attr_destroy(&none);
  }
  ~NoNewThreads() {
    EXPECT_EQ(pthread_setattr_default_np(&usual_), 0);
    pthread_attr_destroy(&usual_);
  }

 private:
  pthread_attr_t usual_;
};

// As many rings as leave their waking to others, and nobody else to do it.
TEST_F(EchoRings, RingsAreServedWhereTheSystemGivesNoThreadsToWakeThem) {
  constexpr size_t kRings = 3;
  {
    const NoNewThreads none;
    EXPECT_THROW(std::thread([] {}), std::system_error);
    rings_ = MakeRings(/*cores=*/4);
  }
  Hold();
  std::vector<std::unique_ptr<Peer>> peers;
  std::vector<int> clients;
  for (size_t i = 0; i < kRings; ++i) {
    peers.push_back(std::make_unique<Peer>());
    Open(*peers.back());
    peers.back()->Submit(0, absl::StrCat(i));
    Bell();
    clients.push_back(std::exchange(client_, -1));
  }
  ASSERT_TRUE(Becomes([&] { return held() == kRings; }));
  for (const auto& peer : peers) {
    ASSERT_TRUE(Becomes([&] { return peer->ServerAsleep(); }));
  }
  AnswerHeldInReverse();
  for (size_t i = 0; i < kRings; ++i) {
    EXPECT_TRUE(Becomes([&] { return peers[i]->Completed(0); })) << i;
    EXPECT_EQ(peers[i]->Body(0), absl::StrCat("echo ", i));
  }
  for (const int client : clients) close(client);
}

// Every byte of the ring changes at all times, and pages are taken out of its file.
TEST_F(EchoRings, AScribblerIsCutOffOrAnsweredAndHarmsNoOtherRing) {
  const Peer honest;
  Open(honest);
  const int honest_socket = std::exchange(client_, -1);
  const Peer scribbler;
  Open(scribbler);
  std::atomic<bool> stop = false;
  std::thread thread([&] {
    uint64_t state = 88172645463325252u;
    const size_t bytes = RingBytes(4, 256, 192);
    while (!stop) {
      for (size_t i = 0; i < bytes; ++i) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        scribbler.ring()[i] = static_cast<char>(state % 3 == 0 ? state % 4 : state);
      }
      madvise(scribbler.data(), kArenaBytes, MADV_REMOVE);
      const char bell = 0;
      send(client_, &bell, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
  });
  for (uint64_t n = 0; n < 200; ++n) {
    honest.Submit(n, absl::StrCat(n));
    const char bell = 0;
    send(honest_socket, &bell, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    ASSERT_TRUE(InTime([&] { return honest.Completed(n); })) << n;
    EXPECT_EQ(honest.Body(n), absl::StrCat("echo ", n));
  }
  EXPECT_TRUE(InTime([&] { return rings_->open() == 1; })) << "the scribbler was not cut off";
  stop = true;
  thread.join();
  close(honest_socket);
}

}  // namespace
}  // namespace logitd::arena

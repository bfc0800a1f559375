// Leases of shared memory, and the socket that gives them out.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"
#include "server/arena/arena_server.h"
#include "server/arena/leases.h"
#include "server/arena/page_remover.h"
#include "tests/arena/held_file.h"
#include "tests/becomes.h"
#include "tests/manual_clock.h"

namespace logitd::arena {
namespace {

using ::logitd::testing::Becomes;
using ::testing::HasSubstr;

constexpr int64_t kPage = 4096;

std::string_view IdOf(const LeaseId& id) {
  return {reinterpret_cast<const char*>(id.data()), id.size()};
}

int OpenDescriptors() {
  return static_cast<int>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                                        std::filesystem::directory_iterator()));
}

// The byte at `offset`.
int At(const Arena& arena, int64_t offset) {
  std::byte value{};
  const absl::Span<std::byte> to(&value, 1);
  arena.Read(offset, {&to, 1});
  return static_cast<int>(value);
}

TEST(LeasesTest, WhatTheClientWritesIsRead) {
  Leases leases({.max_bytes = 1 << 20, .max_leases = 2});
  const absl::StatusOr<Leases::Lease> lease = leases.Open(5000);
  ASSERT_TRUE(lease.ok()) << lease.status();
  EXPECT_EQ(lease->bytes, 2 * kPage);
  EXPECT_EQ(leases.bytes(), 2 * kPage);
  char* const client = static_cast<char*>(
      mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_SHARED, lease->fd, 0));
  ASSERT_NE(client, MAP_FAILED);
  close(lease->fd);
  const auto arena = leases.Find(IdOf(lease->id));
  ASSERT_TRUE(arena.ok()) << arena.status();
  ASSERT_EQ((*arena)->bytes(), 2 * kPage);
  EXPECT_EQ(At(**arena, 0), 0);
  client[4999] = 7;
  EXPECT_EQ(At(**arena, 4999), 7);
  munmap(client, 2 * kPage);
}

TEST(LeasesTest, NobodyCanShrinkGrowOrSealAnArena) {
  Leases leases({.max_bytes = 1 << 20, .max_leases = 2});
  const auto lease = leases.Open(kPage);
  ASSERT_TRUE(lease.ok());
  EXPECT_EQ(ftruncate(lease->fd, 0), -1);
  EXPECT_EQ(ftruncate(lease->fd, 2 * kPage), -1);
  EXPECT_EQ(fcntl(lease->fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
  struct stat file = {};
  ASSERT_EQ(fstat(lease->fd, &file), 0);
  EXPECT_EQ(file.st_size, kPage);
  close(lease->fd);
}

TEST(LeasesTest, IdsAreAllDifferent) {
  Leases leases({.max_bytes = 1 << 20, .max_leases = 8});
  std::vector<LeaseId> ids;
  for (int i = 0; i < 8; ++i) {
    const auto lease = leases.Open(1);
    ASSERT_TRUE(lease.ok());
    close(lease->fd);
    EXPECT_EQ(std::count(ids.begin(), ids.end(), lease->id), 0);
    ids.push_back(lease->id);
  }
}

TEST(LeasesTest, SizesOutsideTheLimitAreRefusedForGood) {
  Leases leases({.max_bytes = 2 * kPage, .max_leases = 2});
  for (const int64_t bytes : {int64_t{-1}, int64_t{0}, 2 * kPage + 1, INT64_MAX}) {
    const auto lease = leases.Open(bytes);
    EXPECT_EQ(lease.status().code(), absl::StatusCode::kInvalidArgument) << bytes;
    EXPECT_THAT(std::string(lease.status().message()),
                HasSubstr(absl::StrCat("got ", bytes, " bytes to lease, allowed 1..8192")));
  }
  EXPECT_EQ(leases.bytes(), 0);
}

TEST(LeasesTest, ALimitThatIsNoWholePageHoldsOneMorePage) {
  Leases leases({.max_bytes = 1000, .max_leases = 2});
  const auto lease = leases.Open(1000);
  ASSERT_TRUE(lease.ok()) << lease.status();
  close(lease->fd);
}

TEST(LeasesTest, WhatIsLeasedIsMissingForOthersUntilItIsFreed) {
  Leases leases({.max_bytes = 3 * kPage, .max_leases = 8});
  const auto first = leases.Open(2 * kPage);
  ASSERT_TRUE(first.ok());
  const auto second = leases.Open(2 * kPage);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(second.status().message()),
              HasSubstr("got 8192 bytes to lease, allowed 4096: 8192 of 12288"));
  leases.End(first->id);
  EXPECT_FALSE(leases.FreeEnded());
  const auto third = leases.Open(3 * kPage);
  EXPECT_TRUE(third.ok()) << third.status();
  close(first->fd);
  close(third->fd);
}

TEST(LeasesTest, TheNumberOfLeasesIsBounded) {
  Leases leases({.max_bytes = 1 << 20, .max_leases = 1});
  const auto first = leases.Open(1);
  ASSERT_TRUE(first.ok());
  const auto second = leases.Open(1);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("allowed 1 (--max-leases)"));
  leases.End(first->id);
  leases.FreeEnded();
  close(first->fd);
  const auto third = leases.Open(1);
  EXPECT_TRUE(third.ok()) << third.status();
  close(third->fd);
}

TEST(LeasesTest, AnEndedLeaseIsUnknownAndItsMemoryStaysWhileItIsUsed) {
  Leases leases({.max_bytes = kPage, .max_leases = 1});
  const auto lease = leases.Open(kPage);
  ASSERT_TRUE(lease.ok());
  auto used = leases.Find(IdOf(lease->id));
  ASSERT_TRUE(used.ok());
  ASSERT_EQ(pwrite(lease->fd, "x", 1, 0), 1);
  leases.End(lease->id);
  EXPECT_EQ(leases.Find(IdOf(lease->id)).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(leases.leases(), 0);
  EXPECT_TRUE(leases.FreeEnded());
  EXPECT_EQ(leases.bytes(), kPage);
  EXPECT_EQ(At(**used, 0), 'x');
  used->reset();
  EXPECT_FALSE(leases.FreeEnded());
  EXPECT_EQ(leases.bytes(), 0);
  close(lease->fd);
}

// What nobody has written takes no memory, also when it is read: a client pays for its own pages.
TEST(LeasesTest, ReadingTakesNoMemory) {
  Leases leases({.max_bytes = 1 << 20, .max_leases = 1});
  const auto lease = leases.Open(1 << 20);
  ASSERT_TRUE(lease.ok());
  const auto arena = leases.Find(IdOf(lease->id));
  std::vector<std::byte> all(1 << 20, std::byte{1});
  const absl::Span<std::byte> to = absl::MakeSpan(all);
  (*arena)->Read(0, {&to, 1});
  EXPECT_EQ(std::count(all.begin(), all.end(), std::byte{0}), 1 << 20);
  struct stat file = {};
  ASSERT_EQ(fstat(lease->fd, &file), 0);
  EXPECT_EQ(file.st_blocks, 0);
  close(lease->fd);
}

TEST(LeasesTest, PagesThatTheClientTakesOutReadAsZeros) {
  Leases leases({.max_bytes = 1 << 20, .max_leases = 1});
  const auto lease = leases.Open(kPage);
  ASSERT_TRUE(lease.ok());
  const auto arena = leases.Find(IdOf(lease->id));
  ASSERT_EQ(pwrite(lease->fd, "x", 1, 5), 1);
  EXPECT_EQ(At(**arena, 5), 'x');
  ASSERT_EQ(fallocate(lease->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kPage), 0);
  EXPECT_EQ(At(**arena, 5), 0);
  close(lease->fd);
}

TEST(LeasesTest, ManyPiecesAreReadInOrder) {
  Leases leases({.max_bytes = 1 << 20, .max_leases = 1});
  const auto lease = leases.Open(3 * kPage);
  ASSERT_TRUE(lease.ok());
  std::vector<unsigned char> written(3 * kPage);
  for (size_t i = 0; i < written.size(); ++i) written[i] = static_cast<unsigned char>(i * 7 % 251);
  ASSERT_EQ(pwrite(lease->fd, written.data(), written.size(), 0), ssize_t{3 * kPage});
  const auto arena = leases.Find(IdOf(lease->id));
  std::vector<std::byte> read(written.size() - 10);
  std::vector<absl::Span<std::byte>> pieces;  // more than one read of the system takes
  for (size_t at = 0; at < read.size();) {
    const size_t size = std::min(read.size() - at, 1 + at % 9);
    pieces.push_back(absl::MakeSpan(read).subspan(at, size));
    at += size;
  }
  ASSERT_GT(pieces.size(), 1024u);
  (*arena)->Read(10, pieces);
  EXPECT_EQ(std::memcmp(read.data(), written.data() + 10, read.size()), 0);
  close(lease->fd);
}

// NaN in every dtype, so that the rows say what happened.
TEST(LeasesTest, WhatCannotBeReadIsNaN) {
  const auto unreadable = Arena::Map(memfd_create("empty", MFD_CLOEXEC), kPage);
  EXPECT_EQ(At(**unreadable, 0), 255);
}

TEST(LeasesTest, EndedLeasesCountWhileCallsUseThem) {
  Leases leases({.max_bytes = 1 << 20, .max_leases = 1});
  const auto lease = leases.Open(1);
  ASSERT_TRUE(lease.ok());
  close(lease->fd);
  auto used = leases.Find(IdOf(lease->id));
  leases.End(lease->id);
  EXPECT_TRUE(leases.FreeEnded());
  EXPECT_EQ(leases.Open(1).status().code(), absl::StatusCode::kResourceExhausted);
  used->reset();
  EXPECT_FALSE(leases.FreeEnded());
  const auto next = leases.Open(1);
  ASSERT_TRUE(next.ok()) << next.status();
  close(next->fd);
}

TEST(LeasesTest, UnknownIdsOfAnyLengthAreNotFound) {
  Leases leases({.max_bytes = 1 << 20, .max_leases = 1});
  for (const std::string& id : {std::string(), std::string(15, 'a'), std::string(16, '\0'),
                                std::string(17, 'a'), std::string(1000, 'a')}) {
    EXPECT_EQ(leases.Find(id).status().code(), absl::StatusCode::kNotFound) << id.size();
  }
}

TEST(LeasesTest, ADrainGivesNoLeaseAndLeavesThoseThereAre) {
  Leases leases({.max_bytes = 1 << 20, .max_leases = 2});
  const auto lease = leases.Open(1);
  ASSERT_TRUE(lease.ok());
  leases.BeginDrain();
  EXPECT_EQ(leases.Open(1).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(leases.Find(IdOf(lease->id)).ok());
  close(lease->fd);
}

bool HasSubstrIn(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// What a client got for its request.
struct Got {
  ArenaAnswer answer;
  std::string text;
  int fd = -1;
  bool ended = false;  // the connection
};

class ArenaServerTest : public ::testing::Test {
 protected:
  void Start(LeaseLimits limits = {.max_bytes = 1 << 20, .max_leases = 4},
             ArenaServerOptions options = {}) {
    leases_ = std::make_unique<Leases>(limits, nullptr, remover_.get());
    options.address.path = path();
    auto server = ArenaServer::Start(options, leases_.get(), registry_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  void SetUp() override {
    directory_ = absl::StrCat(::testing::TempDir(), "/arena_", getpid());
    std::filesystem::create_directories(directory_);
  }

  void TearDown() override {
    server_.reset();
    leases_.reset();
    std::filesystem::remove_all(directory_);
  }

  std::string path() const { return directory_ + "/arena.sock"; }

  int Connect() const {
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path().c_str(), sizeof(address.sun_path) - 1);
    EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0)
        << std::strerror(errno);
    return fd;
  }

  static Got Receive(int socket) {
    pollfd ready = {.fd = socket, .events = POLLIN, .revents = 0};
    EXPECT_EQ(poll(&ready, 1, 10000), 1) << "no answer";
    Got got;
    std::array<char, kMaxArenaText> text;
    std::array<iovec, 2> parts = {iovec{&got.answer, sizeof(got.answer)},
                                  iovec{text.data(), text.size()}};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
    msghdr message = {};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t bytes = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    got.ended = bytes <= 0;
    if (got.ended) return got;
    EXPECT_EQ(static_cast<size_t>(bytes), sizeof(got.answer) + got.answer.text_bytes);
    got.text.assign(text.data(), got.answer.text_bytes);
    if (const cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr) {
      std::memcpy(&got.fd, CMSG_DATA(header), sizeof(got.fd));
    }
    return got;
  }

  static Got Ask(int socket, const ArenaAsk& ask) {
    EXPECT_EQ(send(socket, &ask, sizeof(ask), MSG_NOSIGNAL), ssize_t{sizeof(ask)});
    return Receive(socket);
  }

  static bool Ended(int socket) {
    pollfd ready = {.fd = socket, .events = POLLIN, .revents = 0};
    char byte;
    return poll(&ready, 1, 10000) == 1 && recv(socket, &byte, 1, 0) <= 0;
  }

  std::string Metrics() const {
    return prometheus::TextSerializer().Serialize(registry_->Collect());
  }

  ManualClock clock_;
  std::string directory_;
  std::shared_ptr<prometheus::Registry> registry_ = std::make_shared<prometheus::Registry>();
  const std::unique_ptr<PageRemover> remover_ = *PageRemover::Start();
  std::unique_ptr<Leases> leases_;
  std::unique_ptr<ArenaServer> server_;
};

TEST_F(ArenaServerTest, ALeaseEndsWithItsConnection) {
  Start();
  const int peer = Connect();
  const Got got = Ask(peer, {.bytes = 5000});
  ASSERT_EQ(got.answer.code, 0u) << got.text;
  EXPECT_EQ(got.answer.bytes, 8192u);
  ASSERT_GE(got.fd, 0);
  ASSERT_EQ(pwrite(got.fd, "hello", 5, 0), 5);
  {
    const auto arena = leases_->Find(IdOf(got.answer.lease));
    ASSERT_TRUE(arena.ok()) << arena.status();
    EXPECT_EQ(At(**arena, 4), 'o');
  }
  EXPECT_TRUE(
      Becomes([&] { return Metrics().find("logitd_arena_bytes 8192") != std::string::npos; }));
  EXPECT_THAT(Metrics(), HasSubstr("logitd_arena_leases 1"));
  EXPECT_THAT(Metrics(), HasSubstr("logitd_arena_leases_total 1"));
  EXPECT_THAT(Metrics(), HasSubstr("logitd_arena_bytes_limit 1048576"));
  close(peer);
  EXPECT_TRUE(Becomes([&] { return leases_->bytes() == 0; }));
  EXPECT_FALSE(leases_->Find(IdOf(got.answer.lease)).ok());
  EXPECT_TRUE(Becomes([&] { return Metrics().find("logitd_arena_bytes 0") != std::string::npos; }));
  close(got.fd);
}

TEST_F(ArenaServerTest, APageThatDoesNotLeaveIsSeen) {
  Start();
  const int peer = Connect();
  const Got got = Ask(peer, {.bytes = 4096});
  ASSERT_EQ(got.answer.code, 0u) << got.text;
  HeldFile held(got.fd);
  if (!held.holds()) GTEST_SKIP() << HeldFile::kUnavailable;
  close(peer);
  EXPECT_TRUE(Becomes([&] { return HasSubstrIn(Metrics(), "logitd_arena_leaving_bytes 4096"); }));
  const int other = Connect();
  EXPECT_EQ(Ask(other, {.bytes = 4096}).answer.code, 0u) << "the server waits for a client";
  held.LetGo();
  EXPECT_TRUE(Becomes([&] { return HasSubstrIn(Metrics(), "logitd_arena_leaving_bytes 0"); }));
  close(other);
  close(got.fd);
}

TEST_F(ArenaServerTest, MemoryThatACallUsesIsFreedAfterIt) {
  Start();
  const int peer = Connect();
  const Got got = Ask(peer, {.bytes = 4096});
  ASSERT_EQ(got.answer.code, 0u) << got.text;
  auto used = leases_->Find(IdOf(got.answer.lease));
  ASSERT_TRUE(used.ok());
  close(peer);
  close(got.fd);
  EXPECT_TRUE(Becomes([&] { return leases_->leases() == 0; }));
  EXPECT_EQ(leases_->bytes(), 4096);
  EXPECT_EQ(At(**used, 4095), 0);
  used->reset();
  EXPECT_TRUE(Becomes([&] { return leases_->bytes() == 0; }));
}

TEST_F(ArenaServerTest, RefusalsSayWhatWasGotAndWhatIsAllowed) {
  Start();
  const struct {
    ArenaAsk ask;
    absl::StatusCode code;
    std::string text;
  } kCases[] = {
      {{.magic = {'H', 'T', 'T', 'P'}},
       absl::StatusCode::kInvalidArgument,
       "begins with \"HTTP\", allowed \"LDAR\""},
      {{.device = 1}, absl::StatusCode::kInvalidArgument, "got 1 in the field device, allowed 0"},
      {{.version = 2, .bytes = 1}, absl::StatusCode::kUnimplemented, "got version 2"},
      {{.kind = 2, .bytes = 1}, absl::StatusCode::kUnimplemented, "got kind 2 (memory of a GPU)"},
      {{.kind = 3, .bytes = 1}, absl::StatusCode::kUnimplemented, "got kind 3, allowed 1"},
      {{.bytes = 0},
       absl::StatusCode::kInvalidArgument,
       "got 0 bytes to lease, allowed 1..1048576"},
      {{.bytes = 1 << 21}, absl::StatusCode::kInvalidArgument, "got 2097152 bytes"},
      {{.bytes = ~uint64_t{0}},
       absl::StatusCode::kInvalidArgument,
       "allowed 1..9223372036854775807"},
  };
  for (const auto& refused : kCases) {
    const int peer = Connect();
    const Got got = Ask(peer, refused.ask);
    EXPECT_EQ(got.answer.code, static_cast<uint32_t>(refused.code)) << got.text;
    EXPECT_THAT(got.text, HasSubstr(refused.text));
    EXPECT_EQ(got.fd, -1);
    EXPECT_TRUE(Ended(peer));
    close(peer);
  }
  EXPECT_EQ(leases_->bytes(), 0);
  EXPECT_THAT(Metrics(), HasSubstr("logitd_arena_refused_total 8"));
}

TEST_F(ArenaServerTest, PacketsOfOtherSizesAreRefused) {
  Start();
  for (const size_t bytes : {size_t{1}, sizeof(ArenaAsk) - 1, sizeof(ArenaAsk) + 1, size_t{5000}}) {
    const int peer = Connect();
    const std::string packet(bytes, 'L');
    ASSERT_EQ(send(peer, packet.data(), packet.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes));
    const Got got = Receive(peer);
    EXPECT_EQ(got.answer.code, static_cast<uint32_t>(absl::StatusCode::kInvalidArgument));
    EXPECT_THAT(got.text,
                HasSubstr(absl::StrCat("got a request of ", bytes, " bytes, allowed 24")));
    EXPECT_TRUE(Ended(peer));
    close(peer);
  }
}

TEST_F(ArenaServerTest, OneConnectionHasOneLease) {
  Start();
  const int peer = Connect();
  const Got got = Ask(peer, {.bytes = 1});
  ASSERT_EQ(got.answer.code, 0u);
  close(got.fd);
  const ArenaAsk again = {.bytes = 1};
  ASSERT_EQ(send(peer, &again, sizeof(again), MSG_NOSIGNAL), ssize_t{sizeof(again)});
  EXPECT_TRUE(Ended(peer));
  EXPECT_TRUE(Becomes([&] { return leases_->leases() == 0; }));
  close(peer);
}

TEST_F(ArenaServerTest, ALeaseOpensARingWhichEndsWithIt) {
  Start();
  const int early = Connect();
  ASSERT_GE(Ask(early, {.bytes = 1 << 16}).fd, 0);
  const RingAsk ask = {.slots = 4, .entry_bytes = 256, .answer_bytes = 256, .offset = 0};
  const auto ask_ring = [](int socket, const RingAsk& ring) {
    EXPECT_EQ(send(socket, &ring, sizeof(ring), MSG_NOSIGNAL), ssize_t{sizeof(ring)});
    std::array<char, sizeof(RingAnswer) + kMaxArenaText> packet;
    const ssize_t got = recv(socket, packet.data(), packet.size(), 0);
    EXPECT_GE(got, ssize_t{sizeof(RingAnswer)});
    RingAnswer answer;
    std::memcpy(&answer, packet.data(), sizeof(answer));
    return std::pair(static_cast<absl::StatusCode>(answer.code),
                     std::string(packet.data() + sizeof(answer), answer.text_bytes));
  };
  EXPECT_EQ(ask_ring(early, ask).first, absl::StatusCode::kUnavailable);
  server_->ServeRings(
      [](const std::shared_ptr<Ring>& ring, uint64_t serial, RingRequest request) {
        ring->Complete(serial, {.tag = request.tag}, nullptr);
        return std::shared_ptr<RingWork>();
      },
      /*cores=*/2);
  RingAsk wrong = ask;
  wrong.offset = (1 << 16) - 64;
  EXPECT_EQ(ask_ring(early, wrong).first, absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ask_ring(early, ask).first, absl::StatusCode::kOk);
  EXPECT_TRUE(Becomes([&] { return HasSubstrIn(Metrics(), "logitd_arena_rings 1"); }));
  close(early);
  EXPECT_TRUE(Becomes([&] {
    const int other = Connect();  // makes the server look at its gauges
    close(other);
    return HasSubstrIn(Metrics(), "logitd_arena_rings 0") && leases_->bytes() == 0;
  }));
}

class CutOffTest : public ArenaServerTest {
 protected:
  // A client of a server whose rings answer nothing.
  int StartAndConnect() {
    Start();
    server_->ServeRings([](const std::shared_ptr<Ring>&, uint64_t,
                           RingRequest) { return std::shared_ptr<RingWork>(); },
                        /*cores=*/2);
    return Connect();
  }
  // A lease of 64 KiB with a ring in it.
  static Got OpenRing(int client, const RingAsk& ask) {
    const Got got = Ask(client, {.bytes = 1 << 16});
    EXPECT_GE(got.fd, 0);
    EXPECT_EQ(send(client, &ask, sizeof(ask), MSG_NOSIGNAL), ssize_t{sizeof(ask)});
    std::array<char, 2048> packet;
    EXPECT_EQ(recv(client, packet.data(), packet.size(), 0), ssize_t{sizeof(RingAnswer)});
    return got;
  }
};

TEST_F(CutOffTest, ASecondRingOfALeaseCutsTheFirstOff) {
  const RingAsk ask = {.slots = 4, .entry_bytes = 256, .answer_bytes = 256, .offset = 0};
  const int client = StartAndConnect();
  const Got got = OpenRing(client, ask);
  std::array<char, 2048> packet;
  ASSERT_EQ(send(client, &ask, sizeof(ask), MSG_NOSIGNAL), ssize_t{sizeof(ask)});
  const ssize_t told = recv(client, packet.data(), packet.size(), 0);
  ASSERT_GT(told, ssize_t{sizeof(RingAnswer)});
  EXPECT_EQ(std::string(packet.data() + sizeof(RingAnswer), packet.data() + told),
            "ring: got a packet of more than 1 byte, allowed doorbells; a lease has one ring");
  EXPECT_TRUE(Becomes([&] { return leases_->leases() == 0; }));
  close(got.fd);
  close(client);
}

TEST_F(CutOffTest, ARingThatIsCutOffEndsItsLease) {
  const RingAsk ask = {.slots = 4, .entry_bytes = 256, .answer_bytes = 256, .offset = 0};
  const int client = StartAndConnect();
  const Got got = OpenRing(client, ask);
  std::array<char, 2048> packet;
  const RingEntry broken = {.phase = RingPhase(0, 4), .method = 99};
  ASSERT_EQ(pwrite(got.fd, &broken, sizeof(broken), kSubmissionsAt), ssize_t{sizeof(broken)});
  // A server that still looks at the ring by itself finds it without the doorbell, and may be done.
  const ssize_t rung = send(client, "", 1, MSG_NOSIGNAL);
  ASSERT_TRUE(rung == 1 || errno == EPIPE || errno == ECONNRESET) << errno;
  // The server never reads that doorbell. So ECONNRESET may come too, before its message or after
  // it.
  ssize_t told = recv(client, packet.data(), packet.size(), 0);
  if (told < 0) told = recv(client, packet.data(), packet.size(), 0);
  ASSERT_GT(told, ssize_t{sizeof(RingAnswer)});
  const ssize_t end = recv(client, packet.data(), packet.size(), 0);
  EXPECT_TRUE(end == 0 || (end < 0 && errno == ECONNRESET)) << end << ", errno " << errno;
  EXPECT_TRUE(Becomes([&] { return leases_->leases() == 0; }));
  close(got.fd);
  close(client);
}

TEST_F(ArenaServerTest, APeerThatDoesNotAskIsCutAndDelaysNobody) {
  Start({.max_bytes = 1 << 20, .max_leases = 4}, {.clock = &clock_});
  const int silent = Connect();
  const int peer = Connect();
  const Got got = Ask(peer, {.bytes = 1});
  EXPECT_EQ(got.answer.code, 0u);
  clock_.Advance(absl::Seconds(5));
  const Got late = Receive(silent);
  EXPECT_EQ(late.answer.code, static_cast<uint32_t>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_TRUE(Ended(silent));
  // The time is for the request only: the lease stays.
  EXPECT_TRUE(leases_->Find(IdOf(got.answer.lease)).ok());
  close(silent);
  close(peer);
  close(got.fd);
}

TEST_F(ArenaServerTest, SilentPeersKeepNobodyOut) {
  Start({.max_bytes = 1 << 20, .max_leases = 1}, {.clock = &clock_});  // nobody is late
  std::vector<int> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(Connect());
  const int peer = Connect();
  const Got lease = Ask(peer, {.bytes = 1});
  EXPECT_EQ(lease.answer.code, 0u) << lease.text;
  // The oldest gave their places to newer ones, and were told.
  const Got oldest = Receive(silent.front());
  EXPECT_EQ(oldest.answer.code, static_cast<uint32_t>(absl::StatusCode::kResourceExhausted));
  EXPECT_THAT(oldest.text, HasSubstr("allowed are 64"));
  EXPECT_TRUE(Ended(silent.front()));
  // And one of those that have a place may still ask.
  EXPECT_EQ(Ask(silent.back(), {.bytes = 1}).answer.code,
            static_cast<uint32_t>(absl::StatusCode::kResourceExhausted));
  for (const int fd : silent) close(fd);
  close(peer);
  close(lease.fd);
}

// A descriptor whose close takes long would make the server wait.
TEST_F(ArenaServerTest, DescriptorsOfPeersAreNotTaken) {
  Start();
  const int peer = Connect();
  int takes = 0;
  socklen_t length = sizeof(takes);
  if (getsockopt(peer, SOL_SOCKET, /*SO_PASSRIGHTS*/ 83, &takes, &length) != 0) {
    close(peer);
    GTEST_SKIP() << "this kernel cannot refuse descriptors (Linux 6.16 can)";
  }
  ArenaAsk ask = {.bytes = 1};
  iovec part = {&ask, sizeof(ask)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &peer, sizeof(peer));
  EXPECT_EQ(sendmsg(peer, &message, MSG_NOSIGNAL), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(Ask(peer, ask).answer.code, 0u);
  close(peer);
}

TEST_F(ArenaServerTest, UsersAreAsked) {
  Start({.max_bytes = 1 << 20, .max_leases = 1}, {.check_user = [](uid_t uid) {
          return absl::PermissionDeniedError(absl::StrCat("user ", uid, " may not"));
        }});
  const int peer = Connect();
  const Got got = Receive(peer);  // no request was sent: the user is enough to refuse
  EXPECT_EQ(got.answer.code, static_cast<uint32_t>(absl::StatusCode::kPermissionDenied));
  EXPECT_EQ(got.text, absl::StrCat("user ", getuid(), " may not"));
  EXPECT_TRUE(Ended(peer));
  close(peer);
}

TEST_F(ArenaServerTest, TheFileHasItsModeAndGoesWithTheServer) {
  Start({.max_bytes = 1 << 20, .max_leases = 1}, {.mode = 0640});
  struct stat file = {};
  ASSERT_EQ(stat(path().c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 07777, 0640u);
  server_.reset();
  EXPECT_EQ(stat(path().c_str(), &file), -1);
}

TEST_F(ArenaServerTest, APathInUseIsRefused) {
  Start();
  Leases others({.max_bytes = 1, .max_leases = 1});
  ArenaServerOptions options;
  options.address.path = path();
  const auto second =
      ArenaServer::Start(options, &others, std::make_shared<prometheus::Registry>());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("another process"));
  const int peer = Connect();
  EXPECT_EQ(Ask(peer, {.bytes = 1}).answer.code, 0u);
  close(peer);
}

TEST_F(ArenaServerTest, PeersThatComeAndGoLeaveNoDescriptorAndNoMemory) {
  Start({.max_bytes = 1 << 20, .max_leases = 64});
  const int before = OpenDescriptors();
  for (int i = 0; i < 200; ++i) {
    const int peer = Connect();
    if (i % 4 != 0) {
      const ArenaAsk ask = {.bytes = static_cast<uint64_t>(1 + i)};
      send(peer, &ask, sizeof(ask), MSG_NOSIGNAL);
    }
    if (i % 4 == 2) {
      const Got got = Receive(peer);
      if (got.fd >= 0) close(got.fd);
    }
    close(peer);
  }
  EXPECT_TRUE(Becomes([&] { return leases_->bytes() == 0 && OpenDescriptors() <= before; }))
      << leases_->bytes() << " bytes, " << OpenDescriptors() - before << " descriptors more";
}

}  // namespace
}  // namespace logitd::arena

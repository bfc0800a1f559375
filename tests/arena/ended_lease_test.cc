// Tests of a lease that has ended while its client keeps the file: its memory must leave.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "server/arena/leases.h"
#include "server/arena/page_remover.h"
#include "tests/arena/held_file.h"
#include "tests/becomes.h"

namespace logitd::arena {
namespace {

constexpr int64_t kPage = 4096;

std::string_view IdOf(const LeaseId& id) {
  return {reinterpret_cast<const char*>(id.data()), id.size()};
}

class EndedLeaseTest : public ::testing::Test {
 protected:
  EndedLeaseTest() : remover_(*PageRemover::Start()) {
    leases_ = std::make_unique<Leases>(LeaseLimits{.max_bytes = kBytes, .max_leases = 8}, nullptr,
                                       remover_.get());
  }

  // True: FreeEnded has something to do in time.
  bool Told() const {
    pollfd freed = {.fd = leases_->freed_fd(), .events = POLLIN, .revents = 0};
    return poll(&freed, 1, 20000) == 1;
  }
  static int64_t BytesOf(int fd) {
    struct stat file = {};
    EXPECT_EQ(fstat(fd, &file), 0);
    return file.st_blocks * 512;
  }

  static constexpr int64_t kBytes = 1 << 20;
  std::unique_ptr<PageRemover> remover_;
  std::unique_ptr<Leases> leases_;
};

// Else the server pays for what it wrote there, for as long as its client likes.
TEST_F(EndedLeaseTest, LosesItsPagesWhileTheClientHasItsFile) {
  for (int round = 0; round < 3; ++round) {
    const auto lease = leases_->Open(kBytes);
    ASSERT_TRUE(lease.ok()) << lease.status();
    auto* const client =
        static_cast<char*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, lease->fd, 0));
    ASSERT_NE(client, MAP_FAILED);
    const std::vector<std::byte> answer(kBytes, std::byte{7});
    ASSERT_TRUE((*leases_->Find(IdOf(lease->id)))->Write(0, answer).ok());
    EXPECT_EQ(client[kBytes - 1], 7);
    EXPECT_EQ(BytesOf(lease->fd), kBytes);
    leases_->End(lease->id);
    EXPECT_FALSE(leases_->FreeEnded());
    ASSERT_TRUE(Told());
    leases_->FreeEnded();
    EXPECT_EQ(leases_->bytes(), 0);
    EXPECT_EQ(leases_->leaving_bytes(), 0);
    EXPECT_EQ(BytesOf(lease->fd), 0);
    EXPECT_EQ(client[kBytes - 1], 0) << "what the client still maps is zeros";
    munmap(client, kBytes);  // the descriptor stays open
  }
}

TEST_F(EndedLeaseTest, CountsUntilItsPagesHaveLeft) {
  const auto lease = leases_->Open(kBytes);
  ASSERT_TRUE(lease.ok()) << lease.status();
  const std::vector<std::byte> answer(kBytes, std::byte{7});
  ASSERT_TRUE((*leases_->Find(IdOf(lease->id)))->Write(0, answer).ok());
  HeldFile held(lease->fd);
  if (!held.holds()) GTEST_SKIP() << HeldFile::kUnavailable;
  leases_->End(lease->id);
  EXPECT_FALSE(leases_->FreeEnded()) << "nothing that could be done";
  EXPECT_EQ(leases_->bytes(), kBytes);
  EXPECT_EQ(leases_->leaving_bytes(), kBytes);
  EXPECT_EQ(leases_->Open(kBytes).status().code(), absl::StatusCode::kResourceExhausted);
  held.LetGo();
  ASSERT_TRUE(Told());
  leases_->FreeEnded();
  EXPECT_EQ(leases_->bytes(), 0);
  EXPECT_EQ(leases_->leaving_bytes(), 0);
  const auto next = leases_->Open(kBytes);
  EXPECT_TRUE(next.ok()) << next.status();
  close(next->fd);
  close(lease->fd);
}

TEST_F(EndedLeaseTest, WhoseFileIsHeldKeepsNoOtherAndNotTheServer) {
  const auto first = leases_->Open(kPage);
  const auto second = leases_->Open(kPage);
  ASSERT_TRUE(first.ok() && second.ok());
  HeldFile held(first->fd);
  if (!held.holds()) GTEST_SKIP() << HeldFile::kUnavailable;
  leases_->End(first->id);
  leases_->FreeEnded();
  leases_->End(second->id);
  leases_->FreeEnded();
  ASSERT_TRUE(Told());
  leases_->FreeEnded();
  EXPECT_EQ(leases_->bytes(), kPage);
  leases_.reset();
  remover_.reset();  // returns
  held.LetGo();
  EXPECT_TRUE(testing::Becomes([&] { return BytesOf(first->fd) == 0; }));
  close(first->fd);
  close(second->fd);
}

}  // namespace
}  // namespace logitd::arena

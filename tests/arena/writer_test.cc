// Answers that are written into arenas.
#include "server/arena/writer.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "server/arena/leases.h"
#include "tests/arena/held_file.h"
#include "tests/becomes.h"

namespace logitd::arena {
namespace {

constexpr int64_t kBytes = 1 << 20;

// An arena and what its client sees of it.
struct Lent {
  explicit Lent(int64_t bytes = kBytes) {
    const int fd = memfd_create("lent", MFD_CLOEXEC);
    EXPECT_EQ(ftruncate(fd, bytes), 0);
    data = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    arena = *Arena::Map(fd, bytes);
  }
  ~Lent() { munmap(data, kBytes); }
  char* data;
  std::shared_ptr<const Arena> arena;
};

absl::Span<const std::byte> BytesOf(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

TEST(WriterTest, AnAnswerIsThereWhenItIsDone) {
  Lent lent;
  const auto text = std::make_shared<std::string>(100000, 'a');
  absl::Notification done;
  absl::Status status;
  bool kept = true;
  std::weak_ptr<const void> keep = text;
  {
    Writer writer;
    writer.Write({.arena = lent.arena,
                  .offset = 4000,
                  .bytes = BytesOf(*text),
                  .keep = text,
                  .wanted = [] { return true; },
                  .done =
                      [&](const absl::Status& written) {
                        status = written;
                        kept = text.use_count() > 1;
                        done.Notify();
                      }});
    done.WaitForNotification();
  }
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_FALSE(kept) << "the slab is held longer than it is needed";
  EXPECT_EQ(std::string(lent.data + 4000, 100000), *text);
  EXPECT_EQ(lent.data[3999], 0);
  EXPECT_EQ(lent.data[104000], 0);
}

TEST(WriterTest, AnswersOfOneArenaAreWrittenInOrderAndTheEndWaitsForThem) {
  Lent lent;
  std::vector<int> order;  // the arena has one thread
  {
    Writer writer;
    for (int i = 0; i < 50; ++i) {
      const auto text = std::make_shared<std::string>(1, static_cast<char>(i));
      writer.Write({.arena = lent.arena,
                    .bytes = BytesOf(*text),
                    .keep = text,
                    .wanted = [] { return true; },
                    .done = [&order, i](const absl::Status&) { order.push_back(i); }});
    }
  }
  ASSERT_EQ(order.size(), 50u);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
  EXPECT_EQ(lent.data[0], 49);
}

TEST(WriterTest, AnAnswerIsWrittenWhileTheClientHoldsItsFile) {
  const int fd = memfd_create("held", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(fd, kBytes), 0);
  const std::shared_ptr<const Arena> arena = *Arena::Map(fd, kBytes);
  HeldFile held(fd);
  if (!held.holds()) GTEST_SKIP() << HeldFile::kUnavailable;
  const std::string text(100000, 'x');
  absl::Notification done;
  absl::Status status;
  Writer writer;
  writer.Write({.arena = arena,
                .offset = 4000,
                .bytes = BytesOf(text),
                .wanted = [] { return true; },
                .done =
                    [&](const absl::Status& written) {
                      status = written;
                      done.Notify();
                    }});
  EXPECT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(20)));
  held.LetGo();
  done.WaitForNotification();
  EXPECT_TRUE(status.ok()) << status;
  std::string there(text.size(), '\0');
  ASSERT_EQ(pread(fd, there.data(), there.size(), 4000), static_cast<ssize_t>(there.size()));
  EXPECT_EQ(there, text);
}

TEST(WriterTest, NothingIsWrittenForACallerThatHasLeft) {
  Lent lent;
  const std::string text(10, 'x');
  absl::Status status;
  {
    Writer writer;
    writer.Write({.arena = lent.arena,
                  .bytes = BytesOf(text),
                  .wanted = [] { return false; },
                  .done = [&status](const absl::Status& written) { status = written; }});
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(lent.data[0], 0);
}

// A long answer keeps no other arena waiting.
TEST(WriterTest, OneArenaDoesNotWaitForAnother) {
  Lent slow;
  Lent quick;
  const std::string text(10, 'x');
  absl::Notification let_go;
  absl::Notification stuck;
  absl::Notification quick_done;
  std::atomic<bool> slow_done = false;
  {
    Writer writer;
    writer.Write({.arena = slow.arena,
                  .bytes = BytesOf(text),
                  .wanted =
                      [&] {
                        stuck.Notify();
                        let_go.WaitForNotification();
                        return true;
                      },
                  .done = [&](const absl::Status&) { slow_done = true; }});
    stuck.WaitForNotification();
    writer.Write({.arena = quick.arena,
                  .bytes = BytesOf(text),
                  .wanted = [] { return true; },
                  .done = [&](const absl::Status&) { quick_done.Notify(); }});
    EXPECT_TRUE(quick_done.WaitForNotificationWithTimeout(absl::Seconds(20)));
    EXPECT_FALSE(slow_done);
    let_go.Notify();
  }
  EXPECT_TRUE(slow_done);
}

TEST(WriterTest, WhatTheSystemDoesNotWriteIsAnError) {
  const std::string text(10, 'x');
  absl::Status status;
  const int fd = memfd_create("short", MFD_CLOEXEC);  // no byte of the arena is in it
  {
    Writer writer;
    writer.Write({.arena = *Arena::Map(fd, 4096),
                  .bytes = BytesOf(text),
                  .wanted = [] { return true; },
                  .done = [&status](const absl::Status& written) { status = written; }});
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
}

TEST(WriterTest, AThreadLeavesAfterAWhileAndAnotherOneComes) {
  Lent lent;
  Writer writer;
  for (int round = 0; round < 2; ++round) {
    const std::string text(10, static_cast<char>('a' + round));
    absl::Notification done;
    writer.Write({.arena = lent.arena,
                  .bytes = BytesOf(text),
                  .wanted = [] { return true; },
                  .done = [&done](const absl::Status&) { done.Notify(); }});
    done.WaitForNotification();
    EXPECT_EQ(lent.data[0], 'a' + round);
    // Its thread holds the arena for as long as it waits for more.
    EXPECT_TRUE(testing::Becomes([&] { return lent.arena.use_count() == 1; }));
  }
}

}  // namespace
}  // namespace logitd::arena

#include "server/door/watched_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"

namespace logitd::door {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

void Write(const fs::path& path, const std::string& text) {
  // As an editor or a tool does: the new file takes the old one's place at once.
  const fs::path next = path.string() + ".next";
  std::ofstream(next) << text;
  fs::rename(next, path);
}

class WatchedFilesTest : public ::testing::Test {
 protected:
  WatchedFilesTest() {
    fs::remove_all(directory_);
    fs::create_directories(directory_);
  }
  ~WatchedFilesTest() override { fs::remove_all(directory_); }

  FileGroup Group(std::vector<std::string> names) {
    FileGroup group = {.name = "files"};
    for (const std::string& name : names) group.paths.push_back((directory_ / name).string());
    group.use = [this](const std::vector<std::string>& contents) {
      if (contents[0] == "bad") return absl::InvalidArgumentError("it is bad");
      absl::MutexLock lock(&mutex_);
      used_ = contents;
      return absl::OkStatus();
    };
    group.on_read = [this](bool used) {
      absl::MutexLock lock(&mutex_);
      reads_.push_back(used);
    };
    return group;
  }

  bool WaitForReads(size_t reads) {
    absl::MutexLock lock(&mutex_);
    const auto enough = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return reads_.size() >= reads;
    };
    return mutex_.AwaitWithTimeout(absl::Condition(&enough), absl::Seconds(10));
  }

  const fs::path directory_ = fs::path(::testing::TempDir()) / "logitd_watched_files";
  absl::Mutex mutex_;
  std::vector<std::string> used_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> reads_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(WatchedFilesTest, WhatChangesIsUsedAndWhatIsBadIsNot) {
  Write(directory_ / "a", "1");
  Write(directory_ / "b", "2");
  WatchedFiles files({Group({"a", "b"})}, absl::Milliseconds(5));
  ASSERT_TRUE(files.Load().ok());
  files.Start();
  Write(directory_ / "b", "3");
  ASSERT_TRUE(WaitForReads(2));
  Write(directory_ / "a", "bad");
  ASSERT_TRUE(WaitForReads(3));
  absl::SleepFor(absl::Milliseconds(50));  // a bad file is tried once
  fs::remove(directory_ / "a");
  ASSERT_TRUE(WaitForReads(4));
  Write(directory_ / "a", "1");
  ASSERT_TRUE(WaitForReads(5));
  absl::MutexLock lock(&mutex_);
  EXPECT_THAT(used_, ElementsAre("1", "3"));
  EXPECT_THAT(reads_, ElementsAre(true, true, false, false, true));
}

// Kubernetes: the files are links into a directory behind a link, which is swapped.
TEST_F(WatchedFilesTest, ASwappedLinkIsAChange) {
  for (const char* version : {"1", "2"}) {
    fs::create_directories(directory_ / version);
    Write(directory_ / version / "a", version);
  }
  fs::create_directory_symlink("1", directory_ / "data");
  fs::create_symlink("data/a", directory_ / "a");
  WatchedFiles files({Group({"a"})}, absl::Milliseconds(5));
  ASSERT_TRUE(files.Load().ok());
  files.Start();
  fs::create_directory_symlink("2", directory_ / "next");
  fs::rename(directory_ / "next", directory_ / "data");
  ASSERT_TRUE(WaitForReads(2));
  absl::MutexLock lock(&mutex_);
  EXPECT_THAT(used_, ElementsAre("2"));
}

TEST_F(WatchedFilesTest, LoadNamesTheFile) {
  const absl::Status missing = WatchedFiles({Group({"none"})}).Load();
  EXPECT_THAT(std::string(missing.message()), HasSubstr("none: got no file"));
  Write(directory_ / "a", "bad");
  EXPECT_THAT(std::string(WatchedFiles({Group({"a"})}).Load().message()), HasSubstr("it is bad"));
  Write(directory_ / "a", std::string(WatchedFiles::kMaxBytes + 1, 'x'));
  EXPECT_THAT(std::string(WatchedFiles({Group({"a"})}).Load().message()), HasSubstr("more than"));
}

}  // namespace
}  // namespace logitd::door

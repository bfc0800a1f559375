#include "server/door/watched_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/manual_clock.h"

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
      used_ = contents;
      return absl::OkStatus();
    };
    group.on_read = [this](bool used) { reads_.push_back(used); };
    return group;
  }
  void APeriodPasses() { clock_.Advance(WatchedFiles::kPeriod); }

  const fs::path directory_ = fs::path(::testing::TempDir()) / "logitd_watched_files";
  ManualClock clock_;
  std::vector<std::string> used_;
  std::vector<bool> reads_;
};

TEST_F(WatchedFilesTest, WhatChangesIsUsedAndWhatIsBadIsNot) {
  Write(directory_ / "a", "1");
  Write(directory_ / "b", "2");
  WatchedFiles files({Group({"a", "b"})}, clock_);
  ASSERT_TRUE(files.Load().ok());
  files.Start();
  Write(directory_ / "b", "3");
  APeriodPasses();
  Write(directory_ / "a", "bad");
  for (int i = 0; i < 3; ++i) APeriodPasses();  // it is tried once
  fs::remove(directory_ / "a");
  APeriodPasses();
  Write(directory_ / "a", "1");
  APeriodPasses();
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
  WatchedFiles files({Group({"a"})}, clock_);
  ASSERT_TRUE(files.Load().ok());
  files.Start();
  fs::create_directory_symlink("2", directory_ / "next");
  fs::rename(directory_ / "next", directory_ / "data");
  APeriodPasses();
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

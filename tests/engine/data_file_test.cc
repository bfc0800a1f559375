#include "server/engine/data_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"

namespace logitd::engine {
namespace {

namespace fs = std::filesystem;

class DataFileTest : public ::testing::Test {
 protected:
  // base/root/in/f and base/out/f, each with the name of its folder in it.
  void SetUp() override {
    base_ = (fs::temp_directory_path() / "logitd-data-file-XXXXXX").string();
    ASSERT_NE(mkdtemp(base_.data()), nullptr);
    base_ = fs::canonical(base_).string();
    root_ = base_ + "/root";
    for (const std::string folder : {"root/in", "out"}) {
      fs::create_directories(base_ + "/" + folder);
      std::ofstream(absl::StrCat(base_, "/", folder, "/f")) << folder;
    }
  }
  void TearDown() override { fs::remove_all(base_); }

  void Link(const std::string& target, const std::string& name) {
    fs::create_symlink(target, root_ + "/" + name);
  }
  std::string Text(const std::string& path) {
    const absl::StatusOr<std::string> text = ReadFile(root_, path, 100);
    return text.ok() ? *text : text.status().ToString();
  }
  absl::StatusCode Code(const std::string& path) {
    return ReadFile(root_, path, 100).status().code();
  }

  void ExpectLinksStayInside() {
    EXPECT_EQ(Text("in/f"), "root/in");
    for (const char* inside : {"relative", "absolute", "folder/f", "chain", "in/up"}) {
      EXPECT_EQ(Text(inside), "root/in") << inside;
    }
    for (const char* outside : {"leaving", "leaving_absolute", "leaving_folder/f", "../out/f",
                                "leaving_chain", "/etc/passwd"}) {
      EXPECT_EQ(Code(outside), absl::StatusCode::kPermissionDenied) << outside;
      EXPECT_FALSE(IsFolder(root_, outside)) << outside;
    }
    EXPECT_EQ(Code("none"), absl::StatusCode::kNotFound);
    EXPECT_EQ(Code("in/f/none"), absl::StatusCode::kNotFound);
    EXPECT_EQ(Code("in"), absl::StatusCode::kInvalidArgument);
    for (const char* folder : {".", "in", "folder"}) EXPECT_TRUE(IsFolder(root_, folder)) << folder;
    for (const char* other : {"none", "folder/f", "leaving_folder"}) {
      EXPECT_FALSE(IsFolder(root_, other)) << other;
    }
  }
  void MakeLinks() {
    Link("in/f", "relative");
    Link(root_ + "/in/f", "absolute");
    Link("in", "folder");
    Link("relative", "chain");
    Link("../folder/f", "in/up");
    Link("../out/f", "leaving");
    Link(base_ + "/out/f", "leaving_absolute");
    Link("../out", "leaving_folder");
    Link("leaving", "leaving_chain");
  }

  // Opens a file while another thread swaps the file, or its folder, with a link that leaves.
  void ExpectASwappedLinkStaysInside() {
    for (const std::string swapped : {"root/swapped", "root/swapped/f"}) {
      const std::string good = base_ + "/" + swapped;
      const std::string bad = base_ + "/link";
      fs::remove_all(bad);
      fs::remove_all(root_ + "/swapped");
      fs::create_directory(root_ + "/swapped");
      fs::copy(root_ + "/in/f", root_ + "/swapped/f");
      fs::create_symlink(base_ + (swapped.ends_with("/f") ? "/out/f" : "/out"), bad);
      std::atomic<bool> done = false;
      std::thread swaps([&] {
        while (!done) {
          if (renameat2(AT_FDCWD, good.c_str(), AT_FDCWD, bad.c_str(), RENAME_EXCHANGE) != 0) {
            ADD_FAILURE() << strerror(errno);  // for example a file system without exchanges
            done = true;
          }
        }
      });
      int opened = 0;
      int refused = 0;
      int wrong = 0;
      for (int i = 0; !done && wrong == 0 && (i < 20'000 || opened == 0 || refused == 0); ++i) {
        const absl::StatusOr<std::string> text = ReadFile(root_, "swapped/f", 100);
        if (text.ok() && *text == "root/in") {
          ++opened;
        } else if (absl::IsPermissionDenied(text.status())) {
          ++refused;
        } else {
          ADD_FAILURE() << (text.ok() ? *text : text.status().ToString());
          ++wrong;
        }
      }
      done = true;
      swaps.join();
    }
  }

  std::string base_;
  std::string root_;
};

TEST_F(DataFileTest, LinksAreFollowedWhileTheyStayInTheRoot) {
  MakeLinks();
  ExpectLinksStayInside();
}

TEST_F(DataFileTest, ALinkThatIsSwappedWhileAFileIsOpenedDoesNotLeadOut) {
  ExpectASwappedLinkStaysInside();
}

TEST_F(DataFileTest, WithoutARootAnyPathIsOpened) {
  root_ = "";
  EXPECT_EQ(Text(base_ + "/out/f"), "out");
  EXPECT_TRUE(IsFolder("", base_ + "/out"));
}

TEST_F(DataFileTest, APointerOfGitLfsIsRefused) {
  std::ofstream(root_ + "/pointer")
      << "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
  const absl::Status status = DataFile::Open(root_, "pointer").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              ::testing::HasSubstr("pointer: got a Git LFS pointer, allowed the file"));
}

}  // namespace
}  // namespace logitd::engine

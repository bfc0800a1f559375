// A hand-written reader and the generated one must agree on cut, damaged and kept messages.
#ifndef LOGITD_TESTS_RPC_JUDGED_H_
#define LOGITD_TESTS_RPC_JUDGED_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "tests/tree.h"

namespace logitd::rpc::testing {

// What the two disagree on; empty: nothing.
using Judge = std::string (*)(std::string_view bytes);

// The beginnings of a message, of every length.
inline void ExpectCutAgrees(std::string_view message, Judge judge) {
  for (size_t size = 0; size <= message.size(); ++size) {
    EXPECT_EQ(judge(message.substr(0, size)), "") << "the first " << size << " bytes";
  }
}

// Every other message is damaged only in its first `head` bytes.
inline void ExpectDamagedAgree(const std::vector<std::string>& messages, size_t count, Judge judge,
                               size_t head = std::string::npos) {
  uint32_t random = 20;
  for (size_t i = 0; i < count; ++i) {
    std::string bytes = messages[i % messages.size()];
    for (size_t damage = 0; damage < 1 + i % 3; ++damage) {
      random = random * 1664525u + 1013904223u;
      const size_t at = (random >> 8) % bytes.size();
      bytes[i % 2 == 0 ? at : at % head] = static_cast<char>(random >> 4);
    }
    EXPECT_EQ(judge(bytes), "") << "damage " << i;
  }
}

inline void ExpectCorpusAgrees(const std::string& fuzzer, Judge judge) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(
           ::logitd::testing::InTree("tests/fuzz/corpus/" + fuzzer))) {
    std::ifstream in(entry.path(), std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(in), {}};
    EXPECT_EQ(judge(bytes), "") << entry.path();
    ++files;
  }
  EXPECT_GT(files, 10);
}

}  // namespace logitd::rpc::testing

#endif  // LOGITD_TESTS_RPC_JUDGED_H_

// What a peer can make the log say, and how much of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "server/log/format.h"
#include "server/log/limited.h"

namespace logitd::log {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

std::string Line(Format format, const std::string& message) {
  std::ostringstream out;
  spdlog::logger logger("test", std::make_shared<spdlog::sinks::ostream_sink_st>(out));
  logger.set_formatter(MakeFormatter(format));
  logger.info(message);
  return out.str();
}

TEST(LogFormatTest, AMessageIsOneLineInBothFormats) {
  const std::string forged = "x\n2026-01-01 00:00:00.000 error device lost: \r\x1b[2J\x7f";
  const std::string text = Line(Format::kText, forged);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  EXPECT_THAT(text,
              EndsWith(R"(info x\x0a2026-01-01 00:00:00.000 error device lost: \x0d\x1b[2J\x7f)"
                       "\n"));
  const std::string json = Line(Format::kJson, forged);
  EXPECT_EQ(std::count(json.begin(), json.end(), '\n'), 1) << json;
  EXPECT_EQ(nlohmann::json::parse(json)["message"],
            R"(x\x0a2026-01-01 00:00:00.000 error device lost: \x0d\x1b[2J\x7f)");
}

TEST(LogFormatTest, BytesThatAreNotUtf8AreEscaped) {
  struct Case {
    const char* bytes;
    const char* written;
  };
  const Case cases[] = {
      {"\xff", R"(\xff)"},
      {"a\x80z", R"(a\x80z)"},
      {"\xc3", R"(\xc3)"},                          // cut
      {"\xc0\xaf", R"(\xc0\xaf)"},                  // longer than needed
      {"\xe0\x80\xaf", R"(\xe0\x80\xaf)"},          // the same of three bytes
      {"\xed\xa0\x80", R"(\xed\xa0\x80)"},          // a surrogate
      {"\xf4\x90\x80\x80", R"(\xf4\x90\x80\x80)"},  // beyond Unicode
      {"\xc2\x9b", R"(\xc2\x9b)"},                  // a control character of terminals
      {"\xe2\x80\xa8", R"(\xe2\x80\xa8)"},          // a line separator
      {"\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", "\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"},
      {"\"quoted\" \\ back", "\"quoted\" \\ back"},
  };
  for (const Case& test : cases) {
    EXPECT_THAT(Line(Format::kText, test.bytes),
                EndsWith(std::string("info ") + test.written + "\n"));
    EXPECT_EQ(nlohmann::json::parse(Line(Format::kJson, test.bytes))["message"], test.written);
  }
}

TEST(LogFormatTest, ALongMessageIsCutAndSaysItsSize) {
  const std::string line = Line(Format::kText, std::string(1 << 20, '\x01'));
  EXPECT_LT(line.size(), 5 * kMaxMessage);
  EXPECT_THAT(line, EndsWith("... (1048576 bytes)\n"));
}

TEST(LineLimitTest, ABurstPassesThenARateAndTheRestIsCounted) {
  constexpr int64_t kSecond = 1'000'000'000;
  LineLimit limit;
  int64_t now = 5 * kSecond;
  const auto allowed = [&](int lines) {
    int count = 0;
    for (int i = 0; i < lines; ++i) count += limit.Allow(now);
    return count;
  };
  EXPECT_EQ(allowed(1000), kBurst);
  EXPECT_EQ(limit.suppressed(), 1000 - kBurst);
  now += kSecond;
  EXPECT_EQ(allowed(1000), kLinesPerSecond);
  now += 3600 * kSecond;
  EXPECT_EQ(allowed(1000), kBurst);
  EXPECT_EQ(limit.TakeNews(), 3000 - 2 * kBurst - kLinesPerSecond);
  EXPECT_EQ(limit.TakeNews(), 0);
}

TEST(LineLimitTest, SuppressedLinesAreReportedOnce) {
  std::ostringstream out;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(std::make_shared<spdlog::logger>(
      "test", std::make_shared<spdlog::sinks::ostream_sink_mt>(out)));
  for (int i = 0; i < 10 * kBurst; ++i) {
    Limited(Source::kConnections, spdlog::level::info, "connection {} was cut", i);
    Limited(Source::kConnections, spdlog::level::debug, "not logged, not counted");
  }
  ReportSuppressed();
  ReportSuppressed();
  spdlog::set_default_logger(before);
  const std::string text = out.str();
  EXPECT_THAT(text, HasSubstr("connection 99 was cut"));
  const size_t report = text.find("suppressed ");
  ASSERT_NE(report, std::string::npos);
  EXPECT_EQ(text.find("suppressed ", report + 1), std::string::npos);
  EXPECT_THAT(text.substr(report), HasSubstr("log lines of connections: more than 20 a second"));
  EXPECT_GE(LimitOf(Source::kConnections).suppressed(), 8 * kBurst);
}

}  // namespace
}  // namespace logitd::log

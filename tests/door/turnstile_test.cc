#include "server/door/turnstile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/door/answer.h"
#include "server/door/call_timeout.h"
#include "tests/door/bytes.h"
#include "tests/door/hpack_encoder.h"

namespace logitd::door {
namespace {

using ::testing::ElementsAre;

// Refuses what it is told to.
class TestJudge final : public Judge {
 public:
  std::optional<Verdict> Ask(const Call& call) override {
    asked = call;
    if (!refuses) return std::nullopt;
    return Verdict{.code = 8, .text = "50% of\nit", .trailers = {{"retry", "7"}}, .reason = 3};
  }
  void OnRefused(int, absl::Span<const std::string>) override {}

  bool refuses = true;
  std::optional<Call> asked;
};

bool IsLower(std::string_view value) { return value.find('X') == std::string_view::npos; }
constexpr LikeCalls::Echo kEchoes[] = {{"x-id", &IsLower}};

class TurnstileTest : public ::testing::Test {
 protected:
  LikeCalls Like() const {
    LikeCalls calls;
    calls.path = "/s/Method";
    calls.allowed = {{.name = "authorization", .values = {"Bearer t"}},
                     {.name = "priority", .values = {std::nullopt, "high"}}};
    calls.size = "bytes";
    calls.max_size = 2000;
    calls.echoes = kEchoes;
    calls.judge = judge_;
    return calls;
  }

  std::optional<Turnstile::Answer> Ask(const HeaderFields& fields, int64_t now_ns = 0) {
    HeaderList list;
    list.Begin();
    EXPECT_TRUE(list.Read(Bytes(HpackEncoder(1, 0).Encode(fields))));
    EXPECT_TRUE(list.whole());
    return turnstile_.Ask(list, now_ns);
  }
  // The refused call with one field changed, removed (no value) or added.
  bool Refuses(const std::string& name, const std::optional<std::string>& value) {
    HeaderFields fields;
    bool found = false;
    for (const auto& field : call_) {
      if (field.first != name) {
        fields.push_back(field);
      } else if (value.has_value()) {
        fields.emplace_back(name, *value);
      }
      found = found || field.first == name;
    }
    if (!found) fields.emplace_back(name, *value);
    return Ask(fields).has_value();
  }

  const HeaderFields call_ = {
      {":method", "POST"},      {":path", "/s/Method"},        {"content-type", "application/grpc"},
      {"grpc-timeout", "200m"}, {"authorization", "Bearer t"}, {"bytes", "1000"}};
  const std::shared_ptr<TestJudge> judge_ = std::make_shared<TestJudge>();
  Turnstile turnstile_;
};

TEST_F(TurnstileTest, LetsEverythingThroughAtFirst) {
  EXPECT_TRUE(turnstile_.empty());
  EXPECT_FALSE(Ask(call_).has_value());
}

TEST_F(TurnstileTest, RefusesCallsThatAreAlike) {
  turnstile_.Add(Like(), 0);
  EXPECT_FALSE(turnstile_.empty());
  EXPECT_TRUE(Ask(call_).has_value());
  EXPECT_TRUE(Refuses("grpc-timeout", "5m"));
  EXPECT_EQ(judge_->asked->timeout_ns, 5'000'000);
  EXPECT_TRUE(Refuses("bytes", "2000"));
  EXPECT_EQ(judge_->asked->size, 2000);
  EXPECT_TRUE(Refuses("bytes", std::nullopt));
  EXPECT_EQ(judge_->asked->size, std::nullopt);
  EXPECT_TRUE(Refuses("priority", "high"));
  EXPECT_TRUE(Refuses("something", "else"));
}

TEST_F(TurnstileTest, LetsOtherCallsThrough) {
  turnstile_.Add(Like(), 0);
  EXPECT_FALSE(Refuses(":path", "/s/Other"));
  EXPECT_FALSE(Refuses(":method", "GET"));
  EXPECT_FALSE(Refuses("content-type", "text/plain"));
  EXPECT_FALSE(Refuses("content-type", std::nullopt));
  EXPECT_FALSE(Refuses("grpc-timeout", std::nullopt)) << "no deadline";
  EXPECT_FALSE(Refuses("grpc-timeout", "200"));
  EXPECT_FALSE(Refuses("authorization", "Bearer u"));
  EXPECT_FALSE(Refuses("authorization", "Bearer"));
  EXPECT_FALSE(Refuses("authorization", std::nullopt));
  EXPECT_FALSE(Refuses("priority", "low"));
  EXPECT_FALSE(Refuses("bytes", "-1"));
  EXPECT_FALSE(Refuses("bytes", "2001"));
  EXPECT_FALSE(Refuses("bytes", "many"));
  EXPECT_FALSE(judge_->asked.has_value());
}

TEST_F(TurnstileTest, LetsACallWithARepeatedFieldThrough) {
  turnstile_.Add(Like(), 0);
  for (const auto& field : call_) {
    HeaderFields twice = call_;
    twice.push_back(field);
    EXPECT_FALSE(Ask(twice).has_value()) << field.first;
  }
}

TEST_F(TurnstileTest, TheJudgeDecides) {
  turnstile_.Add(Like(), 0);
  EXPECT_TRUE(Ask(call_).has_value());
  judge_->refuses = false;
  EXPECT_FALSE(Ask(call_).has_value());
  judge_->refuses = true;
  EXPECT_TRUE(Ask(call_).has_value());
}

TEST_F(TurnstileTest, AJudgeLeavesSomeTimeAfterTheLastRefusal) {
  turnstile_.Add(Like(), 1000);
  EXPECT_TRUE(Ask(call_, 2000).has_value());
  EXPECT_TRUE(Ask(call_, 1999 + Turnstile::kStay).has_value());
  judge_->refuses = false;
  EXPECT_FALSE(Ask(call_, 1998 + 2 * Turnstile::kStay).has_value());
  EXPECT_FALSE(turnstile_.empty());
  judge_->refuses = true;
  EXPECT_FALSE(Ask(call_, 1999 + 2 * Turnstile::kStay).has_value());
  EXPECT_TRUE(turnstile_.empty());
}

// They are on their way through gRPC: without them a flood would fill it before the first one begins.
TEST_F(TurnstileTest, TheJudgeKnowsHowManyCallsAreComing) {
  turnstile_.Add(Like(), 0);
  EXPECT_TRUE(Ask(call_).has_value());
  EXPECT_EQ(judge_->asked->coming, 0) << "a refused call does not come";
  judge_->refuses = false;
  for (int i = 0; i < 5; ++i) {
    EXPECT_FALSE(Ask(call_, i).has_value());
    EXPECT_EQ(judge_->asked->coming, i);
  }
  HeaderFields other = call_;
  other[1].second = "/s/Other";
  EXPECT_FALSE(Ask(other).has_value());
  turnstile_.Began();
  turnstile_.Began();
  EXPECT_FALSE(Ask(call_, 5).has_value());
  EXPECT_EQ(judge_->asked->coming, 3);
}

TEST_F(TurnstileTest, CallsThatNeverBeganAreForgotten) {
  turnstile_.Add(Like(), 0);
  judge_->refuses = false;
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(Ask(call_, i).has_value());
  EXPECT_FALSE(Ask(call_, Turnstile::kComing + 2).has_value());
  EXPECT_EQ(judge_->asked->coming, 2);
  for (size_t i = 0; i < 2 * Turnstile::kMostComing; ++i) Ask(call_, Turnstile::kComing + 2);
  EXPECT_EQ(judge_->asked->coming, static_cast<int>(Turnstile::kMostComing));
}

TEST_F(TurnstileTest, ANewJudgeOfTheSameCallsReplacesTheOldOne) {
  turnstile_.Add(Like(), 0);
  const auto other = std::make_shared<TestJudge>();
  LikeCalls calls = Like();
  calls.judge = other;
  turnstile_.Add(calls, 0);
  EXPECT_EQ(Ask(call_)->judge, other);
  EXPECT_FALSE(judge_->asked.has_value());
}

TEST_F(TurnstileTest, KeepsAFewJudges) {
  for (size_t i = 0; i < Turnstile::kMost; ++i) {
    LikeCalls calls = Like();
    calls.path = absl::StrCat("/s/", i);
    turnstile_.Add(calls, 0);
  }
  EXPECT_TRUE(Refuses(":path", "/s/0"));
  turnstile_.Add(Like(), 0);
  EXPECT_FALSE(Refuses(":path", "/s/0")) << "the oldest leaves";
  EXPECT_TRUE(Refuses(":path", "/s/1"));
  EXPECT_TRUE(Ask(call_).has_value());
}

HeaderFields AnswerTo(const std::optional<Turnstile::Answer>& answer) {
  HeaderList list;
  list.Begin();
  EXPECT_TRUE(list.Read(Bytes(answer->fields)));
  EXPECT_TRUE(list.whole());
  HeaderFields fields;
  for (size_t i = 0; i < list.size(); ++i) fields.emplace_back(list[i].name, list[i].value);
  list.Begin();
  EXPECT_TRUE(list.Read(Bytes("\xbe")));
  EXPECT_FALSE(list.whole()) << "the peer's table, which was empty, has a field";
  return fields;
}

TEST_F(TurnstileTest, AnswersAsGrpcEndsACall) {
  turnstile_.Add(Like(), 0);
  EXPECT_EQ(Ask(call_)->reason, 3);
  EXPECT_EQ(AnswerTo(Ask(call_)), (HeaderFields{{":status", "200"},
                                                {"content-type", "application/grpc"},
                                                {"grpc-status", "8"},
                                                {"grpc-message", "50%25 of%0Ait"},
                                                {"retry", "7"}}));
}

TEST_F(TurnstileTest, RepeatsWhatTheCallSaysIfItIsWellFormed) {
  turnstile_.Add(Like(), 0);
  HeaderFields call = call_;
  call.emplace_back("x-id", "me");
  EXPECT_EQ(AnswerTo(Ask(call)).back(), (HeaderFields::value_type{"x-id", "me"}));
  EXPECT_THAT(Ask(call)->echoed, ElementsAre("me"));
  call.emplace_back("x-id", "me");
  EXPECT_EQ(AnswerTo(Ask(call)).back().first, "retry") << "not if it is there twice";
  call = call_;
  call.emplace_back("x-id", "X");
  EXPECT_EQ(AnswerTo(Ask(call)).back().first, "retry");
  EXPECT_THAT(Ask(call)->echoed, ElementsAre(""));
}

TEST(ParseTimeoutTest, ReadsEveryUnitUpToSeconds) {
  EXPECT_EQ(ParseTimeout("7n"), 7);
  EXPECT_EQ(ParseTimeout("12345678u"), 12'345'678'000);
  EXPECT_EQ(ParseTimeout("200m"), 200'000'000);
  EXPECT_EQ(ParseTimeout("99999999S"), 99'999'999'000'000'000);
  for (const char* text :
       {"", "m", "1", "1M", "1H", "123456789m", "-1m", "+1m", " 1m", "1 m", "1x"}) {
    EXPECT_EQ(ParseTimeout(text), std::nullopt) << text;
  }
}

TEST(AnswerTest, ALongFieldIsReadAgain) {
  for (const size_t bytes : {0, 126, 127, 128, 254, 255, 256, 300, 5000}) {
    std::string block;
    AppendField("name", std::string(bytes, 'v'), &block);
    HeaderList list;
    list.Begin();
    EXPECT_TRUE(list.Read(Bytes(block)));
    EXPECT_TRUE(list.whole());
    ASSERT_EQ(list.size(), 1U);
    EXPECT_EQ(list[0].value.size(), bytes);
    EXPECT_LE(block.size(), list.bytes());
  }
}

}  // namespace
}  // namespace logitd::door

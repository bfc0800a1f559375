#include "server/door/turnstile.h"

#include <gtest/gtest.h>

#include <limits>
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

class NoEvents final : public RefusalEvents {
  void OnRefused(absl::Span<const std::string>) override {}
};

bool IsLower(std::string_view value) { return value.find('X') == std::string_view::npos; }
constexpr Refusal::Echo kEchoes[] = {{"x-id", &IsLower}};

class TurnstileTest : public ::testing::Test {
 protected:
  Refusal MakeRefusal() const {
    Refusal refusal;
    refusal.path = "/s/Method";
    refusal.allowed = {{.name = "authorization", .values = {"Bearer t"}},
                       {.name = "priority", .values = {std::nullopt, "high"}}};
    refusal.size = {.name = "bytes", .range = {{1000, 2000}}};
    refusal.longest_ns = 200'000'000;
    refusal.until_ns = 1000;
    refusal.code = 8;
    refusal.text = "50% of\nit";
    refusal.trailers = {{"retry", "7"}};
    refusal.echoes = kEchoes;
    refusal.events = std::make_shared<NoEvents>();
    return refusal;
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
  Turnstile turnstile_;
};

TEST_F(TurnstileTest, LetsEverythingThroughAtFirst) {
  EXPECT_TRUE(turnstile_.empty());
  EXPECT_FALSE(Ask(call_).has_value());
}

TEST_F(TurnstileTest, RefusesCallsThatAreAlike) {
  turnstile_.Add(MakeRefusal());
  EXPECT_FALSE(turnstile_.empty());
  EXPECT_TRUE(Ask(call_).has_value());
  EXPECT_TRUE(Refuses("grpc-timeout", "5m")) << "less time";
  EXPECT_TRUE(Refuses("bytes", "2000"));
  EXPECT_TRUE(Refuses("priority", "high"));
  EXPECT_TRUE(Refuses("something", "else"));
}

TEST_F(TurnstileTest, LetsOtherCallsThrough) {
  turnstile_.Add(MakeRefusal());
  EXPECT_FALSE(Refuses(":path", "/s/Other"));
  EXPECT_FALSE(Refuses(":method", "GET"));
  EXPECT_FALSE(Refuses("content-type", "text/plain"));
  EXPECT_FALSE(Refuses("content-type", std::nullopt));
  EXPECT_FALSE(Refuses("grpc-timeout", "201m")) << "more time";
  EXPECT_FALSE(Refuses("grpc-timeout", std::nullopt)) << "no deadline";
  EXPECT_FALSE(Refuses("grpc-timeout", "200"));
  EXPECT_FALSE(Refuses("authorization", "Bearer u"));
  EXPECT_FALSE(Refuses("authorization", "Bearer"));
  EXPECT_FALSE(Refuses("authorization", std::nullopt));
  EXPECT_FALSE(Refuses("priority", "low"));
  EXPECT_FALSE(Refuses("bytes", "999"));
  EXPECT_FALSE(Refuses("bytes", "2001"));
  EXPECT_FALSE(Refuses("bytes", "many"));
  EXPECT_FALSE(Refuses("bytes", std::nullopt)) << "no size";
}

TEST_F(TurnstileTest, LetsACallWithARepeatedFieldThrough) {
  turnstile_.Add(MakeRefusal());
  for (const auto& field : call_) {
    HeaderFields twice = call_;
    twice.push_back(field);
    EXPECT_FALSE(Ask(twice).has_value()) << field.first;
  }
}

TEST_F(TurnstileTest, ARefusalWithoutASizeIsForCallsWithoutOne) {
  Refusal refusal = MakeRefusal();
  refusal.size.range = std::nullopt;
  turnstile_.Add(refusal);
  EXPECT_FALSE(Ask(call_).has_value());
  EXPECT_TRUE(Refuses("bytes", std::nullopt));
}

TEST_F(TurnstileTest, ARefusalEnds) {
  turnstile_.Add(MakeRefusal());
  EXPECT_TRUE(Ask(call_, 999).has_value());
  EXPECT_FALSE(Ask(call_, 1000).has_value());
  EXPECT_FALSE(turnstile_.empty()) << "it lingers";
  EXPECT_FALSE(Ask(call_, 1000 + Turnstile::kLinger).has_value());
  EXPECT_TRUE(turnstile_.empty());
}

// A flood that waits in gRPC for the next verdict would make every later call late.
TEST_F(TurnstileTest, WhenARefusalHasEndedOnlyAFewCallsAreInTransit) {
  turnstile_.Add(MakeRefusal());
  for (int i = 0; i < Turnstile::kMostInTransit; ++i) EXPECT_FALSE(Ask(call_, 1000).has_value());
  EXPECT_TRUE(Ask(call_, 1000).has_value());
  HeaderFields other = call_;
  other[1].second = "/s/Other";
  EXPECT_FALSE(Ask(other, 1000).has_value());
  turnstile_.Began();
  turnstile_.Began();
  EXPECT_FALSE(Ask(call_, 1000).has_value());
  EXPECT_FALSE(Ask(call_, 1000).has_value());
  EXPECT_TRUE(Ask(call_, 1000).has_value());
}

TEST_F(TurnstileTest, CallsThatNeverBeganKeepNobodyOutForLong) {
  turnstile_.Add(MakeRefusal());
  for (int i = 0; i < Turnstile::kMostInTransit; ++i) EXPECT_FALSE(Ask(call_, 1000).has_value());
  EXPECT_TRUE(Ask(call_, 999 + Turnstile::kLinger).has_value());
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(Ask(call_, 1000 + Turnstile::kLinger).has_value());
}

TEST_F(TurnstileTest, CallsThatHaveNotBegunCountAsUnderWay) {
  Refusal refusal = MakeRefusal();
  refusal.under_way = std::make_shared<std::atomic<int>>(1);
  refusal.least_under_way = 3;
  turnstile_.Add(refusal);
  EXPECT_FALSE(Ask(call_).has_value());
  EXPECT_FALSE(Ask(call_).has_value());
  EXPECT_TRUE(Ask(call_).has_value());
}

TEST_F(TurnstileTest, ARefusalHoldsOnlyWhileTheCallerHasCallsUnderWay) {
  const auto calls = std::make_shared<std::atomic<int>>(2);
  Refusal refusal = MakeRefusal();
  refusal.under_way = calls;
  refusal.least_under_way = 2;
  turnstile_.Add(refusal);
  EXPECT_TRUE(Ask(call_).has_value());
  *calls = 1;
  EXPECT_FALSE(Ask(call_).has_value());
}

TEST_F(TurnstileTest, ANewRefusalOfTheSameKindReplacesTheOldOne) {
  turnstile_.Add(MakeRefusal());
  Refusal shorter = MakeRefusal();
  shorter.longest_ns = 100'000'000;
  turnstile_.Add(shorter);
  EXPECT_FALSE(Ask(call_).has_value());
  EXPECT_TRUE(Refuses("grpc-timeout", "100m"));
}

TEST_F(TurnstileTest, RefusalsOfOtherSizesStandBesideIt) {
  turnstile_.Add(MakeRefusal());
  Refusal large = MakeRefusal();
  large.size.range = {{50000, 60000}};
  turnstile_.Add(large);
  EXPECT_TRUE(Ask(call_).has_value());
  EXPECT_TRUE(Refuses("bytes", "55555"));
  EXPECT_FALSE(Refuses("bytes", "3000"));
}

TEST_F(TurnstileTest, KeepsAFewRefusals) {
  for (size_t i = 0; i < Turnstile::kMost; ++i) {
    Refusal refusal = MakeRefusal();
    refusal.path = absl::StrCat("/s/", i);
    turnstile_.Add(refusal);
  }
  EXPECT_TRUE(Refuses(":path", "/s/0"));
  turnstile_.Add(MakeRefusal());
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
  turnstile_.Add(MakeRefusal());
  EXPECT_EQ(AnswerTo(Ask(call_)), (HeaderFields{{":status", "200"},
                                                {"content-type", "application/grpc"},
                                                {"grpc-status", "8"},
                                                {"grpc-message", "50%25 of%0Ait"},
                                                {"retry", "7"}}));
}

TEST_F(TurnstileTest, RepeatsWhatTheCallSaysIfItIsWellFormed) {
  turnstile_.Add(MakeRefusal());
  HeaderFields call = call_;
  call.emplace_back("x-id", "me");
  EXPECT_EQ(AnswerTo(Ask(call)).back(), (HeaderFields::value_type{"x-id", "me"}));
  EXPECT_EQ(Ask(call)->echoed, std::vector<std::string>{"me"});
  call.emplace_back("x-id", "me");
  EXPECT_EQ(AnswerTo(Ask(call)).back().first, "retry") << "not if it is there twice";
  call = call_;
  call.emplace_back("x-id", "X");
  EXPECT_EQ(AnswerTo(Ask(call)).back().first, "retry");
  EXPECT_EQ(Ask(call)->echoed, std::vector<std::string>{""});
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

#include "server/door/identities.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace logitd::door {
namespace {

using ::testing::HasSubstr;

// SHA-256 of "a-token-of-the-frontend", by sha256sum.
constexpr char kHash[] = "1a8053145c0b1b7c32493c9d651ae8213f605665a33f4efe8191b6e5e5ad2988";
constexpr char kToken[] = "a-token-of-the-frontend";

std::string File(const std::string& entries) {
  return absl::StrCat("{\"identities\": [", entries, "]}");
}

Credentials Token(const std::string& token) { return {.token = HashToken(token)}; }

class IdentitiesTest : public ::testing::Test {
 protected:
  std::string NameOf(const Credentials& credentials) const {
    const auto found = identities_.Find(credentials);
    if (!found.ok()) return std::string(found.status().message());
    constexpr const char* kProofs[] = {"token", "certificate", "user"};  // in the order of Proof
    return absl::StrCat(found->identity->name, " by ", kProofs[static_cast<int>(found->proof)]);
  }
  Identities identities_;
};

TEST_F(IdentitiesTest, NobodyIsKnownBeforeTheFile) {
  EXPECT_EQ(identities_.Find(Token(kToken)).status().code(), absl::StatusCode::kUnauthenticated);
}

TEST_F(IdentitiesTest, TheTokenCountsBeforeTheCertificateAndThatBeforeTheUser) {
  ASSERT_TRUE(identities_
                  .Set(File(absl::StrCat(
                      R"({"name": "a", "roles": ["infer"], "token_sha256": [")", kHash, R"("]},)",
                      R"({"name": "b", "roles": ["score"], "certificates": ["dns:b", "cn:b"]},)",
                      R"({"name": "c", "roles": ["admin", "heads"], "uids": [7]})")))
                  .ok());
  Credentials all = Token(kToken);
  all.certificate_names = {"dns:b"};
  all.uid = 7;
  EXPECT_EQ(NameOf(all), "a by token");
  all.token = std::nullopt;
  EXPECT_EQ(NameOf(all), "b by certificate");
  all.certificate_names = {"dns:x", "cn:b"};
  EXPECT_EQ(NameOf(all), "b by certificate");
  all.certificate_names = {"uri:b", "dns:cn:b"};
  EXPECT_EQ(NameOf(all), "c by user");
  all.uid = 8;
  EXPECT_THAT(NameOf(all), HasSubstr("no identity"));
  // A wrong token does not fall back to what would be right.
  all = Token("a-token-of-the-frontenD");
  all.certificate_names = {"dns:b"};
  EXPECT_EQ(NameOf(all), "the token is unknown");
}

TEST_F(IdentitiesTest, ACertificateOfTwoIdentitiesIsNeither) {
  ASSERT_TRUE(identities_
                  .Set(File(R"({"name": "a", "roles": ["infer"], "certificates": ["dns:a"]},
                       {"name": "b", "roles": ["infer"], "certificates": ["dns:b"]})"))
                  .ok());
  EXPECT_THAT(NameOf({.certificate_names = {"dns:a", "dns:b"}}), HasSubstr("two identities"));
}

TEST_F(IdentitiesTest, RolesAndLimitsAreThoseOfTheFile) {
  ASSERT_TRUE(identities_
                  .Set(File(R"({"name": "a", "roles": ["infer", "heads"], "uids": [1],
                                "weight": 2.5, "max_held_bytes": 1000, "max_calls": 3,
                                "max_rows_per_second": 0.5})"))
                  .ok());
  const Identity a = *identities_.Find({.uid = 1})->identity;
  EXPECT_TRUE(a.Has(Role::kInfer));
  EXPECT_FALSE(a.Has(Role::kScore));
  EXPECT_TRUE(a.Has(Role::kHeads));
  EXPECT_FALSE(a.Has(Role::kAdmin));
  EXPECT_EQ(a.RoleList(), "infer, heads");
  EXPECT_EQ(a.weight, 2.5);
  EXPECT_EQ(a.max_held_bytes, 1000);
  EXPECT_EQ(a.max_calls, 3);
  EXPECT_EQ(a.max_rows_per_second, 0.5);
}

TEST_F(IdentitiesTest, AReloadKeepsIdsAndUsageByName) {
  const std::string text = File(R"({"name": "a", "roles": ["infer"], "uids": [1], "max_calls": 1},
                                   {"name": "b", "roles": ["infer"], "uids": [2]})");
  ASSERT_TRUE(identities_.Set(text).ok());
  const auto before = identities_.Find({.uid = 1})->identity;
  EXPECT_TRUE(before->usage->BeginCall(1));
  ASSERT_TRUE(identities_.Set(absl::StrReplaceAll(text, {{"[1]", "[3]"}})).ok());
  const auto after = identities_.Find({.uid = 3})->identity;
  EXPECT_EQ(after->id, before->id);
  EXPECT_FALSE(after->usage->BeginCall(1));
  EXPECT_NE(identities_.Find({.uid = 2})->identity->id, after->id);
  EXPECT_FALSE(identities_.Find({.uid = 1}).ok());
}

TEST_F(IdentitiesTest, AWrongFileSaysWhereAndLeavesTheOldOne) {
  ASSERT_TRUE(identities_.Set(File(R"({"name": "a", "roles": ["infer"], "uids": [1]})")).ok());
  const struct {
    std::string text;
    std::string error;
  } cases[] = {
      {"", "identities"},
      {"[]", "identities"},
      {"{\"identities\": []}", "1 to 4096"},
      {"{\"identities\": [], \"more\": 1}", "identities"},
      {File("1"), "identities[0]: got 1, allowed an object"},
      {File(R"({"roles": ["infer"], "uids": [1]})"), "identities[0].name"},
      {File(R"({"name": "a b", "roles": ["infer"], "uids": [1]})"), "identities[0].name"},
      {File(R"({"name": "a", "uids": [1]})"), "with roles"},
      {File(R"({"name": "a", "roles": [], "uids": [1]})"), "identities[0].roles"},
      {File(R"({"name": "a", "roles": ["infr"], "uids": [1]})"),
       "identities[0].roles[0]: got \"infr\", allowed infer, score, heads, admin"},
      {File(R"({"name": "a", "roles": ["infer"]})"), "with token_sha256, certificates or uids"},
      {File(R"({"name": "a", "roles": ["infer"], "uids": [-1]})"), "identities[0].uids[0]"},
      {File(R"({"name": "a", "roles": ["infer"], "uids": ["root"]})"), "identities[0].uids[0]"},
      {File(R"({"name": "a", "roles": ["infer"], "uids": [65534]})"), "not 65534"},
      {File(R"({"name": "a", "roles": ["infer"], "token_sha256": ["12"]})"), "64 hexadecimal"},
      {File(R"({"name": "a", "roles": ["infer"], "token": "x", "uids": [1]})"), "got \"token\""},
      {File(R"({"name": "a", "roles": ["infer"], "certificates": ["b"]})"), "uri:..., dns:..."},
      {File(R"({"name": "a", "roles": ["infer"], "uids": [1], "weight": 0})"), ".weight"},
      {File(R"({"name": "a", "roles": ["infer"], "uids": [1], "max_calls": 0})"), ".max_calls"},
      {File(R"({"name": "a", "roles": ["infer"], "uids": [1], "max_calls": 1.5})"), ".max_calls"},
      {File(R"({"name": "a", "roles": ["infer"], "uids": [1, 1]})"), "identities[0].uids[1]"},
      {File(R"({"name": "a", "roles": ["infer"], "roles": ["admin"], "uids": [1]})"), "twice"},
      {File(R"({"name": "a", "roles": ["infer"], "uids": [1]},
               {"name": "a", "roles": ["infer"], "uids": [2]})"),
       "identities[1].name"},
      {File(R"({"name": "a", "roles": ["infer"], "uids": [1]},
               {"name": "b", "roles": ["admin"], "uids": [1]})"),
       "identities[1].uids[0]"},
  };
  for (const auto& c : cases) {
    const absl::Status status = identities_.Set(c.text);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.error)) << c.text;
  }
  EXPECT_EQ(NameOf({.uid = 1}), "a by user");
}

TEST(UsageTest, CallsAreCountedUpToTheLimit) {
  Usage usage;
  EXPECT_TRUE(usage.BeginCall(2));
  EXPECT_TRUE(usage.BeginCall(2));
  EXPECT_FALSE(usage.BeginCall(2));
  EXPECT_EQ(usage.calls(), 2);
  usage.EndCall();
  EXPECT_TRUE(usage.BeginCall(2));
  EXPECT_TRUE(usage.BeginCall(0));  // no limit
}

TEST(UsageTest, RowsComeBackWithTime) {
  Usage usage;
  const int64_t start = 1'000'000'000'000;
  // 100 rows a second: a second's rows at once, then what comes back.
  EXPECT_EQ(usage.TakeRows(60, 100, start), absl::ZeroDuration());
  EXPECT_EQ(usage.TakeRows(60, 100, start), absl::ZeroDuration());  // 40 were left: in debt by 20
  EXPECT_EQ(usage.TakeRows(1, 100, start), absl::Milliseconds(200));
  EXPECT_GT(usage.TakeRows(1, 100, start + 199'000'000), absl::ZeroDuration());
  EXPECT_EQ(usage.TakeRows(1, 100, start + 201'000'000), absl::ZeroDuration());
  // A long pause gives no more than a second's rows, and a request may have more than those.
  EXPECT_EQ(usage.TakeRows(1000, 100, start + 3600'000'000'000), absl::ZeroDuration());
  EXPECT_EQ(usage.TakeRows(1, 100, start + 3600'000'000'000), absl::Seconds(9));
  EXPECT_EQ(usage.TakeRows(1 << 30, 0, start), absl::ZeroDuration());  // no limit
}

}  // namespace
}  // namespace logitd::door

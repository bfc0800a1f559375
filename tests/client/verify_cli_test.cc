// logitctl verify against the real server, and against the client library.
#include <gmock/gmock.h>
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "tests/client/scoring_logitd.h"
#include "tests/client/subprocess.h"
#include "tests/client/test_files.h"
#include "tests/client/test_values.h"

namespace logitd {
namespace {

using ::logitd::testing::BytesOf;
using ::logitd::testing::Normal;
using ::logitd::testing::Npy;
using ::logitd::testing::NpyF32;
using ::logitd::testing::Ran;
using ::logitd::testing::ViewOf;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

constexpr int kVocab = 8;

std::string NpyIds(const std::vector<int32_t>& ids) {
  return Npy(
      absl::StrCat("{'descr': '<i4', 'fortran_order': False, 'shape': (", ids.size(), ",), }\n"),
      BytesOf(ids));
}

class VerifyCliTest : public testing::ScoringLogitd {
 protected:
  // The answer in JSON, with keys of VerifyResponse only.
  v1::VerifyResponse Verified(std::vector<std::string> args) {
    args.insert(args.begin(), "verify");
    args.insert(args.end(), {"--format", "json"});
    const Ran ran = Logitctl(args);
    EXPECT_EQ(ran.code, 0) << ran.err;
    v1::VerifyResponse response;
    const auto status = google::protobuf::util::JsonStringToMessage(ran.out, &response);
    EXPECT_TRUE(status.ok()) << status.ToString() << ran.out;
    return response;
  }

  // `rows` rows of random logits.
  client::VerifyRequest Request(int64_t rows) {
    client::VerifyRequest request = {.rows = rows, .vocab = kVocab};
    request.logits = {ViewOf(logits_).substr(0, static_cast<size_t>(rows * kVocab) * 4)};
    for (int64_t row = 0; row < rows; ++row) {
      request.params.add_seed(static_cast<uint64_t>(40 + row));
    }
    return request;
  }
  std::string Logits(int rows) {
    return dir_.Write("logits.npy",
                      NpyF32(rows, kVocab, {logits_.begin(), logits_.begin() + rows * kVocab}));
  }
  static std::string Seeds(int64_t rows) {
    std::string seeds = "40";
    for (int64_t row = 1; row < rows; ++row) absl::StrAppend(&seeds, ",", 40 + row);
    return seeds;
  }
  void ExpectSame(const v1::VerifyResponse& got, const client::VerifyRequest& request) {
    const absl::StatusOr<client::VerifyResult> want = client_->Verify(request);
    ASSERT_TRUE(want.ok()) << want.status();
    EXPECT_THAT(got.accepted(), ElementsAreArray(want->answer.accepted()));
    EXPECT_THAT(got.tokens(), ElementsAreArray(want->answer.tokens()));
    EXPECT_THAT(got.status(), ElementsAreArray(want->answer.status()));
    EXPECT_THAT(got.top_ids(), ElementsAreArray(want->answer.top_ids()));
    for (int row = 0; row < got.tokens_size(); ++row) {
      if (got.status(row) != v1::ROW_STATUS_OK) continue;
      EXPECT_EQ(got.logprobs(row), want->answer.logprobs(row)) << row;
    }
  }

  const std::vector<float> logits_ = Normal(6 * kVocab, 9);
};

TEST_F(VerifyCliTest, PrintsWhatIsAcceptedAndTheBonusToken) {
  const std::string npy = dir_.Write("a.npy", NpyF32(3, 3, {1, 3, 2, 1, 3, 2, 1, 3, 2}));
  const std::vector<std::string> greedy = {
      "verify",        "--logits", npy,      "--ids",          "1,2",
      "--temperature", "0",        "--rank", "--top-logprobs", "1"};
  const Ran table = Logitctl(greedy);
  ASSERT_EQ(table.code, 0) << table.err;
  EXPECT_THAT(table.out,
              AllOf(HasSubstr("sequence 0: 1 of 2 drafts accepted\n"),
                    HasSubstr("     0        1      1    -0.407606        1  accepted"),
                    HasSubstr("     1        1      1    -0.407606        2  bonus token"),
                    HasSubstr("   top        1      1    -0.407606\n"),
                    HasSubstr("     2        -      -            -        -  NOT_REACHED"),
                    HasSubstr("client: round trip")));
  const v1::VerifyResponse json = Verified({greedy.begin() + 1, greedy.end()});
  EXPECT_THAT(json.accepted(), ElementsAre(1));
  EXPECT_THAT(json.tokens(), ElementsAre(1, 1, -1));
}

TEST_F(VerifyCliTest, SequencesOfHiddenStatesFollowEachOther) {
  // The tiny head's logits are (a, b, -a - b): greedy rows take 1, 0, 2, 1, 1.
  const std::string states = dir_.Write("s.npy", NpyF32(5, 2, {0, 1, 1, 0, -1, -1, 0, 1, 0, 2}));
  const v1::VerifyResponse two =
      Verified({"--hidden", states, "--head", "tiny", "--sequence-rows", "3,2", "--drafts",
                dir_.Write("d.npy", NpyIds({1, 0, 2})), "--temperature", "0"});
  EXPECT_THAT(two.accepted(), ElementsAre(2, 0));
  EXPECT_THAT(two.tokens(), ElementsAre(1, 0, 2, 1, -1));
  EXPECT_EQ(two.head_version(), 1);
  const v1::VerifyResponse allowed =
      Verified({"--hidden", states, "--head", "tiny", "--sequence-rows", "1,1,1,1,1", "--allow",
                "0", "--temperature", "0"});
  EXPECT_THAT(allowed.tokens(), ElementsAre(0, 0, 0, 0, 0));
}

TEST_F(VerifyCliTest, DraftsOfEveryKindHaveTheAnswersOfTheLibrary) {
  const std::string logits = Logits(4);
  client::VerifyRequest request = Request(4);
  request.params.add_sequence_rows(4);
  for (int draft : {2, 5, 1}) request.params.add_drafts(draft);
  request.params.add_top_logprobs(2);
  const std::vector<std::string> args = {"--logits", logits,  "--seed",         Seeds(4),
                                         "--ids",    "2,5,1", "--top-logprobs", "2"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), args.begin(), args.end());
    return Verified(more);
  };
  ExpectSame(with({}), request);

  const std::vector<float> dense(3 * kVocab, 1.0f / kVocab);
  const std::string dense_file = dir_.Write("dense.npy", NpyF32(3, kVocab, dense));
  request.params.add_draft_kind(v1::DRAFT_KIND_DENSE);
  request.params.set_draft_probs(BytesOf(dense));
  ExpectSame(with({"--draft-kind", "dense", "--draft-probs", dense_file}), request);
  request.params.set_block_verification(true);
  ExpectSame(with({"--draft-kind", "dense", "--draft-probs", dense_file, "--block-verification"}),
             request);

  // Two ids each; then lists of their own beside a greedy draft.
  const std::vector<float> listed = {0.25f, 0.75f, 0.5f, 0.5f, 0.9f, 0.1f};
  const std::string listed_file = dir_.Write("listed.npy", NpyF32(1, 6, listed));
  const std::string ids = dir_.Write("ids.npy", NpyIds({0, 2, 5, 6, 1, 3}));
  request.params.set_draft_kind(0, v1::DRAFT_KIND_LIST);
  request.params.add_draft_count(2);
  for (int id : {0, 2, 5, 6, 1, 3}) request.params.add_draft_ids(id);
  request.params.set_draft_probs(BytesOf(listed));
  request.params.set_block_verification(false);
  ExpectSame(with({"--draft-kind", "list", "--draft-ids", ids, "--draft-probs", listed_file}),
             request);
  request.params.clear_draft_kind();
  for (auto kind : {v1::DRAFT_KIND_LIST, v1::DRAFT_KIND_GREEDY, v1::DRAFT_KIND_LIST}) {
    request.params.add_draft_kind(kind);
  }
  request.params.clear_draft_count();
  for (int count : {1, 5}) request.params.add_draft_count(count);
  request.params.clear_draft_ids();
  for (int id : {2, 0, 1, 2, 3, 4}) request.params.add_draft_ids(id);
  const std::string own = dir_.Write("own.npy", NpyIds({2, 0, 1, 2, 3, 4}));
  ExpectSame(with({"--draft-kind", "list,greedy,list", "--draft-ids", own, "--draft-count", "1,5",
                   "--draft-probs", listed_file}),
             request);
}

TEST_F(VerifyCliTest, AFileOfParametersMayHaveTheDrafts) {
  const std::string params = dir_.Write("p.json", R"({"sequence_rows": [2, 2], "drafts": [3, 4],
      "temperature": [0.5], "seed": ["40", "41", "42", "43"], "draft_kind": ["DRAFT_KIND_GREEDY"]})");
  client::VerifyRequest request = Request(4);
  for (int i = 0; i < 2; ++i) request.params.add_sequence_rows(2);
  for (int draft : {3, 4}) request.params.add_drafts(draft);
  request.params.add_temperature(0.5f);
  const std::string logits = Logits(4);
  ExpectSame(Verified({"--logits", logits, "--params", params}), request);
  request.params.set_drafts(0, 1);
  request.params.set_temperature(0, 2);
  ExpectSame(
      Verified({"--logits", logits, "--params", params, "--ids", "1,4", "--temperature", "2"}),
      request);
}

TEST(VerifyHelpTest, ItsParametersAreDescribedAsThoseOfSample) {
  const auto described = [](const char* command) {
    const Ran help = testing::RunBinary("logitctl", {command, "--help"});
    const size_t from = help.out.find("  --position INTEGER");
    return help.out.substr(from, help.out.find("  --draws") - from);
  };
  const std::string verify = described("verify");
  EXPECT_THAT(verify, HasSubstr("eeps the k highest logits"));
  const std::string sample = described("sample");
  EXPECT_EQ(verify.substr(0, sample.size()), sample);
}

TEST_F(VerifyCliTest, BadInputIsRefusedByItsFlag) {
  const std::string logits = Logits(4);
  const std::string ids = dir_.Write("ids.npy", NpyIds({0, 2, 5, 6}));
  const std::string f16 = dir_.Write(
      "f16.npy",
      Npy("{'descr': '<f2', 'fortran_order': False, 'shape': (1, 2), }\n", std::string(4, '\0')));
  struct Case {
    std::vector<std::string> args;
    const char* error;
  };
  const Case cases[] = {
      {{"--ids", "1,2,3", "--drafts", ids}, "--drafts: got beside --ids, allowed one of the two"},
      {{"--ids", "1,x"}, "--ids: got \"x\", allowed integers 0..2147483647"},
      {{"--sequence-rows", "0"}, "--sequence-rows: got \"0\", allowed integers 1..2147483647"},
      {{"--draft-kind", "sure"}, "--draft-kind: got \"sure\", allowed greedy, list, dense"},
      {{"--ids", "1,2"}, "drafts: got 2 values, allowed 3"},
      {{"--ids", "1,2,3", "--draft-kind", "list", "--draft-ids", ids},
       "--draft-ids: got 4 ids for 3 drafts of kind list, allowed as many for each draft, or "
       "--draft-count"},
      {{"--ids", "1,2,3", "--draft-ids", ids}, "--draft-ids: got 4 ids for 0 drafts of kind list"},
      {{"--ids", "1,2,3", "--draft-probs", f16}, "f16.npy: got f16, allowed f32"},
      {{"--drafts", dir_.path("none.npy")}, "none.npy: No such file"},
      {{"--ids", "1,2,3", "--block-verification"},
       "draft_kind: got greedy at row 0, allowed list, dense with block_verification"},
      {{"--head", "tiny", "--ids", "1,2,3"}, "--head next to --logits; allowed with --hidden"},
      {{"--ids", "1,2,3", "--allow", "8"}, "--allow: got token 8, allowed 0..7"},
      {{"--draws", "2"}, "--draws: got an unknown flag of logitctl verify"},
  };
  for (const Case& test : cases) {
    std::vector<std::string> args = {"verify", "--logits", logits};
    args.insert(args.end(), test.args.begin(), test.args.end());
    const Ran ran = Logitctl(args);
    EXPECT_EQ(ran.code, 2) << test.error << ran.err;
    EXPECT_THAT(ran.err, HasSubstr(test.error));
    EXPECT_EQ(ran.out, "");
  }
  const Ran neither = Logitctl({"verify", "--ids", "1"});
  EXPECT_EQ(neither.code, 2);
  EXPECT_THAT(neither.err, HasSubstr("[--logits,--hidden]: got none of these, allowed exactly 1"));
}

}  // namespace
}  // namespace logitd

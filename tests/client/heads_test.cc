// Heads from the client's side: the library and logitctl against the real server.
#include <gmock/gmock.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/client.h"
#include "logitd/v1/heads.grpc.pb.h"
#include "tests/client/fake_server.h"
#include "tests/client/running_logitd.h"
#include "tests/client/subprocess.h"
#include "tests/client/test_files.h"

namespace logitd {
namespace {

using ::logitd::testing::BytesOf;
using ::logitd::testing::Ran;
using ::logitd::testing::RunBinary;
using ::logitd::testing::Safetensors;
using ::logitd::testing::TempDir;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// [4, 3] of zeros, kept to 3 rows and scaled by its metadata.
std::string SmallHead() {
  return Safetensors(
      R"({"__metadata__":{"vocab_size":"3","logit_scale":"0.5","final_logit_softcapping":"30"},)"
      R"("lm_head.weight":{"dtype":"F32","shape":[4,3],"data_offsets":[0,48]}})",
      BytesOf(std::vector<float>(12, 0.0f)));
}

class HeadsClientTest : public ::logitd::testing::RunningLogitd {
 protected:
  HeadsClientTest()
      : RunningLogitd(
            [](const TempDir& dir) -> Flags {
              const std::string file = dir.Write("small.safetensors", SmallHead());
              return {"--head", absl::StrCat("start=", file, ",vocab=4"), "--head-root",
                      dir.path("")};
            },
            "logitd.v1.Heads") {}

  Ran Heads(std::vector<std::string> args) {
    args.insert(args.begin(), "heads");
    return Logitctl(std::move(args));
  }

  std::vector<std::string> Names() {
    const auto heads = client_->ListHeads();
    EXPECT_TRUE(heads.ok()) << heads.status();
    std::vector<std::string> names;
    for (const v1::Head& head : *heads) names.push_back(head.name());
    return names;
  }
};

TEST_F(HeadsClientTest, TheLibraryLoadsAndUnloads) {
  EXPECT_THAT(Names(), ElementsAre("start"));
  const auto start = client_->GetHead("start");
  ASSERT_TRUE(start.ok()) << start.status();
  EXPECT_EQ(start->vocab(), 4);  // the flag's, not the file's

  v1::LoadHeadRequest request;
  request.set_name("a");
  request.set_path("small.safetensors");
  int64_t done = -1;
  int64_t total = -1;
  const auto head = client_->LoadHead(request, [&](int64_t done_bytes, int64_t total_bytes) {
    done = done_bytes;
    total = total_bytes;
    return true;
  });
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_EQ(head->vocab(), 3);
  EXPECT_EQ(head->scale(), 0.5f);
  EXPECT_EQ(done, 3 * 3 * 4);
  EXPECT_EQ(total, 3 * 3 * 4);
  EXPECT_THAT(Names(), ElementsAre("a", "start"));

  const auto again = client_->LoadHead(request);
  EXPECT_EQ(again.status().code(), absl::StatusCode::kAlreadyExists) << again.status();
  EXPECT_TRUE(client_->UnloadHead("start").ok());
  EXPECT_THAT(Names(), ElementsAre("a"));
  EXPECT_TRUE(absl::IsNotFound(client_->UnloadHead("start")));
  EXPECT_TRUE(absl::IsNotFound(client_->GetHead("start").status()));
}

// The head's logits are all 0: a greedy row takes token 0.
TEST_F(HeadsClientTest, VerifyTakesHiddenStates) {
  const std::string states = BytesOf(std::vector<float>(9, 1.0f));
  client::VerifyRequest request = {
      .rows = 3, .head = "start", .hidden_size = 3, .hidden = {states}};
  request.params.add_temperature(0);
  request.params.add_sequence_rows(3);
  for (int draft : {0, 2}) request.params.add_drafts(draft);
  const absl::StatusOr<client::VerifyResult> got = client_->Verify(request);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_THAT(got->answer.accepted(), ElementsAre(1));
  EXPECT_THAT(got->answer.tokens(), ElementsAre(0, 0, -1));
  EXPECT_EQ(got->answer.head_version(), client_->GetHead("start")->head_version());
}

TEST_F(HeadsClientTest, AnUpdateGivesTheNextVersion) {
  v1::UpdateHeadRequest request;
  request.set_name("start");
  request.set_path("small.safetensors");
  int64_t done = -1;
  const auto head = client_->UpdateHead(request, [&](int64_t done_bytes, int64_t) {
    done = done_bytes;
    return true;
  });
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_GT(head->head_version(), 1);
  EXPECT_EQ(head->vocab(), 4);  // as the flag said at the start
  EXPECT_EQ(done, 4 * 3 * 4);
  const Ran update = Heads({"update", "start", "small.safetensors"});
  EXPECT_EQ(update.code, 0) << update.err;
  EXPECT_THAT(update.out, HasSubstr(absl::StrCat("version ", head->head_version() + 1)));
  request.set_name("absent");
  EXPECT_TRUE(absl::IsNotFound(client_->UpdateHead(request).status()));
  request.set_name("start");
  request.clear_path();
  const absl::Status nothing = client_->UpdateHead(request).status();
  EXPECT_EQ(nothing, absl::InvalidArgumentError("rows: got none, allowed 1 or more, or a path"));
}

TEST_F(HeadsClientTest, LogitctlPrintsTheProtosOwnJson) {
  const Ran load = Heads({"load", "a", "small.safetensors", "--format", "json"});
  ASSERT_EQ(load.code, 0) << load.err;
  EXPECT_EQ(load.err, "");  // no bar where there is no terminal
  v1::Head head;
  auto status = google::protobuf::util::JsonStringToMessage(load.out, &head);  // no unknown keys
  ASSERT_TRUE(status.ok()) << status.ToString() << load.out;
  EXPECT_EQ(head.path(), "small.safetensors");
  EXPECT_EQ(head.stored_vocab(), 4);
  EXPECT_EQ(head.softcap(), 30.0f);
  const Ran get = Heads({"get", "a", "--format", "json"});
  EXPECT_EQ(get.out, load.out);
  const Ran list = Heads({"list", "--format", "json"});
  v1::ListHeadsResponse heads;
  status = google::protobuf::util::JsonStringToMessage(list.out, &heads);
  ASSERT_TRUE(status.ok()) << status.ToString() << list.out;
  ASSERT_EQ(heads.heads_size(), 2);
  EXPECT_EQ(heads.heads(0).SerializeAsString(), head.SerializeAsString());
  const Ran unload = Heads({"unload", "a", "--format", "json"});
  EXPECT_EQ(unload.code, 0) << unload.err;
  EXPECT_EQ(unload.out, "{}\n");
}

TEST_F(HeadsClientTest, LogitctlPrintsTablesForPeople) {
  const Ran load = Heads({"load", "a", "small.safetensors", "--vocab", "2"});
  ASSERT_EQ(load.code, 0) << load.err;
  EXPECT_THAT(load.out, AllOf(HasSubstr("hidden"), HasSubstr("f32        2       3"),
                              HasSubstr("scale 0.5, softcap 30, of 4 rows"),
                              HasSubstr("lm_head.weight, small.safetensors")));
  EXPECT_THAT(Heads({"list"}).out, AllOf(HasSubstr("\na "), HasSubstr("\nstart ")));
  EXPECT_EQ(Heads({"unload", "a"}).out, "a is unloaded\n");
  EXPECT_EQ(Heads({"unload", "start"}).code, 0);
  EXPECT_EQ(Heads({"list"}).out, "no heads loaded\n");
}

TEST_F(HeadsClientTest, WarningsOfALoadAreShown) {
  std::filesystem::create_directory(dir_.path("new"));
  dir_.Write("new/model.safetensors", SmallHead());
  dir_.Write("new/model.safetensors.index.json", "{}");
  dir_.Write("new/config.json", R"({"model_type": "never_seen"})");
  v1::LoadHeadRequest request;
  request.set_name("a");
  request.set_path("new");
  const auto head = client_->LoadHead(request);
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_THAT(head->warnings(), ElementsAre(HasSubstr("model.safetensors is taken"),
                                            HasSubstr("model_type 'never_seen' is not known")));
  EXPECT_EQ(client_->GetHead("start")->warnings_size(), 0);
  for (const char* shown : {"\nwarning: head a: the folder has model.safetensors and",
                            "\nwarning: head a: model_type 'never_seen'"}) {
    EXPECT_THAT(Heads({"get", "a"}).out, HasSubstr(shown));
  }
  const Ran list = Heads({"list", "--format", "json"});
  EXPECT_THAT(list.out, AllOf(HasSubstr(R"("warnings":["the folder)"), HasSubstr("never_seen")));
}

TEST_F(HeadsClientTest, LogitctlLoadsAHeadInShards) {
  const Ran load = Heads({"load", "a", "small.safetensors", "--shard"});
  ASSERT_EQ(load.code, 0) << load.err;
  EXPECT_THAT(load.out, HasSubstr("1 shard"));
  const auto head = client_->GetHead("a");
  ASSERT_TRUE(head.ok()) << head.status();
  ASSERT_EQ(head->shards_size(), 1);
  EXPECT_EQ(head->shards(0).tokens(), 3);
  EXPECT_EQ(head->shards(0).device_bytes(), head->device_bytes());
  EXPECT_EQ(client_->GetHead("start")->shards_size(), 0);
}

TEST_F(HeadsClientTest, ARefusalIs1OrForABadValue2AndSaysWhy) {
  dir_.Write("bad.safetensors", "1234");
  struct Case {
    std::vector<std::string> args;
    const char* error;
    int code = 1;
  };
  for (const Case& test : {
           Case{{"load", "a", "bad.safetensors"}, "INVALID_ARGUMENT: head a: ", 2},
           {{"load", "a", "none"}, "NOT_FOUND: head a: none: No such file"},
           {{"load", "a", "../x"}, "PERMISSION_DENIED: path: got \"../x\""},
           {{"load", "start", "small.safetensors"}, "ALREADY_EXISTS: head start is loaded"},
           {{"load", "a b", "small.safetensors"}, "INVALID_ARGUMENT: name: got 'a b'", 2},
           {{"load", "a", "small.safetensors", "--norm"}, "final norm: got none", 2},
           {{"load", "a", "small.safetensors", "--vocab", "5"}, "vocab: got 5, allowed 1 to 4", 2},
           {{"unload", "a"}, "NOT_FOUND: no head \"a\"; loaded: start"},
           {{"get", "a"}, "NOT_FOUND: no head \"a\"; loaded: start"},
       }) {
    const Ran ran = Heads(test.args);
    EXPECT_EQ(ran.code, test.code) << test.error;
    EXPECT_THAT(ran.err, HasSubstr(test.error));
    EXPECT_EQ(ran.out, "");
  }
}

// script(1), of every Debian, gives the command a terminal.
TEST_F(HeadsClientTest, ATerminalSeesABar) {
  const std::string logitctl =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / "logitctl";
  const std::string command =
      absl::StrCat("script -qec '", logitctl, " heads load a small.safetensors --addr ", address_,
                   "' /dev/null </dev/null 2>&1");
  FILE* pipe = popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string out;
  std::array<char, 4096> piece;
  while (size_t got = std::fread(piece.data(), 1, piece.size(), pipe))
    out.append(piece.data(), got);
  ASSERT_EQ(pclose(pipe), 0) << out;
  EXPECT_THAT(out, AllOf(HasSubstr("\ra: [####################] 100%, 36 bytes of 36 bytes"),
                         HasSubstr("small.safetensors")));
}

// Unloads at once, and the answer is lost.
class LosingHeads final : public v1::Heads::Service {
 public:
  grpc::Status Unload(grpc::ServerContext*, const v1::UnloadHeadRequest*,
                      v1::UnloadHeadResponse*) override {
    return calls_++ == 0 ? grpc::Status(grpc::UNAVAILABLE, "lost")
                         : grpc::Status(grpc::NOT_FOUND, "no head");
  }

 private:
  std::atomic<int> calls_ = 0;
};

TEST(HeadsUnloadTest, IsDoneWhereASecondTryFindsNothing) {
  LosingHeads heads;
  const testing::LocalServer server(&heads);
  const auto client = *client::Client::Create({.address = server.address()});
  EXPECT_TRUE(client->UnloadHead("a").ok());
  EXPECT_TRUE(absl::IsNotFound(client->UnloadHead("a")));
}

TEST(HeadsCommandTest, BadUsageIs2AndHelpTeaches) {
  for (const std::vector<std::string>& args :
       std::vector<std::vector<std::string>>{{"heads"},
                                             {"heads", "load"},
                                             {"heads", "load", "a"},
                                             {"heads", "unload"},
                                             {"heads", "load", "a", "b", "--vocab", "-1"},
                                             {"heads", "list", "extra"}}) {
    const Ran ran = RunBinary("logitctl", args);
    EXPECT_EQ(ran.code, 2) << absl::StrJoin(args, " ");
    EXPECT_THAT(ran.err, Not(IsEmpty()));
  }
  const Ran help = RunBinary("logitctl", {"heads", "load", "--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_THAT(help.out,
              AllOf(HasSubstr("--head-root"), HasSubstr("config.json"), HasSubstr("Ctrl-C"),
                    HasSubstr("--norm"), HasSubstr("logitctl heads load")));
}

TEST(HeadsCommandTest, NoServerEndsWith3) {
  TempDir dir;
  for (const std::vector<std::string>& args : std::vector<std::vector<std::string>>{
           {"heads", "load", "a", "b"}, {"heads", "list", "--max-attempts", "1"}}) {
    std::vector<std::string> to_nobody = args;
    to_nobody.insert(to_nobody.end(), {"--addr", "unix:" + dir.path("nobody")});
    EXPECT_EQ(RunBinary("logitctl", to_nobody).code, 3) << absl::StrJoin(args, " ");
  }
}

TEST(HeadsCommandTest, AServerWhoseHeadCannotBeLoadedDoesNotStart) {
  TempDir dir;
  const Ran ran = RunBinary(
      "logitd", {"--backend", "cpu", "--listen", "unix:" + dir.path("socket"), "--metrics-listen",
                 "off", "--max-request-bytes", "1MiB", "--head", "a=" + dir.path("none")});
  EXPECT_EQ(ran.code, 2) << "of a bad flag, which a new start does not mend";
  EXPECT_THAT(ran.err, AllOf(HasSubstr("cannot start: NOT_FOUND: head a: "),
                             HasSubstr("none: No such file or directory")));
}

}  // namespace
}  // namespace logitd

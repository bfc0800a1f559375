// Runs the logitctl binary against the fake server.
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "logitd/v1/sampler.pb.h"
#include "tests/client/fake_server.h"
#include "tests/client/subprocess.h"
#include "tests/client/test_files.h"
#include "tests/client/test_model.h"

namespace logitd {
namespace {

using ::logitd::testing::BinaryPath;
using ::logitd::testing::BytesOf;
using ::logitd::testing::FakeServer;
using ::logitd::testing::NpyF32;
using ::logitd::testing::Ran;
using ::logitd::testing::RunBinary;
using ::logitd::testing::Safetensors;
using ::logitd::testing::TempDir;
using ::logitd::testing::TinyModel;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::UnorderedElementsAreArray;

Ran Logitctl(const std::vector<std::string>& args,
             const std::function<void(const std::string&)>& on_output = nullptr) {
  return RunBinary("logitctl", args, on_output);
}

const std::vector<float> kLogits = {0.0f, 0.69314718f, 1.60943791f};  // softmax: 1/8, 2/8, 5/8

TEST(LogitctlTest, HelpTeaches) {
  const Ran help = Logitctl({"--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_THAT(help.out, AllOf(HasSubstr("Exit codes:"), HasSubstr("logitctl topk --logits"),
                              HasSubstr("health"), Not(HasSubstr("JSON has the keys"))));
  const Ran topk = Logitctl({"topk", "--help"});
  EXPECT_EQ(topk.code, 0);
  EXPECT_THAT(topk.out, AllOf(HasSubstr("--temperature"), HasSubstr("LOGITD_ADDR"),
                              HasSubstr("127.0.0.1:7450"), HasSubstr("JSON has the keys")));
}

// The words of a line of a help that lists subcommands or flags.
std::vector<std::string> WordsOf(const std::string& line) {
  return absl::StrSplit(line, absl::ByAnyChar(" ,"), absl::SkipEmpty());
}

// Subcommands by their path, "heads load", with their helps; those of "" are the program's own.
std::map<std::string, std::string> AllHelps() {
  std::map<std::string, std::string> helps;
  std::vector<std::string> open = {""};
  while (!open.empty()) {
    const std::string path = open.back();
    open.pop_back();
    std::vector<std::string> args = WordsOf(path);
    args.push_back("--help");
    const Ran ran = Logitctl(args);
    EXPECT_EQ(ran.code, 0) << path;
    helps[path] = ran.out;
    bool listed = false;
    for (const absl::string_view line : absl::StrSplit(ran.out, '\n')) {
      if (!absl::StartsWith(line, "  ")) {
        listed = line == "Subcommands:";
      } else if (listed && line[2] != ' ') {
        const std::string name = WordsOf(std::string(line))[0];
        open.push_back(path.empty() ? name : absl::StrCat(path, " ", name));
      }
    }
  }
  return helps;
}

TEST(LogitctlTest, EverySubcommandShowsItsOwnExamples) {
  const auto helps = AllHelps();
  EXPECT_GE(helps.size(), 17u);
  for (const auto& [path, help] : helps) {
    SCOPED_TRACE(path);
    const size_t examples = help.find("Examples:\n");
    ASSERT_NE(examples, std::string::npos);
    int own = 0;
    const std::string start = absl::StrCat("  logitctl ", path);
    for (const absl::string_view line :
         absl::StrSplit(absl::string_view(help).substr(examples), '\n')) {
      if (path == "completion") own += absl::StrContains(line, "logitctl completion bash");
      if (absl::StartsWith(line, "  logitctl ")) {
        EXPECT_THAT(std::string(line), ::testing::StartsWith(start));
        ++own;
      }
    }
    EXPECT_GE(own, 1);
    EXPECT_LE(own, 3);
  }
}

TEST(LogitctlTest, TokenHasNoFlagsOfCalls) {
  EXPECT_THAT(Logitctl({"token", "--help"}).out,
              AllOf(HasSubstr("--format"), Not(HasSubstr("--addr")), Not(HasSubstr("--deadline")),
                    Not(HasSubstr("--priority")), Not(HasSubstr("--tls"))));
}

// The scores are those of tests/kernels/watermark_test.cc and of the Python client's test.
TEST(LogitctlTest, WatermarksAreDetectedWithoutAServer) {
  const std::string ids = "5,17,17,5,17,17,5,100000,0,1,2,3,5,8,13,21,34,55,89,144";
  const Ran json = Logitctl({"watermark", "detect", "--ids", ids, "--key", "81985529216486895",
                             "--width", "4", "--format", "json"});
  EXPECT_EQ(json.code, 0) << json.err;
  EXPECT_THAT(json.out, MatchesRegex("\\{\"score\":22\\.077100716903[0-9]*,\"tokens\":20,"
                                     "\"p_value\":0\\.300387810354[0-9]*\\}\n"));
  const Ran table = Logitctl({"watermark", "detect", "--ids", ids, "--key", "18446744073709551615",
                              "--width", "16", "--prompt-tokens", "3"});
  EXPECT_EQ(table.out, "score    26.093\ntokens   17\np-value  0.023845\n");
  const Ran none = Logitctl(
      {"watermark", "detect", "--ids", "5", "--key", "7", "--width", "2", "--prompt-tokens", "1"});
  EXPECT_EQ(none.out, "score    0\ntokens   0\np-value  1\n");
  for (const auto& [flag, value, want] :
       {std::tuple("--width", "17", "--width: got \"17\", allowed integers 1..16"),
        std::tuple("--key", "-1", "--key: got \"-1\", allowed integers 0..18446744073709551615"),
        std::tuple("--tokens", "x.npy", "allowed exactly 1")}) {
    std::vector<std::string> args = {"watermark", "detect", "--ids", ids};
    for (const char* given : {"--key", "--width"}) {
      if (flag != absl::string_view(given)) args.insert(args.end(), {given, "7"});
    }
    args.insert(args.end(), {flag, value});
    const Ran bad = Logitctl(args);
    EXPECT_EQ(bad.code, 2);
    EXPECT_THAT(bad.err, HasSubstr(want));
  }
}

TEST(LogitctlTest, VersionIsThatOfTheProjectAndOfGrpc) {
  const Ran ran = Logitctl({"--version"});
  EXPECT_EQ(ran.code, 0);
  EXPECT_THAT(ran.out, MatchesRegex("logitctl [0-9]+\\.[0-9]+\\.[0-9]+, gRPC 1\\.[0-9.]+\n"));
}

// What bash offers after `words`; the last one is being typed.
std::vector<std::string> Completed(const std::vector<std::string>& words) {
  std::vector<std::string> args = {"-c",
                                   "source <(\"$0\" completion bash) && shift && "
                                   "COMP_WORDS=(\"$@\") COMP_CWORD=$(($# - 1)) && "
                                   "_logitctl && printf '%s\\n' \"${COMPREPLY[@]}\"",
                                   testing::BinaryPath("logitctl"), "-", "logitctl"};
  args.insert(args.end(), words.begin(), words.end());
  const Ran ran = RunBinary("/bin/bash", args);
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.err, "");
  return absl::StrSplit(ran.out, '\n', absl::SkipEmpty());
}

TEST(LogitctlTest, BashCompletesWhatMayFollow) {
  TempDir dir;
  const std::string npy = dir.Write("some.npy", "x");
  EXPECT_THAT(Completed({"sam"}), ElementsAre("sample"));
  EXPECT_THAT(Completed({"heads", ""}), ElementsAre("load", "update", "unload", "list", "get"));
  EXPECT_THAT(Completed({"sample", "--top-"}),
              ElementsAre("--top-k", "--top-p", "--top-logprobs", "--top-n-sigma"));
  EXPECT_THAT(Completed({"info", "--format", ""}), ElementsAre("table", "json"));
  EXPECT_THAT(Completed({"info", "--format", "=", "j"}), ElementsAre("json"));
  EXPECT_THAT(Completed({"sample", "--logprob-mode", ""}),
              ElementsAre("raw", "processed", "tempered"));
  EXPECT_THAT(Completed({"info", "--priority", ""}), ElementsAre("batch", "interactive"));
  EXPECT_THAT(Completed({"topk", "--logits", dir.path("so")}), ElementsAre(npy));
  EXPECT_THAT(Completed({"softmax", "--mask", "cau"}), ElementsAre("causal"));
  EXPECT_THAT(Completed({"softmax", "--mask", dir.path("so")}), ElementsAre(npy));
  EXPECT_THAT(Completed({"completion", ""}), Contains("bash"));
  EXPECT_THAT(Completed({"topk", "--k", ""}), ElementsAre());
}

TEST(LogitctlTest, BashCompletesEveryFlagOfEveryHelp) {
  for (const auto& [path, help] : AllHelps()) {
    std::vector<std::string> flags;
    for (const absl::string_view line : absl::StrSplit(help, '\n')) {
      if (!absl::StartsWith(line, "  -") && !absl::StartsWith(line, "    -")) continue;
      for (const std::string& word : WordsOf(std::string(line))) {
        if (absl::StartsWith(word, "--")) flags.push_back(word);
        if (!absl::StartsWith(word, "-")) break;
      }
    }
    std::vector<std::string> words = WordsOf(path);
    words.emplace_back("--");
    EXPECT_THAT(Completed(words), UnorderedElementsAreArray(flags)) << path;
  }
}

TEST(LogitctlTest, BadUsageIs2AndSaysWhy) {
  TempDir dir;
  const std::string npy = dir.Write("a.npy", NpyF32(1, 3, kLogits));
  struct Case {
    std::vector<std::string> args;
    const char* error;
  };
  const Case cases[] = {
      {{}, "subcommand"},
      {{"smaple"}, "smaple: got an unknown subcommand of logitctl, the nearest is sample"},
      {{"dance"}, "dance: got an unknown subcommand of logitctl, allowed topk, sample, "},
      {{"heads", "lod"}, "lod: got an unknown subcommand of logitctl heads, the nearest is load"},
      {{"sample", "--logits", npy, "--topk", "3"},
       "--topk: got an unknown flag of logitctl sample, the nearest is --top-k"},
      {{"heads", "unload", "x", "--fromat=json"}, "the nearest is --format"},
      {{"topk", "--logits", npy, "--xyzzyxyzzy"}, "logitctl topk, allowed are those of --help"},
      {{"--addr", "x", "topk"}, "--addr: got before a subcommand, allowed after it: logitctl topk"},
      {{"topk", "--text", "--topk", "--logits", npy}, "got 2 of these"},  // the value of a flag
      {{"topk"}, "[--logits,--text]: got none of these, allowed exactly 1"},
      {{"topk", "--logits", npy, "--text", "x"},
       "[--logits,--text]: got 2 of these, allowed exactly 1"},
      {{"topk", "--logits", npy, "--k", "x"}, "--k: got \"x\", allowed integers"},
      {{"topk", "--logits", npy, "--k"}, "--k: got no value, allowed INTEGER"},
      {{"topk", "--logits", npy, "--k", "99999999999999999999"},
       "--k: got \"99999999999999999999\", allowed integers -2147483648..2147483647"},
      {{"sample", "--logits", npy, "--seed", "-1"},
       "--seed: got \"-1\", allowed integers 0..18446744073709551615"},
      {{"sample", "--logits", npy, "--seeds", "-1"},
       "--seeds: got \"-1\", allowed integers 0..18446744073709551615"},
      {{"sample", "--logits", npy, "--seeds", "18446744073709551616"},
       "--seeds: got \"18446744073709551616\", allowed integers 0..18446744073709551615"},
      {{"sample", "--logits", npy, "--seeds", "1,2"}, "--seeds: got \"1,2\", allowed integers"},
      {{"sample", "--logits", npy, "--seeds", "1", "--seed", "2"}, "allowed one of the two"},
      {{"sample", "--logits", npy, "--top-p", "x"}, "--top-p: got \"x\", allowed NUMBER"},
      {{"sample", "--logits", npy, "--allow", "1,x"},
       "--allow: got \"x\", allowed integers 0..2147483647"},
      {{"sample", "--logits", npy, "--rank=abc"}, "--rank: got \"abc\", allowed "},
      {{"sample", "--logits", npy, "--ring"}, "--ring: got without --arena, allowed with it"},
      {{"sample", "--logits", npy, "--arena", "unix:x", "--arena-kind", "gpu"},
       "--arena-kind: got \"gpu\", allowed host, cuda"},
      {{"topk", "--logits", npy, "--k", "0"}, "--k: got 0, allowed 1..3 (the vocabulary)"},
      {{"topk", "--logits", npy, "--k", "4"}, "--k: got 4, allowed 1..3 (the vocabulary)"},
      {{"topk", "--logits", npy, "--k", "1", "--temperature", "0"},
       "--temperature: got 0, allowed"},
      {{"topk", "--logits", npy, "--k", "1", "--temperature", "nan"},
       "--temperature: got nan, allowed"},
      {{"topk", "--logits", npy, "--k", "1", "--format", "xml"},
       "--format: got \"xml\", allowed table, json"},
      {{"topk", "--logits", npy, "--k", "1", "--addr", "nowhere"},
       "--addr: got \"nowhere\", allowed HOST:PORT, [IPv6]:PORT, unix:PATH, ipv4:A:PORT,"},
      {{"info", "--addr", "http://host:7450"}, "--addr: got \"http://host:7450\", allowed HOST:"},
      {{"info", "--addr", "::1:7450"}, "--addr: got \"::1:7450\", allowed HOST:PORT"},
      {{"info", "--addr", "a b:1"}, "--addr: got \"a b:1\", allowed HOST:PORT"},
      {{"info", "--tls-ca", npy}, "--tls-ca: got "},
      {{"info", "--tls=abc"}, "--tls: got \"abc\", allowed no value, true or false"},
      {{"info", "--traceparent", "x"}, "--traceparent: got \"x\", allowed 00-TRACE-PARENT-FLAGS"},
      {{"info", "--request-id", "a b"}, "--request-id: got \"a b\", allowed 1 to 128 visible"},
      {{"info", "--max-attempts", "0"}, "--max-attempts: got \"0\", allowed integers 1..1000"},
      {{"info", "--priority", "high"}, "--priority: got \"high\", allowed batch, interactive"},
      {{"token", "--addr", "127.0.0.1:1"}, "--addr: got an unknown flag of logitctl token"},
      {{"completion", "fish"}, "SHELL: got \"fish\", allowed bash"},
      {{"topk", "--logits", dir.path("none.npy"), "--k", "1"}, "none.npy: No such file"},
      {{"topk", "--logits", dir.Write("b.npy", "x"), "--k", "1"}, "not an npy file"},
      {{"topk", "--text", "x", "--model", dir.path("none")}, "none/config.json"},
      {{"info", "--deadline", "-1"}, "--deadline: got \"-1\", allowed numbers 0.001..86400"},
  };
  for (const Case& test : cases) {
    const Ran ran = Logitctl(test.args);
    EXPECT_EQ(ran.code, 2) << test.error;
    EXPECT_THAT(ran.err, HasSubstr(test.error));
    EXPECT_EQ(ran.out, "");
  }
}

TEST(LogitctlTest, JsonIsTheProtosOwn) {
  FakeServer server;
  TempDir dir;
  std::vector<float> logits = kLogits;
  logits.insert(logits.end(), {1.0f, std::nanf(""), 1.0f});
  const std::string npy = dir.Write("a.npy", NpyF32(2, 3, logits));
  const Ran ran = Logitctl(
      {"topk", "--addr", server.address(), "--logits", npy, "--k", "2", "--format", "json"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  v1::TopKResponse response;
  const auto status =
      google::protobuf::util::JsonStringToMessage(ran.out, &response);  // unknown keys fail
  ASSERT_TRUE(status.ok()) << status.ToString() << ran.out;
  EXPECT_THAT(response.k(), ElementsAre(2, 2));
  EXPECT_THAT(std::vector<int>(response.indices().begin(), response.indices().begin() + 2),
              ElementsAre(2, 1));
  EXPECT_NEAR(response.probs(0), 0.625, 1e-6);
  EXPECT_NEAR(response.logsumexp(0), std::log(8.0), 1e-6);
  EXPECT_TRUE(std::isnan(response.logsumexp(1)));
  EXPECT_THAT(response.status_position(), ElementsAre(-1, 1));
  EXPECT_EQ(response.timings().kernel_ns(), 5000);
  const nlohmann::json json = nlohmann::json::parse(ran.out);
  EXPECT_EQ(json["status"], nlohmann::json({"ROW_STATUS_OK", "ROW_STATUS_NAN_LOGIT"}));
  EXPECT_EQ(json["logsumexp"][1], "NaN");
  EXPECT_EQ(json["timings"]["total_ns"], 6230);
}

TEST(LogitctlTest, TableIsForPeople) {
  FakeServer server;
  TempDir dir;
  std::vector<float> logits = kLogits;
  logits.insert(logits.end(), {1.0f, std::nanf(""), 1.0f});
  const std::string file = dir.Write(
      "a.safetensors",
      Safetensors(
          R"({"other":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"x":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})",
          BytesOf(logits)));
  const Ran ran =
      Logitctl({"topk", "--addr", server.address(), "--logits", file + ":x", "--k", "1"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, AllOf(HasSubstr("rank"), HasSubstr("     0     1        2        0.625"),
                             HasSubstr("     1  NAN_LOGIT at token 1"), HasSubstr("kernel 5.0 us"),
                             HasSubstr("round trip")));
}

TEST(LogitctlTest, TheAddressComesFromTheEnvironmentToo) {
  FakeServer server;
  setenv("LOGITD_ADDR", server.address().c_str(), 1);
  const Ran ran = Logitctl({"info", "--format", "json"});
  unsetenv("LOGITD_ADDR");
  ASSERT_EQ(ran.code, 0) << ran.err;
  v1::GetInfoResponse info;
  const auto status = google::protobuf::util::JsonStringToMessage(ran.out, &info);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(info.version(), "1.2.3");
  EXPECT_EQ(info.limits().streams(), 2);
  EXPECT_THAT(info.ops(0).dtypes(), ElementsAre(v1::DTYPE_F32, v1::DTYPE_F16, v1::DTYPE_BF16));
}

TEST(LogitctlTest, InfoHasOneLinePerOpWithItsMethods) {
  TempDir dir;
  FakeServer server(nullptr, dir.path("socket"));
  v1::Op* other = server.info().add_ops();
  *other = server.info().ops(0);
  other->set_method("logitd.v1.Sampler/Other");
  const Ran ran = Logitctl({"info", "--addr", "unix:" + dir.path("socket")});
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, AllOf(HasSubstr("logitd 1.2.3"), HasSubstr("softmax_topk"),
                             HasSubstr("f32 f16 bf16  by Sampler/TopK, Sampler/Other\n")));
}

TEST(LogitctlTest, EveryParameterOfTheProtoIsAFlagWithItsComment) {
  const struct {
    const char* command;
    const char* message;
  } cases[] = {{"topk", "TopKRequest"}, {"sample", "SampleRequest"}, {"score", "ScoreRequest"}};
  for (const auto& test : cases) {
    const Ran help = Logitctl({test.command, "--help"});
    ASSERT_EQ(help.code, 0) << help.err;
    const auto* message = google::protobuf::DescriptorPool::generated_pool()->FindMessageTypeByName(
        std::string("logitd.v1.") + test.message);
    ASSERT_NE(message, nullptr);
    int flags = 0;
    for (int i = 0; i < message->field_count(); ++i) {
      std::string name = message->field(i)->name();
      const bool count = name.size() > 6 && name.substr(name.size() - 6) == "_count";
      const bool file_or_pairs =
          name == "targets" || name == "logit_bias_ids" || name.rfind("allowed_tokens", 0) == 0;
      const int number = message->field(i)->number();
      if (number < 16 || number >= 40 || count || file_or_pairs) continue;
      std::replace(name.begin(), name.end(), '_', '-');
      EXPECT_THAT(help.out, HasSubstr("--" + name)) << test.command;
      EXPECT_THAT(help.out, Not(HasSubstr("each per row"))) << "the heading of several parameters";
      ++flags;
    }
    EXPECT_GT(flags, 1);
  }
  EXPECT_THAT(
      Logitctl({"sample", "--help"}).out,
      AllOf(HasSubstr("default 0: the same tokens"),
            HasSubstr("one seed for all rows gives equal rows the same token"),
            HasSubstr("Keeps the k highest logits; 0, -1, and V or more keep all; default 0")));
}

TEST(LogitctlTest, AFlagTakesOneValuePerRow) {
  FakeServer server;
  TempDir dir;
  const std::string npy = dir.Write("a.npy", NpyF32(2, 3, {0, 1, 2, 2, 1, 0}));
  const Ran ran = Logitctl({"topk", "--addr", server.address(), "--logits", npy, "--k", "1,2",
                            "--temperature", "1,0.5", "--format", "json"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const nlohmann::json json = nlohmann::json::parse(ran.out);
  EXPECT_EQ(json["k"], nlohmann::json({1, 2}));
  EXPECT_EQ(json["indices"], nlohmann::json({2, 0, 1}));
  const Ran bad = Logitctl({"topk", "--addr", server.address(), "--logits", npy, "--k", "1,x"});
  EXPECT_EQ(bad.code, 2);
  EXPECT_THAT(bad.err, HasSubstr("--k: got \"x\", allowed integers"));
}

TEST(LogitctlTest, BigFilesGoInPiecesThatFit) {
  struct Case {
    const char* name;
    void (*limit)(v1::Limits&);
    int requests;
  };
  const Case cases[] = {
      {"by_bytes", [](v1::Limits& l) { l.set_max_request_bytes(3 * 400 + 399); }, 4},
      {"by_rows", [](v1::Limits& l) { l.set_max_batch_rows(4); }, 3},
      {"by_answer", [](v1::Limits& l) { l.set_max_answer_bytes(150); }, 3},
      {"no_limits", [](v1::Limits& l) { l.Clear(); }, 1},
  };
  std::vector<float> logits(10 * 100, 0.0f);
  for (int row = 0; row < 10; ++row) logits[row * 100 + 7 * row] = 9.0f;
  TempDir dir;
  const std::string npy = dir.Write("a.npy", NpyF32(10, 100, logits));
  for (const Case& test : cases) {
    SCOPED_TRACE(test.name);
    FakeServer server;
    test.limit(*server.info().mutable_limits());
    const Ran ran = Logitctl(
        {"topk", "--addr", server.address(), "--logits", npy, "--k", "2", "--format", "json"});
    ASSERT_EQ(ran.code, 0) << ran.err;
    const nlohmann::json json = nlohmann::json::parse(ran.out);
    for (int row = 0; row < 10; ++row) EXPECT_EQ(json["indices"][2 * row], 7 * row);
    EXPECT_EQ(json["k"].size(), 10u);
    EXPECT_EQ(json["timings"]["kernel_ns"], 5000 * test.requests);
    EXPECT_EQ(server.calls(), test.requests);
    if (server.info().limits().max_request_bytes() > 0) {
      EXPECT_LE(server.largest_request(), server.info().limits().max_request_bytes());
    }
  }
}

TEST(LogitctlTest, ARowThatNeverFitsIsBadInput) {
  FakeServer server;
  server.info().mutable_limits()->set_max_request_bytes(11);
  TempDir dir;
  const Ran ran = Logitctl({"topk", "--addr", server.address(), "--logits",
                            dir.Write("a.npy", NpyF32(1, 3, kLogits)), "--k", "1"});
  EXPECT_EQ(ran.code, 2);
  EXPECT_THAT(ran.err, HasSubstr("one row of 12 bytes"));
  EXPECT_EQ(server.calls(), 0);
}

TEST(LogitctlTest, ContinuesAPrompt) {
  FakeServer server;
  TempDir dir;
  TinyModel tiny;
  tiny.tensors["lm_head.bias"].values['\n'] = 5.0f;  // the likeliest, whatever the prompt
  const std::string model = tiny.Write(dir);
  const std::vector<std::string> args = {
      "topk", "--addr", server.address(), "--text", "abc", "--model", model, "--k", "2"};
  const Ran table = Logitctl(args);
  ASSERT_EQ(table.code, 0) << table.err;
  EXPECT_THAT(table.out, AllOf(HasSubstr("\"\\n\""), HasSubstr("round trip")));
  std::vector<std::string> with_json = args;
  with_json.insert(with_json.end(), {"--format", "json"});
  const Ran json = Logitctl(with_json);
  ASSERT_EQ(json.code, 0) << json.err;
  EXPECT_EQ(nlohmann::json::parse(json.out)["text"][0], "\n");
}

TEST(LogitctlTest, WhoeverFindsABadValueItIs2) {
  TempDir dir;
  const std::string npy = dir.Write("a.npy", NpyF32(1, 3, kLogits));
  const struct {
    grpc::StatusCode code;
    int exit_code;
  } cases[] = {{grpc::INVALID_ARGUMENT, 2}, {grpc::OUT_OF_RANGE, 2},
               {grpc::NOT_FOUND, 1},        {grpc::FAILED_PRECONDITION, 1},
               {grpc::INTERNAL, 1},         {grpc::PERMISSION_DENIED, 1},
               {grpc::UNIMPLEMENTED, 1}};
  for (const auto& test : cases) {
    FakeServer server([&](int, grpc::ServerContext*, const v1::TopKRequest&, v1::TopKResponse*) {
      return grpc::Status(test.code, "vocab is 3; allowed: 7");
    });
    const Ran ran = Logitctl({"topk", "--addr", server.address(), "--logits", npy, "--k", "1"});
    EXPECT_EQ(ran.code, test.exit_code) << test.code;
    EXPECT_THAT(ran.err, HasSubstr(": vocab is 3; allowed: 7"));
    EXPECT_EQ(ran.out, "");
  }
}

TEST(LogitctlTest, NoServerEndsWith3AndAHint) {
  std::string address;
  {
    FakeServer gone;
    address = gone.address();
  }
  for (const char* command : {"info", "health"}) {
    const Ran ran = Logitctl({command, "--addr", address});
    EXPECT_EQ(ran.code, 3) << command;
    EXPECT_THAT(ran.err,
                AllOf(HasSubstr("UNAVAILABLE"), HasSubstr("is logitd running at " + address)));
  }
}

// As in `logitd & logitctl info`.
TEST(LogitctlTest, ACommandWaitsForAServerThatStarts) {
  TempDir dir;
  const std::string path = dir.path("late.sock");
  std::unique_ptr<FakeServer> server;
  std::thread late([&] {
    absl::SleepFor(absl::Seconds(2));  // it tries meanwhile
    server = std::make_unique<FakeServer>(nullptr, path);
  });
  const Ran ran = Logitctl({"info", "--addr", "unix:" + path});
  late.join();
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("logitd 1.2.3"));
}

// A container's health check has three seconds.
TEST(LogitctlTest, HealthDoesNotWaitForAServerThatStarts) {
  TempDir dir;
  const Ran ran = Logitctl({"health", "--addr", "unix:" + dir.path("nobody")});
  EXPECT_EQ(ran.code, 3);
  EXPECT_THAT(ran.err, HasSubstr("gave up after 4 attempts"));
  EXPECT_THAT(Logitctl({"health", "--help"}).out, ContainsRegex("--max-attempts 1..1000.+4"));
  EXPECT_THAT(Logitctl({"info", "--help"}).out, ContainsRegex("--max-attempts 1..1000.+12"));
}

TEST(LogitctlTest, HealthSaysItByExitCode) {
  FakeServer server;
  Ran ran = Logitctl({"health", "--addr", server.address()});
  EXPECT_EQ(ran.code, 0);
  EXPECT_EQ(ran.out, "SERVING\n");
  server.SetServing(false);
  ran = Logitctl({"health", "--addr", server.address(), "--format", "json"});
  EXPECT_EQ(ran.code, 3);
  EXPECT_EQ(ran.out, "{\"status\":\"NOT_SERVING\"}\n");
  EXPECT_EQ(Logitctl({"health", "--addr", server.address(), "--service", "nothing"}).code, 1);
}

// A full disk, and a stdout that the caller has closed: its number must not go to a connection
// either.
TEST(LogitctlTest, LostOutputIsNoSuccess) {
  const FakeServer server;
  const auto run = [&](const std::string& where, const std::string& command) {
    return RunBinary("/bin/sh", {"-c", absl::StrCat("exec \"$0\" ", command, " ", where),
                                 BinaryPath("logitctl")});
  };
  const std::string at = absl::StrCat(" --addr ", server.address());
  for (const char* where : {"> /dev/full", ">&-", "<&- >&-"}) {
    for (const std::string& command :
         {"info" + at, "health" + at, "health --watch" + at, std::string("--help"),
          std::string("--version"), std::string("completion bash")}) {
      SCOPED_TRACE(absl::StrCat(command, " ", where));
      const Ran ran = run(where, command);
      EXPECT_EQ(ran.code, 1) << ran.err;
      EXPECT_THAT(ran.err, HasSubstr("output was lost: stdout"));
    }
  }
  EXPECT_EQ(run("2>&-", "health" + at).code, 0);
}

TEST(LogitctlTest, HealthWatchPrintsChangesUntilTheServerGoes) {
  FakeServer server;
  const Ran ran =
      Logitctl({"health", "--watch", "--addr", server.address()}, [&](const std::string& out) {
        if (out == "SERVING\n") server.SetServing(false);
        if (out == "SERVING\nNOT_SERVING\n") server.Shutdown();
      });
  EXPECT_EQ(ran.out, "SERVING\nNOT_SERVING\n");
  EXPECT_EQ(ran.code, 3) << ran.err;
}

}  // namespace
}  // namespace logitd

// Flags and environment variables: accepted values, refused values, and the texts of errors.
#include "server/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <sstream>
#include <string>
#include <vector>

namespace logitd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Result {
  Config config;
  std::optional<int> exit_code;
  std::string out;
  std::string err;
};

Result Parse(std::vector<const char*> flags) {
  flags.insert(flags.begin(), "logitd");
  Result result;
  std::ostringstream out, err;
  result.exit_code =
      ParseConfig(static_cast<int>(flags.size()), flags.data(), &result.config, out, err);
  result.out = out.str();
  result.err = err.str();
  return result;
}

TEST(ConfigTest, DefaultsAreSafe) {
  const Result r = Parse({});
  ASSERT_FALSE(r.exit_code.has_value()) << r.err;
  EXPECT_THAT(r.config.listen, ElementsAre("127.0.0.1:7450"));
  EXPECT_EQ(r.config.metrics_listen, "127.0.0.1:9464");
  EXPECT_EQ(r.config.backend, "auto");
  EXPECT_EQ(r.config.max_request_bytes, int64_t{64} << 20);
}

TEST(ConfigTest, ListenReplacesTheDefaultAndRepeats) {
  const Result r = Parse({"--listen", "0.0.0.0:1", "--listen=unix:/tmp/s"});
  EXPECT_THAT(r.config.listen, ElementsAre("0.0.0.0:1", "unix:/tmp/s"));
}

TEST(ConfigTest, SizesAndDurationsTakeUnits) {
  const Result r =
      Parse({"--slab-bytes=128MiB", "--max-held-bytes=2GiB", "--max-request-bytes=1000000",
             "--max-batch-delay=200us", "--receive-timeout=1.5s", "--drain-grace=0"});
  ASSERT_FALSE(r.exit_code.has_value()) << r.err;
  EXPECT_EQ(r.config.slab_bytes, int64_t{128} << 20);
  EXPECT_EQ(r.config.max_held_bytes, int64_t{2} << 30);
  EXPECT_EQ(r.config.max_request_bytes, 1000000);
  EXPECT_EQ(r.config.max_batch_delay, absl::Microseconds(200));
  EXPECT_EQ(r.config.receive_timeout, absl::Milliseconds(1500));
  EXPECT_EQ(r.config.drain_grace, absl::ZeroDuration());
}

TEST(ConfigTest, HeadsHaveANameAPathAndOptions) {
  const Result r = Parse({"--head", "a=/m/a", "--head=b=/m/x,y=z,norm,vocab=100", "--head",
                          "c=/m/norm,vocab=7,norm", "--head-root=/tmp"});
  ASSERT_FALSE(r.exit_code.has_value()) << r.err;
  ASSERT_EQ(r.config.heads.size(), 3u);
  EXPECT_EQ(r.config.heads[0].name, "a");
  EXPECT_EQ(r.config.heads[0].path, "/m/a");
  EXPECT_EQ(r.config.heads[0].vocab, 0);
  EXPECT_FALSE(r.config.heads[0].final_norm);
  EXPECT_EQ(r.config.heads[1].path, "/m/x,y=z");  // the path has a comma and an =
  EXPECT_EQ(r.config.heads[1].vocab, 100);
  EXPECT_TRUE(r.config.heads[1].final_norm);
  EXPECT_EQ(r.config.heads[2].path, "/m/norm");
  EXPECT_EQ(r.config.heads[2].vocab, 7);
  EXPECT_EQ(r.config.head_root, "/tmp");
}

TEST(ConfigTest, SemicolonsSeparateHeadsInTheEnvironment) {
  setenv("LOGITD_HEAD", "a=/m/a,norm;b=/m/b", 1);
  const Result r = Parse({});
  unsetenv("LOGITD_HEAD");
  ASSERT_EQ(r.config.heads.size(), 2u) << r.err;
  EXPECT_EQ(r.config.heads[0].path, "/m/a");
  EXPECT_TRUE(r.config.heads[0].final_norm);
  EXPECT_EQ(r.config.heads[1].name, "b");
}

TEST(ConfigTest, TheEnvironmentReplacesMissingFlagsAndFlagsWin) {
  setenv("LOGITD_SLAB_BYTES", "256MiB", 1);
  setenv("LOGITD_LISTEN", "127.0.0.1:1,unix:/tmp/s", 1);
  setenv("LOGITD_DRAIN_GRACE", "5s", 1);
  const Result from_environment = Parse({});
  const Result from_flag = Parse({"--slab-bytes=128MiB"});
  unsetenv("LOGITD_SLAB_BYTES");
  unsetenv("LOGITD_LISTEN");
  unsetenv("LOGITD_DRAIN_GRACE");
  ASSERT_FALSE(from_environment.exit_code.has_value()) << from_environment.err;
  EXPECT_EQ(from_environment.config.slab_bytes, int64_t{256} << 20);
  EXPECT_THAT(from_environment.config.listen, ElementsAre("127.0.0.1:1", "unix:/tmp/s"));
  EXPECT_EQ(from_environment.config.drain_grace, absl::Seconds(5));
  EXPECT_EQ(from_flag.config.slab_bytes, int64_t{128} << 20);
}

TEST(ConfigTest, HelpShowsExamplesVariablesAndExitCodes) {
  const Result r = Parse({"--help"});
  EXPECT_EQ(r.exit_code, 0);
  EXPECT_THAT(r.out, HasSubstr("logitd --listen"));
  EXPECT_THAT(r.out, HasSubstr("LOGITD_SLAB_BYTES"));
  EXPECT_THAT(r.out, HasSubstr("the device was lost"));
}

struct Bad {
  const char* name;
  std::vector<const char*> flags;
  const char* text;
};

class ConfigRefuses : public ::testing::TestWithParam<Bad> {};

TEST_P(ConfigRefuses, NamingTheFlag) {
  const Result r = Parse(GetParam().flags);
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_THAT(r.err, HasSubstr(GetParam().text));
}

INSTANTIATE_TEST_SUITE_P(
    All, ConfigRefuses,
    ::testing::Values(
        Bad{"slab_below_request", {"--slab-bytes=32MiB"}, "at least --max-request-bytes"},
        Bad{"held_below_message", {"--max-held-bytes=64MiB"}, "--max-held-bytes: got 67108864"},
        Bad{"message_beyond_grpc",
            {"--slab-bytes=4GiB", "--max-request-bytes=3GiB", "--max-held-bytes=8GiB"},
            "--max-request-bytes: got 3221225472"},
        Bad{"size_0", {"--max-request-bytes=0"}, "--max-request-bytes"},
        Bad{"size_negative", {"--slab-bytes=-1"}, "--slab-bytes"},
        Bad{"size_is_a_word", {"--slab-bytes=lots"}, "--slab-bytes"},
        Bad{"streams_0", {"--streams=0"}, "--streams"},
        Bad{"batch_rows_0", {"--max-batch-rows=0"}, "--max-batch-rows"},
        Bad{"negative_duration", {"--drain-grace=-1s"}, "--drain-grace"},
        Bad{"receive_timeout_0", {"--receive-timeout=0"}, "--receive-timeout"},
        Bad{"head_without_path", {"--head=name"}, "--head: got \"name\", allowed NAME=PATH"},
        Bad{"head_without_name", {"--head==/m"}, "allowed NAME=PATH[,vocab=N][,norm]"},
        Bad{"head_with_only_options", {"--head=a=,norm"}, "allowed NAME=PATH"},
        Bad{"head_vocab_0", {"--head=a=/m,vocab=0"}, "allowed a vocab of 1 to 1048576"},
        Bad{"head_vocab_word", {"--head=a=/m,vocab=all"}, "allowed a vocab of 1 to 1048576"},
        Bad{"head_twice",
            {"--head=a=/m", "--head=b=/m", "--head=a=/n"},
            "--head: got the name \"a\" twice"},
        Bad{"head_root_missing", {"--head-root=/nowhere/at/all"}, "--head-root"},
        Bad{"log_level", {"--log-level=loud"}, "--log-level"},
        Bad{"not_a_flag", {"--listen-on=1"}, "--listen-on"}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace logitd

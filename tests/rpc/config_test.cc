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

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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
  const Result r = Parse({"--insecure", "--listen", "0.0.0.0:1", "--listen=unix:/tmp/s"});
  EXPECT_THAT(r.config.listen, ElementsAre("0.0.0.0:1", "unix:/tmp/s"));
}

TEST(ConfigTest, SizesAndDurationsTakeUnits) {
  const Result r =
      Parse({"--slab-bytes=128MiB", "--max-held-bytes=2GiB", "--max-request-bytes=1000000",
             "--max-batch-delay=200us", "--receive-timeout=1.5s", "--drain-grace=0",
             "--slow-call=50ms", "--stall-timeout=1m"});
  ASSERT_FALSE(r.exit_code.has_value()) << r.err;
  EXPECT_EQ(r.config.slab_bytes, int64_t{128} << 20);
  EXPECT_EQ(r.config.max_held_bytes, int64_t{2} << 30);
  EXPECT_EQ(r.config.max_request_bytes, 1000000);
  EXPECT_EQ(r.config.max_batch_delay, absl::Microseconds(200));
  EXPECT_EQ(r.config.receive_timeout, absl::Milliseconds(1500));
  EXPECT_EQ(r.config.drain_grace, absl::ZeroDuration());
  EXPECT_EQ(r.config.slow_call, absl::Milliseconds(50));
  EXPECT_EQ(r.config.stall_timeout, absl::Minutes(1));
}

TEST(ConfigTest, HeadsHaveANameAPathAndOptions) {
  const Result r = Parse({"--head", "a=/m/a", "--head=b=/m/x,y=z,norm,vocab=100", "--head",
                          "c=/m/norm,vocab=7,shard,norm", "--head-root=/tmp"});
  ASSERT_FALSE(r.exit_code.has_value()) << r.err;
  ASSERT_EQ(r.config.heads.size(), 3u);
  EXPECT_EQ(r.config.heads[0].name, "a");
  EXPECT_EQ(r.config.heads[0].path, "/m/a");
  EXPECT_EQ(r.config.heads[0].vocab, 0);
  EXPECT_FALSE(r.config.heads[0].final_norm);
  EXPECT_EQ(r.config.heads[1].path, "/m/x,y=z");  // the path has a comma and an =
  EXPECT_EQ(r.config.heads[1].vocab, 100);
  EXPECT_TRUE(r.config.heads[1].final_norm);
  EXPECT_FALSE(r.config.heads[1].shard);
  EXPECT_EQ(r.config.heads[2].path, "/m/norm");
  EXPECT_TRUE(r.config.heads[2].shard);
  EXPECT_EQ(r.config.heads[2].vocab, 7);
  EXPECT_EQ(r.config.head_root, "/tmp");
}

TEST(ConfigTest, DevicesAreNumbersOrAll) {
  const auto devices = [](const std::string& text) {
    const Result r = Parse({"--device", text.c_str()});
    EXPECT_FALSE(r.exit_code.has_value()) << r.err;
    return r.config.devices;
  };
  EXPECT_EQ(Parse({}).config.devices, std::vector<int>{0});
  EXPECT_EQ(devices("3"), std::vector<int>{3});
  EXPECT_EQ(devices("2,0,255"), (std::vector<int>{2, 0, 255}));  // in the order that was given
  EXPECT_EQ(devices("all"), std::vector<int>());
  setenv("LOGITD_DEVICE", "1,0", 1);
  EXPECT_EQ(Parse({}).config.devices, (std::vector<int>{1, 0}));
  unsetenv("LOGITD_DEVICE");
}

TEST(ConfigTest, TheExchangeOfShardsHasAName) {
  EXPECT_EQ(Parse({}).config.shard_exchange, ShardExchange::kAuto);
  EXPECT_EQ(Parse({"--shard-exchange=auto"}).config.shard_exchange, ShardExchange::kAuto);
  EXPECT_EQ(Parse({"--shard-exchange=peers"}).config.shard_exchange, ShardExchange::kPeers);
  EXPECT_EQ(Parse({"--shard-exchange", "nccl"}).config.shard_exchange, ShardExchange::kNccl);
}

TEST(ConfigTest, TheSocketModeIsOctal) {
  EXPECT_EQ(Parse({"--socket-mode=0660"}).config.socket_mode, mode_t{0660});
  EXPECT_EQ(Parse({"--socket-mode", "7"}).config.socket_mode, mode_t{7});
  EXPECT_EQ(Parse({}).config.socket_mode, std::nullopt);
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

TEST(ConfigTest, AnUnknownVariableIsRefusedWithTheNearestName) {
  setenv("LOGITD_SLAB_BYTE", "1MiB", 1);
  const Result r = Parse({});
  unsetenv("LOGITD_SLAB_BYTE");
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_THAT(r.err, HasSubstr("LOGITD_SLAB_BYTE: got an unknown variable, the nearest is "
                               "LOGITD_SLAB_BYTES"));
}

// Kubernetes sets them in every pod of a namespace that has a Service "logitd" or "logitd-gpu".
TEST(ConfigTest, VariablesOfKubernetesServicesAndOfTheClientAreNotFlags) {
  const char* const names[] = {"LOGITD_SERVICE_HOST",           "LOGITD_SERVICE_PORT",
                               "LOGITD_SERVICE_PORT_GRPC",      "LOGITD_PORT",
                               "LOGITD_PORT_7450_TCP",          "LOGITD_PORT_7450_TCP_PROTO",
                               "LOGITD_PORT_7450_TCP_ADDR",     "LOGITD_GPU_SERVICE_HOST",
                               "LOGITD_GPU_PORT_7450_TCP_PORT", "LOGITD_ADDR"};
  for (const char* name : names) setenv(name, "tcp://10.0.0.1:7450", 1);
  const Result r = Parse({});
  for (const char* name : names) unsetenv(name);
  EXPECT_FALSE(r.exit_code.has_value()) << r.err;
}

TEST(ConfigTest, SizesTakeTheUnitsOfHabit) {
  for (const char* text : {"64MiB", "64M", "64 mb", "64Mi", "65536KiB", "67108864", "67108864B"}) {
    const Result r = Parse({"--slab-bytes", text});
    EXPECT_FALSE(r.exit_code.has_value()) << r.err;
    EXPECT_EQ(r.config.slab_bytes, int64_t{64} << 20) << text;
  }
  EXPECT_EQ(Parse({"--max-held-bytes=1TiB"}).config.max_held_bytes, int64_t{1} << 40);
}

TEST(ConfigTest, AddressesMayBeIpv6NamesAndSockets) {
  const Result r =
      Parse({"--insecure", "--listen=[::]:0", "--listen=[fe80::1%eth0]:1",
             "--listen=my-host.a_b:65535", "--listen=unix:/tmp/a b", "--metrics-listen=[::1]:0"});
  EXPECT_FALSE(r.exit_code.has_value()) << r.err;
  EXPECT_EQ(r.config.listen.size(), 4u);
}

TEST(ConfigTest, OtherMachinesComeInOnlyWithTlsAndIdentities) {
  const std::vector<std::vector<const char*>> refused = {
      {"--listen=0.0.0.0:1"},
      {"--listen=127.0.0.1:1", "--listen=10.1.2.3:1"},
      {"--listen=my-host:1"},
      {"--listen=[::]:1", "--tls-cert=c", "--tls-key=k"},
      {"--listen=[::]:1", "--tokens=t"},
  };
  for (const auto& flags : refused) {
    const Result r = Parse(flags);
    EXPECT_EQ(r.exit_code, 2) << flags.front();
    EXPECT_THAT(r.err, AllOf(HasSubstr("--listen: got \""), HasSubstr("or with --insecure")));
  }
  const std::vector<std::vector<const char*>> allowed = {
      {"--listen=localhost:1", "--listen=[::1]:1", "--listen=127.1.2.3:1", "--tokens=t"},
      {"--listen=0.0.0.0:1", "--insecure"},
      {"--listen=0.0.0.0:1", "--tls-cert=c", "--tls-key=k", "--tokens=t"},
      {"--listen=0.0.0.0:1", "--tls-cert=c", "--tls-key=k", "--tls-client-ca=a"},
  };
  for (const auto& flags : allowed) {
    const Result r = Parse(flags);
    EXPECT_FALSE(r.exit_code.has_value()) << r.err;
  }
}

TEST(ConfigTest, TlsNeedsACertificateAndItsKey) {
  EXPECT_THAT(Parse({"--tls-cert=c"}).err, HasSubstr("--tls-key: got nothing"));
  EXPECT_THAT(Parse({"--tls-key=k"}).err, HasSubstr("--tls-cert: got nothing"));
  EXPECT_THAT(Parse({"--tls-client-ca=a"}).err, HasSubstr("--tls-cert: got nothing"));
}

TEST(ConfigTest, ConnectionsHaveLimitsOfTime) {
  const Result r =
      Parse({"--max-connection-age=1h", "--max-connection-idle=inf", "--keepalive-time=30s",
             "--max-streams=100", "--min-ping-interval=200ms"});
  ASSERT_FALSE(r.exit_code.has_value()) << r.err;
  EXPECT_EQ(r.config.max_connection_age, absl::Hours(1));
  EXPECT_EQ(r.config.max_connection_idle, absl::InfiniteDuration());
  EXPECT_EQ(r.config.keepalive_time, absl::Seconds(30));
  EXPECT_EQ(r.config.max_streams, 100);
  EXPECT_EQ(r.config.min_ping_interval, absl::Milliseconds(200));
  EXPECT_LE(Parse({}).config.min_ping_interval, absl::Seconds(10));  // what clients usually set
  for (const char* flag : {"--max-connection-age=0", "--max-connection-idle=1ms",
                           "--keepalive-time=0s", "--max-streams=0", "--min-ping-interval=-1s",
                           "--min-ping-interval=inf", "--min-ping-interval=often"}) {
    EXPECT_EQ(Parse({flag}).exit_code, 2) << flag;
  }
}

TEST(ConfigTest, ArenasHaveASocketAndLimits) {
  const Result r =
      Parse({"--arena-listen=unix:/run/a", "--arena-mode=660", "--max-arena-bytes=2GiB",
             "--max-device-arena-bytes=3GiB", "--max-leases=7"});
  ASSERT_FALSE(r.exit_code.has_value()) << r.err;
  EXPECT_EQ(r.config.arena_listen, "unix:/run/a");
  EXPECT_EQ(r.config.arena_mode, 0660u);
  EXPECT_EQ(r.config.max_arena_bytes, int64_t{2} << 30);
  EXPECT_EQ(r.config.max_device_arena_bytes, int64_t{3} << 30);
  EXPECT_EQ(Parse({"--max-device-arena-bytes=0"}).config.max_device_arena_bytes, 0);
  EXPECT_EQ(r.config.max_leases, 7);
  EXPECT_EQ(Parse({}).config.arena_listen, "");
  EXPECT_EQ(Parse({}).config.arena_mode, 0600u);
}

TEST(ConfigTest, ProbesMayHaveAddressesOfTheirOwn) {
  const Result r = Parse({"--probe-listen=0.0.0.0:7451,unix:/run/probes"});
  ASSERT_FALSE(r.exit_code.has_value()) << r.err;
  EXPECT_THAT(r.config.probe_listen, ElementsAre("0.0.0.0:7451", "unix:/run/probes"));
  EXPECT_THAT(Parse({}).config.probe_listen, IsEmpty());
}

TEST(ConfigTest, AnUnlimitedTimeIsInf) {
  const Result r = Parse({"--receive-timeout=inf", "--drain-grace=inf"});
  ASSERT_FALSE(r.exit_code.has_value()) << r.err;
  EXPECT_EQ(r.config.receive_timeout, absl::InfiniteDuration());
  EXPECT_EQ(r.config.drain_grace, absl::InfiniteDuration());
}

TEST(ConfigTest, TheHelpSaysWhatIsAllowed) {
  const Result r = Parse({"--help"});
  EXPECT_THAT(r.out, HasSubstr("--device (numbers of 0 to 255 like 0,1"));
  // CLI11 writes a default as "=64MiB", and " [64MiB]" from version 2.5 on.
  const auto has = [](const std::string& flag, const std::string& value) {
    return AnyOf(HasSubstr(flag + "=" + value), HasSubstr(flag + " [" + value + "]"));
  };
  EXPECT_THAT(r.out, has("--slab-bytes (1 to 1TiB, in bytes or with a unit)", "64MiB"));
  EXPECT_THAT(r.out, has("--max-batch-delay (0 to 24h with a unit)", "0"));
  EXPECT_THAT(r.out, has("--backend (auto, cpu, cuda)", "auto"));
}

TEST(ConfigTest, HelpShowsExamplesVariablesAndExitCodes) {
  const Result r = Parse({"--help"});
  EXPECT_EQ(r.exit_code, 0);
  EXPECT_THAT(r.out, HasSubstr("logitd --listen"));
  EXPECT_THAT(r.out, HasSubstr("LOGITD_SLAB_BYTES"));
  EXPECT_THAT(r.out, HasSubstr("the device was lost"));
}

const struct {
  const char* name;
  std::vector<const char*> flags;
  const char* text;
} kRefused[] = {
    {"slab_below_request", {"--slab-bytes=32MiB"}, "at least --max-request-bytes"},
    {"held_below_message", {"--max-held-bytes=64MiB"}, "--max-held-bytes: got 67108864"},
    {"message_beyond_grpc",
     {"--slab-bytes=4GiB", "--max-request-bytes=3GiB", "--max-held-bytes=8GiB"},
     "--max-request-bytes: got 3221225472"},
    {"size_0", {"--max-request-bytes=0"}, "--max-request-bytes"},
    {"size_negative", {"--slab-bytes=-1"}, "--slab-bytes"},
    {"size_is_a_word", {"--slab-bytes=lots"}, "--slab-bytes"},
    {"request_size_negative",
     {"--max-request-bytes=-5"},
     "--max-request-bytes: got \"-5\", allowed 1 to 1TiB, in bytes or with a unit"},
    {"held_size_negative", {"--max-held-bytes=-1"}, "--max-held-bytes: got \"-1\""},
    {"size_overflows", {"--slab-bytes=99999999999999999999"}, "allowed 1 to 1TiB"},
    {"size_overflows_by_its_unit", {"--slab-bytes=9999999999TiB"}, "allowed 1 to 1TiB"},
    {"size_too_large", {"--slab-bytes=2TiB"}, "--slab-bytes: got \"2TiB\""},
    {"size_with_a_fraction", {"--slab-bytes=1.5GiB"}, "--slab-bytes: got \"1.5GiB\""},
    {"size_inf", {"--slab-bytes=inf"}, "--slab-bytes: got \"inf\""},
    {"size_with_a_wrong_unit", {"--slab-bytes=1XiB"}, "--slab-bytes: got \"1XiB\""},
    {"streams_0", {"--streams=0"}, "--streams: got \"0\", allowed 1 to 64"},
    {"streams_nan", {"--streams=nan"}, "--streams: got \"nan\", allowed 1 to 64"},
    {"streams_overflow", {"--streams=4294967297"}, "--streams: got \"4294967297\""},
    {"streams_without_value", {"--streams"}, "--streams: 1 required (1 to 64) missing"},
    {"device_negative",
     {"--device=-1"},
     "--device: got \"-1\", allowed numbers of 0 to 255 like 0,1, at most 64, each once, or "
     "all\n"},
    {"device_fraction", {"--device=0.5"}, "--device: got \"0.5\", allowed numbers"},
    {"device_too_large", {"--device=256"}, "--device: got \"256\", allowed numbers"},
    {"device_twice", {"--device=0,1,0"}, "--device: got \"0,1,0\", allowed numbers"},
    {"device_missing", {"--device=0,"}, "--device: got \"0,\", allowed numbers"},
    {"device_all_and_one", {"--device=all,0"}, "--device: got \"all,0\", allowed numbers"},
    {"device_range", {"--device=0-3"}, "--device: got \"0-3\", allowed numbers"},
    {"device_with_spaces", {"--device=0, 1"}, "--device: got \"0, 1\", allowed numbers"},
    {"device_word", {"--device=every"}, "--device: got \"every\", allowed numbers"},
    {"shard_exchange_word",
     {"--shard-exchange=NCCL"},
     "--shard-exchange: got \"NCCL\", allowed auto, peers, nccl"},
    {"cpu_threads_negative", {"--cpu-threads=-1"}, "allowed 0 to 4096"},
    {"waiting_calls_negative", {"--max-waiting-calls=-1"}, "allowed 0 to 1048576"},
    {"batch_rows_0", {"--max-batch-rows=0"}, "--max-batch-rows: got \"0\""},
    {"batch_rows_beyond_a_message",
     {"--max-batch-rows=16777216"},
     "--max-batch-rows: got \"16777216\", allowed 1 to 16776703\n"},
    {"batch_rows_leave_little_room",
     {"--max-batch-rows=16776703"},
     "--max-request-bytes: got 67108864, allowed at most 127 with --max-batch-rows"},
    {"batch_delay_inf",
     {"--max-batch-delay=inf"},
     "--max-batch-delay: got \"inf\", allowed 0 to 24h with a unit\n"},
    {"batch_delay_too_long", {"--max-batch-delay=25h"}, "allowed 0 to 24h"},
    {"negative_duration",
     {"--drain-grace=-1s"},
     "--drain-grace: got \"-1s\", allowed 0 to 24h with a unit, or inf\n"},
    {"negative_inf", {"--drain-grace=-inf"}, "--drain-grace: got \"-inf\""},
    {"duration_nan", {"--drain-grace=nan"}, "--drain-grace: got \"nan\""},
    {"duration_without_unit", {"--drain-grace=5"}, "--drain-grace: got \"5\""},
    {"receive_timeout_0",
     {"--receive-timeout=0"},
     "--receive-timeout: got \"0\", allowed 1ms to 24h with a unit, or inf\n"},
    {"port_too_large",
     {"--listen=127.0.0.1:99999"},
     "--listen: got \"127.0.0.1:99999\", allowed a port of 0 to 65535\n"},
    {"port_negative", {"--listen=127.0.0.1:-1"}, "allowed a port of 0 to 65535"},
    {"port_empty", {"--listen=127.0.0.1:"}, "allowed a port of 0 to 65535"},
    {"port_is_a_word", {"--listen=127.0.0.1:http"}, "allowed a port of 0 to 65535"},
    {"host_empty", {"--listen=:7450"}, "allowed a host before the port"},
    {"host_with_a_slash", {"--listen=dns:///a:1"}, "--listen: got \"dns:///a:1\""},
    {"ipv6_without_brackets", {"--listen=::1:7450"}, "allowed brackets around an IPv6"},
    {"ipv6_of_letters", {"--listen=[host]:7450"}, "allowed an IPv6 address in the brackets"},
    {"no_port", {"--listen=nowhere"}, "allowed HOST:PORT, [IPv6]:PORT or unix:PATH"},
    {"unix_without_path", {"--listen=unix:"}, "got \"unix:\", allowed a path after unix:"},
    {"listen_with_a_control_character", {"--listen=a\n:1"}, "--listen: got \"a\\n:1\""},
    {"second_listen_is_wrong", {"--listen=[::1]:1", "--listen=b"}, "--listen: got \"b\""},
    {"metrics_port_too_large",
     {"--metrics-listen=127.0.0.1:65536"},
     "--metrics-listen: got \"127.0.0.1:65536\", allowed a port of 0 to 65535\n"},
    {"metrics_on_a_unix_socket",
     {"--metrics-listen=unix:/tmp/a"},
     "--metrics-listen: got \"unix:/tmp/a\", allowed HOST:PORT or [IPv6]:PORT"},
    {"arenas_on_tcp", {"--arena-listen=127.0.0.1:1"}, "allowed unix:PATH"},
    {"arenas_without_path", {"--arena-listen=unix:"}, "allowed a path after unix:"},
    {"arenas_where_calls_come",
     {"--listen=unix:/a", "--arena-listen=unix:/a"},
     "allowed a path that --listen does not have"},
    {"arena_mode_word", {"--arena-mode=all"}, "got \"all\", allowed 0600 to 0777, octal"},
    {"arena_mode_that_shuts_the_owner_out", {"--arena-mode=0060"}, "--arena-mode: got"},
    {"arena_mode_with_more_bits", {"--arena-mode=4600"}, "--arena-mode: got"},
    {"device_arena_bytes_word", {"--max-device-arena-bytes=all"}, "allowed 0 to 1TiB"},
    {"arena_bytes_0", {"--max-arena-bytes=0"}, "allowed 1 to 1TiB"},
    {"leases_0", {"--max-leases=0"}, "allowed 1 to 4096"},
    {"socket_mode_decimal", {"--socket-mode=689"}, "--socket-mode: got \"689\", allowed 0"},
    {"socket_mode_too_much", {"--socket-mode=1777"}, "allowed 0 to 0777, octal"},
    {"backend", {"--backend=tpu"}, "--backend: got \"tpu\", allowed auto, cpu, cuda"},
    {"switch_with_a_word",
     {"--allow-remote-heads=maybe"},
     "--allow-remote-heads: got another value, allowed true, false or none"},
    {"another_switch_with_a_word",
     {"--insecure=maybe"},
     "--insecure: got another value, allowed true, false or none"},
    {"head_bytes_negative", {"--max-head-bytes=-1"}, "allowed 0 to 1TiB"},
    {"head_without_path", {"--head=name"}, "--head: got \"name\", allowed NAME=PATH"},
    {"head_without_name", {"--head==/m"}, "allowed NAME=PATH[,vocab=N][,norm][,shard]"},
    {"head_with_only_options", {"--head=a=,norm"}, "allowed NAME=PATH"},
    {"head_vocab_0", {"--head=a=/m,vocab=0"}, "allowed a vocab of 1 to 1048576"},
    {"head_vocab_word", {"--head=a=/m,vocab=all"}, "allowed a vocab of 1 to 1048576"},
    {"head_twice",
     {"--head=a=/m", "--head=b=/m", "--head=a=/n"},
     "--head: got the name \"a\" twice"},
    {"head_root_missing",
     {"--head-root=/nowhere/at/all"},
     "--head-root: got \"/nowhere/at/all\", allowed a directory that exists"},
    {"log_level",
     {"--log-level=loud"},
     "--log-level: got \"loud\", allowed debug, info, warn, error, off"},
    {"not_a_flag", {"--listen-on=1"}, "--listen-on: got an unknown flag, the nearest is --listen"},
    {"not_a_flag_at_all", {"serve"}, "serve: got a word, allowed only flags"}};

TEST(ConfigTest, RefusalsNameTheFlag) {
  for (const auto& [name, flags, text] : kRefused) {
    SCOPED_TRACE(name);
    const Result r = Parse(flags);
    EXPECT_EQ(r.exit_code, 2);
    EXPECT_THAT(r.err, HasSubstr(text));
  }
}

}  // namespace
}  // namespace logitd

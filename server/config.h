// The operator's choices: flags, or environment variables for flags that are not given.
#ifndef LOGITD_SERVER_CONFIG_H_
#define LOGITD_SERVER_CONFIG_H_

#include <sys/types.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "kernels/sharded_stream.h"
#include "server/engine/heads.h"

namespace logitd {

struct Config {
  std::vector<std::string> listen = {"127.0.0.1:7450"};
  std::vector<std::string> probe_listen;  // only for health, in plaintext
  std::optional<mode_t> socket_mode;      // of the files of Unix sockets; nullopt: by the umask
  std::string backend = "auto";
  std::vector<int> devices = {0};  // numbers, each once; empty: all that there are
  ShardExchange shard_exchange = ShardExchange::kAuto;
  int cpu_threads = 0;
  int streams = 2;
  int64_t slab_bytes = int64_t{64} << 20;
  int64_t max_request_bytes = int64_t{64} << 20;
  int64_t max_held_bytes = int64_t{1} << 30;
  int max_waiting_calls = 1024;
  int64_t min_receive_rate = int64_t{1} << 20;  // bytes per second; 0: no limit
  int64_t max_batch_rows = 65536;
  int64_t max_connections = 0;  // 0: as many as descriptors and max_connection_bytes allow
  absl::Duration max_batch_delay = absl::ZeroDuration();
  std::vector<engine::HeadRequest> heads;  // loaded at start
  std::string head_root;                   // a directory; empty: clients cannot load heads
  int64_t max_head_bytes = 0;              // 0: see --help
  bool allow_remote_heads = false;         // also if `listen` has an address that is not local
  std::string tls_cert;                    // files; empty: none
  std::string tls_key;
  std::string tls_client_ca;
  std::string tokens;
  bool insecure = false;
  std::string arena_listen;  // a Unix socket on which clients lease memory; empty: none
  mode_t arena_mode = 0600;
  int64_t max_arena_bytes = int64_t{1} << 30;         // of one arena, and of all together
  int64_t max_device_arena_bytes = int64_t{1} << 30;  // the same, of each device's memory
  int max_leases = 64;
  int loops = 0;                                      // event loops; 0: by the cores
  int max_streams = 2048;                             // open calls of a connection
  int64_t max_connection_bytes = int64_t{256} << 20;  // of all connections, beside messages
  absl::Duration max_connection_age = absl::InfiniteDuration();
  absl::Duration max_connection_idle = absl::InfiniteDuration();
  absl::Duration keepalive_time = absl::Minutes(1);
  absl::Duration min_ping_interval = absl::Seconds(5);  // of a peer; 0: any
  absl::Duration receive_timeout = absl::Seconds(30);
  absl::Duration drain_grace = absl::Seconds(30);
  std::string metrics_listen = "127.0.0.1:9464";  // or "off"
  absl::Duration slow_call = absl::Seconds(1);    // one that takes longer has a line in the log
  absl::Duration stall_timeout = absl::Seconds(10);
  std::string log_level = "info";
  std::string log_format = "text";
};

// Semantic version of this build.
std::string_view Version();

// The name and version of the HTTP/2 library: "nghttp2 1.52.0".
std::string_view TransportVersion();

// Fills `config`. A value: the process must end with it, 0 after --help or --version (text on
// `out`), 2 after a wrong flag (flag, got, allowed on `err`).
std::optional<int> ParseConfig(int argc, const char* const* argv, Config* config, std::ostream& out,
                               std::ostream& err);

}  // namespace logitd

#endif  // LOGITD_SERVER_CONFIG_H_

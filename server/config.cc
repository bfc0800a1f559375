#include "server/config.h"

#include <nghttp2/nghttp2.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <functional>
#include <iterator>
#include <limits>
#include <ostream>
#include <regex>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "formats/nearest.h"
#include "server/door/address.h"
#include "server/http2/listener.h"
#include "server/rpc/rpc_server.h"

namespace logitd {
namespace {

constexpr int kUsageError = 2;

constexpr const char* kDescription =
    "logitd: top-K, sampling, scoring and attention softmax over logits, as a gRPC service.\n\n"
    "  logitd                             # listens on 127.0.0.1:7450, uses a GPU if one answers\n"
    "  logitd --listen 0.0.0.0:7450 --tls-cert cert.pem --tls-key key.pem --tokens tokens.json\n"
    "  logitd --listen unix:/run/logitd.sock --listen 127.0.0.1:7450\n"
    "  logitd --backend cpu --cpu-threads 8\n"
    "  logitd --device all                # every GPU holds the heads and does a part of the work\n"
    "  logitd --head llama=/models/llama --head-root /models\n\n"
    "Sizes take units (64MiB, 1GiB; factors of 1024), and so do durations (200us, 30s). Every "
    "flag\n"
    "has an environment variable: LOGITD_SLAB_BYTES is --slab-bytes. The flag wins.\n\n"
    "SIGTERM or SIGINT starts a drain: health becomes NOT_SERVING, new calls get UNAVAILABLE,\n"
    "admitted calls finish, and the process exits with 0. A second signal ends it at once. Exit\n"
    "code 1: could not start, and may later. 2: a bad flag, or a bad file that a flag names.\n"
    "3: the device was lost (of several, the last), or hangs. SIGUSR1 sets the log's level to\n"
    "debug, SIGUSR2 back.\n\n"
    "Host memory: the slabs of each device (--streams x 4 x --slab-bytes, pinned if there is a\n"
    "GPU), --max-held-bytes for messages and answers, and --max-connection-bytes for what else\n"
    "connections hold. On the CPU also the heads, and 64 MiB for each stream that uses one.\n";

// The most that gRPC's clients send.
constexpr int64_t kMaxMessage = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxSize = int64_t{1} << 40;
constexpr absl::Duration kMaxDuration = absl::Hours(24);

// The most rows whose small fields fit into a message beside one byte of payload.
int64_t MaxBatchRows() {
  const int64_t fixed = rpc::MaxMessageBytes(1, 0);
  return (kMaxMessage - fixed) / (rpc::MaxMessageBytes(1, 1) - fixed);
}

std::string EnvironmentName(std::string flag) {
  flag.erase(0, 2);
  std::replace(flag.begin(), flag.end(), '-', '_');
  std::transform(flag.begin(), flag.end(), flag.begin(), ::toupper);
  return "LOGITD_" + flag;
}

// An option with its environment variable.
template <typename T>
CLI::Option* Add(CLI::App& app, const std::string& flag, T* value, const std::string& help) {
  return app.add_option(flag, *value, help)->envname(EnvironmentName(flag))->capture_default_str();
}

// Adds an option whose text `parse` turns into a value, or refuses by returning false. `allowed`
// is what the help and the error say.
void AddParsed(CLI::App& app, const std::string& flag, const std::string& help,
               const std::string& allowed, const std::string& default_text,
               const std::function<bool(const std::string&)>& parse) {
  app.add_option_function<std::string>(
         flag,
         [flag, allowed, parse](const std::string& text) {
           if (parse(text)) return;
           throw CLI::ValidationError(
               flag, absl::StrFormat("got \"%s\", allowed %s", absl::CHexEscape(text), allowed));
         },
         help)
      ->envname(EnvironmentName(flag))
      ->default_str(default_text)
      ->type_name(absl::StrCat("(", allowed, ")"));
}

// Only digits: no sign, no space, no fraction.
bool ParseDigits(std::string_view text, int64_t* value) {
  const bool digits = !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return absl::ascii_isdigit(static_cast<unsigned char>(c));
  });
  return digits && absl::SimpleAtoi(std::string(text), value);
}

constexpr int kMaxDevice = 255;
constexpr size_t kMostDevices = 64;

// "0", "0,2,3" or "all", which is no number.
bool ParseDevices(const std::string& text, std::vector<int>* devices) {
  std::vector<int> numbers;
  if (text != "all") {
    const std::vector<std::string> parts = absl::StrSplit(text, ',');
    for (const std::string& part : parts) {
      int64_t number = 0;
      if (!ParseDigits(part, &number) || number > kMaxDevice) return false;
      if (std::find(numbers.begin(), numbers.end(), number) != numbers.end()) return false;
      numbers.push_back(static_cast<int>(number));
    }
    if (numbers.size() > kMostDevices) return false;
  }
  *devices = std::move(numbers);
  return true;
}

void AddDevices(CLI::App& app, std::vector<int>* devices) {
  AddParsed(app, "--device",
            "CUDA devices that work side by side, by number; all: every one that answers. On the "
            "CPU as many simulated ones",
            absl::StrFormat("numbers of 0 to %d like 0,1, at most %d, each once, or all",
                            kMaxDevice, kMostDevices),
            absl::StrJoin(*devices, ","),
            [devices](const std::string& text) { return ParseDevices(text, devices); });
}

void AddShardExchange(CLI::App& app, ShardExchange* value) {
  AddParsed(
      app, "--shard-exchange",
      "How GPUs that hold parts of a head exchange what they found: peers: by stores into each "
      "other's memory; nccl: by NCCL; auto: peers where they can, else nccl",
      "auto, peers, nccl", "auto", [value](const std::string& text) {
        *value = text == "peers"  ? ShardExchange::kPeers
                 : text == "nccl" ? ShardExchange::kNccl
                                  : ShardExchange::kAuto;
        return text == "auto" || text == "peers" || text == "nccl";
      });
}

template <typename T>
void AddInteger(CLI::App& app, const std::string& flag, T* value, int64_t low, int64_t high,
                const std::string& help) {
  AddParsed(app, flag, help, absl::StrFormat("%d to %d", low, high), absl::StrCat(*value),
            [value, low, high](const std::string& text) {
              int64_t number = 0;
              if (!ParseDigits(text, &number) || number < low || number > high) return false;
              *value = static_cast<T>(number);
              return true;
            });
}

constexpr std::string_view kUnits[] = {"", "k", "m", "g", "t"};

// "64MiB", "64M", "64 mb", "67108864".
bool ParseSize(const std::string& text, int64_t* value) {
  const size_t end = text.find_first_not_of("0123456789");
  if (!ParseDigits(std::string_view(text).substr(0, end), value)) return false;
  std::string unit = end == std::string::npos ? "" : text.substr(end);
  absl::StripAsciiWhitespace(&unit);
  absl::AsciiStrToLower(&unit);
  if (absl::EndsWith(unit, "b")) unit.pop_back();
  if (absl::EndsWith(unit, "i") && unit.size() == 2) unit.pop_back();
  const auto at = std::find(std::begin(kUnits), std::end(kUnits), unit);
  if (at == std::end(kUnits)) return false;
  const auto shift = 10 * (at - std::begin(kUnits));
  if (*value > std::numeric_limits<int64_t>::max() >> shift) return false;
  *value <<= shift;
  return true;
}

std::string SizeText(int64_t bytes) {
  constexpr std::string_view kNames[] = {"", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  for (; bytes > 0 && bytes % 1024 == 0 && unit + 1 < std::size(kNames); ++unit) bytes /= 1024;
  return absl::StrCat(bytes, std::string(kNames[unit]));
}

void AddSize(CLI::App& app, const std::string& flag, int64_t* value, int64_t low,
             const std::string& help) {
  AddParsed(app, flag, help,
            absl::StrFormat("%d to %s, in bytes or with a unit", low, SizeText(kMaxSize)),
            SizeText(*value), [value, low](const std::string& text) {
              int64_t bytes = 0;
              if (!ParseSize(text, &bytes) || bytes < low || bytes > kMaxSize) return false;
              *value = bytes;
              return true;
            });
}

// `infinite`: inf is allowed too.
void AddDuration(CLI::App& app, const std::string& flag, absl::Duration* value, absl::Duration low,
                 bool infinite, const std::string& help) {
  AddParsed(app, flag, help,
            absl::StrFormat("%s to %s with a unit%s", absl::FormatDuration(low), "24h",
                            infinite ? ", or inf" : ""),
            absl::FormatDuration(*value), [value, low, infinite](const std::string& text) {
              absl::Duration duration;
              if (!absl::ParseDuration(text, &duration)) return false;
              const bool finite = duration >= low && duration <= kMaxDuration;
              if (!finite && !(infinite && duration == absl::InfiniteDuration())) return false;
              *value = duration;
              return true;
            });
}

void AddChoice(CLI::App& app, const std::string& flag, std::string* value,
               const std::vector<std::string>& choices, const std::string& help) {
  AddParsed(app, flag, help, absl::StrJoin(choices, ", "), *value,
            [value, choices](const std::string& text) {
              *value = text;
              return std::find(choices.begin(), choices.end(), text) != choices.end();
            });
}

// The permissions of a Unix socket's file: octal digits, from `least` to 0777.
bool ParseMode(const std::string& text, mode_t least, mode_t* mode) {
  constexpr std::string_view kOctal = "01234567";
  if (text.empty() || text.size() > 4 || text.find_first_not_of(kOctal) != std::string::npos) {
    return false;
  }
  *mode = static_cast<mode_t>(std::stoul(text, nullptr, 8));
  return *mode >= least && *mode <= 0777;
}

void AddSocketMode(CLI::App& app, std::optional<mode_t>* value) {
  AddParsed(app, "--socket-mode",
            "Permissions of the files of Unix sockets; by default what the umask leaves",
            "0 to 0777, octal", "",
            [value](const std::string& text) { return ParseMode(text, 0, &value->emplace()); });
}

void AddAddresses(CLI::App& app, Config* config) {
  Add(app, "--listen", &config->listen,
      "Address to serve on: HOST:PORT (port 0 picks one) or unix:PATH; repeatable")
      ->delimiter(',')
      ->type_name("ADDRESS");
  AddSocketMode(app, &config->socket_mode);
  Add(app, "--probe-listen", &config->probe_listen,
      "Address that answers only health probes, in plaintext and under any load; repeatable")
      ->delimiter(',')
      ->type_name("ADDRESS");
}

// Who may come in and call.
void AddDoor(CLI::App& app, Config* config) {
  Add(app, "--tls-cert", &config->tls_cert,
      "PEM file of the server's certificate and those that lead to its root: TLS on all addresses "
      "of --listen that are not Unix sockets; read again when it changes")
      ->type_name("FILE");
  Add(app, "--tls-key", &config->tls_key, "PEM file of the key of --tls-cert")->type_name("FILE");
  Add(app, "--tls-client-ca", &config->tls_client_ca,
      "PEM file of the authorities whose certificates clients must have (mutual TLS)")
      ->type_name("FILE");
  Add(app, "--tokens", &config->tokens,
      "JSON file of the identities that may call: their tokens, certificates and users, roles, "
      "weights and quotas; read again when it changes")
      ->type_name("FILE");
  app.add_flag("--insecure", config->insecure,
               "Listen on addresses that other machines reach although there is no TLS, or nothing "
               "that shows who calls")
      ->envname(EnvironmentName("--insecure"));
}

// Memory that clients on this machine lease.
void AddArenas(CLI::App& app, Config* config) {
  Add(app, "--arena-listen", &config->arena_listen,
      "Unix socket on which clients of this machine lease memory, to hand over rows without "
      "sending them; without it there are no leases")
      ->type_name("unix:PATH");
  AddParsed(
      app, "--arena-mode", "Permissions of that socket's file: who may lease",
      "0600 to 0777, octal", absl::StrFormat("%04o", config->arena_mode),
      [config](const std::string& text) { return ParseMode(text, 0600, &config->arena_mode); });
  AddSize(app, "--max-arena-bytes", &config->max_arena_bytes, 1,
          "Host memory of one lease, and of all leases together");
  AddSize(app, "--max-device-arena-bytes", &config->max_device_arena_bytes, 0,
          "Memory of one lease of a GPU, and of all leases of the same GPU together; 0: none");
  AddInteger(app, "--max-leases", &config->max_leases, 1, 4096, "Leases at the same time");
}

// NAME=PATH[,vocab=N][,norm][,shard]
engine::HeadRequest ParseHead(const std::string& flag, const std::string& text) {
  const auto refuse = [&](const std::string& allowed) {
    return CLI::ValidationError(flag, absl::StrFormat("got \"%s\", allowed %s", text, allowed));
  };
  const size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0)
    throw refuse("NAME=PATH[,vocab=N][,norm][,shard]");
  engine::HeadRequest head{.name = text.substr(0, equals), .path = text.substr(equals + 1)};
  // From the end: the path itself may have commas.
  for (size_t comma = head.path.rfind(','); comma != std::string::npos;
       comma = head.path.rfind(',')) {
    const std::string option = head.path.substr(comma + 1);
    if (option == "norm") {
      head.final_norm = true;
    } else if (option == "shard") {
      head.shard = true;
    } else if (absl::StartsWith(option, "vocab=")) {
      if (!absl::SimpleAtoi(option.substr(6), &head.vocab) || head.vocab < 1 ||
          head.vocab > kMaxVocab) {
        throw refuse(absl::StrFormat("a vocab of 1 to %d", kMaxVocab));
      }
    } else {
      break;
    }
    head.path.resize(comma);
  }
  if (head.path.empty()) throw refuse("NAME=PATH[,vocab=N][,norm][,shard]");
  return head;
}

void AddHeads(CLI::App& app, const std::string& flag, std::vector<engine::HeadRequest>* heads,
              const std::string& help) {
  app.add_option_function<std::vector<std::string>>(
         flag,
         [flag, heads](const std::vector<std::string>& texts) {
           std::transform(texts.begin(), texts.end(), std::back_inserter(*heads),
                          [&](const std::string& text) { return ParseHead(flag, text); });
         },
         help)
      ->envname(EnvironmentName(flag))
      ->delimiter(';')
      ->type_name("NAME=PATH[,vocab=N][,norm][,shard]");
}

// Strangers must not reach a server that does not know who calls, or that lets others read along.
void CheckDoor(const Config& config) {
  const auto refuse = [](const std::string& flag, const std::string& text) {
    throw CLI::ValidationError(flag, text);
  };
  if (config.tls_cert.empty() != config.tls_key.empty()) {
    const bool cert = config.tls_key.empty();
    refuse(cert ? "--tls-key" : "--tls-cert",
           absl::StrCat("got nothing, allowed a file, since there is ",
                        cert ? "--tls-cert" : "--tls-key"));
  }
  if (!config.tls_client_ca.empty() && config.tls_cert.empty()) {
    refuse("--tls-cert", "got nothing, allowed a file, since there is --tls-client-ca");
  }
  const bool knows_callers = !config.tokens.empty() || !config.tls_client_ca.empty();
  if (config.insecure || (!config.tls_cert.empty() && knows_callers)) return;
  for (const std::string& text : config.listen) {
    const absl::StatusOr<door::Address> address = door::ParseAddress(text);
    if (address.ok() && door::IsLocal(*address)) continue;
    refuse(
        "--listen",
        absl::StrFormat("got \"%s\", which other machines reach, allowed only with --tls-cert and "
                        "--tokens or --tls-client-ca, or with --insecure",
                        absl::CHexEscape(text)));
  }
}

void CheckArenas(const Config& config) {
  const absl::StatusOr<door::Address> address = door::ParseAddress(config.arena_listen);
  const bool in_use = std::find(config.listen.begin(), config.listen.end(), config.arena_listen) !=
                      config.listen.end();
  if (address.ok() && !address->path.empty() && !in_use) return;
  throw CLI::ValidationError(
      "--arena-listen",
      absl::StrFormat("got \"%s\", allowed %s", absl::CHexEscape(config.arena_listen),
                      in_use         ? "a path that --listen does not have"
                      : address.ok() ? "unix:PATH"
                                     : std::string(address.status().message())));
}

// Checks that the flags agree with each other.
void CheckTogether(const Config& config) {
  const auto refuse = [](const std::string& flag, const std::string& text) {
    throw CLI::ValidationError(flag, text);
  };
  const int64_t message = rpc::MaxMessageBytes(config.max_request_bytes, config.max_batch_rows);
  if (message > kMaxMessage) {  // the rows fit: see MaxBatchRows
    refuse("--max-request-bytes",
           absl::StrFormat(
               "got %d, allowed at most %d with --max-batch-rows %d", config.max_request_bytes,
               config.max_request_bytes - (message - kMaxMessage), config.max_batch_rows));
  }
  if (config.slab_bytes < config.max_request_bytes) {
    refuse("--slab-bytes",
           absl::StrFormat("got %d, allowed at least --max-request-bytes, which is %d",
                           config.slab_bytes, config.max_request_bytes));
  }
  if (config.max_held_bytes < message) {
    refuse("--max-held-bytes",
           absl::StrFormat("got %d, allowed at least %d: one message of --max-request-bytes",
                           config.max_held_bytes, message));
  }
  std::set<std::string> names;
  for (const engine::HeadRequest& head : config.heads) {
    if (!names.insert(head.name).second) {
      refuse("--head",
             absl::StrFormat("got the name \"%s\" twice, allowed one head of a name", head.name));
    }
  }
  if (config.listen.empty()) refuse("--listen", "got nothing, allowed one address or more");
  const auto check_address = [&](const std::string& flag, const std::string& text,
                                 bool may_be_unix) {
    const absl::StatusOr<door::Address> address = door::ParseAddress(text);
    if (address.ok() && (may_be_unix || address->path.empty())) return;
    refuse(flag, absl::StrFormat("got \"%s\", allowed %s", absl::CHexEscape(text),
                                 address.ok() ? "HOST:PORT or [IPv6]:PORT"
                                              : std::string(address.status().message())));
  };
  for (const std::string& address : config.listen) check_address("--listen", address, true);
  for (const std::string& address : config.probe_listen) {
    check_address("--probe-listen", address, true);
  }
  if (config.metrics_listen != "off") {
    check_address("--metrics-listen", config.metrics_listen, false);
  }
  if (!config.arena_listen.empty()) CheckArenas(config);
  CheckDoor(config);
  std::error_code error;
  if (!config.head_root.empty() && !std::filesystem::is_directory(config.head_root, error)) {
    refuse("--head-root", absl::StrFormat("got \"%s\", allowed a directory that exists",
                                          absl::CHexEscape(config.head_root)));
  }
}

// "the nearest is --listen", or what else helps.
std::string Hint(const std::string& name, const std::vector<std::string>& names) {
  const std::string nearest = formats::Nearest(name, names);
  return nearest.empty() ? "allowed are those of --help" : absl::StrCat("the nearest is ", nearest);
}

// What Kubernetes sets for a Service whose name starts with "logitd".
bool IsServiceLink(const std::string& name) {
  static const std::regex kLink(
      "LOGITD(_.*)?_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|"
      "ADDR))?)?)");
  return std::regex_match(name, kLink);
}

// Refuses flags and variables that are not ours.
void CheckNames(const CLI::App& app) {
  std::vector<std::string> flags, variables;
  for (const CLI::Option* option : app.get_options()) {
    flags.push_back(option->get_name());
    if (!option->get_envname().empty()) variables.push_back(option->get_envname());
  }
  for (const std::string& extra : app.remaining()) {
    const std::string name = extra.substr(0, extra.find('='));
    throw CLI::ValidationError(absl::CHexEscape(name),
                               absl::StartsWith(name, "-")
                                   ? absl::StrCat("got an unknown flag, ", Hint(name, flags))
                                   : "got a word, allowed only flags");
  }
  // Variables of this project's other programs.
  for (const char* name : {"LOGITD_ADDR", "LOGITD_TOKEN", "LOGITD_BINARY", "LOGITD_LIBRARY",
                           "LOGITD_OPS", "LOGITD_CUDA_ARCHITECTURES"}) {
    variables.emplace_back(name);
  }
  for (char** at = environ; *at != nullptr; ++at) {
    const std::string_view entry = *at;
    const std::string name(entry.substr(0, entry.find('=')));
    if (!absl::StartsWith(name, "LOGITD_") || IsServiceLink(name) ||
        std::find(variables.begin(), variables.end(), name) != variables.end()) {
      continue;
    }
    throw CLI::ValidationError(absl::CHexEscape(name),
                               absl::StrCat("got an unknown variable, ", Hint(name, variables)));
  }
}

void AddConnections(CLI::App& app, Config* config) {
  AddInteger(
      app, "--loops", &config->loops, 0, 256,
      "Event loops, one thread each, which share the connections; 0: one for every two cores");
  AddInteger(app, "--max-streams", &config->max_streams, 1, 65536,
             "Calls that may be open on a connection");
  AddSize(
      app, "--max-connection-bytes", &config->max_connection_bytes, int64_t{16} << 20,
      "Memory that all connections may hold beside admitted messages: header lists, state, early "
      "bytes, answers that are not taken. Near it the connection that holds most without moving "
      "is closed");
  AddDuration(
      app, "--max-connection-age", &config->max_connection_age, absl::Seconds(1),
      /*infinite=*/true,
      "Age at which a connection is asked to end: its calls finish, and its client connects "
      "again");
  AddDuration(app, "--max-connection-idle", &config->max_connection_idle, absl::Seconds(1),
              /*infinite=*/true, "Time without a call after which a connection ends");
  AddDuration(
      app, "--keepalive-time", &config->keepalive_time, absl::Seconds(1),
      /*infinite=*/true,
      "Time without a byte from a peer after which the server asks whether it is still there; "
      "without an answer in 20s the connection ends");
  AddDuration(
      app, "--min-ping-interval", &config->min_ping_interval, absl::ZeroDuration(),
      /*infinite=*/false,
      "Time between two pings of a peer that the server allows for long; 10 may come at once, and "
      "one more for each frame of an answer. A peer that pings more often is told "
      "\"too_many_pings\" and its connection ends. 0: any");
}

}  // namespace

std::string_view Version() { return LOGITD_VERSION; }

std::string_view TransportVersion() {
  static const auto& version =
      *new std::string(absl::StrCat("nghttp2 ", nghttp2_version(0)->version_str));
  return version;
}

std::optional<int> ParseConfig(int argc, const char* const* argv, Config* config, std::ostream& out,
                               std::ostream& err) {
  CLI::App app(kDescription, "logitd");
  app.set_version_flag("--version",
                       absl::StrFormat("logitd %s, %s", Version(), TransportVersion()));
  app.get_formatter()->column_width(34);

  AddAddresses(app, config);
  AddChoice(app, "--backend", &config->backend, {"auto", "cpu", "cuda"},
            "auto uses CUDA if a device answers, else the CPU");
  AddDevices(app, &config->devices);
  AddShardExchange(app, &config->shard_exchange);
  AddInteger(app, "--cpu-threads", &config->cpu_threads, 0, 4096,
             "Threads of the CPU backend, shared by its devices; 0: all that the process may use");
  AddInteger(app, "--streams", &config->streams, 1, 64,
             "Batches that run at the same time on each device");
  AddSize(app, "--slab-bytes", &config->slab_bytes, 1,
          "Payload of one batch, and the same again for its answers; every stream has two slabs");
  AddSize(app, "--max-request-bytes", &config->max_request_bytes, 1,
          "Largest payload of one request");
  AddSize(app, "--max-held-bytes", &config->max_held_bytes, 1,
          "Host memory for the messages and answers of all calls; calls beyond it wait unread");
  AddInteger(
      app, "--max-waiting-calls", &config->max_waiting_calls, 0, 1 << 20,
      "Calls that may wait for that memory, half of them of one connection; more are refused "
      "with RESOURCE_EXHAUSTED");
  AddInteger(
      app, "--max-connections", &config->max_connections, 0, http2::kMostConnections,
      "Connections that may be open, about half of them of one peer; more are closed at once. 0: "
      "the limit of open files less 128. At most as many as fit into --max-connection-bytes");
  AddSize(
      app, "--min-receive-rate", &config->min_receive_rate, 0,
      "Bytes per second at which a message must come while other calls wait for memory; 0: any");
  AddInteger(
      app, "--max-batch-rows", &config->max_batch_rows, 1, MaxBatchRows(),
      "Rows of one batch, and of the largest request; only bytes bound the rows of attention");
  AddDuration(app, "--max-batch-delay", &config->max_batch_delay, absl::ZeroDuration(),
              /*infinite=*/false,
              "Longest time that a request waits for others of its kind while a stream is idle");
  AddHeads(
      app, "--head", &config->heads,
      "An output head to load at start, from a safetensors file or a model folder. vocab: rows to "
      "keep of a padded weight; norm: apply the model's final RMSNorm; shard: cut the vocabulary "
      "over "
      "all devices, each of which holds a part; repeatable");
  Add(app, "--head-root", &config->head_root,
      "Directory that clients may load and update heads from; without it they cannot change heads")
      ->type_name("DIR");
  AddSize(
      app, "--max-head-bytes", &config->max_head_bytes, 0,
      "Memory of all heads on each device. 0: on the CPU half of the memory that the process may "
      "use, shared by its devices; on a GPU what the slabs leave");
  app.add_flag("--allow-remote-heads", config->allow_remote_heads,
               "Clients may load, update and unload heads although --listen has an address that is "
               "not local")
      ->envname(EnvironmentName("--allow-remote-heads"));
  AddDoor(app, config);
  AddArenas(app, config);
  AddConnections(app, config);
  AddDuration(app, "--receive-timeout", &config->receive_timeout, absl::Milliseconds(1),
              /*infinite=*/true,
              "Maximum time for a peer to send its message, and then to take its answer");
  AddDuration(app, "--drain-grace", &config->drain_grace, absl::ZeroDuration(), /*infinite=*/true,
              "Maximum time for admitted calls to finish after SIGTERM; a tenth of it for a "
              "message that is still being received");
  Add(app, "--metrics-listen", &config->metrics_listen,
      "HOST:PORT of the Prometheus endpoint /metrics (port 0 picks one), or off")
      ->type_name("ADDRESS");
  AddDuration(
      app, "--slow-call", &config->slow_call, absl::ZeroDuration(), /*infinite=*/true,
      "A call, or message of a stream, that takes this long or longer has a line in the log");
  AddDuration(
      app, "--stall-timeout", &config->stall_timeout, absl::Milliseconds(100),
      /*infinite=*/true,
      "Health is NOT_SERVING while every stream of every device has been in one slice for this "
      "long");
  AddChoice(app, "--log-level", &config->log_level, {"debug", "info", "warn", "error", "off"},
            "Least severe level that is logged");
  AddChoice(app, "--log-format", &config->log_format, {"text", "json"},
            "Format of the log on standard error: text, or one JSON object a line");
  app.allow_extras();  // CheckNames refuses them, with the nearest name

  const auto leave = [&](const CLI::ParseError& error) {
    return app.exit(error, out, err) == 0 ? 0 : kUsageError;
  };
  try {
    app.parse(argc, argv);
    CheckNames(app);
    CheckTogether(*config);
  } catch (const CLI::ConversionError& error) {  // options with a value parse it themselves
    const bool insecure = absl::StrContains(error.what(), "--insecure");
    return leave(CLI::ValidationError(insecure ? "--insecure" : "--allow-remote-heads",
                                      "got another value, allowed true, false or none"));
  } catch (const CLI::ParseError& error) {
    return leave(error);
  }
  return std::nullopt;
}

}  // namespace logitd

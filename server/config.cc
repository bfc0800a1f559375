#include "server/config.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iterator>
#include <limits>
#include <ostream>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "server/rpc/rpc_server.h"

namespace logitd {
namespace {

constexpr int kUsageError = 2;

constexpr const char* kDescription =
    "logitd: top-K, sampling, scoring and attention softmax over logits, as a gRPC service.\n\n"
    "  logitd                             # listens on 127.0.0.1:7450, uses a GPU if one answers\n"
    "  logitd --listen 0.0.0.0:7450 --listen unix:/run/logitd.sock\n"
    "  logitd --backend cpu --cpu-threads 8\n"
    "  logitd --head llama=/models/llama --head-root /models\n\n"
    "Sizes take units (64MiB, 1GiB; factors of 1024), and so do durations (200us, 30s). Every "
    "flag\n"
    "has an environment variable: LOGITD_SLAB_BYTES is --slab-bytes. The flag wins.\n\n"
    "SIGTERM or SIGINT starts a drain: health becomes NOT_SERVING, new calls get UNAVAILABLE,\n"
    "admitted calls finish, and the process exits with 0. A second signal ends it at once. Exit\n"
    "code 1: could not start. 2: bad usage. 3: the device was lost, or hangs.\n\n"
    "Host memory: the slabs (--streams x 4 x --slab-bytes, pinned if there is a GPU), and at most\n"
    "about 1.25 x --max-held-bytes + 128 MiB for everything that peers make the server hold. On\n"
    "the CPU also the heads, and 64 MiB for each stream that uses one.\n";

constexpr int64_t kMaxMessage = std::numeric_limits<int32_t>::max();  // gRPC's largest limit

std::string EnvironmentName(std::string flag) {
  flag.erase(0, 2);
  std::replace(flag.begin(), flag.end(), '-', '_');
  std::transform(flag.begin(), flag.end(), flag.begin(), ::toupper);
  return "LOGITD_" + flag;
}

// An option with its environment variable, and its default in the help.
template <typename T>
CLI::Option* Add(CLI::App& app, const std::string& flag, T* value, const std::string& help) {
  return app.add_option(flag, *value, help)->envname(EnvironmentName(flag))->capture_default_str();
}

void AddSize(CLI::App& app, const std::string& flag, int64_t* value, const std::string& help) {
  Add(app, flag, value, help)->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))->type_name("SIZE");
}

void AddDuration(CLI::App& app, const std::string& flag, absl::Duration* value,
                 const std::string& help) {
  app.add_option_function<std::string>(
         flag,
         [flag, value](const std::string& text) {
           if (!absl::ParseDuration(text, value) || *value < absl::ZeroDuration()) {
             throw CLI::ValidationError(
                 flag, absl::StrFormat(
                           "got \"%s\", allowed a duration of 0 or more: 200us, 1.5s, inf", text));
           }
         },
         help)
      ->envname(EnvironmentName(flag))
      ->default_str(absl::FormatDuration(*value))
      ->type_name("DURATION");
}

// NAME=PATH[,vocab=N][,norm]
engine::HeadRequest ParseHead(const std::string& flag, const std::string& text) {
  const auto refuse = [&](const std::string& allowed) {
    return CLI::ValidationError(flag, absl::StrFormat("got \"%s\", allowed %s", text, allowed));
  };
  const size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0) throw refuse("NAME=PATH[,vocab=N][,norm]");
  engine::HeadRequest head{.name = text.substr(0, equals), .path = text.substr(equals + 1)};
  // From the end: the path itself may have commas.
  for (size_t comma = head.path.rfind(','); comma != std::string::npos;
       comma = head.path.rfind(',')) {
    const std::string option = head.path.substr(comma + 1);
    if (option == "norm") {
      head.final_norm = true;
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
  if (head.path.empty()) throw refuse("NAME=PATH[,vocab=N][,norm]");
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
      ->type_name("NAME=PATH[,vocab=N][,norm]");
}

// Checks that the flags agree with each other.
void CheckTogether(const Config& config) {
  const auto refuse = [](const std::string& flag, const std::string& text) {
    throw CLI::ValidationError(flag, text);
  };
  if (config.max_request_bytes == 0) refuse("--max-request-bytes", "got 0, allowed 1 or more");
  if (config.receive_timeout == absl::ZeroDuration()) {
    refuse("--receive-timeout", "got 0, allowed more than 0, or inf");
  }
  const int64_t message = rpc::MaxMessageBytes(config.max_request_bytes, config.max_batch_rows);
  if (message > kMaxMessage) {
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
  for (const std::string& address : config.listen) {
    if (address.empty() ||
        (!absl::StartsWith(address, "unix:") && address.find(':') == std::string::npos)) {
      refuse("--listen", absl::StrFormat("got \"%s\", allowed HOST:PORT or unix:PATH", address));
    }
  }
}

}  // namespace

std::string_view Version() { return LOGITD_VERSION; }

std::optional<int> ParseConfig(int argc, const char* const* argv, Config* config, std::ostream& out,
                               std::ostream& err) {
  CLI::App app(kDescription, "logitd");
  app.set_version_flag("--version", std::string("logitd ") + std::string(Version()));
  app.get_formatter()->column_width(34);

  Add(app, "--listen", &config->listen,
      "Address to serve on: HOST:PORT (port 0 picks one) or unix:PATH; repeatable")
      ->delimiter(',')
      ->type_name("ADDRESS");
  Add(app, "--backend", &config->backend, "auto uses CUDA if a device answers, else the CPU")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  Add(app, "--device", &config->device, "CUDA device")->check(CLI::NonNegativeNumber);
  Add(app, "--cpu-threads", &config->cpu_threads,
      "Threads of the CPU backend; 0: all that the process may use")
      ->check(CLI::Range(0, 4096));
  Add(app, "--streams", &config->streams, "Batches that run at the same time")
      ->check(CLI::Range(1, 64));
  AddSize(app, "--slab-bytes", &config->slab_bytes,
          "Payload of one batch, and the same again for its answers; every stream has two slabs");
  AddSize(app, "--max-request-bytes", &config->max_request_bytes, "Largest payload of one request");
  AddSize(app, "--max-held-bytes", &config->max_held_bytes,
          "Host memory for the messages and answers of all calls; calls beyond it wait unread");
  Add(app, "--max-waiting-calls", &config->max_waiting_calls,
      "Calls that may wait for that memory, half of them of one connection; more are refused with "
      "RESOURCE_EXHAUSTED")
      ->check(CLI::Range(0, 1 << 20));
  AddSize(
      app, "--min-receive-rate", &config->min_receive_rate,
      "Bytes per second at which a message must come while other calls wait for memory; 0: any");
  Add(app, "--max-batch-rows", &config->max_batch_rows,
      "Rows of one batch, and of the largest request; only bytes bound the rows of attention")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24));
  AddDuration(app, "--max-batch-delay", &config->max_batch_delay,
              "Maximum time an open batch waits for more requests while a stream is idle");
  AddHeads(
      app, "--head", &config->heads,
      "An output head to load at start, from a safetensors file or a model folder. vocab: rows to "
      "keep of a padded weight; norm: apply the model's final RMSNorm; repeatable");
  Add(app, "--head-root", &config->head_root,
      "Directory that clients may load heads from; without it they cannot load heads")
      ->check(CLI::ExistingDirectory)
      ->type_name("DIR");
  AddDuration(app, "--receive-timeout", &config->receive_timeout,
              "Maximum time for a peer to send its message, and then to take its answer");
  AddDuration(app, "--drain-grace", &config->drain_grace,
              "Maximum time for admitted calls to finish after SIGTERM");
  Add(app, "--metrics-listen", &config->metrics_listen,
      "HOST:PORT of the Prometheus endpoint /metrics (port 0 picks one), or off")
      ->type_name("ADDRESS");
  Add(app, "--log-level", &config->log_level, "Least severe level that is logged")
      ->check(CLI::IsMember({"debug", "info", "warn", "error", "off"}));
  Add(app, "--log-format", &config->log_format,
      "Format of the log on standard error: text, or one JSON object a line")
      ->check(CLI::IsMember({"text", "json"}));

  try {
    app.parse(argc, argv);
    CheckTogether(*config);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error, out, err);
    return code == 0 ? 0 : kUsageError;
  }
  return std::nullopt;
}

}  // namespace logitd

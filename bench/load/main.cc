// load_bench: how fast a running logitd answers, and what it does when it gets more than it can.
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/load/load.h"
#include "bench/load/report.h"
#include "client/client.h"

namespace logitd::bench {
namespace {

constexpr char kFooter[] = R"(Examples:
  load_bench --preset service --json results.json
  load_bench --rows 8 --vocab 50257 --connections 4 --in-flight 8
  load_bench --rows 1 --rate 2000 --connections 2 --duration 20

The table: latency percentiles in microseconds; "added" is the client's round trip less the kernel.
Exit codes: 0 done, 1 a scenario had no answer or the server is not there, 2 bad usage.)";

// Why each is there: one row is the latency of a decode loop. 1 to 64 MiB over one connection is
// the way from socket to pinned memory, with one call and with calls that overlap. 64 at once is
// more than a server should hold.
std::vector<Scenario> ServicePreset(const Scenario& base) {
  Scenario one = {.name = "one_row",
                  .k = base.k,
                  .warmup = base.warmup,
                  .duration = base.duration,
                  .deadline = base.deadline};
  std::vector<Scenario> out = {one};
  Scenario open = one;
  open.name = "one_row_open_100_per_s";
  open.rate = 100;
  out.push_back(open);
  for (int mib : {1, 4, 16, 64}) {
    for (int in_flight : {1, 4}) {
      Scenario payload = one;
      payload.rows = 2 * mib;  // a row is 512 KiB
      payload.in_flight = in_flight;
      payload.name = absl::StrFormat("payload_%d_mib_x%d", mib, in_flight);
      out.push_back(payload);
    }
  }
  Scenario crowd = one;
  crowd.name = "crowd_64_of_64_mib";
  crowd.rows = 128;
  crowd.connections = 64;
  crowd.retry = true;
  crowd.duration = 3 * base.duration;  // one round is 4 GiB
  crowd.deadline = absl::Seconds(120);
  out.push_back(crowd);
  return out;
}

struct Flags {
  Scenario scenario = {.name = "flags"};
  std::string address = "127.0.0.1:7450";
  std::string preset;
  std::string json_file;
  double warmup_s = 1;
  double duration_s = 5;
  double deadline_s = 30;
  int server_pid = 0;
};

void AddFlags(CLI::App* app, Flags* flags) {
  Scenario& scenario = flags->scenario;
  // With the default in the help, and values from `least` to `most`.
  const auto number = [app](const char* name, auto* value, const char* help, auto least,
                            auto most) {
    app->add_option(name, *value, help)->check(CLI::Range(least, most))->capture_default_str();
  };
  app->add_option("--addr", flags->address, "HOST:PORT or unix:PATH")
      ->envname("LOGITD_ADDR")
      ->capture_default_str();
  app->add_option("--preset", flags->preset, "a list of scenarios in place of the other flags")
      ->check(CLI::IsMember({"service"}));
  number("--rows", &scenario.rows, "rows per request", 1, 1 << 24);
  number("--vocab", &scenario.vocab, "logits per row", 1, 1 << 20);
  number("--k", &scenario.k, "tokens per row; also in presets", 1, 1 << 20);
  app->add_option("--dtype", scenario.dtype, "f32, f16 or bf16")
      ->transform(CLI::CheckedTransformer(std::map<std::string, v1::DType>{
          {"f32", v1::DTYPE_F32}, {"f16", v1::DTYPE_F16}, {"bf16", v1::DTYPE_BF16}}));
  number("--connections", &scenario.connections, "TCP or Unix connections", 1, 4096);
  number("--in-flight", &scenario.in_flight, "closed loop: requests in flight on each connection",
         1, 4096);
  number("--rate", &scenario.rate, "open loop: requests per second, Poisson; 0 is the closed loop",
         0.0, 1e7);
  app->add_flag("--retry", scenario.retry,
                "closed loop: try again after a refusal and the server's delay");
  app->add_option("--priority", scenario.priority, "interactive or batch")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, client::Priority>{{"interactive", client::Priority::kInteractive},
                                                  {"batch", client::Priority::kBatch}}));
  app->add_flag("!--no-stated-sizes", scenario.state_sizes,
                "do not tell the server the size of a message");
  number("--warmup", &flags->warmup_s, "seconds before the window; also in presets", 0.0, 3600.0);
  number("--duration", &flags->duration_s, "seconds of the window; also in presets", 0.1, 3600.0);
  number("--deadline", &flags->deadline_s, "seconds for one request", 0.001, 3600.0);
  app->add_option("--server-pid", flags->server_pid,
                  "the server's process here, to read its peak of memory");
  app->add_option("--json", flags->json_file, "also write every figure to this file");
}

int Fail(int code, const std::string& text) {
  absl::FPrintF(stderr, "load_bench: %s\n", text);
  return code;
}

int Main(int argc, char** argv) {
  CLI::App app(
      "load_bench: how fast a running logitd answers, and what it does under too much load.",
      "load_bench");
  app.footer(kFooter);
  Flags flags;
  AddFlags(&app, &flags);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  flags.scenario.warmup = absl::Seconds(flags.warmup_s);
  flags.scenario.duration = absl::Seconds(flags.duration_s);
  flags.scenario.deadline = absl::Seconds(flags.deadline_s);
  const std::vector<Scenario> scenarios =
      flags.preset.empty() ? std::vector<Scenario>{flags.scenario} : ServicePreset(flags.scenario);

  const auto client = client::Client::Create({.address = flags.address});
  if (!client.ok()) return Fail(2, std::string(client.status().message()));
  const absl::StatusOr<v1::GetInfoResponse> info = (*client)->Info();
  if (!info.ok()) {
    return Fail(1, absl::StrFormat("%s\n  hint: is logitd running at %s?", info.status().ToString(),
                                   flags.address));
  }
  nlohmann::ordered_json report = Provenance(*info, flags.address);
  report["results"] = nlohmann::ordered_json::array();
  absl::PrintF("logitd %s, %s, %s\n%s", info->version(), info->backend(), info->device().name(),
               TableHeader());
  int code = 0;
  for (const Scenario& scenario : scenarios) {
    absl::StatusOr<Measured> measured = RunScenario(scenario, flags.address, flags.server_pid);
    if (!measured.ok()) {
      return Fail(1, absl::StrCat(scenario.name, ": ", measured.status().ToString()));
    }
    const nlohmann::ordered_json summary = Summarise(*measured);
    absl::PrintF("%s", TableLines(summary));
    std::fflush(stdout);
    report["results"].push_back(summary);
    if (measured->samples.empty()) code = 1;
  }
  if (!flags.json_file.empty()) {
    std::ofstream out(flags.json_file);
    out << report.dump(2) << "\n";
    if (!out.flush()) return Fail(1, flags.json_file + ": cannot be written");
  }
  return code;
}

}  // namespace
}  // namespace logitd::bench

int main(int argc, char** argv) try {
  return logitd::bench::Main(argc, argv);
} catch (const std::exception& error) {
  std::fprintf(stderr, "load_bench: %s\n", error.what());
  return 1;
}

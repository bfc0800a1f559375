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

// Why each is there: one row is the decode loop's latency; 1 to 64 MiB over one connection is the
// way from socket to pinned memory, alone and with calls to overlap; 64 at once is more than a
// server should hold.
std::vector<Scenario> ServicePreset(const Scenario& base) {
  std::vector<Scenario> out;
  Scenario one = base;
  one.vocab = 131072;
  one.dtype = v1::DTYPE_F32;
  one.rate = 0;
  one.rows = 1;
  one.connections = 1;
  one.in_flight = 1;
  one.retry = false;
  one.name = "one_row";
  out.push_back(one);
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

int Main(int argc, char** argv) {
  CLI::App app("load_bench: how fast a running logitd answers, and what it does under too much.",
               "load_bench");
  app.footer(kFooter);
  Scenario base;
  std::string address = "127.0.0.1:7450";
  std::string preset;
  std::string json_file;
  double warmup_s = 1;
  double duration_s = 5;
  double deadline_s = 30;
  int server_pid = 0;
  const std::map<std::string, v1::DType> dtypes = {
      {"f32", v1::DTYPE_F32}, {"f16", v1::DTYPE_F16}, {"bf16", v1::DTYPE_BF16}};
  app.add_option("--addr", address, "HOST:PORT or unix:PATH")
      ->envname("LOGITD_ADDR")
      ->capture_default_str();
  app.add_option("--preset", preset, "a list of scenarios instead of the one the flags describe")
      ->check(CLI::IsMember({"service"}));
  app.add_option("--rows", base.rows, "rows a request")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  app.add_option("--vocab", base.vocab, "logits a row")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--k", base.k, "tokens a row; also in presets")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--dtype", base.dtype, "f32, f16 or bf16")
      ->transform(CLI::CheckedTransformer(dtypes));
  app.add_option("--connections", base.connections, "TCP or Unix connections")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--in-flight", base.in_flight,
                 "closed loop: requests in flight on each connection")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--rate", base.rate, "open loop: requests a second, Poisson; 0 is the closed loop")
      ->check(CLI::Range(0.0, 1e7))
      ->capture_default_str();
  app.add_flag("--retry", base.retry,
               "closed loop: come back when refused, after the server's delay");
  app.add_option("--warmup", warmup_s, "seconds before the window; also in presets")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  app.add_option("--duration", duration_s, "seconds of the window; also in presets")
      ->check(CLI::Range(0.1, 3600.0))
      ->capture_default_str();
  app.add_option("--deadline", deadline_s, "seconds for one request")
      ->check(CLI::Range(0.001, 3600.0))
      ->capture_default_str();
  app.add_option("--server-pid", server_pid,
                 "the server's process here, to read its peak of memory");
  app.add_option("--json", json_file, "also write every figure to this file");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  base.name = "flags";
  base.warmup = absl::Seconds(warmup_s);
  base.duration = absl::Seconds(duration_s);
  base.deadline = absl::Seconds(deadline_s);
  const std::vector<Scenario> scenarios =
      preset.empty() ? std::vector<Scenario>{base} : ServicePreset(base);

  absl::StatusOr<std::unique_ptr<client::Client>> client =
      client::Client::Create({.address = address});
  if (!client.ok()) {
    absl::FPrintF(stderr, "load_bench: %s\n", client.status().message());
    return 2;
  }
  const absl::StatusOr<v1::GetInfoResponse> info = (*client)->Info();
  if (!info.ok()) {
    absl::FPrintF(stderr, "load_bench: %s\n  hint: is logitd running at %s?\n",
                  info.status().ToString(), address);
    return 1;
  }
  nlohmann::ordered_json report = Provenance(*info, address);
  report["results"] = nlohmann::ordered_json::array();
  absl::PrintF("logitd %s, %s, %s\n%s", info->version(), info->backend(), info->device().name(),
               TableHeader());
  int code = 0;
  for (const Scenario& scenario : scenarios) {
    absl::StatusOr<Measured> measured = RunScenario(scenario, address, server_pid);
    if (!measured.ok()) {
      absl::FPrintF(stderr, "load_bench: %s: %s\n", scenario.name, measured.status().ToString());
      return 1;
    }
    const nlohmann::ordered_json summary = Summarise(*measured);
    absl::PrintF("%s", TableLines(summary));
    std::fflush(stdout);
    report["results"].push_back(summary);
    if (measured->samples.empty()) code = 1;
  }
  if (!json_file.empty()) {
    std::ofstream out(json_file);
    out << report.dump(2) << "\n";
    if (!out.flush()) {
      absl::FPrintF(stderr, "load_bench: %s: cannot be written\n", json_file);
      return 1;
    }
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

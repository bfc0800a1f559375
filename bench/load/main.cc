// load_bench: how fast a running logitd answers, and what it does when it gets more than it can.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "bench/load/load.h"
#include "bench/load/report.h"
#include "client/cli/connection_flags.h"
#include "client/client.h"

namespace logitd::bench {
namespace {

constexpr char kFooter[] = R"(Examples:
  load_bench --preset service --json results.json
  load_bench --rows 8 --vocab 50257 --connections 4 --in-flight 8
  load_bench --rows 1 --rate 2000 --connections 2 --duration 20
  taskset -c 1 load_bench --preset overload --json overload.json   # logitd: taskset -c 0

Calls are TopK of logits, or a mix: --mix topk=3,sample=1,hidden_score=1 sends three TopK for each
Sample and each Score of hidden states, which need --head. Sample has temperature 0.8 and top-p 0.95.
In an open loop every connection sends its share of --rate at times of its own, and a latency counts
from when the request was due.

The preset sweep finds the peak of what the other flags say in closed loops of 1, 2 and 4 calls on
each connection, then offers 10% to 200% of it; scripts/plot_load draws the JSON.
The preset overload does so for each of its shapes, and offers 1.1, 2 and 5 times the peak with a
deadline of 200 ms. "in time" is answers within the deadline per second.
Both measure the best closed loop again after each offer, and a share is of the mean of the closed
loops just before and just after it: on a machine with neighbours, a second a minute earlier says
little. --turns makes all offers again, every second time in the other order; the last lines have the
medians. Where shares of one offer differ much, take more turns or a quieter machine. Two processors
of a virtual machine may be threads of one core: then the client takes its time from the server.
The table: latency percentiles in microseconds; "added" is the client's round trip less the kernel.
Exit codes: 0 done, 1 a scenario had no answer, 2 bad usage, 3 the server is not there.)";

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

// One shape of request for the overload preset.
struct Shape {
  const char* name;
  int64_t rows;
  int64_t vocab;
  int k;
};

// Work whose cost is the kernel, and work whose cost is the socket.
constexpr Shape kOverloadShapes[] = {{"1x131072_k20000", 1, 131072, 20000},
                                     {"8x50257_k10", 8, 50257, 10}};
// For a server with a device: the cost of a call is its way to the device.
constexpr Shape kOverloadDeviceShapes[] = {{"1x131072_k64", 1, 131072, 64},
                                           {"8x50257_k10", 8, 50257, 10}};
// Calls on each of 8 connections: 8 keep one core busy, 32 the cores and the device of a large
// server.
constexpr int kPeakInFlight[] = {1, 2, 4};
constexpr double kOverloads[] = {1.1, 2, 5};
constexpr double kSweep[] = {0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2};
constexpr absl::Duration kOverloadDeadline = absl::Milliseconds(200);
constexpr int kOverloadConnections = 8;

struct Flags {
  Scenario scenario = {.name = "flags"};
  cli::ConnectionFlags connection;
  client::ClientOptions target;  // of `connection`
  std::string preset;
  std::string json_file;
  double warmup_s = 1;
  double duration_s = 5;
  double deadline_s = 30;
  double ring_spin_us = 1000;
  int turns = 1;
  int server_pid = 0;
};

void AddFlags(CLI::App* app, Flags* flags) {
  Scenario& scenario = flags->scenario;
  // With the default in the help, and values from `least` to `most`.
  const auto number = [app](const char* name, auto* value, const char* help, auto least,
                            auto most) {
    app->add_option(name, *value, help)->check(CLI::Range(least, most))->capture_default_str();
  };
  cli::AddConnectionFlags(app, &flags->connection);
  app->add_option("--preset", flags->preset,
                  "a list of scenarios: service and overload in place of the other flags, sweep of "
                  "what they say")
      ->check(CLI::IsMember({"service", "overload", "sweep"}));
  app->add_option_function<std::string>(
         "--mix",
         [&scenario](const std::string& text) {
           absl::StatusOr<std::vector<MixPart>> mix = ParseMix(text);
           if (!mix.ok()) throw CLI::ValidationError("--mix", std::string(mix.status().message()));
           scenario.mix = *std::move(mix);
         },
         "what is called, and how often: NAME=WEIGHT,... of topk, sample, score, softmax (of "
         "--rows by --vocab), hidden_topk, hidden_sample, hidden_score")
      ->default_str("topk=1");
  app->add_option("--head", scenario.head, "a head of the server, for hidden states");
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
      ->transform(CLI::CheckedTransformer(std::map<std::string, client::Priority>{
          {"interactive", client::Priority::kInteractive}, {"batch", client::Priority::kBatch}}));
  app->add_option("--arena", scenario.arena,
                  "unix:PATH, where the server leases memory: rows lie there and are not sent");
  app->add_option("--arena-kind", scenario.arena_kind,
                  "of --arena: host, or cuda, the memory of a GPU of this machine")
      ->transform(CLI::CheckedTransformer(std::map<std::string, client::ArenaKind>{
          {"host", client::ArenaKind::kHost}, {"cuda", client::ArenaKind::kCuda}}));
  app->add_flag(
      "--ring", scenario.ring,
      "with --arena: topk and sample go through rings of leased memory, one for each call "
      "in flight");
  number("--ring-spin", &flags->ring_spin_us,
         "microseconds that the caller of a ring looks for its answer before it sleeps", 0.0, 1e6);
  app->add_flag("--stream", scenario.stream,
                "samples go through SampleStream, a stream for each call in flight");
  app->add_flag("!--no-stated-sizes", scenario.state_sizes,
                "do not tell the server the size of a message");
  app->add_flag("!--no-throttle", scenario.throttle,
                "send every call, also when the server refuses most");
  number("--warmup", &flags->warmup_s, "seconds before the window; also in presets", 0.0, 3600.0);
  number("--duration", &flags->duration_s, "seconds of the window; also in presets", 0.1, 3600.0);
  number("--deadline", &flags->deadline_s, "seconds for one request", 0.001, 3600.0);
  number("--turns", &flags->turns, "presets overload and sweep: how often each offer is made", 1,
         100);
  app->add_option("--server-pid", flags->server_pid,
                  "the server's process here, to read its peak of memory");
  app->add_option("--json", flags->json_file, "also write every figure to this file");
}

int Fail(int code, const std::string& text) {
  absl::FPrintF(stderr, "load_bench: %s\n", text);
  return code;
}

// Runs scenarios, prints them and adds them to the report.
class Runner {
 public:
  Runner(const Flags& flags, nlohmann::ordered_json report)
      : flags_(flags), report_(std::move(report)) {
    report_["results"] = nlohmann::ordered_json::array();
  }

  // Adds one result. Returns the answers in time, per second.
  absl::StatusOr<double> Run(const Scenario& scenario) {
    absl::StatusOr<Measured> measured = RunScenario(scenario, flags_.target, flags_.server_pid);
    if (!measured.ok()) {
      return absl::Status(measured.status().code(),
                          absl::StrCat(scenario.name, ": ", measured.status().ToString()));
    }
    const nlohmann::ordered_json summary = Summarise(*measured);
    absl::PrintF("%s", TableLines(summary));
    std::fflush(stdout);
    report_["results"].push_back(summary);
    if (measured->samples.empty()) answered_ = false;
    return summary["goodput_per_s"].get<double>();
  }

  absl::Status Overload(const Shape& shape) {
    Scenario scenario = flags_.scenario;
    scenario.name = shape.name;
    scenario.rows = shape.rows;
    scenario.vocab = shape.vocab;
    scenario.k = shape.k;
    scenario.connections = kOverloadConnections;
    scenario.deadline = kOverloadDeadline;
    return PeakAndShares(scenario, kOverloads);
  }

  // The peak in closed loops; then, in each turn, these multiples of it in open ones, and the best
  // closed loop again after each of them.
  absl::Status PeakAndShares(Scenario scenario, absl::Span<const double> multiples) {
    const std::string name = scenario.name;
    const size_t first = report_["results"].size();
    const auto closed_loop = [&](int in_flight) {
      scenario.rate = 0;
      scenario.in_flight = in_flight;
      scenario.name = absl::StrFormat("%s_peak", name);
      return Run(scenario);
    };
    int best = 0;
    std::vector<double> peaks = {0};
    for (const int in_flight : kPeakInFlight) {
      const absl::StatusOr<double> in_time = closed_loop(in_flight);
      if (!in_time.ok()) return in_time.status();
      if (*in_time <= peaks[0]) continue;
      peaks[0] = *in_time;
      best = in_flight;
    }
    if (best == 0) return absl::UnavailableError(name + ": no answer came in time");
    std::vector<std::vector<double>> shares(multiples.size());
    for (int turn = 0; turn < flags_.turns; ++turn) {
      for (size_t i = 0; i < multiples.size(); ++i) {
        const size_t which = turn % 2 == 0 ? i : multiples.size() - 1 - i;
        scenario.rate = multiples[which] * Median(peaks);
        scenario.name = absl::StrFormat("%s_x%g", name, multiples[which]);
        const absl::StatusOr<double> in_time = Run(scenario);
        if (!in_time.ok()) return in_time.status();
        const size_t offer = report_["results"].size() - 1;
        const absl::StatusOr<double> peak = closed_loop(best);
        if (!peak.ok()) return peak.status();
        const double beside = (peaks.back() + *peak) / 2;
        peaks.push_back(*peak);
        report_["results"][offer]["peak_beside_per_s"] = beside;
        report_["results"][offer]["goodput_share_of_peak"] = *in_time / beside;
        shares[which].push_back(*in_time / beside);
      }
    }
    AddPeaks(name, first, std::move(peaks));
    for (size_t i = 0; i < multiples.size(); ++i) AddShares(name, multiples[i], shares[i]);
    return absl::OkStatus();
  }

  const nlohmann::ordered_json& report() const { return report_; }
  bool answered() const { return answered_; }

 private:
  static double Median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
  }

  // To the open loops from the result `first` on.
  void AddPeaks(const std::string& name, size_t first, std::vector<double> peaks) {
    const double peak = Median(peaks);
    const auto [least, most] = std::minmax_element(peaks.begin(), peaks.end());
    absl::PrintF("%s: peak %.1f/s, the median of %d from %.1f to %.1f\n", name, peak,
                 static_cast<int>(peaks.size()), *least, *most);
    nlohmann::ordered_json& results = report_["results"];
    for (size_t i = first; i < results.size(); ++i) {
      if (results[i]["mode"] != "open") continue;
      results[i]["peak_per_s"] = peak;
      results[i]["peaks_per_s"] = peaks;
    }
  }

  // What was answered in time at one multiple of the peak, in all turns.
  void AddShares(const std::string& name, double multiple, const std::vector<double>& shares) {
    const auto [least, most] = std::minmax_element(shares.begin(), shares.end());
    const double median = Median(shares);
    absl::PrintF("%s_x%g: %.1f%% of the peak in time, the median of %d from %.1f%% to %.1f%%\n",
                 name, multiple, 100 * median, static_cast<int>(shares.size()), 100 * *least,
                 100 * *most);
    std::fflush(stdout);
    report_["shares"].push_back({{"name", absl::StrFormat("%s_x%g", name, multiple)},
                                 {"median", median},
                                 {"turns", shares}});
  }

  const Flags& flags_;
  nlohmann::ordered_json report_;
  bool answered_ = true;  // every scenario had an answer
};

absl::Status RunAll(const Flags& flags, bool device, Runner* runner) {
  if (flags.preset == "overload") {
    for (const Shape& shape :
         absl::MakeConstSpan(device ? kOverloadDeviceShapes : kOverloadShapes)) {
      if (absl::Status status = runner->Overload(shape); !status.ok()) return status;
    }
    return absl::OkStatus();
  }
  if (flags.preset == "sweep") {
    Scenario scenario = flags.scenario;
    scenario.name = "sweep";
    return runner->PeakAndShares(scenario, kSweep);
  }
  const std::vector<Scenario> scenarios =
      flags.preset.empty() ? std::vector<Scenario>{flags.scenario} : ServicePreset(flags.scenario);
  for (const Scenario& scenario : scenarios) {
    if (const auto in_time = runner->Run(scenario); !in_time.ok()) return in_time.status();
  }
  return absl::OkStatus();
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
  const bool hidden = std::any_of(flags.scenario.mix.begin(), flags.scenario.mix.end(),
                                  [](const MixPart& part) { return part.hidden; });
  if (hidden != !flags.scenario.head.empty()) {
    return Fail(2, "--head: allowed with a hidden_ name in --mix, which needs it, and only there");
  }
  flags.scenario.warmup = absl::Seconds(flags.warmup_s);
  flags.scenario.duration = absl::Seconds(flags.duration_s);
  flags.scenario.deadline = absl::Seconds(flags.deadline_s);
  flags.scenario.ring_spin = absl::Microseconds(flags.ring_spin_us);

  const absl::StatusOr<client::ClientOptions> target = cli::OptionsOf(flags.connection);
  if (!target.ok()) return Fail(2, std::string(target.status().message()));
  flags.target = *target;
  const auto client = client::Client::Create(flags.target);
  if (!client.ok()) return Fail(2, std::string(client.status().message()));
  const absl::StatusOr<v1::GetInfoResponse> info = (*client)->Info();
  if (!info.ok()) {
    return Fail(3, absl::StrFormat("%s\n  hint: is logitd running at %s?", info.status().ToString(),
                                   flags.target.address));
  }
  absl::PrintF("logitd %s, %s, %s\n%s", info->version(), info->backend(), info->device().name(),
               TableHeader());
  Runner runner(flags, Provenance(*info, flags.target.address));
  if (absl::Status status = RunAll(flags, info->backend() == "cuda", &runner); !status.ok()) {
    return Fail(1, std::string(status.message()));
  }
  if (!flags.json_file.empty()) {
    std::ofstream out(flags.json_file);
    out << runner.report().dump(2) << "\n";
    if (!out.flush()) return Fail(1, flags.json_file + ": cannot be written");
  }
  return runner.answered() ? 0 : 1;
}

}  // namespace
}  // namespace logitd::bench

int main(int argc, char** argv) try {
  return logitd::bench::Main(argc, argv);
} catch (const std::exception& error) {
  std::fprintf(stderr, "load_bench: %s\n", error.what());
  return 1;
}

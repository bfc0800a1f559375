#include "bench/load/report.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "client/tensor_file.h"

namespace logitd::bench {
namespace {

using nlohmann::ordered_json;

// One figure of every answer.
template <typename Get>
std::vector<int64_t> Column(const Measured& measured, Get get) {
  std::vector<int64_t> values;
  values.reserve(measured.samples.size());
  for (const Sample& sample : measured.samples) values.push_back(get(sample));
  return values;
}

template <typename Get>
int64_t Median(const Measured& measured, Get get) {
  std::vector<int64_t> values = Column(measured, get);
  return Percentile(values, 0.5);
}

ordered_json Percentiles(std::vector<int64_t> values) {
  ordered_json out;
  constexpr std::pair<const char*, double> kPoints[] = {
      {"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}, {"p99_9", 0.999}, {"max", 1.0}};
  for (const auto& [name, p] : kPoints) out[name] = Percentile(values, p);
  return out;
}

double InTime(const Measured& measured) {
  const int64_t deadline_ns = absl::ToInt64Nanoseconds(measured.scenario.deadline);
  return static_cast<double>(
      std::count_if(measured.samples.begin(), measured.samples.end(),
                    [&](const Sample& sample) { return sample.latency_ns <= deadline_ns; }));
}

// The mean of a call: parts of the mix count by their weights.
double MeanBytes(const Measured& measured) {
  double bytes = 0, weights = 0;
  for (size_t i = 0; i < measured.part_bytes.size(); ++i) {
    const double weight = measured.scenario.mix[i].weight;
    bytes += weight * static_cast<double>(measured.part_bytes[i]);
    weights += weight;
  }
  return bytes / weights;
}

// Each part of the mix: what was asked for, and what came.
ordered_json MixOf(const Measured& measured) {
  ordered_json mix = ordered_json::object();
  for (size_t i = 0; i < measured.part_bytes.size(); ++i) {
    std::vector<int64_t> latencies;
    for (const Sample& sample : measured.samples) {
      if (sample.part == static_cast<int>(i)) latencies.push_back(sample.latency_ns);
    }
    mix[NameOf(measured.scenario.mix[i])] = {{"weight", measured.scenario.mix[i].weight},
                                             {"payload_bytes", measured.part_bytes[i]},
                                             {"answers", latencies.size()},
                                             {"latency_ns", Percentiles(std::move(latencies))}};
  }
  return mix;
}

std::string CpuModel() {
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line)) {
    if (line.rfind("model name", 0) != 0) continue;
    return std::string(absl::StripAsciiWhitespace(line.substr(line.find(':') + 1)));
  }
  return "unknown";
}

double Micros(const ordered_json& ns) { return ns.get<double>() / 1e3; }

}  // namespace

ordered_json Summarise(const Measured& measured) {
  const Scenario& scenario = measured.scenario;
  const double requests = static_cast<double>(measured.samples.size());
  const double rate = requests / measured.seconds;
  double all_bytes = 0;
  for (const Sample& sample : measured.samples) {
    all_bytes += static_cast<double>(measured.part_bytes[static_cast<size_t>(sample.part)]);
  }
  const double bytes = MeanBytes(measured);
  const int64_t take_ns = Median(
      measured, [](const Sample& s) { return s.timings.receive_ns() + s.timings.copy_ns(); });
  constexpr std::pair<const char*, int64_t (v1::Timings::*)() const> kPhases[] = {
      {"receive", &v1::Timings::receive_ns}, {"copy", &v1::Timings::copy_ns},
      {"queue", &v1::Timings::queue_ns},     {"h2d", &v1::Timings::h2d_ns},
      {"kernel", &v1::Timings::kernel_ns},   {"d2h", &v1::Timings::d2h_ns},
      {"total", &v1::Timings::total_ns}};
  ordered_json medians;
  for (const auto& [name, phase] : kPhases) {
    medians[name] =
        Median(measured, [phase = phase](const Sample& s) { return (s.timings.*phase)(); });
  }
  medians["round_trip"] = Median(measured, [](const Sample& s) { return s.round_trip_ns; });
  ordered_json errors = ordered_json::object();
  for (const auto& [code, count] : measured.errors) errors[code] = count;
  ordered_json out = {
      {"name", scenario.name},
      {"mode", scenario.rate > 0 ? "open" : "closed"},
      {"connections", scenario.connections},
      {"in_flight", scenario.in_flight},
      {"offered_per_s", scenario.rate},
      {"deadline_s", absl::ToDoubleSeconds(scenario.deadline)},
      {"priority", scenario.priority == client::Priority::kBatch ? "batch" : "interactive"},
      {"stated_sizes", scenario.state_sizes},
      {"throttle", scenario.throttle},
      {"arena", !scenario.arena.empty()},
      {"arena_kind", scenario.arena.empty()                            ? ""
                     : scenario.arena_kind == client::ArenaKind::kCuda ? "cuda"
                                                                       : "host"},
      {"ring", scenario.ring},
      {"ring_spin_us", scenario.ring ? absl::ToInt64Microseconds(scenario.ring_spin) : 0},
      {"stream", scenario.stream},
      {"rows", scenario.rows},
      {"vocab", scenario.vocab},
      {"k", scenario.k},
      {"dtype", client::DTypeShortName(scenario.dtype)},
      {"mix", MixOf(measured)},
      {"head", scenario.head},
      {"payload_bytes", static_cast<int64_t>(std::lround(bytes))},
      {"seconds", measured.seconds},
      {"answers", measured.samples.size()},
      {"errors", errors},
      {"retries", measured.retries},
      {"requests_per_s", rate},
      // Answers within the deadline, by the clock that also counts the client's own delay.
      {"goodput_per_s", InTime(measured) / measured.seconds},
      {"rows_per_s", rate * static_cast<double>(scenario.rows)},
      {"payload_gb_per_s", all_bytes / measured.seconds / 1e9},
      // From socket to pinned memory, by the server's own clock and the median request.
      {"receive_copy_gb_per_s", take_ns > 0 ? bytes / static_cast<double>(take_ns) : 0.0},
      {"latency_ns", Percentiles(Column(measured, [](const Sample& s) { return s.latency_ns; }))},
      {"round_trip_minus_kernel_ns",
       Percentiles(Column(
           measured, [](const Sample& s) { return s.round_trip_ns - s.timings.kernel_ns(); }))},
      {"median_ns", medians},
      {"median_batch_rows",
       Median(measured, [](const Sample& s) -> int64_t { return s.timings.batch_rows(); })},
  };
  if (scenario.rate > 0) {
    out["sent_late_ns"] = Percentiles(Column(measured, [](const Sample& s) { return s.late_ns; }));
  }
  if (measured.server_peak_bytes > 0)
    out["server_peak_resident_bytes"] = measured.server_peak_bytes;
  return out;
}

std::string TableHeader() {
  return absl::StrFormat("%-22s %-6s %8s %9s %9s %9s %7s %9s %9s %9s %9s %9s %9s\n", "scenario",
                         "loop", "conn x n", "req/s", "in time", "rows/s", "GB/s", "p50 us", "p90",
                         "p99", "p99.9", "max", "added p50");
}

std::string TableLines(const ordered_json& s) {
  const ordered_json& latency = s["latency_ns"];
  const ordered_json& median = s["median_ns"];
  const std::string load =
      s["mode"] == "open"
          ? absl::StrFormat("%d", s["connections"].get<int>())
          : absl::StrFormat("%dx%d", s["connections"].get<int>(), s["in_flight"].get<int>());
  std::string out = absl::StrFormat(
      "%-22s %-6s %8s %9.1f %9.1f %9.0f %7.2f %9.1f %9.1f %9.1f %9.1f %9.1f %9.1f\n",
      s["name"].get<std::string>(), s["mode"].get<std::string>(), load,
      s["requests_per_s"].get<double>(), s["goodput_per_s"].get<double>(),
      s["rows_per_s"].get<double>(), s["payload_gb_per_s"].get<double>(), Micros(latency["p50"]),
      Micros(latency["p90"]), Micros(latency["p99"]), Micros(latency["p99_9"]),
      Micros(latency["max"]), Micros(s["round_trip_minus_kernel_ns"]["p50"]));
  absl::StrAppendFormat(
      &out,
      "    medians, us: receive %.1f, copy %.1f, queue %.1f, h2d %.1f, kernel %.1f, d2h %.1f, "
      "total %.1f, round trip %.1f; receive+copy %.2f GB/s; batch of %d rows\n",
      Micros(median["receive"]), Micros(median["copy"]), Micros(median["queue"]),
      Micros(median["h2d"]), Micros(median["kernel"]), Micros(median["d2h"]),
      Micros(median["total"]), Micros(median["round_trip"]),
      s["receive_copy_gb_per_s"].get<double>(), s["median_batch_rows"].get<int64_t>());
  std::string notes;
  if (s["retries"] != 0) absl::StrAppendFormat(&notes, " retries %d", s["retries"].get<int64_t>());
  for (const auto& [code, count] : s["errors"].items()) {
    absl::StrAppendFormat(&notes, " %s %d", code, count.get<int64_t>());
  }
  if (s.contains("server_peak_resident_bytes")) {
    absl::StrAppendFormat(&notes, " server peak %.1f MiB",
                          s["server_peak_resident_bytes"].get<double>() / (1 << 20));
  }
  if (!notes.empty()) absl::StrAppend(&out, "   ", notes, "\n");
  return out;
}

ordered_json Provenance(const v1::GetInfoResponse& info, const std::string& address) {
  return {
      {"date", absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone())},
      {"client", {{"cpu", CpuModel()}, {"cpus", std::thread::hardware_concurrency()}}},
      {"server",
       {{"address", address},
        {"version", info.version()},
        {"backend", info.backend()},
        {"device", info.device().name()},
        {"streams", info.limits().streams()},
        {"max_held_bytes", info.limits().max_held_bytes()},
        {"max_request_bytes", info.limits().max_request_bytes()}}},
  };
}

}  // namespace logitd::bench

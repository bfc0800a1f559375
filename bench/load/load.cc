#include "bench/load/load.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "bench/load/calls.h"
#include "bench/load/loops.h"
#include "client/client.h"

namespace logitd::bench {
namespace {

using client::Client;

constexpr absl::string_view kHidden = "hidden_";
constexpr std::pair<absl::string_view, Op> kOps[] = {
    {"topk", Op::kTopK}, {"sample", Op::kSample}, {"score", Op::kScore}, {"softmax", Op::kSoftmax}};

// VmHWM of a process, in bytes; 0 where it cannot be read.
int64_t PeakResidentBytes(int pid) {
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  std::string line;
  while (std::getline(status, line)) {
    absl::string_view rest = line;
    if (!absl::ConsumePrefix(&rest, "VmHWM:") || !absl::ConsumeSuffix(&rest, " kB")) continue;
    int64_t kib = 0;
    if (absl::SimpleAtoi(rest, &kib)) return kib * 1024;
  }
  return 0;
}

// Resets VmHWM. Where the kernel refuses, the peak is that of the server's whole life.
void ResetPeak(int pid) { std::ofstream(absl::StrCat("/proc/", pid, "/clear_refs")) << 5; }

}  // namespace

std::string NameOf(const MixPart& part) {
  for (const auto& [name, op] : kOps) {
    if (op == part.op) return absl::StrCat(part.hidden ? kHidden : "", name);
  }
  return "";
}

absl::StatusOr<std::vector<MixPart>> ParseMix(const std::string& text) {
  const auto refuse = [&] {
    return absl::InvalidArgumentError(absl::StrCat(
        "got \"", text,
        "\", allowed NAME=WEIGHT,... with a weight above 0 and each name once, of topk, sample, "
        "score, softmax, hidden_topk, hidden_sample, hidden_score"));
  };
  std::vector<MixPart> mix;
  for (const absl::string_view entry : absl::StrSplit(text, ',')) {
    const std::vector<absl::string_view> sides = absl::StrSplit(entry, absl::MaxSplits('=', 1));
    absl::string_view name = sides[0];
    MixPart part;
    part.hidden = absl::ConsumePrefix(&name, kHidden);
    const auto op = std::find_if(std::begin(kOps), std::end(kOps),
                                 [&](const auto& o) { return o.first == name; });
    if (op == std::end(kOps)) return refuse();
    part.op = op->second;
    if (part.hidden && part.op == Op::kSoftmax) return refuse();
    if (sides.size() == 2 && (!absl::SimpleAtod(sides[1], &part.weight) || !(part.weight > 0) ||
                              !std::isfinite(part.weight))) {
      return refuse();
    }
    for (const MixPart& other : mix) {
      if (other.op == part.op && other.hidden == part.hidden) return refuse();
    }
    mix.push_back(part);
  }
  return mix;
}

int64_t Percentile(std::vector<int64_t>& values, double p) {
  if (values.empty()) return 0;
  const size_t rank = static_cast<size_t>(std::ceil(p * static_cast<double>(values.size())));
  const size_t index = std::min(values.size(), std::max<size_t>(rank, 1)) - 1;
  std::nth_element(values.begin(), values.begin() + index, values.end());
  return values[index];
}

namespace {

absl::Status CheckScenario(const Scenario& scenario) {
  if (scenario.ring && (scenario.arena.empty() || scenario.rate > 0)) {
    return absl::InvalidArgumentError("a ring needs --arena, and a closed loop (no --rate)");
  }
  if (scenario.stream && (scenario.ring || scenario.rate > 0)) {
    return absl::InvalidArgumentError("a stream needs a closed loop (no --rate), and no --ring");
  }
  for (const MixPart& part : scenario.mix) {
    if (scenario.stream && part.op != Op::kSample) {
      return absl::InvalidArgumentError(
          absl::StrCat(NameOf(part), ": a stream takes sample and hidden_sample only"));
    }
    if (part.op == Op::kSoftmax && scenario.rate > 0) {
      return absl::InvalidArgumentError("softmax needs a closed loop (no --rate)");
    }
    if (scenario.ring && part.op != Op::kTopK && part.op != Op::kSample) {
      return absl::InvalidArgumentError(
          absl::StrCat(NameOf(part), ": a ring takes topk and sample only"));
    }
  }
  return absl::OkStatus();
}

// Connected: the measurement does not include a cold connection.
absl::StatusOr<std::vector<std::unique_ptr<Client>>> Connect(const Scenario& scenario,
                                                             client::ClientOptions options) {
  options.deadline = scenario.deadline;
  options.priority = scenario.priority;
  options.state_sizes = scenario.state_sizes;
  options.throttle = scenario.throttle;
  options.retry.max_attempts = scenario.retry ? 1'000'000 : 1;
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < scenario.connections; ++i) {
    absl::StatusOr<std::unique_ptr<Client>> client = Client::Create(options);
    if (!client.ok()) return client.status();
    const absl::StatusOr<v1::GetInfoResponse> info = (*client)->Info();
    if (!info.ok()) return info.status();
    clients.push_back(*std::move(client));
  }
  return clients;
}

// A call for each part of the mix. `client` asks for the head.
absl::StatusOr<Calls> MakeCalls(const Scenario& scenario, Client& client) {
  std::optional<v1::Head> head;
  Calls calls;
  for (const MixPart& part : scenario.mix) {
    if (part.hidden && !head.has_value()) {
      const absl::StatusOr<v1::Head> found = client.GetHead(scenario.head);
      if (!found.ok()) return found.status();
      head = *found;
    }
    absl::StatusOr<std::unique_ptr<Call>> call =
        MakeCall(scenario, part.op, part.hidden ? &*head : nullptr);
    if (!call.ok()) return call.status();
    calls.push_back(*std::move(call));
  }
  return calls;
}

}  // namespace

absl::StatusOr<Measured> RunScenario(const Scenario& scenario, const client::ClientOptions& target,
                                     int server_pid) {
  if (absl::Status status = CheckScenario(scenario); !status.ok()) return status;
  // gRPC ends its threads for callbacks with the last channel that used them, and 1.51 may abort
  // then. So a client of one run stays until the next run has made its calls.
  static auto& last = *new std::unique_ptr<Client>;
  absl::StatusOr<std::vector<std::unique_ptr<Client>>> clients = Connect(scenario, target);
  if (!clients.ok()) return clients.status();
  const absl::StatusOr<Calls> calls = MakeCalls(scenario, *clients->front());
  if (!calls.ok()) return calls.status();
  Measured measured = {.scenario = scenario, .seconds = absl::ToDoubleSeconds(scenario.duration)};
  for (const std::unique_ptr<Call>& call : *calls)
    measured.part_bytes.push_back(call->payload_bytes());
  if (server_pid != 0) ResetPeak(server_pid);
  Window window;
  window.begin = Clock::now() + absl::ToChronoNanoseconds(scenario.warmup);
  window.end = window.begin + absl::ToChronoNanoseconds(scenario.duration);
  const std::vector<Recorder> recorders = scenario.rate > 0
                                              ? OpenLoop(scenario, *calls, *clients, window)
                                              : ClosedLoop(scenario, *calls, *clients, window);
  if (server_pid != 0) measured.server_peak_bytes = PeakResidentBytes(server_pid);
  for (const Recorder& recorder : recorders) {
    measured.samples.insert(measured.samples.end(), recorder.samples.begin(),
                            recorder.samples.end());
    for (const auto& [code, count] : recorder.errors) measured.errors[code] += count;
    measured.retries += recorder.retries;
  }
  last = std::move(clients->front());
  return measured;
}

}  // namespace logitd::bench

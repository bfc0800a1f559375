#include "bench/load/load.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "client/arena.h"
#include "client/attention.h"
#include "client/client.h"
#include "client/ring.h"
#include "client/tensor_file.h"
#include "formats/half.h"
#include "formats/ring_protocol.h"

namespace logitd::bench {
namespace {

using client::Client;
using Clock = std::chrono::steady_clock;

constexpr absl::string_view kHidden = "hidden_";
constexpr std::pair<absl::string_view, Op> kOps[] = {
    {"topk", Op::kTopK}, {"sample", Op::kSample}, {"score", Op::kScore}, {"softmax", Op::kSoftmax}};

// Requests of an open loop in flight: bounds our own memory when the server falls behind.
constexpr int kMaxOutstanding = 20000;

// Values of nearly normal distribution with a deviation of 3; the same size gives the same values.
std::shared_ptr<const std::string> RandomElements(int64_t elements, v1::DType dtype) {
  auto bytes = std::make_shared<std::string>(elements * client::DTypeSize(dtype), '\0');
  uint64_t state = 0x9e3779b97f4a7c15;
  for (int64_t i = 0; i < elements; ++i) {
    state = state * 6364136223846793005 + 1442695040888963407;
    const uint64_t bits = state ^ state >> 29;
    // Four 16-bit uniforms add up to something near a normal distribution.
    const int sum = static_cast<int>((bits & 0xffff) + (bits >> 16 & 0xffff) +
                                     (bits >> 32 & 0xffff) + (bits >> 48));
    const float value = static_cast<float>(sum - 2 * 65535) * (3.0f / 37837.0f);
    if (dtype == v1::DTYPE_F32) {
      std::memcpy(bytes->data() + 4 * i, &value, 4);
    } else {
      const uint16_t half =
          dtype == v1::DTYPE_BF16 ? formats::FloatToBF16(value) : formats::FloatToF16(value);
      std::memcpy(bytes->data() + 2 * i, &half, 2);
    }
  }
  return bytes;
}

int64_t Nanos(Clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

// An answer, without what it says.
struct Answered {
  absl::Duration round_trip;
  int attempts;
  v1::Timings timings;
};

template <typename Result>
absl::StatusOr<Answered> ToAnswered(const absl::StatusOr<Result>& result) {
  if (!result.ok()) return result.status();
  return Answered{result->round_trip, result->attempts, result->answer.timings()};
}

absl::StatusOr<Answered> ToAnswered(const absl::StatusOr<client::AttentionResult>& result) {
  if (!result.ok()) return result.status();
  return Answered{result->round_trip, result->attempts, result->timings};
}

// One part of the mix, ready to be sent. Thread-safe.
class Call {
 public:
  virtual ~Call() = default;
  virtual int64_t payload_bytes() const = 0;
  virtual absl::StatusOr<Answered> Run(Client& client) const = 0;
  // Calls of some kinds cannot; see CheckScenario.
  virtual void RunAsync(Client& client,
                        std::function<void(const absl::StatusOr<Answered>&)> done) const {
    done(absl::UnimplementedError("a call that is not asynchronous"));
  }
};

template <typename Request, auto run, auto run_async>
class CallOf final : public Call {
 public:
  // `arena`: where the rows of `request` lie; null: they are sent.
  CallOf(Request request, int64_t payload_bytes, std::unique_ptr<client::Arena> arena)
      : arena_(std::move(arena)), request_(std::move(request)), payload_bytes_(payload_bytes) {}

  int64_t payload_bytes() const override { return payload_bytes_; }
  absl::StatusOr<Answered> Run(Client& client) const override {
    return ToAnswered((client.*run)(request_));
  }
  void RunAsync(Client& client,
                std::function<void(const absl::StatusOr<Answered>&)> done) const override {
    (client.*run_async)(request_,
                        [done = std::move(done)](const auto& result) { done(ToAnswered(result)); });
  }

 private:
  const std::unique_ptr<client::Arena> arena_;
  const Request request_;
  const int64_t payload_bytes_;
};
using TopKCall = CallOf<client::TopKRequest, &Client::TopK, &Client::TopKAsync>;
using SampleCall = CallOf<client::SampleRequest, &Client::Sample, &Client::SampleAsync>;
using ScoreCall = CallOf<client::ScoreRequest, &Client::Score, &Client::ScoreAsync>;

// The softmax of a tensor, into leased memory if it lies there.
class SoftmaxCall final : public Call {
 public:
  SoftmaxCall(client::AttentionSoftmaxRequest request, std::unique_ptr<client::Arena> arena)
      : arena_(std::move(arena)), request_(std::move(request)) {}

  int64_t payload_bytes() const override { return static_cast<int64_t>(request_.scores.size()); }
  absl::StatusOr<Answered> Run(Client& client) const override {
    return ToAnswered(client.AttentionSoftmax(request_));
  }

 private:
  const std::unique_ptr<client::Arena> arena_;
  const client::AttentionSoftmaxRequest request_;
};

// A call through rings, as many as run at the same time. Each has its lease, with a copy of the rows
// of `request` and the ring after it.
template <typename Request, auto run>
class RingCallOf final : public Call {
 public:
  RingCallOf(Request request, const Scenario& scenario, absl::string_view payload,
             client::RingOptions options)
      : request_(std::move(request)),
        address_(scenario.arena),
        kind_(scenario.arena_kind),
        payload_(payload),
        options_(options) {}

  int64_t payload_bytes() const override { return static_cast<int64_t>(payload_.size()); }
  absl::StatusOr<Answered> Run(Client&) const override {
    absl::StatusOr<std::unique_ptr<Place>> place = Take();
    if (!place.ok()) return place.status();
    Request request = (*place)->request;
    const auto result = ((*place)->ring.get()->*run)(request, absl::InfiniteDuration());
    const auto answered = ToAnswered(result);
    if (absl::IsUnavailable(answered.status())) return answered;  // perhaps the ring is over
    absl::MutexLock lock(&mutex_);
    free_.push_back(*std::move(place));
    return answered;
  }

 private:
  struct Place {
    std::unique_ptr<client::Arena> rows;   // where the rows lie
    std::unique_ptr<client::Arena> arena;  // of the ring; null: `rows`
    std::unique_ptr<client::Ring> ring;
    Request request;
  };

  absl::StatusOr<std::unique_ptr<Place>> Take() const {
    {
      absl::MutexLock lock(&mutex_);
      if (!free_.empty()) {
        std::unique_ptr<Place> place = std::move(free_.back());
        free_.pop_back();
        return place;
      }
    }
    // One lease for both, or where the rows lie on a GPU, one of the host for the ring.
    const bool together = kind_ == client::ArenaKind::kHost;
    const auto end = (static_cast<int64_t>(payload_.size()) + 63) / 64 * 64;
    const int64_t ring_bytes = client::Ring::Bytes(options_);
    absl::StatusOr<std::unique_ptr<client::Arena>> lies =
        client::Arena::Lease(address_, end + (together ? ring_bytes : 0), kind_);
    if (!lies.ok()) return lies.status();
    if (absl::Status status = (*lies)->Write(0, payload_); !status.ok()) return status;
    auto place = std::make_unique<Place>();
    place->rows = *std::move(lies);
    if (!together) {
      absl::StatusOr<std::unique_ptr<client::Arena>> own =
          client::Arena::Lease(address_, ring_bytes);
      if (!own.ok()) return own.status();
      place->arena = *std::move(own);
    }
    absl::StatusOr<std::unique_ptr<client::Ring>> ring =
        together ? client::Ring::Open(place->rows.get(), end, options_)
                 : client::Ring::Open(place->arena.get(), 0, options_);
    if (!ring.ok()) return ring.status();
    place->ring = *std::move(ring);
    place->request = request_;
    place->request.arena = place->rows.get();
    auto& rows = request_.head.empty() ? place->request.logits : place->request.hidden;
    rows = {absl::string_view(place->rows->data(), payload_.size())};
    return place;
  }

  const Request request_;
  const std::string address_;
  const client::ArenaKind kind_;
  const absl::string_view payload_;  // the request owns it
  const client::RingOptions options_;
  mutable absl::Mutex mutex_;
  mutable std::vector<std::unique_ptr<Place>> free_ ABSL_GUARDED_BY(mutex_);
};
using TopKRingCall = RingCallOf<client::TopKRequest, &client::Ring::TopK>;
using SampleRingCall = RingCallOf<client::SampleRequest, &client::Ring::Sample>;

// Sample through SampleStream, a stream for each call in flight, which lives until the scenario ends.
class SampleStreamCall final : public Call {
 public:
  SampleStreamCall(client::SampleRequest request, int64_t payload_bytes,
                   std::unique_ptr<client::Arena> arena)
      : arena_(std::move(arena)), request_(std::move(request)), payload_bytes_(payload_bytes) {}

  int64_t payload_bytes() const override { return payload_bytes_; }
  absl::StatusOr<Answered> Run(Client& client) const override {
    std::unique_ptr<client::SampleStream> stream = Take(client);
    const absl::Status written = stream->Write(request_);
    if (!written.ok() && !absl::IsUnavailable(written)) return written;
    // If the stream has ended, Read says why.
    const absl::StatusOr<client::SampleResult> result = stream->Read();
    if (result.ok()) {
      absl::MutexLock lock(&mutex_);
      free_[&client].push_back(std::move(stream));
    }
    return ToAnswered(result);
  }

 private:
  std::unique_ptr<client::SampleStream> Take(Client& client) const {
    absl::MutexLock lock(&mutex_);
    std::vector<std::unique_ptr<client::SampleStream>>& free = free_[&client];
    if (free.empty()) return client.OpenSampleStream();
    std::unique_ptr<client::SampleStream> stream = std::move(free.back());
    free.pop_back();
    return stream;
  }

  const std::unique_ptr<client::Arena> arena_;
  const client::SampleRequest request_;
  const int64_t payload_bytes_;
  mutable absl::Mutex mutex_;
  mutable std::map<Client*, std::vector<std::unique_ptr<client::SampleStream>>> free_
      ABSL_GUARDED_BY(mutex_);
};

// The rows of a part.
struct Rows {
  const v1::Head* head;  // null: logits
  v1::DType dtype;
  int64_t count;
  int64_t width;
  std::shared_ptr<const std::string> payload;
  std::unique_ptr<client::Arena> arena;  // with a copy of the payload; null: it is sent
};

absl::StatusOr<Rows> MakeRows(const Scenario& scenario, const v1::Head* head) {
  Rows rows = {.head = head,
               .dtype = head == nullptr ? scenario.dtype : head->dtype(),
               .count = scenario.rows,
               .width = head == nullptr ? scenario.vocab : head->hidden(),
               .payload = nullptr,
               .arena = nullptr};
  rows.payload = RandomElements(rows.count * rows.width, rows.dtype);
  if (scenario.arena.empty() || scenario.ring) return rows;
  // Twice, for the answer of softmax.
  absl::StatusOr<std::unique_ptr<client::Arena>> arena = client::Arena::Lease(
      scenario.arena, 2 * static_cast<int64_t>(rows.payload->size()), scenario.arena_kind);
  if (!arena.ok()) return arena.status();
  rows.arena = *std::move(arena);
  if (absl::Status status = rows.arena->Write(0, *rows.payload); !status.ok()) return status;
  return rows;
}

// A request of these rows without its parameters.
template <typename Request>
Request RequestOf(const Rows& rows) {
  Request request = {.dtype = rows.dtype, .rows = rows.count};
  absl::string_view payload = *rows.payload;
  if (rows.arena != nullptr) {
    payload = absl::string_view(rows.arena->data(), rows.payload->size());
    request.arena = rows.arena.get();
  }
  request.owner = rows.payload;
  if (rows.head == nullptr) {
    request.vocab = rows.width;
    request.logits = {payload};
  } else {
    request.head = rows.head->name();
    request.hidden_size = rows.width;
    request.hidden = {payload};
  }
  return request;
}

// Requests and answers of a scenario fit, one at a time.
client::RingOptions RingFor(const Scenario& scenario) {
  const auto aligned = [](int64_t bytes) {
    return static_cast<uint32_t>((std::min<int64_t>(bytes, kMaxRingSlotBytes) + 63) / 64 * 64);
  };
  return {.slots = 1,
          .entry_bytes = aligned(512 + 16 * scenario.rows),
          .answer_bytes = aligned(1024 + scenario.rows * (64 + 10 * int64_t{scenario.k})),
          .spin = scenario.ring_spin,
          .priority = scenario.priority};
}

// `head` is null for logits.
absl::StatusOr<std::unique_ptr<Call>> MakeCall(const Scenario& scenario, Op op,
                                               const v1::Head* head) {
  absl::StatusOr<Rows> rows = MakeRows(scenario, head);
  if (!rows.ok()) return rows.status();
  const int64_t vocab = head == nullptr ? scenario.vocab : head->vocab();
  const auto bytes = static_cast<int64_t>(rows->payload->size());
  switch (op) {
    case Op::kTopK: {
      auto request = RequestOf<client::TopKRequest>(*rows);
      request.params.add_k(static_cast<int32_t>(std::min<int64_t>(scenario.k, vocab)));
      if (scenario.ring) {
        return std::make_unique<TopKRingCall>(std::move(request), scenario, *rows->payload,
                                              RingFor(scenario));
      }
      return std::make_unique<TopKCall>(std::move(request), bytes, std::move(rows->arena));
    }
    case Op::kSample: {
      auto request = RequestOf<client::SampleRequest>(*rows);
      request.params.add_temperature(0.8f);
      request.params.add_top_p(0.95f);
      for (int64_t row = 0; row < scenario.rows; ++row) {
        request.params.add_seed(static_cast<uint64_t>(row));
      }
      if (scenario.ring) {
        return std::make_unique<SampleRingCall>(std::move(request), scenario, *rows->payload,
                                                RingFor(scenario));
      }
      if (scenario.stream) {
        return std::make_unique<SampleStreamCall>(std::move(request), bytes,
                                                  std::move(rows->arena));
      }
      return std::make_unique<SampleCall>(std::move(request), bytes, std::move(rows->arena));
    }
    case Op::kSoftmax: {
      client::AttentionSoftmaxRequest request = {
          .dtype = rows->dtype,
          .shape = {.queries = rows->count, .keys = rows->width},
          .scores = *rows->payload,
          .owner = rows->payload};
      if (rows->arena != nullptr) {
        char* const data = rows->arena->data();
        request.scores = {data, rows->payload->size()};
        request.probs = {data + rows->payload->size(), rows->payload->size()};
        request.arena = rows->arena.get();
      }
      return std::make_unique<SoftmaxCall>(std::move(request), std::move(rows->arena));
    }
    case Op::kScore:
      break;
  }
  auto request = RequestOf<client::ScoreRequest>(*rows);
  std::mt19937 random(7);
  std::uniform_int_distribution<int32_t> token(0, static_cast<int32_t>(vocab - 1));
  for (int64_t row = 0; row < scenario.rows; ++row) request.params.add_targets(token(random));
  return std::make_unique<ScoreCall>(std::move(request), bytes, std::move(rows->arena));
}

using Calls = std::vector<std::unique_ptr<Call>>;

// Draws parts of the mix by weight. Not thread-safe.
class Choice {
 public:
  Choice(const Scenario& scenario, uint64_t seed) : random_(seed) {
    std::vector<double> weights;
    for (const MixPart& part : scenario.mix) weights.push_back(part.weight);
    part_ = std::discrete_distribution<int>(weights.begin(), weights.end());
  }
  int Next() { return part_(random_); }

 private:
  std::mt19937_64 random_;
  std::discrete_distribution<int> part_;
};

// What one thread, or one connection, saw.
struct Recorder {
  void Record(const absl::StatusOr<Answered>& result, int part, Clock::time_point from,
              int64_t late_ns, Clock::time_point now) {
    if (!result.ok()) {
      ++errors[absl::StatusCodeToString(result.status().code())];
      return;
    }
    retries += result->attempts - 1;
    samples.push_back({Nanos(now - from), absl::ToInt64Nanoseconds(result->round_trip),
                       result->timings, late_ns, part});
  }

  std::vector<Sample> samples;
  std::map<std::string, int64_t> errors;
  int64_t retries = 0;
};

struct Window {
  Clock::time_point begin;
  Clock::time_point end;
  bool Holds(Clock::time_point t) const { return t >= begin && t < end; }
};

void ClosedLoop(const Scenario& scenario, const Calls& calls,
                std::vector<std::unique_ptr<Client>>& clients, const Window& window,
                std::vector<Recorder>& recorders) {
  const size_t count = clients.size() * scenario.in_flight;
  recorders.resize(count);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      Client& client = *clients[i % clients.size()];
      Choice choice(scenario, i);
      Recorder recorder;
      recorder.samples.reserve(1 << 12);
      for (Clock::time_point start = Clock::now(); start < window.end; start = Clock::now()) {
        const int part = choice.Next();
        const absl::StatusOr<Answered> result = calls[part]->Run(client);
        const Clock::time_point now = Clock::now();
        if (window.Holds(now)) recorder.Record(result, part, start, /*late_ns=*/0, now);
        if (!result.ok() && !scenario.retry) {
          // A refusal costs the server little: without a pause the client measures itself.
          absl::SleepFor(absl::Milliseconds(1));
        }
      }
      recorders[i] = std::move(recorder);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The requests of one connection in an open loop. Its methods run on one thread, except the
// callbacks of calls.
class Arrivals {
 public:
  Arrivals(const Scenario& scenario, const Calls& calls, Client* client, const Window& window,
           uint64_t seed, std::atomic<int>* outstanding)
      : calls_(calls),
        client_(*client),
        window_(window),
        choice_(scenario, seed),
        random_(~seed),
        gap_(scenario.rate / scenario.connections),
        outstanding_(*outstanding),
        due_(Clock::now()) {
    Advance();
  }

  Clock::time_point due() const { return due_; }

  // Sends the request that is due, without waiting for its answer.
  void Send() {
    const Clock::time_point due = due_;
    Advance();
    // Arrivals in the window count, not answers: a server that falls behind answers late.
    const bool counts = window_.Holds(due);
    if (outstanding_ >= kMaxOutstanding) {
      not_sent_ += counts;
      return;
    }
    ++outstanding_;
    const int part = choice_.Next();
    const int64_t late_ns = Nanos(Clock::now() - due);
    calls_[part]->RunAsync(
        client_, [this, counts, due, late_ns, part](const absl::StatusOr<Answered>& result) {
          if (counts) {
            absl::MutexLock lock(&mutex_);
            recorder_.Record(result, part, due, late_ns, Clock::now());
          }
          --outstanding_;
        });
  }

  // When no call is outstanding.
  Recorder Take() {
    absl::MutexLock lock(&mutex_);
    if (not_sent_ > 0) recorder_.errors["NOT_SENT"] += not_sent_;
    return std::move(recorder_);
  }

 private:
  void Advance() { due_ += std::chrono::nanoseconds(static_cast<int64_t>(gap_(random_) * 1e9)); }

  const Calls& calls_;
  Client& client_;
  const Window& window_;
  Choice choice_;
  std::mt19937_64 random_;
  std::exponential_distribution<double> gap_;
  std::atomic<int>& outstanding_;
  Clock::time_point due_;
  int64_t not_sent_ = 0;
  absl::Mutex mutex_;
  Recorder recorder_ ABSL_GUARDED_BY(mutex_);
};

void OpenLoop(const Scenario& scenario, const Calls& calls,
              std::vector<std::unique_ptr<Client>>& clients, const Window& window,
              std::vector<Recorder>& recorders) {
  std::atomic<int> outstanding = 0;
  std::vector<std::unique_ptr<Arrivals>> arrivals;
  for (size_t i = 0; i < clients.size(); ++i) {
    arrivals.push_back(std::make_unique<Arrivals>(scenario, calls, clients[i].get(), window,
                                                  /*seed=*/20241121 + i, &outstanding));
  }
  // A thread sends for some of the connections: always the request that is due first.
  const size_t senders =
      std::min<size_t>(clients.size(), std::max(1u, std::thread::hardware_concurrency()));
  std::vector<std::thread> threads;
  for (size_t t = 0; t < senders; ++t) {
    threads.emplace_back([&, t] {
      const auto later = [](const Arrivals* a, const Arrivals* b) { return a->due() > b->due(); };
      std::priority_queue<Arrivals*, std::vector<Arrivals*>, decltype(later)> next(later);
      for (size_t i = t; i < arrivals.size(); i += senders) next.push(arrivals[i].get());
      while (next.top()->due() < window.end) {
        Arrivals* const first = next.top();
        next.pop();
        std::this_thread::sleep_until(first->due());
        first->Send();
        next.push(first);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  while (outstanding > 0) absl::SleepFor(absl::Milliseconds(1));  // each has its deadline
  for (const auto& connection : arrivals) recorders.push_back(connection->Take());
}

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

}  // namespace

absl::StatusOr<Measured> RunScenario(const Scenario& scenario, const client::ClientOptions& target,
                                     int server_pid) {
  if (absl::Status status = CheckScenario(scenario); !status.ok()) return status;
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < scenario.connections; ++i) {
    client::ClientOptions options = target;
    options.deadline = scenario.deadline;
    options.priority = scenario.priority;
    options.state_sizes = scenario.state_sizes;
    options.throttle = scenario.throttle;
    options.retry.max_attempts = scenario.retry ? 1'000'000 : 1;
    absl::StatusOr<std::unique_ptr<Client>> client = Client::Create(options);
    if (!client.ok()) return client.status();
    // Connects: the measurement does not include a cold connection.
    if (absl::StatusOr<v1::GetInfoResponse> info = (*client)->Info(); !info.ok()) {
      return info.status();
    }
    clients.push_back(*std::move(client));
  }
  std::optional<v1::Head> head;
  Calls calls;
  Measured measured = {.scenario = scenario, .seconds = absl::ToDoubleSeconds(scenario.duration)};
  for (const MixPart& part : scenario.mix) {
    if (part.hidden && !head.has_value()) {
      const absl::StatusOr<v1::Head> found = clients[0]->GetHead(scenario.head);
      if (!found.ok()) return found.status();
      head = *found;
    }
    absl::StatusOr<std::unique_ptr<Call>> call =
        MakeCall(scenario, part.op, part.hidden ? &*head : nullptr);
    if (!call.ok()) return call.status();
    calls.push_back(*std::move(call));
    measured.part_bytes.push_back(calls.back()->payload_bytes());
  }
  if (server_pid != 0) ResetPeak(server_pid);
  Window window;
  window.begin = Clock::now() + absl::ToChronoNanoseconds(scenario.warmup);
  window.end = window.begin + absl::ToChronoNanoseconds(scenario.duration);
  std::vector<Recorder> recorders;
  if (scenario.rate > 0) {
    OpenLoop(scenario, calls, clients, window, recorders);
  } else {
    ClosedLoop(scenario, calls, clients, window, recorders);
  }
  if (server_pid != 0) measured.server_peak_bytes = PeakResidentBytes(server_pid);
  for (Recorder& recorder : recorders) {
    measured.samples.insert(measured.samples.end(), recorder.samples.begin(),
                            recorder.samples.end());
    for (const auto& [code, count] : recorder.errors) measured.errors[code] += count;
    measured.retries += recorder.retries;
  }
  return measured;
}

}  // namespace logitd::bench

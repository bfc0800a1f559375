#include "bench/load/calls.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "client/arena.h"
#include "client/attention.h"
#include "client/ring.h"
#include "client/tensor_file.h"
#include "formats/half.h"
#include "formats/ring_protocol.h"

namespace logitd::bench {
namespace {

using client::Client;

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

template <typename Result>
absl::StatusOr<Answered> ToAnswered(const absl::StatusOr<Result>& result) {
  if (!result.ok()) return result.status();
  return Answered{result->round_trip, result->attempts, result->answer.timings()};
}

absl::StatusOr<Answered> ToAnswered(const absl::StatusOr<client::AttentionResult>& result) {
  if (!result.ok()) return result.status();
  return Answered{result->round_trip, result->attempts, result->timings};
}

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

// A call through rings, as many as run at the same time. Each has its lease, with a copy of the
// rows of `request` and the ring after it.
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

// Sample through SampleStream, a stream for each call in flight, which lives until the scenario
// ends.
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

absl::StatusOr<std::unique_ptr<Call>> MakeTopK(const Scenario& scenario, int64_t vocab, Rows rows) {
  const auto bytes = static_cast<int64_t>(rows.payload->size());
  auto request = RequestOf<client::TopKRequest>(rows);
  request.params.add_k(static_cast<int32_t>(std::min<int64_t>(scenario.k, vocab)));
  if (scenario.ring) {
    return std::make_unique<TopKRingCall>(std::move(request), scenario, *rows.payload,
                                          RingFor(scenario));
  }
  return std::make_unique<TopKCall>(std::move(request), bytes, std::move(rows.arena));
}

absl::StatusOr<std::unique_ptr<Call>> MakeSample(const Scenario& scenario, Rows rows) {
  const auto bytes = static_cast<int64_t>(rows.payload->size());
  auto request = RequestOf<client::SampleRequest>(rows);
  request.params.add_temperature(0.8f);
  request.params.add_top_p(0.95f);
  for (int64_t row = 0; row < scenario.rows; ++row) {
    request.params.add_seed(static_cast<uint64_t>(row));
  }
  if (scenario.ring) {
    return std::make_unique<SampleRingCall>(std::move(request), scenario, *rows.payload,
                                            RingFor(scenario));
  }
  if (scenario.stream) {
    return std::make_unique<SampleStreamCall>(std::move(request), bytes, std::move(rows.arena));
  }
  return std::make_unique<SampleCall>(std::move(request), bytes, std::move(rows.arena));
}

absl::StatusOr<std::unique_ptr<Call>> MakeScore(const Scenario& scenario, int64_t vocab,
                                                Rows rows) {
  const auto bytes = static_cast<int64_t>(rows.payload->size());
  auto request = RequestOf<client::ScoreRequest>(rows);
  std::mt19937 random(7);
  std::uniform_int_distribution<int32_t> token(0, static_cast<int32_t>(vocab - 1));
  for (int64_t row = 0; row < scenario.rows; ++row) request.params.add_targets(token(random));
  return std::make_unique<ScoreCall>(std::move(request), bytes, std::move(rows.arena));
}

absl::StatusOr<std::unique_ptr<Call>> MakeSoftmax(Rows rows) {
  client::AttentionSoftmaxRequest request = {.dtype = rows.dtype,
                                             .shape = {.queries = rows.count, .keys = rows.width},
                                             .scores = *rows.payload,
                                             .owner = rows.payload};
  if (rows.arena != nullptr) {
    char* const data = rows.arena->data();
    request.scores = {data, rows.payload->size()};
    request.probs = {data + rows.payload->size(), rows.payload->size()};
    request.arena = rows.arena.get();
  }
  return std::make_unique<SoftmaxCall>(std::move(request), std::move(rows.arena));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Call>> MakeCall(const Scenario& scenario, Op op,
                                               const v1::Head* head) {
  absl::StatusOr<Rows> rows = MakeRows(scenario, head);
  if (!rows.ok()) return rows.status();
  const int64_t vocab = head == nullptr ? scenario.vocab : head->vocab();
  switch (op) {
    case Op::kTopK:
      return MakeTopK(scenario, vocab, *std::move(rows));
    case Op::kSample:
      return MakeSample(scenario, *std::move(rows));
    case Op::kSoftmax:
      return MakeSoftmax(*std::move(rows));
    case Op::kScore:
      break;
  }
  return MakeScore(scenario, vocab, *std::move(rows));
}

}  // namespace logitd::bench

// shard_bench: linear ops, training among them, on a head that is cut over several GPUs, by both
// ways of exchange, beside the whole head on one of them, and what the exchange costs beside NCCL's
// all-gather.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/shards/call.h"
#include "bench/shards/exchange.h"
#include "kernels/backend.h"
#include "kernels/sharded_stream.h"
#include "kernels/shards.h"
#include "kernels/status_macros.h"

namespace logitd::bench {
namespace {

std::vector<Case> Cases() {
  std::vector<Case> cases;
  const std::pair<int64_t, int64_t> heads[] = {{4096, 128256}, {7168, 129280}, {5120, 201088}};
  for (const auto& [hidden, vocab] : heads) {
    cases.push_back({HeadOp::kCrossEntropy, 4096, hidden, vocab});
    cases.push_back({HeadOp::kTraining, 4096, hidden, vocab});
    for (const int64_t rows : {1, 8, 64}) {
      cases.push_back({HeadOp::kTopK, rows, hidden, vocab});
      cases.push_back({HeadOp::kSample, rows, hidden, vocab});
      cases.push_back({HeadOp::kSampleWhole, rows, hidden, vocab});
    }
    cases.push_back({HeadOp::kCrossEntropy, 64, hidden, vocab});
  }
  return cases;
}

constexpr size_t kPatternBytes = size_t{64} << 20;

uint16_t ToBF16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float FromBF16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &wide, sizeof(x));
  return x;
}

// The largest difference of two tensors of bf16, as a share of the largest element. NaN counts as
// 1.
double Difference(const std::vector<uint16_t>& a, const std::vector<uint16_t>& b) {
  double most = 0, apart = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double x = FromBF16(a[i]), y = FromBF16(b[i]);
    if (std::isnan(x) || std::isnan(y)) return 1;
    most = std::max(most, std::fabs(x));
    apart = std::max(apart, std::fabs(x - y));
  }
  return most == 0 ? 1 : apart / most;
}

// Rounding to bf16 is 2^-8 of an element, and two ways to a gradient round several times.
constexpr double kMostDifference = 0.03;

struct Times {
  double device_us =
      0;               // from the end of the upload to the last answer, by the first device's clock
  double wall_us = 0;  // of the call: small parameters up, op, answers down
};

// How the answers of shards compare with those of one device.
struct Agreement {
  bool bits = true;       // of all answers except gradients: the same
  bool gradients = true;  // of training: within kMostDifference
  bool all() const { return bits && gradients; }
};

// What a call has answered.
struct Answers {
  std::string bits;  // of all answers except gradients
  std::vector<uint16_t> d_hidden;
  std::vector<uint16_t> d_weight;  // of the last tokens
};

double Median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

class Bench {
 public:
  absl::Status Init(const std::vector<int>& devices) {
    auto backends = CreateBackends("cuda", {.devices = devices});
    if (!backends.ok()) return backends.status();
    backends_ = *std::move(backends);
    for (const auto& backend : backends_) all_.push_back(backend.get());
    auto one = lead().CreateStream(StreamUse::kOps);
    if (!one.ok()) return one.status();
    one_ = *std::move(one);
    const std::set<int> distinct(devices.begin(), devices.end());
    for (const ShardExchange exchange : {ShardExchange::kPeers, ShardExchange::kNccl}) {
      const bool nccl = exchange == ShardExchange::kNccl;
      if (nccl && distinct.size() < devices.size()) continue;  // NCCL joins no device with itself
      auto sharded = CreateShardedStream(all_, {.exchange = exchange});
      if (nccl && !sharded.ok()) {
        std::cerr << "not measured: " << sharded.status() << "\n";
        continue;
      }
      if (!sharded.ok()) return sharded.status();
      (nccl ? by_nccl_ : sharded_) = *std::move(sharded);
    }
    auto slab = lead().AllocateSlab(size_t{160} << 20);
    if (!slab.ok()) return slab.status();
    slab_ = *slab;
    auto pattern = lead().AllocateSlab(kPatternBytes);
    if (!pattern.ok()) return pattern.status();
    pattern_ = *pattern;
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    auto* const at = reinterpret_cast<uint16_t*>(pattern_.host);
    for (size_t i = 0; i < kPatternBytes / 2; ++i) at[i] = ToBF16(normal(random));
    return absl::OkStatus();
  }

  const DeviceInfo& device() const { return all_.front()->device(); }
  int count() const { return static_cast<int>(all_.size()); }

  // Allocates and fills the whole head and its shards, which have the same elements.
  absl::Status LoadHead(int64_t hidden, int64_t vocab) {
    FreeHeads();
    whole_ = {.weight = {nullptr, kDType, vocab, hidden, hidden},
              .scale = 1 / std::sqrt(static_cast<float>(hidden))};
    parts_.assign(all_.size(), whole_);
    const VocabShards cut = {.vocab = vocab, .count = count()};
    LOGITD_RETURN_IF_ERROR(Load(0, {0, vocab}, whole_));
    for (int i = 0; i < count(); ++i) {
      LOGITD_RETURN_IF_ERROR(Load(i, cut.at(i), parts_[static_cast<size_t>(i)]));
    }
    sharded_head_ = whole_;
    sharded_head_.weight.data = nullptr;
    sharded_head_.shards = parts_.data();
    sharded_head_.shard_count = count();
    return absl::OkStatus();
  }

  // Allocates what training writes, for the head that was loaded.
  absl::Status MakeGradients() {
    if (!gradients_.empty()) return absl::OkStatus();
    LOGITD_RETURN_IF_ERROR(AddGradient(0, whole_));
    for (int i = 0; i < count(); ++i) {
      LOGITD_RETURN_IF_ERROR(AddGradient(i, parts_[static_cast<size_t>(i)]));
    }
    return absl::OkStatus();
  }

  // `nccl` stays 0 where NCCL is not measured.
  absl::Status Measure(const Case& c, Times* one, Times* sharded, Times* nccl,
                       Agreement* agreement) {
    if (c.op == HeadOp::kTraining) LOGITD_RETURN_IF_ERROR(MakeGradients());
    Answers want, got;
    LOGITD_RETURN_IF_ERROR(Run(c, *one_, nullptr, one, &want));
    LOGITD_RETURN_IF_ERROR(Run(c, *sharded_, sharded_.get(), sharded, &got));
    Compare(c, want, got, agreement);
    if (by_nccl_ == nullptr) return absl::OkStatus();
    LOGITD_RETURN_IF_ERROR(Run(c, *by_nccl_, by_nccl_.get(), nccl, &got));
    Compare(c, want, got, agreement);
    return absl::OkStatus();
  }

  void FreeHeads() {
    for (const auto& [device, memory] : memories_)
      all_[static_cast<size_t>(device)]->FreeDevice(memory);
    memories_.clear();
    gradients_.clear();
  }

 private:
  Backend& lead() { return *backends_.front(); }

  static void Compare(const Case& c, const Answers& want, const Answers& got,
                      Agreement* agreement) {
    agreement->bits &= got.bits == want.bits;
    if (c.op != HeadOp::kTraining) return;
    agreement->gradients &= Difference(want.d_hidden, got.d_hidden) < kMostDifference &&
                            Difference(want.d_weight, got.d_weight) < kMostDifference;
  }

  absl::Status AddGradient(int device, const HeadView& head) {
    const auto bytes = static_cast<size_t>(head.weight.rows * head.weight.cols * kElement);
    const auto memory = all_[static_cast<size_t>(device)]->AllocateDevice(bytes);
    if (!memory.ok()) return memory.status();
    memories_.emplace_back(device, *memory);
    gradients_.push_back(
        {.d_weight = {memory->data, kDType, head.weight.rows, head.weight.cols, head.weight.cols}});
    return absl::OkStatus();
  }

  // Elements of a device's memory.
  absl::Status Read(int device, const void* from, int64_t count, std::vector<uint16_t>* to) {
    auto stream = all_[static_cast<size_t>(device)]->CreateStream(StreamUse::kCopies);
    if (!stream.ok()) return stream.status();
    const auto bytes = static_cast<size_t>(count * kElement);
    LOGITD_RETURN_IF_ERROR(
        (*stream)->Deliver(slab_.host, static_cast<const std::byte*>(from), bytes));
    if (const auto waited = (*stream)->Wait(); !waited.ok()) return waited.status();
    to->resize(static_cast<size_t>(count));
    std::memcpy(to->data(), slab_.host, bytes);
    return absl::OkStatus();
  }

  // What is compared of a d_weight.
  static MutableTensorView LastTokens(const ShardGradient& gradient) {
    const MutableTensorView& all = gradient.d_weight;
    const int64_t tokens = std::min<int64_t>(512, all.rows);
    return RowsOf(all, all.rows - tokens, tokens);
  }

  // `gradient`: of the last tokens. Overwrites the slab.
  absl::Status ReadGradients(const Case& c, const void* d_hidden, int device,
                             const ShardGradient& gradient, Answers* answers) {
    const MutableTensorView last = LastTokens(gradient);
    LOGITD_RETURN_IF_ERROR(Read(0, d_hidden, c.rows * c.hidden, &answers->d_hidden));
    return Read(device, last.data, last.rows * c.hidden, &answers->d_weight);
  }

  // Makes NaNs of what ReadGradients reads of d_weight: an earlier run may have left gradients
  // there. Overwrites the slab.
  absl::Status PoisonWeight(int device, const ShardGradient& gradient) {
    const MutableTensorView last = LastTokens(gradient);
    const auto bytes = static_cast<size_t>(last.rows * last.cols * kElement);
    std::memset(slab_.host, 0xff, bytes);
    auto stream = all_[static_cast<size_t>(device)]->CreateStream(StreamUse::kCopies);
    if (!stream.ok()) return stream.status();
    LOGITD_RETURN_IF_ERROR((*stream)->Fill(slab_, 0, bytes, static_cast<std::byte*>(last.data)));
    return (*stream)->Wait().status();
  }

  absl::Status Load(int device, const VocabShard& shard, HeadView& view) {
    const auto row_bytes = static_cast<size_t>(view.weight.cols * kElement);
    const auto bytes = static_cast<size_t>(shard.tokens) * row_bytes;
    const auto memory = all_[static_cast<size_t>(device)]->AllocateDevice(bytes);
    if (!memory.ok()) return memory.status();
    memories_.emplace_back(device, *memory);
    auto stream = all_[static_cast<size_t>(device)]->CreateStream(StreamUse::kCopies);
    if (!stream.ok()) return stream.status();
    const size_t first = static_cast<size_t>(shard.first) * row_bytes;
    for (size_t done = 0; done < bytes;) {
      const size_t at = (first + done) % kPatternBytes;
      const size_t now = std::min(bytes - done, kPatternBytes - at);
      LOGITD_RETURN_IF_ERROR((*stream)->Fill(pattern_, at, now, memory->data + done));
      done += now;
    }
    if (const auto waited = (*stream)->Wait(); !waited.ok()) return waited.status();
    view.weight.data = memory->data;
    view.weight.rows = shard.tokens;
    return absl::OkStatus();
  }

  // `sharded`: null, or the stream, which then gets the head that is cut.
  absl::Status Run(const Case& c, Stream& stream, ShardedStream* sharded, Times* times,
                   Answers* answers) {
    const bool trains = c.op == HeadOp::kTraining;
    const int last = sharded == nullptr ? 0 : count() - 1;  // the device of the last tokens
    if (trains) LOGITD_RETURN_IF_ERROR(PoisonWeight(last, GradientOf(sharded)));
    const Call call(c, slab_, pattern_.host + kPatternBytes);
    LOGITD_RETURN_IF_ERROR(stream.Upload(slab_, 0, call.bytes));
    LOGITD_RETURN_IF_ERROR(Time(c, call, stream, sharded, times));
    answers->bits.assign(reinterpret_cast<const char*>(slab_.host + call.first_answer),
                         call.end - call.first_answer);
    if (!trains) return absl::OkStatus();
    return ReadGradients(c, call.d_hidden, last, GradientOf(sharded), answers);
  }

  absl::Status Time(const Case& c, const Call& call, Stream& stream, ShardedStream* sharded,
                    Times* times) {
    const HeadView& head = sharded == nullptr ? whole_ : sharded_head_;
    const int warm = 3;
    const int runs = c.rows > 512 ? 15 : 60;
    std::vector<double> device_us, wall_us;
    for (int i = 0; i < warm + runs; ++i) {
      const auto start = std::chrono::steady_clock::now();
      LOGITD_RETURN_IF_ERROR(stream.Upload(slab_, call.params, call.first_answer - call.params));
      LOGITD_RETURN_IF_ERROR(call.Launch(stream, sharded, head, gradients_));
      LOGITD_RETURN_IF_ERROR(
          stream.Download(slab_, call.first_answer, call.end - call.first_answer));
      const auto waited = stream.Wait();
      if (!waited.ok()) return waited.status();
      if (i < warm) continue;
      const std::chrono::duration<double, std::micro> wall =
          std::chrono::steady_clock::now() - start;
      wall_us.push_back(wall.count());
      device_us.push_back(static_cast<double>(waited->kernel_ns) / 1e3);
    }
    *times = {.device_us = Median(device_us), .wall_us = Median(wall_us)};
    return absl::OkStatus();
  }

  // Where the gradients of the last tokens go.
  const ShardGradient& GradientOf(const ShardedStream* sharded) const {
    return sharded == nullptr ? gradients_.front() : gradients_.back();
  }

  std::vector<std::unique_ptr<Backend>> backends_;
  std::vector<Backend*> all_;
  std::unique_ptr<Stream> one_;
  std::unique_ptr<ShardedStream> sharded_;
  std::unique_ptr<ShardedStream> by_nccl_;  // null: not measured
  Slab slab_;
  Slab pattern_;
  HeadView whole_;
  HeadView sharded_head_;
  std::vector<HeadView> parts_;
  std::vector<std::pair<int, DeviceMemory>> memories_;
  std::vector<ShardGradient> gradients_;  // of the whole head, then of its shards; empty: none yet
};
// All ways of one case. `nccl` is 0 where NCCL is not measured.
struct Measured {
  Times one, sharded, nccl;
  Agreement agreement;
};

std::string NameOf(const Case& c) {
  return absl::StrFormat("%s %dx%dx%d", kOps[static_cast<int>(c.op)], c.rows, c.hidden, c.vocab);
}

void Print(const Case& c, const Measured& measured) {
  const auto& [one, sharded, nccl, agreement] = measured;
  const double by_nccl = nccl.device_us == 0 ? 0 : one.device_us / nccl.device_us;
  absl::PrintF("%-44s %10.1f %10.1f %7.2f %10.1f %10.1f %10.1f %7.2f %10.1f  %s\n", NameOf(c),
               one.device_us, sharded.device_us, one.device_us / sharded.device_us, one.wall_us,
               sharded.wall_us, nccl.device_us, by_nccl, nccl.wall_us,
               agreement.all() ? "same" : "DIFFER");
}

nlohmann::json ToJson(const Case& c, const Measured& measured) {
  const auto& [one, sharded, nccl, agreement] = measured;
  nlohmann::json entry = {{"op", kOps[static_cast<int>(c.op)]},
                          {"rows", c.rows},
                          {"hidden", c.hidden},
                          {"vocab", c.vocab},
                          {"dtype", "bf16"},
                          {"one_us", one.device_us},
                          {"sharded_us", sharded.device_us},
                          {"one_wall_us", one.wall_us},
                          {"sharded_wall_us", sharded.wall_us},
                          {"same_bits", agreement.bits}};
  if (c.op == HeadOp::kTraining) entry["gradients_agree"] = agreement.gradients;
  if (nccl.device_us > 0) {
    entry["nccl_us"] = nccl.device_us;
    entry["nccl_wall_us"] = nccl.wall_us;
  }
  return entry;
}

// Measures and prints the cases whose name contains one of `only`; empty: all. Returns how many
// failed.
int MeasureCases(Bench& bench, const std::vector<std::string>& only, nlohmann::json& entries) {
  int failed = 0;
  absl::PrintF("%-44s %10s %10s %7s %10s %10s %10s %7s %10s  %s\n", "op", "one us", "shards us",
               "x", "one wall", "wall", "NCCL us", "x", "wall", "answers");
  int64_t hidden = 0, vocab = 0;
  for (const Case& c : Cases()) {
    const std::string name = NameOf(c);
    const bool wanted =
        only.empty() || std::any_of(only.begin(), only.end(), [&](const auto& text) {
          return name.find(text) != std::string::npos;
        });
    if (!wanted) continue;
    absl::Status status;
    if (c.hidden != hidden || c.vocab != vocab) status = bench.LoadHead(c.hidden, c.vocab);
    hidden = c.hidden;
    vocab = c.vocab;
    Measured measured;
    auto& [one, sharded, nccl, agreement] = measured;
    if (status.ok()) status = bench.Measure(c, &one, &sharded, &nccl, &agreement);
    if (!status.ok()) {
      absl::PrintF("%-44s %s\n", name, status.ToString());
      ++failed;
      continue;
    }
    if (!agreement.all()) ++failed;
    Print(c, measured);
    entries.push_back(ToJson(c, measured));
  }
  bench.FreeHeads();
  return failed;
}

void MeasureExchange(const std::vector<int>& devices, nlohmann::json& entries) {
  for (const int64_t rows : {64, 4096}) {
    const VocabShards cut = {.vocab = 128256, .count = static_cast<int>(devices.size())};
    const size_t bytes = LossPartialShape{.shards = cut, .rows = rows}.bytes();
    const ExchangeTimes times = TimeExchange(devices, bytes);
    absl::PrintF("exchange of %d rows, %d bytes a device: peer stores %.1f us, NCCL %s\n", rows,
                 bytes, times.stores_us,
                 times.nccl_us > 0 ? absl::StrFormat("%.1f us", times.nccl_us) : times.no_nccl);
    entries.push_back({{"rows", rows},
                       {"bytes", bytes},
                       {"peer_stores_us", times.stores_us},
                       {"nccl_all_gather_us", times.nccl_us}});
  }
}

int Main(int argc, char** argv) {
  CLI::App app(
      "Times linear ops on a bf16 head that is cut over several GPUs, beside the whole head on the "
      "first of them, and the exchange of blocks beside an all-gather by NCCL.");
  std::vector<int> devices = {0, 1};
  std::vector<std::string> only;
  std::string json_path, commit;
  app.add_option("--devices", devices, "CUDA devices; one may be named several times")
      ->delimiter(',');
  app.add_option("--only", only, "only entries whose line contains one of these texts");
  app.add_option("--json", json_path, "also write the results to this file");
  app.add_option("--commit", commit, "the commit that is measured, for the JSON");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  Bench bench;
  if (const absl::Status status = bench.Init(devices); !status.ok()) {
    std::cerr << "shard_bench: " << status << "\n";
    return 1;
  }
  nlohmann::json out = {{"device", bench.device().name},
                        {"devices", devices.size()},
                        {"commit", commit},
                        {"entries", nlohmann::json::array()},
                        {"exchange", nlohmann::json::array()}};
  const int failed = MeasureCases(bench, only, out["entries"]);
  MeasureExchange(devices, out["exchange"]);
  if (!json_path.empty()) std::ofstream(json_path) << out.dump(1) << "\n";
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace logitd::bench

int main(int argc, char** argv) { return logitd::bench::Main(argc, argv); }

#include "kernels/sharded_stream.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "kernels/sharded_ops.h"
#include "kernels/shards.h"
#include "kernels/status_macros.h"
#if LOGITD_WITH_CUDA
#include "kernels/cuda/sharded_stream.h"
#endif

namespace logitd {
namespace {

constexpr char kShard[] = "logitd/shard";

// Blocks of all shards that are in memory at once.
constexpr size_t kMostBlockBytes = size_t{64} << 20;
// Rows that share a read of the head, on any backend.
constexpr int64_t kRowStep = 64;

// A thread for each device. Where a part does not end, its thread is left to itself.
class Gang {
 public:
  explicit Gang(int devices) : state_(std::make_shared<State>()) {
    state_->ended.resize(static_cast<size_t>(devices), true);
    for (int i = 0; i < devices && devices > 1; ++i)
      threads_.emplace_back([state = state_, i] { Work(*state, i); });
  }
  ~Gang() {
    std::vector<bool> ended;
    {
      const std::lock_guard lock(state_->mutex);
      state_->stopping = true;
      ended = state_->ended;
    }
    state_->begun.notify_all();
    for (size_t i = 0; i < threads_.size(); ++i) {
      if (ended[i]) {
        threads_[i].join();
      } else {
        threads_[i].detach();
      }
    }
  }
  Gang(const Gang&) = delete;
  Gang& operator=(const Gang&) = delete;

  // Calls body(i) for each device i at the same time, and `look` about every millisecond. Returns
  // nothing when all calls have returned; else, `hang_after` after the first that has, the indices
  // of those that have not. Nothing may be run after that.
  std::vector<int> Run(std::function<void(int)> body, absl::Duration hang_after,
                       absl::FunctionRef<void()> look) {
    if (threads_.empty()) {
      body(0);
      return {};
    }
    std::vector<bool>& ended = state_->ended;
    std::unique_lock lock(state_->mutex);
    state_->body = std::make_shared<std::function<void(int)>>(std::move(body));
    ended.assign(ended.size(), false);
    state_->left = static_cast<int>(ended.size());
    ++state_->round;
    state_->begun.notify_all();
    std::optional<std::chrono::steady_clock::time_point> hung_at;
    while (state_->left > 0) {
      state_->changed.wait_for(lock, std::chrono::milliseconds(1));
      look();
      if (state_->left == 0 || state_->left == static_cast<int>(ended.size())) continue;
      const auto now = std::chrono::steady_clock::now();
      if (!hung_at.has_value()) hung_at = now + absl::ToChronoNanoseconds(hang_after);
      if (now < *hung_at) continue;
      std::vector<int> hung;
      for (size_t i = 0; i < ended.size(); ++i) {
        if (!ended[i]) hung.push_back(static_cast<int>(i));
      }
      return hung;
    }
    state_->body.reset();
    return {};
  }

 private:
  struct State {
    // std::mutex: see ThreadPool.
    std::mutex mutex;
    std::condition_variable begun;
    std::condition_variable changed;
    std::shared_ptr<std::function<void(int)>> body;  // of this round
    uint64_t round = 0;
    std::vector<bool> ended;  // this round, by device
    int left = 0;             // devices that have not ended this round
    bool stopping = false;
  };

  static void Work(State& state, int index) {
    uint64_t seen = 0;
    std::unique_lock lock(state.mutex);
    while (true) {
      state.begun.wait(lock, [&] { return state.stopping || state.round != seen; });
      if (state.stopping) return;
      seen = state.round;
      std::shared_ptr<std::function<void(int)>> body = state.body;
      lock.unlock();
      (*body)(index);
      body.reset();
      lock.lock();
      state.ended[static_cast<size_t>(index)] = true;
      if (--state.left == 0) state.changed.notify_one();
    }
  }

  const std::shared_ptr<State> state_;
  std::vector<std::thread> threads_;
};

// Memory that grows and stays, on 64-byte borders.
class Bytes {
 public:
  std::byte* Get(size_t bytes) {
    if (bytes > bytes_) {
      data_.reset();
      data_.reset(new (std::align_val_t{kBorder}) std::byte[bytes]);
      bytes_ = bytes;
    }
    return data_.get();
  }

 private:
  static constexpr size_t kBorder = 64;
  struct Free {
    void operator()(std::byte* data) const { ::operator delete[](data, std::align_val_t{kBorder}); }
  };
  std::unique_ptr<std::byte[], Free> data_;
  size_t bytes_ = 0;
};

// On devices whose memory is the host's: each writes its block where the merge reads it, so that
// nothing has to be copied.
class HostShardedStream final : public ShardedOps {
 public:
  HostShardedStream(std::vector<std::unique_ptr<Stream>> streams, absl::Duration hang_after)
      : shared_(std::make_shared<Shared>(std::move(streams))),
        hang_after_(hang_after),
        gang_(count()) {}

  absl::Status RunOp(const Op& op) override {
    return Timed([&] {
      return RunIfKnown(
          op, Overloaded{[this](const LinearTopKArgs& args) { return TopK(args); },
                         [this](const LinearSampleArgs& args) { return Sample(args); },
                         [this](const LinearVerifyArgs& args) { return Verify(args); },
                         [this](const LinearCrossEntropyArgs& args) { return LossesOf(args); },
                         [this](const LinearDivergenceArgs& args) { return Divergence(args); }});
    });
  }

  absl::StatusOr<StreamTimes> Wait() override {
    StreamTimes times;
    absl::Status first;
    if (!hung_.ok()) return hung_;
    for (int i = 0; i < count(); ++i) {
      const absl::StatusOr<StreamTimes> waited = streams()[static_cast<size_t>(i)]->Wait();
      first.Update(OfShard(i, waited.status()));
      if (i == 0 && waited.ok()) times = *waited;
    }
    times.kernel_ns = std::exchange(kernel_ns_, 0);
    if (!first.ok()) return first;
    return times;
  }

 private:
  // What a part uses, also one that hangs and goes on when nobody waits for it.
  struct Shared {
    explicit Shared(std::vector<std::unique_ptr<Stream>> all)
        : streams(std::move(all)), statuses(streams.size()) {}
    const std::vector<std::unique_ptr<Stream>> streams;
    std::vector<absl::Status> statuses;  // of the last part, by shard
    std::atomic<bool> abandoned = false;
    Bytes blocks;
    Bytes targets;
    Bytes parts;  // of d_hidden
  };

  const std::vector<std::unique_ptr<Stream>>& streams() const { return shared_->streams; }
  int count() const override { return static_cast<int>(streams().size()); }
  Stream& lead() override { return *streams().front(); }
  const absl::Status& hung() const override { return hung_; }
  std::byte* blocks() const override { return shared_->blocks.Get(0); }

  int64_t RowsAtOnce(size_t row_bytes, const ShardInputs&) override {
    const auto most = static_cast<int64_t>(kMostBlockBytes / row_bytes);
    return most >= kRowStep ? most / kRowStep * kRowStep : std::max<int64_t>(1, most);
  }
  absl::Status BeginStep(const ShardInputs& inputs, size_t bytes) override {
    shared_->blocks.Get(bytes);
    shared_->targets.Get(static_cast<size_t>(inputs.hidden.rows) * streams().size() *
                         sizeof(float));
    return absl::OkStatus();
  }
  absl::Status ExchangeBlocks(size_t) override { return absl::OkStatus(); }
  absl::Status ExchangeTargets(size_t) override { return absl::OkStatus(); }
  absl::StatusOr<std::byte*> VerifyState(int64_t) override { return nullptr; }
  int VerifyPasses(const VerifyArgs& verify) const override {
    return VerifyMergePasses(verify, /*is_host=*/true);
  }

  absl::Status LossesOf(const LinearCrossEntropyArgs& args) {
    const bool supported = args.cross_entropy.max_support > 0;
    if (!supported || !args.cross_entropy.all_supported)
      LOGITD_RETURN_IF_ERROR(WholeLossesOf(args));
    return supported ? SupportedLosses(args) : absl::OkStatus();
  }
  absl::Status WholeLossesOf(const LinearCrossEntropyArgs& args) {
    bool totals = false;
    int32_t max_extra = 0;
    for (int64_t r = 0; r < args.hidden.rows; ++r) {
      const CrossEntropyRow& row = args.cross_entropy.rows[r];
      if (row.active == 0) continue;
      totals |= row.label_smoothing > 0;
      max_extra = std::max(max_extra, row.extra_count);
    }
    return Losses(args, totals, max_extra);
  }

  absl::Status Backward(const LinearCrossEntropyBackwardArgs& whole,
                        const ShardGradient* to) override {
    return Timed([&]() -> absl::Status {
      const int64_t rows = whole.hidden.rows, hidden = whole.hidden.cols;
      auto* const parts = reinterpret_cast<float*>(shared_->parts.Get(
          static_cast<size_t>(rows * hidden) * streams().size() * sizeof(float)));
      if (IsAbandoned()) return absl::OkStatus();
      const std::vector<ShardGradient> gradients(to, to + streams().size());
      LOGITD_RETURN_IF_ERROR(
          OnAll({}, false, [=, cut = ShardsOf(whole.head)](const ShardPlace& at) {
            const int shard = at.shard;
            const ShardGradient& own = gradients[static_cast<size_t>(shard)];
            LinearCrossEntropyBackwardArgs gradient = whole;
            gradient.head = whole.head.shards[shard];
            gradient.d_weight = own.d_weight;
            gradient.d_bias = own.d_bias;
            gradient.d_hidden = {parts + shard * rows * hidden, DType::kF32, rows, hidden, hidden};
            return at.stream.Run(LinearCrossEntropyBackwardPartialArgs{
                .shard = cut.at(shard), .vocab = cut.vocab, .gradient = gradient});
          }));
      return OfShard(
          0,
          lead().Run(LinearCrossEntropyBackwardMergeArgs{
              .shards = count(), .parts = parts, .rows = whole.rows, .d_hidden = whole.d_hidden}));
    });
  }

  // Returns the first error, in the order of the devices; one that loses the device goes before one
  // that does not.
  absl::Status OnAll(const ShardInputs& inputs, bool, const Part& part) override {
    LOGITD_RETURN_IF_ERROR(hung_);
    shared_->abandoned = IsAbandoned();
    const std::vector<int> hung = gang_.Run(
        [shared = shared_, inputs, part, blocks = shared_->blocks.Get(0),
         targets = reinterpret_cast<float*>(shared_->targets.Get(0))](int shard) {
          Stream& stream = *shared->streams[static_cast<size_t>(shard)];
          stream.Watch(&shared->abandoned);
          shared->statuses[static_cast<size_t>(shard)] =
              part({stream, shard, inputs, blocks, targets});
        },
        hang_after_, [this] { shared_->abandoned = IsAbandoned(); });
    if (!hung.empty()) {
      shared_->abandoned = true;
      hung_ = OfShards(hung, absl::InternalError(absl::StrFormat(
                                 "the device has not ended its part %s after another one did",
                                 absl::FormatDuration(hang_after_))));
      return hung_;
    }
    const std::vector<absl::Status>& statuses = shared_->statuses;
    const absl::Status* worst = &statuses.front();
    for (const absl::Status& status : statuses) {
      if (worst->ok() || (absl::IsInternal(status) && !absl::IsInternal(*worst))) worst = &status;
    }
    return OfShard(static_cast<int>(worst - statuses.data()), *worst);
  }

  template <typename Op>
  absl::Status Timed(const Op& op) {
    LOGITD_RETURN_IF_ERROR(hung_);  // first: a part that hangs may still use the memory
    const auto start = std::chrono::steady_clock::now();
    absl::Status status = op();
    const auto spent = std::chrono::steady_clock::now() - start;
    kernel_ns_ += std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count();
    return status;
  }

  const std::shared_ptr<Shared> shared_;
  const absl::Duration hang_after_;
  absl::Status hung_;  // not OK: a device hangs; the answer of all calls
  int64_t kernel_ns_ = 0;
  Gang gang_;
};

bool IsHost(const Backend& backend) { return backend.device().is_host; }

absl::Status CheckDWeight(int shard, const MutableTensorView& d_weight, int64_t tokens,
                          const HeadView& head) {
  const int64_t hidden = head.hidden();
  if (d_weight.data == nullptr || d_weight.rows != tokens || d_weight.cols != hidden ||
      d_weight.row_stride < hidden) {
    return absl::InvalidArgumentError(
        absl::StrFormat("shards[%d].d_weight: got [%d, %d] with row stride %d%s, allowed memory of "
                        "[%d, %d] with row stride >= %d",
                        shard, d_weight.rows, d_weight.cols, d_weight.row_stride,
                        d_weight.data == nullptr ? " and no memory" : "", tokens, hidden, hidden));
  }
  if (d_weight.dtype == head.weight.dtype || d_weight.dtype == DType::kF32) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("shards[%d].d_weight: got %s, allowed %s (the weight's) or f32", shard,
                      Name(d_weight.dtype), Name(head.weight.dtype)));
}

#if LOGITD_WITH_CUDA
bool IsCuda(const Backend& backend) { return backend.device().backend == "cuda"; }
absl::StatusOr<ShardExchange> CudaExchange(absl::Span<Backend* const> backends,
                                           const ShardOptions& options) {
  return cuda::ChooseExchange(backends, options.exchange);
}
absl::StatusOr<std::unique_ptr<ShardedStream>> CreateCudaStream(absl::Span<Backend* const> backends,
                                                                const ShardOptions& options) {
  return cuda::CreateShardedStream(backends, options);
}
#else
bool IsCuda(const Backend&) { return false; }
absl::StatusOr<ShardExchange> CudaExchange(absl::Span<Backend* const>, const ShardOptions&) {
  return ShardExchange::kAuto;
}
absl::StatusOr<std::unique_ptr<ShardedStream>> CreateCudaStream(absl::Span<Backend* const>,
                                                                const ShardOptions&) {
  return absl::UnimplementedError("shard: this build has only the CPU backend");
}
#endif

}  // namespace

absl::StatusOr<ShardExchange> CheckCanShard(absl::Span<Backend* const> backends,
                                            const ShardOptions& options) {
  if (backends.empty() || backends.size() > static_cast<size_t>(kMaxShards)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("shards: got %d devices, allowed 1..%d", backends.size(), kMaxShards));
  }
  for (const Backend* backend : backends) {
    if (IsHost(*backend) == IsHost(*backends.front()) && (IsHost(*backend) || IsCuda(*backend))) {
      continue;
    }
    return absl::FailedPreconditionError(
        absl::StrFormat("shard: got backend %s, allowed cpu or cuda, the same for all devices; on "
                        "others each device holds the whole head",
                        backend->device().backend));
  }
  if (IsHost(*backends.front())) return ShardExchange::kAuto;
  return CudaExchange(backends, options);
}

absl::StatusOr<std::unique_ptr<ShardedStream>> CreateShardedStream(
    absl::Span<Backend* const> backends, const ShardOptions& options) {
  LOGITD_RETURN_IF_ERROR(CheckCanShard(backends, options).status());
  if (!IsHost(*backends.front())) return CreateCudaStream(backends, options);
  std::vector<std::unique_ptr<Stream>> streams;
  for (Backend* backend : backends) {
    absl::StatusOr<std::unique_ptr<Stream>> stream = backend->CreateStream();
    if (!stream.ok()) return OfShard(static_cast<int>(streams.size()), stream.status());
    streams.push_back(*std::move(stream));
  }
  return std::make_unique<HostShardedStream>(std::move(streams), options.hang_after);
}

absl::Status CheckShardGradients(const LinearCrossEntropyBackwardArgs& gradient,
                                 const ShardGradient* shards, int devices) {
  const HeadView& head = gradient.head;
  const int parts = head.shards == nullptr ? 0 : head.shard_count;
  if (parts != devices) {
    return absl::InvalidArgumentError(
        absl::StrFormat("head: got %d shards, allowed %d (the devices)", parts, devices));
  }
  if (shards == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrFormat("shards: got null, allowed an array of %d (the devices)", devices));
  }
  const VocabShards cut = {.vocab = head.vocab(), .count = devices};
  const bool bias = shards[0].d_bias != nullptr;  // the first always has tokens
  for (int i = 0; i < devices; ++i) {
    const int64_t tokens = cut.at(i).tokens;
    if (tokens == 0) continue;
    LOGITD_RETURN_IF_ERROR(CheckDWeight(i, shards[i].d_weight, tokens, head));
    if ((shards[i].d_bias != nullptr) == bias) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("shards[%d].d_bias: got %s, allowed %s (as shards[0])", i,
                        bias ? "null" : "memory", bias ? "memory" : "null"));
  }
  return absl::OkStatus();
}

absl::Status OfShards(absl::Span<const int> shards, absl::Status status) {
  if (!status.ok()) status.SetPayload(kShard, absl::Cord(absl::StrJoin(shards, ",")));
  return status;
}

absl::Status OfShard(int shard, absl::Status status) {
  return OfShards({shard}, std::move(status));
}

std::vector<int> FailedShards(const absl::Status& status) {
  std::vector<int> shards;
  const absl::optional<absl::Cord> payload = status.GetPayload(kShard);
  if (!payload.has_value()) return shards;
  const std::string text(*payload);
  for (const absl::string_view number : absl::StrSplit(text, ',')) {
    int shard = 0;
    if (absl::SimpleAtoi(number, &shard)) shards.push_back(shard);
  }
  return shards;
}

std::optional<int> FailedShard(const absl::Status& status) {
  const std::vector<int> shards = FailedShards(status);
  return shards.empty() ? std::nullopt : std::optional(shards.front());
}

}  // namespace logitd

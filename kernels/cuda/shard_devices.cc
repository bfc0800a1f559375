#include "kernels/cuda/shard_devices.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "kernels/cross_entropy.h"
#include "kernels/cuda/patience.h"
#include "kernels/cuda/sharded_stream.h"
#include "kernels/sample.h"
#include "kernels/status_macros.h"

namespace logitd::cuda {
namespace {

// Memory of every other device for hidden states, parameters of rows, and extra ids where they are
// brought too.
constexpr size_t kHiddenBytes = size_t{64} << 20;
constexpr size_t kRowBytes = size_t{4} << 20;
constexpr size_t kExtraBytes = size_t{4} << 20;
// Rows that a product takes together.
constexpr int64_t kRowStep = 256;
// What the devices exchange first by kNccl.
constexpr size_t kJoinBytes = 256;

constexpr absl::Duration kPollFor = absl::Microseconds(200);
constexpr absl::Duration kLookForErrors = absl::Microseconds(50);
// How long NCCL gets to make communicators: it takes about a second, more on many devices.
constexpr absl::Duration kJoinFor = absl::Seconds(30);
// How long devices get to end what they have when all waits have been ended because none moved.
// After an error of one the others get at least as long, also at the start of the stream.
constexpr absl::Duration kDrainFor = absl::Seconds(2);

// The first device's part of the head.
const HeadView& PartOf(const HeadView& head) {
  return head.shards == nullptr ? head : head.shards[0];
}

}  // namespace

ShardCall::ShardCall(Kind of, const TensorView& states, const HeadView& head, int32_t max_k,
                     uint32_t of_kind)
    : kind(of),
      dtype(head.weight.dtype),
      vocab(head.vocab()),
      hidden(head.hidden()),
      rows_bits(std::bit_width(static_cast<uint64_t>(states.rows))),
      k_bits(std::bit_width(static_cast<uint32_t>(max_k))),
      bias(PartOf(head).bias != nullptr),
      norm(PartOf(head).norm != nullptr),
      softcap(head.softcap > 0),
      options(of_kind) {}

// ---- start

absl::Status ShardDevices::Init(absl::Span<Backend* const> backends, const ShardOptions& options) {
  const absl::StatusOr<ShardExchange> exchange = ChooseExchange(backends, options.exchange);
  if (!exchange.ok()) return exchange.status();
  exchange_ = *exchange;
  hang_after_ = options.hang_after;
  // Else the signals' memory makes a context on another device.
  LOGITD_RETURN_IF_ERROR(
      ToStatus(cudaSetDevice(backends.front()->device().number), "select device"));
  absl::StatusOr<std::unique_ptr<Signals>> signals =
      Signals::Create(static_cast<int>(backends.size()));
  if (!signals.ok()) return OfShard(0, signals.status());
  signals_ = *std::move(signals);
  for (size_t i = 0; i < backends.size(); ++i) {
    const absl::Status status = Add(backends[i]);
    if (!status.ok()) return Stop(OfShard(static_cast<int>(i), status));  // others may hang
  }
  LOGITD_RETURN_IF_ERROR(TrySignals());
  return by_peers() ? absl::OkStatus() : JoinNccl();
}

absl::Status ShardDevices::Add(Backend* backend) {
  absl::StatusOr<std::unique_ptr<Stream>> made = backend->CreateStream();
  if (!made.ok()) return made.status();
  const bool is_first = devices_.empty();
  Device& device = devices_.emplace_back();
  places_.resize(devices_.size());
  device.stream.reset(static_cast<DeviceStream*>(made->release()));
  device.backend = backend;
  const int number = device.stream->device();
  LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(number), "select device"));
  if (is_first) device.stream->LimitWait(hang_after_);
  if (is_first || !by_peers()) {
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaMalloc(&device.blocks, kBlockBytes), "allocate blocks"));
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaMalloc(&device.targets, kTargetBytes), "allocate targets"));
  } else {
    device.blocks = devices_.front().blocks;
    device.targets = devices_.front().targets;
    LOGITD_RETURN_IF_ERROR(ReachFirst(number));
  }
  if (is_first && by_peers()) return absl::OkStatus();
  const size_t extra_bytes = by_peers() ? 0 : kExtraBytes;
  return ToStatus(cudaMalloc(&device.inputs, kHiddenBytes + kRowBytes + extra_bytes),
                  "allocate hidden states");
}

// Lets device `number`, which is the thread's, use the first one's memory.
absl::Status ShardDevices::ReachFirst(int number) {
  if (number == lead().device()) return absl::OkStatus();
  const cudaError_t error = cudaDeviceEnablePeerAccess(lead().device(), 0);
  if (error != cudaErrorPeerAccessAlreadyEnabled) {
    LOGITD_RETURN_IF_ERROR(ToStatus(error, "reach the first device's memory"));
  }
  cudaGetLastError();
  return absl::OkStatus();
}

// Tries what everything else relies on: that streams raise signals, and wait for those of others.
absl::Status ShardDevices::TrySignals() {
  const auto refused = [](absl::string_view why) {
    return absl::UnavailableError(
        absl::StrCat("a stream cannot wait for one of another device: ", why));
  };
  if (const absl::Status status = EnqueueSignals(); !status.ok()) {
    const absl::Status stopped = Stop(status);
    return absl::IsUnavailable(stopped) ? refused(stopped.message()) : stopped;
  }
  LOGITD_RETURN_IF_ERROR(Settle("a stream cannot wait for one of another device: none came"));
  for (int i = 0; i < count(); ++i) {
    if (!signals_->Raised(i)) return refused("the host does not see its signal");
  }
  return lead().Wait().status();
}
absl::Status ShardDevices::EnqueueSignals() {
  LOGITD_RETURN_IF_ERROR(lead().BeginOps());
  LOGITD_RETURN_IF_ERROR(Raise(kReady, lead()));
  for (int i = 1; i < count(); ++i) {
    LOGITD_RETURN_IF_ERROR(stream(i).BeginOps());
    LOGITD_RETURN_IF_ERROR(Await(kReady, stream(i)));
    LOGITD_RETURN_IF_ERROR(Raise(i, stream(i)));
  }
  LOGITD_RETURN_IF_ERROR(lead().BeginOps());
  for (int i = 1; i < count(); ++i) LOGITD_RETURN_IF_ERROR(Await(i, lead()));
  return absl::OkStatus();
}

// Makes the communicators, and has NCCL connect the devices, which its first all-gather does.
absl::Status ShardDevices::JoinNccl() {
  if (nccl_ != nullptr) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<NcclGather>> nccl = NcclGather::Create(Numbers(), kJoinFor);
  if (!nccl.ok()) return nccl.status();
  nccl_ = *std::move(nccl);
  LOGITD_RETURN_IF_ERROR(GatherBlocks(&Device::blocks, kJoinBytes));
  const absl::Status joined = Settle("NCCL: the devices are not joined");
  if (!joined.ok()) LeaveNccl();
  return joined;
}

std::vector<int> ShardDevices::Numbers() {
  std::vector<int> numbers;
  for (int i = 0; i < count(); ++i) numbers.push_back(stream(i).device());
  return numbers;
}

// ---- end

ShardDevices::~ShardDevices() {
  // Nobody has waited for calls that came after the last Wait, or for a start that failed, and what
  // frees memory waits without a limit.
  if (hung_.ok() && !Busy().empty()) static_cast<void>(Settle("the stream ends"));
  // Nobody knows which device hangs in NCCL's joining, but whatever frees its memory waits for it.
  if (!by_peers() && NcclGather::StillJoins(Numbers())) {
    for (Device& device : devices_) static_cast<void>(device.stream.release());
    static_cast<void>(signals_.release());
    return;
  }
  nccl_.reset();  // first: it may use all devices
  // From the last on: cudaFree waits for the device, and all write into the first one's memory.
  for (size_t i = devices_.size(); i-- > 0;) Free(static_cast<int>(i));
  cudaGetLastError();
  if (!hung_.ok()) static_cast<void>(signals_.release());  // a device may still raise its own
}

void ShardDevices::Free(int shard) {
  Device& device = at(shard);
  const int number = device.stream->device();
  // One that hangs may still write into memory of others: by kPeers of the first, by kNccl of all.
  if (IsHung(number) || (!hung_.ok() && (shard == 0 || !by_peers()))) return;
  cudaSetDevice(number);
  if (device.mover != nullptr) cudaStreamDestroy(device.mover);
  if (device.hidden_done != nullptr) cudaEventDestroy(device.hidden_done);
  if (device.moved != nullptr) cudaEventDestroy(device.moved);
  cudaFree(device.gradients.data);
  cudaFree(device.inputs);
  if (shard > 0 && by_peers()) return;  // the others are the first one's
  cudaFree(device.blocks);
  cudaFree(device.targets);
}

// ---- calls

int64_t ShardDevices::RowsAtOnce(size_t row_bytes, size_t hidden_bytes,
                                 int32_t packed_extras) const {
  const size_t target_bytes = sizeof(float) * devices_.size();
  const auto most = static_cast<int64_t>(std::min(
      {kBlockBytes / row_bytes, kHiddenBytes / hidden_bytes, kTargetBytes / target_bytes,
       kRowBytes / std::max(sizeof(CrossEntropyRow), sizeof(SampleRow)),
       kExtraBytes / (sizeof(int32_t) * static_cast<size_t>(std::max(1, packed_extras)))}));
  return most >= kRowStep ? most / kRowStep * kRowStep : std::max<int64_t>(1, most);
}

absl::Status ShardDevices::OnAll(absl::FunctionRef<absl::Status(int)> part) {
  LOGITD_RETURN_IF_ERROR(hung_);
  if (!by_peers()) LOGITD_RETURN_IF_ERROR(JoinNccl());  // after a Stop
  LOGITD_RETURN_IF_ERROR(OfShard(0, lead().BeginOps()));
  LOGITD_RETURN_IF_ERROR(OfShard(0, Raise(kReady, lead())));
  if (waits_on_host_) LOGITD_RETURN_IF_ERROR(StopUnless(WaitFor(kReady, kReady + 1)));
  for (int i = 1; i < count(); ++i) {
    LOGITD_RETURN_IF_ERROR(OfShard(i, stream(i).BeginOps()));
    LOGITD_RETURN_IF_ERROR(OfShard(i, Await(kReady, stream(i))));
    const absl::Status status = part(i);
    // Also where a part of it was enqueued before an error: Wait waits for that.
    LOGITD_RETURN_IF_ERROR(OfShard(i, Raise(i, stream(i))));
    LOGITD_RETURN_IF_ERROR(OfShard(i, status));
  }
  LOGITD_RETURN_IF_ERROR(OfShard(0, lead().BeginOps()));
  return OfShard(0, part(0));
}

absl::Status ShardDevices::Exchange(Gathered gathered, size_t bytes) {
  if (waits_on_host_) LOGITD_RETURN_IF_ERROR(StopUnless(WaitFor(1, count())));
  if (!by_peers()) return GatherBlocks(gathered, bytes);
  for (int i = 1; i < count(); ++i) LOGITD_RETURN_IF_ERROR(OfShard(0, Await(i, lead())));
  return absl::OkStatus();
}

absl::Status ShardDevices::ExchangeSums(absl::Span<const NcclGather::Place> places, size_t floats) {
  if (by_peers()) return Exchange(&Device::blocks, 0);
  if (floats == 0) return absl::OkStatus();
  if (waits_on_host_) LOGITD_RETURN_IF_ERROR(StopUnless(WaitFor(1, count())));
  return KeepNccl(nccl_->EnqueueSum(places, floats));
}

absl::Status ShardDevices::GatherBlocks(Gathered gathered, size_t bytes) {
  for (size_t i = 0; i < devices_.size(); ++i)
    places_[i] = {devices_[i].*gathered, devices_[i].stream->native()};
  return KeepNccl(nccl_->Enqueue(places_, bytes));
}

void ShardDevices::LeaveNccl() {
  if (nccl_ != nullptr) nccl_->Abort();
  nccl_.reset();
}
// Leaves NCCL after an error, which ends the exchanges of earlier calls as well.
absl::Status ShardDevices::KeepNccl(absl::Status status) {
  if (status.ok()) return status;
  LeaveNccl();
  given_up_.Update(status);
  return status;
}

absl::Status ShardDevices::Raise(int signal, DeviceStream& stream) {
  return ToStatus(signals_->Raise(signal, stream.native()), "raise a signal");
}
absl::Status ShardDevices::Await(int signal, DeviceStream& stream) {
  return ToStatus(signals_->Await(signal, stream.native()), "wait for a device");
}

// ---- waiting

absl::StatusOr<StreamTimes> ShardDevices::Wait() {
  LOGITD_RETURN_IF_ERROR(hung_);
  absl::StatusOr<StreamTimes> waited = WaitForAll();
  const absl::Status given_up = std::exchange(given_up_, absl::OkStatus());
  LOGITD_RETURN_IF_ERROR(hung_);
  LOGITD_RETURN_IF_ERROR(given_up);
  return waited;
}

// The parts of other devices are waited for first: what the first device has enqueued may depend on
// them.
absl::StatusOr<StreamTimes> ShardDevices::WaitForAll() {
  if (const absl::Status failed = WaitFor(1, count()); !failed.ok()) return Stop(failed);
  absl::StatusOr<StreamTimes> waited = lead().Wait();
  if (waited.ok()) return waited;
  const absl::Status& failed = waited.status();
  return Stop(absl::IsDeadlineExceeded(failed) ? failed : OfShard(0, failed));
}

absl::Status ShardDevices::Settle(absl::string_view why) {
  absl::Status settled = WaitUntil([this] { return Busy().empty(); });
  settled.Update(FirstError());
  if (settled.ok()) return settled;
  absl::Status stopped = Stop(settled);
  return FailedShard(stopped).has_value() ? stopped : absl::UnavailableError(why);
}

// Waits until the signals [first, end) have risen. Errors: those of WaitUntil.
absl::Status ShardDevices::WaitFor(int first, int end) {
  return WaitUntil([&] {
    while (first < end && signals_->Raised(first)) ++first;
    return first == end;
  });
}

// Waits until `done`: polls at first, because the wake-up of a blocked thread takes as long as a
// decode step. DEADLINE_EXCEEDED: no device has ended a part for hang_after_. Other errors are of a
// device.
absl::Status ShardDevices::WaitUntil(absl::FunctionRef<bool()> done) {
  const absl::Time poll_until = absl::Now() + kPollFor;
  absl::Time look = absl::Now() + kLookForErrors;
  Patience patience(hang_after_);
  uint32_t risen = signals_->Risen();
  while (!done()) {
    const absl::Time now = absl::Now();
    if (now >= look) {  // a device that has failed raises no signal
      look = now + kLookForErrors;
      LOGITD_RETURN_IF_ERROR(FirstError());
    }
    const uint32_t risen_now = signals_->Risen();
    if (std::exchange(risen, risen_now) != risen_now) patience.Renew();
    if (now < poll_until) continue;
    if (!patience.Sleep()) return absl::DeadlineExceededError("a part has not ended");
  }
  return absl::OkStatus();
}

// OK where the device works, or has nothing to do.
absl::Status ShardDevices::ErrorOf(int shard) {
  const cudaError_t state = cudaStreamQuery(stream(shard).native());
  return OfShard(shard, ToStatus(state == cudaErrorNotReady ? cudaSuccess : state, "batch"));
}

absl::Status ShardDevices::FirstError() {
  for (int i = 0; i < count(); ++i) LOGITD_RETURN_IF_ERROR(ErrorOf(i));
  return absl::OkStatus();
}

// The devices that have not ended what they have.
std::vector<int> ShardDevices::Busy() {
  std::vector<int> busy;
  for (int i = 0; i < count(); ++i) {
    const cudaStream_t mover = at(i).mover;
    if (cudaStreamQuery(stream(i).native()) == cudaErrorNotReady ||
        (mover != nullptr && cudaStreamQuery(mover) == cudaErrorNotReady)) {
      busy.push_back(i);
    }
  }
  cudaGetLastError();
  return busy;
}

// ---- giving up

// Ends what the devices have, because one has failed, or none has moved for hang_after_
// (DEADLINE_EXCEEDED). Returns the status of the batch, which the next Wait returns too. Afterwards
// the devices have nothing to do, except those that hang; where one does, the stream is of no use
// any more.
absl::Status ShardDevices::Stop(const absl::Status& failed) {
  absl::Status ended = EndAll(failed);
  given_up_.Update(ended);
  return ended;
}
absl::Status ShardDevices::StopUnless(const absl::Status& waited) {
  return waited.ok() ? waited : Stop(waited);
}

absl::Status ShardDevices::EndAll(const absl::Status& failed) {
  std::vector<bool> late;
  for (int i = 0; i < count(); ++i) late.push_back(i > 0 && !signals_->Raised(i));
  LeaveNccl();
  // After an error of one, the others may be in the middle of their parts.
  const bool none_moved = absl::IsDeadlineExceeded(failed);
  const absl::Duration limit = none_moved ? kDrainFor : std::max(kDrainFor, hang_after_);
  std::vector<int> hung = Drain(limit);
  if (!hung.empty()) {
    // First one that has not ended its part, rather than one that still waits for it.
    std::stable_partition(hung.begin(), hung.end(),
                          [&](int i) { return late[static_cast<size_t>(i)]; });
    return Lose(std::move(hung), limit, failed);
  }
  if (count() > 0 && cudaStreamQuery(lead().native()) == cudaSuccess)
    static_cast<void>(lead().Wait());  // ends its phases
  cudaGetLastError();
  if (!none_moved) return failed;
  LOGITD_RETURN_IF_ERROR(FirstError());
  return absl::UnavailableError(
      absl::StrFormat("shards: no device has ended a part for %s, and all have ended when their "
                      "exchange was given up",
                      absl::FormatDuration(hang_after_)));
}

// Ends all waits, and gives the devices some time to end what they have. Returns those that have
// not.
std::vector<int> ShardDevices::Drain(absl::Duration limit) {
  Patience patience(limit);
  std::vector<int> left;
  do {
    signals_->RaiseAll();
    left = Busy();
  } while (!left.empty() && patience.Sleep());
  return left;
}

// These devices hang: they have not ended what they have within `limit` after `failed`.
absl::Status ShardDevices::Lose(std::vector<int> hung, absl::Duration limit,
                                const absl::Status& failed) {
  for (const int i : hung) SetHung(stream(i).device());
  if (absl::IsDeadlineExceeded(failed)) {
    hung_.Update(OfShards(hung, absl::InternalError(absl::StrFormat(
                                    "CUDA: the device has ended no part of its work for %s",
                                    absl::FormatDuration(hang_after_)))));
    return hung_;
  }
  if (const std::optional<int> first = FailedShard(failed)) {
    std::erase(hung, *first);
    hung.insert(hung.begin(), *first);
  }
  const absl::Status lost =
      absl::IsInternal(failed)
          ? failed
          : absl::InternalError(
                absl::StrFormat("CUDA: a device has not ended its work for %s after an error: %s",
                                absl::FormatDuration(limit), failed.message()));
  hung_.Update(OfShards(hung, lost));
  return hung_;
}

}  // namespace logitd::cuda

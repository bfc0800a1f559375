// CPU side of the kernel bench: every thread reads its share; inputs rotate over a buffer larger
// than the caches.
#ifdef LOGITD_WITH_OPENBLAS
#include <cblas.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "bench/kernels/device.h"
#include "kernels/backend.h"
#include "kernels/status_macros.h"

namespace logitd::bench {
namespace {

constexpr size_t kBufferBytes = size_t{2} << 30;
constexpr int kRuns = 15;
constexpr int kProductRuns = 5;  // of what takes seconds

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

double MicrosecondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
      .count();
}

// Runs body(thread, threads) on every core at once, `runs` times; the median in microseconds.
template <class Body>
double TimeOnAllCores(Body body, int runs = kRuns) {
  const int threads = std::max(1u, std::thread::hardware_concurrency());
  std::vector<double> us;
  for (int run = 0; run < runs; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> workers;
    for (int t = 1; t < threads; ++t) workers.emplace_back([&, t] { body(t, threads); });
    body(0, threads);
    for (std::thread& worker : workers) worker.join();
    us.push_back(MicrosecondsSince(begin));
  }
  return Median(us);
}

uint64_t SumWords(const uint64_t* words, size_t n) {
  uint64_t sums[32] = {};  // a whole vector loop: the compiler keeps several loads in flight
  for (size_t i = 0; i + 32 <= n; i += 32) {
    for (int j = 0; j < 32; ++j) sums[j] ^= words[i + j];
  }
  uint64_t all = 0;
  for (uint64_t sum : sums) all ^= sum;
  return all;
}

class CpuDevice final : public Device {
 public:
  absl::Status Init() {
    auto backend = CreateCpuBackend({});
    if (!backend.ok()) return backend.status();
    backend_ = *std::move(backend);
    auto stream = backend_->CreateStream();
    if (!stream.ok()) return stream.status();
    stream_ = *std::move(stream);
    auto slab = backend_->AllocateSlab(kBufferBytes);
    if (!slab.ok()) return slab.status();
    slab_ = *slab;
    // A few million normals, repeated: drawing 2 GiB of them would take longer than the bench.
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    normals_.resize(size_t{3} << 20);
    for (float& x : normals_) x = normal(random);
    return absl::OkStatus();
  }

  ~CpuDevice() override {
    stream_.reset();
    if (slab_.host != nullptr) backend_->FreeSlab(slab_);
  }

  std::string name() const override { return backend_->device().name; }

  absl::StatusOr<double> ReadCeiling() override {
    Fill(DType::kF32);
    const uint64_t* words = reinterpret_cast<const uint64_t*>(slab_.host);
    const size_t n = kBufferBytes / 8;
    std::atomic<uint64_t> sink{0};
    const double us = TimeOnAllCores([&](int t, int threads) {
      const size_t begin = n / threads * t;
      sink ^= SumWords(words + begin, n / threads);
    });
    return kBufferBytes / us * 1e6;
  }

  absl::StatusOr<double> CopyCeiling() override {
    Fill(DType::kF32);
    const size_t half = kBufferBytes / 2;
    const double us = TimeOnAllCores([&](int t, int threads) {
      const size_t share = half / threads;
      std::memcpy(slab_.host + half + share * t, slab_.host + share * t, share);
    });
    return kBufferBytes / us * 1e6;
  }

  absl::StatusOr<double> TimeTopK(const TopKCase& c) override {
    Fill(c.dtype);
    const size_t entries = static_cast<size_t>(c.rows) * c.k;
    std::vector<SoftmaxTopKRow> rows(c.rows);
    for (int64_t i = 0; i < c.rows; ++i)
      rows[i] = {.first_entry = i * c.k, .temperature = 1.0f, .k = c.k};
    std::vector<int32_t> indices(entries);
    std::vector<float> probs(entries), logsumexp(c.rows);
    std::vector<RowStatus> status(c.rows);
    SoftmaxTopKArgs args{
        .logits = {.dtype = c.dtype, .rows = c.rows, .cols = c.vocab, .row_stride = c.row_stride},
        .rows = rows.data(),
        .max_k = c.k,
        .indices = indices.data(),
        .probs = probs.data(),
        .logsumexp = logsumexp.data(),
        .status = status.data()};
    const size_t bytes = static_cast<size_t>(c.rows) * c.row_stride * SizeOf(c.dtype);
    const size_t parts = std::max<size_t>(1, kBufferBytes / bytes);
    std::vector<double> us;
    for (int run = 0; run < kRuns + 2; ++run) {
      args.logits.data = slab_.host + run % parts * bytes;
      const auto begin = std::chrono::steady_clock::now();
      LOGITD_RETURN_IF_ERROR(stream_->SoftmaxTopK(args));
      if (auto times = stream_->Wait(); !times.ok()) return times.status();
      if (run >= 2) us.push_back(MicrosecondsSince(begin));
    }
    return Median(us);
  }

  absl::StatusOr<double> TimeSample(const SampleCase& c) override {
    Fill(c.dtype);
    const size_t top_entries = static_cast<size_t>(c.rows) * c.row.top_logprobs;
    const int64_t words = MaskWords(c.vocab);
    std::mt19937_64 random(1);
    std::vector<SampleRow> rows(c.rows, c.row);
    std::vector<int32_t> history(c.rows * c.lists.history);
    for (int32_t& id : history) id = static_cast<int32_t>(random() % c.vocab);
    std::vector<uint32_t> mask_words(c.lists.mask ? c.rows * words : 0);
    for (uint32_t& word : mask_words) word = static_cast<uint32_t>(random());
    for (int64_t i = 0; i < c.rows; ++i) {
      rows[i].seed = i;
      rows[i].first_history = i * c.lists.history;
      rows[i].history_count = c.lists.history;
      rows[i].first_mask_word = c.lists.mask ? i * words : -1;
      rows[i].first_top_entry = i * c.row.top_logprobs;
    }
    std::vector<int32_t> tokens(c.rows), ranks(c.rows), top_ids(top_entries);
    std::vector<float> logprobs(c.rows), logsumexp(c.rows), top_logprobs(top_entries);
    std::vector<RowStatus> status(c.rows);
    SampleArgs args{
        .logits = {.dtype = c.dtype, .rows = c.rows, .cols = c.vocab, .row_stride = c.vocab},
        .rows = rows.data(),
        .history = history.data(),
        .mask_words = mask_words.data(),
        .tokens = tokens.data(),
        .logprobs = logprobs.data(),
        .ranks = ranks.data(),
        .logsumexp = logsumexp.data(),
        .top_ids = top_ids.data(),
        .top_logprobs = top_logprobs.data(),
        .status = status.data()};
    const size_t bytes = static_cast<size_t>(c.rows) * c.vocab * SizeOf(c.dtype);
    const size_t parts = std::max<size_t>(1, kBufferBytes / bytes);
    std::vector<double> us;
    for (int run = 0; run < kRuns + 2; ++run) {
      args.logits.data = slab_.host + run % parts * bytes;
      for (SampleRow& row : rows) ++row.position;
      const auto begin = std::chrono::steady_clock::now();
      LOGITD_RETURN_IF_ERROR(stream_->Sample(args));
      if (auto times = stream_->Wait(); !times.ok()) return times.status();
      if (run >= 2) us.push_back(MicrosecondsSince(begin));
    }
    return Median(us);
  }

  absl::StatusOr<double> TimeAttention(const AttentionCase& c) override {
    Fill(c.dtype);
    const int64_t rows = c.rows();
    const size_t bytes = static_cast<size_t>(rows * c.keys) * SizeOf(c.dtype);
    const size_t tensors = c.backward ? 3 : 2;
    std::vector<RowStatus> status(rows);
    std::vector<std::byte> mask(c.mask == MaskKind::kNone
                                    ? 0
                                    : c.batch * c.queries * c.keys *
                                          (c.mask == MaskKind::kBool ? 1 : SizeOf(c.dtype)));
    std::mt19937_64 random(1);
    const size_t element = c.mask == MaskKind::kBool ? 1 : SizeOf(c.dtype);
    for (size_t i = 0; i < mask.size() / element; ++i) {
      const uint64_t bits = random();
      if (c.mask == MaskKind::kBool) {
        mask[i] = std::byte(bits % 4 == 0);
      } else {  // as f32, f16 and bf16 alike: a minus infinity's bits, or a small number's
        const uint32_t value = bits % 4 != 0            ? 0
                               : c.dtype == DType::kF32 ? 0xff800000u
                               : c.dtype == DType::kF16 ? 0xfc00u
                                                        : 0xff80u;
        std::memcpy(&mask[i * element], &value, element);
      }
    }
    const AttentionShape shape = {
        .batch = c.batch, .heads = c.heads, .queries = c.queries, .keys = c.keys, .rows = rows};
    const size_t parts = std::max<size_t>(1, kBufferBytes / (tensors * bytes));
    std::vector<double> us;
    for (int run = 0; run < kRuns + 2; ++run) {
      std::byte* at = slab_.host + run % parts * tensors * bytes;
      const auto tensor = [&](int i) {
        return TensorView{at + i * bytes, c.dtype, rows, c.keys, c.keys};
      };
      const MutableTensorView to = {at + (tensors - 1) * bytes, c.dtype, rows, c.keys, c.keys};
      const auto begin = std::chrono::steady_clock::now();
      if (c.backward) {
        LOGITD_RETURN_IF_ERROR(stream_->AttentionSoftmaxBackward({.shape = shape,
                                                                  .probs = tensor(0),
                                                                  .d_probs = tensor(1),
                                                                  .window = c.window,
                                                                  .d_scores = to,
                                                                  .status = status.data()}));
      } else {
        LOGITD_RETURN_IF_ERROR(
            stream_->AttentionSoftmax({.shape = shape,
                                       .scores = tensor(0),
                                       .window = c.window,
                                       .mask = {.kind = c.mask,
                                                .dtype = c.dtype,
                                                .data = mask.data(),
                                                .batch_stride = c.queries * c.keys,
                                                .query_stride = c.keys},
                                       .probs = to,
                                       .status = status.data()}));
      }
      if (auto times = stream_->Wait(); !times.ok()) return times.status();
      if (run >= 2) us.push_back(MicrosecondsSince(begin));
    }
    filled_ = false;  // results lie where the normals were
    return Median(us);
  }

  absl::StatusOr<double> TimeLoss(const LossCase& c) override {
    Fill(c.dtype);
    Losses losses(c.rows, c.vocab, c.row);
    const size_t bytes = static_cast<size_t>(c.rows * c.vocab) * SizeOf(c.dtype);
    const size_t tensors = c.backward ? 2 : 1;
    const size_t parts = std::max<size_t>(1, kBufferBytes / (tensors * bytes));
    std::vector<double> us;
    for (int run = 0; run < kRuns + 2; ++run) {
      std::byte* at = slab_.host + run % parts * tensors * bytes;
      const TensorView logits = {at, c.dtype, c.rows, c.vocab, c.vocab};
      const auto begin = std::chrono::steady_clock::now();
      if (c.backward) {
        LOGITD_RETURN_IF_ERROR(stream_->CrossEntropyBackward(
            {.logits = logits,
             .rows = losses.rows.data(),
             .logsumexp = losses.logsumexp.data(),
             .upstream = losses.upstream.data(),
             .d_logits = {at + bytes, c.dtype, c.rows, c.vocab, c.vocab}}));
      } else {
        CrossEntropyArgs args = losses.Args();
        args.logits = logits;
        LOGITD_RETURN_IF_ERROR(stream_->CrossEntropy(args));
      }
      if (auto times = stream_->Wait(); !times.ok()) return times.status();
      if (run >= 2) us.push_back(MicrosecondsSince(begin));
    }
    if (c.backward) filled_ = false;  // results lie where the normals were
    return Median(us);
  }

  absl::StatusOr<double> TimeHead(const HeadCase& c) override {
    if (c.op != HeadOp::kLoss && c.op != HeadOp::kLossBackward) {
      return absl::UnimplementedError("only losses of hidden states are timed on the CPU");
    }
    const bool backward = c.op == HeadOp::kLossBackward;
    LOGITD_RETURN_IF_ERROR(CheckFits(c));
    Fill(c.dtype);
    Losses losses(c.rows, c.vocab, {.active = 1, .temperature = 1});
    const TensorView hidden = {slab_.host, c.dtype, c.rows, c.hidden, c.hidden};
    // Small enough that the logits are a model's.
    const HeadView head = {.weight = {slab_.host, c.dtype, c.vocab, c.hidden, c.hidden},
                           .scale = 1 / std::sqrt(static_cast<float>(c.hidden))};
    std::vector<float> d_hidden(backward ? c.rows * c.hidden : 0);
    std::vector<float> d_weight(backward ? c.vocab * c.hidden : 0);
    std::vector<double> us;
    for (int run = 0; run < kProductRuns + 1; ++run) {
      const auto begin = std::chrono::steady_clock::now();
      if (backward) {
        LOGITD_RETURN_IF_ERROR(stream_->LinearCrossEntropyTraining(
            {.gradient = {.hidden = hidden,
                          .head = head,
                          .rows = losses.rows.data(),
                          .upstream = losses.upstream.data(),
                          .d_hidden = {d_hidden.data(), DType::kF32, c.rows, c.hidden, c.hidden},
                          .d_weight = {d_weight.data(), DType::kF32, c.vocab, c.hidden, c.hidden}},
             .answers = losses.Args().answers}));
      } else {
        LOGITD_RETURN_IF_ERROR(stream_->LinearCrossEntropy(
            {.hidden = hidden, .head = head, .cross_entropy = losses.Args()}));
      }
      if (auto times = stream_->Wait(); !times.ok()) return times.status();
      if (run >= 1) us.push_back(MicrosecondsSince(begin));
    }
    return Median(us);
  }

  absl::StatusOr<double> TimeProduct(const HeadCase& c) override {
    LOGITD_RETURN_IF_ERROR(CheckFits(c));
#ifdef LOGITD_WITH_OPENBLAS
    Fill(DType::kF32);
    const auto rows = static_cast<int>(c.rows), hidden = static_cast<int>(c.hidden);
    const auto* weight = reinterpret_cast<const float*>(slab_.host);
    std::vector<float> logits(c.rows * c.vocab);
    return TimeOnAllCores(
        [&](int t, int threads) {
          const int64_t begin = c.vocab * t / threads, end = c.vocab * (t + 1) / threads;
          cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, static_cast<int>(end - begin),
                      hidden, 1, weight, hidden, weight + begin * c.hidden, hidden, 0,
                      logits.data() + begin, static_cast<int>(c.vocab));
        },
        kProductRuns);
#else
    return absl::UnimplementedError("built without OpenBLAS (Debian: libopenblas-serial-dev)");
#endif
  }

 private:
  // Rows of losses and room for their answers.
  struct Losses {
    Losses(int64_t count, int64_t vocab, const CrossEntropyRow& row)
        : rows(count, row),
          loss(count),
          logsumexp(count, std::log(static_cast<float>(vocab)) + 0.5f),
          target_logprob(count),
          entropy(count),
          upstream(count, 1.0f),
          rank(count),
          status(count),
          top_ids(count * row.top_logprobs),
          top_logprobs(count * row.top_logprobs) {
      for (int64_t r = 0; r < count; ++r) {
        rows[r].target = static_cast<int32_t>((r * 7919 + 13) % vocab);
        rows[r].first_top_entry = r * row.top_logprobs;
      }
    }

    CrossEntropyArgs Args() {
      CrossEntropyArgs args;
      args.rows = rows.data();
      args.want = rows[0].want;
      args.max_top_logprobs = rows[0].top_logprobs;
      args.answers = {.loss = loss.data(),
                      .logsumexp = logsumexp.data(),
                      .target_logprob = target_logprob.data(),
                      .rank = rank.data(),
                      .entropy = entropy.data(),
                      .top_ids = top_ids.data(),
                      .top_logprobs = top_logprobs.data(),
                      .status = status.data()};
      return args;
    }

    std::vector<CrossEntropyRow> rows;
    std::vector<float> loss, logsumexp, target_logprob, entropy, upstream;
    std::vector<int32_t> rank;
    std::vector<RowStatus> status;
    std::vector<int32_t> top_ids;
    std::vector<float> top_logprobs;
  };

  // The weights, as f32 too, lie in the slab.
  static absl::Status CheckFits(const HeadCase& c) {
    if (static_cast<size_t>(c.vocab * c.hidden) * sizeof(float) <= kBufferBytes) {
      return absl::OkStatus();
    }
    return absl::ResourceExhaustedError("the weights are more than the buffer holds");
  }

  void Fill(DType dtype) {
    if (filled_ && filled_dtype_ == dtype) return;
    std::vector<uint16_t> halves(normals_.size());
    const std::byte* source = reinterpret_cast<const std::byte*>(normals_.data());
    size_t bytes = normals_.size() * 4;
    if (dtype !=
        DType::kF32) {  // bf16 by truncation; read as f16 the same bits are ordinary numbers too
      for (size_t i = 0; i < normals_.size(); ++i) {
        uint32_t bits;
        std::memcpy(&bits, &normals_[i], 4);
        halves[i] = static_cast<uint16_t>(bits >> 16);
      }
      source = reinterpret_cast<const std::byte*>(halves.data());
      bytes = halves.size() * 2;
    }
    for (size_t at = 0; at < kBufferBytes; at += bytes) {
      std::memcpy(slab_.host + at, source, std::min(bytes, kBufferBytes - at));
    }
    filled_ = true;
    filled_dtype_ = dtype;
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
  Slab slab_;
  std::vector<float> normals_;
  bool filled_ = false;
  DType filled_dtype_ = DType::kF32;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> CreateCpuDevice() {
  auto device = std::make_unique<CpuDevice>();
  LOGITD_RETURN_IF_ERROR(device->Init());
  return device;
}

}  // namespace logitd::bench

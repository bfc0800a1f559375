// Every op on the CPU backend, cut into slices as small as they get: the bits are those of a batch
// that runs as a whole.
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "prometheus/collectable.h"
#include "prometheus/text_serializer.h"
#include "server/engine/engine.h"
#include "server/engine/heads.h"
#include "server/engine/metrics.h"
#include "server/ops/ops.h"

namespace logitd::ops {
namespace {

constexpr int64_t kRows = 150;  // more than two blocks of a linear op
constexpr int64_t kVocab = 1500;
constexpr int64_t kHidden = 24;

using Write = std::function<void(absl::Span<std::byte* const>, const engine::AxisCounts&)>;

class OpJob final : public engine::Job {
 public:
  OpJob(engine::JobSpec spec, const std::vector<float>& payload, Write write)
      : spec_(std::move(spec)), payload_(payload), write_(std::move(write)) {}

  const engine::JobSpec& spec() const override { return spec_; }
  void CopyRowsTo(std::byte* dst, size_t row_stride) override {
    const size_t bytes = static_cast<size_t>(spec_.key.row_elements) * sizeof(float);
    for (int64_t r = 0; r < spec_.rows(); ++r) {
      std::memcpy(dst + static_cast<size_t>(r) * row_stride,
                  payload_.data() + r * spec_.key.row_elements, bytes);
    }
  }
  void WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) override {
    write_(inputs, first);
  }
  void Done(const absl::Status& status, const engine::JobAnswer& answer,
            const engine::JobTimes&) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& output : answer.outputs) {
      answers_.emplace_back(reinterpret_cast<const char*>(output.data()), output.size());
    }
    status_ = status;
    done_.notify_all();
  }

  std::vector<std::string> Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return status_.has_value(); });
    EXPECT_TRUE(status_->ok()) << *status_;
    return answers_;
  }

 private:
  const engine::JobSpec spec_;
  const std::vector<float>& payload_;
  const Write write_;
  std::mutex mutex_;
  std::condition_variable done_;
  std::optional<absl::Status> status_;
  std::vector<std::string> answers_;
};

std::vector<float> Random(int64_t count, uint32_t seed, float scale = 3) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

// One case: makes a job of `rows` rows.
struct Case {
  const char* name;
  const engine::OpTraits* op;
  bool cut;  // false: its rows may not be cut
  std::function<std::shared_ptr<OpJob>(int64_t rows)> make;
};

class SlicesTest : public ::testing::Test {
 protected:
  SlicesTest() : backend_(*CreateCpuBackend({.cpu_threads = 2})) {
    const HeadView view = {.weight = {.data = weight_.data(),
                                      .dtype = DType::kF32,
                                      .rows = kVocab,
                                      .cols = kHidden,
                                      .row_stride = kHidden}};
    head_ = std::make_shared<engine::Head>(
        std::vector<engine::Head::Copy>{{.backend = backend_.get(), .memory = {}, .view = view}},
        engine::HeadInfo{.name = "h"});
  }

  engine::BatchKey Key(const engine::OpTraits& op) const {
    engine::BatchKey key = {.op = &op, .dtype = DType::kF32, .row_elements = kVocab};
    for (const Op& entry : kOps) {
      if (entry.linear == &op) key.row_elements = kHidden, key.head = head_.get();
    }
    return key;
  }
  const std::vector<float>& PayloadOf(const engine::OpTraits& op) const {
    return Key(op).head == nullptr ? logits_ : hidden_;
  }

  template <typename Rows>
  std::shared_ptr<OpJob> MakeJob(const engine::OpTraits& op, Rows filled) {
    auto rows = std::make_shared<Rows>(std::move(filled));
    engine::JobSpec spec;
    FillSpec(*rows, Key(op), &spec);
    return std::make_shared<OpJob>(spec, PayloadOf(op), [rows](auto inputs, const auto& first) {
      WriteInputs(*rows, inputs, first);
    });
  }

  std::shared_ptr<OpJob> TopK(const engine::OpTraits& op, int64_t rows) {
    SoftmaxTopKRows filled;
    for (int32_t r = 0; r < rows; ++r) {
      filled.rows.push_back({.temperature = 0.5f + static_cast<float>(r % 3), .k = 1 + r % 40});
    }
    return MakeJob(op, std::move(filled));
  }

  static SampleRows MakeSampleRows(int64_t rows) {
    SampleRows filled;
    for (int32_t r = 0; r < rows; ++r) {
      SampleRow row = {.first_mask_word = -1,
                       .active = 1,
                       .temperature = 1,
                       .top_p = r % 2 == 0 ? 0.9f : 1,
                       .repetition = 1.2f,
                       .want_rank = true};
      row.seed = static_cast<uint64_t>(r) * 7 + 1;
      row.position = static_cast<uint64_t>(r);
      row.top_k = r % 5 * 10;
      row.top_logprobs = r % 4;
      row.first_history = static_cast<int64_t>(filled.history.size());
      row.history_count = r % 3;
      for (int32_t i = 0; i < r % 3; ++i) filled.history.push_back((r * 31 + i) % kVocab);
      row.first_extra = static_cast<int64_t>(filled.extra_ids.size());
      row.extra_count = r % 2;
      for (int32_t i = 0; i < r % 2; ++i) filled.extra_ids.push_back(r % kVocab);
      filled.rows.push_back(row);
    }
    return filled;
  }
  std::shared_ptr<OpJob> Sample(const engine::OpTraits& op, int64_t rows) {
    return MakeJob(op, MakeSampleRows(rows));
  }

  std::shared_ptr<OpJob> Verify(const engine::OpTraits& op, int64_t rows) {
    VerifyRows filled;
    static_cast<SampleRows&>(filled) = MakeSampleRows(rows);
    for (int64_t r = 0; r < rows; r += 3) {
      filled.sequences.push_back(
          {.first_row = r, .rows = static_cast<int32_t>(std::min<int64_t>(3, rows - r))});
    }
    filled.drafts.resize(static_cast<size_t>(rows));
    return MakeJob(op, std::move(filled));
  }

  std::shared_ptr<OpJob> Score(const engine::OpTraits& op, int64_t rows) {
    CrossEntropyRows filled;
    for (int32_t r = 0; r < rows; ++r) {
      CrossEntropyRow row = {.active = 1, .temperature = 1};
      row.target = static_cast<int32_t>(r * 7 % kVocab);
      row.label_smoothing = r % 2 == 0 ? 0.1f : 0;
      row.z_loss = 1e-3f;
      row.top_logprobs = r % 5;
      row.want = kWantRank | kWantEntropy;
      row.first_extra = static_cast<int64_t>(filled.extra_ids.size());
      row.extra_count = r % 2;
      for (int32_t i = 0; i < r % 2; ++i) filled.extra_ids.push_back(r % kVocab);
      filled.rows.push_back(row);
    }
    return MakeJob(op, std::move(filled));
  }

  // `first` and `second`: the input is hidden states; both are of one head.
  std::shared_ptr<OpJob> Divergence(int64_t rows, bool first, bool second) {
    auto filled = std::make_shared<DivergenceRows>();
    for (int32_t r = 0; r < rows; ++r) {
      filled->rows.push_back({.active = 1,
                              .target = r % 3 == 0 ? kIgnoredTarget : r,
                              .temperature = 1,
                              .reference_temperature = 0.5f + static_cast<float>(r % 2),
                              .top_logprobs = r % 3,
                              .reference_top_logprobs = 2});
    }
    filled->call.reference_elements = second ? kHidden : kVocab;
    engine::BatchKey key = Key(first ? kLinearDivergenceTraits : kDivergenceTraits);
    if (second) key.op = &kLinearDivergenceTraits, key.reference_head = head_.get();
    engine::JobSpec spec;
    FillSpec(*filled, key, &spec);
    const std::vector<float>& reference = second ? other_hidden_ : d_probs_;
    return std::make_shared<OpJob>(
        spec, first ? hidden_ : logits_, [filled, &reference](auto inputs, const auto& at) {
          // Rows of kHidden and of kVocab elements are multiples of 16 bytes.
          std::memcpy(inputs[0], reference.data(),
                      filled->rows.size() * filled->call.reference_stride());
          WriteInputs(*filled, inputs, at);
        });
  }

  std::shared_ptr<OpJob> Attention(int64_t rows, bool backward, bool sinks, DType out) {
    AttentionCall call;
    call.backward = backward;
    call.out_dtype = out;
    call.shape = {.batch = 2, .heads = 3, .queries = 40, .keys = kVocab, .first_row = 17};
    call.shape.rows = rows;
    call.scale = 0.3f;
    call.window = {.right = 0};
    call.sinks = sinks ? 3 : 0;
    call.want_logsumexp = true;
    if (!backward) {
      call.mask = {.kind = MaskKind::kBool, .query_stride = kVocab};
      call.mask_bytes = 40 * kVocab;
    }
    calls_.push_back(std::make_unique<AttentionCall>(call));
    engine::JobSpec spec;
    calls_.back()->FillSpec(&spec);
    const auto copy = [](const auto& values, size_t bytes, std::byte* to) {
      std::memcpy(to, values.data(), bytes);
    };
    return std::make_shared<OpJob>(
        spec, logits_, [=, this](absl::Span<std::byte* const> inputs, const engine::AxisCounts&) {
          const size_t sink_bytes = sinks ? 3 * sizeof(float) : 0;
          if (!backward) {
            for (int64_t i = 0; i < 40 * kVocab; ++i) {
              inputs[0][i] = static_cast<std::byte>(i % 7 == 0);
            }
            copy(sink_values_, sink_bytes, inputs[1]);
            return;
          }
          copy(d_probs_, static_cast<size_t>(rows * kVocab) * sizeof(float), inputs[0]);
          if (!sinks) return;
          copy(lse_, static_cast<size_t>(rows) * sizeof(float), inputs[1]);
          copy(sink_values_, sink_bytes, inputs[2]);
        });
  }

  std::vector<Case> Cases() {
    std::vector<Case> cases;
    const auto add = [&](const char* name, const engine::OpTraits& op, bool cut, auto make) {
      cases.push_back({name, &op, cut, make});
    };
    add("softmax_topk", kSoftmaxTopKTraits, true,
        [this](int64_t n) { return TopK(kSoftmaxTopKTraits, n); });
    add("linear_topk", kLinearTopKTraits, true,
        [this](int64_t n) { return TopK(kLinearTopKTraits, n); });
    add("sample", kSampleTraits, true, [this](int64_t n) { return Sample(kSampleTraits, n); });
    add("linear_sample", kLinearSampleTraits, true,
        [this](int64_t n) { return Sample(kLinearSampleTraits, n); });
    add("verify", kVerifyTraits, false, [this](int64_t n) { return Verify(kVerifyTraits, n); });
    add("linear_verify", kLinearVerifyTraits, false,
        [this](int64_t n) { return Verify(kLinearVerifyTraits, n); });
    add("cross_entropy", kCrossEntropyTraits, true,
        [this](int64_t n) { return Score(kCrossEntropyTraits, n); });
    add("linear_cross_entropy", kLinearCrossEntropyTraits, true,
        [this](int64_t n) { return Score(kLinearCrossEntropyTraits, n); });
    add("divergence", kDivergenceTraits, true,
        [this](int64_t n) { return Divergence(n, false, false); });
    add("linear_divergence", kLinearDivergenceTraits, true,
        [this](int64_t n) { return Divergence(n, true, true); });
    add("linear_divergence beside logits", kLinearDivergenceTraits, true,
        [this](int64_t n) { return Divergence(n, true, false); });
    add("linear_divergence of logits", kLinearDivergenceTraits, true,
        [this](int64_t n) { return Divergence(n, false, true); });
    const auto attention = [&](const char* name, bool backward, bool sinks, DType out) {
      const auto& op = backward ? kAttentionSoftmaxBackwardTraits : kAttentionSoftmaxTraits;
      add(name, op, !(backward && sinks),
          [=, this](int64_t n) { return Attention(n, backward, sinks, out); });
    };
    attention("attention in place", false, true, DType::kF32);
    attention("attention backward", true, false, DType::kF32);
    attention("attention backward to bf16", true, false, DType::kBF16);
    attention("attention backward with sinks", true, true, DType::kF32);
    return cases;
  }

  // The answers of a job that runs after another one of its kind, and in how many slices it ran.
  struct Ran {
    std::vector<std::string> answers;
    int slices;
  };
  Ran Run(const Case& c, absl::Duration max_slice) {
    engine::Metrics metrics(AllNames());
    auto engine = engine::Engine::Create(backend_.get(),
                                         {.slab_payload_bytes = 4 << 20,
                                          .slab_answer_bytes = 4 << 20,
                                          .max_batch_rows = 1000,
                                          .ops = AllTraits(),
                                          .max_slice = max_slice},
                                         &metrics, [](const absl::Status&) { FAIL(); });
    EXPECT_TRUE(engine.ok()) << engine.status();
    const auto submit = [&](int64_t rows) {
      auto job = c.make(rows);
      (*engine)->Submit(job);
      auto answers = job->Wait();
      EXPECT_TRUE((*engine)->WaitIdle(SteadyNow() + absl::Seconds(5)));
      return answers;
    };
    submit(1);
    Ran ran = {.answers = submit(kRows), .slices = -1};
    const std::string text = prometheus::TextSerializer().Serialize(metrics.page()->Collect());
    const std::string name =
        absl::StrCat("\nlogitd_slices_total{op=\"", std::string(c.op->name), "\"} ");
    ran.slices += std::stoi(text.substr(text.find(name) + name.size()));
    return ran;
  }

  const std::vector<float> logits_ = Random(kRows * kVocab, 1);
  const std::vector<float> hidden_ = Random(kRows * kHidden, 2);
  const std::vector<float> other_hidden_ = Random(kRows * kHidden, 7);
  std::vector<float> weight_ = Random(kVocab * kHidden, 3, 0.5f);
  const std::vector<float> d_probs_ = Random(kRows * kVocab, 4);
  const std::vector<float> lse_ = Random(kRows, 5);
  const std::vector<float> sink_values_ = Random(3, 6);
  std::vector<std::unique_ptr<AttentionCall>> calls_;
  std::unique_ptr<Backend> backend_;
  std::shared_ptr<engine::Head> head_;
};

TEST_F(SlicesTest, TheBitsOfARowDoNotDependOnTheSlices) {
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    const Ran whole = Run(c, absl::Hours(1));
    EXPECT_EQ(whole.slices, 1);
    const Ran cut = Run(c, absl::Microseconds(1));
    if (c.cut) {
      EXPECT_GE(cut.slices, 3);
    } else {
      EXPECT_EQ(cut.slices, 1);
    }
    ASSERT_EQ(cut.answers.size(), whole.answers.size());
    for (size_t i = 0; i < whole.answers.size(); ++i) {
      EXPECT_TRUE(cut.answers[i] == whole.answers[i]) << "output " << i;
    }
  }
}

}  // namespace
}  // namespace logitd::ops

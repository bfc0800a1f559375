// The Scorer service, and hidden states through a loaded head, through generated stubs.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "logitd/v1/heads.grpc.pb.h"
#include "logitd/v1/sampler.grpc.pb.h"
#include "logitd/v1/scorer.grpc.pb.h"
#include "tests/e2e/elements.h"
#include "tests/e2e/peers.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/shared_server.h"
#include "tests/tree.h"

namespace logitd::e2e {
namespace {

using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kVocab = 4096;
constexpr int64_t kHidden = 144;

std::string DemoModel() { return ::logitd::testing::InTree("demo/model"); }

// The head of the demo's model, read here without our reader.
class DemoHead {
 public:
  DemoHead() {
    std::ifstream in(DemoModel() + "/model.safetensors", std::ios::binary);
    const std::string file{std::istreambuf_iterator<char>(in), {}};
    uint64_t header = 0;
    std::memcpy(&header, file.data(), sizeof(header));
    const auto read = [&](const std::string& name, size_t count) {
      const size_t entry = file.find(absl::StrCat("\"", name, "\""));
      const size_t offsets = file.find("\"data_offsets\":[", entry) + 16;
      const size_t begin = 8 + header + std::strtoull(file.c_str() + offsets, nullptr, 10);
      return Decode(v1::DTYPE_BF16, file.substr(begin, 2 * count));
    };
    weight_ = read("model.embed_tokens.weight", kVocab * kHidden);
    bias_ = read("lm_head.bias", kVocab);
  }

  std::vector<double> Logits(const std::string& states, int64_t row) const {
    std::vector<double> logits = bias_;
    const std::vector<double> state =
        Decode(v1::DTYPE_BF16, states.substr(static_cast<size_t>(2 * row * kHidden), 2 * kHidden));
    for (size_t i = 0; i < kVocab; ++i) {
      for (size_t d = 0; d < kHidden; ++d) logits[i] += weight_[i * kHidden + d] * state[d];
    }
    return logits;
  }

 private:
  std::vector<double> weight_;
  std::vector<double> bias_;
};

double LogSumExp(const std::vector<double>& x) {
  const double max = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (double v : x) sum += std::exp(v - max);
  return max + std::log(sum);
}

// Random states in bf16.
std::string States(int64_t rows, uint32_t seed) {
  return Encode(v1::DTYPE_BF16, Normal<double>(rows * kHidden, seed, 1));
}

template <typename Request>
Request OfHead(const std::string& states) {
  Request request;
  request.set_dtype(v1::DTYPE_BF16);
  request.set_rows(static_cast<int64_t>(states.size()) / (2 * kHidden));
  request.set_head("demo");
  request.set_hidden_size(kHidden);
  request.set_hidden(states);
  return request;
}

v1::ScoreRequest Scored(const std::string& states) {
  v1::ScoreRequest request = OfHead<v1::ScoreRequest>(states);
  for (int64_t row = 0; row < request.rows(); ++row) {
    request.add_targets(static_cast<int32_t>(row * 977 % kVocab));
  }
  return request;
}

class ScoreTest : public SharedServerTest {
 protected:
  static void SetUpTestSuite() {
    StartServer(
        {absl::StrCat("--head=demo=", DemoModel()), absl::StrCat("--head-root=", DemoModel())});
    head_ = std::make_unique<DemoHead>();
  }

  v1::ScoreResponse Score(const v1::ScoreRequest& request) {
    v1::ScoreResponse response;
    const grpc::Status status = scorer_->Score(Context().get(), request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }

  static inline std::unique_ptr<DemoHead> head_;
  const std::shared_ptr<grpc::Channel> channel_ = Connect(server_->tcp());
  const std::unique_ptr<v1::Scorer::Stub> scorer_ = v1::Scorer::NewStub(channel_);
  const std::unique_ptr<v1::Sampler::Stub> sampler_ = v1::Sampler::NewStub(channel_);
  const std::unique_ptr<v1::Heads::Stub> heads_ = v1::Heads::NewStub(channel_);
};

TEST_F(ScoreTest, HiddenStatesAreScoredWithTheLogitsOfTheirHead) {
  const std::string states = States(7, 1);
  v1::ScoreRequest request = Scored(states);
  request.set_targets(3, -100);
  request.add_temperature(1.5f);
  request.add_label_smoothing(0.1f);
  request.add_top_logprobs(1);
  request.add_extra_ids(11);
  request.set_want_entropy(true);
  const v1::ScoreResponse response = Score(request);
  ASSERT_EQ(response.losses_size(), 7);
  double loss_sum = 0;
  for (int row = 0; row < 7; ++row) {
    std::vector<double> x = head_->Logits(states, row);
    for (double& v : x) v /= 1.5;
    const double lse = LogSumExp(x);
    double mean = 0;
    double entropy = 0;
    for (double v : x) {
      mean += v / kVocab;
      entropy -= std::exp(v - lse) * (v - lse);
    }
    EXPECT_NEAR(response.logsumexp(row), lse, 1e-4);
    EXPECT_NEAR(response.entropies(row), entropy, 1e-3);
    EXPECT_NEAR(response.extra_logprobs(row), x[11] - lse, 1e-4);
    EXPECT_NEAR(response.top_logprobs(row), *std::max_element(x.begin(), x.end()) - lse, 1e-4);
    EXPECT_EQ(response.status(row), v1::ROW_STATUS_OK);
    if (row == 3) {
      EXPECT_EQ(response.losses(row), 0);
      continue;
    }
    const double e = static_cast<double>(0.1f);
    const double logprob = x[static_cast<size_t>(request.targets(row))] - lse;
    EXPECT_NEAR(response.target_logprobs(row), logprob, 1e-4);
    EXPECT_NEAR(response.losses(row), -(1 - e) * logprob + e * (lse - mean), 1e-4);
    loss_sum += response.losses(row);
  }
  EXPECT_EQ(response.totals().counted(), 6);
  EXPECT_DOUBLE_EQ(response.totals().loss_mean(), loss_sum / 6);
}

// Sample with hidden states, then Score of its tokens with its supports.
TEST_F(ScoreTest, SupportsOfSampleGiveItsLogprobsBitByBit) {
  const std::string states = States(8, 3);
  v1::SampleRequest sample = OfHead<v1::SampleRequest>(states);
  sample.add_seed(5);
  for (float temperature : {1.0f, 0.7f, 1.3f, 0.0f, 2.0f, 1.0f, 0.5f, 1.0f}) {
    sample.add_temperature(temperature);
  }
  for (int k : {50, 0, 300, 0, 20, 1, 1000, 7}) sample.add_top_k(k);
  for (float p : {0.9f, 0.3f, 0.99f, 1.0f, 1.0f, 1.0f, 0.5f, 0.8f}) sample.add_top_p(p);
  sample.add_logprob_mode(v1::LOGPROB_MODE_PROCESSED);
  sample.add_want_support(1024);
  for (bool with_logits : {false, true}) {
    v1::ScoreRequest request = OfHead<v1::ScoreRequest>(states);
    if (with_logits) {
      const std::vector<float> logits = Normal(8 * 500, 4);
      sample.clear_head();
      sample.clear_hidden_size();
      sample.set_dtype(v1::DTYPE_F32);
      sample.set_vocab(500);
      sample.set_logits(Of<v1::SampleRequest>(logits, 8).logits());
      request = v1::ScoreRequest();
      request.set_dtype(v1::DTYPE_F32);
      request.set_rows(8);
      request.set_vocab(500);
      request.set_logits(sample.logits());
      sample.set_want_support(0, 500);
    }
    v1::SampleResponse drawn;
    const grpc::Status sampled = sampler_->Sample(Context().get(), sample, &drawn);
    ASSERT_TRUE(sampled.ok()) << sampled.error_message();
    request.mutable_targets()->CopyFrom(drawn.tokens());
    *request.mutable_support_count() = drawn.support_count();
    *request.mutable_support_ids() = drawn.support_ids();
    for (float temperature : sample.temperature()) {
      request.add_temperature(temperature == 0 ? 1 : temperature);
    }
    request.set_targets(5, -100);
    const v1::ScoreResponse response = Score(request);
    ASSERT_EQ(response.target_logprobs_size(), 8);
    for (int row = 0; row < 8; ++row) {
      ASSERT_EQ(drawn.support_size(row), drawn.support_count(row));
      const float want = row == 5 ? 0 : drawn.logprobs(row);
      EXPECT_EQ(std::bit_cast<uint32_t>(response.target_logprobs(row)),
                std::bit_cast<uint32_t>(want))
          << row;
    }
    EXPECT_EQ(response.totals().counted(), 7);

    request.add_label_smoothing(0.1f);
    v1::ScoreResponse refused;
    const grpc::Status status = scorer_->Score(Context().get(), request, &refused);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("allowed none with label_smoothing"));
  }
}

TEST_F(ScoreTest, SkippedRowsAreZerosAndChangeNoOtherRow) {
  std::string states = States(9, 6);
  v1::ScoreRequest request = Scored(states);
  request.add_top_logprobs(2);
  request.set_want_rank(true);
  request.set_want_entropy(true);
  const v1::ScoreResponse whole = Score(request);
  states.replace(static_cast<size_t>(2 * kHidden + 20), 2, "\xff\x7f");  // a NaN in row 1
  v1::ScoreRequest some = Scored(states);
  *some.mutable_top_logprobs() = request.top_logprobs();
  some.set_want_rank(true);
  some.set_want_entropy(true);
  some.set_skip_ignored(true);
  for (const int row : {1, 4, 8}) some.set_targets(row, -100);
  const v1::ScoreResponse response = Score(some);
  for (int row = 0, top = 0; row < 9; ++row) {
    const bool skipped = some.targets(row) == -100;
    EXPECT_EQ(response.status(row), v1::ROW_STATUS_OK);
    EXPECT_EQ(response.top_count(row), skipped ? 0 : 2);
    EXPECT_EQ(response.losses(row), skipped ? 0 : whole.losses(row));
    EXPECT_EQ(response.logsumexp(row), skipped ? 0 : whole.logsumexp(row));
    EXPECT_EQ(response.ranks(row), skipped ? 0 : whole.ranks(row));
    EXPECT_EQ(response.entropies(row), skipped ? 0 : whole.entropies(row));
    for (int i = 0; i < response.top_count(row); ++i, ++top)
      EXPECT_EQ(response.top_ids(top), whole.top_ids(2 * row + i));
  }
  EXPECT_EQ(response.totals().counted(), 6);
  EXPECT_EQ(response.totals().ignored(), 3);
  EXPECT_EQ(response.totals().faulty(), 0);
}

TEST_F(ScoreTest, TopKAndSampleAcceptHiddenStates) {
  const std::string states = States(3, 2);
  v1::TopKRequest topk = OfHead<v1::TopKRequest>(states);
  topk.add_k(1);
  v1::TopKResponse most;
  ASSERT_TRUE(sampler_->TopK(Context().get(), topk, &most).ok());
  v1::SampleRequest sample = OfHead<v1::SampleRequest>(states);
  sample.add_temperature(0);
  v1::SampleResponse drawn;
  ASSERT_TRUE(sampler_->Sample(Context().get(), sample, &drawn).ok());
  for (int row = 0; row < 3; ++row) {
    const std::vector<double> x = head_->Logits(states, row);
    const auto highest = std::max_element(x.begin(), x.end());
    EXPECT_EQ(most.indices(row), highest - x.begin());
    EXPECT_NEAR(most.probs(row), std::exp(*highest - LogSumExp(x)), 1e-4);
    EXPECT_EQ(drawn.tokens(row), highest - x.begin());
    EXPECT_NEAR(drawn.logsumexp(row), LogSumExp(x), 1e-4);
  }
}

TEST_F(ScoreTest, ARowsBitsDoNotDependOnItsBatch) {
  const std::string states = States(40, 3);
  v1::ScoreRequest request = Scored(states);
  const v1::ScoreResponse all = Score(request);
  for (const int row : {0, 17, 39}) {
    v1::ScoreRequest one = OfHead<v1::ScoreRequest>(states.substr(row * 2 * kHidden, 2 * kHidden));
    one.add_targets(request.targets(row));
    const v1::ScoreResponse single = Score(one);
    EXPECT_EQ(std::bit_cast<uint32_t>(single.losses(0)), std::bit_cast<uint32_t>(all.losses(row)));
    EXPECT_EQ(std::bit_cast<uint32_t>(single.logsumexp(0)),
              std::bit_cast<uint32_t>(all.logsumexp(row)));
  }
}

TEST_F(ScoreTest, ANaNInAHiddenStateAffectsOnlyItsRow) {
  std::string states = States(3, 4);
  const v1::ScoreResponse good = Score(Scored(states));
  states.replace(static_cast<size_t>(2 * kHidden + 20), 2, "\xff\x7f");
  const v1::ScoreResponse damaged = Score(Scored(states));
  EXPECT_THAT(damaged.status(),
              ElementsAre(v1::ROW_STATUS_OK, v1::ROW_STATUS_NAN_LOGIT, v1::ROW_STATUS_OK));
  EXPECT_EQ(damaged.losses(0), good.losses(0));
  EXPECT_EQ(damaged.losses(2), good.losses(2));
  EXPECT_EQ(damaged.totals().counted(), 2);
  EXPECT_EQ(damaged.totals().faulty(), 1);
  EXPECT_EQ(damaged.totals().loss_sum(),
            static_cast<double>(good.losses(0)) + static_cast<double>(good.losses(2)));
}

TEST_F(ScoreTest, AnUnknownHeadIsNotFoundAndTheTextNamesTheLoadedHeads) {
  v1::ScoreRequest request = Scored(States(1, 5));
  request.set_head("unknown");
  v1::ScoreResponse response;
  const grpc::Status status = scorer_->Score(Context().get(), request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("demo"));
}

// Messages of ten rows.
v1::ScoreRequest Chunk(const std::string& states, int64_t row, bool first) {
  v1::ScoreRequest request = Scored(states.substr(row * 2 * kHidden, 10 * 2 * kHidden));
  for (int i = 0; i < 10; ++i) request.set_targets(i, static_cast<int32_t>(row + i));
  if (first) {
    request.add_z_loss(0.001f);
    request.set_want_rank(true);
  } else {
    request.clear_dtype();
    request.clear_head();
    request.clear_hidden_size();
  }
  return request;
}

TEST_F(ScoreTest, AStreamKeepsItsSettingsAndTotalsAndCanBeResumed) {
  const std::string states = States(50, 6);
  std::vector<std::string> answers;
  v1::ScoreResponse last;
  {
    const auto context = Context();
    const auto stream = scorer_->ScoreStream(context.get());
    std::thread writer([&] {
      for (int64_t row = 0; row < 50; row += 10) stream->Write(Chunk(states, row, row == 0));
      stream->WritesDone();
    });
    for (int64_t row = 0; stream->Read(&last); row += 10) {
      EXPECT_EQ(last.offset(), row);
      EXPECT_EQ(last.ranks_size(), 10);
      EXPECT_EQ(last.totals().rows(), row + 10);
      answers.push_back(Bits(last));
    }
    writer.join();
    EXPECT_TRUE(stream->Finish().ok());
  }
  ASSERT_EQ(answers.size(), 5u);

  // The same answers and totals if the stream is lost after the second message and resumed.
  v1::ScoreResponse answer;
  {
    const auto context = Context();
    const auto stream = scorer_->ScoreStream(context.get());
    for (int64_t row = 0; row < 20; row += 10) {
      ASSERT_TRUE(stream->Write(Chunk(states, row, row == 0)));
      ASSERT_TRUE(stream->Read(&answer));
      EXPECT_EQ(Bits(answer), answers[static_cast<size_t>(row / 10)]);
    }
    context->TryCancel();
    stream->Finish();
  }
  const auto context = Context();
  const auto stream = scorer_->ScoreStream(context.get());
  for (int64_t row = 20; row < 50; row += 10) {
    v1::ScoreRequest chunk = Chunk(states, row, row == 20);
    if (row == 20) {
      chunk.set_offset(answer.offset() + answer.losses_size());
      *chunk.mutable_totals() = answer.totals();
    }
    ASSERT_TRUE(stream->Write(chunk));
    ASSERT_TRUE(stream->Read(&answer));
    EXPECT_EQ(Bits(answer), answers[static_cast<size_t>(row / 10)]);
  }
  v1::ScoreRequest wrong = Chunk(states, 0, false);
  wrong.set_offset(20);
  ASSERT_TRUE(stream->Write(wrong));
  EXPECT_FALSE(stream->Read(&answer));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("offset: got 20, allowed 50"));
}

TEST_F(ScoreTest, LoadsAndUnloadsUnderTrafficGiveNoWrongAnswer) {
  const v1::ScoreRequest request = Scored(States(5, 8));
  const auto bits_of = [](v1::ScoreResponse response) {
    response.clear_head_version();  // each load has another
    return Bits(response);
  };
  const std::string expected = bits_of(Score(request));
  std::atomic<bool> over = false;
  std::atomic<int> good = 0;
  std::atomic<int> missing = 0;
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] {
      const auto stub = v1::Scorer::NewStub(Connect(server_->tcp()));
      while (!over) {
        v1::ScoreResponse response;
        const grpc::Status status = stub->Score(Context().get(), request, &response);
        if (status.ok()) {
          EXPECT_EQ(bits_of(response), expected);
          ++good;
        } else {
          EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND) << status.error_message();
          ++missing;
        }
      }
    });
  }
  for (int i = 0; i < 10; ++i) {
    absl::SleepFor(absl::Milliseconds(20));
    v1::UnloadHeadRequest unload;
    unload.set_name("demo");
    v1::UnloadHeadResponse unloaded;
    const grpc::Status gone = heads_->Unload(Context().get(), unload, &unloaded);
    EXPECT_TRUE(gone.ok()) << gone.error_message();
    const absl::Time end = absl::Now() + absl::Seconds(20);
    for (const int before = missing; missing == before && absl::Now() < end;) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    v1::LoadHeadRequest load;
    load.set_name("demo");
    load.set_path("model.safetensors");
    const auto context = Context();
    const auto reader = heads_->Load(context.get(), load);
    v1::LoadHeadResponse progress;
    while (reader->Read(&progress)) {
    }
    const grpc::Status back = reader->Finish();
    EXPECT_TRUE(back.ok()) << back.error_message();
    EXPECT_EQ(progress.head().vocab(), kVocab);
  }
  absl::SleepFor(absl::Milliseconds(50));
  over = true;
  for (std::thread& caller : callers) caller.join();
  EXPECT_GT(good, 0);
  EXPECT_GT(missing, 0);
  EXPECT_EQ(bits_of(Score(request)), expected);
}

TEST(ScoreBatchTest, RequestsOfOneHeadShareABatch) {
  ServerProcess server({absl::StrCat("--head=demo=", DemoModel()), "--max-batch-delay=2s"});
  std::vector<std::thread> callers;
  std::atomic<int> shared = 0;
  std::latch connected(4);
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&, i] {
      const auto channel = Connect(server.tcp());
      EXPECT_TRUE(channel->WaitForConnected(absl::ToChronoTime(absl::Now() + absl::Seconds(20))));
      const auto stub = v1::Scorer::NewStub(channel);
      v1::ScoreResponse response;
      connected.arrive_and_wait();
      const grpc::Status status =
          stub->Score(Context().get(), Scored(States(2, static_cast<uint32_t>(i))), &response);
      EXPECT_TRUE(status.ok()) << status.error_message();
      if (response.timings().batch_rows() == 8) ++shared;
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(shared, 4);
}

}  // namespace
}  // namespace logitd::e2e

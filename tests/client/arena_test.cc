// Rows in leased memory, from the client's side: the library, logitctl and the load generator
// against the real server.
#include "client/arena.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/client.h"
#include "logitd/v1/attention.grpc.pb.h"
#include "logitd/v1/sampler.grpc.pb.h"
#include "tests/client/running_logitd.h"
#include "tests/client/scoring_logitd.h"
#include "tests/client/test_values.h"

namespace logitd {
namespace {

using ::logitd::client::Arena;
using ::logitd::testing::Becomes;
using ::logitd::testing::Normal;
using ::logitd::testing::NpyF32;
using ::logitd::testing::Ran;
using ::logitd::testing::RunAndKill;
using ::logitd::testing::RunBinary;
using ::logitd::testing::TempDir;
using ::logitd::testing::TinyHead;
using ::logitd::testing::TopKParams;
using ::logitd::testing::ViewOf;
using ::testing::HasSubstr;

constexpr int64_t kVocab = 1003;
constexpr int64_t kRows = 4;
constexpr int64_t kArenaBytes = int64_t{1} << 20;

// An answer without what differs from run to run.
template <typename Result>
std::string AnswerOf(const absl::StatusOr<Result>& result) {
  if (!result.ok()) return result.status().ToString();
  auto answer = result->answer;
  answer.clear_timings();
  return answer.SerializeAsString();
}

// Calls `use` on a request of `rows` rows of `width` floats, first sent, then from the start and
// the middle of an arena, in one piece, in a piece a row, and with space between the rows. All
// answers must be OK and equal.
template <typename Request, typename Use>
void ExpectEqualAnswers(const Arena& arena, Request request, const std::vector<float>& values,
                        int64_t width, Use use) {
  auto& payload = request.head.empty() ? request.logits : request.hidden;
  payload = {ViewOf(values)};
  const auto sent = use(request);
  ASSERT_TRUE(sent.ok()) << sent.status();
  const std::string expected = AnswerOf(sent);
  request.arena = &arena;
  const size_t row_bytes = static_cast<size_t>(width) * sizeof(float);
  for (const size_t offset : {size_t{0}, size_t{4}, size_t{70000}}) {
    for (const size_t gap : {size_t{0}, size_t{4}, size_t{1000}}) {
      for (const bool one_piece : {true, false}) {
        if (one_piece && gap != 0) continue;
        SCOPED_TRACE(absl::StrCat("offset ", offset, ", gap ", gap, ", one piece ", one_piece));
        payload.clear();
        for (int64_t row = 0; row < request.rows; ++row) {
          char* const to = arena.data() + offset + static_cast<size_t>(row) * (row_bytes + gap);
          std::memcpy(to, values.data() + row * width, row_bytes);
          payload.emplace_back(to, row_bytes);
        }
        if (one_piece) payload = {{arena.data() + offset, values.size() * sizeof(float)}};
        EXPECT_EQ(AnswerOf(use(request)), expected);
      }
    }
  }
}

class ArenaClientTest : public ::logitd::testing::LeasingLogitd {
 protected:
  using LeasingLogitd::LeasingLogitd;

  static client::TopKRequest TopKOf(absl::string_view logits) {
    return {.rows = kRows, .vocab = kVocab, .logits = {logits}, .params = TopKParams({5})};
  }
};

TEST_F(ArenaClientTest, AnswersAreThoseOfRowsThatWereSent) {
  const auto arena = Lease();
  const std::vector<float> logits = Normal(kRows * kVocab, 1);
  ExpectEqualAnswers(*arena, TopKOf(""), logits, kVocab,
                     [this](const auto& request) { return client_->TopK(request); });

  client::SampleRequest sample = {.rows = kRows, .vocab = kVocab};
  sample.params.add_temperature(0.8f);
  sample.params.add_top_p(0.9f);
  sample.params.add_top_logprobs(3);
  for (uint64_t row = 0; row < kRows; ++row) sample.params.add_seed(row);
  ExpectEqualAnswers(*arena, sample, logits, kVocab,
                     [this](const auto& request) { return client_->Sample(request); });

  client::VerifyRequest verify = {.rows = kRows, .vocab = kVocab};
  verify.params.add_sequence_rows(kRows);
  for (int i = 0; i < kRows - 1; ++i) verify.params.add_drafts(i);
  verify.params.add_seed(7);
  ExpectEqualAnswers(*arena, verify, logits, kVocab,
                     [this](const auto& request) { return client_->Verify(request); });

  client::ScoreRequest score = {.rows = kRows, .vocab = kVocab};
  for (int i = 0; i < kRows; ++i) score.params.add_targets(i);
  ExpectEqualAnswers(*arena, score, logits, kVocab,
                     [this](const auto& request) { return client_->Score(request); });
}

TEST_F(ArenaClientTest, HiddenStatesGoToTheHead) {
  const auto arena = Lease();
  const std::vector<float> hidden = Normal(kRows * 2, 2);
  client::TopKRequest topk = {.rows = kRows, .head = "tiny", .hidden_size = 2};
  topk.params = TopKParams({3});
  ExpectEqualAnswers(*arena, topk, hidden, 2,
                     [this](const auto& request) { return client_->TopK(request); });
  client::ScoreRequest score = {.rows = kRows, .head = "tiny", .hidden_size = 2};
  for (int i = 0; i < kRows; ++i) score.params.add_targets(i % 3);
  ExpectEqualAnswers(*arena, score, hidden, 2,
                     [this](const auto& request) { return client_->Score(request); });
}

TEST_F(ArenaClientTest, AStreamOfScoresIsCutInTheArena) {
  const auto client = Connect({.score_message_bytes = 2 * kVocab * int64_t{sizeof(float)}});
  const auto arena = Lease();
  client::ScoreRequest score = {.rows = kRows, .vocab = kVocab};
  for (int i = 0; i < kRows; ++i) score.params.add_targets(i);
  ExpectEqualAnswers(*arena, score, Normal(kRows * kVocab, 3), kVocab, [&](const auto& request) {
    auto result = client->ScoreStream(request);
    if (result.ok()) {
      EXPECT_EQ(result->messages, 2);
    }
    return result;
  });
}

TEST_F(ArenaClientTest, AStreamOfSamplesReadsEachStep) {
  const auto arena = Lease();
  const auto sent = client_->OpenSampleStream();
  const auto shared = client_->OpenSampleStream();
  for (uint32_t step = 0; step < 5; ++step) {
    const std::vector<float> logits = Normal(kVocab, step);
    client::SampleRequest request = {.rows = 1, .vocab = kVocab, .logits = {ViewOf(logits)}};
    request.params.add_seed(step);
    ASSERT_TRUE(sent->Write(request).ok());
    std::memcpy(arena->data(), logits.data(), logits.size() * sizeof(float));
    request.logits = {{arena->data(), logits.size() * sizeof(float)}};
    request.arena = arena.get();
    ASSERT_TRUE(shared->Write(request).ok());
    const std::string expected = AnswerOf(sent->Read());
    EXPECT_EQ(AnswerOf(shared->Read()), expected);
  }
}

TEST_F(ArenaClientTest, APayloadThatTheArenaDoesNotHoldSoIsRefusedUnsent) {
  const auto arena = Lease();
  const std::vector<float> own = Normal(kRows * kVocab, 1);
  const char* const data = arena->data();
  const size_t row = kVocab * sizeof(float);
  const struct {
    std::vector<absl::string_view> pieces;
    std::string text;
  } kCases[] = {
      {{ViewOf(own)}, "outside of it, allowed one in its 1048576 bytes"},
      {{{data + kArenaBytes - 4, kRows * row}}, "outside of it"},
      {{{data, kRows * row - 4}}, "got 16044 bytes in the arena, allowed 4 rows of 4012 bytes"},
      {{}, "got 0 bytes in the arena"},
      {{{data, row}, {data + row, row}}, "got 8024 bytes"},
      {{{data, 2 * row}, {data + 3 * row, 2 * row}}, "2 runs of memory"},
      {{{data, row}, {data + 2 * row, row}, {data + 3 * row, row}, {data + 5 * row, row}},
       "runs of memory"},
      {{{data + 6 * row, row}, {data + 4 * row, row}, {data + 2 * row, row}, {data, row}},
       "4 runs of memory, allowed one run, or 4 rows of 4012 bytes at equal, ascending distances"},
  };
  for (const auto& refused : kCases) {
    client::TopKRequest request = TopKOf("");
    request.logits = refused.pieces;
    request.arena = arena.get();
    const absl::Status status = client_->TopK(request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(refused.text));
  }
}

TEST_F(ArenaClientTest, RefusalsOfTheServerReachTheClient) {
  const auto beyond = Arena::Lease(arena_address(), (4 << 20) + 1);
  EXPECT_EQ(beyond.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(beyond.status().message()), HasSubstr("allowed 1..4194304"));
  const auto most = Lease(3 << 20);
  const auto now = Arena::Lease(arena_address(), 2 << 20);
  EXPECT_EQ(now.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(now.status().message()),
              HasSubstr("allowed 1048576: 3145728 of 4194304"));
  const auto nobody = Arena::Lease("unix:" + dir_.path("nobody"), 1);
  EXPECT_EQ(nobody.status().code(), absl::StatusCode::kUnavailable);
  for (const std::string address : {"", "unix:", "localhost:1", "/tmp/a"}) {
    EXPECT_EQ(Arena::Lease(address, 1).status().code(), absl::StatusCode::kInvalidArgument)
        << address;
  }
  EXPECT_EQ(Arena::Lease(arena_address(), 0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(ArenaClientTest, ALeaseThatHasEndedIsNotFound) {
  v1::SharedRows shared;
  {
    const auto arena = Lease();
    shared = *arena->Find({{arena->data(), 4}}, 1, 4);
  }
  ASSERT_TRUE(AllIsFree());
  client::TopKRequest request = {.rows = 1, .vocab = 1, .params = TopKParams({1})};
  *request.params.mutable_shared() = shared;
  // Sent without the library, which would add an input of its own.
  v1::TopKRequest raw = request.params;
  raw.set_dtype(v1::DTYPE_F32);
  raw.set_rows(1);
  raw.set_vocab(1);
  const auto channel = grpc::CreateChannel(address_, grpc::InsecureChannelCredentials());
  grpc::ClientContext context;
  v1::TopKResponse response;
  const grpc::Status status = v1::Sampler::NewStub(channel)->TopK(&context, raw, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("allowed one whose connection is open"));
}

// A client that is killed at any moment leaves nothing behind, and others go on.
TEST_F(ArenaClientTest, KilledClientsLeaveNothingBehind) {
  const std::vector<float> logits = Normal(kRows * kVocab, 4);
  for (int i = 0; i < 10; ++i) {
    // The server frees what was leased a little later. Until then load_bench gets no lease, and
    // ends.
    ASSERT_TRUE(Becomes([&] {
      return RunAndKill("load_bench",
                        {"--addr", address_, "--arena", arena_address(), "--rows", "64", "--vocab",
                         "3000", "--in-flight", "3", "--warmup", "0", "--duration", "5"},
                        absl::Milliseconds(20 + 25 * i));
    }));
    const auto honest = client_->TopK(TopKOf(ViewOf(logits)));
    EXPECT_TRUE(honest.ok()) << honest.status();
  }
  EXPECT_TRUE(AllIsFree());
  for (int i = 0; i < 4; ++i) {  // and all places of leases
    const auto four = {Lease(1), Lease(1), Lease(1), Lease(1)};
    EXPECT_EQ(four.size(), 4u);
  }
}

// Rows that change while they are read spoil only the answer of their own call.
TEST_F(ArenaClientTest, AClientThatOverwritesItsRowsSpoilsOnlyItsOwnAnswer) {
  const auto arena = Lease();
  std::atomic<bool> stop = false;
  std::thread scribbler([&] {
    auto* const words = reinterpret_cast<volatile uint32_t*>(arena->data());
    for (uint32_t value = 0; !stop; ++value) {
      for (size_t i = 0; i < kRows * kVocab; i += 7) words[i] = value * 2654435761u;
    }
  });
  const std::vector<float> logits = Normal(kRows * kVocab, 5);
  const std::string expected = AnswerOf(client_->TopK(TopKOf(ViewOf(logits))));
  client::TopKRequest shared = TopKOf({arena->data(), kRows * kVocab * sizeof(float)});
  shared.arena = arena.get();
  std::set<std::string> torn_answers;
  for (int i = 0; i < 100; ++i) {
    const auto torn = client_->TopK(shared);
    EXPECT_TRUE(torn.ok()) << torn.status();
    torn_answers.insert(AnswerOf(torn));
    EXPECT_EQ(AnswerOf(client_->TopK(TopKOf(ViewOf(logits)))), expected);
  }
  stop = true;
  scribbler.join();
  EXPECT_GT(torn_answers.size(), 1u) << "the rows did not change while they were read";
}

// What the server answered for an attention tensor, with the large array from wherever it is.
std::string AnswerOf(const absl::StatusOr<client::AttentionResult>& result, absl::string_view out) {
  if (!result.ok()) return result.status().ToString();
  std::string all = out.empty() ? result->values : std::string(out);
  for (const float value : result->logsumexp) absl::StrAppend(&all, " ", value);
  for (const double value : result->d_sinks) absl::StrAppend(&all, " ", value);
  for (const client::AttentionFault& fault : result->faults) {
    absl::StrAppend(&all, " fault ", fault.row, " ", static_cast<int>(fault.status));
  }
  return all;
}

constexpr client::AttentionShape kAttention = {.batch = 2, .heads = 3, .queries = 9, .keys = 70};
constexpr size_t kAttentionBytes = 2 * 3 * 9 * 70 * sizeof(float);

client::AttentionSoftmaxRequest SoftmaxOf(absl::string_view scores) {
  return {.shape = kAttention,
          .scores = scores,
          .scale = 0.5f,
          .window = {.right = 0},
          .sinks = {0.5f, -1, 2},
          .want_logsumexp = true};
}

TEST_F(ArenaClientTest, AttentionIsTheSameToTheBitWhereverItLies) {
  const auto arena = Lease();
  std::vector<float> scores = Normal(2 * 3 * 9 * 70, 11);
  scores[70 * 20 + 3] = std::numeric_limits<float>::quiet_NaN();  // a fault
  const std::vector<float> gradient = Normal(2 * 3 * 9 * 70, 12);
  // One message, and a stream of many.
  for (const int64_t message_bytes : {int64_t{8} << 20, int64_t{1000}}) {
    SCOPED_TRACE(message_bytes);
    auto client =
        client::Client::Create({.address = address_, .attention_message_bytes = message_bytes});
    ASSERT_TRUE(client.ok()) << client.status();
    client::AttentionSoftmaxRequest sent = SoftmaxOf(ViewOf(scores));
    const auto forward = (*client)->AttentionSoftmax(sent);
    ASSERT_TRUE(forward.ok()) << forward.status();
    EXPECT_EQ(forward->faults.size(), 1u);
    const std::string expected = AnswerOf(forward, "");
    for (const size_t offset : {size_t{0}, size_t{4}, size_t{70000}}) {
      for (const bool out : {false, true}) {
        char* const in = arena->data() + offset;
        std::memcpy(in, scores.data(), kAttentionBytes);
        client::AttentionSoftmaxRequest shared = SoftmaxOf({in, kAttentionBytes});
        shared.arena = arena.get();
        // Right after the input: not a byte between.
        if (out) shared.probs = {in + kAttentionBytes, kAttentionBytes};
        EXPECT_EQ(AnswerOf((*client)->AttentionSoftmax(shared),
                           {shared.probs.data(), shared.probs.size()}),
                  expected);
      }
    }
    client::AttentionSoftmaxBackwardRequest back = {.shape = kAttention,
                                                    .probs = forward->values,
                                                    .d_probs = ViewOf(gradient),
                                                    .sinks = {0.5f, -1, 2},
                                                    .logsumexp = forward->logsumexp};
    back.out_dtype = v1::DTYPE_BF16;
    const std::string expected_back = AnswerOf((*client)->AttentionSoftmaxBackward(back), "");
    ASSERT_GT(expected_back.size(), kAttentionBytes / 2) << expected_back;
    char* const probs = arena->data() + 100000;
    std::memcpy(probs, forward->values.data(), kAttentionBytes);
    std::memcpy(probs + kAttentionBytes, gradient.data(), kAttentionBytes);
    back.probs = {probs, kAttentionBytes};
    back.d_probs = {probs + kAttentionBytes, kAttentionBytes};
    back.arena = arena.get();
    EXPECT_EQ(AnswerOf((*client)->AttentionSoftmaxBackward(back), ""), expected_back);
    back.d_scores = {arena->data(), kAttentionBytes / 2};
    EXPECT_EQ(AnswerOf((*client)->AttentionSoftmaxBackward(back),
                       {back.d_scores.data(), back.d_scores.size()}),
              expected_back);
  }
}

TEST_F(ArenaClientTest, AMaskTravelsWithScoresThatDoNot) {
  const auto arena = Lease();
  const std::vector<float> scores = Normal(2 * 3 * 9 * 70, 13);
  const std::string mask(3 * 70, '\0');
  std::string some = mask;
  for (size_t i = 0; i < some.size(); i += 3) some[i] = 1;
  client::AttentionSoftmaxRequest request = SoftmaxOf(ViewOf(scores));
  request.mask = {.kind = v1::MASK_KIND_BOOL, .shape = {1, 3, 1, 70}, .bytes = some};
  const std::string expected = AnswerOf(client_->AttentionSoftmax(request), "");
  std::memcpy(arena->data(), scores.data(), kAttentionBytes);
  request.scores = {arena->data(), kAttentionBytes};
  request.probs = {arena->data() + (1 << 19), kAttentionBytes};
  request.arena = arena.get();
  EXPECT_EQ(
      AnswerOf(client_->AttentionSoftmax(request), {request.probs.data(), request.probs.size()}),
      expected);
}

TEST_F(ArenaClientTest, AnAttentionTensorThatDoesNotLieSoIsRefusedUnsent) {
  const auto arena = Lease();
  const std::vector<float> own = Normal(2 * 3 * 9 * 70, 1);
  char* const data = arena->data();
  std::string outside(kAttentionBytes, 'x');
  const struct {
    absl::string_view scores;
    absl::Span<char> probs;
    std::string text;
  } kCases[] = {
      {ViewOf(own), {}, "outside of it"},
      {{data + kArenaBytes - 4, kAttentionBytes}, {}, "outside of it"},
      {{data, kAttentionBytes}, {data, kAttentionBytes}, "overlaps the input"},
      {{data, kAttentionBytes}, {data + kAttentionBytes - 4, kAttentionBytes}, "overlaps"},
      {{data, kAttentionBytes}, {data + kArenaBytes - 4, kAttentionBytes}, "outside of it"},
      {{data, kAttentionBytes - 4}, {}, "scores: got"},
  };
  for (const auto& refused : kCases) {
    client::AttentionSoftmaxRequest request = SoftmaxOf(refused.scores);
    request.probs = refused.probs;
    request.arena = arena.get();
    const absl::Status status = client_->AttentionSoftmax(request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(refused.text));
  }
  // An answer's array outside is filled from the message.
  client::AttentionSoftmaxRequest request = SoftmaxOf({data, kAttentionBytes});
  std::memcpy(data, own.data(), kAttentionBytes);
  request.arena = arena.get();
  request.probs = absl::MakeSpan(outside);
  const std::string expected = AnswerOf(client_->AttentionSoftmax(SoftmaxOf(ViewOf(own))), "");
  EXPECT_EQ(AnswerOf(client_->AttentionSoftmax(request), outside), expected);
}

// A call that the server refuses leaves the range of its answer as it was.
TEST_F(ArenaClientTest, ARefusedCallWritesNothing) {
  const auto arena = Lease();
  std::memset(arena->data(), 0x5a, kArenaBytes);
  const std::string before(arena->data(), kArenaBytes);
  const auto channel = grpc::CreateChannel(address_, grpc::InsecureChannelCredentials());
  const auto stub = v1::Attention::NewStub(channel);
  const v1::SharedRows input = *arena->Find({{arena->data(), 4096}}, 1, 4096);
  v1::AttentionSoftmaxRequest good;
  good.set_dtype(v1::DTYPE_F32);
  good.set_batch(1);
  good.set_heads(1);
  good.set_queries(4);
  good.set_keys(256);
  *good.mutable_shared() = input;
  *good.mutable_shared_output() = input;
  good.mutable_shared_output()->set_offset(8192);
  const auto call = [&](auto change) {
    v1::AttentionSoftmaxRequest request = good;
    change(&request);
    grpc::ClientContext context;
    v1::AttentionSoftmaxResponse response;
    return stub->Softmax(&context, request, &response);
  };
  const auto refused = [&](grpc::StatusCode code, auto change) {
    const grpc::Status status = call(change);
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_EQ(std::string(arena->data(), kArenaBytes), before);
  };
  refused(grpc::INVALID_ARGUMENT, [](auto* r) { r->mutable_shared_output()->set_offset(4092); });
  refused(grpc::INVALID_ARGUMENT, [](auto* r) { r->mutable_shared_output()->set_offset(8193); });
  refused(grpc::INVALID_ARGUMENT,
          [](auto* r) { r->mutable_shared_output()->set_offset(kArenaBytes - 4092); });
  refused(grpc::NOT_FOUND,
          [](auto* r) { r->mutable_shared_output()->set_lease("abcdefghijklmnop"); });
  refused(grpc::INVALID_ARGUMENT, [](auto* r) { r->set_queries(int64_t{1} << 40); });
  refused(grpc::INVALID_ARGUMENT, [](auto* r) { r->set_queries(int64_t{1} << 62); });
  refused(grpc::INVALID_ARGUMENT, [](auto* r) { r->set_scale(INFINITY); });
  const grpc::Status status = call([](auto*) {});
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_NE(std::string(arena->data(), kArenaBytes), before);
  EXPECT_EQ(std::string(arena->data(), 8192), before.substr(0, 8192));
  EXPECT_EQ(std::string(arena->data() + 12288, 100), before.substr(0, 100));
}

// The client changes everything at all times: input and answer, and takes pages out of the file.
TEST_F(ArenaClientTest, AClientThatOverwritesAnAnswerSpoilsOnlyItsOwn) {
  const auto arena = Lease();
  std::atomic<bool> stop = false;
  std::thread scribbler([&] {
    while (!stop) {
      std::memset(arena->data(), 0x5a, kArenaBytes);
      madvise(arena->data(), kArenaBytes, MADV_REMOVE);
    }
  });
  const std::vector<float> scores = Normal(2 * 3 * 9 * 70, 5);
  const std::string expected = AnswerOf(client_->AttentionSoftmax(SoftmaxOf(ViewOf(scores))), "");
  client::AttentionSoftmaxRequest shared = SoftmaxOf({arena->data(), kAttentionBytes});
  shared.probs = {arena->data() + (1 << 19), kAttentionBytes};
  shared.arena = arena.get();
  for (int i = 0; i < 100; ++i) {
    const auto torn = client_->AttentionSoftmax(shared);
    EXPECT_TRUE(torn.ok()) << torn.status();
    EXPECT_EQ(AnswerOf(client_->AttentionSoftmax(SoftmaxOf(ViewOf(scores))), ""), expected);
  }
  stop = true;
  scribbler.join();
}

// Clients that are killed while answers are written to their memory leave nothing behind.
TEST_F(ArenaClientTest, KilledClientsOfAttentionLeaveNothingBehind) {
  for (int i = 0; i < 8; ++i) {
    ASSERT_TRUE(AllIsFree());
    const std::string file = dir_.Write("scores.npy", NpyF32(256, 256, Normal(256 * 256, 3)));
    const std::string out = dir_.path("out.npy");
    RunAndKill(
        "logitctl",
        {"softmax", "--addr", address_, "--arena", arena_address(), "--scores", file, "--out", out},
        absl::Milliseconds(4 * i));
  }
  EXPECT_TRUE(AllIsFree());
}

TEST_F(ArenaClientTest, TheCommandLineGivesTheSameAttention) {
  const std::string scores = dir_.Write("scores.npy", NpyF32(3, 5, Normal(15, 2)));
  const std::string gradient = dir_.Write("gradient.npy", NpyF32(3, 5, Normal(15, 3)));
  const std::string sent = dir_.path("sent.npy");
  const std::string shared = dir_.path("shared.npy");
  const auto same = [&](std::vector<std::string> command) {
    for (const std::string& out : {sent, shared}) {
      std::vector<std::string> words = command;
      words.insert(words.end(), {"--out", out});
      if (out == shared) words.insert(words.end(), {"--arena", arena_address()});
      const Ran ran = Logitctl(words);
      ASSERT_EQ(ran.code, 0) << ran.err;
    }
    const auto bytes_of = [](const std::string& path) {
      std::ifstream file(path, std::ios::binary);
      return std::string(std::istreambuf_iterator<char>(file), {});
    };
    EXPECT_GT(bytes_of(sent).size(), 15 * sizeof(float));
    EXPECT_EQ(bytes_of(shared), bytes_of(sent));
  };
  same({"softmax", "--scores", scores, "--mask", "causal"});
  same({"softmax", "--scores", scores, "--out-dtype", "f32"});
  const std::string kept = dir_.path("probs.npy");
  std::filesystem::copy_file(sent, kept);
  same({"softmax-backward", "--probs", kept, "--d-probs", gradient});
}

TEST_F(ArenaClientTest, TheCommandLineGivesTheSameAnswer) {
  const std::string file = dir_.Write("rows.npy", NpyF32(2, 3, {1, 2, 3, 3, 2, 1}));
  const std::string hidden = dir_.Write("hidden.npy", NpyF32(2, 2, {1, 2, 3, 4}));
  const std::vector<std::vector<std::string>> kCommands = {
      {"topk", "--logits", file, "--k", "2"},
      {"sample", "--logits", file, "--seed", "1,2", "--temperature", "1"},
      {"sample", "--hidden", hidden, "--head", "tiny", "--temperature", "0"},
  };
  for (std::vector<std::string> command : kCommands) {
    SCOPED_TRACE(command[0]);
    const Ran sent = Logitctl(command);
    ASSERT_EQ(sent.code, 0) << sent.err;
    command.insert(command.end(), {"--arena", arena_address()});
    const Ran shared = Logitctl(command);
    EXPECT_EQ(shared.code, 0) << shared.err;
    const auto rows_of = [](const Ran& ran) { return ran.out.substr(0, ran.out.find("server:")); };
    EXPECT_THAT(rows_of(sent), HasSubstr("token"));
    EXPECT_EQ(rows_of(shared), rows_of(sent));
  }
  const Ran wrong = Logitctl(
      {"sample", "--logits", file, "--temperature", "0", "--arena", "unix:" + dir_.path("nobody")});
  EXPECT_EQ(wrong.code, 3);
  EXPECT_THAT(wrong.err, HasSubstr("--arena-listen"));
  const Ran no_gpu = Logitctl(
      {"topk", "--logits", file, "--k", "1", "--arena", arena_address(), "--arena-kind", "cuda"});
  EXPECT_NE(no_gpu.code, 0);
  EXPECT_THAT(no_gpu.err, HasSubstr("got kind 2 (memory of a GPU), allowed 1"));
  const Ran strange = Logitctl(
      {"topk", "--logits", file, "--k", "1", "--arena", arena_address(), "--arena-kind", "tpu"});
  EXPECT_EQ(strange.code, 2);
}

TEST_F(ArenaClientTest, AServerWithoutAGpuLeasesNoneOfIt) {
  const auto arena = Arena::Lease(arena_address(), 1, client::ArenaKind::kCuda);
  EXPECT_EQ(arena.status().code(), absl::StatusCode::kUnimplemented) << arena.status();
  EXPECT_EQ(Arena::Lease(arena_address(), 1, client::ArenaKind::kCuda, -2).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Arena::Lease(arena_address(), 1, client::ArenaKind::kHost, 0).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(AllIsFree());
}

TEST_F(ArenaClientTest, WriteAndReadStayInTheArena) {
  const auto arena = Lease();
  EXPECT_TRUE(arena->Write(kArenaBytes - 3, "abc").ok());
  std::string back(3, 'x');
  EXPECT_TRUE(arena->Read(kArenaBytes - 3, {back.data(), back.size()}).ok());
  EXPECT_EQ(back, "abc");
  for (const int64_t offset : {int64_t{-1}, kArenaBytes - 2, std::numeric_limits<int64_t>::max()}) {
    EXPECT_EQ(arena->Write(offset, "abc").code(), absl::StatusCode::kOutOfRange) << offset;
    EXPECT_EQ(arena->Read(offset, {back.data(), back.size()}).code(),
              absl::StatusCode::kOutOfRange);
  }
}

TEST_F(ArenaClientTest, TheLoadGeneratorHandsRowsOver) {
  const Ran ran =
      RunBinary("load_bench", {"--addr", address_, "--arena", arena_address(), "--vocab", "100",
                               "--k", "1", "--warmup", "0", "--duration", "0.2"});
  EXPECT_EQ(ran.code, 0) << ran.err << ran.out;
}

// Who may lease where there are identities.
class ArenaOfIdentitiesTest : public ArenaClientTest {
 protected:
  static Flags Tokens(const TempDir& dir, uid_t uid, const std::string& role) {
    return {"--tokens",
            dir.Write("tokens", absl::StrCat(R"({"identities": [{"name": "me", "roles": [")", role,
                                             R"("], "uids": [)", uid, "]}]}"))};
  }
  explicit ArenaOfIdentitiesTest(uid_t uid = geteuid(), const std::string& role = "score")
      : ArenaClientTest(Tokens(own_dir_, uid, role)) {}

 private:
  static inline const TempDir own_dir_;
};

TEST_F(ArenaOfIdentitiesTest, AUserWithARoleThatSendsRowsMay) {
  const auto arena = Arena::Lease(arena_address(), 1);
  EXPECT_TRUE(arena.ok()) << arena.status();
}

class ArenaOfAnotherRoleTest : public ArenaOfIdentitiesTest {
 protected:
  ArenaOfAnotherRoleTest() : ArenaOfIdentitiesTest(geteuid(), "heads") {}
};

TEST_F(ArenaOfAnotherRoleTest, AUserWithoutSuchARoleMayNot) {
  const absl::Status status = Arena::Lease(arena_address(), 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(status.message()), HasSubstr("got identity me with the roles heads"));
}

class ArenaOfAnotherUserTest : public ArenaOfIdentitiesTest {
 protected:
  ArenaOfAnotherUserTest() : ArenaOfIdentitiesTest(geteuid() + 1) {}
};

TEST_F(ArenaOfAnotherUserTest, AUserOfNoIdentityMayNot) {
  const absl::Status status = Arena::Lease(arena_address(), 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("got user ", geteuid())));
}

class NoArenaClientTest : public ::logitd::testing::RunningLogitd {};

TEST_F(NoArenaClientTest, AServerThatLeasesNothingSaysSo) {
  v1::TopKRequest raw = TopKParams({1});
  raw.set_dtype(v1::DTYPE_F32);
  raw.set_rows(1);
  raw.set_vocab(1);
  raw.mutable_shared()->set_lease(std::string(16, 'x'));
  const auto channel = grpc::CreateChannel(address_, grpc::InsecureChannelCredentials());
  grpc::ClientContext context;
  v1::TopKResponse response;
  const grpc::Status status = v1::Sampler::NewStub(channel)->TopK(&context, raw, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("--arena-listen"));
}

}  // namespace
}  // namespace logitd

// Attention through the client library and logitctl: against the real server, and against one that
// misbehaves.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/client.h"
#include "client/tensor_file.h"
#include "formats/half.h"
#include "logitd/v1/attention.grpc.pb.h"
#include "logitd/v1/server.grpc.pb.h"
#include "tests/client/fake_server.h"
#include "tests/client/running_logitd.h"
#include "tests/client/subprocess.h"
#include "tests/client/test_files.h"
#include "tests/client/test_values.h"

namespace logitd {
namespace {

using ::logitd::testing::Becomes;
using ::logitd::testing::BytesOf;
using ::logitd::testing::FloatsOf;
using ::logitd::testing::LittleEndian;
using ::logitd::testing::Normal;
using ::logitd::testing::Npy;
using ::logitd::testing::Ran;
using ::logitd::testing::RunBinary;
using ::logitd::testing::Safetensors;
using ::logitd::testing::TempDir;
using ::logitd::testing::ViewOf;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr float kInf = std::numeric_limits<float>::infinity();

class AttentionTest : public ::logitd::testing::RunningLogitd {};

TEST_F(AttentionTest, CausalWithSinksIsTheDefinition) {
  const std::vector<float> scores = Normal(2 * 3 * 4 * 6, 1);
  const absl::StatusOr<client::AttentionResult> result =
      client_->AttentionSoftmax({.shape = {.batch = 2, .heads = 3, .queries = 4, .keys = 6},
                                 .scores = ViewOf(scores),
                                 .scale = 0.5f,
                                 .window = {.right = 0},
                                 .sinks = {0.0f, 1.0f, -kInf},
                                 .want_logsumexp = true});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->dtype, v1::DTYPE_F32);
  EXPECT_EQ(result->messages, 1);
  EXPECT_THAT(result->faults, IsEmpty());
  EXPECT_GT(result->timings.total_ns(), 0);
  const std::vector<float> probs = FloatsOf(result->values);
  ASSERT_EQ(probs.size(), scores.size());
  ASSERT_EQ(result->logsumexp.size(), 24u);
  const double sinks[] = {0, 1, -static_cast<double>(kInf)};
  for (size_t row = 0; row < 24; ++row) {
    const size_t seen = row % 4 + 3;
    double sum = std::exp(sinks[row / 4 % 3]);
    for (size_t key = 0; key < seen; ++key) sum += std::exp(0.5 * scores[row * 6 + key]);
    EXPECT_NEAR(result->logsumexp[row], std::log(sum), 1e-5);
    for (size_t key = 0; key < 6; ++key) {
      const double want = key < seen ? std::exp(0.5 * scores[row * 6 + key]) / sum : 0;
      EXPECT_NEAR(probs[row * 6 + key], want, 1e-6);
    }
  }
}

// For a server that takes 1 MiB, whatever the form of the mask: chunks border within heads, at
// heads, and at items.
TEST_F(AttentionTest, ATensorOfAnySizeGivesTheSameBitsInAnyNumberOfMessages) {
  const client::AttentionShape shape = {.batch = 2, .heads = 3, .queries = 40, .keys = 50};
  const std::vector<float> scores = Normal(shape.rows() * shape.keys, 2);
  std::mt19937 random(3);
  for (const std::array<int64_t, 4>& mask_shape : {std::array<int64_t, 4>{0, 0, 0, 0},
                                                   {2, 3, 40, 50},
                                                   {1, 1, 40, 50},
                                                   {2, 1, 1, 50},
                                                   {1, 3, 40, 50},
                                                   {1, 1, 1, 50}}) {
    std::string mask(
        static_cast<size_t>(mask_shape[0] * mask_shape[1] * mask_shape[2] * mask_shape[3]), '\0');
    for (char& byte : mask) byte = random() % 3 == 0 ? 1 : 0;
    client::AttentionSoftmaxRequest request = {.shape = shape,
                                               .scores = ViewOf(scores),
                                               .window = {.left = 20, .right = 5},
                                               .sinks = {0, 1, 2},
                                               .want_logsumexp = true};
    if (!mask.empty()) {
      request.mask = {.kind = v1::MASK_KIND_BOOL, .shape = mask_shape, .bytes = mask};
    }
    const absl::StatusOr<client::AttentionResult> whole = client_->AttentionSoftmax(request);
    ASSERT_TRUE(whole.ok()) << whole.status();
    EXPECT_EQ(whole->messages, 1);
    for (const int64_t message_bytes : {400, 3000, 9000, 30000}) {
      const absl::StatusOr<client::AttentionResult> cut =
          Connect({.attention_message_bytes = message_bytes})->AttentionSoftmax(request);
      ASSERT_TRUE(cut.ok()) << cut.status();
      EXPECT_GT(cut->messages, 1);
      EXPECT_EQ(cut->values, whole->values) << absl::StrJoin(mask_shape, ",");
      EXPECT_EQ(cut->logsumexp, whole->logsumexp);
      EXPECT_EQ(cut->faults, whole->faults);
    }
  }
}

TEST_F(AttentionTest, ATensorLargerThanTheServerTakesGoesIntoTheCallersMemory) {
  const client::AttentionShape shape = {.heads = 4, .queries = 700, .keys = 1000};
  auto scores = std::make_shared<const std::vector<float>>(Normal(shape.rows() * shape.keys, 4));
  std::vector<float> probs(scores->size(), -1);
  const absl::StatusOr<client::AttentionResult> result = client_->AttentionSoftmax(
      {.shape = shape,
       .scores = ViewOf(*scores),
       .probs = {reinterpret_cast<char*>(probs.data()), probs.size() * sizeof(float)},
       .owner = scores});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_GT(result->messages, 10);  // 11 MB through 1 MiB
  EXPECT_EQ(result->values, "");
  for (size_t row = 0; row < 2800; ++row) {
    double sum = 0;
    for (size_t key = 0; key < 1000; ++key) sum += probs[row * 1000 + key];
    ASSERT_NEAR(sum, 1, 1e-4) << row;
  }
  EXPECT_TRUE(Becomes([&] { return scores.use_count() == 1; })) << "gRPC holds the payload still";
}

TEST_F(AttentionTest, AGradientAddsUpOverItsMessages) {
  const client::AttentionShape shape = {.batch = 2, .heads = 2, .queries = 30, .keys = 40};
  const std::vector<float> scores = Normal(shape.rows() * shape.keys, 5);
  const std::vector<float> d_probs = Normal(shape.rows() * shape.keys, 6);
  const absl::StatusOr<client::AttentionResult> y = client_->AttentionSoftmax(
      {.shape = shape, .scores = ViewOf(scores), .sinks = {1, 2}, .want_logsumexp = true});
  ASSERT_TRUE(y.ok()) << y.status();
  const client::AttentionSoftmaxBackwardRequest request = {.shape = shape,
                                                           .probs = y->values,
                                                           .d_probs = ViewOf(d_probs),
                                                           .sinks = {1, 2},
                                                           .logsumexp = y->logsumexp,
                                                           .out_dtype = v1::DTYPE_F16};
  const absl::StatusOr<client::AttentionResult> whole = client_->AttentionSoftmaxBackward(request);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(whole->values.size(), scores.size() * 2);
  const std::vector<float> probs = FloatsOf(y->values);
  double d_sinks[2] = {0, 0};
  for (size_t row = 0; row < 120; ++row) {
    double dot = 0;
    for (size_t key = 0; key < 40; ++key) dot += probs[row * 40 + key] * d_probs[row * 40 + key];
    d_sinks[row / 30 % 2] -= std::exp((row / 30 % 2 == 0 ? 1 : 2) - y->logsumexp[row]) * dot;
  }
  ASSERT_EQ(whole->d_sinks.size(), 2u);
  for (size_t head : {0, 1}) EXPECT_NEAR(whole->d_sinks[head], d_sinks[head], 1e-4);
  const absl::StatusOr<client::AttentionResult> cut =
      Connect({.attention_message_bytes = 5000})->AttentionSoftmaxBackward(request);
  ASSERT_TRUE(cut.ok()) << cut.status();
  EXPECT_GT(cut->messages, 5);
  EXPECT_EQ(cut->values, whole->values);
  for (size_t head : {0, 1}) EXPECT_NEAR(cut->d_sinks[head], whole->d_sinks[head], 1e-9);
}

TEST_F(AttentionTest, SizesThatDisagreeAreRefusedUnsent) {
  const std::vector<float> scores = Normal(24, 1);
  std::string mask(4, '\0');
  std::string small(10, '\0');
  struct Case {
    client::AttentionSoftmaxRequest request;
    const char* text;
  };
  const client::AttentionShape shape = {.heads = 2, .queries = 3, .keys = 4};
  const Case cases[] = {
      {{.shape = {.heads = 2, .queries = 3, .keys = 5}, .scores = ViewOf(scores)},
       "scores: got 96 bytes, but the shape makes that 120"},
      {{.shape = {.heads = 2, .queries = 0, .keys = 4}, .scores = ViewOf(scores)},
       "shape: got [1,2,0,4]"},
      {{.shape = {.heads = int64_t{1} << 40, .queries = int64_t{1} << 40, .keys = 4},
        .scores = ViewOf(scores)},
       "a number of bytes that 63 bits hold"},
      {{.shape = shape,
        .scores = ViewOf(scores),
        .mask = {.kind = v1::MASK_KIND_BOOL, .shape = {1, 1, 1, 3}, .bytes = mask}},
       "mask.shape: got [1,1,1,3], allowed [1 or 1,2 or 1,3 or 1,4]"},
      {{.shape = shape,
        .scores = ViewOf(scores),
        .mask = {.kind = v1::MASK_KIND_BOOL, .shape = {1, 2, 1, 4}, .bytes = mask}},
       "mask: got 4 bytes, but the shape makes that 8"},
      {{.shape = shape, .scores = ViewOf(scores), .probs = absl::MakeSpan(small)},
       "probs: got 10 bytes, but the shape makes that 96"},
  };
  for (const Case& c : cases) {
    const absl::Status status = client_->AttentionSoftmax(c.request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.text));
  }
  // 1.2 MB a row, where the server takes 1 MiB.
  const std::vector<float> wide(300000);
  const absl::Status status =
      client_->AttentionSoftmax({.shape = {.queries = 1, .keys = 300000}, .scores = ViewOf(wide)})
          .status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("a row of 1200000 bytes, with its mask 1200000, is more than one message "
                        "carries: 1048576 bytes"));
  // What the server has to say of the rest keeps its words.
  const absl::Status words =
      client_->AttentionSoftmax({.shape = shape, .scores = ViewOf(scores), .sinks = {1}}).status();
  EXPECT_THAT(std::string(words.message()), HasSubstr("sinks: got 1 values, allowed 0 or 2"));
}

// --- a server that misbehaves

class FakeAttention final
    : public v1::Attention::Service,
      public testing::StreamHandler<v1::AttentionSoftmaxRequest, v1::AttentionSoftmaxResponse> {
 public:
  using StreamHandler::StreamHandler;
  std::string address() const { return server_.address(); }
  grpc::Status SoftmaxStream(grpc::ServerContext*, Stream* stream) override {
    return Handle(stream);
  }

 private:
  const testing::LocalServer server_{this};
};

// Answers a message of rows of four floats with the floats themselves.
v1::AttentionSoftmaxResponse Echo(const v1::AttentionSoftmaxRequest& request, int64_t first_row) {
  v1::AttentionSoftmaxResponse response;
  response.set_first_row(first_row);
  response.set_rows(static_cast<int64_t>(request.scores().size()) / 16);
  response.set_dtype(v1::DTYPE_F32);
  response.set_probs(request.scores());
  return response;
}

absl::StatusOr<client::AttentionResult> SendTenRows(const FakeAttention& server) {
  const std::vector<float> scores = Normal(40, 7);
  const auto client = *client::Client::Create(
      {.address = server.address(), .deadline = absl::Seconds(20), .attention_message_bytes = 32});
  absl::StatusOr<client::AttentionResult> result =
      client->AttentionSoftmax({.shape = {.queries = 10, .keys = 4}, .scores = ViewOf(scores)});
  EXPECT_EQ(result.ok() ? absl::string_view(result->values) : ViewOf(scores), ViewOf(scores));
  return result;
}

TEST(AttentionFaultTest, NoMessageIsLargerThanTheClientAllows) {
  std::atomic<size_t> largest = 0;
  const FakeAttention server([&](int, FakeAttention::Stream* stream) {
    v1::AttentionSoftmaxRequest request;
    for (int64_t row = 0; stream->Read(&request);) {
      largest = std::max<size_t>(largest, request.ByteSizeLong());
      const v1::AttentionSoftmaxResponse answer = Echo(request, row);
      row += answer.rows();
      stream->Write(answer);
    }
    return grpc::Status::OK;
  });
  const std::vector<float> scores = Normal(400, 7);
  const auto send = [&](int64_t most) {
    const auto client = *client::Client::Create(
        {.address = server.address(), .deadline = absl::Seconds(20), .max_message_bytes = most});
    return client->AttentionSoftmax(
        {.shape = {.queries = 100, .keys = 4}, .scores = ViewOf(scores)});
  };
  const absl::StatusOr<client::AttentionResult> result = send(400);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->values, ViewOf(scores));
  EXPECT_LE(largest, 400);
  EXPECT_GT(largest, 300);  // and not much smaller
  const absl::StatusOr<client::AttentionResult> refused = send(40);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("a row of 16 bytes"));
}

TEST(AttentionFaultTest, AStreamIsTriedAgainFromItsStart) {
  const FakeAttention server([](int call, FakeAttention::Stream* stream) {
    v1::AttentionSoftmaxRequest request;
    int64_t row = 0;
    while (stream->Read(&request)) {
      EXPECT_EQ(request.queries(), row == 0 ? 10 : 0);
      stream->Write(Echo(request, row));
      row += 2;
      if (call < 3 && row == 4 * call) {
        return grpc::Status(grpc::StatusCode::UNAVAILABLE, "not now");
      }
    }
    return grpc::Status::OK;
  });
  const absl::StatusOr<client::AttentionResult> result = SendTenRows(server);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->attempts, 3);
  EXPECT_EQ(result->messages, 5);
}

TEST(AttentionFaultTest, AnAnswerThatIsNotTheRowsAskedForIsInternal) {
  using Response = v1::AttentionSoftmaxResponse;
  void (*const damages[])(Response*) = {
      [](Response* r) { r->set_first_row(r->first_row() + 1); },
      [](Response* r) { r->mutable_probs()->pop_back(); },
      [](Response* r) { r->clear_probs(); },
      [](Response* r) { r->set_dtype(v1::DTYPE_F16); },
      [](Response* r) { r->add_fault_rows(1); },
      [](Response* r) { r->set_logsumexp("1234"); },
  };
  for (const auto damage : damages) {
    const FakeAttention server([&](int, FakeAttention::Stream* stream) {
      v1::AttentionSoftmaxRequest request;
      for (int64_t row = 0; stream->Read(&request); row += 2) {
        v1::AttentionSoftmaxResponse answer = Echo(request, row);
        if (row == 4) damage(&answer);
        stream->Write(answer);
      }
      return grpc::Status::OK;
    });
    EXPECT_EQ(SendTenRows(server).status().code(), absl::StatusCode::kInternal);
  }
}

TEST(AttentionFaultTest, TooFewAndTooManyAnswersAreInternal) {
  for (const bool more : {false, true}) {
    const FakeAttention server([&](int, FakeAttention::Stream* stream) {
      v1::AttentionSoftmaxRequest request;
      int64_t row = 0;
      for (; stream->Read(&request) && (more || row < 6); row += 2) {
        stream->Write(Echo(request, row));
      }
      if (more) stream->Write(Echo(request, row));
      return grpc::Status::OK;
    });
    const absl::Status status = SendTenRows(server).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  }
}

// --- logitctl

std::string NpyOf(const std::string& descr, const std::vector<int64_t>& shape,
                  const std::string& data) {
  return Npy(absl::StrFormat("{'descr': '%s', 'fortran_order': False, 'shape': (%s,), }\n", descr,
                             absl::StrJoin(shape, ", ")),
             data);
}

TEST_F(AttentionTest, LogitctlSoftmaxWritesWhatItWasAskedFor) {
  const std::vector<float> scores = {0, 0, 0, 0, 0, 0};
  const std::string file = dir_.Write("scores.npy", NpyOf("<f4", {2, 3}, BytesOf(scores)));
  const std::string mask = dir_.Write("mask.npy", NpyOf("|b1", {3}, std::string("\0\0\1", 3)));
  const std::string sinks = dir_.Write("sinks.npy", NpyOf("<f4", {1}, BytesOf<float>({0})));
  const std::string out = dir_.path("probs.npy");
  const std::string lse = dir_.path("lse.npy");
  Ran ran = Logitctl({"softmax", "--scores", file, "--mask", "causal", "--sinks", sinks, "--out",
                      out, "--logsumexp", lse, "--format", "json"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  absl::StatusOr<client::FileTensor> probs = client::LoadTensor(out);
  ASSERT_TRUE(probs.ok()) << probs.status();
  EXPECT_THAT(probs->shape, ElementsAre(2, 3));
  // Two keys and the sink; three and the sink.
  const std::vector<float> got = FloatsOf(probs->bytes);
  const float want[] = {1 / 3.0f, 1 / 3.0f, 0, 0.25f, 0.25f, 0.25f};
  for (size_t i = 0; i < 6; ++i) EXPECT_NEAR(got[i], want[i], 1e-6) << i;
  const absl::StatusOr<client::FileTensor> sums = client::LoadTensor(lse);
  ASSERT_TRUE(sums.ok()) << sums.status();
  EXPECT_NEAR(FloatsOf(sums->bytes)[1], std::log(4.0), 1e-6);
  const nlohmann::json json = nlohmann::json::parse(ran.out);
  EXPECT_EQ(json["shape"], nlohmann::json({2, 3}));
  EXPECT_EQ(json["dtype"], "DTYPE_F32");
  EXPECT_EQ(json["out"], out);
  EXPECT_EQ(json["fault_rows"], nlohmann::json::array());
  EXPECT_GT(json["timings"]["total_ns"], 0);

  // With the mask of booleans and a window that leaves the first query only that key: no key.
  ran = Logitctl({"softmax", "--scores", file, "--mask", mask, "--window", "0,inf", "--out", out});
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, AllOf(HasSubstr("[2,3] f32 to "), HasSubstr("row 1: EMPTY_SUPPORT"),
                             HasSubstr("messages 1")));
  probs = client::LoadTensor(out);
  ASSERT_TRUE(probs.ok());
  EXPECT_EQ(FloatsOf(probs->bytes), (std::vector<float>{0, 1, 0, 0, 0, 0}));
}

TEST_F(AttentionTest, LogitctlTakesBf16AndAddsAMask) {
  std::string data;
  for (int i = 0; i < 4; ++i) data += LittleEndian(formats::FloatToBF16(0), 2);
  const std::string file = dir_.Write(
      "scores.safetensors",
      Safetensors(R"({"x":{"dtype":"BF16","shape":[2,1,2],"data_offsets":[0,8]}})", data));
  const std::string mask = dir_.Write(
      "mask.npy", NpyOf("<f4", {2, 1, 1}, BytesOf<float>({0, 0})));  // not the keys' number
  Ran ran =
      Logitctl({"softmax", "--scores", file, "--mask", mask, "--out", dir_.path("p.safetensors")});
  EXPECT_EQ(ran.code, 2);
  EXPECT_THAT(ran.err, HasSubstr("mask.shape: got [1,2,1,1], allowed [1 or 1,2 or 1,1 or 1,2]"));
  dir_.Write("mask.npy", NpyOf("<f4", {2, 1, 2}, BytesOf<float>({0, std::log(3.0f), 0, -kInf})));
  const std::string out = dir_.path("p.safetensors");
  ran = Logitctl({"softmax", "--scores", file, "--mask", mask, "--out", out});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const absl::StatusOr<client::FileTensor> probs = client::LoadTensor(out);
  ASSERT_TRUE(probs.ok()) << probs.status();
  EXPECT_EQ(probs->dtype, v1::DTYPE_BF16);
  EXPECT_THAT(probs->shape, ElementsAre(2, 1, 2));
  std::vector<float> got;
  for (size_t i = 0; i < 4; ++i) {
    uint16_t bits;
    std::memcpy(&bits, probs->bytes.data() + 2 * i, 2);
    got.push_back(formats::BF16ToFloat(bits));
  }
  EXPECT_THAT(got, ElementsAre(0.25f, 0.75f, 1, 0));
}

TEST_F(AttentionTest, LogitctlSoftmaxBackwardPrintsTheSinksGradient) {
  // y = 1/3 each with a sink of 0: d = 1/3 * ([1, 0] - 1/3) ; the sink's -1/3 * 1/3.
  const float third = 1 / 3.0f;
  const std::string y = dir_.Write("y.npy", NpyOf("<f4", {1, 2}, BytesOf<float>({third, third})));
  const std::string dy = dir_.Write("dy.npy", NpyOf("<f4", {1, 2}, BytesOf<float>({1, 0})));
  const std::string sinks = dir_.Write("sinks.npy", NpyOf("<f4", {1}, BytesOf<float>({0})));
  const std::string lse =
      dir_.Write("lse.npy", NpyOf("<f4", {1}, BytesOf<float>({std::log(3.0f)})));
  const std::string out = dir_.path("dx.npy");
  const Ran ran = Logitctl({"softmax-backward", "--probs", y, "--d-probs", dy, "--sinks", sinks,
                            "--logsumexp", lse, "--scale", "2", "--out", out, "--format", "json"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const absl::StatusOr<client::FileTensor> dx = client::LoadTensor(out);
  ASSERT_TRUE(dx.ok()) << dx.status();
  EXPECT_NEAR(FloatsOf(dx->bytes)[0], 4 / 9.0, 1e-6);
  EXPECT_NEAR(FloatsOf(dx->bytes)[1], -2 / 9.0, 1e-6);
  const nlohmann::json json = nlohmann::json::parse(ran.out);
  ASSERT_EQ(json["d_sinks"].size(), 1u);
  EXPECT_NEAR(json["d_sinks"][0].get<double>(), -1 / 9.0, 1e-6);
}

TEST(AttentionUsageTest, BadUsageIs2AndSaysWhy) {
  TempDir dir;
  const std::string npy = dir.Write("a.npy", NpyOf("<f4", {1, 2}, BytesOf<float>({0, 0})));
  const std::string row = dir.Write("row.npy", NpyOf("<f4", {2}, BytesOf<float>({0, 0})));
  const std::string half = dir.Write("half.npy", NpyOf("<f2", {1, 2}, std::string(4, '\0')));
  const std::string flags = dir.Write("flags.npy", NpyOf("|b1", {1, 2}, std::string(2, '\0')));
  const std::string out = dir.path("out.npy");
  struct Case {
    std::vector<std::string> args;
    const char* error;
  };
  const Case cases[] = {
      {{"softmax", "--scores", npy}, "--out: got nothing, allowed a value: it is required"},
      {{"softmax", "--scores", row, "--out", out}, "shape: got [2], allowed [queries,keys]"},
      {{"softmax", "--scores", flags, "--out", out}, "dtype '|b1'; allowed: <f4, <f2"},
      {{"softmax", "--scores", npy, "--out", dir.path("out.txt")}, "allowed: FILE.npy"},
      {{"softmax", "--scores", npy, "--out", out, "--out-dtype", "bf16"},
       "npy files have no bfloat16"},
      {{"softmax", "--scores", npy, "--out", out, "--window", "3"}, "--window: got \"3\", allowed"},
      {{"softmax", "--scores", npy, "--out", out, "--window", "-2,2"}, "--window: got \"-2,2\""},
      {{"softmax", "--scores", npy, "--out", out, "--mask", "causal", "--window", "3,3"},
       "allowed: one of them"},
      {{"softmax", "--scores", npy, "--out", out, "--mask", dir.path("none.npy")}, "none.npy"},
      {{"softmax", "--scores", npy, "--out", out, "--sinks", half}, "dtype: got f16, allowed f32"},
      {{"softmax", "--scores", npy, "--out", out, "--scale", "inf"},
       "--scale: got \"inf\", allowed any finite number"},
      {{"softmax", "--scores", npy, "--out", out, "--scale", "abc"},
       "--scale: got \"abc\", allowed any finite number"},
      {{"softmax", "--scores", npy, "--out", out, "--out-dtype", "foo"},
       "--out-dtype: got \"foo\", allowed f32, f16, bf16"},
      {{"softmax", "--scores", npy, "--out", dir.path("none/o.npy")},
       "none/o.npy (No such file or directory), allowed a file that can be written"},
      {{"softmax", "--scores", npy, "--out", out, "--logsumexp", dir.path("none/l.npy")},
       "none/l.npy (No such file or directory), allowed a file that can be written"},
      {{"softmax-backward", "--probs", npy, "--d-probs", npy, "--out", dir.path("none/o.npy")},
       "none/o.npy (No such file or directory), allowed a file that can be written"},
      {{"softmax-backward", "--probs", npy, "--d-probs", half, "--out", out},
       "allowed [1,2] of f32 as --probs"},
  };
  for (const Case& test : cases) {
    const Ran ran = RunBinary("logitctl", test.args);
    EXPECT_EQ(ran.code, 2) << test.error;
    EXPECT_THAT(ran.err, HasSubstr(test.error));
    EXPECT_EQ(ran.out, "");
  }
  const Ran help = RunBinary("logitctl", {"softmax", "--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_THAT(help.out, AllOf(HasSubstr("true where a"), HasSubstr("--sinks"),
                              HasSubstr("none, causal, or a file")));
}

}  // namespace
}  // namespace logitd

// The Attention service through generated stubs, compared with sums in double precision.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "logitd/v1/attention.grpc.pb.h"
#include "logitd/v1/sampler.grpc.pb.h"
#include "tests/e2e/elements.h"
#include "tests/e2e/peers.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/shared_server.h"

namespace logitd::e2e {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// --- the definition

int64_t Rows(const v1::AttentionSoftmaxRequest& r) { return r.batch() * r.heads() * r.queries(); }

struct Expected {
  std::vector<double> probs;
  std::vector<double> logsumexp;
};

Expected Softmax(const v1::AttentionSoftmaxRequest& r) {
  const std::vector<double> scores = Decode(r.dtype(), r.scores());
  std::vector<double> mask;
  if (r.mask_kind() == v1::MASK_KIND_ADDITIVE) mask = Decode(r.mask_dtype(), r.mask());
  const int64_t keys = r.keys();
  Expected out{std::vector<double>(scores.size()), {}};
  for (int64_t row = 0; row < Rows(r); ++row) {
    const int64_t query = row % r.queries();
    const int64_t head = row / r.queries() % r.heads();
    const int64_t item = row / r.queries() / r.heads();
    std::vector<std::pair<int64_t, double>> seen;
    for (int64_t key = 0; key < keys; ++key) {
      const int64_t ahead = key - (query + keys - r.queries());
      if (r.has_window_left() && -ahead > r.window_left()) continue;
      if (r.has_window_right() && ahead > r.window_right()) continue;
      const float scale = r.has_scale() ? r.scale() : 1.0f;
      double x = scale * scores[static_cast<size_t>(row * keys + key)];
      if (r.mask_kind() != v1::MASK_KIND_NONE) {
        const auto& shape = r.mask_shape();
        const int64_t place =
            (((shape[0] == 1 ? 0 : item) * shape[1] + (shape[1] == 1 ? 0 : head)) * shape[2] +
             (shape[2] == 1 ? 0 : query)) *
                keys +
            key;
        if (r.mask_kind() == v1::MASK_KIND_BOOL) {
          if (r.mask()[static_cast<size_t>(place)] != 0) continue;
        } else {
          x += mask[static_cast<size_t>(place)];
        }
      }
      seen.emplace_back(key, x);
    }
    const double sink = r.sinks_size() == 0 ? -kInf : r.sinks(static_cast<int>(head));
    double max = sink;
    for (const auto& [key, x] : seen) max = std::max(max, x);
    double sum = std::exp(sink - max);
    if (max == -kInf) sum = 0;
    for (const auto& [key, x] : seen) sum += max == -kInf ? 0 : std::exp(x - max);
    for (const auto& [key, x] : seen) {
      out.probs[static_cast<size_t>(row * keys + key)] = sum == 0 ? 0 : std::exp(x - max) / sum;
    }
    out.logsumexp.push_back(sum == 0 ? -kInf : max + std::log(sum));
  }
  return out;
}

// Half a unit in the last place, and the error of fp32 sums.
double Tolerance(v1::DType dtype, double value) {
  const double fp32 = 4e-6 * std::fabs(value) + 1e-37;
  if (dtype == v1::DTYPE_BF16) return fp32 + std::fabs(value) / 256;
  if (dtype == v1::DTYPE_F16) return fp32 + std::fabs(value) / 2048 + std::ldexp(1, -25);
  return fp32;
}

void ExpectNear(v1::DType dtype, const std::string& got, const std::vector<double>& want,
                double floor = 0) {
  const std::vector<double> values = Decode(dtype, got);
  ASSERT_EQ(values.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    if (want[i] == 0) {
      ASSERT_EQ(values[i], 0) << "element " << i;
    } else {
      ASSERT_NEAR(values[i], want[i], Tolerance(dtype, want[i]) + floor) << "element " << i;
    }
  }
}

v1::AttentionSoftmaxRequest Random(v1::DType dtype, int64_t batch, int64_t heads, int64_t queries,
                                   int64_t keys, uint32_t seed) {
  v1::AttentionSoftmaxRequest request;
  request.set_dtype(dtype);
  request.set_batch(batch);
  request.set_heads(heads);
  request.set_queries(queries);
  request.set_keys(keys);
  request.set_scores(Encode(dtype, Normal<double>(batch * heads * queries * keys, seed)));
  return request;
}

void AddMask(v1::MaskKind kind, v1::DType dtype, const std::vector<int64_t>& shape, uint32_t seed,
             v1::AttentionSoftmaxRequest* request) {
  int64_t elements = 1;
  request->clear_mask_shape();
  for (int64_t size : shape) {
    request->add_mask_shape(size);
    elements *= size;
  }
  request->set_mask_kind(kind);
  if (kind == v1::MASK_KIND_ADDITIVE) {
    std::vector<double> values = Normal<double>(elements, seed);
    for (size_t i = 0; i < values.size(); i += 4) values[i] = -kInf;
    request->set_mask_dtype(dtype);
    request->set_mask(Encode(dtype, values));
  } else {
    std::mt19937 random(seed);
    std::string mask(static_cast<size_t>(elements), '\0');
    for (char& byte : mask) byte = static_cast<char>(random() % 3 == 0 ? 1 + random() % 255 : 0);
    request->set_mask(mask);
  }
}

// The backward request for the probabilities that `answer` has for `forward`.
v1::AttentionSoftmaxBackwardRequest Backward(const v1::AttentionSoftmaxRequest& forward,
                                             const v1::AttentionSoftmaxResponse& answer,
                                             uint32_t seed) {
  v1::AttentionSoftmaxBackwardRequest request;
  request.set_dtype(forward.dtype());
  request.set_batch(forward.batch());
  request.set_heads(forward.heads());
  request.set_queries(forward.queries());
  request.set_keys(forward.keys());
  if (forward.has_scale()) request.set_scale(forward.scale());
  if (forward.has_window_right()) request.set_window_right(forward.window_right());
  request.set_probs(answer.probs());
  request.set_d_probs(
      Encode(forward.dtype(), Normal<double>(Rows(forward) * forward.keys(), seed)));
  if (forward.sinks_size() > 0) {
    *request.mutable_sinks() = forward.sinks();
    request.set_logsumexp(answer.logsumexp());
  }
  return request;
}

class AttentionTransportTest : public BothTransportsTest {
 protected:
  v1::AttentionSoftmaxResponse Call(const v1::AttentionSoftmaxRequest& request) {
    v1::AttentionSoftmaxResponse response;
    const grpc::Status status = stub_->Softmax(Context().get(), request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }
  v1::AttentionSoftmaxBackwardResponse Call(const v1::AttentionSoftmaxBackwardRequest& request) {
    v1::AttentionSoftmaxBackwardResponse response;
    const grpc::Status status = stub_->SoftmaxBackward(Context().get(), request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }

  const std::unique_ptr<v1::Attention::Stub> stub_ = v1::Attention::NewStub(channel_);
};
INSTANTIATE_TEST_SUITE_P(All, AttentionTransportTest, ::testing::Bool(), TransportName);

TEST_P(AttentionTransportTest, EveryMaskInEveryTypeMatchesTheDefinition) {
  struct Form {
    const char* name;
    void (*add)(v1::AttentionSoftmaxRequest*);
  };
  using Request = v1::AttentionSoftmaxRequest;
  const Form forms[] = {
      {"none", [](Request*) {}},
      {"scale_0", [](Request* r) { r->set_scale(0); }},
      {"causal",
       [](Request* r) {
         r->set_scale(0.125f);
         r->set_window_right(0);
       }},
      {"window",
       [](Request* r) {
         r->set_window_left(2);
         r->set_window_right(1);
       }},
      {"bool_for_all",
       [](Request* r) {
         AddMask(v1::MASK_KIND_BOOL, {}, {1, 1, 1, 9}, 1, r);
       }},
      {"bool_of_items",
       [](Request* r) {
         AddMask(v1::MASK_KIND_BOOL, {}, {2, 1, 5, 9}, 2, r);
       }},
      {"bool_full_causal",
       [](Request* r) {
         AddMask(v1::MASK_KIND_BOOL, {}, {2, 3, 5, 9}, 3, r);
         r->set_window_right(0);
       }},
      {"additive_f32",
       [](Request* r) {
         AddMask(v1::MASK_KIND_ADDITIVE, v1::DTYPE_F32, {1, 3, 5, 9}, 4, r);
       }},
      {"additive_bf16",
       [](Request* r) {
         AddMask(v1::MASK_KIND_ADDITIVE, v1::DTYPE_BF16, {2, 3, 1, 9}, 5, r);
       }},
      {"sinks",
       [](Request* r) {
         for (float sink : {0.0f, 3.5f, -std::numeric_limits<float>::infinity()})
           r->add_sinks(sink);
         AddMask(v1::MASK_KIND_BOOL, {}, {1, 1, 5, 9}, 6, r);
       }},
  };
  for (v1::DType dtype : {v1::DTYPE_F32, v1::DTYPE_F16, v1::DTYPE_BF16}) {
    for (v1::DType out : {dtype, v1::DTYPE_F32}) {
      for (const Form& form : forms) {
        SCOPED_TRACE(absl::StrCat(form.name, " ", dtype, " to ", out));
        Request request = Random(dtype, 2, 3, 5, 9, 11);
        request.set_out_dtype(out);
        request.set_want_logsumexp(true);
        form.add(&request);
        const v1::AttentionSoftmaxResponse response = Call(request);
        EXPECT_EQ(response.rows(), 30);
        EXPECT_EQ(response.first_row(), 0);
        EXPECT_EQ(response.dtype(), out);
        const Expected want = Softmax(request);
        ExpectNear(out, response.probs(), want.probs);
        const std::vector<double> logsumexp = Decode(v1::DTYPE_F32, response.logsumexp());
        ASSERT_EQ(logsumexp.size(), 30u);
        std::vector<int64_t> empty;
        for (size_t row = 0; row < 30; ++row) {
          if (want.logsumexp[row] == -kInf) {
            EXPECT_EQ(logsumexp[row], -kInf);
            empty.push_back(static_cast<int64_t>(row));
          } else {
            EXPECT_NEAR(logsumexp[row], want.logsumexp[row],
                        2e-6 * std::max(1.0, std::fabs(want.logsumexp[row])));
          }
        }
        EXPECT_EQ(std::vector<int64_t>(response.fault_rows().begin(), response.fault_rows().end()),
                  empty);
      }
    }
  }
}

TEST_P(AttentionTransportTest, AFaultyRowIsReportedAndAffectsNoOtherRow) {
  v1::AttentionSoftmaxRequest request = Random(v1::DTYPE_F32, 1, 2, 3, 4, 5);
  const v1::AttentionSoftmaxResponse good = Call(request);
  EXPECT_EQ(good.fault_rows_size(), 0);
  std::vector<double> scores = Decode(v1::DTYPE_F32, request.scores());
  scores[4 * 2 + 3] = kNan;
  for (int key = 0; key < 4; ++key) scores[static_cast<size_t>(4 * 4 + key)] = -kInf;
  request.set_scores(Encode(v1::DTYPE_F32, scores));
  const v1::AttentionSoftmaxResponse response = Call(request);
  EXPECT_THAT(response.fault_rows(), ElementsAre(2, 4));
  EXPECT_THAT(response.fault_status(),
              ElementsAre(v1::ROW_STATUS_NAN_LOGIT, v1::ROW_STATUS_EMPTY_SUPPORT));
  EXPECT_THAT(response.fault_positions(), ElementsAre(3, -1));
  for (size_t row : {0, 1, 3, 5}) {
    EXPECT_EQ(response.probs().substr(row * 16, 16), good.probs().substr(row * 16, 16));
  }
  const std::vector<double> probs = Decode(v1::DTYPE_F32, response.probs());
  for (size_t key = 0; key < 4; ++key) {
    EXPECT_TRUE(std::isnan(probs[8 + key]));
    EXPECT_EQ(probs[16 + key], 0);
  }
}

TEST_P(AttentionTransportTest, TheGradientMatchesTheAnalyticOne) {
  for (v1::DType dtype : {v1::DTYPE_F32, v1::DTYPE_F16, v1::DTYPE_BF16}) {
    for (const bool sinks : {false, true}) {
      SCOPED_TRACE(absl::StrCat(dtype, sinks ? " with sinks" : ""));
      v1::AttentionSoftmaxRequest forward = Random(dtype, 2, 2, 5, 7, 21);
      forward.set_scale(0.5f);
      forward.set_window_right(0);
      forward.set_want_logsumexp(true);
      if (sinks) {
        forward.add_sinks(0.5f);
        forward.add_sinks(-1.0f);
      }
      const v1::AttentionSoftmaxResponse answer = Call(forward);
      const v1::AttentionSoftmaxBackwardRequest request = Backward(forward, answer, 22);
      const v1::AttentionSoftmaxBackwardResponse response = Call(request);
      EXPECT_EQ(response.rows(), 20);
      EXPECT_EQ(response.dtype(), dtype);
      EXPECT_EQ(response.fault_rows_size(), 0);
      const std::vector<double> y = Decode(dtype, request.probs());
      const std::vector<double> dy = Decode(dtype, request.d_probs());
      const std::vector<double> lse = Decode(v1::DTYPE_F32, answer.logsumexp());
      std::vector<double> dx(140);
      double d_sinks[2] = {0, 0};
      for (size_t row = 0; row < 20; ++row) {
        double dot = 0;
        for (size_t k = 0; k < 7; ++k) dot += y[row * 7 + k] * dy[row * 7 + k];
        for (size_t k = 0; k < 7; ++k)
          dx[row * 7 + k] = 0.5 * y[row * 7 + k] * (dy[row * 7 + k] - dot);
        const size_t head = row / 5 % 2;
        if (sinks)
          d_sinks[head] -= std::exp(forward.sinks(static_cast<int>(head)) - lse[row]) * dot;
      }
      ExpectNear(dtype, response.d_scores(), dx, /*floor=*/1e-5);
      ASSERT_EQ(response.d_sinks_size(), sinks ? 2 : 0);
      for (int head = 0; head < response.d_sinks_size(); ++head) {
        EXPECT_NEAR(response.d_sinks(head), d_sinks[head], 1e-5);
      }
    }
  }
}

// Large enough to be sent from its slab. Every element is checked.
TEST_P(AttentionTransportTest, ALargeAnswerIsRightInEveryRowAndTheSameAgain) {
  v1::AttentionSoftmaxRequest request = Random(v1::DTYPE_BF16, 1, 3, 1000, 1111, 8);
  request.set_window_right(0);
  const v1::AttentionSoftmaxResponse whole = Call(request);
  ASSERT_EQ(whole.probs().size(), request.scores().size());
  for (int64_t query : {0, 1, 500, 999}) {
    v1::AttentionSoftmaxRequest row = request;
    row.set_heads(1);
    row.set_queries(1);
    row.clear_window_right();
    const size_t at = static_cast<size_t>(1000 + query) * 1111 * 2;
    const size_t seen = static_cast<size_t>(query + 112) * 2;
    row.set_keys(query + 112);
    row.set_scores(request.scores().substr(at, seen));
    ExpectNear(v1::DTYPE_BF16, whole.probs().substr(at, seen), Softmax(row).probs);
    EXPECT_EQ(whole.probs().substr(at + seen, 2222 - seen), std::string(2222 - seen, '\0'));
  }
  EXPECT_EQ(Call(request).probs(), whole.probs());
}

// --- streams

// The rows of `whole` from `first` on, as a message of a stream.
template <typename Request>
Request Chunk(const Request& whole, int64_t first, int64_t rows);

template <>
v1::AttentionSoftmaxRequest Chunk(const v1::AttentionSoftmaxRequest& whole, int64_t first,
                                  int64_t rows) {
  v1::AttentionSoftmaxRequest chunk;
  if (first == 0) {
    chunk = whole;
    chunk.clear_mask();
  }
  const size_t row_bytes = static_cast<size_t>(whole.keys()) * Width(whole.dtype());
  chunk.set_scores(whole.scores().substr(static_cast<size_t>(first) * row_bytes,
                                         static_cast<size_t>(rows) * row_bytes));
  if (whole.mask_kind() == v1::MASK_KIND_NONE) return chunk;
  int64_t low = std::numeric_limits<int64_t>::max();
  int64_t high = 0;
  for (int64_t row = first; row < first + rows; ++row) {
    const auto& shape = whole.mask_shape();
    const int64_t item = shape[0] == 1 ? 0 : row / whole.queries() / whole.heads();
    const int64_t head = shape[1] == 1 ? 0 : row / whole.queries() % whole.heads();
    const int64_t query = shape[2] == 1 ? 0 : row % whole.queries();
    const int64_t place = (item * shape[1] + head) * shape[2] + query;
    low = std::min(low, place);
    high = std::max(high, place);
  }
  const size_t width = whole.mask_kind() == v1::MASK_KIND_BOOL ? 1 : Width(whole.mask_dtype());
  const size_t mask_row = static_cast<size_t>(whole.keys()) * width;
  chunk.set_mask(whole.mask().substr(static_cast<size_t>(low) * mask_row,
                                     static_cast<size_t>(high - low + 1) * mask_row));
  return chunk;
}

template <>
v1::AttentionSoftmaxBackwardRequest Chunk(const v1::AttentionSoftmaxBackwardRequest& whole,
                                          int64_t first, int64_t rows) {
  v1::AttentionSoftmaxBackwardRequest chunk;
  if (first == 0) chunk = whole;
  const size_t row_bytes = static_cast<size_t>(whole.keys()) * Width(whole.dtype());
  const size_t at = static_cast<size_t>(first) * row_bytes;
  const size_t bytes = static_cast<size_t>(rows) * row_bytes;
  chunk.set_probs(whole.probs().substr(at, bytes));
  chunk.set_d_probs(whole.d_probs().substr(at, bytes));
  if (!whole.logsumexp().empty()) {
    chunk.set_logsumexp(
        whole.logsumexp().substr(static_cast<size_t>(first) * 4, static_cast<size_t>(rows) * 4));
  }
  return chunk;
}

TEST_P(AttentionTransportTest, AStreamAnswersWithTheBitsOfACall) {
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{}, {2, 3, 17, 33}, {1, 1, 17, 33}, {2, 1, 1, 33}}) {
    v1::AttentionSoftmaxRequest request = Random(v1::DTYPE_F16, 2, 3, 17, 33, 31);
    request.set_window_left(20);
    request.set_want_logsumexp(true);
    for (float sink : {0.0f, 1.0f, 2.0f}) request.add_sinks(sink);
    if (!shape.empty()) AddMask(v1::MASK_KIND_BOOL, {}, shape, 3, &request);
    const v1::AttentionSoftmaxResponse whole = Call(request);
    const auto context = Context();
    const auto stream = stub_->SoftmaxStream(context.get());
    // Twice: one tensor may follow another.
    for (int tensor = 0; tensor < 2; ++tensor) {
      int64_t row = 0;
      for (int64_t rows : {1, 15, 1, 40, 45}) {
        ASSERT_TRUE(stream->Write(Chunk(request, row, rows)));
        v1::AttentionSoftmaxResponse answer;
        ASSERT_TRUE(stream->Read(&answer)) << stream->Finish().error_message();
        EXPECT_EQ(answer.first_row(), row);
        EXPECT_EQ(answer.rows(), rows);
        EXPECT_EQ(answer.probs(), whole.probs().substr(static_cast<size_t>(row) * 66,
                                                       static_cast<size_t>(rows) * 66));
        EXPECT_EQ(answer.logsumexp(), whole.logsumexp().substr(static_cast<size_t>(row) * 4,
                                                               static_cast<size_t>(rows) * 4));
        row += rows;
      }
    }
    stream->WritesDone();
    v1::AttentionSoftmaxResponse none;
    EXPECT_FALSE(stream->Read(&none));
    EXPECT_TRUE(stream->Finish().ok());
  }
}

TEST_P(AttentionTransportTest, AStreamOfTheGradientMatchesACall) {
  v1::AttentionSoftmaxRequest forward = Random(v1::DTYPE_F32, 2, 2, 9, 13, 41);
  forward.set_want_logsumexp(true);
  forward.add_sinks(1);
  forward.add_sinks(0);
  const v1::AttentionSoftmaxResponse y = Call(forward);
  const v1::AttentionSoftmaxBackwardRequest request = Backward(forward, y, 42);
  const v1::AttentionSoftmaxBackwardResponse whole = Call(request);
  const auto context = Context();
  const auto stream = stub_->SoftmaxBackwardStream(context.get());
  std::string d_scores;
  double d_sinks[2] = {0, 0};
  int64_t row = 0;
  for (int64_t rows : {4, 20, 12}) {
    ASSERT_TRUE(stream->Write(Chunk(request, row, rows)));
    v1::AttentionSoftmaxBackwardResponse answer;
    ASSERT_TRUE(stream->Read(&answer)) << stream->Finish().error_message();
    d_scores += answer.d_scores();
    ASSERT_EQ(answer.d_sinks_size(), 2);
    for (int head : {0, 1}) d_sinks[head] += answer.d_sinks(head);
    row += rows;
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(d_scores, whole.d_scores());
  for (int head : {0, 1}) EXPECT_NEAR(d_sinks[head], whole.d_sinks(head), 1e-9);
}

TEST_P(AttentionTransportTest, ARefusalEndsTheStreamAfterTheEarlierAnswers) {
  const v1::AttentionSoftmaxRequest request = Random(v1::DTYPE_F32, 1, 1, 4, 8, 1);
  const auto context = Context();
  const auto stream = stub_->SoftmaxStream(context.get());
  ASSERT_TRUE(stream->Write(Chunk(request, 0, 2)));
  v1::AttentionSoftmaxRequest wrong = Chunk(request, 2, 2);
  wrong.mutable_scores()->pop_back();
  ASSERT_TRUE(stream->Write(wrong));
  v1::AttentionSoftmaxResponse answer;
  EXPECT_TRUE(stream->Read(&answer));
  EXPECT_FALSE(stream->Read(&answer));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(),
              HasSubstr("scores: got 63 bytes at row 2, allowed 1..2 whole rows "
                        "of 32 bytes"));
}

// 256 MiB of scores and a mask with as many rows through a server that takes 8 MiB at once.
TEST(ResidentMemoryTest, ATensorLargerThanAMessageIsStreamed) {
  ServerProcess server({"--max-request-bytes=8MiB", "--slab-bytes=8MiB", "--max-batch-rows=1024",
                        "--max-held-bytes=48MiB", "--streams=1"});
  const auto stub = v1::Attention::NewStub(Connect(server.tcp()));
  constexpr int64_t kKeys = 16384;
  constexpr int64_t kChunkRows = 64;  // 2 MiB of scores and 1 MiB of mask
  constexpr int64_t kChunks = 128;
  v1::AttentionSoftmaxRequest first = Random(v1::DTYPE_BF16, 1, 1, kChunkRows, kKeys, 3);
  AddMask(v1::MASK_KIND_BOOL, {}, {1, 1, kChunkRows, kKeys}, 4, &first);
  const Expected want = Softmax(first);
  // Every chunk has the same rows and mask. Only the first message gives the whole shape.
  v1::AttentionSoftmaxRequest next;
  next.set_scores(first.scores());
  next.set_mask(first.mask());
  first.set_queries(kChunkRows * kChunks);
  first.set_mask_shape(2, kChunkRows * kChunks);

  int64_t before = 0;
  for (int pass = 0; pass < 2; ++pass) {  // the first pass faults the slabs in
    const auto context = Context();
    const auto stream = stub->SoftmaxStream(context.get());
    std::thread writer([&] {
      for (int64_t i = 0; i < (pass == 0 ? 8 : kChunks); ++i) {
        if (!stream->Write(i == 0 ? first : next)) break;
      }
      stream->WritesDone();
    });
    v1::AttentionSoftmaxResponse answer;
    int64_t rows = 0;
    std::string probs;
    while (stream->Read(&answer)) {
      EXPECT_EQ(answer.first_row(), rows);
      rows += answer.rows();
      if (probs.empty()) {
        probs = answer.probs();
        ExpectNear(v1::DTYPE_BF16, probs, want.probs);
      }
      EXPECT_EQ(answer.probs(), probs);
    }
    writer.join();
    EXPECT_TRUE(stream->Finish().ok());
    if (pass == 0) before = server.RssBytes();
    EXPECT_EQ(rows, kChunkRows * (pass == 0 ? 8 : kChunks));
  }
  server.ExpectGrownLess(before, 60);
  EXPECT_TRUE(server.WaitForMetric(kHeldBytes, '=', 0));
  EXPECT_TRUE(server.WaitForMetric("logitd_slabs_kept", '=', 0));
}

TEST(AttentionStreamTest, ACancelledStreamFreesEverything) {
  ServerProcess server;
  const auto stub = v1::Attention::NewStub(Connect(server.tcp()));
  v1::AttentionSoftmaxRequest request = Random(v1::DTYPE_F32, 1, 1, 64, 8192, 1);
  v1::AttentionSoftmaxRequest next;
  next.set_scores(request.scores());
  request.set_queries(64 * 100);
  for (int i = 0; i < 20; ++i) {
    const auto context = Context();
    const auto stream = stub->SoftmaxStream(context.get());
    for (int message = 0; message < i % 5; ++message) {
      stream->Write(message == 0 ? request : next);
    }
    v1::AttentionSoftmaxResponse answer;
    if (i % 5 > 2) {
      EXPECT_TRUE(stream->Read(&answer));
    }
    context->TryCancel();
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_TRUE(server.WaitForMetric(kHeldBytes, '=', 0));
  EXPECT_TRUE(server.WaitForMetric("logitd_slabs_kept", '=', 0));
  EXPECT_TRUE(server.WaitForMetric("logitd_slabs_in_use", '=', 0));
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(absl::Seconds(10)), 0) << server.Log();
}

// --- peers that do not read their answers

TEST(AttentionPeerTest, PeersThatDoNotReadDoNotStopOthersAndAreCutOff) {
  ServerProcess server({"--receive-timeout=8s", "--streams=1"});
  const grpc::ByteBuffer request =
      ToBuffer(Random(v1::DTYPE_F32, 1, 1, 2000, 4096, 1).SerializeAsString());
  std::deque<UnreadCall> unread;
  for (int i = 0; i < 3; ++i) unread.emplace_back(server.tcp(), kSoftmax, request);
  ASSERT_TRUE(server.WaitForMetric(Requests("OK", "attention_softmax"), '=', 3));
  // Two slabs, one stream: one answer stays in its slab, the other two are copied out.
  EXPECT_EQ(server.Metric("logitd_slabs_kept"), 1);
  EXPECT_GT(server.Metric(kHeldBytes), 3 * 2000 * 4096 * 4);
  const auto stub = v1::Attention::NewStub(Connect(server.tcp()));
  for (int i = 0; i < 5; ++i) {
    v1::AttentionSoftmaxResponse response;
    EXPECT_TRUE(
        stub->Softmax(Context().get(), Random(v1::DTYPE_F32, 1, 1, 3, 4, 1), &response).ok());
  }
  EXPECT_TRUE(server.WaitForMetric("logitd_slabs_kept", '=', 0));
  EXPECT_TRUE(server.WaitForMetric(kHeldBytes, '=', 0));
}

TEST(AttentionPeerTest, AnAnswerThatIsBeingSentDoesNotDelayTheEnd) {
  ServerProcess server({"--drain-grace=200ms"});
  const grpc::ByteBuffer request =
      ToBuffer(Random(v1::DTYPE_F32, 1, 1, 2000, 4096, 1).SerializeAsString());
  UnreadCall call(server.tcp(), kSoftmax, request);
  ASSERT_TRUE(server.WaitForMetric("logitd_slabs_kept", '=', 1));
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(absl::Seconds(10)), 0) << server.Log();
  EXPECT_THAT(server.Log(), ::testing::Not(HasSubstr("still keeps answers")));
}

TEST(AttentionPeerTest, TheMetricsCountTheOp) {
  ServerProcess server;
  const auto stub = v1::Attention::NewStub(Connect(server.tcp()));
  v1::AttentionSoftmaxResponse response;
  ASSERT_TRUE(stub->Softmax(Context().get(), Random(v1::DTYPE_F32, 2, 3, 4, 5, 1), &response).ok());
  EXPECT_EQ(response.timings().batch_rows(), 24);
  EXPECT_GT(response.timings().total_ns(), 0);
  EXPECT_TRUE(server.WaitForMetric("logitd_rows_total{op=\"attention_softmax\"}", '=', 24));
  EXPECT_EQ(server.Metric(Requests("OK", "attention_softmax_backward")), 0);
}

}  // namespace
}  // namespace logitd::e2e

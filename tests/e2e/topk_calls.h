// TopK calls that several tests make, and a small server for them.
#ifndef LOGITD_TESTS_E2E_TOPK_CALLS_H_
#define LOGITD_TESTS_E2E_TOPK_CALLS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "logitd/v1/sampler.grpc.pb.h"
#include "tests/e2e/peers.h"
#include "tests/e2e/server_process.h"

namespace logitd::e2e {

// Room for one message at a time: a payload of 8 MiB and the small fields.
inline const std::vector<std::string> kRoomForOne = {"--max-request-bytes=8MiB",
                                                     "--slab-bytes=8MiB", "--max-batch-rows=1024",
                                                     "--max-held-bytes=9MiB"};

inline std::vector<std::string> With(std::vector<std::string> flags,
                                     std::vector<std::string> more) {
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

inline void StateSize(grpc::ClientContext* context, int64_t bytes) {
  context->AddMetadata("logitd-payload-bytes", absl::StrCat(bytes));
}

inline grpc::Status TopK(const std::shared_ptr<grpc::Channel>& channel,
                         const v1::TopKRequest& request, v1::TopKResponse* response,
                         absl::Duration deadline = absl::Seconds(30)) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + deadline));
  return v1::Sampler::NewStub(channel)->TopK(&context, request, response);
}

// One small call.
inline grpc::Status SmallTopK(const std::shared_ptr<grpc::Channel>& channel,
                              absl::Duration deadline = absl::Seconds(30)) {
  v1::TopKResponse response;
  return TopK(channel, Request({1, 2}, 1, 1), &response, deadline);
}

// With kRoomForOne a call that states so much needs all the room.
inline constexpr int64_t kAllTheRoom = int64_t{8} << 20;

// A small call that states kAllTheRoom.
inline grpc::Status TopKInAllTheRoom(const std::shared_ptr<grpc::Channel>& channel,
                                     grpc::ClientContext* context) {
  StateSize(context, kAllTheRoom);
  v1::TopKResponse response;
  return v1::Sampler::NewStub(channel)->TopK(context, Request({1, 2}, 1, 1), &response);
}

// A call that has sent headers only. They state a size, so that the call asks for room.
class AskingCall : public GenericCall {
 public:
  explicit AskingCall(const std::shared_ptr<grpc::Channel>& channel,
                      const std::string& method = kTopK, int64_t bytes = kAllTheRoom)
      : GenericCall(channel, method) {
    StateSize(&context(), bytes);
    EXPECT_TRUE(Start());
  }
};

// The same, and it is admitted: it holds the room.
class AdmittedCall final : public AskingCall {
 public:
  AdmittedCall(const ServerProcess& server, const std::shared_ptr<grpc::Channel>& channel,
               int64_t bytes = kAllTheRoom)
      : AskingCall(channel, kTopK, bytes) {
    EXPECT_TRUE(server.WaitForMetric(kHeldBytes, '>', 0));
  }
};

// Compares `response` for `logits` [rows, vocab] with sums in double precision.
inline void ExpectRight(const std::vector<float>& logits, int64_t rows, const std::vector<int>& k,
                        const std::vector<float>& temperature, const v1::TopKResponse& response) {
  const auto vocab = static_cast<int64_t>(logits.size()) / rows;
  ASSERT_EQ(response.k_size(), rows);
  ASSERT_EQ(response.logsumexp_size(), rows);
  ASSERT_EQ(response.status_size(), rows);
  ASSERT_EQ(response.status_position_size(), rows);
  int entry = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const float* x = logits.data() + row * vocab;
    const int row_k = k[k.size() == 1 ? 0 : row];
    const double t = temperature.empty() ? 1.0 : temperature[temperature.size() == 1 ? 0 : row];
    std::vector<int> order(static_cast<size_t>(vocab));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [x](int a, int b) { return x[a] > x[b]; });
    const double max = x[order[0]] / t;
    double sum = 0;
    for (int64_t i = 0; i < vocab; ++i) sum += std::exp(x[i] / t - max);
    ASSERT_EQ(response.k(static_cast<int>(row)), row_k);
    EXPECT_EQ(response.status(static_cast<int>(row)), v1::ROW_STATUS_OK);
    EXPECT_EQ(response.status_position(static_cast<int>(row)), -1);
    EXPECT_NEAR(response.logsumexp(static_cast<int>(row)), max + std::log(sum),
                2e-6 * std::max(1.0, std::fabs(max + std::log(sum))));
    for (int i = 0; i < row_k; ++i, ++entry) {
      ASSERT_EQ(response.indices(entry), order[i]) << "row " << row << " place " << i;
      const double prob = std::exp(x[order[i]] / t - max) / sum;
      ASSERT_NEAR(response.probs(entry), prob, 4e-6 * prob) << "row " << row << " place " << i;
    }
  }
  EXPECT_EQ(response.indices_size(), entry);
  EXPECT_EQ(response.probs_size(), entry);
}

}  // namespace logitd::e2e

#endif  // LOGITD_TESTS_E2E_TOPK_CALLS_H_

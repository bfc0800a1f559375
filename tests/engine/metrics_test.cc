#include "server/engine/metrics.h"

#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "prometheus/metric_family.h"
#include "tests/engine/engine_fixture.h"

namespace logitd::engine {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::string_view kOps[] = {"digest"};

// Each family, and how many series it has: for each op, "unknown" too, and each of their codes; for
// each reason and proof.
constexpr char kSeries[] = R"(
logitd_requests_total 34 logitd_request_seconds 2 logitd_rows_total 2 logitd_batches_total 2
logitd_slices_total 2 logitd_stopped_total 2 logitd_stream_busy_seconds_total 2
logitd_batch_queue_seconds 2 logitd_batch_copy_seconds 2 logitd_batch_h2d_seconds 2
logitd_batch_kernel_seconds 2 logitd_batch_d2h_seconds 2 logitd_batch_rows 1
logitd_refused_total 68 logitd_admission_wait_seconds 1 logitd_receive_seconds 1
logitd_send_seconds 1 logitd_device_up 1 logitd_device_errors_total 2 logitd_device_rows_total 1
logitd_device_busy_seconds_total 1 logitd_device_head_bytes 1 logitd_held_bytes 1
logitd_held_bytes_limit 1 logitd_waiting_calls 1 logitd_queued_jobs 1 logitd_slabs_in_use 1
logitd_slabs 1 logitd_slabs_kept 1 logitd_heads 1 logitd_head_bytes 1 logitd_open_calls 1
logitd_head_updates_total 17 logitd_head_update_seconds 1
logitd_open_streams 1 logitd_predicted_delay_seconds 1 logitd_draining 1
)";

TEST(MetricsTest, EverySeriesExistsFromTheStart) {
  std::map<std::string, size_t> expected, found;
  std::istringstream text(kSeries);
  for (std::string name; text >> name;) text >> expected[name];
  for (const prometheus::MetricFamily& family : Metrics(kOps).page()->Collect()) {
    found[family.name] = family.metric.size();
    for (const prometheus::ClientMetric& series : family.metric) {
      EXPECT_EQ(series.counter.value, 0) << family.name;
      EXPECT_EQ(series.gauge.value, family.name == "logitd_device_up" ? 1 : 0) << family.name;
      EXPECT_EQ(series.histogram.sample_count, 0u) << family.name;
    }
  }
  EXPECT_EQ(found, expected);
}

TEST(MetricsTest, ARefusalIsCountedByItsReasonAndProof) {
  const std::pair<Refusal, const char*> reasons[] = {{Refusal::kDraining, "draining"},
                                                     {Refusal::kTooLarge, "too_large"},
                                                     {Refusal::kOverloaded, "overloaded"},
                                                     {Refusal::kQuotaCalls, "quota_calls"},
                                                     {Refusal::kEarlyBytes, "early_bytes"}};
  const std::pair<Proof, const char*> proofs[] = {{Proof::kNone, "none"}, {Proof::kUser, "user"}};
  Metrics metrics;
  for (const auto& [reason, name] : reasons) {
    for (const auto& [proof, shown] : proofs) {
      metrics.CountRefused(reason, proof);
      EXPECT_THAT(Scrape(metrics), HasSubstr(absl::StrCat("logitd_refused_total{identity=\"", shown,
                                                          "\",reason=\"", name, "\"} 1\n")));
    }
  }
}

TEST(MetricsTest, AnOpWithoutSeriesCountsAsUnknown) {
  Metrics metrics(kOps);
  metrics.CountRequest("digest", absl::StatusCode::kOk, 0.25);
  metrics.CountRequest("other", absl::StatusCode::kInvalidArgument, 0.5);
  metrics.CountRequest("digest", static_cast<absl::StatusCode>(99), 0.5);
  const std::string text = Scrape(metrics);
  EXPECT_THAT(text, HasSubstr("logitd_requests_total{code=\"OK\",op=\"digest\"} 1\n"));
  EXPECT_THAT(text,
              HasSubstr("logitd_requests_total{code=\"INVALID_ARGUMENT\",op=\"unknown\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("logitd_requests_total{code=\"UNKNOWN\",op=\"digest\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("logitd_request_seconds_sum{op=\"digest\"} 0.75\n"));
  EXPECT_THAT(text, Not(HasSubstr("other")));
}

class EngineMetricsTest : public EngineFixture {};

TEST_F(EngineMetricsTest, TheEngineCountsItsJobsSlabsAndBatches) {
  EngineOptions options = SmallOptions();
  options.slabs_per_stream = 2;
  Start(options);
  device().Hold();
  Submit({.rows = 1});
  device().WaitForOps(1);
  Submit({.rows = 2});
  Submit({.rows = 3});
  Submit({.row_elements = 5});
  EXPECT_THAT(Scrape(*metrics_), HasSubstr("logitd_slabs 2\n"));
  EXPECT_THAT(Scrape(*metrics_), HasSubstr("logitd_slabs_in_use 1\n"));
  EXPECT_THAT(Scrape(*metrics_), HasSubstr("logitd_queued_jobs 3\n"));
  device().FailNext(FaultPoint::kOp, absl::UnavailableError("hiccup"));  // fails the first batch
  device().Release();
  WaitIdle();
  engine_->Stop();
  const std::string text = Scrape(*metrics_);
  for (const char* line : {
           "logitd_slabs_in_use 0\n",
           "logitd_slabs_kept 0\n",
           "logitd_queued_jobs 0\n",
           "logitd_batches_total{op=\"digest\"} 2\n",
           "logitd_rows_total{op=\"digest\"} 6\n",
           "logitd_batch_rows_count 2\n",
           "logitd_batch_rows_sum 6\n",
           "logitd_batch_kernel_seconds_count{op=\"digest\"} 2\n",
           "logitd_slices_total{op=\"digest\"} 2\n",
           "logitd_device_errors_total{device=\"10\",kind=\"batch\"} 1\n",
           "logitd_device_errors_total{device=\"10\",kind=\"lost\"} 0\n",
       }) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

}  // namespace
}  // namespace logitd::engine

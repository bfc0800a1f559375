#include "server/engine/metrics.h"

#include <string>
#include <string_view>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/admission.h"
#include "tests/engine/engine_fixture.h"

namespace logitd::engine {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::string_view kOps[] = {"digest"};

TEST(MetricsTest, EverySeriesExistsFromTheStart) {
  const Metrics metrics(kOps);
  const std::string text = Scrape(metrics);
  for (const char* line : {
           "logitd_requests_total{code=\"OK\",op=\"digest\"} 0\n",
           "logitd_requests_total{code=\"UNAUTHENTICATED\",op=\"unknown\"} 0\n",
           "logitd_rows_total{op=\"digest\"} 0\n",
           "logitd_batches_total{op=\"digest\"} 0\n",
           "logitd_refused_total{identity=\"none\",reason=\"line_full\"} 0\n",
           "logitd_refused_total{identity=\"none\",reason=\"too_large\"} 0\n",
           "logitd_refused_total{identity=\"none\",reason=\"caller_share\"} 0\n",
           "logitd_refused_total{identity=\"none\",reason=\"slow_receive\"} 0\n",
           "logitd_refused_total{identity=\"none\",reason=\"hopeless\"} 0\n",
           "logitd_refused_total{identity=\"none\",reason=\"hopeless_late\"} 0\n",
           "logitd_refused_total{identity=\"none\",reason=\"overloaded\"} 0\n",
           "logitd_predicted_delay_seconds 0\n",
           "logitd_device_errors_total{device=\"0\",kind=\"batch\"} 0\n",
           "logitd_device_errors_total{device=\"0\",kind=\"lost\"} 0\n",
           "logitd_held_bytes 0\n",
           "logitd_waiting_calls 0\n",
           "logitd_queued_jobs 0\n",
           "logitd_slabs_in_use 0\n",
           "logitd_slabs_kept 0\n",
           "logitd_draining 0\n",
           "logitd_heads 0\n",
           "logitd_head_bytes 0\n",
           "logitd_request_seconds_count{op=\"digest\"} 0\n",
           "logitd_batch_rows_count 0\n",
           "logitd_batch_queue_seconds_count{op=\"digest\"} 0\n",
           "logitd_batch_copy_seconds_count{op=\"digest\"} 0\n",
           "logitd_batch_h2d_seconds_count{op=\"digest\"} 0\n",
           "logitd_batch_kernel_seconds_count{op=\"digest\"} 0\n",
           "logitd_batch_d2h_seconds_count{op=\"digest\"} 0\n",
           "logitd_stream_busy_seconds_total{op=\"digest\"} 0\n",
           "logitd_admission_wait_seconds_count 0\n",
           "logitd_receive_seconds_count 0\n",
           "logitd_send_seconds_count 0\n",
           "logitd_open_calls 0\n",
           "logitd_open_streams 0\n",
       }) {
    EXPECT_THAT(text, HasSubstr(line));
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

TEST(MetricsTest, AdmissionCountsItsChargesAndRefusals) {
  Metrics metrics(kOps);
  std::vector<Admission::Ticket> tickets;
  Admission admission({.max_request_bytes = 60, .max_held_bytes = 100, .max_waiting_calls = 1},
                      &metrics);
  const auto enter = [&](absl::Time deadline) {
    admission.Enter({.deadline = deadline}, [&](absl::StatusOr<Admission::Ticket> answer) {
      if (answer.ok()) tickets.push_back(*std::move(answer));
    });
  };
  enter(absl::InfiniteFuture());  // in
  enter(absl::InfiniteFuture());  // waits
  enter(absl::InfiniteFuture());  // refused
  enter(absl::InfinitePast());    // late
  EXPECT_THAT(Scrape(metrics), HasSubstr("logitd_held_bytes 60\n"));
  EXPECT_THAT(Scrape(metrics), HasSubstr("logitd_held_bytes_limit 100\n"));
  EXPECT_THAT(Scrape(metrics), HasSubstr("logitd_waiting_calls 1\n"));
  EXPECT_THAT(Scrape(metrics),
              HasSubstr("logitd_refused_total{identity=\"none\",reason=\"line_full\"} 1\n"));
  EXPECT_THAT(Scrape(metrics),
              HasSubstr("logitd_refused_total{identity=\"none\",reason=\"deadline\"} 1\n"));
  admission.BeginDrain();  // ends the wait
  tickets.clear();
  EXPECT_THAT(Scrape(metrics), HasSubstr("logitd_held_bytes 0\n"));
  EXPECT_THAT(Scrape(metrics), HasSubstr("logitd_waiting_calls 0\n"));
  EXPECT_THAT(Scrape(metrics), HasSubstr("logitd_draining 1\n"));
  EXPECT_THAT(Scrape(metrics),
              HasSubstr("logitd_refused_total{identity=\"none\",reason=\"draining\"} 1\n"));
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

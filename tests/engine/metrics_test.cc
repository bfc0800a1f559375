#include "server/engine/metrics.h"

#include <string>
#include <string_view>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/engine.h"
#include "tests/engine/test_job.h"

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

TEST(MetricsTest, TheEngineCountsItsJobsSlabsAndBatches) {
  Metrics metrics(kOps);
  FakeBackend backend;
  EngineOptions options;
  options.streams = 1;
  options.slabs_per_stream = 2;
  options.slab_payload_bytes = 4096;
  options.slab_answer_bytes = 4096;
  options.ops = kTestOps;
  auto engine = Engine::Create(&backend, options, &metrics, [](absl::Status) {});
  ASSERT_TRUE(engine.ok()) << engine.status();
  const auto submit = [&](int64_t row_elements, int64_t rows) {
    auto job =
        std::make_shared<TestJob>(TestJob::Shape{.row_elements = row_elements, .rows = rows});
    (*engine)->Submit(job);
  };
  backend.Hold();
  submit(4, 1);
  backend.WaitForOps(1);
  submit(4, 2);
  submit(4, 3);
  submit(5, 1);
  EXPECT_THAT(Scrape(metrics), HasSubstr("logitd_slabs 2\n"));
  EXPECT_THAT(Scrape(metrics), HasSubstr("logitd_slabs_in_use 1\n"));
  EXPECT_THAT(Scrape(metrics), HasSubstr("logitd_queued_jobs 3\n"));
  backend.FailNext(FaultPoint::kOp, absl::UnavailableError("hiccup"));  // fails the first batch
  backend.Release();
  (*engine)->WaitIdle(SteadyNow() + absl::Seconds(20));
  (*engine)->Stop();
  const std::string text = Scrape(metrics);
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
           "logitd_device_errors_total{device=\"0\",kind=\"batch\"} 1\n",
           "logitd_device_errors_total{device=\"0\",kind=\"lost\"} 0\n",
       }) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

}  // namespace
}  // namespace logitd::engine

#include "server/rpc/transport/call_log.h"

#include <spdlog/spdlog.h>

#include "absl/strings/str_format.h"
#include "formats/trace_context.h"
#include "server/log/limited.h"

namespace logitd::rpc {
namespace {

absl::string_view OrDash(absl::string_view text) { return text.empty() ? "-" : text; }

// key=value, without spaces in a value.
std::string Line(const CallReport& report) {
  const auto us = [](int64_t ns) { return ns / 1000; };
  const engine::JobTimes& job = report.job;
  return absl::StrFormat(
      "method=%s code=%s peer=%s request_id=%s traceparent=%s messages=%d rows=%d "
      "received_bytes=%d sent_bytes=%d total_us=%d wait_us=%d receive_us=%d copy_us=%d "
      "queue_us=%d h2d_us=%d kernel_us=%d d2h_us=%d encode_us=%d send_us=%d batch_rows=%d",
      report.method, absl::StatusCodeToString(report.code), OrDash(report.peer),
      OrDash(report.trace->request_id), OrDash(report.trace->traceparent), report.messages,
      report.rows, report.received_bytes, report.sent_bytes, us(report.total_ns),
      us(report.wait_ns), us(report.receive_ns), us(job.copy_ns), us(job.queue_ns), us(job.h2d_ns),
      us(job.kernel_ns), us(job.d2h_ns), us(report.encode_ns), us(report.send_ns), job.batch_rows);
}

}  // namespace

Trace ReadTrace(const http2::HeaderList& metadata) {
  Trace trace;
  int ids = 0;
  int parents = 0;
  for (size_t i = 0; i < metadata.size(); ++i) {
    const http2::Field field = metadata[i];
    if (field.name == kRequestId && ++ids == 1) trace.request_id = field.value;
    if (field.name == kTraceparent && ++parents == 1) trace.traceparent = field.value;
  }
  if (ids != 1 || !formats::IsRequestId(trace.request_id)) trace.request_id.clear();
  if (parents != 1 || !formats::IsTraceparent(trace.traceparent)) trace.traceparent.clear();
  return trace;
}

bool CallLog::WantsMessage(int64_t total_ns) const {
  return total_ns >= slow_ns_ && spdlog::should_log(spdlog::level::info);
}

bool CallLog::Wants(int64_t total_ns) const {
  return spdlog::should_log(spdlog::level::debug) || WantsMessage(total_ns);
}

bool CallLog::WantsStream() const { return spdlog::should_log(spdlog::level::debug); }

void CallLog::WriteStream(const CallReport& report) const {
  spdlog::debug("call {}", Line(report));
}

void CallLog::Write(const CallReport& report) const {
  const bool all = spdlog::should_log(spdlog::level::debug);  // then no line is left out
  if (report.total_ns < slow_ns_) {
    if (all) WriteStream(report);
  } else if (all || log::Allow(log::Source::kSlowCalls)) {
    spdlog::info("slow call {}", Line(report));
  }
}

}  // namespace logitd::rpc

#include "server/log.h"

#if LOGITD_GPR_LOG
#include <grpc/support/log.h>
#else
#include <absl/log/globals.h>
#include <absl/log/initialize.h>
#include <absl/log/log_sink.h>
#include <absl/log/log_sink_registry.h>
#endif
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <memory>
#include <string_view>

#include "server/log/format.h"
#include "server/log/limited.h"

namespace logitd {
namespace {

std::atomic<bool> grpc_is_ending = false;

void LogGrpc(bool is_error, std::string_view message) {
  if (grpc_is_ending) return;
  log::Limited(log::Source::kGrpc, is_error ? spdlog::level::warn : spdlog::level::debug,
               "grpc: {}", message);
}

#if LOGITD_GPR_LOG
void TakeGrpcLog() {
  gpr_set_log_function([](gpr_log_func_args* args) {
    LogGrpc(args->severity == GPR_LOG_SEVERITY_ERROR, args->message);
  });
}
#else
class GrpcSink final : public absl::LogSink {
 public:
  void Send(const absl::LogEntry& entry) override {
    LogGrpc(entry.log_severity() >= absl::LogSeverity::kError,
            {entry.text_message().data(), entry.text_message().size()});
  }
};

// Only gRPC uses Abseil's log.
void TakeGrpcLog() {
  absl::InitializeLog();
  absl::SetStderrThreshold(absl::LogSeverityAtLeast::kInfinity);
  absl::AddLogSink(new GrpcSink);  // never removed: gRPC's threads may outlive everything
}
#endif

}  // namespace

void SetUpLogging(const std::string& level, const std::string& format) {
  auto logger =
      std::make_shared<spdlog::logger>("logitd", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_formatter(
      log::MakeFormatter(format == "json" ? log::Format::kJson : log::Format::kText));
  logger->set_level(spdlog::level::from_str(level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
  TakeGrpcLog();
}

void GrpcIsEnding() { grpc_is_ending = true; }

}  // namespace logitd

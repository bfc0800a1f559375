#include "server/log.h"

#include <grpc/support/log.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <memory>

#include "server/log/format.h"
#include "server/log/limited.h"

namespace logitd {
namespace {

std::atomic<bool> grpc_is_ending = false;

void LogGrpc(gpr_log_func_args* args) {
  if (grpc_is_ending) return;
  const bool warn = args->severity == GPR_LOG_SEVERITY_ERROR;
  log::Limited(log::Source::kGrpc, warn ? spdlog::level::warn : spdlog::level::debug, "grpc: {}",
               args->message);
}

}  // namespace

void SetUpLogging(const std::string& level, const std::string& format) {
  auto logger =
      std::make_shared<spdlog::logger>("logitd", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_formatter(
      log::MakeFormatter(format == "json" ? log::Format::kJson : log::Format::kText));
  logger->set_level(spdlog::level::from_str(level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
  gpr_set_log_function(&LogGrpc);
}

void GrpcIsEnding() { grpc_is_ending = true; }

}  // namespace logitd

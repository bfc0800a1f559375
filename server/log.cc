#include "server/log.h"

#include <grpc/support/log.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <iterator>
#include <memory>

namespace logitd {
namespace {

// %*: the message, escaped for a JSON string.
class JsonMessage final : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm&,
              spdlog::memory_buf_t& out) override {
    for (const char c : message.payload) {
      if (c == '"' || c == '\\') {
        out.push_back('\\');
        out.push_back(c);
      } else if (static_cast<unsigned char>(c) < 0x20) {
        fmt::format_to(std::back_inserter(out), "\\u{:04x}", static_cast<int>(c));
      } else {
        out.push_back(c);
      }
    }
  }
  std::unique_ptr<custom_flag_formatter> clone() const override {
    return std::make_unique<JsonMessage>();
  }
};

std::atomic<bool> grpc_is_ending = false;

void LogGrpc(gpr_log_func_args* args) {
  if (grpc_is_ending) return;
  const bool warn = args->severity == GPR_LOG_SEVERITY_ERROR;
  spdlog::log(warn ? spdlog::level::warn : spdlog::level::debug, "grpc: {}", args->message);
}

}  // namespace

void SetUpLogging(const std::string& level, const std::string& format) {
  auto logger =
      std::make_shared<spdlog::logger>("logitd", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  if (format == "json") {
    auto formatter = std::make_unique<spdlog::pattern_formatter>();
    formatter->add_flag<JsonMessage>('*').set_pattern(
        R"({"time":"%Y-%m-%dT%H:%M:%S.%e%z","level":"%l","message":"%*"})");
    logger->set_formatter(std::move(formatter));
  } else {
    logger->set_pattern("%Y-%m-%d %H:%M:%S.%e %l %v");
  }
  logger->set_level(spdlog::level::from_str(level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
  gpr_set_log_function(&LogGrpc);
}

void GrpcIsEnding() { grpc_is_ending = true; }

}  // namespace logitd

#include "server/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>

#include "server/log/format.h"

namespace logitd {

void SetUpLogging(const std::string& level, const std::string& format) {
  auto logger =
      std::make_shared<spdlog::logger>("logitd", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_formatter(
      log::MakeFormatter(format == "json" ? log::Format::kJson : log::Format::kText));
  logger->set_level(spdlog::level::from_str(level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace logitd

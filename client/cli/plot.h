// A line over a text, as a PNG.
#ifndef LOGITD_CLIENT_CLI_PLOT_H_
#define LOGITD_CLIENT_CLI_PLOT_H_

#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace logitd::cli {

// Writes `losses`, token after token, as dots and a running mean, with a dashed line at `mean`.
// What is not finite is left out. UNAVAILABLE: the file cannot be written.
absl::Status PlotLosses(const std::string& path, absl::Span<const float> losses, double mean);

}  // namespace logitd::cli

#endif  // LOGITD_CLIENT_CLI_PLOT_H_

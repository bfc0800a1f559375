// logitctl watermark. It calls no server.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "client/tensor_file.h"
#include "kernels/watermark.h"

namespace logitd::cli {
namespace {

struct Detection {
  double score;    // the sum of MarkEvidence of the tokens that count
  int64_t tokens;  // how many count
  double p_value;  // the chance of such a score or a larger one without the watermark
};

absl::StatusOr<std::vector<int32_t>> LoadText(const DetectWatermarkFlags& flags) {
  if (flags.file.empty()) return flags.ids;
  const absl::StatusOr<std::vector<int64_t>> wide = client::LoadIntegers(flags.file);
  if (!wide.ok()) return wide.status();
  std::vector<int32_t> text;
  text.reserve(wide->size());
  for (const int64_t token : *wide) {
    if (token < 0 || token > std::numeric_limits<int32_t>::max()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("--tokens: %s: got %d at place %d, allowed token ids from 0", flags.file,
                          token, text.size()));
    }
    text.push_back(static_cast<int32_t>(token));
  }
  return text;
}

// The chance that the sum of `count` exponential variables of mean 1 is at least `score`: that of a
// Poisson variable of mean `score` to be below `count`.
double GammaTail(int64_t count, double score) {
  if (count == 0 || score <= 0) return 1;
  const bool below = score > static_cast<double>(count);
  double n = static_cast<double>(below ? count - 1 : count);
  double term = std::exp(n * std::log(score) - score - std::lgamma(n + 1));
  double total = 0;
  while (term > total * 1e-17) {
    total += term;
    term *= below ? n / score : score / (n + 1);
    n += below ? -1 : 1;
  }
  return below ? total : 1 - total;
}

// Each context with the token after it counts once.
Detection Detect(const std::vector<int32_t>& text, const DetectWatermarkFlags& flags) {
  Detection found = {.score = 0, .tokens = 0, .p_value = 1};
  std::set<std::vector<int32_t>> seen;
  for (auto t = static_cast<int64_t>(flags.prompt_tokens); t < std::ssize(text); ++t) {
    const int64_t count = std::min<int64_t>(t, flags.width);
    const auto token = text.begin() + t;
    if (!seen.insert(std::vector<int32_t>(token - count, token + 1)).second) continue;
    const uint64_t state =
        WatermarkState(flags.key, text.data() + t - count, static_cast<int32_t>(count));
    found.score += MarkEvidence(WatermarkBits(state, *token));
    ++found.tokens;
  }
  found.p_value = GammaTail(found.tokens, found.score);
  return found;
}

}  // namespace

int RunDetectWatermark(const Session& session, const DetectWatermarkFlags& flags) {
  const absl::StatusOr<std::vector<int32_t>> text = LoadText(flags);
  if (!text.ok()) return BadInput(text.status());
  const Detection found = Detect(*text, flags);
  if (session.json()) {
    Print(absl::StrFormat("{\"score\":%.17g,\"tokens\":%d,\"p_value\":%.17g}\n", found.score,
                          found.tokens, found.p_value));
  } else {
    Print(absl::StrFormat("score    %.6g\ntokens   %d\np-value  %.6g\n", found.score, found.tokens,
                          found.p_value));
  }
  return kExitOk;
}

}  // namespace logitd::cli

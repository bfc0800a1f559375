// What logitctl prints.
#ifndef LOGITD_CLIENT_CLI_OUTPUT_H_
#define LOGITD_CLIENT_CLI_OUTPUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "client/client.h"
#include "logitd/v1/heads.pb.h"
#include "logitd/v1/server.pb.h"

namespace logitd::cli {

std::string Bytes(int64_t bytes);  // "2.0 GiB"

// Json: one line, the server's answer as ToJson has it, with "text" (and "top_text") where text is
// known. Table: lines for people.

// The answer to one logitctl topk.
struct TopKOutput {
  client::TopKResult result;
  std::vector<std::string> text;  // bytes of every entry of its indices; empty: not known
};
std::string Json(const TopKOutput& output);
std::string Table(const TopKOutput& output);

// The answer to one logitctl sample.
struct SampleOutput {
  const client::SampleResult* result = nullptr;
  std::vector<std::string> text;      // bytes of every token; empty: not known
  std::vector<std::string> top_text;  // and of every top token
};
std::string Json(const SampleOutput& output);
std::string Table(const SampleOutput& output);

// The answer to one logitctl verify.
struct VerifyOutput {
  const client::VerifyResult* result = nullptr;
  const v1::VerifyRequest* asked = nullptr;  // its sequences and drafts
};
std::string Json(const VerifyOutput& output);
std::string Table(const VerifyOutput& output);

// The answers to one logitctl generate, token by token.
struct Generated {
  void Add(const client::SampleResult& result, const std::string& text);

  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  std::vector<int32_t> ranks;
  std::string text;
  int64_t server_ns = 0;
  int64_t kernel_ns = 0;
  absl::Duration round_trip;
};
std::string TokenLineHead();
std::string TokenLine(int position, const client::SampleResult& result, const std::string& text,
                      const std::vector<std::string>& top_text);
std::string GeneratedLine(const Generated& generated);
std::string GeneratedJson(const Generated& generated, const std::string& prompt);

// The answer to one logitctl score.
struct ScoreOutput {
  const client::ScoreResult* result = nullptr;
  std::vector<int32_t> targets;       // one more key of the JSON
  std::vector<std::string> text;      // bytes of every target; empty: not known
  std::vector<std::string> top_text;  // and of every top token
  bool totals = false;                // only the offset, the totals and the timings
};
std::string Json(const ScoreOutput& output);
std::string Table(const ScoreOutput& output);

// The answer to one logitctl divergence.
struct DivergenceOutput {
  const client::DivergenceResult* result = nullptr;
  bool totals = false;  // only the offset, the totals and the timings
};
std::string Json(const DivergenceOutput& output);
std::string Table(const DivergenceOutput& output);

// The answer to one logitctl softmax or softmax-backward, except the array in the file.
struct AttentionOutput {
  const client::AttentionResult* result = nullptr;
  std::vector<int64_t> shape;
  std::string file;
};
std::string Json(const AttentionOutput& output);
std::string Table(const AttentionOutput& output);

struct HeadOutput {
  v1::Head head;
};
std::string Json(const HeadOutput& output);
std::string Table(const HeadOutput& output);

struct HeadsOutput {
  std::vector<v1::Head> heads;
};
std::string Json(const HeadsOutput& output);
std::string Table(const HeadsOutput& output);

struct InfoOutput {
  v1::GetInfoResponse info;
  std::string address;
};
std::string Json(const InfoOutput& output);
std::string Table(const InfoOutput& output);

struct LoadOutput {
  v1::GetLoadResponse load;
};
std::string Json(const LoadOutput& output);
std::string Table(const LoadOutput& output);

}  // namespace logitd::cli

#endif  // LOGITD_CLIENT_CLI_OUTPUT_H_

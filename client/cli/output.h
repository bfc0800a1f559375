// What logitctl prints: JSON with the proto's own keys, or tables for people.
#ifndef LOGITD_CLIENT_CLI_OUTPUT_H_
#define LOGITD_CLIENT_CLI_OUTPUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "client/client.h"
#include "logitd/v1/heads.pb.h"
#include "logitd/v1/server.pb.h"

namespace logitd::cli {

// What came of all requests of one logitctl topk, rows in the order of the file.
struct TopKOutput {
  client::TopKResult
      result;  // of several requests: rows joined, phases summed, the largest batch_rows
  int requests = 0;
  std::vector<std::string> text;  // bytes of every entry of result.indices; empty: not known
};

void Append(client::TopKResult part, TopKOutput* output);

// One line: a logitd.v1.TopKResponse in protobuf's JSON mapping, but with 64-bit integers as
// numbers; NaN and infinities are the strings "NaN", "Infinity", "-Infinity". Where text is known,
// one more key, "text".
std::string TopKJson(const TopKOutput& output);
std::string TopKTable(const TopKOutput& output);

// What came of one logitctl sample.
struct SampleOutput {
  const client::SampleResult* result = nullptr;
  std::vector<std::string> text;      // bytes of every token; empty: not known
  std::vector<std::string> top_text;  // and of every top token
};
// As TopKJson, of a logitd.v1.SampleResponse; where text is known two more keys, "text" and
// "top_text".
std::string SampleJson(const SampleOutput& output);
std::string SampleTable(const SampleOutput& output);

// What came of one logitctl generate, token by token.
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

// What came of one logitctl score.
struct ScoreOutput {
  const client::ScoreResult* result = nullptr;
  std::vector<int32_t> targets;
  std::vector<std::string> text;      // bytes of every target; empty: not known
  std::vector<std::string> top_text;  // and of every top token
  bool totals = false;                // no lines for tokens
};
// As TopKJson, of a logitd.v1.ScoreResponse, with "targets" and, where text is known, "text" and
// "top_text"; with `totals` of its offset, totals and timings alone.
std::string ScoreJson(const ScoreOutput& output);
std::string ScoreTable(const ScoreOutput& output);

// What came of one logitctl softmax or softmax-backward, beside the file.
struct AttentionOutput {
  const client::AttentionResult* result = nullptr;
  std::vector<int64_t> shape;
  std::string file;
};
std::string AttentionJson(const AttentionOutput& output);
std::string AttentionTable(const AttentionOutput& output);

// As TopKJson, of a logitd.v1.Head or a logitd.v1.ListHeadsResponse.
std::string HeadJson(const v1::Head& head);
std::string HeadsJson(const std::vector<v1::Head>& heads);
std::string HeadsTable(const std::vector<v1::Head>& heads);

// "llama: [#####-----]  50%, 2.0 of 4.0 GiB", of 79 columns at most. A total of 0: it waits.
std::string ProgressLine(const std::string& name, int64_t done_bytes, int64_t total_bytes);

std::string InfoJson(const v1::GetInfoResponse& info);
std::string InfoTable(const v1::GetInfoResponse& info, const std::string& address);

}  // namespace logitd::cli

#endif  // LOGITD_CLIENT_CLI_OUTPUT_H_

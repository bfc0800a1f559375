// What logitctl prints: JSON with the proto's own keys, or tables for people.
#ifndef LOGITD_CLIENT_CLI_OUTPUT_H_
#define LOGITD_CLIENT_CLI_OUTPUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "client/client.h"
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

std::string InfoJson(const v1::GetInfoResponse& info);
std::string InfoTable(const v1::GetInfoResponse& info, const std::string& address);

}  // namespace logitd::cli

#endif  // LOGITD_CLIENT_CLI_OUTPUT_H_

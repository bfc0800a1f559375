#include "client/cli/output.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "client/tensor_file.h"

namespace logitd::cli {
namespace {

using nlohmann::ordered_json;

// The shortest decimal that reads back as the same float, rather than as the same double.
ordered_json FloatJson(float value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  char text[32] = {};
  std::to_chars(text, text + sizeof(text) - 1, value);
  return std::strtod(text, nullptr);
}

ordered_json FloatsJson(const std::vector<float>& values) {
  ordered_json out = ordered_json::array();
  for (float value : values) out.push_back(FloatJson(value));
  return out;
}

std::string Time(double ns) {
  if (ns < 1e3) return absl::StrFormat("%.0f ns", ns);
  if (ns < 1e6) return absl::StrFormat("%.1f us", ns / 1e3);
  if (ns < 1e9) return absl::StrFormat("%.2f ms", ns / 1e6);
  return absl::StrFormat("%.2f s", ns / 1e9);
}

std::string Bytes(int64_t bytes) {
  if (bytes >= int64_t{1} << 30) return absl::StrFormat("%.1f GiB", bytes / double{1 << 30});
  if (bytes >= 1 << 20) return absl::StrFormat("%.1f MiB", bytes / double{1 << 20});
  return absl::StrFormat("%d bytes", bytes);
}

template <typename T>
void Join(const std::vector<T>& from, std::vector<T>* to) {
  to->insert(to->end(), from.begin(), from.end());
}

}  // namespace

void Append(client::TopKResult part, TopKOutput* output) {
  client::TopKResult& all = output->result;
  if (output->requests++ == 0) {
    all = std::move(part);
    return;
  }
  for (int32_t k : part.k) all.offsets.push_back(all.offsets.back() + k);
  Join(part.k, &all.k);
  Join(part.indices, &all.indices);
  Join(part.probs, &all.probs);
  Join(part.logsumexp, &all.logsumexp);
  Join(part.status, &all.status);
  Join(part.status_position, &all.status_position);
  v1::Timings& t = all.timings;
  const v1::Timings& p = part.timings;
  t.set_receive_ns(t.receive_ns() + p.receive_ns());
  t.set_copy_ns(t.copy_ns() + p.copy_ns());
  t.set_queue_ns(t.queue_ns() + p.queue_ns());
  t.set_h2d_ns(t.h2d_ns() + p.h2d_ns());
  t.set_kernel_ns(t.kernel_ns() + p.kernel_ns());
  t.set_d2h_ns(t.d2h_ns() + p.d2h_ns());
  t.set_total_ns(t.total_ns() + p.total_ns());
  t.set_batch_rows(std::max(t.batch_rows(), p.batch_rows()));
  all.round_trip += part.round_trip;
  all.attempts += part.attempts;
}

std::string TopKJson(const TopKOutput& output) {
  const client::TopKResult& result = output.result;
  ordered_json status = ordered_json::array();
  for (v1::RowStatus row : result.status) status.push_back(v1::RowStatus_Name(row));
  ordered_json out = {
      {"k", result.k},
      {"indices", result.indices},
      {"probs", FloatsJson(result.probs)},
      {"logsumexp", FloatsJson(result.logsumexp)},
      {"status", status},
      {"status_position", result.status_position},
      {"timings",
       {{"receive_ns", result.timings.receive_ns()},
        {"copy_ns", result.timings.copy_ns()},
        {"queue_ns", result.timings.queue_ns()},
        {"h2d_ns", result.timings.h2d_ns()},
        {"kernel_ns", result.timings.kernel_ns()},
        {"d2h_ns", result.timings.d2h_ns()},
        {"batch_rows", result.timings.batch_rows()},
        {"total_ns", result.timings.total_ns()}}},
  };
  if (!output.text.empty()) out["text"] = output.text;
  // A token may be half a character: what is not UTF-8 becomes U+FFFD.
  return out.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

std::string TopKTable(const TopKOutput& output) {
  const client::TopKResult& result = output.result;
  std::string out = absl::StrFormat("%6s %5s %8s %12s%s\n", "row", "rank", "token", "prob",
                                    output.text.empty() ? "" : "  text");
  for (int64_t row = 0; row < result.rows(); ++row) {
    if (result.status[row] != v1::ROW_STATUS_OK) {
      absl::StrAppendFormat(
          &out, "%6d  %s", row,
          absl::StripPrefix(v1::RowStatus_Name(result.status[row]), "ROW_STATUS_"));
      if (result.status_position[row] >= 0) {
        absl::StrAppendFormat(&out, " at token %d", result.status_position[row]);
      }
      out += '\n';
      continue;
    }
    for (int32_t rank = 0; rank < result.k[row]; ++rank) {
      const int64_t entry = result.offsets[row] + rank;
      absl::StrAppendFormat(&out, "%6d %5d %8d %12.6g", row, rank + 1, result.indices[entry],
                            result.probs[entry]);
      if (!output.text.empty()) {
        absl::StrAppendFormat(&out, "  \"%s\"", absl::CHexEscape(output.text[entry]));
      }
      out += '\n';
    }
  }
  const v1::Timings& t = result.timings;
  absl::StrAppendFormat(&out,
                        "server: receive %s, copy %s, queue %s, h2d %s, kernel %s, d2h %s, total "
                        "%s (batch of %d rows)\n",
                        Time(t.receive_ns()), Time(t.copy_ns()), Time(t.queue_ns()),
                        Time(t.h2d_ns()), Time(t.kernel_ns()), Time(t.d2h_ns()), Time(t.total_ns()),
                        t.batch_rows());
  absl::StrAppendFormat(&out, "client: round trip %s, requests %d, attempts %d\n",
                        Time(absl::ToDoubleNanoseconds(result.round_trip)), output.requests,
                        result.attempts);
  return out;
}

std::string InfoJson(const v1::GetInfoResponse& info) {
  ordered_json ops = ordered_json::array();
  for (const v1::Op& op : info.ops()) {
    ordered_json dtypes = ordered_json::array();
    for (int dtype : op.dtypes()) dtypes.push_back(v1::DType_Name(dtype));
    ops.push_back({{"name", op.name()}, {"method", op.method()}, {"dtypes", dtypes}});
  }
  const v1::Limits& limits = info.limits();
  const ordered_json out = {
      {"version", info.version()},
      {"backend", info.backend()},
      {"device", {{"name", info.device().name()}, {"memory_bytes", info.device().memory_bytes()}}},
      {"limits",
       {{"max_request_bytes", limits.max_request_bytes()},
        {"max_held_bytes", limits.max_held_bytes()},
        {"max_batch_rows", limits.max_batch_rows()},
        {"max_vocab", limits.max_vocab()},
        {"max_answer_bytes", limits.max_answer_bytes()},
        {"streams", limits.streams()}}},
      {"ops", ops},
      {"draining", info.draining()},
  };
  return out.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

std::string InfoTable(const v1::GetInfoResponse& info, const std::string& address) {
  const v1::Limits& limits = info.limits();
  std::string out = absl::StrFormat("logitd %s at %s%s\n", info.version(), address,
                                    info.draining() ? ", draining" : "");
  absl::StrAppendFormat(&out, "backend  %s: %s, %s\n", info.backend(), info.device().name(),
                        Bytes(info.device().memory_bytes()));
  absl::StrAppendFormat(
      &out, "limits   request %s, answer %s, rows %d, vocab %d; in flight %s, streams %d\n",
      Bytes(limits.max_request_bytes()), Bytes(limits.max_answer_bytes()), limits.max_batch_rows(),
      limits.max_vocab(), Bytes(limits.max_held_bytes()), limits.streams());
  for (const v1::Op& op : info.ops()) {
    absl::StrAppendFormat(&out, "op       %s by %s:", op.name(), op.method());
    for (int dtype : op.dtypes()) {
      absl::StrAppend(&out, " ", client::DTypeShortName(static_cast<v1::DType>(dtype)));
    }
    out += '\n';
  }
  return out;
}

}  // namespace logitd::cli

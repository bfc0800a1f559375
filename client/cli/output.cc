#include "client/cli/output.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/codec.h"
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

ordered_json TimingsJson(const v1::Timings& t) {
  return {{"receive_ns", t.receive_ns()}, {"copy_ns", t.copy_ns()},     {"queue_ns", t.queue_ns()},
          {"h2d_ns", t.h2d_ns()},         {"kernel_ns", t.kernel_ns()}, {"d2h_ns", t.d2h_ns()},
          {"batch_rows", t.batch_rows()}, {"total_ns", t.total_ns()}};
}

std::string TimingsLine(const v1::Timings& t) {
  return absl::StrFormat(
      "server: receive %s, copy %s, queue %s, h2d %s, kernel %s, d2h %s, total %s (batch of %d "
      "rows)\n",
      Time(t.receive_ns()), Time(t.copy_ns()), Time(t.queue_ns()), Time(t.h2d_ns()),
      Time(t.kernel_ns()), Time(t.d2h_ns()), Time(t.total_ns()), t.batch_rows());
}

// A token may be half a character: what is not UTF-8 becomes U+FFFD.
std::string Line(const ordered_json& json) {
  return json.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

template <typename Repeated>
auto Vector(const Repeated& field) {
  return std::vector<typename Repeated::value_type>(field.begin(), field.end());
}

std::string Quoted(const std::string& text) {
  return absl::StrCat("\"", absl::CHexEscape(text), "\"");
}

std::string StatusText(v1::RowStatus status, int32_t position) {
  std::string out(absl::StripPrefix(v1::RowStatus_Name(status), "ROW_STATUS_"));
  if (position >= 0) absl::StrAppendFormat(&out, " at token %d", position);
  return out;
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
  client::AddTimings(part.timings, &all.timings);
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
      {"timings", TimingsJson(result.timings)},
  };
  if (!output.text.empty()) out["text"] = output.text;
  return Line(out);
}

std::string TopKTable(const TopKOutput& output) {
  const client::TopKResult& result = output.result;
  std::string out = absl::StrFormat("%6s %5s %8s %12s%s\n", "row", "rank", "token", "prob",
                                    output.text.empty() ? "" : "  text");
  for (int64_t row = 0; row < result.rows(); ++row) {
    if (result.status[row] != v1::ROW_STATUS_OK) {
      absl::StrAppendFormat(&out, "%6d  %s\n", row,
                            StatusText(result.status[row], result.status_position[row]));
      continue;
    }
    for (int32_t rank = 0; rank < result.k[row]; ++rank) {
      const int64_t entry = result.offsets[row] + rank;
      absl::StrAppendFormat(&out, "%6d %5d %8d %12.6g", row, rank + 1, result.indices[entry],
                            result.probs[entry]);
      if (!output.text.empty()) {
        absl::StrAppend(&out, "  ", Quoted(output.text[entry]));
      }
      out += '\n';
    }
  }
  out += TimingsLine(result.timings);
  absl::StrAppendFormat(&out, "client: round trip %s, requests %d, attempts %d\n",
                        Time(absl::ToDoubleNanoseconds(result.round_trip)), output.requests,
                        result.attempts);
  return out;
}

std::string SampleJson(const SampleOutput& output) {
  const v1::SampleResponse& a = output.result->answer;
  ordered_json status = ordered_json::array();
  for (int row : a.status()) status.push_back(v1::RowStatus_Name(static_cast<v1::RowStatus>(row)));
  ordered_json out = {
      {"tokens", Vector(a.tokens())},
      {"logprobs", FloatsJson(Vector(a.logprobs()))},
      {"ranks", Vector(a.ranks())},
      {"logsumexp", FloatsJson(Vector(a.logsumexp()))},
      {"status", status},
      {"status_position", Vector(a.status_position())},
      {"top_count", Vector(a.top_count())},
      {"top_ids", Vector(a.top_ids())},
      {"top_logprobs", FloatsJson(Vector(a.top_logprobs()))},
      {"extra_count", Vector(a.extra_count())},
      {"extra_logprobs", FloatsJson(Vector(a.extra_logprobs()))},
      {"timings", TimingsJson(a.timings())},
  };
  if (!output.text.empty()) {
    out["text"] = output.text;
    out["top_text"] = output.top_text;
  }
  return Line(out);
}

std::string SampleTable(const SampleOutput& output) {
  const client::SampleResult& result = *output.result;
  const v1::SampleResponse& a = result.answer;
  std::string out = absl::StrFormat("%6s %8s %6s %12s%s\n", "row", "token", "rank", "logprob",
                                    output.text.empty() ? "" : "  text");
  for (int row = 0; row < static_cast<int>(result.rows()); ++row) {
    if (a.status(row) != v1::ROW_STATUS_OK) {
      absl::StrAppendFormat(&out, "%6d  %s\n", row,
                            StatusText(a.status(row), a.status_position(row)));
      continue;
    }
    absl::StrAppendFormat(&out, "%6d %8d %6d %12.6g", row, a.tokens(row), a.ranks(row),
                          a.logprobs(row));
    if (!output.text.empty()) absl::StrAppend(&out, "  ", Quoted(output.text[row]));
    out += '\n';
    for (int64_t e = result.top_offsets[row]; e < result.top_offsets[row + 1]; ++e) {
      const int entry = static_cast<int>(e);
      absl::StrAppendFormat(&out, "%6s %8d %6d %12.6g", "top", a.top_ids(entry),
                            e - result.top_offsets[row] + 1, a.top_logprobs(entry));
      if (!output.top_text.empty()) absl::StrAppend(&out, "  ", Quoted(output.top_text[entry]));
      out += '\n';
    }
    for (int64_t e = result.extra_offsets[row]; e < result.extra_offsets[row + 1]; ++e) {
      absl::StrAppendFormat(&out, "%6s %8s %6s %12.6g\n", "asked", "", "",
                            a.extra_logprobs(static_cast<int>(e)));
    }
  }
  out += TimingsLine(a.timings());
  absl::StrAppendFormat(&out, "client: round trip %s, attempts %d\n",
                        Time(absl::ToDoubleNanoseconds(result.round_trip)), result.attempts);
  return out;
}

void Generated::Add(const client::SampleResult& result, const std::string& token_text) {
  const v1::SampleResponse& a = result.answer;
  tokens.push_back(a.tokens(0));
  logprobs.push_back(a.logprobs(0));
  ranks.push_back(a.ranks(0));
  text += token_text;
  server_ns += a.timings().total_ns();
  kernel_ns += a.timings().kernel_ns();
  round_trip += result.round_trip;
}

std::string TokenLineHead() {
  return absl::StrFormat("%6s %8s %6s %10s  %s\n", "place", "token", "rank", "logprob", "text");
}

std::string TokenLine(int position, const client::SampleResult& result, const std::string& text,
                      const std::vector<std::string>& top_text) {
  const v1::SampleResponse& a = result.answer;
  std::string out = absl::StrFormat("%6d %8d %6d %10.4f  %s", position, a.tokens(0), a.ranks(0),
                                    a.logprobs(0), Quoted(text));
  for (size_t i = 0; i < top_text.size(); ++i) {
    absl::StrAppendFormat(&out, "%s %s %.2f", i == 0 ? "   of" : ",", Quoted(top_text[i]),
                          std::exp(a.top_logprobs(static_cast<int>(i))));
  }
  return out + "\n";
}

std::string GeneratedLine(const Generated& generated) {
  const double tokens = std::max<double>(1, static_cast<double>(generated.tokens.size()));
  double logprob = 0;
  for (float value : generated.logprobs) logprob += value;
  return absl::StrFormat(
      "%d tokens, mean logprob %.3f; of each: kernel %s, server %s, round trip %s\n",
      generated.tokens.size(), logprob / tokens, Time(generated.kernel_ns / tokens),
      Time(generated.server_ns / tokens),
      Time(absl::ToDoubleNanoseconds(generated.round_trip) / tokens));
}

std::string GeneratedJson(const Generated& generated, const std::string& prompt) {
  return Line({{"prompt", prompt},
               {"text", generated.text},
               {"tokens", generated.tokens},
               {"logprobs", FloatsJson(generated.logprobs)},
               {"ranks", generated.ranks}});
}

namespace {

ordered_json DoubleJson(double value) {
  return std::isfinite(value) ? ordered_json(value) : FloatJson(static_cast<float>(value));
}

ordered_json TotalsJson(const v1::ScoreTotals& t) {
  return {{"rows", t.rows()},
          {"counted", t.counted()},
          {"ignored", t.ignored()},
          {"faulty", t.faulty()},
          {"loss_sum", DoubleJson(t.loss_sum())},
          {"target_logprob_sum", DoubleJson(t.target_logprob_sum())},
          {"loss_mean", DoubleJson(t.loss_mean())},
          {"perplexity", DoubleJson(t.perplexity())}};
}

}  // namespace

std::string ScoreJson(const ScoreOutput& output) {
  const v1::ScoreResponse& a = output.result->answer;
  ordered_json out = {{"offset", a.offset()},
                      {"totals", TotalsJson(a.totals())},
                      {"timings", TimingsJson(a.timings())}};
  if (output.totals) return Line(out);
  ordered_json status = ordered_json::array();
  for (int row : a.status()) status.push_back(v1::RowStatus_Name(static_cast<v1::RowStatus>(row)));
  out["targets"] = output.targets;
  out["losses"] = FloatsJson(Vector(a.losses()));
  out["target_logprobs"] = FloatsJson(Vector(a.target_logprobs()));
  out["ranks"] = Vector(a.ranks());
  out["logsumexp"] = FloatsJson(Vector(a.logsumexp()));
  out["status"] = status;
  out["status_position"] = Vector(a.status_position());
  out["top_count"] = Vector(a.top_count());
  out["top_ids"] = Vector(a.top_ids());
  out["top_logprobs"] = FloatsJson(Vector(a.top_logprobs()));
  out["extra_count"] = Vector(a.extra_count());
  out["extra_logprobs"] = FloatsJson(Vector(a.extra_logprobs()));
  out["entropies"] = FloatsJson(Vector(a.entropies()));
  if (!output.text.empty()) {
    out["text"] = output.text;
    out["top_text"] = output.top_text;
  }
  return Line(out);
}

std::string ScoreTable(const ScoreOutput& output) {
  const client::ScoreResult& result = *output.result;
  const v1::ScoreResponse& a = result.answer;
  const bool ranks = a.ranks_size() > 0;
  const bool entropies = a.entropies_size() > 0;
  std::string out;
  if (!output.totals) {
    absl::StrAppendFormat(&out, "%6s %8s %10s %10s%s%s%s\n", "row", "target", "loss", "logprob",
                          ranks ? "   rank" : "", entropies ? "    entropy" : "",
                          output.text.empty() ? "" : "  text");
  }
  for (int row = 0; !output.totals && row < a.losses_size(); ++row) {
    absl::StrAppendFormat(&out, "%6d %8d", row, output.targets[static_cast<size_t>(row)]);
    if (a.status(row) != v1::ROW_STATUS_OK) {
      absl::StrAppendFormat(&out, "  %s\n", StatusText(a.status(row), a.status_position(row)));
      continue;
    }
    absl::StrAppendFormat(&out, " %10.4f %10.4f", a.losses(row), a.target_logprobs(row));
    if (ranks) absl::StrAppendFormat(&out, " %6d", a.ranks(row));
    if (entropies) absl::StrAppendFormat(&out, " %10.4f", a.entropies(row));
    if (!output.text.empty()) {
      absl::StrAppend(&out, "  ", Quoted(output.text[static_cast<size_t>(row)]));
    }
    const auto at = static_cast<size_t>(row);
    for (int64_t e = result.top_offsets[at]; e < result.top_offsets[at + 1]; ++e) {
      const int entry = static_cast<int>(e);
      const std::string name = output.top_text.empty()
                                   ? absl::StrCat(a.top_ids(entry))
                                   : Quoted(output.top_text[static_cast<size_t>(e)]);
      absl::StrAppendFormat(&out, "%s %s %.3f", e == result.top_offsets[at] ? "   top" : ",", name,
                            a.top_logprobs(entry));
    }
    for (int64_t e = result.extra_offsets[at]; e < result.extra_offsets[at + 1]; ++e) {
      absl::StrAppendFormat(&out, "%s %.3f", e == result.extra_offsets[at] ? "   asked" : ",",
                            a.extra_logprobs(static_cast<int>(e)));
    }
    out += '\n';
  }
  const v1::ScoreTotals& t = a.totals();
  absl::StrAppendFormat(&out, "%d rows: %d counted, %d ignored, %d faulty\n", t.rows(), t.counted(),
                        t.ignored(), t.faulty());
  absl::StrAppendFormat(&out, "loss %.6g in all, mean %.6g; perplexity %.6g\n", t.loss_sum(),
                        t.loss_mean(), t.perplexity());
  out += TimingsLine(a.timings());
  absl::StrAppendFormat(&out, "client: round trip %s, messages %d, streams %d\n",
                        Time(absl::ToDoubleNanoseconds(result.round_trip)), result.messages,
                        result.attempts);
  return out;
}

std::string AttentionJson(const AttentionOutput& output) {
  const client::AttentionResult& result = *output.result;
  ordered_json rows = ordered_json::array();
  ordered_json status = ordered_json::array();
  ordered_json positions = ordered_json::array();
  for (const client::AttentionFault& fault : result.faults) {
    rows.push_back(fault.row);
    status.push_back(v1::RowStatus_Name(fault.status));
    positions.push_back(fault.position);
  }
  ordered_json out = {{"shape", output.shape},  {"dtype", v1::DType_Name(result.dtype)},
                      {"out", output.file},     {"fault_rows", rows},
                      {"fault_status", status}, {"fault_positions", positions}};
  if (!result.d_sinks.empty()) {
    ordered_json& sinks = out["d_sinks"] = ordered_json::array();
    for (double value : result.d_sinks) {
      sinks.push_back(std::isfinite(value) ? ordered_json(value)
                                           : FloatJson(static_cast<float>(value)));
    }
  }
  out["messages"] = result.messages;
  out["timings"] = TimingsJson(result.timings);
  return Line(out);
}

std::string AttentionTable(const AttentionOutput& output) {
  constexpr size_t kShown = 10;
  const client::AttentionResult& result = *output.result;
  std::string out = absl::StrFormat("[%s] %s to %s\n", absl::StrJoin(output.shape, ","),
                                    client::DTypeShortName(result.dtype), output.file);
  for (size_t i = 0; i < std::min(kShown, result.faults.size()); ++i) {
    const client::AttentionFault& fault = result.faults[i];
    absl::StrAppendFormat(&out, "row %d: %s", fault.row,
                          absl::StripPrefix(v1::RowStatus_Name(fault.status), "ROW_STATUS_"));
    if (fault.position >= 0) absl::StrAppendFormat(&out, " at key %d", fault.position);
    out += '\n';
  }
  if (result.faults.size() > kShown) {
    absl::StrAppendFormat(&out, "and %d more rows that are not OK\n",
                          result.faults.size() - kShown);
  }
  for (size_t head = 0; head < result.d_sinks.size(); ++head) {
    absl::StrAppendFormat(&out, "d_sink of head %d: %g\n", head, result.d_sinks[head]);
  }
  out += TimingsLine(result.timings);
  absl::StrAppendFormat(&out, "client: round trip %s, messages %d, attempts %d\n",
                        Time(absl::ToDoubleNanoseconds(result.round_trip)), result.messages,
                        result.attempts);
  return out;
}

namespace {

ordered_json ToJson(const v1::Head& head) {
  return {{"name", head.name()},
          {"path", head.path()},
          {"tensor", head.tensor()},
          {"dtype", v1::DType_Name(head.dtype())},
          {"vocab", head.vocab()},
          {"hidden", head.hidden()},
          {"stored_vocab", head.stored_vocab()},
          {"bias", head.bias()},
          {"final_norm", head.final_norm()},
          {"norm_epsilon", FloatJson(head.norm_epsilon())},
          {"scale", FloatJson(head.scale())},
          {"softcap", FloatJson(head.softcap())},
          {"device_bytes", head.device_bytes()},
          {"loaded_unix_ms", head.loaded_unix_ms()},
          {"load_ms", head.load_ms()}};
}

// What there is beside the weight.
std::string Extras(const v1::Head& head) {
  std::vector<std::string> extras;
  if (head.final_norm()) extras.push_back("norm");
  if (head.bias()) extras.push_back("bias");
  if (head.scale() != 1.0f) extras.push_back(absl::StrFormat("scale %g", head.scale()));
  if (head.softcap() != 0.0f) extras.push_back(absl::StrFormat("softcap %g", head.softcap()));
  if (head.stored_vocab() != head.vocab()) {
    extras.push_back(absl::StrFormat("of %d rows", head.stored_vocab()));
  }
  return extras.empty() ? "-" : absl::StrJoin(extras, ", ");
}

}  // namespace

std::string HeadJson(const v1::Head& head) { return Line(ToJson(head)); }

std::string HeadsJson(const std::vector<v1::Head>& heads) {
  ordered_json list = ordered_json::array();
  for (const v1::Head& head : heads) list.push_back(ToJson(head));
  return Line({{"heads", list}});
}

std::string HeadsTable(const std::vector<v1::Head>& heads) {
  if (heads.empty()) return "no heads loaded\n";
  std::string out = absl::StrFormat("%-16s %5s %8s %7s %10s  %-24s  %s\n", "name", "dtype", "vocab",
                                    "hidden", "memory", "beside", "tensor, path");
  for (const v1::Head& head : heads) {
    absl::StrAppendFormat(&out, "%-16s %5s %8d %7d %10s  %-24s  %s, %s\n", head.name(),
                          client::DTypeShortName(head.dtype()), head.vocab(), head.hidden(),
                          Bytes(head.device_bytes()), Extras(head), head.tensor(), head.path());
  }
  return out;
}

std::string ProgressLine(const std::string& name, int64_t done_bytes, int64_t total_bytes) {
  constexpr size_t kBar = 20;
  constexpr size_t kMaxName = 24;
  const std::string shown = name.size() > kMaxName ? name.substr(0, kMaxName) : name;
  if (total_bytes <= 0) return absl::StrFormat("%s: waits for another load", shown);
  const double share = static_cast<double>(done_bytes) / static_cast<double>(total_bytes);
  const auto full = static_cast<size_t>(share * kBar);
  return absl::StrFormat("%s: [%s%s] %3d%%, %s of %s", shown, std::string(full, '#'),
                         std::string(kBar - full, '-'), static_cast<int>(share * 100),
                         Bytes(done_bytes), Bytes(total_bytes));
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
        {"streams", limits.streams()},
        {"max_keys", limits.max_keys()}}},
      {"ops", ops},
      {"draining", info.draining()},
  };
  return Line(out);
}

std::string InfoTable(const v1::GetInfoResponse& info, const std::string& address) {
  const v1::Limits& limits = info.limits();
  std::string out = absl::StrFormat("logitd %s at %s%s\n", info.version(), address,
                                    info.draining() ? ", draining" : "");
  absl::StrAppendFormat(&out, "backend  %s: %s, %s\n", info.backend(), info.device().name(),
                        Bytes(info.device().memory_bytes()));
  absl::StrAppendFormat(
      &out,
      "limits   request %s, answer %s, rows %d, vocab %d, keys %d; in flight %s, streams %d\n",
      Bytes(limits.max_request_bytes()), Bytes(limits.max_answer_bytes()), limits.max_batch_rows(),
      limits.max_vocab(), limits.max_keys(), Bytes(limits.max_held_bytes()), limits.streams());
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

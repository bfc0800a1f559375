#include "client/cli/output.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/cli/json.h"
#include "client/tensor_file.h"

namespace logitd::cli {
namespace {

using nlohmann::ordered_json;

std::string Time(double ns) {
  if (ns < 1e3) return absl::StrFormat("%.0f ns", ns);
  if (ns < 1e6) return absl::StrFormat("%.1f us", ns / 1e3);
  if (ns < 1e9) return absl::StrFormat("%.2f ms", ns / 1e6);
  return absl::StrFormat("%.2f s", ns / 1e9);
}

std::string TimingsLine(const v1::Timings& t) {
  return absl::StrFormat(
      "server: receive %s, copy %s, queue %s, h2d %s, kernel %s, d2h %s, total %s (batch of %d "
      "rows)\n",
      Time(t.receive_ns()), Time(t.copy_ns()), Time(t.queue_ns()), Time(t.h2d_ns()),
      Time(t.kernel_ns()), Time(t.d2h_ns()), Time(t.total_ns()), t.batch_rows());
}

std::string Quoted(const std::string& text) {
  return absl::StrCat("\"", absl::CHexEscape(text), "\"");
}

// "  " and entry `i` of `texts`; nothing where no text is known.
std::string TextColumn(const std::vector<std::string>& texts, int64_t i) {
  return texts.empty() ? "" : absl::StrCat("  ", Quoted(texts[static_cast<size_t>(i)]));
}

std::string StatusText(int status, int32_t position, const char* what = "token") {
  const std::string& name = v1::RowStatus_Name(static_cast<v1::RowStatus>(status));
  std::string out(absl::StripPrefix(name, "ROW_STATUS_"));
  if (position >= 0) absl::StrAppendFormat(&out, " at %s %d", what, position);
  return out;
}

// "text" and "top_text", where they are known.
ordered_json WithText(ordered_json out, const std::vector<std::string>& text,
                      const std::vector<std::string>* top_text = nullptr) {
  if (text.empty()) return out;
  out["text"] = text;
  if (top_text != nullptr) out["top_text"] = *top_text;
  return out;
}

}  // namespace

std::string Bytes(int64_t bytes) {
  if (bytes >= int64_t{1} << 30) return absl::StrFormat("%.1f GiB", bytes / double{1 << 30});
  if (bytes >= 1 << 20) return absl::StrFormat("%.1f MiB", bytes / double{1 << 20});
  return absl::StrFormat("%d bytes", bytes);
}

std::string Time(absl::Duration duration) { return Time(absl::ToDoubleNanoseconds(duration)); }

std::string Json(const TopKOutput& output) {
  return Line(WithText(ToJson(output.result.answer), output.text));
}

std::string Table(const TopKOutput& output) {
  const client::TopKResult& result = output.result;
  const v1::TopKResponse& a = result.answer;
  std::string out = absl::StrFormat("%6s %5s %8s %12s%s\n", "row", "rank", "token", "prob",
                                    output.text.empty() ? "" : "  text");
  for (int row = 0; row < static_cast<int>(result.rows()); ++row) {
    if (a.status(row) != v1::ROW_STATUS_OK) {
      absl::StrAppendFormat(&out, "%6d  %s\n", row,
                            StatusText(a.status(row), a.status_position(row)));
      continue;
    }
    for (int rank = 0; rank < a.k(row); ++rank) {
      const int entry = static_cast<int>(result.top_offsets[row]) + rank;
      absl::StrAppendFormat(&out, "%6d %5d %8d %12.6g%s\n", row, rank + 1, a.indices(entry),
                            a.probs(entry), TextColumn(output.text, entry));
    }
  }
  out += TimingsLine(a.timings());
  absl::StrAppendFormat(&out, "client: round trip %s, requests %d, attempts %d\n",
                        Time(result.round_trip), result.messages, result.attempts);
  return out;
}

namespace {

// A rank that was not asked for is 0.
std::string Rank(int32_t rank) { return rank == 0 ? "-" : absl::StrCat(rank); }

// The lines of a row's lists and entropies, in the columns of a table of draws.
template <typename Answer>
std::string RowDetails(const client::LogitsResult<Answer>& result, int row,
                       const std::vector<std::string>& top_text) {
  const Answer& a = result.answer;
  std::string out;
  for (int64_t e = result.top_offsets[row]; e < result.top_offsets[row + 1]; ++e) {
    const int entry = static_cast<int>(e);
    absl::StrAppendFormat(&out, "%6s %8d %6d %12.6g%s\n", "top", a.top_ids(entry),
                          e - result.top_offsets[row] + 1, a.top_logprobs(entry),
                          TextColumn(top_text, entry));
  }
  for (int64_t e = result.extra_offsets[row]; e < result.extra_offsets[row + 1]; ++e) {
    absl::StrAppendFormat(&out, "%6s %8s %6s %12.6g\n", "asked", "", "",
                          a.extra_logprobs(static_cast<int>(e)));
  }
  if constexpr (std::is_same_v<Answer, v1::SampleResponse>) {
    if (a.draw_count_size() > 0) {
      for (int64_t e = result.draw_offsets[row]; e < result.draw_offsets[row + 1]; ++e) {
        const int entry = static_cast<int>(e);
        absl::StrAppendFormat(&out, "%6s %8d %6s %12.6g\n", "draw", a.draw_tokens(entry), "",
                              a.draw_logprobs(entry));
      }
    }
  }
  if (a.support_count_size() > 0) {
    absl::StrAppendFormat(&out, "%6s %8s of %d tokens\n", "support", "", a.support_size(row));
    for (int64_t e = result.support_offsets[row]; e < result.support_offsets[row + 1]; ++e) {
      const int entry = static_cast<int>(e);
      absl::StrAppendFormat(&out, "%6s %8d %6s %12.6g\n", "", a.support_ids(entry), "",
                            a.support_logprobs(entry));
    }
  }
  if (a.entropies_size() > 0) {
    absl::StrAppendFormat(&out, "%6s %8s %6s %12.6g raw %.6g\n", "entropy", "", "",
                          a.entropies(row), a.raw_entropies(row));
  }
  return out;
}

}  // namespace

std::string Json(const SampleOutput& output) {
  return Line(WithText(ToJson(output.result->answer), output.text, &output.top_text));
}

std::string Table(const SampleOutput& output) {
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
    absl::StrAppendFormat(&out, "%6d %8d %6s %12.6g%s\n", row, a.tokens(row), Rank(a.ranks(row)),
                          a.logprobs(row), TextColumn(output.text, row));
    out += RowDetails(result, row, output.top_text);
  }
  out += TimingsLine(a.timings());
  absl::StrAppendFormat(&out, "client: round trip %s, attempts %d\n", Time(result.round_trip),
                        result.attempts);
  return out;
}

std::string Json(const VerifyOutput& output) { return Line(ToJson(output.result->answer)); }

std::string Table(const VerifyOutput& output) {
  const client::VerifyResult& result = *output.result;
  const v1::VerifyResponse& a = result.answer;
  std::string out =
      absl::StrFormat("%6s %8s %6s %12s %8s\n", "row", "token", "rank", "logprob", "draft");
  int row = 0, draft = 0;
  for (int sequence = 0; sequence < a.accepted_size(); ++sequence) {
    const int accepted = a.accepted(sequence);
    const int drafts = output.asked->sequence_rows(sequence) - 1;
    absl::StrAppendFormat(&out, "sequence %d: %d of %d drafts accepted\n", sequence, accepted,
                          drafts);
    for (int i = 0; i <= drafts; ++i, ++row) {
      const std::string proposed = i < drafts ? absl::StrCat(output.asked->drafts(draft + i)) : "-";
      if (a.status(row) != v1::ROW_STATUS_OK) {
        absl::StrAppendFormat(&out, "%6d %8s %6s %12s %8s  %s\n", row, "-", "-", "-", proposed,
                              StatusText(a.status(row), a.status_position(row)));
        continue;
      }
      absl::StrAppendFormat(&out, "%6d %8d %6s %12.6g %8s  %s\n", row, a.tokens(row),
                            Rank(a.ranks(row)), a.logprobs(row), proposed,
                            i < accepted ? "accepted" : "bonus token");
      out += RowDetails(result, row, {});
    }
    draft += drafts;
  }
  out += TimingsLine(a.timings());
  absl::StrAppendFormat(&out, "client: round trip %s, attempts %d\n", Time(result.round_trip),
                        result.attempts);
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
  std::string out = absl::StrFormat("%6d %8d %6s %10.4f  %s", position, a.tokens(0),
                                    Rank(a.ranks(0)), a.logprobs(0), Quoted(text));
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
      "%d tokens, mean logprob %.3f; per token: kernel %s, server %s, round trip %s\n",
      generated.tokens.size(), logprob / tokens, Time(generated.kernel_ns / tokens),
      Time(generated.server_ns / tokens), Time(generated.round_trip / tokens));
}

std::string GeneratedJson(const Generated& generated, const std::string& prompt) {
  return Line({{"prompt", prompt},
               {"text", generated.text},
               {"tokens", generated.tokens},
               {"logprobs", ToJson(generated.logprobs)},
               {"ranks", generated.ranks}});
}

namespace {

template <typename Answer>
std::string TotalsJson(const Answer& answer) {
  return Line({{"offset", answer.offset()},
               {"totals", ToJson(answer.totals())},
               {"timings", ToJson(answer.timings())}});
}

template <typename Totals>
std::string CountsLine(const Totals& t) {
  return absl::StrFormat("%d rows: %d counted, %d ignored, %d faulty\n", t.rows(), t.counted(),
                         t.ignored(), t.faulty());
}

template <typename Result>
std::string SequenceLines(const Result& result) {
  return absl::StrFormat(
      "%sclient: round trip %s, messages %d, streams %d\n", TimingsLine(result.answer.timings()),
      Time(absl::ToDoubleNanoseconds(result.round_trip)), result.messages, result.attempts);
}

}  // namespace

std::string Json(const ScoreOutput& output) {
  const v1::ScoreResponse& answer = output.result->answer;
  if (output.totals) return TotalsJson(answer);
  ordered_json out = ToJson(answer);
  out["targets"] = output.targets;
  return Line(WithText(std::move(out), output.text, &output.top_text));
}

namespace {

// One line per token.
std::string ScoreRows(const ScoreOutput& output) {
  const client::ScoreResult& result = *output.result;
  const v1::ScoreResponse& a = result.answer;
  const bool ranks = a.ranks_size() > 0;
  const bool entropies = a.entropies_size() > 0;
  std::string out = absl::StrFormat("%6s %8s %10s %10s%s%s%s\n", "row", "target", "loss", "logprob",
                                    ranks ? "   rank" : "", entropies ? "    entropy" : "",
                                    output.text.empty() ? "" : "  text");
  for (int row = 0; row < a.losses_size(); ++row) {
    const auto at = static_cast<size_t>(row);
    absl::StrAppendFormat(&out, "%6d %8d", row, output.targets[at]);
    if (a.status(row) != v1::ROW_STATUS_OK) {
      absl::StrAppendFormat(&out, "  %s\n", StatusText(a.status(row), a.status_position(row)));
      continue;
    }
    absl::StrAppendFormat(&out, " %10.4f %10.4f", a.losses(row), a.target_logprobs(row));
    if (ranks) absl::StrAppendFormat(&out, " %6d", a.ranks(row));
    if (entropies) absl::StrAppendFormat(&out, " %10.4f", a.entropies(row));
    out += TextColumn(output.text, row);
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
  return out;
}

}  // namespace

std::string Table(const ScoreOutput& output) {
  const client::ScoreResult& result = *output.result;
  const v1::ScoreTotals& t = result.answer.totals();
  std::string out = output.totals ? "" : ScoreRows(output);
  out += CountsLine(t);
  absl::StrAppendFormat(&out, "loss %.6g in all, mean %.6g; perplexity %.6g\n", t.loss_sum(),
                        t.loss_mean(), t.perplexity());
  return out + SequenceLines(result);
}

std::string Json(const DivergenceOutput& output) {
  const v1::DivergenceResponse& answer = output.result->answer;
  return output.totals ? TotalsJson(answer) : Line(ToJson(answer));
}

namespace {

// "   name id logprob, id logprob" of a row's tokens; nothing where there are none.
template <typename Ids, typename Logprobs>
std::string TopColumn(absl::string_view name, const std::vector<int64_t>& offsets, int row,
                      const Ids& ids, const Logprobs& logprobs) {
  const auto at = static_cast<size_t>(row);
  std::string out;
  for (int64_t e = offsets[at]; e < offsets[at + 1]; ++e) {
    const int entry = static_cast<int>(e);
    absl::StrAppend(&out, e == offsets[at] ? absl::StrCat("   ", name) : ",");
    absl::StrAppendFormat(&out, " %d %.3f", ids.Get(entry), logprobs.Get(entry));
  }
  return out;
}

// One line per row.
std::string DivergenceRows(const client::DivergenceResult& result) {
  const v1::DivergenceResponse& a = result.answer;
  const bool targets = a.target_logprobs_size() > 0;
  std::string out =
      absl::StrFormat("%6s %11s %11s %10s %10s%s\n", "row", "forward", "reverse", "entropy",
                      "reference", targets ? "    logprob  reference" : "");
  for (int row = 0; row < a.forward_kl_size(); ++row) {
    absl::StrAppendFormat(&out, "%6d", row);
    if (a.status(row) != v1::ROW_STATUS_OK) {
      absl::StrAppendFormat(&out, "  %s\n", StatusText(a.status(row), a.status_position(row)));
      continue;
    }
    absl::StrAppendFormat(&out, " %11.6g %11.6g %10.4f %10.4f", a.forward_kl(row),
                          a.reverse_kl(row), a.entropies(row), a.reference_entropies(row));
    if (targets) {
      absl::StrAppendFormat(&out, " %10.4f %10.4f", a.target_logprobs(row),
                            a.reference_target_logprobs(row));
    }
    absl::StrAppend(&out, TopColumn("top", result.top_offsets, row, a.top_ids(), a.top_logprobs()),
                    TopColumn("reference top", result.reference_top_offsets, row,
                              a.reference_top_ids(), a.reference_top_logprobs()),
                    "\n");
  }
  return out;
}

}  // namespace

std::string Table(const DivergenceOutput& output) {
  const v1::DivergenceResponse& a = output.result->answer;
  std::string out = output.totals ? "" : DivergenceRows(*output.result);
  const v1::DivergenceTotals& t = a.totals();
  out += CountsLine(t);
  absl::StrAppendFormat(&out, "forward %.6g in all, mean %.6g; reverse %.6g in all, mean %.6g\n",
                        t.forward_kl_sum(), t.forward_kl_mean(), t.reverse_kl_sum(),
                        t.reverse_kl_mean());
  return out + SequenceLines(*output.result);
}

std::string Json(const AttentionOutput& output) {
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
  if (!result.d_sinks.empty()) out["d_sinks"] = ToJson(result.d_sinks);
  out["messages"] = result.messages;
  out["timings"] = ToJson(result.timings);
  return Line(out);
}

std::string Table(const AttentionOutput& output) {
  constexpr size_t kShown = 10;
  const client::AttentionResult& result = *output.result;
  std::string out = absl::StrFormat("[%s] %s to %s\n", absl::StrJoin(output.shape, ","),
                                    client::DTypeShortName(result.dtype), output.file);
  for (size_t i = 0; i < std::min(kShown, result.faults.size()); ++i) {
    const client::AttentionFault& fault = result.faults[i];
    absl::StrAppendFormat(&out, "row %d: %s\n", fault.row,
                          StatusText(fault.status, fault.position, "key"));
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
                        Time(result.round_trip), result.messages, result.attempts);
  return out;
}

namespace {

// What the head has besides its weight.
std::string Extras(const v1::Head& head) {
  std::vector<std::string> extras;
  if (head.head_version() > 1) extras.push_back(absl::StrCat("version ", head.head_version()));
  if (head.final_norm()) extras.push_back("norm");
  if (head.bias()) extras.push_back("bias");
  if (head.scale() != 1.0f) extras.push_back(absl::StrFormat("scale %g", head.scale()));
  if (head.softcap() != 0.0f) extras.push_back(absl::StrFormat("softcap %g", head.softcap()));
  if (head.stored_vocab() != head.vocab()) {
    extras.push_back(absl::StrFormat("of %d rows", head.stored_vocab()));
  }
  if (head.shards_size() > 0) {
    extras.push_back(
        absl::StrFormat("%d shard%s", head.shards_size(), head.shards_size() == 1 ? "" : "s"));
  }
  return extras.empty() ? "-" : absl::StrJoin(extras, ", ");
}

}  // namespace

std::string Json(const HeadOutput& output) { return Line(ToJson(output.head)); }
std::string Table(const HeadOutput& output) { return Table(HeadsOutput{{output.head}}); }

std::string Json(const HeadsOutput& output) {
  ordered_json list = ordered_json::array();
  for (const v1::Head& head : output.heads) list.push_back(ToJson(head));
  return Line({{"heads", list}});
}

std::string Table(const HeadsOutput& output) {
  if (output.heads.empty()) return "no heads loaded\n";
  std::string out = absl::StrFormat("%-16s %5s %8s %7s %10s  %-24s  %s\n", "name", "dtype", "vocab",
                                    "hidden", "memory", "extras", "tensor, path");
  for (const v1::Head& head : output.heads) {
    absl::StrAppendFormat(&out, "%-16s %5s %8d %7d %10s  %-24s  %s, %s\n", head.name(),
                          client::DTypeShortName(head.dtype()), head.vocab(), head.hidden(),
                          Bytes(head.device_bytes()), Extras(head), head.tensor(), head.path());
  }
  for (const v1::Head& head : output.heads) {
    for (const std::string& warning : head.warnings()) {
      absl::StrAppendFormat(&out, "warning: head %s: %s\n", head.name(), warning);
    }
  }
  return out;
}

std::string Json(const InfoOutput& output) { return Line(ToJson(output.info)); }

std::string Table(const InfoOutput& output) {
  const v1::GetInfoResponse& info = output.info;
  const v1::Limits& limits = info.limits();
  std::string out = absl::StrFormat("logitd %s at %s%s\n", info.version(), output.address,
                                    info.draining() ? ", draining" : "");
  // Servers from before there were several devices have only the first.
  const int devices = std::max(1, info.devices_size());
  for (int i = 0; i < devices; ++i) {
    const v1::Device& device = info.devices_size() == 0 ? info.device() : info.devices(i);
    const std::string number = devices == 1 ? "" : absl::StrCat("device ", device.number(), ": ");
    absl::StrAppendFormat(&out, "backend  %s: %s%s, %s%s\n", info.backend(), number, device.name(),
                          Bytes(device.memory_bytes()), device.lost() ? ", lost" : "");
  }
  absl::StrAppendFormat(
      &out,
      "limits   request %s, answer %s, rows %d, vocab %d, keys %d; in flight %s, streams %d\n",
      Bytes(limits.max_request_bytes()), Bytes(limits.max_answer_bytes()), limits.max_batch_rows(),
      limits.max_vocab(), limits.max_keys(), Bytes(limits.max_held_bytes()), limits.streams());
  // One line per op and its dtypes, with the methods that run it.
  std::vector<std::pair<std::string, std::vector<std::string>>> ops;
  for (const v1::Op& op : info.ops()) {
    std::vector<absl::string_view> dtypes;
    for (int dtype : op.dtypes()) {
      dtypes.push_back(client::DTypeShortName(static_cast<v1::DType>(dtype)));
    }
    std::string name = absl::StrFormat("%-26s %s ", op.name(), absl::StrJoin(dtypes, " "));
    const auto same = [&](const auto& known) { return known.first == name; };
    auto at = std::find_if(ops.begin(), ops.end(), same);
    if (at == ops.end()) at = ops.insert(at, {std::move(name), {}});
    at->second.emplace_back(absl::StripPrefix(op.method(), "logitd.v1."));
  }
  for (const auto& [op, methods] : ops) {
    absl::StrAppendFormat(&out, "op       %s by %s\n", op, absl::StrJoin(methods, ", "));
  }
  return out;
}

std::string Json(const LoadOutput& output) { return Line(ToJson(output.load)); }

std::string Table(const LoadOutput& output) {
  const v1::GetLoadResponse& load = output.load;
  std::string out = absl::StrFormat("busy     %.1f%% of the streams%s\n", 100 * load.busy(),
                                    load.draining() ? ", draining" : "");
  absl::StrAppendFormat(&out, "calls    %d open, %d of them streams; %d wait unread\n",
                        load.open_calls(), load.open_streams(), load.waiting_calls());
  absl::StrAppendFormat(&out, "jobs     %d wait for a stream\n", load.queued_jobs());
  absl::StrAppendFormat(&out, "memory   %s of %s held\n", Bytes(load.held_bytes()),
                        Bytes(load.max_held_bytes()));
  if (load.predicted_call_ns() > 0) {
    absl::StrAppendFormat(&out, "a call   %.3f ms, predicted\n",
                          static_cast<double>(load.predicted_call_ns()) * 1e-6);
  }
  for (const v1::OpLoad& op : load.ops()) {
    absl::StrAppendFormat(&out, "%-26s %10.1f rows/s, %5.1f%% of the streams\n", op.name(),
                          op.rows_per_s(), 100 * op.busy());
  }
  return out;
}

}  // namespace logitd::cli

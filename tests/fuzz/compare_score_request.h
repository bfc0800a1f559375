// The hand-written reader of ScoreRequest against the generated one, as compare_sample_request.h.
#ifndef LOGITD_TESTS_FUZZ_COMPARE_SCORE_REQUEST_H_
#define LOGITD_TESTS_FUZZ_COMPARE_SCORE_REQUEST_H_

#include <bit>
#include <memory>
#include <string>
#include <string_view>

#include "logitd/v1/scorer.pb.h"
#include "server/rpc/codecs/score_codec.h"
#include "tests/fuzz/compare_sample_request.h"

namespace logitd::rpc::testing {

inline void Compare(const v1::ScoreRequest& expected, const ScoreFields& ours,
                    FieldComparison* compare) {
  compare->Input(expected, ours);
  compare->Params(expected, kCrossEntropyParams, ours.params);
  compare->List("targets", expected.targets(), ours.targets);
  compare->Note("ignore_index", ours.ignore_index.has_value() == expected.has_ignore_index() &&
                                    ours.ignore_index.value_or(0) == expected.ignore_index());
  compare->List("extra_count", expected.extra_count(), ours.extra_count);
  compare->List("extra_ids", expected.extra_ids(), ours.extra_ids);
  compare->List("support_count", expected.support_count(), ours.support_count);
  compare->List("support_ids", expected.support_ids(), ours.support_ids);
  compare->Note("want_rank", ours.want_rank == expected.want_rank());
  compare->Note("want_entropy", ours.want_entropy == expected.want_entropy());
  compare->Note("skip_ignored", ours.skip_ignored == expected.skip_ignored());
  compare->Note("offset", ours.offset.has_value() == expected.has_offset() &&
                              ours.offset.value_or(0) == expected.offset());
  compare->Note("totals", ours.totals_parts.parts.empty() != expected.has_totals());
  const v1::ScoreTotals& totals = expected.totals();
  compare->Note("totals.rows", ours.totals.rows == totals.rows());
  compare->Note("totals.counted", ours.totals.counted == totals.counted());
  compare->Note("totals.ignored", ours.totals.ignored == totals.ignored());
  compare->Note("totals.faulty", ours.totals.faulty == totals.faulty());
  const auto same = [](double a, double b) {
    return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
  };
  compare->Note("totals.loss_sum", same(ours.totals.loss_sum, totals.loss_sum()));
  compare->Note("totals.target_logprob_sum",
                same(ours.totals.target_logprob_sum, totals.target_logprob_sum()));
}

// As a call, and as two messages of one stream.
inline std::string ScoreRequestDisagreement(std::string_view bytes) {
  const OneHead head;
  const auto sequence = std::make_shared<ScoreSequence>();
  const Piece piece(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
  for (int message = 0; message < 2; ++message) {
    ScoreCodec codec(head.Find(), sequence);
    engine::JobSpec spec;
    if (!codec.Parse(Pieces(&piece, 1), /*max_rows=*/64, &spec).ok()) break;
  }
  return SampleDisagreement<v1::ScoreRequest, ScoreCodec>(bytes, &ParseScoreFields);
}

}  // namespace logitd::rpc::testing

#endif  // LOGITD_TESTS_FUZZ_COMPARE_SCORE_REQUEST_H_

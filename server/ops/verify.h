// verify in the engine.
#ifndef LOGITD_SERVER_OPS_VERIFY_H_
#define LOGITD_SERVER_OPS_VERIFY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/verify.h"
#include "server/engine/job.h"
#include "server/ops/sample.h"

namespace logitd::ops {

// After the axes and arrays of sample.
enum VerifyAxis : size_t { kVerifyDraftIds = kSampleAxes, kVerifyDraftProbs, kVerifySequences };

inline constexpr engine::Input<VerifyDraft> kVerifyInDrafts{5, kSampleRows};
inline constexpr engine::Input<int32_t> kVerifyInDraftIds{6, kVerifyDraftIds};
inline constexpr engine::Input<float> kVerifyInDraftProbs{7, kVerifyDraftProbs};
inline constexpr engine::Input<VerifySequence> kVerifyInSequences{8, kVerifySequences};

inline constexpr engine::Output<int32_t> kVerifyAccepted{8, kVerifySequences};

extern const engine::OpTraits kVerifyTraits;

// The rows of one job with their lists, drafts and sequences. Places count from the job's own first
// elements.
struct VerifyRows {
  SampleRows sample;
  std::vector<VerifyDraft> drafts;  // one for each row
  std::vector<int32_t> draft_ids;
  std::vector<float> draft_probs;
  std::vector<VerifySequence> sequences;

  // As those of SampleRows, with CheckVerify.
  VerifyRequest Request(int64_t vocab) const;
  void FillSpec(const engine::BatchKey& key, engine::JobSpec* spec);
  void WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first);
  int64_t bytes() const;
};

}  // namespace logitd::ops

#endif  // LOGITD_SERVER_OPS_VERIFY_H_

// An op on rows under every plan of kernels/cuda/rows/plan.h, whatever the planner would choose.
#ifndef LOGITD_TESTS_KERNELS_EVERY_PLAN_H_
#define LOGITD_TESTS_KERNELS_EVERY_PLAN_H_

#include <string>

#include "absl/strings/str_format.h"
#include "kernels/cuda/rows/plan.h"

namespace logitd::testing {

// Calls use(run(), plan) for every plan that fits the call that `run` makes on this thread. Returns
// their number. `plan` is for the texts of failures.
template <class Run, class Use>
int UnderEveryPlan(const Run& run, const Use& use) {
  constexpr int kMostForms = 16;
  constexpr int kMostBlocks = 8;
  int plans = 0;
  for (int form = 0; form < kMostForms; ++form) {
    for (int blocks = 1; blocks <= kMostBlocks; ++blocks) {
      cuda::ForceForm(form, blocks);
      const auto result = run();
      cuda::ForceForm(-1, 0);
      if (cuda::LastPlan().form < 0) continue;  // does not fit
      ++plans;
      use(result, absl::StrFormat("form %d of %d blocks", form, blocks));
    }
  }
  return plans;
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_EVERY_PLAN_H_

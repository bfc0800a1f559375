// One batch over one stream, from its payload in the slab to Done of its jobs.
#ifndef LOGITD_SERVER_ENGINE_RUN_BATCH_H_
#define LOGITD_SERVER_ENGINE_RUN_BATCH_H_

#include <cstddef>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/backend.h"
#include "server/engine/batch.h"
#include "server/engine/job.h"

namespace logitd::engine {

// Runs a batch that belongs to the calling thread: jobs beyond their deadline are ended first, the
// others' inputs are written, payload and inputs uploaded, the op run, the outputs
// downloaded, and every job ended. The slab is quiet when this returns. Where all jobs are late,
// nothing runs.
//
// Returns how the device did: OK, UNAVAILABLE (this batch failed) or INTERNAL (the device is lost);
// in the last two cases the jobs got UNAVAILABLE, and `lost` ran before they did if it was
// INTERNAL. `keep` is asked for JobAnswer::keep where the op is exclusive. `oldest`: the times of
// the oldest job that ran; batch_rows is 0 if none did.
absl::Status RunBatch(Stream& stream, const SlabLayout& layout, Batch& batch,
                      absl::FunctionRef<void(const absl::Status&)> lost,
                      absl::FunctionRef<std::shared_ptr<const void>()> keep, JobTimes* oldest);

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_RUN_BATCH_H_

// One slice of a batch over one stream. The slices of a batch bring it from its payload in the slab
// to Done of its jobs.
#ifndef LOGITD_SERVER_ENGINE_RUN_SLICE_H_
#define LOGITD_SERVER_ENGINE_RUN_SLICE_H_

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/backend.h"
#include "server/engine/batch.h"
#include "server/engine/job.h"

namespace logitd::engine {

class Costs;

// How batches are cut.
struct SliceRules {
  int64_t max_slice_ns;
  int64_t linear_rows;  // DeviceInfo::linear_rows
};

// The rows of the next slice of work with `left` rows, which take `row_ns` each by estimate. They
// take about max_slice_ns; slices of one batch are about equal, and the last one is not much
// shorter. `whole`: all of them. A batch on a head is cut at multiples of linear_rows: fewer would
// read the head more often than they have to, so its slices may take longer. Of a kind that never
// ran (0), the first slice is small: 1 MiB, or linear_rows rows.
int64_t RowsOfSlice(const BatchKey& key, bool whole, int64_t left, double row_ns,
                    const SliceRules& rules);

// Runs the next slice of a batch that belongs to the calling thread, and tells `costs` what it
// took. The first slice brings rows and inputs to the device. The last one downloads the outputs
// and ends every job: with CANCELLED where its caller has left, DEADLINE_EXCEEDED where the batch
// was abandoned because all were late, else OK. Between slices the device holds the batch, and any
// of its streams may run the next one. `progress` says what was done. When this returns, nothing
// reads or writes the slab.
//
// Returns how the device did: OK, UNAVAILABLE (this batch failed) or INTERNAL (the device is lost);
// in the last two cases the batch is done, its jobs got UNAVAILABLE, and `lost` ran before they did
// if it was INTERNAL. `keep` is asked for JobAnswer::keep where the op is exclusive. `oldest`: the
// times of the oldest job that ran to its end; batch_rows is 0 if none did.
absl::Status RunSlice(Stream& stream, const SlabLayout& layout, const SliceRules& rules,
                      Costs& costs, Batch& batch, absl::FunctionRef<void(const absl::Status&)> lost,
                      absl::FunctionRef<std::shared_ptr<const void>()> keep, JobTimes* oldest);

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_RUN_SLICE_H_

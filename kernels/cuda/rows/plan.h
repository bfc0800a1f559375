// The planner of ops on rows: which of an op's forms takes a call's rows, and how they are cut.
//
// A form is one way to take rows: a warp, a block or a cluster of blocks is a team that takes a
// row. The plan is the form, the blocks of a row and the teams at once that take least time by a
// model of a multiprocessor with n teams:
//   read    the rows' bytes at the device's rate, or the work of their cells, or a row's latency
//   end     the latency of a row's end, or the work of n ends
//   a call  launch; whole waves, of read and end / n (others read meanwhile); the last, of read and
//           end
// Rates are of the device (devices.h), latencies and work of the form (costs.h), fitted to the
// times of kernel_bench --forms by bench/kernels/fit_plans.py: no border of these ops is written by
// hand. On an H200 the calls planned so took 1.00 to 1.02 of the best form's time on average, 1.56
// at most, when they were fitted; with borders by hand 1.02 to 1.22, and 2.00
// (bench/results/h200/forms.json). Since then few rows have become faster.
//
// A plan never changes a row's bits.
#ifndef LOGITD_KERNELS_CUDA_ROWS_PLAN_H_
#define LOGITD_KERNELS_CUDA_ROWS_PLAN_H_

#include <cstdint>
#include <span>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rows/costs.h"
#include "kernels/cuda/scratch.h"

namespace logitd::cuda {

struct RowForm {
  int warps = 4;     // of a block
  int resident = 1;  // blocks that a multiprocessor has registers for
  bool warp_takes_row = false;
  bool rereads = false;  // half of row_bytes: out of L2, as far as it holds the rows under way
  int most_blocks = 1;   // of a row, as a cluster
  int least_cells = 1;   // of a row
  int most_cells = 1 << 10;
  // Shared memory of a block: for all of it, for each cell of the row, for each cell of a block's
  // part.
  int fixed_bytes = 0;
  int row_cell_bytes = 0;
  int part_cell_bytes = 0;
  // Shared memory of each warp, where a warp takes a row. The block has as many warps as there is
  // room for.
  int warp_bytes = 0;
  int warp_cell_bytes = 0;
  CostOf cost = CostOf::kGiven;
  RowCost given;  // where `cost` says so
};

struct RowsShape {
  int64_t rows;
  int32_t cells;    // of a row
  float row_bytes;  // read and written
  bool wide;        // f32
  int32_t k = 0;    // the most of a row's largest tokens
};

struct RowsPlan {
  int form = -1;         // in the table; -1: none fits
  int blocks = 1;        // of a row's cluster
  int warps = 0;         // of a block
  int teams = 0;         // that run at once on a multiprocessor
  int places = 0;        // teams that run at once on the device
  int turns = 0;         // cells of a warp, one after the other
  int shared_bytes = 0;  // of a block, to ask for: no more than `teams` find room
  bool early = false;    // as LaunchShape's: each block has a multiprocessor
  float us = 0;          // by the model
};

// The plan of least time. Thread-safe; the current device is that of the launch. The first call for
// a device asks the driver about it.
RowsPlan PlanRows(const RowsShape& shape, std::span<const RowForm> forms, const Scratch& scratch);

// A launch of a block, or a cluster, for each row.
LaunchShape ShapeOfTeams(int64_t rows, const RowsPlan& plan, const Scratch& scratch);
// A launch of as many blocks as run at once, or as there are rows for: their warps take all rows.
LaunchShape ShapeOfWarps(int64_t rows, const RowsPlan& plan, const Scratch& scratch);

// For the bench and tests: every plan of this thread takes this form and these blocks, or fits
// nothing; -1 and 0: what the model chooses. Whether a form is forced. And this thread's last plan.
void ForceForm(int form, int blocks);
bool IsForced();
RowsPlan LastPlan();

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ROWS_PLAN_H_

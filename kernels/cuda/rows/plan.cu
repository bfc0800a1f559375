#include "kernels/cuda/rows/plan.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>

#include "kernels/cuda/rows/cluster.cuh"
#include "kernels/cuda/rows/clusters_at_once.h"
#include "kernels/cuda/rows/devices.h"

namespace logitd::cuda {
namespace {

constexpr int kReservedBytes = 1024;  // of each block, by the device
constexpr int kFewWaves = 3;          // later ones are not in step any more

thread_local int forced_form = -1;
thread_local int forced_blocks = 0;
thread_local RowsPlan last_plan;

// [n]: clusters of n blocks, each of which fills a multiprocessor, that run at once. The blocks of
// a cluster share a part of the device (a GPC), and what is left over in a part is idle: 15
// clusters of 8 may not fit into 132 multiprocessors.
using Clusters = std::array<int, kMaxClusterBlocks + 1>;

__global__ void LargeBlock() {}

// Fewer than there may be where the driver does not tell.
Clusters AskDriver(const Scratch& scratch) {
  Clusters clusters{};
  clusters[1] = scratch.multiprocessors;
  for (int blocks = 2; blocks <= kMaxClusterBlocks; ++blocks) {
    const LaunchShape shape{.threads = 512,
                            .cluster = blocks,
                            .shared_bytes = scratch.block_shared_bytes / 2 + 1};  // no room for two
    if (ClustersAtOnce(reinterpret_cast<const void*>(&LargeBlock), shape, scratch,
                       &clusters[blocks]) != cudaSuccess) {
      cudaGetLastError();
      clusters[blocks] = 0;
    }
  }
  return clusters;
}

struct Device {
  DeviceRates rates;
  Clusters clusters;
};

Device DeviceOf(const Scratch& scratch) {
  constexpr int kMostDevices = 64;
  static std::array<std::once_flag, kMostDevices> asked;
  static std::array<Device, kMostDevices> known;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMostDevices)
    return {.clusters = {0, scratch.multiprocessors}};
  std::call_once(asked[device], [&] {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) return;
    known[device].rates = RatesOf(properties.name);
    if (properties.major >= 9) known[device].clusters = AskDriver(scratch);
  });
  Device answer = known[device];
  if (!scratch.clusters) answer.clusters = {};
  answer.clusters[1] = scratch.multiprocessors;
  return answer;
}

// How a form takes rows that are cut into a number of blocks.
struct Cut {
  int blocks;
  int warps;         // of a block
  int shared_bytes;  // of a block
  int turns;         // cells of a warp, one after the other
  int most_teams;    // at once on a multiprocessor, by registers and shared memory
};

// No teams: the cut does not fit.
Cut CutInto(int blocks, const RowForm& form, const RowsShape& shape, const Scratch& scratch) {
  const int part_cells = static_cast<int>(CeilDiv(shape.cells, blocks));
  Cut cut{.blocks = blocks, .warps = form.warps, .turns = shape.cells};
  cut.shared_bytes =
      form.fixed_bytes + shape.cells * form.row_cell_bytes + part_cells * form.part_cell_bytes;
  if (form.warp_takes_row) {
    const int warp_bytes = form.warp_bytes + shape.cells * form.warp_cell_bytes;
    if (warp_bytes > 0)
      cut.warps =
          std::min(form.warps, (scratch.block_shared_bytes - cut.shared_bytes) / warp_bytes);
    cut.shared_bytes += cut.warps * warp_bytes;
  } else {
    cut.turns = static_cast<int>(CeilDiv(part_cells, form.warps));
  }
  if (cut.warps < std::min(form.warps, 4) || cut.shared_bytes > scratch.block_shared_bytes)
    return cut;
  const int resident = std::min(form.resident, (scratch.block_shared_bytes + kReservedBytes) /
                                                   (cut.shared_bytes + kReservedBytes));
  cut.most_teams = form.warp_takes_row ? resident * cut.warps : resident;
  return cut;
}

// The cost of a form's rows.
RowCost CostFor(const RowForm& form, const RowsShape& shape) {
  RowCost cost =
      form.cost == CostOf::kGiven ? form.given : kCosts[static_cast<int>(form.cost)][shape.wide];
  const float parts = static_cast<float>(shape.k) / 64;
  cost.end_us += parts * cost.end_us_of_64;
  cost.end_work += parts * cost.end_work_of_64;
  return cost;
}

// The time of a call by the model, with `teams` at once on a multiprocessor.
float TimeOf(const RowForm& form, const RowsShape& shape, const Cut& cut, int teams,
             const Device& device, int multiprocessors) {
  const DeviceRates& rates = device.rates;
  const RowCost cost = CostFor(form, shape);
  const auto places = static_cast<float>(teams * device.clusters[cut.blocks]);
  if (places == 0) return INFINITY;
  const auto rows = static_cast<float>(shape.rows);
  const auto blocks = static_cast<float>(cut.blocks);
  const auto all = static_cast<float>(multiprocessors);
  const float row_end_us = cost.end_us + (cut.blocks > 1 ? rates.meeting_us : 0);
  const float turns_us = static_cast<float>(cut.turns) * cost.cell_us;
  float row_bytes = shape.row_bytes;
  if (form.rereads)
    row_bytes += std::max(0.0f, row_bytes / 2 - rates.l2_bytes * all / std::min(rows, places));
  const float bytes_us = row_bytes / (rates.bytes_per_us * all);
  // The work of one of a team's blocks.
  const float cells_work =
      static_cast<float>(shape.cells) / blocks * cost.cell_work / rates.work_speed;
  const float end_work = cost.end_work / rates.work_speed;
  const float waves = rows / places;
  if (waves > static_cast<float>(kFewWaves)) {
    return rates.launch_us + row_end_us +
           std::max({rows * bytes_us + waves * row_end_us / static_cast<float>(teams),
                     rows * blocks / all * (cells_work + end_work),
                     waves * (turns_us + row_end_us)});
  }
  const auto read = [&](float n) {
    return std::max({n * bytes_us, std::ceil(n * blocks / all) * cells_work, turns_us});
  };
  const auto end = [&](float n) {
    return std::max(row_end_us, std::ceil(n * blocks / all) * end_work);
  };
  const float whole = std::ceil(waves) - 1;
  const float left = rows - whole * places;
  return rates.launch_us + read(left) + end(left) +
         whole * std::max({read(places) + end(places) / static_cast<float>(teams),
                           turns_us + row_end_us, places * blocks / all * (cells_work + end_work)});
}

// The shared memory of a block with which no more than `teams` find room.
int BytesFor(int teams, const Cut& cut, const Scratch& scratch) {
  if (teams == cut.most_teams) return cut.shared_bytes;
  const int all = scratch.block_shared_bytes + kReservedBytes;
  return std::max(cut.shared_bytes, (all / teams - kReservedBytes) / 128 * 128);
}

}  // namespace

RowsPlan PlanRows(const RowsShape& shape, std::span<const RowForm> forms, const Scratch& scratch) {
  const Device device = DeviceOf(scratch);
  RowsPlan best{.us = INFINITY};
  for (int f = 0; f < static_cast<int>(forms.size()); ++f) {
    const RowForm& form = forms[f];
    if (shape.cells < form.least_cells || shape.cells > form.most_cells) continue;
    if (form.most_blocks > 1 && !scratch.clusters) continue;
    if (forced_form >= 0 && f != forced_form) continue;
    const int most = std::min(form.most_blocks, static_cast<int>(CeilDiv(shape.cells, form.warps)));
    for (int blocks = 1; blocks <= most; ++blocks) {
      if (forced_blocks > 0 && blocks != forced_blocks) continue;
      const Cut cut = CutInto(blocks, form, shape, scratch);
      // Fewer at once may fill the last of a few waves: a few blocks do not keep the memory busy.
      const int64_t wave = int64_t{cut.most_teams} * scratch.multiprocessors;
      const bool may_be_fewer = !form.warp_takes_row && blocks == 1 && shape.rows > wave &&
                                shape.rows <= kFewWaves * wave;
      for (int teams = cut.most_teams;
           teams > 0 &&
           (teams == cut.most_teams || (may_be_fewer && 3 * teams >= 2 * cut.most_teams));
           --teams) {
        const float us = TimeOf(form, shape, cut, teams, device, scratch.multiprocessors);
        // Fewer at once than there is room for also disturb each other less.
        if (us >= best.us * (teams < cut.most_teams ? 1.01f : 1)) continue;
        best = {.form = f,
                .blocks = blocks,
                .warps = cut.warps,
                .teams = teams,
                .places = teams * device.clusters[blocks],
                .turns = cut.turns,
                .shared_bytes = BytesFor(teams, cut, scratch),
                .early = form.most_blocks > 1 && shape.rows * blocks <= scratch.multiprocessors,
                .us = us};
      }
    }
  }
  last_plan = best;
  return best;
}

LaunchShape ShapeOfTeams(int64_t rows, const RowsPlan& plan, const Scratch& scratch) {
  return {.grid = GridFor(rows * plan.blocks),
          .threads = plan.warps * 32,
          .cluster = plan.blocks,
          .shared_bytes = plan.shared_bytes,
          .most_shared_bytes = scratch.block_shared_bytes,
          .early = plan.early};
}

LaunchShape ShapeOfWarps(int64_t rows, const RowsPlan& plan, const Scratch& scratch) {
  const int64_t most = int64_t{plan.teams} / plan.warps * scratch.multiprocessors;
  return ShapeOfTeams(std::min(rows, most), plan, scratch);
}

void ForceForm(int form, int blocks) {
  forced_form = form;
  forced_blocks = blocks;
}
bool IsForced() { return forced_form >= 0; }
RowsPlan LastPlan() { return last_plan; }

}  // namespace logitd::cuda

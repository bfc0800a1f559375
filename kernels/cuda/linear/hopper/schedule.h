// How the clusters of hopper/product.cuh share a product among them.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_SCHEDULE_H_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_SCHEDULE_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace logitd::cuda::hopper {

constexpr int kGroupRows = 64;     // rows that a warpgroup multiplies at a time
constexpr int kClusterGroups = 4;  // warpgroups of a cluster that multiply
constexpr int kBlockRows = kClusterGroups * kGroupRows;
constexpr int kTile = 256;     // tokens of a warpgroup at a time
constexpr int kSpanTiles = 4;  // tiles that a warpgroup takes one after the other for the same rows
constexpr int kSpan = kSpanTiles * kTile;

// What a cluster does at a time: each of its four warpgroups multiplies 64 rows by a span. All
// units cost the same. Their warpgroups differ in
//   groups 4: the rows, from `row` on;
//   groups 2: the rows of the two in a block, and the spans of the two blocks;
//   groups 1: the spans.
struct Unit {
  int32_t row;
  int32_t groups;
  int32_t span;   // the first; spans may lie after the vocabulary
  int32_t tile;   // the first, of every span
  int32_t turns;  // tiles, one after the other; 0: there is no such tile
  int32_t split;  // -1: a whole unit; else the number of the split unit that this is a tile of

  // The rows and the span of a warpgroup of block `rank`.
  __host__ __device__ int32_t RowOf(int rank, int warpgroup) const {
    const int group = groups == 4 ? 2 * rank + warpgroup : groups == 2 ? warpgroup : 0;
    return row + group * kGroupRows;
  }
  __host__ __device__ int SpanOf(int rank, int warpgroup) const {
    return span + (groups == 4 ? 0 : groups == 2 ? rank : 2 * rank + warpgroup);
  }
};

// The order of the units. Rows are cut into blocks of 256, and what is left is 128 rows: a unit of
// 64 rows reads as many weights, so beside others it takes longer than one of 128. Only where there
// are no more than 64 rows are they all in such units. Blocks come in sets whose states L2 has room
// for. For every set the vocabulary is gone through once, so that the clusters that work at the
// same time share weights. Clusters take units in turn. Units that would be a last round for only
// some of the clusters are split, and clusters take their tiles in turn.
struct Schedule {
  int32_t row_blocks;  // of 256 rows
  int32_t set_blocks;
  int32_t pairs;    // 1: 128 rows after the blocks
  int32_t singles;  // 1: there are only 64 rows
  int32_t tiles;
  int32_t spans;
  int32_t units;
  int32_t whole;        // units that are not split
  int32_t short_units;  // those of the last span: the last ones

  // set_rows: the most rows of a set; it has at least a block.
  static Schedule Of(int64_t rows, int64_t vocab, int64_t set_rows, int64_t clusters) {
    const auto present = static_cast<int32_t>((rows + kGroupRows - 1) / kGroupRows);
    const int32_t groups = present <= 1 ? present : present + present % 2;
    Schedule s{};
    s.row_blocks = groups / kClusterGroups;
    s.pairs = groups / 2 % 2;
    s.singles = groups % 2;
    s.tiles = static_cast<int32_t>((vocab + kTile - 1) / kTile);
    s.spans = (s.tiles + kSpanTiles - 1) / kSpanTiles;
    const int64_t most = std::max<int64_t>(1, set_rows / kBlockRows);
    const int64_t sets = std::max<int64_t>(1, (s.row_blocks + most - 1) / most);
    s.set_blocks = static_cast<int32_t>(std::max<int64_t>(1, (s.row_blocks + sets - 1) / sets));
    const int32_t last = s.LastSet();
    s.units = s.UnitsBefore(last) + s.UnitsBeforeSpan(last, s.spans);
    s.whole = static_cast<int32_t>(s.units / clusters * clusters);
    s.short_units = s.units - s.UnitsBefore(last) - s.UnitsBeforeSpan(last, s.spans - 1);
    return s;
  }

  // What clusters take in turn: whole units, then tiles of the others.
  __host__ __device__ int32_t Items() const {
    int32_t items = whole;
    for (int tile = 0; tile < kSpanTiles; ++tile) items += SplitUnits(tile);
    return items;
  }

  __host__ __device__ Unit At(int32_t item) const {
    int32_t index = item;
    int32_t tile = 0;
    if (item >= whole) {
      index -= whole;
      while (index >= SplitUnits(tile)) index -= SplitUnits(tile++);
      index += whole;
    }
    Unit unit = UnitAt(index);
    const int32_t left = tiles - unit.span * kSpanTiles - tile;
    const int32_t most = item < whole ? kSpanTiles : 1;
    unit.tile = tile;
    unit.turns = left < 0 ? 0 : left < most ? left : most;
    unit.split = item < whole ? -1 : index - whole;
    return unit;
  }

  // Which unit takes a row's span, and which of its warpgroups: two times the block's rank, plus
  // the number in the block.
  struct Place {
    int32_t unit;
    int32_t warpgroup;
  };
  __host__ __device__ Place PlaceOf(int32_t row, int32_t span) const {
    const int32_t block = row / kBlockRows;
    const int32_t group = row % kBlockRows / kGroupRows;
    const int32_t set = block < row_blocks ? block / set_blocks : LastSet();
    const auto unit_at = [&](int32_t first) {
      return UnitsBefore(set) + UnitsBeforeSpan(set, first);
    };
    if (block < row_blocks) {
      const int32_t after = set == LastSet() ? RestUnits(span % kSpanTiles) : 0;
      return {unit_at(span) + after + block % set_blocks, group};
    }
    if (pairs != 0 && group < 2) {
      const int32_t first = span - span % 2;
      return {unit_at(first) + (first % kSpanTiles == 0 ? singles : 0), span % 2 * 2 + group};
    }
    return {unit_at(span - span % kSpanTiles), span % kSpanTiles};
  }

 private:
  // Units that are split and have a tile of this number.
  __host__ __device__ int32_t SplitUnits(int tile) const {
    const int32_t split = units - whole;
    if (tile < tiles - (spans - 1) * kSpanTiles) return split;
    return split > short_units ? split - short_units : 0;
  }
  __host__ __device__ int32_t LastSet() const {
    return row_blocks == 0 ? 0 : (row_blocks - 1) / set_blocks;
  }
  __host__ __device__ int32_t BlocksOf(int32_t set) const {
    const int32_t left = row_blocks - set * set_blocks;
    return left < set_blocks ? left : set_blocks;
  }
  // Units of rows after the blocks that begin at a span of this number of four. In a span's units
  // they come first: 64 rows, then 128, then the blocks.
  __host__ __device__ int32_t RestUnits(int32_t in_four) const {
    return in_four == 0 ? singles + pairs : in_four == 2 ? pairs : 0;
  }
  __host__ __device__ int32_t UnitsBefore(int32_t set) const { return set * set_blocks * spans; }
  // In a set: the units of the spans before `span`.
  __host__ __device__ int32_t UnitsBeforeSpan(int32_t set, int32_t span) const {
    int32_t count = span * BlocksOf(set);
    if (set == LastSet()) count += (span + 3) / 4 * singles + (span + 1) / 2 * pairs;
    return count;
  }

  __host__ __device__ Unit UnitAt(int32_t index) const {
    int32_t set = index / (set_blocks * spans);
    if (set > LastSet()) set = LastSet();  // it has more units: those of the rest
    const bool last = set == LastSet();
    const int32_t blocks = BlocksOf(set);
    const int32_t in_set = index - UnitsBefore(set);
    const int32_t of_four = 4 * blocks + (last ? 2 * pairs + singles : 0);
    int32_t span = in_set / of_four * kSpanTiles;
    while (span + 1 < spans && UnitsBeforeSpan(set, span + 1) <= in_set) ++span;
    int32_t in_span = in_set - UnitsBeforeSpan(set, span);
    const int32_t rest = last ? RestUnits(span % kSpanTiles) : 0;
    Unit unit{};
    unit.span = span;
    if (in_span >= rest) {
      unit.groups = 4;
      unit.row = (set * set_blocks + in_span - rest) * kBlockRows;
      return unit;
    }
    const bool single = span % kSpanTiles == 0 && in_span < singles;
    unit.groups = single ? 1 : 2;
    unit.row = row_blocks * kBlockRows + (single ? pairs * 2 * kGroupRows : 0);
    return unit;
  }
};

}  // namespace logitd::cuda::hopper

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_SCHEDULE_H_

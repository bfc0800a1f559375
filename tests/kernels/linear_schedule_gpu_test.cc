// How clusters share a product: every tile of every 64 rows once, evenly. It runs without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/cuda/linear/hopper/schedule.h"

namespace logitd::testing {
namespace {

using cuda::hopper::kClusterGroups;
using cuda::hopper::kGroupRows;
using cuda::hopper::kSpanTiles;
using cuda::hopper::kTile;
using cuda::hopper::Schedule;
using cuda::hopper::Unit;

struct Product {
  int64_t rows;
  int64_t vocab;
  int64_t set_rows;
  int64_t clusters;
};

std::vector<Product> Products() {
  std::vector<Product> products;
  for (int64_t rows : {1, 64, 65, 128, 129, 192, 193, 256, 257, 777, 1100, 2048, 4097}) {
    for (int64_t vocab : {1, 256, 257, 1000, 1024, 1025, 2049, 3000, 50257, 151936}) {
      for (int64_t set_rows : {100, 1024, 3000}) {
        for (int64_t clusters : {1, 57, 66}) {
          products.push_back({rows, vocab, set_rows, clusters});
        }
      }
    }
  }
  return products;
}

// Groups of 64 rows that are paid for: one, or pairs.
int64_t GroupsOf(int64_t rows) {
  return rows <= kGroupRows ? 1 : (rows + 2 * kGroupRows - 1) / (2 * kGroupRows) * 2;
}

// "" where the claim holds of each: that units take every tile once, in the place that PlaceOf
// says, and none beyond the groups that are paid for.
std::string FirstFault(const Product& product) {
  const Schedule schedule =
      Schedule::Of(product.rows, product.vocab, product.set_rows, product.clusters);
  const int64_t groups = GroupsOf(product.rows);
  const int64_t tiles = (product.vocab + kTile - 1) / kTile;
  std::vector<int> taken(groups * tiles);
  for (int32_t item = 0; item < schedule.Items(); ++item) {
    const Unit unit = schedule.At(item);
    if (unit.turns < 0 || unit.turns > kSpanTiles)
      return absl::StrFormat("item %d has %d turns", item, unit.turns);
    for (int warpgroup = 0; warpgroup < kClusterGroups; ++warpgroup) {
      const int32_t row = unit.RowOf(warpgroup / 2, warpgroup % 2);
      const int32_t span = unit.SpanOf(warpgroup / 2, warpgroup % 2);
      if (row >= groups * kGroupRows) return absl::StrFormat("item %d has row %d", item, row);
      for (int32_t turn = 0; turn < unit.turns; ++turn) {
        const int64_t tile = span * kSpanTiles + unit.tile + turn;
        if (tile < tiles) ++taken[row / kGroupRows * tiles + tile];
      }
      if (span >= schedule.spans) continue;
      const Schedule::Place place = schedule.PlaceOf(row + kGroupRows - 1, span);
      const int32_t want = unit.split < 0 ? item : schedule.whole + unit.split;
      if (place.unit != want || place.warpgroup != warpgroup) {
        return absl::StrFormat("row %d, span %d: unit %d, warpgroup %d, want %d, %d", row, span,
                               place.unit, place.warpgroup, want, warpgroup);
      }
    }
  }
  for (size_t i = 0; i < taken.size(); ++i) {
    if (taken[i] != 1) {
      return absl::StrFormat("rows from %d, tile %d: taken %d times", i / tiles * kGroupRows,
                             i % tiles, taken[i]);
    }
  }
  return "";
}

TEST(LinearScheduleTest, TakesEveryTileOnce) {
  for (const Product& product : Products()) {
    ASSERT_EQ(FirstFault(product), "")
        << product.rows << " rows, " << product.vocab << " tokens, sets of " << product.set_rows
        << " rows, " << product.clusters << " clusters";
  }
}

// Tiles of the cluster that has the most.
int64_t MostTurns(const Product& product) {
  const Schedule schedule =
      Schedule::Of(product.rows, product.vocab, product.set_rows, product.clusters);
  std::vector<int64_t> turns(product.clusters);
  for (int32_t item = 0; item < schedule.Items(); ++item)
    turns[item % product.clusters] += schedule.At(item).turns;
  return *std::max_element(turns.begin(), turns.end());
}

TEST(LinearScheduleTest, PaysFor128RowsAndAFewTilesMoreThanThereAre) {
  for (int64_t rows : {65, 200, 300, 520, 777, 1100, 2048, 4096}) {
    for (int64_t vocab : {50257, 128256, 151936, 256000}) {
      const int64_t groups = GroupsOf(rows);
      const int64_t tiles = (vocab + kTile - 1) / kTile;
      const double least = static_cast<double>(groups * tiles) / (kClusterGroups * 66);
      // Units of few rows may reach beyond the vocabulary, and a last round may be partly empty.
      EXPECT_LE(static_cast<double>(MostTurns({rows, vocab, 3072, 66})), least + 1.5)
          << rows << " rows, " << vocab << " tokens";
    }
  }
}

}  // namespace
}  // namespace logitd::testing

// The sweep: every op over a grid of shapes, so that a shape nobody tuned for shows beside its
// neighbours.
#ifndef LOGITD_BENCH_KERNELS_SWEEP_H_
#define LOGITD_BENCH_KERNELS_SWEEP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "bench/kernels/cases.h"

namespace logitd::bench {

struct SweepCase {
  std::string grid;  // the op and its options: what all shapes of a grid share
  int64_t rows;      // place in the grid; matrices, for attention
  int64_t length;    // of a row
  Case shape;
};

std::vector<SweepCase> SweepCases();

struct SweepFigure {
  std::string grid;
  int64_t rows;
  int64_t length;
  double floor_us;
  double us;

  double share() const { return floor_us / us; }
};

// For every figure: how its speed compares with its neighbours in rows and in length, 1 or more
// where it is as fast. The lowest of these counts:
//   its share of the floor, over that of the smaller neighbour: a larger call should not reach less
//   the time on the straight line between both neighbours, by their floors, over its own time
//   the larger neighbour's time over its own, where it is the smallest
std::vector<double> RelativeToNeighbours(absl::Span<const SweepFigure> figures);

}  // namespace logitd::bench

#endif  // LOGITD_BENCH_KERNELS_SWEEP_H_

// The costs of the forms of ops on rows, for the planner's model (plan.h). Data: kernel_bench
// --forms measures, bench/kernels/fit_plans.py prints these lines. Those of kSample* and kSimple*
// are estimates after kTopK* and kLoss*, that of kTraining for f32 after 16 bits: --forms does not
// time them.
#ifndef LOGITD_KERNELS_CUDA_ROWS_COSTS_H_
#define LOGITD_KERNELS_CUDA_ROWS_COSTS_H_

namespace logitd::cuda {

// In us, on an H200.
struct RowCost {
  float cell_us =
      0.5f;             // a warp's time for a cell, where it waits for nothing but memory's latency
  float end_us = 3;     // from a row's last cell to its answers
  float cell_work = 0;  // of a multiprocessor, for a cell, where nothing waits
  float end_work = 0;   // the same for a row's end
  float end_us_of_64 = 0;    // more of end_us for every 64 of k
  float end_work_of_64 = 0;  // more of end_work for every 64 of k
};

// The forms of all ops, as their tables name them.
enum class CostOf {
  kTopKOneCell,
  kTopKTwoCells,
  kTopKFourCells,
  kTopKManyCells,
  kTopK128,
  kTopKFewRows,
  kTopKManyRows,
  kTopK1024FewRows,
  kTopK1024,
  kTopK1024ManyRows,
  kLoss4,
  kLoss8,
  kLoss16,
  kLossFewRows,
  kLossManyRows,
  kLossTopsFewRows,
  kLossTopsManyRows,
  kSampleFewRows,
  kSampleManyRows,
  kSimpleFewRows,
  kSimpleManyRows,
  kTraining,
  kGiven,  // by the form itself
};

// By CostOf: of 16-bit logits, of f32.
inline constexpr RowCost kCosts[][2] = {
    {{0.066f, 1.4f, 0.120f, 0.002f, 2.4f, 0.080f}, {0.130f, 1.5f, 0.165f, 0, 3.0f, 0.100f}},
    {{0.316f, 1.70f, 0.120f, 0, 2.49f, 0.117f}, {0.149f, 2.01f, 0.189f, 0, 3.48f, 0.135f}},
    {{0.017f, 2.18f, 0.021f, 0.131f, 4.66f, 0.249f}, {0.188f, 1.97f, 0.172f, 0, 5.35f, 0.271f}},
    {{0.689f, 1.45f, 0.135f, 0, 3.02f, 0.219f}, {0.860f, 1.26f, 0.234f, 0.001f, 4.02f, 0.498f}},
    {{0.689f, 1.5f, 0.135f, 0.3f, 3.5f, 0.05f}, {0.860f, 1.5f, 0.234f, 0.5f, 4.5f, 0.05f}},
    {{1.066f, 4.50f, 0.071f, 0.059f, 2.93f, 0.196f}, {0.478f, 5.34f, 0.077f, 0.020f, 2.08f, 0.4f}},
    {{0.600f, 3.72f, 0.069f, 0.746f, 2.93f, 0.852f}, {0.596f, 3.46f, 0.106f, 1.08f, 3.07f, 0.877f}},
    {{0.6f, 11, 0.07f, 1, 0.7f, 0.5f}, {0.6f, 11, 0.08f, 1, 0.7f, 0.5f}},
    {{0.717f, 6.63f, 0.079f, 0.142f, 0.561f, 0.530f},
     {0.581f, 6.98f, 0.097f, 0.051f, 0.563f, 0.560f}},
    {{0, 9.20f, 0.159f, 0.357f, 0.826f, 0.007f}, {0, 9.29f, 0.196f, 1.903f, 0.837f, 0.064f}},
    {{0.735f, 1.09f, 0.083f}, {0.597f, 1.65f, 0.160f}},
    {{0.775f, 1.18f, 0.082f}, {0.762f, 1.58f, 0.158f, 0.001f}},
    {{0.727f, 2.49f, 0.097f, 0.005f}, {0.793f, 3.97f, 0.180f}},
    {{0.047f, 2.94f, 0.070f, 0.6f}, {0.066f, 2.98f, 0.077f, 0.6f}},
    {{0.595f, 2.58f, 0.063f, 0.361f}, {0.651f, 2.50f, 0.1225f, 0.510f}},
    {{1.066f, 5, 0.110f, 0.3f}, {0.478f, 6, 0.125f, 0.3f}},
    {{0.600f, 4.5f, 0.095f, 0.8f}, {0.596f, 4.2f, 0.120f, 1.1f}},
    {{0.5f, 11.5f, 0.090f, 1}, {0.5f, 11.5f, 0.125f, 1}},
    {{0.6f, 12, 0.080f, 3}, {0.6f, 12, 0.115f, 3}},
    {{0.047f, 2.94f, 0.070f, 0.6f}, {0.066f, 2.98f, 0.077f, 0.6f}},
    {{0.595f, 2.58f, 0.063f, 0.361f}, {0.651f, 2.50f, 0.1225f, 0.510f}},
    {{2.068f, 3.01f, 0.102f, 1.505f}, {3, 3.01f, 0.130f, 1.505f}},
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ROWS_COSTS_H_

// Rows of an op, made on the device, and losses of rows in one number.
#ifndef LOGITD_KERNELS_C_API_CUDA_FILL_ROWS_H_
#define LOGITD_KERNELS_C_API_CUDA_FILL_ROWS_H_

#include <cuda_runtime_api.h>

#include "kernels/c_api/device.h"
#include "kernels/c_api/rows.h"

namespace logitd::c_api {

// Enqueues MakeRow, and RefuseRow where it refuses, for every row.
cudaError_t FillRows(const RowFill& fill, cudaStream_t stream);

// Enqueue Device::Weigh and Device::Total. Sums are in an order that the rows fix.
cudaError_t WeighRows(const Reduction& of, cudaStream_t stream);
cudaError_t TotalRows(const Reduction& of, cudaStream_t stream);

}  // namespace logitd::c_api

#endif  // LOGITD_KERNELS_C_API_CUDA_FILL_ROWS_H_

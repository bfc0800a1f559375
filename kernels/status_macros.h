// The only macro of the repository.
#ifndef LOGITD_KERNELS_STATUS_MACROS_H_
#define LOGITD_KERNELS_STATUS_MACROS_H_

#include "absl/status/status.h"

// Returns the status of `expr` from the enclosing function unless it is OK.
#define LOGITD_RETURN_IF_ERROR(expr)                                  \
  do {                                                                \
    if (absl::Status status_ = (expr); !status_.ok()) return status_; \
  } while (false)

#endif  // LOGITD_KERNELS_STATUS_MACROS_H_

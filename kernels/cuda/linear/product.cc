#include "kernels/cuda/linear/product.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/launch.cuh"

namespace logitd::cuda {
namespace {

// Opens the library; null, and why, where there is none. It is never closed: its own threads and
// the driver use it until the process ends.
void* Open(std::string& error) {
  for (const char* name : {"libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13"}) {
    if (void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
      error.clear();
      return handle;
    }
    error = dlerror();
  }
  return nullptr;
}

// A function of the library, which becomes a pointer of the type that it is stored as.
struct Symbol {
  void* address;
  template <class F>
  operator F*() const {
    return reinterpret_cast<F*>(address);
  }
};

// The functions of the library that are used here.
struct Library {
  std::string error;  // empty: all were found
  void* handle = Open(error);
  decltype(&cublasLtCreate) create = Find("cublasLtCreate");
  decltype(&cublasLtDestroy) destroy = Find("cublasLtDestroy");
  decltype(&cublasLtMatmul) matmul = Find("cublasLtMatmul");
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = Find("cublasLtMatmulAlgoGetHeuristic");
  decltype(&cublasLtMatmulAlgoCheck) check = Find("cublasLtMatmulAlgoCheck");
  decltype(&cublasLtMatmulAlgoConfigGetAttribute) algo_attribute =
      Find("cublasLtMatmulAlgoConfigGetAttribute");
  decltype(&cublasLtMatmulDescCreate) desc_create = Find("cublasLtMatmulDescCreate");
  decltype(&cublasLtMatmulDescDestroy) desc_destroy = Find("cublasLtMatmulDescDestroy");
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = Find("cublasLtMatmulDescSetAttribute");
  decltype(&cublasLtMatrixLayoutCreate) layout_create = Find("cublasLtMatrixLayoutCreate");
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = Find("cublasLtMatrixLayoutDestroy");
  decltype(&cublasLtMatmulPreferenceCreate) preference_create =
      Find("cublasLtMatmulPreferenceCreate");
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy =
      Find("cublasLtMatmulPreferenceDestroy");
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set =
      Find("cublasLtMatmulPreferenceSetAttribute");

  Symbol Find(const char* name) {
    void* address = handle == nullptr ? nullptr : dlsym(handle, name);
    if (address == nullptr && error.empty())
      error = absl::StrCat("libcublasLt.so.13 has no ", name);
    return {address};
  }
};

const Library& TheLibrary() {
  static const Library* const library = new Library;
  return *library;
}

cudaDataType_t TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return CUDA_R_32F;
    case DType::kF16:
      return CUDA_R_16F;
    case DType::kBF16:
      return CUDA_R_16BF;
  }
  __builtin_unreachable();
}

cudaError_t ToCuda(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return cudaSuccess;
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return cudaErrorNotSupported;
    case CUBLAS_STATUS_INVALID_VALUE:
      return cudaErrorInvalidValue;
    case CUBLAS_STATUS_ALLOC_FAILED:
      return cudaErrorMemoryAllocation;
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return cudaErrorLaunchFailure;
    default:
      return cudaErrorUnknown;
  }
}

constexpr uint32_t kAlignment = 16;
constexpr int kCandidates = 16;
constexpr size_t kMaxPlans = 256;  // of a stream; beyond it, all are chosen again

bool SameLayout(const TensorView& a, const TensorView& b) {
  return a.dtype == b.dtype && a.rows == b.rows && a.cols == b.cols && a.row_stride == b.row_stride;
}

// Whether two products differ only in their data and factors.
bool SameShape(const MatrixProduct& p, const MatrixProduct& q) {
  return SameLayout(p.a, q.a) && p.transpose_a == q.transpose_a && SameLayout(p.b, q.b) &&
         p.transpose_b == q.transpose_b && p.out.dtype == q.out.dtype &&
         p.out.row_stride == q.out.row_stride && p.asked_cols == q.asked_cols &&
         (p.bias == nullptr) == (q.bias == nullptr) &&
         (p.device_factors == nullptr) == (q.device_factors == nullptr);
}

}  // namespace

// cuBLASLt's matrices are column-major. So a row-major matrix is given as its transpose, and the
// product as out^T = op(b)^T op(a)^T, with b as cuBLASLt's A and a as its B.
struct Products::Plan {
  explicit Plan(const MatrixProduct& of) : product(of) {}
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    const Library& library = TheLibrary();
    if (desc != nullptr) library.desc_destroy(desc);
    for (cublasLtMatrixLayout_t layout : {a, b, out, asked_a, asked_b, asked_out, whole_b}) {
      if (layout != nullptr) library.layout_destroy(layout);
    }
  }

  cublasStatus_t Init(cublasLtHandle_t handle, size_t workspace_bytes);

  const MatrixProduct product;  // the first of its shape
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t a = nullptr;
  cublasLtMatrixLayout_t b = nullptr;
  cublasLtMatrixLayout_t out = nullptr;
  // The layouts that algorithms are sought with: the inputs' strides must not change their order,
  // nor may a part of the columns.
  cublasLtMatrixLayout_t asked_a = nullptr;
  cublasLtMatrixLayout_t asked_b = nullptr;
  cublasLtMatrixLayout_t asked_out = nullptr;
  cublasLtMatrixLayout_t whole_b = nullptr;  // all of the asked columns, with the stride of b
  cublasLtMatmulAlgo_t algo = {};
};

cublasStatus_t Products::Plan::Init(cublasLtHandle_t handle, size_t workspace_bytes) {
  const Library& library = TheLibrary();
  const MatrixProduct& p = product;
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
  const auto call = [&](cublasStatus_t made) {
    if (status == CUBLAS_STATUS_SUCCESS) status = made;
  };
  const auto layout = [&](cublasLtMatrixLayout_t& to, DType dtype, int64_t rows, int64_t cols,
                          int64_t stride) {
    call(library.layout_create(&to, TypeOf(dtype), cols, rows, stride));
  };
  layout(a, p.a.dtype, p.a.rows, p.a.cols, p.a.row_stride);
  layout(b, p.b.dtype, p.b.rows, p.b.cols, p.b.row_stride);
  const int64_t rows = p.transpose_a ? p.a.cols : p.a.rows;
  const int64_t cols = p.transpose_b ? p.b.rows : p.b.cols;
  layout(out, p.out.dtype, rows, cols, p.out.row_stride);
  layout(asked_a, p.a.dtype, p.a.rows, p.a.cols, RoundUp(p.a.cols, 64));
  if (p.asked_cols == 0) {
    layout(asked_b, p.b.dtype, p.b.rows, p.b.cols, RoundUp(p.b.cols, 64));
    layout(asked_out, p.out.dtype, rows, cols, p.out.row_stride);
    layout(whole_b, p.b.dtype, p.b.rows, p.b.cols, p.b.row_stride);
  } else {
    layout(asked_b, p.b.dtype, p.asked_cols, p.b.cols, RoundUp(p.b.cols, 64));
    layout(asked_out, p.out.dtype, rows, p.asked_cols, RoundUp(p.asked_cols, 32));
    layout(whole_b, p.b.dtype, p.asked_cols, p.b.cols, p.b.row_stride);
  }
  call(library.desc_create(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    if (status == CUBLAS_STATUS_SUCCESS)
      call(library.desc_set(desc, attribute, &value, sizeof(value)));
  };
  const auto op = [](bool transpose) {
    return static_cast<int32_t>(transpose ? CUBLAS_OP_T : CUBLAS_OP_N);
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, op(p.transpose_b));
  set(CUBLASLT_MATMUL_DESC_TRANSB, op(p.transpose_a));
  if (p.bias != nullptr) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<uint32_t>(CUBLASLT_EPILOGUE_BIAS));
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  }
  if (p.device_factors != nullptr)
    set(CUBLASLT_MATMUL_DESC_POINTER_MODE, static_cast<int32_t>(CUBLASLT_POINTER_MODE_DEVICE));
  if (status != CUBLAS_STATUS_SUCCESS) return status;

  cublasLtMatmulPreference_t preference = nullptr;
  call(library.preference_create(&preference));
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    if (status == CUBLAS_STATUS_SUCCESS)
      call(library.preference_set(preference, attribute, &value, sizeof(value)));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(workspace_bytes));
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE));
  for (const auto alignment :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    prefer(alignment, kAlignment);
  }
  cublasLtMatmulHeuristicResult_t found[kCandidates];
  int count = 0;
  if (status == CUBLAS_STATUS_SUCCESS) {
    call(library.heuristic(handle, desc, asked_b, asked_a, asked_out, asked_out, preference,
                           kCandidates, found, &count));
  }
  if (preference != nullptr) library.preference_destroy(preference);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  const auto serves = [&](const cublasLtMatmulAlgo_t& found_algo, cublasLtMatrixLayout_t with_a,
                          cublasLtMatrixLayout_t with_b, cublasLtMatrixLayout_t with_out) {
    cublasLtMatmulHeuristicResult_t real = {};  // with the strides of the product
    return library.check(handle, desc, with_b, with_a, with_out, with_out, &found_algo, &real) ==
               CUBLAS_STATUS_SUCCESS &&
           real.workspaceSize <= workspace_bytes;
  };
  for (int i = 0; i < count; ++i) {
    int32_t splits = 0;
    size_t written = 0;
    if (found[i].state != CUBLAS_STATUS_SUCCESS ||
        library.algo_attribute(&found[i].algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits,
                               sizeof(splits), &written) != CUBLAS_STATUS_SUCCESS ||
        splits > 1 || !serves(found[i].algo, a, whole_b, asked_out)) {
      continue;
    }
    // Another algorithm would give other bits.
    if (!serves(found[i].algo, a, b, out)) return CUBLAS_STATUS_NOT_SUPPORTED;
    algo = found[i].algo;
    return CUBLAS_STATUS_SUCCESS;
  }
  return CUBLAS_STATUS_NOT_SUPPORTED;
}

Products::Products() = default;

Products::~Products() {
  plans_.clear();
  if (handle_ != nullptr) TheLibrary().destroy(static_cast<cublasLtHandle_t>(handle_));
}

absl::Status Products::Init(size_t workspace_bytes) {
  const Library& library = TheLibrary();
  if (!library.error.empty())
    return absl::UnavailableError(absl::StrCat("cuBLASLt: ", library.error));
  cublasLtHandle_t handle = nullptr;
  const cublasStatus_t status = library.create(&handle);
  if (status != CUBLAS_STATUS_SUCCESS)
    return absl::UnavailableError(absl::StrCat("cuBLASLt: no handle, status ", status));
  handle_ = handle;
  workspace_bytes_ = workspace_bytes;
  return absl::OkStatus();
}

cudaError_t Products::PlanOf(const MatrixProduct& product, Plan*& plan) {
  for (Plan& known : plans_) {
    if (SameShape(known.product, product)) {
      plan = &known;
      return cudaSuccess;
    }
  }
  if (plans_.size() == kMaxPlans) plans_.clear();
  plan = &plans_.emplace_back(product);
  const cublasStatus_t status =
      plan->Init(static_cast<cublasLtHandle_t>(handle_), workspace_bytes_);
  if (status != CUBLAS_STATUS_SUCCESS) plans_.pop_back();
  return ToCuda(status);
}

cudaError_t Products::Enqueue(const MatrixProduct& product, cudaStream_t stream) {
  if (handle_ == nullptr) return cudaErrorNotSupported;
  Plan* plan = nullptr;
  const cudaError_t error = PlanOf(product, plan);
  if (error != cudaSuccess) return error;
  const Library& library = TheLibrary();
  if (product.bias != nullptr) {
    const cublasStatus_t status = library.desc_set(plan->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                   &product.bias, sizeof(product.bias));
    if (status != CUBLAS_STATUS_SUCCESS) return ToCuda(status);
  }
  void* const out = product.out.data;
  const float* const on_device = product.device_factors;
  const float* const alpha = on_device == nullptr ? &product.alpha : on_device;
  const float* const beta = on_device == nullptr ? &product.beta : on_device + 1;
  return ToCuda(library.matmul(static_cast<cublasLtHandle_t>(handle_), plan->desc, alpha,
                               product.b.data, plan->b, product.a.data, plan->a, beta, out,
                               plan->out, out, plan->out, &plan->algo, product.workspace,
                               workspace_bytes_, stream));
}

}  // namespace logitd::cuda

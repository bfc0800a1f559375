#include "kernels/cuda/linear/product.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace logitd::cuda {
namespace {

// The functions of the library that are used here.
struct Library {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmulAlgoCheck) check = nullptr;
  decltype(&cublasLtMatmulAlgoConfigGetAttribute) algo_attribute = nullptr;
  decltype(&cublasLtMatmulDescCreate) desc_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  std::string error;  // empty: loaded
};

Library Load() {
  Library library;
  // Never closed: its own threads and the driver use it until the process ends.
  void* handle = nullptr;
  for (const char* name : {"libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13"}) {
    handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) break;
    library.error = dlerror();
  }
  if (handle == nullptr) return library;
  library.error.clear();
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr) library.error = absl::StrCat("libcublasLt.so.13 has no ", name);
  };
  find(library.create, "cublasLtCreate");
  find(library.destroy, "cublasLtDestroy");
  find(library.matmul, "cublasLtMatmul");
  find(library.heuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(library.check, "cublasLtMatmulAlgoCheck");
  find(library.algo_attribute, "cublasLtMatmulAlgoConfigGetAttribute");
  find(library.desc_create, "cublasLtMatmulDescCreate");
  find(library.desc_destroy, "cublasLtMatmulDescDestroy");
  find(library.desc_set, "cublasLtMatmulDescSetAttribute");
  find(library.layout_create, "cublasLtMatrixLayoutCreate");
  find(library.layout_destroy, "cublasLtMatrixLayoutDestroy");
  find(library.preference_create, "cublasLtMatmulPreferenceCreate");
  find(library.preference_destroy, "cublasLtMatmulPreferenceDestroy");
  find(library.preference_set, "cublasLtMatmulPreferenceSetAttribute");
  return library;
}

const Library& TheLibrary() {
  static const Library* const library = new Library(Load());
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
constexpr int64_t kOwnStride = 0;  // the number of rows, rounded up
constexpr int kCandidates = 16;
constexpr size_t kMaxPlans = 64;  // of a stream; beyond it, all are chosen again

}  // namespace

struct Products::Plan {
  ProductShape shape;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t a = nullptr;
  cublasLtMatrixLayout_t b = nullptr;
  cublasLtMatrixLayout_t out = nullptr;
  // The layouts that algorithms are sought with: the inputs' strides must not change their order.
  cublasLtMatrixLayout_t asked_a = nullptr;
  cublasLtMatrixLayout_t asked_b = nullptr;
  cublasLtMatmulAlgo_t algo = {};

  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    const Library& library = TheLibrary();
    if (desc != nullptr) library.desc_destroy(desc);
    for (cublasLtMatrixLayout_t layout : {a, b, out, asked_a, asked_b}) {
      if (layout != nullptr) library.layout_destroy(layout);
    }
  }

  cublasStatus_t Init(const ProductShape& of, cublasLtHandle_t handle, size_t workspace_bytes,
                      const float* bias);
};

cublasStatus_t Products::Plan::Init(const ProductShape& of, cublasLtHandle_t handle,
                                    size_t workspace_bytes, const float* bias) {
  const Library& library = TheLibrary();
  shape = of;
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
  const auto call = [&](cublasStatus_t made) {
    if (status == CUBLAS_STATUS_SUCCESS) status = made;
  };
  const auto layout = [&](cublasLtMatrixLayout_t& to, DType dtype, bool transposed, int64_t rows,
                          int64_t cols, int64_t stride) {
    if (transposed) std::swap(rows, cols);
    call(library.layout_create(&to, TypeOf(dtype), rows, cols,
                               stride == kOwnStride ? (rows + 63) / 64 * 64 : stride));
  };
  layout(a, of.inputs, of.transpose_a, of.m, of.k, of.a_stride);
  layout(b, of.inputs, of.transpose_b, of.k, of.n, of.b_stride);
  layout(out, of.output, false, of.m, of.n, of.out_stride);
  layout(asked_a, of.inputs, of.transpose_a, of.m, of.k, kOwnStride);
  layout(asked_b, of.inputs, of.transpose_b, of.k, of.n, kOwnStride);
  call(library.desc_create(&desc, of.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                           CUDA_R_32F));
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    if (status == CUBLAS_STATUS_SUCCESS)
      call(library.desc_set(desc, attribute, &value, sizeof(value)));
  };
  const auto op = [](bool transpose) {
    return static_cast<int32_t>(transpose ? CUBLAS_OP_T : CUBLAS_OP_N);
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, op(of.transpose_a));
  set(CUBLASLT_MATMUL_DESC_TRANSB, op(of.transpose_b));
  if (of.bias) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<uint32_t>(CUBLASLT_EPILOGUE_BIAS));
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  }
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
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, kAlignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, kAlignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, kAlignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, kAlignment);
  cublasLtMatmulHeuristicResult_t found[kCandidates];
  int count = 0;
  if (status == CUBLAS_STATUS_SUCCESS) {
    call(library.heuristic(handle, desc, asked_a, asked_b, out, out, preference, kCandidates, found,
                           &count));
  }
  if (preference != nullptr) library.preference_destroy(preference);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  for (int i = 0; i < count; ++i) {
    int32_t splits = 0;
    size_t written = 0;
    cublasLtMatmulHeuristicResult_t real = {};  // with the strides of the product
    if (found[i].state != CUBLAS_STATUS_SUCCESS ||
        library.algo_attribute(&found[i].algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits,
                               sizeof(splits), &written) != CUBLAS_STATUS_SUCCESS ||
        splits > 1 ||
        library.check(handle, desc, a, b, out, out, &found[i].algo, &real) !=
            CUBLAS_STATUS_SUCCESS ||
        real.workspaceSize > workspace_bytes) {
      continue;
    }
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

cudaError_t Products::PlanOf(const ProductShape& shape, const float* bias, Plan*& plan) {
  for (Plan& known : plans_) {
    if (known.shape == shape) {
      plan = &known;
      return cudaSuccess;
    }
  }
  if (plans_.size() == kMaxPlans) plans_.clear();
  plan = &plans_.emplace_back();
  const cublasStatus_t status =
      plan->Init(shape, static_cast<cublasLtHandle_t>(handle_), workspace_bytes_, bias);
  if (status != CUBLAS_STATUS_SUCCESS) plans_.pop_back();
  return ToCuda(status);
}

cudaError_t Products::Enqueue(const ProductShape& shape, const ProductOperands& operands,
                              cudaStream_t stream) {
  if (handle_ == nullptr) return cudaErrorNotSupported;
  Plan* plan = nullptr;
  const cudaError_t error = PlanOf(shape, operands.bias, plan);
  if (error != cudaSuccess) return error;
  const Library& library = TheLibrary();
  if (shape.bias) {
    const cublasStatus_t status = library.desc_set(plan->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                   &operands.bias, sizeof(operands.bias));
    if (status != CUBLAS_STATUS_SUCCESS) return ToCuda(status);
  }
  return ToCuda(library.matmul(static_cast<cublasLtHandle_t>(handle_), plan->desc, &operands.alpha,
                               operands.a, plan->a, operands.b, plan->b, &operands.beta,
                               operands.out, plan->out, operands.out, plan->out, &plan->algo,
                               operands.workspace, workspace_bytes_, stream));
}

}  // namespace logitd::cuda

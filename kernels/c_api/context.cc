// Contexts, errors and the fields that ops share.
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/c_api/fields.h"
#include "kernels/checks.h"
#include "kernels/status_macros.h"

struct logitd_context {
  std::mutex turn;
  std::unique_ptr<logitd::c_api::Device> device;
};

namespace logitd::c_api {
namespace {

thread_local std::string last_error;

int32_t CodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return LOGITD_OK;
    case absl::StatusCode::kInvalidArgument:
      return LOGITD_INVALID_ARGUMENT;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kUnimplemented:
      return LOGITD_UNAVAILABLE;
    case absl::StatusCode::kResourceExhausted:
      return LOGITD_RESOURCE_EXHAUSTED;
    default:
      return LOGITD_INTERNAL;
  }
}

int32_t Keep(const absl::Status& status) {
  last_error = std::string(status.message());
  return CodeOf(status);
}

// run() with its status as a code. No exception leaves the interface.
template <class Run>
int32_t Guarded(const Run& run) {
  try {
    return Keep(run());
  } catch (const std::bad_alloc&) {
    return Keep(absl::ResourceExhaustedError("memory: the host has no more"));
  }
}

// A call has the context for itself.
class Turn {
 public:
  explicit Turn(logitd_context& context) : lock_(context.turn), device_(*context.device) {}
  ~Turn() { device_.End(); }

 private:
  const std::lock_guard<std::mutex> lock_;
  Device& device_;
};

constexpr int64_t kMostRows = int64_t{1} << 31;

// The caller's struct in one of this library's size, which begins with its size.
absl::Status CopyOp(const void* op, void* whole, size_t whole_bytes) {
  uint64_t bytes;
  std::memcpy(&bytes, op, sizeof(bytes));
  if (bytes < sizeof(bytes) || bytes > whole_bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("struct_size: got %d, allowed %d..%d", bytes, sizeof(bytes), whole_bytes));
  }
  std::memcpy(whole, op, bytes);
  return absl::OkStatus();
}

absl::Status CheckAlignment(std::string_view field, const TensorView& tensor) {
  const auto stride = static_cast<uint64_t>(tensor.row_stride) * SizeOf(tensor.dtype);
  if (reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 && (stride % 16 == 0 || tensor.rows == 1))
    return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: got rows at address %p, %d bytes apart, allowed multiples of 16", field,
                      tensor.data, stride));
}

}  // namespace

int32_t Enter(logitd_context* context, const logitd_call* call, const void* op, void* whole,
              size_t whole_bytes, RunFunction* run) {
  return Guarded([&]() -> absl::Status {
    LOGITD_RETURN_IF_ERROR(CheckPointer("context", context));
    LOGITD_RETURN_IF_ERROR(CheckPointer("call", call));
    LOGITD_RETURN_IF_ERROR(CheckPointer("op", op));
    LOGITD_RETURN_IF_ERROR(CopyOp(op, whole, whole_bytes));
    const Turn turn(*context);
    return run(*context->device, *call, whole);
  });
}

absl::Status CheckPointer(std::string_view field, const void* pointer) {
  if (pointer != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("%s: got null, allowed an address", field));
}

absl::Status ReadTensor(std::string_view field, const logitd_tensor& from, TensorView& to) {
  to = {.data = from.data,
        .dtype = static_cast<DType>(from.dtype),
        .rows = from.rows,
        .cols = from.cols,
        .row_stride = from.row_stride};
  if (from.dtype < LOGITD_F32 || from.dtype > LOGITD_BF16) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s dtype: got %d, allowed 0..2 (f32, f16, bf16)", field, from.dtype));
  }
  LOGITD_RETURN_IF_ERROR(CheckRange(absl::StrFormat("%s rows", field), to.rows, 1, kMostRows));
  LOGITD_RETURN_IF_ERROR(CheckRange(absl::StrFormat("%s cols", field), to.cols, 1, kMaxVocab));
  LOGITD_RETURN_IF_ERROR(
      CheckRange(absl::StrFormat("%s row_stride", field), to.row_stride, to.cols, kMostRows));
  return CheckPointer(field, to.data);
}

absl::Status ReadOutput(std::string_view field, const logitd_tensor& from, int64_t rows,
                        int64_t cols, MutableTensorView& to) {
  TensorView view;
  LOGITD_RETURN_IF_ERROR(ReadTensor(field, from, view));
  if (view.rows != rows || view.cols != cols) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: got shape [%d, %d], allowed [%d, %d]",
                                                      field, view.rows, view.cols, rows, cols));
  }
  to = {from.data, view.dtype, rows, cols, view.row_stride};
  return absl::OkStatus();
}

absl::Status ReadOutput(std::string_view field, const logitd_tensor& from, int64_t rows,
                        int64_t cols, DType dtype, bool or_f32, MutableTensorView& to) {
  LOGITD_RETURN_IF_ERROR(ReadOutput(field, from, rows, cols, to));
  if (to.dtype == dtype || (or_f32 && to.dtype == DType::kF32)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("%s dtype: got %s, allowed %s%s", field,
                                                    Name(to.dtype), Name(dtype),
                                                    or_f32 && dtype != DType::kF32 ? ", f32" : ""));
}

absl::Status ReadHead(const logitd_head& from, HeadView& to) {
  LOGITD_RETURN_IF_ERROR(ReadTensor("weight", from.weight, to.weight));
  LOGITD_RETURN_IF_ERROR(CheckAlignment("weight", to.weight));
  to.bias = from.bias;
  to.norm = from.norm;
  to.norm_epsilon = from.norm_epsilon;
  to.scale = from.scale;
  to.softcap = from.softcap;
  return CheckHead(to);
}

absl::Status ReadHidden(std::string_view field, const logitd_tensor& tensor, const HeadView& head,
                        TensorView& to) {
  LOGITD_RETURN_IF_ERROR(ReadTensor(field, tensor, to));
  LOGITD_RETURN_IF_ERROR(CheckAlignment(field, to));
  return CheckHidden({.dtype = to.dtype,
                      .rows = to.rows,
                      .hidden = to.cols,
                      .payload_bytes = to.rows * to.cols * static_cast<int64_t>(SizeOf(to.dtype))},
                     head);
}

absl::Status ReadInput(const logitd_tensor& tensor, const logitd_head* head, Input& to) {
  to.linear = head != nullptr;
  if (!to.linear) return ReadTensor("logits", tensor, to.tensor);
  LOGITD_RETURN_IF_ERROR(ReadHead(*head, to.head));
  return ReadHidden("hidden", tensor, to.head, to.tensor);
}

namespace {

absl::Status Open(const char* backend, int32_t device, int32_t threads, uint64_t scratch_bytes,
                  std::unique_ptr<logitd_context>& context) {
  LOGITD_RETURN_IF_ERROR(CheckPointer("backend", backend));
  const std::string_view kind = backend;
  absl::StatusOr<std::unique_ptr<Device>> opened =
      absl::InvalidArgumentError(absl::StrFormat("backend: got %s, allowed cpu, cuda", kind));
  if (kind == "cpu") {
    LOGITD_RETURN_IF_ERROR(CheckRange("device", device, 0, 0));
    opened = OpenCpu(threads);
  } else if (kind == "cuda") {
#ifdef LOGITD_WITH_CUDA
    opened = OpenCuda(device, scratch_bytes);
#else
    opened = absl::UnavailableError("backend: got cuda, allowed cpu (this build has no CUDA)");
#endif
  }
  if (!opened.ok()) return opened.status();
  context = std::make_unique<logitd_context>();
  context->device = *std::move(opened);
  return absl::OkStatus();
}

}  // namespace
}  // namespace logitd::c_api

using logitd::c_api::CheckPointer;
using logitd::c_api::Guarded;

int32_t logitd_abi_version(void) { return LOGITD_ABI_VERSION; }

const char* logitd_error(void) { return logitd::c_api::last_error.c_str(); }

int32_t logitd_open(const char* backend, int32_t device, int32_t threads, uint64_t scratch_bytes,
                    logitd_context** context) {
  return Guarded([&]() -> absl::Status {
    LOGITD_RETURN_IF_ERROR(CheckPointer("context", context));
    *context = nullptr;
    std::unique_ptr<logitd_context> opened;
    LOGITD_RETURN_IF_ERROR(logitd::c_api::Open(backend, device, threads, scratch_bytes, opened));
    *context = opened.release();
    return absl::OkStatus();
  });
}

void logitd_close(logitd_context* context) { delete context; }

uint64_t logitd_workspace_bytes(const logitd_context* context, int64_t rows) {
  if (context == nullptr || rows < 0) return 0;
  return context->device->WorkspaceBytes(rows);
}

int32_t logitd_prepare_workspace(logitd_context* context, const logitd_call* call) {
  return Guarded([&]() -> absl::Status {
    LOGITD_RETURN_IF_ERROR(CheckPointer("context", context));
    LOGITD_RETURN_IF_ERROR(CheckPointer("call", call));
    const logitd::c_api::Turn turn(*context);
    return context->device->Prepare(*call);
  });
}

// Fields of the C interface as the ops take them, checked.
#ifndef LOGITD_KERNELS_C_API_FIELDS_H_
#define LOGITD_KERNELS_C_API_FIELDS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string_view>
#include <type_traits>
#include <variant>

#include "absl/status/status.h"
#include "kernels/c_api.h"
#include "kernels/c_api/device.h"
#include "kernels/c_api/rows.h"
#include "kernels/head.h"
#include "kernels/row_params.h"
#include "kernels/types.h"

struct logitd_context;

namespace logitd::c_api {

// An op of the interface: reads the fields of the whole struct, and runs it.
using RunFunction = absl::Status(Device&, const logitd_call&, const void*);

// Runs it on the context's device, when no other call of the context runs. `whole` gets the
// caller's struct, which may be shorter, with zeros after it. Returns the code, and keeps the text.
int32_t Enter(logitd_context* context, const logitd_call* call, const void* op, void* whole,
              size_t whole_bytes, RunFunction* run);

template <class Op, absl::Status (*kRun)(Device&, const logitd_call&, const Op&)>
int32_t Enter(logitd_context* context, const logitd_call* call, const Op* op) {
  Op whole = {};
  return Enter(
      context, call, op, &whole, sizeof(Op),
      +[](Device& device, const logitd_call& of, const void* read) {
        return kRun(device, of, *static_cast<const Op*>(read));
      });
}

// A matrix that is read. INVALID_ARGUMENT: dtype, sizes, stride or a null pointer.
absl::Status ReadTensor(std::string_view field, const logitd_tensor& from, TensorView& to);
// A matrix that is written, of this shape.
absl::Status ReadOutput(std::string_view field, const logitd_tensor& from, int64_t rows,
                        int64_t cols, MutableTensorView& to);
// Likewise; its dtype is `dtype` or, where `or_f32`, f32.
absl::Status ReadOutput(std::string_view field, const logitd_tensor& from, int64_t rows,
                        int64_t cols, DType dtype, bool or_f32, MutableTensorView& to);
absl::Status ReadHead(const logitd_head& from, HeadView& to);

// The input of an op: logits, or hidden states under a head.
struct Input {
  TensorView tensor;
  HeadView head;
  bool linear = false;

  int64_t vocab() const { return linear ? head.vocab() : tensor.cols; }
};
absl::Status ReadInput(const logitd_tensor& tensor, const logitd_head* head, Input& to);
// Hidden states under a head.
absl::Status ReadHidden(std::string_view field, const logitd_tensor& tensor, const HeadView& head,
                        TensorView& to);

// OK where the pointer of a field that must not be null is not.
absl::Status CheckPointer(std::string_view field, const void* pointer);

// Makes a RowFill: the row that all are copies of, then its columns.
template <class Row>
class RowMaker {
 public:
  RowMaker(Device& device, int64_t rows, int64_t vocab)
      : device_(device), fill_({.rows = rows, .vocab = vocab}) {
    static_assert(sizeof(Row) % 8 == 0 && sizeof(Row) <= kMostRowBytes);
    fill_.row_bytes = sizeof(Row);
    fill_.to = reinterpret_cast<std::byte*>(device.Take<Row>(rows));
  }

  Row row = {};

  // A parameter that `params` has under this name. Parameters are numbered from 1 in the order of
  // these calls.
  template <class Value>
  void Add(std::string_view name, const Value& value, RowParams<Row> params) {
    ++parameter_;
    const RowParam<Row>& param = *std::find_if(params.begin(), params.end(),
                                               [name](const auto& of) { return of.name == name; });
    std::visit(
        [&](auto member) {
          using T = std::decay_t<decltype(row.*member)>;
          if constexpr (std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) {
            SetAll<T>(row.*member, value);
            if (value.each == nullptr) return;
            double high = param.allowed.high;
            if (param.allowed.up_to_vocab) high = std::min<double>(high, fill_.vocab);
            Column({.each = value.each,
                    .kind = std::is_same_v<T, float>     ? ColumnKind::kFloat
                            : std::is_same_v<T, int32_t> ? ColumnKind::kInt32
                                                         : ColumnKind::kUint64,
                    .above_low = param.allowed.above_low,
                    .below_high = param.allowed.below_high,
                    .member = OffsetOf(row.*member),
                    .low = param.allowed.low,
                    .high = high});
          }
        },
        param.member);
  }

  void AddTarget(const int64_t* targets, int64_t ignored, int32_t& member) {
    ++parameter_;
    Column({.each = targets,
            .kind = ColumnKind::kTarget,
            .member = OffsetOf(member),
            .low = 0,
            .high = static_cast<double>(fill_.vocab - 1),
            .ignored = ignored});
  }

  // Lists of tokens or of bias, with at most `most` values in a row.
  template <class Lists>
  void AddLists(const Lists& lists, int64_t most, int64_t& first, int32_t& count) {
    ++parameter_;
    if (lists.values == nullptr) return;
    Column({.each = lists.offsets,
            .kind = std::is_same_v<Lists, logitd_biases> ? ColumnKind::kBias : ColumnKind::kTokens,
            .member = OffsetOf(first),
            .count_member = OffsetOf(count),
            .low = static_cast<double>(lists.size),
            .high = static_cast<double>(most),
            .list = lists.values});
  }

  // Tokens of every row, which are a parameter too.
  void AddExtra(const int32_t* ids, int32_t count) {
    ++parameter_;
    fill_.extra = ids;
    fill_.extra_count = count;
    fill_.extra_parameter = parameter_;
  }

  // The member is at most another one, else the parameter of this number is refused.
  void KeepBelow(int32_t parameter, const int32_t& member, const int32_t& most) {
    fill_.least_parameter = parameter;
    fill_.least = OffsetOf(member);
    fill_.most = OffsetOf(most);
  }

  // The member is r * step.
  void Step(int64_t& member, int64_t step) {
    fill_.step[fill_.steps++] = {.member = OffsetOf(member), .step = step};
  }

  // Answers [rows, count]; where `to` is null they are made all the same, and dropped.
  template <class T>
  T* Answer(T* to, int64_t count = 1) {
    if (to == nullptr) to = device_.Take<T>(fill_.rows * count);
    Refuse({.data = to,
            .stride = count,
            .count = count,
            .bits = std::is_same_v<T, float> ? kNan : ~0u});
    return to;
  }
  // Answers that only a caller who wants them has: null stays null.
  template <class T>
  T* Wanted(T* to, int64_t count = 1) {
    return to == nullptr ? nullptr : Answer(to, count);
  }
  void Answer(const MutableTensorView& to) {
    if (to.data == nullptr) return;
    Refuse({.data = to.data,
            .stride = to.row_stride,
            .count = to.cols,
            .bytes = static_cast<int32_t>(SizeOf(to.dtype)),
            .bits = to.dtype == DType::kF32   ? kNan
                    : to.dtype == DType::kF16 ? 0x7e00u
                                              : 0x7fc0u});
  }
  RowStatus* Status(logitd_row_status* to) {
    fill_.status =
        to == nullptr ? device_.Take<RowStatus>(fill_.rows) : reinterpret_cast<RowStatus*>(to);
    return fill_.status;
  }

  // The rows, when they are made.
  absl::Status Fill(const Row*& rows) {
    std::memcpy(fill_.row, &row, sizeof(Row));
    rows = reinterpret_cast<const Row*>(fill_.to);
    return device_.Fill(fill_);
  }

 private:
  static constexpr uint32_t kNan = 0x7fc00000;

  template <class T, class Value>
  static void SetAll(T& member, const Value& value) {
    if (value.each != nullptr) return;  // the default of the row stays
    if constexpr (std::is_same_v<T, int32_t>) {
      member = static_cast<int32_t>(std::clamp<int64_t>(
          value.all, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()));
    } else {
      member = static_cast<T>(value.all);
    }
  }

  int32_t OffsetOf(const auto& member) const {
    return static_cast<int32_t>(reinterpret_cast<const std::byte*>(&member) -
                                reinterpret_cast<const std::byte*>(&row));
  }
  void Column(RowColumn column) {
    column.parameter = static_cast<int16_t>(parameter_);
    fill_.column[fill_.columns++] = column;
  }
  void Refuse(const RefusedAnswer& answer) { fill_.answer[fill_.answers++] = answer; }

  Device& device_;
  RowFill fill_;
  int32_t parameter_ = 0;
};

}  // namespace logitd::c_api

#endif  // LOGITD_KERNELS_C_API_FIELDS_H_

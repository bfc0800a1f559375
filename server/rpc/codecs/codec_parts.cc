#include "server/rpc/codecs/codec_parts.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "absl/strings/str_format.h"
#include "logitd/v1/types.pb.h"

namespace logitd::rpc {
namespace {

struct DTypePair {
  int32_t wire;
  DType dtype;
};
constexpr DTypePair kDTypes[] = {
    {v1::DTYPE_F32, DType::kF32}, {v1::DTYPE_F16, DType::kF16}, {v1::DTYPE_BF16, DType::kBF16}};

// The enum on the wire has the values of the one in the kernels.
static_assert(v1::ROW_STATUS_OK == static_cast<int>(RowCode::kOk));
static_assert(v1::ROW_STATUS_NAN_LOGIT == static_cast<int>(RowCode::kNanLogit));
static_assert(v1::ROW_STATUS_EMPTY_SUPPORT == static_cast<int>(RowCode::kEmptySupport));
static_assert(v1::ROW_STATUS_NOT_REACHED == static_cast<int>(RowCode::kNotReached));
static_assert(sizeof(RowStatus) == 8);

}  // namespace

absl::Status ReadDType(int32_t wire, DType* dtype, std::string_view field) {
  const auto* pair = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                  [&](const DTypePair& d) { return d.wire == wire; });
  if (pair == std::end(kDTypes)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: got %d, allowed DTYPE_F32 (1), DTYPE_F16 (2), DTYPE_BF16 (3)", field, wire));
  }
  *dtype = pair->dtype;
  return absl::OkStatus();
}

void WriteArray(WireWriter& writer, uint32_t number, absl::Span<const std::byte> values) {
  if (values.empty()) return;
  writer.LengthHead(number, values.size());
  writer.Raw(values.data(), values.size());
}

void WriteStatus(WireWriter& writer, uint32_t code_number, uint32_t position_number,
                 absl::Span<const std::byte> status) {
  const auto* rows = reinterpret_cast<const RowStatus*>(status.data());
  const size_t count = status.size() / sizeof(RowStatus);
  writer.LengthHead(code_number, count);
  for (size_t i = 0; i < count; ++i) writer.Varint(static_cast<uint64_t>(rows[i].code));
  writer.LengthHead(position_number, count * sizeof(int32_t));
  for (size_t i = 0; i < count; ++i) writer.Fixed(rows[i].position);
}

void WriteTimings(WireWriter& writer, uint32_t number, const CallTimes& times) {
  std::array<uint8_t, kMaxTimingsBytes> bytes;
  WireWriter fields(bytes.data());
  fields.VarintField(v1::Timings::kReceiveNsFieldNumber, times.receive_ns);
  fields.VarintField(v1::Timings::kCopyNsFieldNumber, times.job.copy_ns);
  fields.VarintField(v1::Timings::kQueueNsFieldNumber, times.job.queue_ns);
  fields.VarintField(v1::Timings::kH2DNsFieldNumber, times.job.h2d_ns);
  fields.VarintField(v1::Timings::kKernelNsFieldNumber, times.job.kernel_ns);
  fields.VarintField(v1::Timings::kD2HNsFieldNumber, times.job.d2h_ns);
  fields.VarintField(v1::Timings::kBatchRowsFieldNumber, times.job.batch_rows);
  fields.VarintField(v1::Timings::kTotalNsFieldNumber, times.total_ns);
  const auto size = static_cast<size_t>(fields.at() - bytes.data());
  writer.LengthHead(number, size);
  writer.Raw(bytes.data(), size);
}

}  // namespace logitd::rpc

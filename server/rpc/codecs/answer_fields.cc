#include "server/rpc/codecs/answer_fields.h"

#include <array>

#include "logitd/v1/types.pb.h"

namespace logitd::rpc {
namespace {

// The enum on the wire has the values of the one in the kernels.
static_assert(v1::ROW_STATUS_OK == static_cast<int>(RowCode::kOk));
static_assert(v1::ROW_STATUS_NAN_LOGIT == static_cast<int>(RowCode::kNanLogit));
static_assert(v1::ROW_STATUS_EMPTY_SUPPORT == static_cast<int>(RowCode::kEmptySupport));
static_assert(v1::ROW_STATUS_NOT_REACHED == static_cast<int>(RowCode::kNotReached));
static_assert(sizeof(RowStatus) == 8);

}  // namespace

void WriteStatus(WireWriter& writer, uint32_t code_number, uint32_t position_number,
                 absl::Span<const RowStatus> status) {
  writer.LengthHead(code_number, status.size());
  for (const RowStatus& row : status) writer.Varint(static_cast<uint64_t>(row.code));
  writer.LengthHead(position_number, status.size() * sizeof(int32_t));
  for (const RowStatus& row : status) writer.Fixed(row.position);
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

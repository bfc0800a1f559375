#include "client/messages/attention_messages.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_format.h"
#include "client/messages/codec.h"
#include "client/messages/plan.h"
#include "client/tensor_file.h"

namespace logitd::client {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;
using Forward = v1::AttentionSoftmaxRequest;
using Backward = v1::AttentionSoftmaxBackwardRequest;
using Response = v1::AttentionSoftmaxResponse;
using BackwardResponse = v1::AttentionSoftmaxBackwardResponse;

static_assert(Response::kProbsFieldNumber == int{BackwardResponse::kDScoresFieldNumber});

// Tags and lengths of a message's payload, mask, d_probs and logsumexp, at most.
constexpr int64_t kFieldHeadBytes = 4 * 8;

// Status and logsumexp of a row of an answer, as the server counts them.
constexpr int64_t kAnswerRowBytes = 12;

template <typename Message, typename Request>
Message HeaderOf(const Request& request) {
  Message header;
  header.set_dtype(request.dtype);
  header.set_batch(request.shape.batch);
  header.set_heads(request.shape.heads);
  header.set_queries(request.shape.queries);
  header.set_keys(request.shape.keys);
  header.set_scale(request.scale);
  if (request.window.left.has_value()) header.set_window_left(*request.window.left);
  if (request.window.right.has_value()) header.set_window_right(*request.window.right);
  header.mutable_sinks()->Add(request.sinks.begin(), request.sinks.end());
  header.set_out_dtype(request.out_dtype);
  return header;
}

absl::Status WrongSize(const char* name, size_t got, int64_t allowed) {
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: got %d bytes, but the shape makes that %d", name, got, allowed));
}

v1::DType OutDType(v1::DType out, v1::DType dtype) {
  return out == v1::DTYPE_UNSPECIFIED ? dtype : out;
}

// Builds a message of slices over the caller's memory.
class SliceList {
 public:
  explicit SliceList(std::string header) : small_(std::move(header)) {}

  void Bytes(int number, absl::string_view bytes, const std::shared_ptr<const void>& owner) {
    if (bytes.empty()) return;
    uint8_t head[16];
    uint8_t* end = CodedOutputStream::WriteTagToArray(
        WireFormatLite::MakeTag(number, WireFormatLite::WIRETYPE_LENGTH_DELIMITED), head);
    end = CodedOutputStream::WriteVarint32ToArray(static_cast<uint32_t>(bytes.size()), end);
    small_.append(reinterpret_cast<const char*>(head), static_cast<size_t>(end - head));
    slices_.emplace_back(small_);
    small_.clear();
    slices_.push_back(SliceOver(bytes, owner));
  }
  grpc::ByteBuffer Take() {
    if (!small_.empty()) slices_.emplace_back(small_);
    return grpc::ByteBuffer(slices_.data(), slices_.size());
  }

 private:
  std::string small_;
  std::vector<grpc::Slice> slices_;
};

// Reads the large array into `large`, and all other fields into `rest`. An empty `large`: there
// must be none.
bool SplitAnswer(grpc::ByteBuffer* answer, absl::Span<char> large, std::string* rest) {
  grpc::ProtoBufferReader reader(answer);
  if (!reader.status().ok()) return false;
  CodedInputStream in(&reader);
  google::protobuf::io::StringOutputStream rest_stream(rest);
  CodedOutputStream out(&rest_stream);
  constexpr uint32_t kLarge = WireFormatLite::MakeTag(Response::kProbsFieldNumber,
                                                      WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
  bool found = false;
  while (const uint32_t tag = in.ReadTag()) {
    if (tag != kLarge) {
      if (!WireFormatLite::SkipField(&in, tag, &out)) return false;
      continue;
    }
    int size = 0;
    if (!in.ReadVarintSizeAsInt(&size) || static_cast<size_t>(size) != large.size() ||
        !in.ReadRaw(large.data(), size)) {
      return false;
    }
    found = true;
  }
  return found == !large.empty() && in.ConsumedEntireMessage();
}

}  // namespace

absl::StatusOr<AttentionMessages> AttentionMessages::Plan(const AttentionSoftmaxRequest& request,
                                                          const v1::Limits& limits,
                                                          const ClientOptions& options) {
  auto header = HeaderOf<Forward>(request);
  header.set_want_logsumexp(request.want_logsumexp);
  if (request.mask.kind != v1::MASK_KIND_NONE) {
    header.set_mask_kind(request.mask.kind);
    header.set_mask_dtype(request.mask.dtype);
    header.mutable_mask_shape()->Add(request.mask.shape.begin(), request.mask.shape.end());
  }
  return Plan(Tensor{.backward = false,
                     .dtype = request.dtype,
                     .out_dtype = OutDType(request.out_dtype, request.dtype),
                     .shape = request.shape,
                     .payload = request.scores,
                     .mask = request.mask,
                     .out = request.probs,
                     .sinks = static_cast<int64_t>(request.sinks.size()),
                     .want_logsumexp = request.want_logsumexp,
                     .arena = request.arena,
                     .header = header.SerializeAsString()},
              limits, options);
}

absl::StatusOr<AttentionMessages> AttentionMessages::Plan(
    const AttentionSoftmaxBackwardRequest& request, const v1::Limits& limits,
    const ClientOptions& options) {
  return Plan(Tensor{.backward = true,
                     .dtype = request.dtype,
                     .out_dtype = OutDType(request.out_dtype, request.dtype),
                     .shape = request.shape,
                     .payload = request.probs,
                     .d_probs = request.d_probs,
                     .logsumexp = {reinterpret_cast<const char*>(request.logsumexp.data()),
                                   request.logsumexp.size() * sizeof(float)},
                     .out = request.d_scores,
                     .sinks = static_cast<int64_t>(request.sinks.size()),
                     .arena = request.arena,
                     .header = HeaderOf<Backward>(request).SerializeAsString()},
              limits, options);
}

absl::StatusOr<AttentionMessages> AttentionMessages::Plan(Tensor tensor, const v1::Limits& limits,
                                                          const ClientOptions& options) {
  AttentionMessages messages(std::move(tensor));
  const Tensor& t = messages.tensor_;
  if (absl::Status status = messages.CheckSizes(); !status.ok()) return status;
  if (absl::Status status = messages.CheckArena(); !status.ok()) return status;
  // The server writes an answer of the input's type over the input; it does not count.
  const int64_t answer_row = t.out_dtype == t.dtype ? 0 : messages.out_row_bytes();
  const MessageRoom room =
      RoomOf(limits, options.max_message_bytes,
             {.bytes = t.sinks * static_cast<int64_t>(sizeof(float)),
              .row_bytes = messages.row_bytes(),
              .answer_bytes = t.sinks * static_cast<int64_t>(sizeof(double)),
              .answer_row_bytes = kAnswerRowBytes + answer_row,
              .field_bytes = static_cast<int64_t>(t.header.size()) + kFieldHeadBytes});
  const int64_t rows = std::min(room.rows, t.shape.rows());
  if (messages.Cut(std::min(room.bytes, options.attention_message_bytes), rows).ok()) {
    return messages;
  }
  // One row may be larger than the size that the options ask for.
  messages.chunks_.clear();
  if (absl::Status status = messages.Cut(room.bytes, rows); !status.ok()) return status;
  return messages;
}

absl::Status AttentionMessages::CheckSizes() const {
  const Tensor& t = tensor_;
  if (t.dtype != v1::DTYPE_F32 && t.dtype != v1::DTYPE_F16 && t.dtype != v1::DTYPE_BF16) {
    return absl::InvalidArgumentError(
        absl::StrFormat("dtype: got %d, allowed f32, f16, bf16", static_cast<int>(t.dtype)));
  }
  int64_t bytes = DTypeSize(t.dtype);
  for (int64_t size : {t.shape.batch, t.shape.heads, t.shape.queries, t.shape.keys}) {
    if (size < 1 || __builtin_mul_overflow(bytes, size, &bytes)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("shape: got [%d,%d,%d,%d], allowed 1 or more each, and a number of bytes "
                          "that 63 bits hold",
                          t.shape.batch, t.shape.heads, t.shape.queries, t.shape.keys));
    }
  }
  const int64_t lse_bytes =
      t.backward && t.sinks > 0 ? t.shape.rows() * static_cast<int64_t>(sizeof(float)) : 0;
  const int64_t out_bytes = t.shape.rows() * out_row_bytes();
  const struct {
    const char* name;
    size_t got;
    int64_t allowed;
  } arrays[] = {{t.backward ? "probs" : "scores", t.payload.size(), bytes},
                {"d_probs", t.d_probs.size(), t.backward ? bytes : 0},
                {"logsumexp", t.logsumexp.size(), lse_bytes},
                {t.backward ? "d_scores" : "probs", t.out.size(), t.out.empty() ? 0 : out_bytes}};
  for (const auto& array : arrays) {
    if (array.got == static_cast<size_t>(array.allowed)) continue;
    return WrongSize(array.name, array.got, array.allowed);
  }
  return t.mask.kind == v1::MASK_KIND_NONE ? absl::OkStatus() : CheckMask();
}

absl::Status AttentionMessages::CheckArena() const {
  const Tensor& t = tensor_;
  if (t.arena == nullptr) return absl::OkStatus();
  const absl::string_view out(t.out.data(), t.out.size());
  const int64_t row = t.shape.keys * DTypeSize(t.dtype);
  for (const absl::string_view input : {t.payload, t.d_probs}) {
    if (input.empty()) continue;
    if (auto found = t.arena->Find({input}, t.shape.rows(), row); !found.ok()) {
      return found.status();
    }
    if (input.data() < out.data() + out.size() && out.data() < input.data() + input.size()) {
      return absl::InvalidArgumentError(
          "arena: got an answer's array that overlaps the input, allowed one apart from it");
    }
  }
  if (!t.arena->Overlaps(out)) return absl::OkStatus();
  return t.arena->Find({out}, t.shape.rows(), out_row_bytes()).status();
}

bool AttentionMessages::out_is_shared() const {
  return tensor_.arena != nullptr &&
         tensor_.arena->Overlaps({tensor_.out.data(), tensor_.out.size()});
}

absl::StatusOr<std::string> AttentionMessages::SharedFields(const Chunk& chunk) const {
  const Tensor& t = tensor_;
  const auto find = [&](absl::string_view array, int64_t row_bytes) {
    return t.arena->Find({array.substr(static_cast<size_t>(chunk.first_row * row_bytes),
                                       static_cast<size_t>(chunk.rows * row_bytes))},
                         chunk.rows, row_bytes);
  };
  const int64_t row = t.shape.keys * DTypeSize(t.dtype);
  absl::StatusOr<v1::SharedRows> input = find(t.payload, row);
  if (!input.ok()) return input.status();
  absl::StatusOr<v1::SharedRows> output = v1::SharedRows();
  if (out_is_shared()) output = find({t.out.data(), t.out.size()}, out_row_bytes());
  if (!output.ok()) return output.status();
  const auto common = [&](auto message) {
    message.set_shared_rows(chunk.rows);
    *message.mutable_shared() = *std::move(input);
    if (!output->lease().empty()) *message.mutable_shared_output() = *std::move(output);
    return message;
  };
  if (!t.backward) return common(Forward()).SerializeAsString();
  absl::StatusOr<v1::SharedRows> gradient = find(t.d_probs, row);
  if (!gradient.ok()) return gradient.status();
  Backward message = common(Backward());
  *message.mutable_shared_d_probs() = *std::move(gradient);
  return message.SerializeAsString();
}

absl::Status AttentionMessages::CheckMask() const {
  const Tensor& t = tensor_;
  const auto& shape = t.mask.shape;
  const int64_t full[] = {t.shape.batch, t.shape.heads, t.shape.queries, t.shape.keys};
  int64_t rows = 1;
  for (size_t axis = 0; axis < 4; ++axis) {
    if (shape[axis] != full[axis] && (shape[axis] != 1 || axis == 3)) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "mask.shape: got [%d,%d,%d,%d], allowed [%d or 1,%d or 1,%d or 1,%d]", shape[0], shape[1],
          shape[2], shape[3], full[0], full[1], full[2], full[3]));
    }
    if (axis < 3) rows *= shape[axis];
  }
  const int64_t bytes = rows * mask_row_bytes();
  if (t.mask.bytes.size() == static_cast<size_t>(bytes)) return absl::OkStatus();
  return WrongSize("mask", t.mask.bytes.size(), bytes);
}

int64_t AttentionMessages::row_bytes() const {
  const int64_t row = tensor_.shape.keys * DTypeSize(tensor_.dtype);
  if (!tensor_.backward) return row;
  return 2 * row + (tensor_.sinks > 0 ? static_cast<int64_t>(sizeof(float)) : 0);
}

int64_t AttentionMessages::out_row_bytes() const {
  return tensor_.shape.keys * DTypeSize(tensor_.out_dtype);
}

int64_t AttentionMessages::mask_row_bytes() const {
  const AttentionMask& mask = tensor_.mask;
  if (mask.kind == v1::MASK_KIND_NONE) return 0;
  return tensor_.shape.keys * (mask.kind == v1::MASK_KIND_BOOL ? 1 : DTypeSize(mask.dtype));
}

// The rows of the mask from the first that the chunk uses to the last.
AttentionMessages::MaskRows AttentionMessages::MaskRowsOf(const Chunk& chunk) const {
  const AttentionShape& shape = tensor_.shape;
  const auto& mask = tensor_.mask.shape;
  int64_t low = std::numeric_limits<int64_t>::max();
  int64_t high = 0;
  const int64_t end = chunk.first_row + chunk.rows;
  for (int64_t row = chunk.first_row; row < end;) {
    const int64_t query = row % shape.queries;
    const int64_t rows = std::min(shape.queries - query, end - row);  // of this head
    const int64_t item = mask[0] == 1 ? 0 : row / shape.queries / shape.heads;
    const int64_t head = mask[1] == 1 ? 0 : row / shape.queries % shape.heads;
    const int64_t start = (item * mask[1] + head) * mask[2];
    low = std::min(low, start + (mask[2] == 1 ? 0 : query));
    high = std::max(high, start + (mask[2] == 1 ? 0 : query + rows - 1));
    row += rows;
  }
  return {.first = low, .rows = high - low + 1};
}

// Cuts at whole heads where several fit, so that a mask that they share is sent once for them.
absl::Status AttentionMessages::Cut(int64_t max_bytes, int64_t max_rows) {
  const AttentionShape& shape = tensor_.shape;
  const int64_t total = shape.rows();
  const int64_t mask_row = mask_row_bytes();
  const bool query_rows = mask_row > 0 && tensor_.mask.shape[2] != 1;
  for (int64_t row = 0; row < total;) {
    const int64_t of_head = shape.queries - row % shape.queries;
    Chunk chunk{row, std::min({total - row, max_rows, max_bytes / row_bytes()})};
    if (chunk.rows > of_head && chunk.rows < total - row) {
      chunk.rows -= (chunk.rows - of_head) % shape.queries;
    }
    const auto bytes = [&] {
      const int64_t mask = mask_row == 0 ? 0 : MaskRowsOf(chunk).rows * mask_row;
      return chunk.rows * row_bytes() + mask;
    };
    if (chunk.rows > of_head && bytes() > max_bytes) chunk.rows = of_head;
    if (chunk.rows > 0 && bytes() > max_bytes) {
      chunk.rows =
          query_rows ? max_bytes / (row_bytes() + mask_row) : (max_bytes - mask_row) / row_bytes();
    }
    if (chunk.rows < 1) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "a row of %d bytes, with its mask %d, is more than one message carries: %d bytes, or %d "
          "rows of answer",
          row_bytes(), row_bytes() + mask_row, std::max<int64_t>(max_bytes, 0), max_rows));
    }
    chunks_.push_back(chunk);
    row += chunk.rows;
  }
  return absl::OkStatus();
}

absl::StatusOr<grpc::ByteBuffer> AttentionMessages::Encode(
    int i, const std::shared_ptr<const void>& owner) const {
  const Chunk& chunk = chunks_[static_cast<size_t>(i)];
  const Tensor& t = tensor_;
  const auto rows_of = [&](absl::string_view array, int64_t bytes) {
    return array.substr(static_cast<size_t>(chunk.first_row * bytes),
                        static_cast<size_t>(chunk.rows * bytes));
  };
  const int64_t row = t.shape.keys * DTypeSize(t.dtype);
  std::string small = i == 0 ? t.header : "";
  if (t.arena != nullptr) {
    absl::StatusOr<std::string> shared = SharedFields(chunk);
    if (!shared.ok()) return shared.status();
    small += *shared;
  }
  SliceList slices(std::move(small));
  if (t.backward) {
    if (t.sinks > 0) {
      slices.Bytes(Backward::kLogsumexpFieldNumber, rows_of(t.logsumexp, sizeof(float)), owner);
    }
    if (t.arena != nullptr) return slices.Take();
    slices.Bytes(Backward::kProbsFieldNumber, rows_of(t.payload, row), owner);
    slices.Bytes(Backward::kDProbsFieldNumber, rows_of(t.d_probs, row), owner);
    return slices.Take();
  }
  if (t.mask.kind != v1::MASK_KIND_NONE) {
    const MaskRows mask = MaskRowsOf(chunk);
    slices.Bytes(Forward::kMaskFieldNumber,
                 t.mask.bytes.substr(static_cast<size_t>(mask.first * mask_row_bytes()),
                                     static_cast<size_t>(mask.rows * mask_row_bytes())),
                 owner);
  }
  if (t.arena == nullptr) {
    slices.Bytes(Forward::kScoresFieldNumber, rows_of(t.payload, row), owner);
  }
  return slices.Take();
}

void AttentionMessages::Begin() {
  std::string values = std::move(result_.values);
  result_ = AttentionResult{.dtype = tensor_.out_dtype, .messages = size()};
  if (!tensor_.out.empty()) return;
  values.resize(static_cast<size_t>(tensor_.shape.rows() * out_row_bytes()));
  result_.values = std::move(values);
}

// The fields that answers of both directions have. False: they do not fit the chunk.
template <typename Fields>
bool AttentionMessages::TakeFields(const Chunk& chunk, const Fields& fields) {
  const int faults = fields.fault_rows_size();
  const int64_t written = out_is_shared() ? chunk.rows * out_row_bytes() : 0;
  if (fields.output_bytes() != written || fields.first_row() != chunk.first_row ||
      fields.rows() != chunk.rows || fields.dtype() != tensor_.out_dtype ||
      fields.fault_status_size() != faults || fields.fault_positions_size() != faults) {
    return false;
  }
  for (int f = 0; f < faults; ++f) {
    result_.faults.push_back({.row = fields.fault_rows(f),
                              .status = static_cast<v1::RowStatus>(fields.fault_status(f)),
                              .position = fields.fault_positions(f)});
  }
  AddTimings(fields.timings(), &result_.timings);
  return true;
}

absl::Status AttentionMessages::Take(int i, grpc::ByteBuffer* answer) {
  const Chunk& chunk = chunks_[static_cast<size_t>(i)];
  const absl::Span<char> out = tensor_.out.empty() ? absl::MakeSpan(result_.values) : tensor_.out;
  std::string rest;
  const absl::Span<char> rows =
      out_is_shared() ? absl::Span<char>()
                      : out.subspan(static_cast<size_t>(chunk.first_row * out_row_bytes()),
                                    static_cast<size_t>(chunk.rows * out_row_bytes()));
  const bool split = SplitAnswer(answer, rows, &rest);
  answer->Clear();
  const auto disagrees = [&] {
    return absl::InternalError(absl::StrFormat(
        "the server's answer does not fit the message: asked for rows %d to %d of %d keys in %s",
        chunk.first_row, chunk.first_row + chunk.rows - 1, tensor_.shape.keys,
        DTypeShortName(tensor_.out_dtype)));
  };
  if (!split) return disagrees();
  if (tensor_.backward) {
    BackwardResponse fields;
    if (!fields.ParseFromString(rest) || !TakeFields(chunk, fields) ||
        fields.d_sinks_size() != tensor_.sinks) {
      return disagrees();
    }
    result_.d_sinks.resize(static_cast<size_t>(tensor_.sinks));
    for (int h = 0; h < fields.d_sinks_size(); ++h) {
      result_.d_sinks[static_cast<size_t>(h)] += fields.d_sinks(h);
    }
    return absl::OkStatus();
  }
  Response fields;
  const size_t wanted =
      tensor_.want_logsumexp ? static_cast<size_t>(chunk.rows) * sizeof(float) : 0;
  if (!fields.ParseFromString(rest) || !TakeFields(chunk, fields) ||
      fields.logsumexp().size() != wanted) {
    return disagrees();
  }
  const size_t before = result_.logsumexp.size();
  result_.logsumexp.resize(before + wanted / sizeof(float));
  if (wanted > 0) std::memcpy(result_.logsumexp.data() + before, fields.logsumexp().data(), wanted);
  return absl::OkStatus();
}

}  // namespace logitd::client

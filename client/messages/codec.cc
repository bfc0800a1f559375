#include "client/messages/codec.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/wire_format_lite.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/strings/str_format.h"
#include "client/tensor_file.h"
#include "client/transport/transport.h"

namespace logitd::client {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedOutputStream;

constexpr uint64_t kMaxMessage = std::numeric_limits<int32_t>::max() - 16;  // protobuf's own limit

constexpr int64_t kMaxElements = int64_t{1} << 20;  // of a row

// The numbers are the same in every request.
using Fields = v1::TopKRequest;
template <typename Params>
constexpr bool kSameFields = Params::kDtypeFieldNumber == int{Fields::kDtypeFieldNumber} &&
                             Params::kRowsFieldNumber == int{Fields::kRowsFieldNumber} &&
                             Params::kVocabFieldNumber == int{Fields::kVocabFieldNumber} &&
                             Params::kLogitsFieldNumber == int{Fields::kLogitsFieldNumber} &&
                             Params::kSharedFieldNumber == int{Fields::kSharedFieldNumber};
template <typename Params>
constexpr bool kSameHeadFields =
    Params::kHeadFieldNumber == int{Fields::kHeadFieldNumber} &&
    Params::kHiddenSizeFieldNumber == int{Fields::kHiddenSizeFieldNumber} &&
    Params::kHiddenFieldNumber == int{Fields::kHiddenFieldNumber};
static_assert(kSameFields<v1::SampleRequest> && kSameHeadFields<v1::SampleRequest>);
static_assert(kSameFields<v1::ScoreRequest> && kSameHeadFields<v1::ScoreRequest>);
static_assert(kSameFields<v1::VerifyRequest> && kSameHeadFields<v1::VerifyRequest>);

// The fields of LogitsRequest itself, then those of the input, without the payload where it is
// sent. Written even where they have their default, so that they override whatever the parameters
// have there.
template <typename Params>
std::string OwnFields(const LogitsRequest<Params>& request, const v1::SharedRows* shared,
                      uint64_t payload_bytes) {
  const bool hidden = !request.head.empty();
  std::string bytes;
  {  // the streams have written everything once they are gone
    google::protobuf::io::StringOutputStream stream(&bytes);
    CodedOutputStream out(&stream);
    WireFormatLite::WriteEnum(Fields::kDtypeFieldNumber, request.dtype, &out);
    WireFormatLite::WriteInt64(Fields::kRowsFieldNumber, request.rows, &out);
    WireFormatLite::WriteInt64(Fields::kVocabFieldNumber, request.vocab, &out);
    WireFormatLite::WriteString(Fields::kHeadFieldNumber, request.head, &out);
    WireFormatLite::WriteInt64(Fields::kHiddenSizeFieldNumber, request.hidden_size, &out);
    if (shared != nullptr) {
      WireFormatLite::WriteBytes(Fields::kSharedFieldNumber, shared->SerializeAsString(), &out);
    } else {
      WireFormatLite::WriteTag(hidden ? Fields::kHiddenFieldNumber : Fields::kLogitsFieldNumber,
                               WireFormatLite::WIRETYPE_LENGTH_DELIMITED, &out);
      out.WriteVarint64(payload_bytes);
    }
  }
  return bytes;
}

// Where the payload lies in the request's arena.
template <typename Params>
absl::StatusOr<v1::SharedRows> FindShared(const LogitsRequest<Params>& request,
                                          const Pieces& payload) {
  const int64_t elements = request.head.empty() ? request.vocab : request.hidden_size;
  if (elements < 1 || elements > kMaxElements) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: got %d, allowed 1..%d with an arena",
                        request.head.empty() ? "vocab" : "hidden_size", elements, kMaxElements));
  }
  if (!v1::DType_IsValid(request.dtype) || request.dtype == v1::DTYPE_UNSPECIFIED) {
    return absl::InvalidArgumentError(
        absl::StrFormat("dtype: got %d, allowed f32, f16, bf16", static_cast<int>(request.dtype)));
  }
  return request.arena->Find(payload, request.rows, elements * DTypeSize(request.dtype));
}

// Running sums of `counts` from 0. False: a count is negative.
template <typename Counts>
bool Offsets(const Counts& counts, std::vector<int64_t>* offsets) {
  offsets->assign(1, 0);
  offsets->reserve(counts.size() + 1);
  for (int32_t count : counts) {
    if (count < 0) return false;
    offsets->push_back(offsets->back() + count);
  }
  return true;
}

// Sets the result's offsets. False: the arrays of its answer disagree in size.
template <typename Answer>
bool SizesAgree(LogitsResult<Answer>* result) {
  const Answer& a = result->answer;
  const auto all_are = [](int64_t size, std::initializer_list<int> sizes) {
    return std::all_of(sizes.begin(), sizes.end(), [size](int s) { return s == size; });
  };
  const int rows = a.status_size();
  if (!all_are(rows, {a.logsumexp_size(), a.status_position_size()})) return false;
  if constexpr (std::is_same_v<Answer, v1::TopKResponse>) {
    return a.k_size() == rows && Offsets(a.k(), &result->top_offsets) &&
           all_are(result->top_offsets.back(), {a.indices_size(), a.probs_size()});
  } else {
    if constexpr (std::is_same_v<Answer, v1::ScoreResponse>) {
      if (!all_are(rows, {a.losses_size(), a.target_logprobs_size()}) ||
          (a.ranks_size() != 0 && a.ranks_size() != rows) ||
          (a.entropies_size() != 0 && a.entropies_size() != rows)) {
        return false;
      }
    } else {
      const auto all_or_none = [rows](std::initializer_list<int> sizes) {
        return std::all_of(sizes.begin(), sizes.end(),
                           [rows](int s) { return s == 0 || s == rows; });
      };
      if (!all_are(rows, {a.tokens_size(), a.logprobs_size(), a.ranks_size()}) ||
          !all_or_none({a.support_size_size(), a.entropies_size()}) ||
          a.support_count_size() != a.support_size_size() ||
          a.raw_entropies_size() != a.entropies_size() ||
          !Offsets(a.support_count(), &result->support_offsets) ||
          !all_are(result->support_offsets.back(),
                   {a.support_ids_size(), a.support_logprobs_size()})) {
        return false;
      }
      if constexpr (std::is_same_v<Answer, v1::SampleResponse>) {
        if (!all_or_none({a.draw_count_size()}) ||
            !Offsets(a.draw_count(), &result->draw_offsets) ||
            !all_are(result->draw_offsets.back(), {a.draw_tokens_size(), a.draw_logprobs_size()})) {
          return false;
        }
      }
    }
    return all_are(rows, {a.top_count_size(), a.extra_count_size()}) &&
           Offsets(a.top_count(), &result->top_offsets) &&
           Offsets(a.extra_count(), &result->extra_offsets) &&
           all_are(result->top_offsets.back(), {a.top_ids_size(), a.top_logprobs_size()}) &&
           a.extra_logprobs_size() == result->extra_offsets.back();
  }
}

}  // namespace

grpc::Slice SliceOver(absl::string_view bytes, Owner owner) {
  return grpc::Slice(
      const_cast<char*>(bytes.data()), bytes.size(),
      [](void* shared) { delete static_cast<Owner*>(shared); }, new Owner(std::move(owner)));
}

template <typename Params>
absl::StatusOr<grpc::ByteBuffer> EncodeRequest(const LogitsRequest<Params>& request,
                                               const Pieces& payload, const Owner& owner) {
  uint64_t payload_bytes = 0;
  v1::SharedRows shared;
  if (request.arena != nullptr) {
    absl::StatusOr<v1::SharedRows> found = FindShared(request, payload);
    if (!found.ok()) return found.status();
    shared = *std::move(found);
  } else {
    for (absl::string_view piece : payload) payload_bytes += piece.size();
  }
  const std::string own_fields =
      OwnFields(request, request.arena == nullptr ? nullptr : &shared, payload_bytes);
  const size_t param_bytes = request.params.ByteSizeLong();
  const uint64_t total = param_bytes + own_fields.size() + payload_bytes;
  if (total > kMaxMessage) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "request: got %d bytes, allowed 0..%d; send fewer rows a call", total, kMaxMessage));
  }
  std::vector<grpc::Slice> slices;
  slices.reserve(1 + payload.size());
  slices.emplace_back(param_bytes + own_fields.size());
  auto* const bytes = const_cast<uint8_t*>(slices[0].begin());  // new, and not shared yet
  uint8_t* const end = request.params.SerializeWithCachedSizesToArray(bytes);
  std::copy(own_fields.begin(), own_fields.end(), end);
  for (absl::string_view piece : payload) {
    if (!piece.empty() && request.arena == nullptr) slices.push_back(SliceOver(piece, owner));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

template <typename Answer>
absl::StatusOr<LogitsResult<Answer>> DecodeResponse(grpc::ByteBuffer* response) {
  LogitsResult<Answer> result;
  const std::string name(Answer::descriptor()->full_name());
  if (!ParseMessage(response, &result.answer)) {
    return absl::InternalError(absl::StrFormat("the server's answer is not a %s", name));
  }
  response->Clear();
  if (!SizesAgree(&result)) {
    return absl::InternalError(absl::StrFormat(
        "the server's answer disagrees with itself: the arrays of a %s of %d rows differ in size",
        name, result.rows()));
  }
  result.messages = 1;
  return result;
}

void AddTimings(const v1::Timings& part, v1::Timings* all) {
  all->set_receive_ns(all->receive_ns() + part.receive_ns());
  all->set_copy_ns(all->copy_ns() + part.copy_ns());
  all->set_queue_ns(all->queue_ns() + part.queue_ns());
  all->set_h2d_ns(all->h2d_ns() + part.h2d_ns());
  all->set_kernel_ns(all->kernel_ns() + part.kernel_ns());
  all->set_d2h_ns(all->d2h_ns() + part.d2h_ns());
  all->set_total_ns(all->total_ns() + part.total_ns());
  all->set_batch_rows(std::max(all->batch_rows(), part.batch_rows()));
}

using Buffer = absl::StatusOr<grpc::ByteBuffer>;
template Buffer EncodeRequest(const TopKRequest&, const Pieces&, const Owner&);
template Buffer EncodeRequest(const SampleRequest&, const Pieces&, const Owner&);
template Buffer EncodeRequest(const VerifyRequest&, const Pieces&, const Owner&);
template Buffer EncodeRequest(const ScoreRequest&, const Pieces&, const Owner&);
template absl::StatusOr<TopKResult> DecodeResponse(grpc::ByteBuffer*);
template absl::StatusOr<SampleResult> DecodeResponse(grpc::ByteBuffer*);
template absl::StatusOr<VerifyResult> DecodeResponse(grpc::ByteBuffer*);
template absl::StatusOr<ScoreResult> DecodeResponse(grpc::ByteBuffer*);

}  // namespace logitd::client

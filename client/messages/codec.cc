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

#include "absl/strings/str_cat.h"
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
static_assert(kSameFields<v1::DivergenceRequest> && kSameHeadFields<v1::DivergenceRequest>);
static_assert(kSameFields<v1::VerifyRequest> && kSameHeadFields<v1::VerifyRequest>);

// An input of a request, and the numbers of its fields. Written even where they have their default,
// so that they override whatever the parameters have there.
struct Input {
  struct Numbers {
    int dtype, head, hidden_size, shared, hidden, logits;
  };
  Numbers numbers;
  v1::DType dtype;
  int64_t rows;
  int64_t vocab;
  absl::string_view head;
  int64_t hidden_size;
  const Arena* arena;
  const Pieces& payload;

  bool hidden() const { return !head.empty(); }
  // Begins the names of the input's fields.
  absl::string_view prefix() const {
    return numbers.dtype == Fields::kDtypeFieldNumber ? "" : "reference_";
  }
};

constexpr Input::Numbers kFirst = {Fields::kDtypeFieldNumber,      Fields::kHeadFieldNumber,
                                   Fields::kHiddenSizeFieldNumber, Fields::kSharedFieldNumber,
                                   Fields::kHiddenFieldNumber,     Fields::kLogitsFieldNumber};
using Pair = v1::DivergenceRequest;
constexpr Input::Numbers kReference = {
    Pair::kReferenceDtypeFieldNumber,      Pair::kReferenceHeadFieldNumber,
    Pair::kReferenceHiddenSizeFieldNumber, Pair::kReferenceSharedFieldNumber,
    Pair::kReferenceHiddenFieldNumber,     Pair::kReferenceLogitsFieldNumber};

template <typename Params>
Input FirstOf(const LogitsRequest<Params>& request, const Pieces& payload) {
  return {kFirst,       request.dtype,       request.rows,  request.vocab,
          request.head, request.hidden_size, request.arena, payload};
}
Input SecondOf(const DivergenceRequest& request, const Pieces& payload) {
  return {kReference,
          ReferenceDType(request),
          request.rows,
          request.vocab,
          request.reference_head,
          request.reference_hidden_size,
          request.reference_arena,
          payload};
}

// Appends what `write` writes to a stream.
template <typename Write>
void AppendTo(std::string* bytes, Write write) {
  google::protobuf::io::StringOutputStream stream(bytes);
  CodedOutputStream out(&stream);
  write(&out);
}

// The type, the head and the size of a hidden state.
void AppendShape(const Input& input, std::string* bytes) {
  AppendTo(bytes, [&](CodedOutputStream* out) {
    WireFormatLite::WriteEnum(input.numbers.dtype, input.dtype, out);
    WireFormatLite::WriteString(input.numbers.head, std::string(input.head), out);
    WireFormatLite::WriteInt64(input.numbers.hidden_size, input.hidden_size, out);
  });
}

void AppendRowsAndVocab(int64_t rows, int64_t vocab, std::string* bytes) {
  AppendTo(bytes, [&](CodedOutputStream* out) {
    WireFormatLite::WriteInt64(Fields::kRowsFieldNumber, rows, out);
    WireFormatLite::WriteInt64(Fields::kVocabFieldNumber, vocab, out);
  });
}

// Finds the payload in the input's arena.
absl::StatusOr<v1::SharedRows> FindShared(const Input& input) {
  const int64_t elements = input.hidden() ? input.hidden_size : input.vocab;
  if (elements < 1 || elements > kMaxElements) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: got %d, allowed 1..%d with an arena",
                        input.hidden() ? absl::StrCat(input.prefix(), "hidden_size") : "vocab",
                        elements, kMaxElements));
  }
  if (!v1::DType_IsValid(input.dtype) || input.dtype == v1::DTYPE_UNSPECIFIED) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%sdtype: got %d, allowed f32, f16, bf16", input.prefix(), static_cast<int>(input.dtype)));
  }
  return input.arena->Find(input.payload, input.rows, elements * DTypeSize(input.dtype));
}

// A message as slices: small fields in memory of ours, payloads over the caller's.
class MessageSlices {
 public:
  MessageSlices(const google::protobuf::MessageLite& params, const Owner& owner) : owner_(owner) {
    constexpr size_t kMost = 512;  // of small fields, mostly
    small_.reserve(params.ByteSizeLong() + kMost);
    params.AppendToString(&small_);
  }

  std::string* small() { return &small_; }  // fields that come next

  // The payload, or where it lies. INVALID_ARGUMENT: see Arena::Find.
  absl::Status Add(const Input& input) {
    if (input.arena != nullptr) {
      const absl::StatusOr<v1::SharedRows> found = FindShared(input);
      if (!found.ok()) return found.status();
      AppendTo(&small_, [&](CodedOutputStream* out) {
        WireFormatLite::WriteBytes(input.numbers.shared, found->SerializeAsString(), out);
      });
      return absl::OkStatus();
    }
    uint64_t bytes = 0;
    for (absl::string_view piece : input.payload) bytes += piece.size();
    AppendTo(&small_, [&](CodedOutputStream* out) {
      WireFormatLite::WriteTag(input.hidden() ? input.numbers.hidden : input.numbers.logits,
                               WireFormatLite::WIRETYPE_LENGTH_DELIMITED, out);
      out->WriteVarint64(bytes);
    });
    FinishSmall();
    total_ += bytes;
    for (absl::string_view piece : input.payload) {
      if (!piece.empty()) slices_.push_back(SliceOver(piece, owner_));
    }
    return absl::OkStatus();
  }

  // Once. INVALID_ARGUMENT: protobuf cannot carry it.
  absl::StatusOr<grpc::ByteBuffer> Finish() {
    FinishSmall();
    if (total_ > kMaxMessage) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "request: got %d bytes, allowed 0..%d; send fewer rows a call", total_, kMaxMessage));
    }
    return grpc::ByteBuffer(slices_.data(), slices_.size());
  }

 private:
  void FinishSmall() {
    total_ += small_.size();
    if (small_.empty()) return;
    auto* const kept = new std::string(std::exchange(small_, std::string()));
    slices_.emplace_back(
        kept->data(), kept->size(), [](void* bytes) { delete static_cast<std::string*>(bytes); },
        kept);
  }

  const Owner& owner_;
  std::string small_;
  std::vector<grpc::Slice> slices_;
  uint64_t total_ = 0;
};

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
  if constexpr (std::is_same_v<Answer, v1::DivergenceResponse>) {
    const int targets = a.target_logprobs_size();
    return all_are(rows, {a.forward_kl_size(), a.reverse_kl_size(), a.entropies_size(),
                          a.reference_entropies_size(), a.reference_logsumexp_size(),
                          a.top_count_size(), a.reference_top_count_size()}) &&
           (targets == 0 || targets == rows) && a.reference_target_logprobs_size() == targets &&
           Offsets(a.top_count(), &result->top_offsets) &&
           all_are(result->top_offsets.back(), {a.top_ids_size(), a.top_logprobs_size()}) &&
           Offsets(a.reference_top_count(), &result->reference_top_offsets) &&
           all_are(result->reference_top_offsets.back(),
                   {a.reference_top_ids_size(), a.reference_top_logprobs_size()});
  } else if constexpr (std::is_same_v<Answer, v1::TopKResponse>) {
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
  const Input input = FirstOf(request, payload);
  MessageSlices message(request.params, owner);
  AppendRowsAndVocab(request.rows, request.vocab, message.small());
  AppendShape(input, message.small());
  if (absl::Status added = message.Add(input); !added.ok()) return added;
  return message.Finish();
}

absl::StatusOr<grpc::ByteBuffer> EncodeRequest(const DivergenceRequest& request,
                                               const Pieces& payload, const Pieces& reference,
                                               const Owner& owner) {
  const Input inputs[] = {FirstOf(request, payload), SecondOf(request, reference)};
  MessageSlices message(request.params, owner);
  AppendRowsAndVocab(request.rows, request.vocab, message.small());
  for (const Input& input : inputs) AppendShape(input, message.small());
  for (const Input& input : inputs) {
    if (absl::Status added = message.Add(input); !added.ok()) return added;
  }
  return message.Finish();
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
template absl::StatusOr<DivergenceResult> DecodeResponse(grpc::ByteBuffer*);

}  // namespace logitd::client

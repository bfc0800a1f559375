// Divergence's codec: two inputs in, job parts out, and back; and what the messages of a stream
// inherit.
#include "server/rpc/codecs/divergence_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "logitd/v1/scorer.pb.h"
#include "tests/fake_backend.h"
#include "tests/fuzz/compare_divergence_request.h"
#include "tests/rpc/judged.h"
#include "tests/rpc/one_head.h"

namespace logitd::rpc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsNan;

constexpr int64_t kMaxRows = 100;
constexpr int64_t kOtherVersion = 3;

// "h" of one_head.h; "g", 3 tokens x 5, bf16; "wide", 4 tokens x 2; "cut", which is sharded.
class Heads {
 public:
  Finders Find() const {
    Finders find = one_.Find();
    find.head = [this, first = find.head](
                    std::string_view name) -> absl::StatusOr<std::shared_ptr<const engine::Head>> {
      for (const auto& head : {g_, wide_, cut_}) {
        if (head->info().name == name) return head;
      }
      return first(name);
    };
    return find;
  }
  testing::OneHead& one() { return one_; }
  const engine::Head* g() const { return g_.get(); }

 private:
  std::shared_ptr<const engine::Head> Make(std::string name, DType dtype, int64_t vocab,
                                           int64_t hidden, bool sharded = false) {
    const HeadView view = {
        .weight = {.dtype = dtype, .rows = vocab, .cols = hidden, .row_stride = hidden}};
    return std::make_shared<engine::Head>(
        std::vector<engine::Head::Copy>{{.backend = &backend_, .memory = {}, .view = view}},
        engine::HeadInfo{.name = std::move(name), .version = kOtherVersion},
        sharded ? std::optional(view) : std::nullopt);
  }

  testing::OneHead one_;
  FakeBackend backend_;
  const std::shared_ptr<const engine::Head> g_ = Make("g", DType::kBF16, 3, 5);
  const std::shared_ptr<const engine::Head> wide_ = Make("wide", DType::kF32, 4, 2);
  const std::shared_ptr<const engine::Head> cut_ = Make("cut", DType::kF32, 3, 2, true);
};

using Request = v1::DivergenceRequest;

Request Logits(int64_t rows = 2, int64_t vocab = 3) {
  const auto bytes = static_cast<size_t>(rows * vocab) * sizeof(float);
  Request request;
  request.set_dtype(v1::DTYPE_F32);
  request.set_rows(rows);
  request.set_vocab(vocab);
  request.set_logits(std::string(bytes, '\1'));
  request.set_reference_logits(std::string(bytes, '\2'));
  return request;
}

// Hidden states of "h", and of "g" as the reference.
Request Hidden(int64_t rows = 2) {
  Request request;
  request.set_dtype(v1::DTYPE_F32);
  request.set_rows(rows);
  request.set_head("h");
  request.set_hidden_size(2);
  request.set_hidden(std::string(static_cast<size_t>(rows) * 8, '\1'));
  request.set_reference_dtype(v1::DTYPE_BF16);
  request.set_reference_head("g");
  request.set_reference_hidden_size(5);
  request.set_reference_hidden(std::string(static_cast<size_t>(rows) * 10, '\2'));
  return request;
}

// One message, parsed; of a sequence where that is given.
struct Parsed {
  explicit Parsed(
      const Request& request,
      std::shared_ptr<DivergenceSequence> sequence = std::make_shared<DivergenceSequence>(),
      const Heads* of = nullptr)
      : bytes(request.SerializeAsString()),
        piece(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()),
        codec((of == nullptr ? heads : *of).Find(), std::move(sequence)),
        status(codec.Parse(Pieces(&piece, 1), kMaxRows, &spec)) {}

  std::vector<DivergenceRow> Rows() {
    std::vector<DivergenceRow> rows(static_cast<size_t>(spec.rows()));
    std::byte* const inputs[] = {nullptr, reinterpret_cast<std::byte*>(rows.data())};
    codec.WriteInputs(inputs, {});
    return rows;
  }

  Heads heads;
  std::string bytes;
  Piece piece;
  DivergenceCodec codec;
  engine::JobSpec spec;
  absl::Status status;
};

TEST(DivergenceCodecTest, LogitsAreAJobOfTheirOwnWithTheReferenceBeside) {
  Parsed p(Logits());
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.spec.key.op, &ops::kDivergenceTraits);
  EXPECT_EQ(p.spec.key.row_elements, 3);
  EXPECT_EQ(p.spec.key.head, nullptr);
  EXPECT_EQ(p.spec.key.reference_head, nullptr);
  EXPECT_EQ(p.spec.counts, (engine::AxisCounts{2, 2 * 16}));  // rows of 12 bytes, padded
  EXPECT_EQ(p.spec.size.payload_bytes, 2 * 12 + 2 * 16);
  EXPECT_EQ(p.spec.size.answer_bytes, 2 * (8 * 4 + 8));
  ASSERT_EQ(p.codec.copied_inputs().size(), 1u);
  EXPECT_EQ(p.codec.copied_inputs()[0].row_bytes, 12u);
  EXPECT_TRUE(p.codec.copied_inputs()[0].padded);
  std::string reference(24, '.');
  CopyRows(Pieces(&p.piece, 1), p.codec.copied_inputs()[0],
           reinterpret_cast<std::byte*>(reference.data()), 12);
  EXPECT_EQ(reference, std::string(24, '\2'));
  for (const DivergenceRow& row : p.Rows()) {
    EXPECT_EQ(row.active, 1);
    EXPECT_EQ(row.target, kIgnoredTarget);
    EXPECT_EQ(row.temperature, 1);
    EXPECT_EQ(row.reference_temperature, 1);
  }
}

TEST(DivergenceCodecTest, HiddenStatesHaveTheirTwoHeads) {
  Parsed p(Hidden());
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.spec.key.op, &ops::kLinearDivergenceTraits);
  EXPECT_EQ(p.spec.key.row_elements, 2);
  EXPECT_EQ(p.spec.key.head, p.heads.one().watch().lock().get());
  EXPECT_EQ(p.spec.key.reference_head, p.heads.g());
  EXPECT_EQ(p.spec.counts, (engine::AxisCounts{2, 2 * 16}));  // rows of 10 bytes, padded
}

TEST(DivergenceCodecTest, EitherHeadMayBeCutOverTheDevices) {
  EXPECT_FALSE(engine::IsSharded(Parsed(Hidden()).spec.key));
  Request first = Hidden();
  first.set_head("cut");
  Parsed one(first);
  EXPECT_TRUE(one.status.ok()) << one.status;
  EXPECT_TRUE(engine::IsSharded(one.spec.key));
  Request second = Hidden();
  second.set_reference_dtype(v1::DTYPE_F32);
  second.set_reference_head("cut");
  second.set_reference_hidden_size(2);
  second.set_reference_hidden(std::string(16, '\1'));
  Parsed other(second);
  EXPECT_TRUE(other.status.ok()) << other.status;
  EXPECT_TRUE(engine::IsSharded(other.spec.key));
}

TEST(DivergenceCodecTest, EitherInputMayBeLogitsOfF32BesideHiddenStates) {
  Request first = Hidden();
  first.clear_reference_dtype();
  first.clear_reference_head();
  first.clear_reference_hidden_size();
  first.set_reference_logits(std::string(24, '\3'));
  Parsed one(first);
  ASSERT_TRUE(one.status.ok()) << one.status;
  EXPECT_EQ(one.spec.key.op, &ops::kLinearDivergenceTraits);
  EXPECT_EQ(one.spec.key.reference_head, nullptr);
  Request second = Hidden();
  second.clear_head();
  second.clear_hidden_size();
  second.set_vocab(3);
  second.set_logits(std::string(24, '\3'));
  Parsed other(second);
  ASSERT_TRUE(other.status.ok()) << other.status;
  EXPECT_EQ(other.spec.key.op, &ops::kLinearDivergenceTraits);
  EXPECT_EQ(other.spec.key.head, nullptr);
  EXPECT_EQ(other.spec.key.reference_head, other.heads.g());
}

TEST(DivergenceCodecTest, EveryParameterReachesItsRow) {
  Request request = Logits();
  for (float v : {0.5f, 2.0f}) request.add_temperature(v);
  request.add_reference_temperature(3);
  for (int target : {2, 7}) request.add_targets(target);
  request.set_ignore_index(7);
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  const auto rows = p.Rows();
  EXPECT_EQ(rows[0].temperature, 0.5f);
  EXPECT_EQ(rows[1].temperature, 2.0f);
  EXPECT_EQ(rows[1].reference_temperature, 3.0f);
  EXPECT_EQ(rows[0].target, 2);
  EXPECT_EQ(rows[1].target, kIgnoredTarget);
}

TEST(DivergenceCodecTest, TopTokensHaveEntriesOneRowAfterAnother) {
  Request request = Logits();
  for (int k : {2, 3}) request.add_top_logprobs(k);
  request.add_reference_top_logprobs(1);
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.spec.counts, (engine::AxisCounts{2, 2 * 16, 2 + 3, 1 + 1}));
  EXPECT_EQ(p.spec.size.answer_bytes, 2 * (8 * 4 + 8) + (5 + 2) * 8);
  EXPECT_EQ(p.spec.max_row_entries, 3);
  const auto rows = p.Rows();
  EXPECT_EQ(rows[0].top_logprobs, 2);
  EXPECT_EQ(rows[1].top_logprobs, 3);
  EXPECT_EQ(rows[1].reference_top_logprobs, 1);
  EXPECT_EQ(rows[0].first_top_entry, 0);
  EXPECT_EQ(rows[1].first_top_entry, 2);
  EXPECT_EQ(rows[0].first_reference_top_entry, 0);
  EXPECT_EQ(rows[1].first_reference_top_entry, 1);
}

TEST(DivergenceCodecTest, RowsInALeaseMayBeEither) {
  Request request = Logits();
  v1::SharedRows* shared = request.mutable_reference_shared();
  shared->set_lease(std::string(testing::OneHead::kLease));
  shared->set_offset(100);
  shared->set_row_stride(20);
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  const Payload& reference = p.codec.copied_inputs()[0];
  EXPECT_EQ(reference.arena_offset, 100);
  EXPECT_EQ(reference.arena_stride, 20);
  EXPECT_EQ(p.codec.payload().arena, nullptr);
  const auto lease = p.heads.one().watch_lease();
  p.heads.one().EndLease();
  EXPECT_FALSE(lease.expired());
  p.codec.PayloadCopied();
  EXPECT_TRUE(lease.expired());
}

using R = Request*;
constexpr testing::Refused<Request> kRefusedDivergence[] = {
    {"no_reference", [](R r) { r->clear_reference(); },
     "reference: got none, allowed reference_logits, reference_hidden with reference_head"},
    {"a_reference_of_other_size", [](R r) { r->set_reference_logits("abcd"); },
     "reference_logits: got 4 bytes"},
    {"a_reference_of_other_type",
     [](R r) {
       r->set_reference_dtype(v1::DTYPE_BF16);
       r->set_reference_logits(std::string(12, '\1'));
     },
     "reference_dtype: got bf16, allowed f32, as dtype, where both are logits"},
    {"no_such_type", [](R r) { r->set_reference_dtype(static_cast<v1::DType>(9)); },
     "reference_dtype: got 9"},
    {"a_head_for_logits", [](R r) { r->set_reference_head("g"); },
     "reference_head: got \"g\", but the input is logits"},
    {"a_version_for_logits", [](R r) { r->set_reference_head_version(1); },
     "reference_head_version: got 1, allowed only with hidden states"},
    {"a_size_for_logits", [](R r) { r->set_reference_hidden_size(1); },
     "reference_hidden_size: got 1, allowed 0 with logits"},
    {"hidden_without_a_head",
     [](R r) {
       *r = Hidden();
       r->clear_reference_head();
     },
     "reference_head: got none with hidden states"},
    {"no_such_head",
     [](R r) {
       *r = Hidden();
       r->set_reference_head("x");
     },
     "reference: no head x, only h", absl::StatusCode::kNotFound},
    {"another_version",
     [](R r) {
       *r = Hidden();
       r->set_reference_head_version(4);
     },
     "reference_head_version: got 4, allowed 3, which head g has, or 0",
     absl::StatusCode::kFailedPrecondition},
    {"another_version_of_the_first",
     [](R r) {
       *r = Hidden();
       r->set_head_version(4);
     },
     "head_version: got 4, allowed 7, which head h has, or 0",
     absl::StatusCode::kFailedPrecondition},
    {"a_type_that_the_head_has_not",
     [](R r) {
       *r = Hidden();
       r->clear_reference_dtype();
     },
     "reference_dtype: got f32"},
    {"heads_of_two_vocabularies",
     [](R r) {
       *r = Hidden();
       r->set_reference_dtype(v1::DTYPE_F32);
       r->set_reference_head("wide");
       r->set_reference_hidden_size(2);
       r->set_reference_hidden(std::string(16, '\1'));
     },
     "reference_head: got wide with a vocabulary of 4, allowed one of 3, as h"},
    {"a_head_of_another_vocabulary_than_logits",
     [](R r) {
       r->set_reference_head("wide");
       r->set_reference_hidden_size(2);
       r->set_reference_hidden(std::string(16, '\1'));
     },
     "reference_head: got wide with a vocabulary of 4, allowed one of 3, as the logits have"},
    {"logits_of_16_bits_beside_hidden_states",
     [](R r) {
       *r = Hidden();
       r->clear_reference_head();
       r->clear_reference_hidden_size();
       r->set_reference_logits(std::string(12, '\1'));
     },
     "reference_dtype: got bf16, allowed f32 for logits beside hidden states"},
    {"no_such_lease",
     [](R r) { r->mutable_reference_shared()->set_lease(std::string(kLeaseIdBytes, 'x')); },
     "reference: no such lease", absl::StatusCode::kNotFound},
    {"a_place_beyond_the_lease",
     [](R r) {
       r->mutable_reference_shared()->set_lease(std::string(testing::OneHead::kLease));
       r->mutable_reference_shared()->set_offset(4096);
     },
     "reference_shared.offset: got 4096"},
    {"targets_of_other_rows", [](R r) { r->add_targets(0); },
     "targets: got 1 values, allowed none or 2 (rows)"},
    {"a_target_beyond_vocab",
     [](R r) {
       r->add_targets(0);
       r->add_targets(3);
     },
     "targets: got 3 at row 1, allowed 0..2, or -100 (ignore_index)"},
    {"temperature_zero", [](R r) { r->add_temperature(0); }, "temperature: got 0"},
    {"reference_temperature_negative", [](R r) { r->add_reference_temperature(-1); },
     "reference_temperature: got -1 at row 0"},
    {"reference_temperatures_of_other_rows",
     [](R r) {
       for (int i = 0; i < 3; ++i) r->add_reference_temperature(1);
     },
     "reference_temperature: got 3 values, allowed none, 1 or 2 (rows)"},
    {"top_tokens_beyond_vocab", [](R r) { r->add_top_logprobs(4); },
     "top_logprobs: got 4 at row 0, allowed 0..3"},
    {"top_tokens_below_0",
     [](R r) {
       for (int k : {0, -1}) r->add_reference_top_logprobs(k);
     },
     "reference_top_logprobs: got -1 at row 1, allowed 0..3"},
    {"top_tokens_of_other_rows",
     [](R r) {
       for (int i = 0; i < 3; ++i) r->add_reference_top_logprobs(1);
     },
     "reference_top_logprobs: got 3 values, allowed none, 1 or 2 (rows)"},
    {"totals_nan", [](R r) { r->mutable_totals()->set_reverse_kl_sum(NAN); },
     "totals: got sums 0 and nan"},
};

TEST(DivergenceCodecTest, RequestsAreRefusedSayingWhichAndWhy) {
  testing::ExpectRefused(Logits(), kRefusedDivergence,
                         [](const Request& request) { return Parsed(request).status; });
}

template <typename T>
absl::Span<const std::byte> Bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(T)};
}

// An answer of three rows: counted, with an ignored target, faulty.
struct Outputs {
  std::vector<float> forward = {1.5f, 0.5f, NAN}, reverse = {1.25f, 0.25f, NAN},
                     entropy = {2, 3, NAN}, reference_entropy = {4, 5, NAN},
                     logsumexp = {6, 7, NAN}, reference_logsumexp = {8, 9, NAN},
                     logprob = {-1, 0, NAN}, reference_logprob = {-2, 0, NAN};
  std::vector<RowStatus> status = {{}, {}, {RowCode::kNanLogit, 2}};
  std::vector<int32_t> top_ids = {}, reference_top_ids = {};
  std::vector<float> top_logprobs = {}, reference_top_logprobs = {};
  const std::vector<absl::Span<const std::byte>> spans = {Bytes(forward),
                                                          Bytes(reverse),
                                                          Bytes(entropy),
                                                          Bytes(reference_entropy),
                                                          Bytes(logsumexp),
                                                          Bytes(reference_logsumexp),
                                                          Bytes(logprob),
                                                          Bytes(reference_logprob),
                                                          Bytes(status),
                                                          Bytes(top_ids),
                                                          Bytes(top_logprobs),
                                                          Bytes(reference_top_ids),
                                                          Bytes(reference_top_logprobs)};
};

v1::DivergenceResponse AnswerOf(Parsed& p, const Outputs& outputs = {}) {
  EncodedMessage answer =
      p.codec.Encode({.outputs = outputs.spans}, {.receive_ns = 1, .total_ns = 9});
  p.codec.Conclude(&answer);
  EXPECT_LE(answer.bytes(), p.codec.answer_bytes());
  v1::DivergenceResponse response;
  EXPECT_TRUE(response.ParseFromString(answer.ToString()));
  return response;
}

TEST(DivergenceCodecTest, AnswerIsWhatGeneratedCodeReads) {
  Request request = Hidden(3);
  for (int target : {1, -100, 2}) request.add_targets(target);
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  p.Rows();
  const v1::DivergenceResponse response = AnswerOf(p);
  EXPECT_THAT(response.forward_kl(), ElementsAre(1.5f, 0.5f, IsNan()));
  EXPECT_THAT(response.reverse_kl(), ElementsAre(1.25f, 0.25f, IsNan()));
  EXPECT_THAT(response.entropies(), ElementsAre(2, 3, IsNan()));
  EXPECT_THAT(response.reference_entropies(), ElementsAre(4, 5, IsNan()));
  EXPECT_THAT(response.logsumexp(), ElementsAre(6, 7, IsNan()));
  EXPECT_THAT(response.reference_logsumexp(), ElementsAre(8, 9, IsNan()));
  EXPECT_THAT(response.target_logprobs(), ElementsAre(-1, 0, IsNan()));
  EXPECT_THAT(response.reference_target_logprobs(), ElementsAre(-2, 0, IsNan()));
  EXPECT_THAT(response.status(),
              ElementsAre(v1::ROW_STATUS_OK, v1::ROW_STATUS_OK, v1::ROW_STATUS_NAN_LOGIT));
  EXPECT_THAT(response.status_position(), ElementsAre(-1, -1, 2));
  EXPECT_EQ(response.timings().total_ns(), 9);
  EXPECT_EQ(response.head_version(), testing::OneHead::kVersion);
  EXPECT_EQ(response.reference_head_version(), kOtherVersion);
  EXPECT_EQ(response.totals().rows(), 3);
  EXPECT_EQ(response.totals().counted(), 1);
  EXPECT_EQ(response.totals().ignored(), 1);
  EXPECT_EQ(response.totals().faulty(), 1);
  EXPECT_EQ(response.totals().forward_kl_sum(), 1.5);
  EXPECT_EQ(response.totals().reverse_kl_sum(), 1.25);
}

TEST(DivergenceCodecTest, WithoutTargetsEveryRowCountsAndNoLogprobIsSent) {
  Parsed p(Logits(3));
  ASSERT_TRUE(p.status.ok()) << p.status;
  p.Rows();
  const v1::DivergenceResponse response = AnswerOf(p);
  EXPECT_THAT(response.target_logprobs(), IsEmpty());
  EXPECT_THAT(response.reference_target_logprobs(), IsEmpty());
  EXPECT_EQ(response.totals().counted(), 2);
  EXPECT_EQ(response.totals().forward_kl_sum(), 2);
  EXPECT_EQ(response.totals().forward_kl_mean(), 1);
  EXPECT_EQ(response.totals().reverse_kl_mean(), 0.75);
  EXPECT_EQ(response.head_version(), 0);
  EXPECT_EQ(response.reference_head_version(), 0);
}

TEST(DivergenceCodecTest, TopTokensAreWhatGeneratedCodeReads) {
  Request request = Hidden(3);
  for (int k : {2, 0, 1}) request.add_top_logprobs(k);
  for (int k : {0, 1, 0}) request.add_reference_top_logprobs(k);
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  p.Rows();
  const v1::DivergenceResponse response = AnswerOf(p, {.top_ids = {2, 0, -1},
                                                       .reference_top_ids = {1},
                                                       .top_logprobs = {-0.25f, -0.5f, NAN},
                                                       .reference_top_logprobs = {-0.125f}});
  EXPECT_THAT(response.top_count(), ElementsAre(2, 0, 1));
  EXPECT_THAT(response.top_ids(), ElementsAre(2, 0, -1));
  EXPECT_THAT(response.top_logprobs(), ElementsAre(-0.25f, -0.5f, IsNan()));
  EXPECT_THAT(response.reference_top_count(), ElementsAre(0, 1, 0));
  EXPECT_THAT(response.reference_top_ids(), ElementsAre(1));
  EXPECT_THAT(response.reference_top_logprobs(), ElementsAre(-0.125f));
}

TEST(DivergenceCodecTest, TheLongestAnswerFits) {
  Request request = Hidden(3);
  for (int target : {1, -100, 2}) request.add_targets(target);
  request.set_offset((int64_t{1} << 60));
  request.mutable_totals()->set_rows(int64_t{1} << 60);
  request.mutable_totals()->set_counted(int64_t{1} << 60);
  request.mutable_totals()->set_forward_kl_sum(0.1);
  request.mutable_totals()->set_reverse_kl_sum(0.1);
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(AnswerOf(p).totals().rows(), (int64_t{1} << 60) + 3);  // it checks the size

  Request tops = Logits(3, 1024);
  tops.add_top_logprobs(1024);
  tops.add_reference_top_logprobs(1024);
  Parsed most(tops);
  ASSERT_TRUE(most.status.ok()) << most.status;
  const std::vector<int32_t> ids(3 * 1024, 1023);
  const std::vector<float> logprobs(3 * 1024, -1);
  const v1::DivergenceResponse response = AnswerOf(most, {.top_ids = ids,
                                                          .reference_top_ids = ids,
                                                          .top_logprobs = logprobs,
                                                          .reference_top_logprobs = logprobs});
  EXPECT_EQ(response.reference_top_ids_size(), 3 * 1024);
}

// --- streams

TEST(DivergenceSequenceTest, LaterMessagesInheritWhatTheFirstSaidAndKeepItsHeads) {
  Heads heads;
  auto sequence = std::make_shared<DivergenceSequence>();
  Request request = Hidden();
  request.add_temperature(0.5f);
  for (float v : {2.0f, 3.0f}) request.add_reference_temperature(v);
  request.add_top_logprobs(2);
  for (int k : {1, 3}) request.add_reference_top_logprobs(k);
  request.set_ignore_index(1);
  for (int target : {1, 2}) request.add_targets(target);
  Parsed first(request, sequence, &heads);
  ASSERT_TRUE(first.status.ok()) << first.status;
  heads.one().Unload();
  Request later;
  later.set_rows(1);
  later.set_hidden(std::string(8, '\1'));
  later.set_reference_hidden(std::string(10, '\1'));
  EXPECT_THAT(std::string(Parsed(later, sequence, &heads).status.message()),
              HasSubstr("targets: got none, allowed values in every message"));
  later.add_targets(1);
  EXPECT_THAT(std::string(Parsed(later, sequence, &heads).status.message()),
              HasSubstr("reference_temperature: got none, allowed values in every message"));
  later.add_reference_temperature(4);
  EXPECT_THAT(std::string(Parsed(later, sequence, &heads).status.message()),
              HasSubstr("reference_top_logprobs: got none, allowed values in every message"));
  later.add_reference_top_logprobs(0);
  Parsed second(later, sequence, &heads);
  ASSERT_TRUE(second.status.ok()) << second.status;
  EXPECT_EQ(second.spec.key, first.spec.key);
  EXPECT_EQ(second.Rows()[0].temperature, 0.5f);
  EXPECT_EQ(second.Rows()[0].reference_temperature, 4);
  EXPECT_EQ(second.Rows()[0].target, kIgnoredTarget);
  EXPECT_EQ(second.Rows()[0].top_logprobs, 2);
  EXPECT_EQ(second.Rows()[0].reference_top_logprobs, 0);
  EXPECT_EQ(sequence->next_row, 3);
  later.set_reference_head_version(kOtherVersion + 1);
  EXPECT_EQ(Parsed(later, sequence, &heads).status.code(), absl::StatusCode::kFailedPrecondition);
}

TEST(DivergenceSequenceTest, TheReferencesShapeMayOnlyBeSaidAgain) {
  auto sequence = std::make_shared<DivergenceSequence>();
  ASSERT_TRUE(Parsed(Logits(), sequence).status.ok());
  Request again = Logits();
  again.set_reference_dtype(v1::DTYPE_F32);  // as the first message meant
  EXPECT_TRUE(Parsed(again, sequence).status.ok());
  again.set_reference_dtype(v1::DTYPE_BF16);
  EXPECT_THAT(std::string(Parsed(again, sequence).status.message()),
              HasSubstr("reference_dtype: got 3, allowed 1, as in the sequence's first message"));
  again = Logits();
  again.set_reference_head("g");
  EXPECT_THAT(std::string(Parsed(again, sequence).status.message()),
              HasSubstr("reference_head: got g, allowed none: the sequence's first message"));
  again = Logits();
  again.clear_reference();
  EXPECT_THAT(std::string(Parsed(again, sequence).status.message()),
              HasSubstr("reference: got none"));
  again = Logits();
  again.set_offset(1);
  EXPECT_THAT(std::string(Parsed(again, sequence).status.message()),
              HasSubstr("offset: got 1, allowed 4"));
}

TEST(DivergenceSequenceTest, TotalsRunInTheOrderOfTheAnswers) {
  auto sequence = std::make_shared<DivergenceSequence>();
  Parsed first(Logits(3), sequence), second(Logits(3), sequence);
  ASSERT_TRUE(first.status.ok() && second.status.ok());
  EXPECT_EQ(AnswerOf(first).totals().forward_kl_sum(), 2);
  const v1::DivergenceResponse last = AnswerOf(second);
  EXPECT_EQ(last.offset(), 3);
  EXPECT_EQ(last.totals().rows(), 6);
  EXPECT_EQ(last.totals().forward_kl_sum(), 4);
}

// --- the op

TEST(DivergenceCodecTest, EnqueueHandsASliceOfBothInputsToTheOp) {
  alignas(16) std::byte memory[512];
  std::byte* const inputs[] = {memory, memory + 256};
  std::vector<std::byte*> outputs;
  for (size_t i = 0; i < ops::kDivergenceTraits.outputs.size(); ++i)
    outputs.push_back(memory + 272 + 16 * i);
  ops::DivergenceCall call;
  call.reference_dtype = DType::kBF16;
  call.reference_elements = 5;
  engine::BatchView batch = {.dtype = DType::kF32,
                             .counts = {3, 10 * 16, 4},
                             .first_row = 4,
                             .row_elements = 2,
                             .row_stride = 16,
                             .payload = memory + 480,
                             .max_row_entries = 2,
                             .inputs = inputs,
                             .outputs = outputs};
  const HeadView head = {.weight = {.rows = 7, .cols = 2}};
  const HeadView reference_head = {.weight = {.rows = 7, .cols = 5}};
  FakeStream stream;
  ASSERT_TRUE(call.Enqueue(stream, batch).ok());
  const DivergenceArgs args = stream.last<DivergenceArgs>();
  EXPECT_EQ(args.logits.data, memory + 480);
  EXPECT_EQ(args.reference_logits.data, memory + 4 * 16);
  EXPECT_EQ(args.reference_logits.dtype, DType::kBF16);
  EXPECT_EQ(args.reference_logits.rows, 3);
  EXPECT_EQ(args.reference_logits.row_stride, 8);
  EXPECT_EQ(static_cast<const void*>(args.rows), inputs[1]);
  const DivergenceAnswers& to = args.answers;
  const void* const expected[] = {to.forward_kl,     to.reverse_kl,
                                  to.entropy,        to.reference_entropy,
                                  to.logsumexp,      to.reference_logsumexp,
                                  to.target_logprob, to.reference_target_logprob,
                                  to.status,         to.top_ids,
                                  to.top_logprobs};
  for (size_t i = 0; i < std::size(expected); ++i) EXPECT_EQ(expected[i], outputs[i]) << i;
  // No row wants top tokens of the reference.
  EXPECT_EQ(args.max_top_logprobs, 2);
  EXPECT_EQ(args.max_reference_top_logprobs, 0);
  EXPECT_EQ(to.reference_top_ids, nullptr);
  EXPECT_EQ(to.reference_top_logprobs, nullptr);

  batch.reference_head = &reference_head;
  ASSERT_TRUE(call.Enqueue(stream, batch).ok());
  const LinearDivergenceArgs mixed = stream.last<LinearDivergenceArgs>();
  EXPECT_EQ(mixed.head.vocab(), 0);
  EXPECT_EQ(mixed.divergence.logits.data, memory + 480);
  EXPECT_EQ(mixed.reference_hidden.data, memory + 4 * 16);
  EXPECT_EQ(mixed.rows(), 3);
  EXPECT_EQ(mixed.vocab(), 7);

  batch.head = &head;
  ASSERT_TRUE(call.Enqueue(stream, batch).ok());
  const LinearDivergenceArgs linear = stream.last<LinearDivergenceArgs>();
  EXPECT_EQ(linear.hidden.data, memory + 480);
  EXPECT_EQ(linear.head.hidden(), 2);
  EXPECT_EQ(linear.reference_head.hidden(), 5);
}

// --- the reader, with generated code as the judge

TEST(DivergenceWireTest, MessagesAreJudgedAsGeneratedCodeJudgesThem) {
  Request request = Hidden(3);
  request.set_head_version(7);
  request.set_reference_head_version(3);
  for (int target : {2, 0, -100}) request.add_targets(target);
  request.set_ignore_index(-100);
  for (float v : {1.0f, 2.0f, 3.0f}) request.add_temperature(v);
  request.add_reference_temperature(2);
  for (int k : {0, 3, 1}) request.add_top_logprobs(k);
  request.add_reference_top_logprobs(2);
  request.set_offset(100);
  request.mutable_totals()->set_rows(100);
  request.mutable_totals()->set_counted(100);
  request.mutable_totals()->set_forward_kl_sum(12.5);
  request.mutable_totals()->set_reverse_kl_sum(13.5);
  request.mutable_totals()->set_forward_kl_mean(1);
  const std::string message = request.SerializeAsString();
  testing::ExpectCutAgrees(message, &testing::DivergenceRequestDisagreement);
  testing::ExpectDamagedAgree({message}, 8000, &testing::DivergenceRequestDisagreement);
  testing::ExpectCorpusAgrees("divergence_request_fuzz", &testing::DivergenceRequestDisagreement);
}

}  // namespace
}  // namespace logitd::rpc

// Scorer's codec: proto in, job parts out, and back; and what the messages of a stream inherit.
// Long because every field of one message is read here.
#include "server/rpc/codecs/score_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "logitd/v1/scorer.pb.h"
#include "tests/fake_backend.h"
#include "tests/fuzz/compare_score_request.h"
#include "tests/rpc/judged.h"
#include "tests/rpc/one_head.h"

namespace logitd::rpc {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kMaxRows = 100;

v1::ScoreRequest Plain(const std::vector<int32_t>& targets, int64_t vocab = 5) {
  v1::ScoreRequest request;
  request.set_dtype(v1::DTYPE_F32);
  request.set_rows(static_cast<int64_t>(targets.size()));
  request.set_vocab(vocab);
  request.set_logits(
      std::string(targets.size() * static_cast<size_t>(vocab) * sizeof(float), '\1'));
  for (int32_t target : targets) request.add_targets(target);
  return request;
}

v1::ScoreRequest Hidden(const std::vector<int32_t>& targets) {
  v1::ScoreRequest request;
  request.set_dtype(v1::DTYPE_F32);
  request.set_rows(static_cast<int64_t>(targets.size()));
  request.set_head("h");
  request.set_hidden_size(2);
  request.set_hidden(std::string(targets.size() * 8, '\1'));
  for (int32_t target : targets) request.add_targets(target);
  return request;
}

// One message, parsed; of a sequence where that is given.
struct Parsed {
  explicit Parsed(const v1::ScoreRequest& request,
                  std::shared_ptr<ScoreSequence> sequence = std::make_shared<ScoreSequence>(),
                  const testing::OneHead* of = nullptr)
      : bytes(request.SerializeAsString()),
        piece(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()),
        codec((of == nullptr ? heads : *of).Find(), std::move(sequence)),
        status(codec.Parse(Pieces(&piece, 1), kMaxRows, &spec)) {}

  // What the codec writes.
  std::vector<CrossEntropyRow> Rows(const engine::AxisCounts& first = {},
                                    std::vector<int32_t>* extra_ids = nullptr) {
    std::vector<CrossEntropyRow> rows(static_cast<size_t>(spec.rows()));
    std::vector<int32_t> ids(static_cast<size_t>(spec.counts[ops::kCrossEntropyExtraIds]));
    support_ids.resize(static_cast<size_t>(spec.counts[ops::kCrossEntropySupportIds]));
    std::byte* const inputs[] = {reinterpret_cast<std::byte*>(rows.data()),
                                 reinterpret_cast<std::byte*>(ids.data()),
                                 reinterpret_cast<std::byte*>(support_ids.data())};
    codec.WriteInputs(inputs, first);
    if (extra_ids != nullptr) *extra_ids = ids;
    return rows;
  }

  testing::OneHead heads;
  std::string bytes;
  Piece piece;
  ScoreCodec codec;
  engine::JobSpec spec;
  absl::Status status;
  std::vector<int32_t> support_ids;  // after Rows
};

TEST(ScoreCodecTest, WithoutParametersEverythingIsOff) {
  Parsed p(Plain({4, 0, -100}));
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.spec.key.op, &ops::kCrossEntropyTraits);
  EXPECT_EQ(p.spec.key.row_elements, 5);
  EXPECT_EQ(p.spec.key.head, nullptr);
  EXPECT_EQ(p.spec.counts, (engine::AxisCounts{3}));
  EXPECT_EQ(p.spec.max_row_entries, 0);
  const std::vector<CrossEntropyRow> rows = p.Rows();
  EXPECT_EQ(rows[0].target, 4);
  EXPECT_EQ(rows[1].target, 0);
  EXPECT_EQ(rows[2].target, kIgnoredTarget);
  for (const CrossEntropyRow& row : rows) {
    EXPECT_EQ(row.active, 1);
    EXPECT_EQ(row.temperature, 1.0f);
    EXPECT_EQ(row.softcap, 0.0f);
    EXPECT_EQ(row.label_smoothing, 0.0f);
    EXPECT_EQ(row.smoothing, Smoothing::kTorch);
    EXPECT_EQ(row.z_loss, 0.0f);
    EXPECT_EQ(row.extra_count, 0);
    EXPECT_EQ(row.top_logprobs, 0);
    EXPECT_EQ(row.want, 0);
  }
}

TEST(ScoreCodecTest, EveryParameterReachesItsRow) {
  v1::ScoreRequest request = Plain({1, 2}, 40);
  for (float v : {0.5f, 2.0f}) request.add_temperature(v);
  for (float v : {30.0f, 0.0f}) request.add_softcap(v);
  for (float v : {0.1f, 0.2f}) request.add_label_smoothing(v);
  request.add_smoothing(v1::SMOOTHING_CONVENTION_TORCH);
  request.add_smoothing(v1::SMOOTHING_CONVENTION_MEGATRON);
  for (float v : {1e-4f, 0.0f}) request.add_z_loss(v);
  for (int v : {3, 2}) request.add_top_logprobs(v);
  for (int v : {1, 2}) request.add_extra_count(v);
  for (int v : {7, 8, 9}) request.add_extra_ids(v);
  request.set_want_rank(true);
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.spec.counts, (engine::AxisCounts{2, 3, 5, 3}));
  EXPECT_EQ(p.spec.wanted, kWantRank | ops::kAnyWhole);
  EXPECT_EQ(p.spec.max_row_entries, 3);
  std::vector<int32_t> extra_ids;
  const std::vector<CrossEntropyRow> rows = p.Rows({10, 20, 30, 40}, &extra_ids);
  EXPECT_EQ(rows[0].temperature, 0.5f);
  EXPECT_EQ(rows[1].temperature, 2.0f);
  EXPECT_EQ(rows[0].softcap, 30.0f);
  EXPECT_EQ(rows[1].label_smoothing, 0.2f);
  EXPECT_EQ(rows[1].smoothing, Smoothing::kMegatron);
  EXPECT_EQ(rows[0].z_loss, 1e-4f);
  EXPECT_EQ(rows[0].first_extra, 20);
  EXPECT_EQ(rows[1].first_extra, 21);
  EXPECT_EQ(rows[1].extra_count, 2);
  EXPECT_EQ(rows[0].first_top_entry, 30);
  EXPECT_EQ(rows[1].first_top_entry, 33);
  EXPECT_EQ(rows[0].first_extra_entry, 40);
  EXPECT_EQ(rows[1].first_extra_entry, 41);
  EXPECT_EQ(rows[0].want, kWantRank);
  EXPECT_THAT(extra_ids, ElementsAre(7, 8, 9));
}

TEST(ScoreCodecTest, AnyValueMayBeTheIgnoreIndex) {
  v1::ScoreRequest request = Plain({3, 2, 3});
  request.set_ignore_index(3);  // also a token's
  Parsed inside(request);
  ASSERT_TRUE(inside.status.ok()) << inside.status;
  const auto rows = inside.Rows();
  EXPECT_EQ(rows[0].target, kIgnoredTarget);
  EXPECT_EQ(rows[1].target, 2);
  EXPECT_EQ(rows[2].target, kIgnoredTarget);

  request = Plain({-1});
  EXPECT_THAT(std::string(Parsed(request).status.message()),
              HasSubstr("targets: got -1 at row 0, allowed 0..4, or -100 (ignore_index)"));
  request.set_ignore_index(-1);
  EXPECT_TRUE(Parsed(request).status.ok());
  request.set_ignore_index(int64_t{1} << 40);  // the id of no token
  EXPECT_FALSE(Parsed(request).status.ok());
}

TEST(ScoreCodecTest, HiddenStatesAreAJobOfTheirHead) {
  Parsed p(Hidden({2, 0}));
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.spec.key.op, &ops::kLinearCrossEntropyTraits);
  EXPECT_EQ(p.spec.key.row_elements, 2);
  EXPECT_EQ(p.spec.key.head, p.heads.watch().lock().get());
  EXPECT_EQ(p.codec.payload().row_bytes, 8u);
}

using R = v1::ScoreRequest*;
const testing::Refused<v1::ScoreRequest> kRefusedScore[] = {
    {"dtype", [](R r) { r->clear_dtype(); }, "dtype: got 0"},
    {"bytes_disagree", [](R r) { r->set_dtype(v1::DTYPE_F16); }, "logits"},
    {"no_targets", [](R r) { r->clear_targets(); }, "targets: got 0 values, allowed 2 (rows)"},
    {"a_target_too_many", [](R r) { r->add_targets(0); }, "targets: got 3 values"},
    {"target_beyond_vocab", [](R r) { r->set_targets(1, 5); },
     "targets: got 5 at row 1, allowed 0..4, or -100 (ignore_index)"},
    {"target_negative", [](R r) { r->set_targets(0, -7); }, "targets: got -7 at row 0"},
    {"three_temperatures_for_two_rows",
     [](R r) {
       for (int i = 0; i < 3; ++i) r->add_temperature(1);
     },
     "temperature: got 3 values, allowed none, 1 or 2 (rows)"},
    {"temperature_0", [](R r) { r->add_temperature(0); }, "temperature: got 0"},
    {"softcap_negative", [](R r) { r->add_softcap(-1); }, "softcap: got -1"},
    {"smoothing_1", [](R r) { r->add_label_smoothing(1); }, "label_smoothing: got 1"},
    {"smoothing_nan", [](R r) { r->add_label_smoothing(NAN); }, "label_smoothing"},
    {"unknown_convention", [](R r) { r->add_smoothing(static_cast<v1::SmoothingConvention>(7)); },
     "smoothing"},
    {"z_loss_infinite", [](R r) { r->add_z_loss(INFINITY); }, "z_loss: got inf"},
    {"more_top_than_vocab", [](R r) { r->add_top_logprobs(6); }, "top_logprobs: got 6"},
    {"extra_beyond_vocab", [](R r) { r->add_extra_ids(5); }, "extra_ids: got token 5"},
    {"extra_counts_that_do_not_add_up",
     [](R r) {
       r->add_extra_count(1);
       r->add_extra_ids(1);
       r->add_extra_ids(2);
     },
     "extra_count: got 1 in total, allowed 2"},
    {"support_counts_that_do_not_add_up",
     [](R r) {
       for (int n : {1, 0}) r->add_support_count(n);
       for (int id : {1, 2}) r->add_support_ids(id);
     },
     "support_count: got 1 in total, allowed 2, the number of values of support_ids"},
    {"support_without_the_target",
     [](R r) {
       for (int n : {0, 2}) r->add_support_count(n);
       for (int id : {0, 1}) r->add_support_ids(id);
     },
     "target: got 2 at row 1, allowed one of its 2 support_ids"},
    {"support_with_a_token_twice",
     [](R r) {
       for (int n : {2, 0}) r->add_support_count(n);
       for (int id : {1, 1}) r->add_support_ids(id);
     },
     "support_ids: got token 1 twice at row 0, allowed each once"},
    {"support_beyond_vocab",
     [](R r) {
       for (int n : {1, 0}) r->add_support_count(n);
       r->add_support_ids(5);
     },
     "support_ids: got token 5 at row 0, entry 0, allowed 0..4"},
    {"support_with_z_loss",
     [](R r) {
       for (int n : {1, 0}) r->add_support_count(n);
       r->add_support_ids(1);
       r->add_z_loss(0.5f);
     },
     "support_ids: got some at row 0, allowed none with z_loss, which is 0.5"},
    {"support_with_want_rank",
     [](R r) {
       for (int n : {1, 0}) r->add_support_count(n);
       r->add_support_ids(1);
       r->set_want_rank(true);
     },
     "support_ids: got some at row 0, allowed none with want_rank, which is 1"},
    {"offset_negative", [](R r) { r->set_offset(-1); }, "offset: got -1"},
    {"counts_whose_sum_is_beyond_64_bits",
     [](R r) {
       constexpr int64_t kLarge = int64_t{1} << 62;
       r->set_offset(kLarge);
       r->mutable_totals()->set_rows(kLarge);
       r->mutable_totals()->set_counted(kLarge);
       r->mutable_totals()->set_ignored(kLarge);
       r->mutable_totals()->set_faulty(kLarge);
     },
     "offset: got 4611686018427387904, allowed 0..1152921504606846976"},
    {"counts_as_large_as_offsets_are",
     [](R r) {
       constexpr int64_t kLarge = int64_t{1} << 60;
       r->set_offset(kLarge);
       r->mutable_totals()->set_rows(kLarge);
       r->mutable_totals()->set_counted(kLarge);
       r->mutable_totals()->set_ignored(kLarge);
       r->mutable_totals()->set_faulty(kLarge);
     },
     "totals.rows: got 1152921504606846976, allowed 3458764513820540928"},
    {"sums_over_nothing_counted",
     [](R r) {
       r->set_offset(1);
       r->mutable_totals()->set_rows(1);
       r->mutable_totals()->set_ignored(1);
       r->mutable_totals()->set_loss_sum(2);
     },
     "totals: got sums 2 and 0, allowed 0 and 0 where counted is 0"},
    {"totals_of_more_rows_than_came_before",
     [](R r) {
       r->set_offset(3);
       r->mutable_totals()->set_rows(4);
       r->mutable_totals()->set_counted(4);
     },
     "totals.counted: got 4, allowed 0..3"},
    {"totals_that_do_not_add_up",
     [](R r) {
       r->set_offset(9);
       r->mutable_totals()->set_rows(4);
       r->mutable_totals()->set_ignored(3);
     },
     "totals.rows: got 4, allowed 3: counted 0 + ignored 3 + faulty 0"},
    {"totals_nan", [](R r) { r->mutable_totals()->set_loss_sum(NAN); },
     "totals: got sums nan and 0"},
    {"softcap_beside_the_heads",
     [](R r) {
       *r = Hidden({0, 1});
       r->add_softcap(2);
     },
     "softcap: got 2 at row 0, allowed 0 with hidden states"},
    {"unknown_head",
     [](R r) {
       *r = Hidden({0, 1});
       r->set_head("g");
     },
     "no head g, only h", absl::StatusCode::kNotFound},
    {"more_rows_than_a_batch", [](R r) { *r = Plain(std::vector<int32_t>(101, 0), 1); },
     "rows: got 101, allowed 1..100"}};

TEST(ScoreCodecTest, RequestsAreRefusedSayingWhichAndWhy) {
  testing::ExpectRefused(Plain({1, 2}), kRefusedScore,
                         [](const v1::ScoreRequest& request) { return Parsed(request).status; });
}

template <typename T>
absl::Span<const std::byte> Bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(T)};
}

// An answer of three rows: counted, ignored, faulty.
struct Outputs {
  std::vector<float> losses = {1.5f, 0, NAN}, logprobs = {-1.25f, 0, NAN}, logsumexp = {2, 3, NAN},
                     entropies = {0.5f, 0.75f, NAN}, top_logprobs = {-1, -2, -3}, extra = {-4};
  std::vector<int32_t> ranks = {7, 0, 0}, top_ids = {4, 3, 2};
  std::vector<RowStatus> status = {{}, {}, {RowCode::kNanLogit, 3}};
  const std::vector<absl::Span<const std::byte>> spans = {
      Bytes(losses),    Bytes(logprobs), Bytes(ranks),        Bytes(logsumexp), Bytes(status),
      Bytes(entropies), Bytes(top_ids),  Bytes(top_logprobs), Bytes(extra)};
};

v1::ScoreResponse AnswerOf(Parsed& p) {
  const Outputs outputs;
  EncodedMessage answer =
      p.codec.Encode({.outputs = outputs.spans}, {.receive_ns = 1, .total_ns = 9});
  p.codec.Conclude(&answer);
  EXPECT_LE(answer.bytes(), p.codec.answer_bytes());
  v1::ScoreResponse response;
  EXPECT_TRUE(response.ParseFromString(answer.ToString()));
  return response;
}

TEST(ScoreCodecTest, AnswerIsWhatGeneratedCodeReads) {
  v1::ScoreRequest request = Plain({1, -100, 2});
  for (int n : {2, 1, 0}) request.add_top_logprobs(n);
  for (int n : {0, 1, 0}) request.add_extra_count(n);
  request.add_extra_ids(0);
  request.set_want_rank(true);
  request.set_want_entropy(true);
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  p.Rows();
  const v1::ScoreResponse response = AnswerOf(p);
  EXPECT_THAT(response.losses(), ElementsAre(1.5f, 0, ::testing::IsNan()));
  EXPECT_THAT(response.target_logprobs(), ElementsAre(-1.25f, 0, ::testing::IsNan()));
  EXPECT_THAT(response.ranks(), ElementsAre(7, 0, 0));
  EXPECT_THAT(response.logsumexp(), ElementsAre(2, 3, ::testing::IsNan()));
  EXPECT_THAT(response.entropies(), ElementsAre(0.5f, 0.75f, ::testing::IsNan()));
  EXPECT_THAT(response.status(),
              ElementsAre(v1::ROW_STATUS_OK, v1::ROW_STATUS_OK, v1::ROW_STATUS_NAN_LOGIT));
  EXPECT_THAT(response.status_position(), ElementsAre(-1, -1, 3));
  EXPECT_THAT(response.top_count(), ElementsAre(2, 1, 0));
  EXPECT_THAT(response.top_ids(), ElementsAre(4, 3, 2));
  EXPECT_THAT(response.top_logprobs(), ElementsAre(-1, -2, -3));
  EXPECT_THAT(response.extra_count(), ElementsAre(0, 1, 0));
  EXPECT_THAT(response.extra_logprobs(), ElementsAre(-4));
  EXPECT_EQ(response.timings().total_ns(), 9);
  EXPECT_EQ(response.offset(), 0);
  const v1::ScoreTotals& totals = response.totals();
  EXPECT_EQ(totals.rows(), 3);
  EXPECT_EQ(totals.counted(), 1);
  EXPECT_EQ(totals.ignored(), 1);
  EXPECT_EQ(totals.faulty(), 1);
  EXPECT_EQ(totals.loss_sum(), 1.5);
  EXPECT_EQ(totals.loss_mean(), 1.5);
  EXPECT_EQ(totals.target_logprob_sum(), -1.25);
  EXPECT_DOUBLE_EQ(totals.perplexity(), std::exp(1.25));
}

TEST(ScoreCodecTest, AnAnswerSaysTheVersionOfItsHead) {
  Parsed p(Hidden({1, -100, 2}));
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(AnswerOf(p).head_version(), testing::OneHead::kVersion);
}

TEST(ScoreCodecTest, WhatIsNotWantedIsNotSent) {
  Parsed p(Plain({1, -100, 2}));
  ASSERT_TRUE(p.status.ok()) << p.status;
  p.Rows();
  const v1::ScoreResponse response = AnswerOf(p);
  EXPECT_THAT(response.ranks(), IsEmpty());
  EXPECT_THAT(response.entropies(), IsEmpty());
}

TEST(ScoreCodecTest, TotalsOfNothingCountedAreNotANumber) {
  v1::ScoreRequest request = Plain({-100, -100, -100});
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  p.Rows();
  const v1::ScoreResponse response = AnswerOf(p);
  EXPECT_EQ(response.totals().counted(), 0);
  EXPECT_EQ(response.totals().loss_sum(), 0);
  EXPECT_TRUE(std::isnan(response.totals().loss_mean()));
  EXPECT_TRUE(std::isnan(response.totals().perplexity()));
}

TEST(ScoreCodecTest, TotalsGoOnFromThoseOfTheRequest) {
  v1::ScoreRequest request = Plain({1, -100, 2});
  request.set_offset(20);
  v1::ScoreTotals* before = request.mutable_totals();
  before->set_rows(12);
  before->set_counted(9);
  before->set_ignored(2);
  before->set_faulty(1);
  before->set_loss_sum(10);
  before->set_target_logprob_sum(-5);
  before->set_perplexity(77);  // not looked at
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  p.Rows();
  const v1::ScoreResponse response = AnswerOf(p);
  EXPECT_EQ(response.offset(), 20);
  EXPECT_EQ(response.totals().rows(), 15);
  EXPECT_EQ(response.totals().counted(), 10);
  EXPECT_EQ(response.totals().ignored(), 3);
  EXPECT_EQ(response.totals().faulty(), 2);
  EXPECT_EQ(response.totals().loss_sum(), 11.5);
  EXPECT_EQ(response.totals().loss_mean(), 1.15);
  EXPECT_DOUBLE_EQ(response.totals().perplexity(), std::exp(0.625));
}

// --- streams

// A later message that says nothing but its rows.
v1::ScoreRequest Later(const std::vector<int32_t>& targets, int64_t vocab = 5) {
  v1::ScoreRequest request = Plain(targets, vocab);
  request.clear_dtype();
  request.clear_vocab();
  return request;
}

TEST(ScoreSequenceTest, LaterMessagesInheritWhatTheFirstSaid) {
  v1::ScoreRequest request = Plain({1, 2, 3});
  request.set_ignore_index(4);
  request.add_temperature(0.5f);
  request.add_softcap(3);
  request.add_label_smoothing(0.25f);
  request.add_smoothing(v1::SMOOTHING_CONVENTION_MEGATRON);
  request.add_z_loss(2);
  request.add_top_logprobs(2);
  for (int id : {3, 0}) request.add_extra_ids(id);
  request.set_want_rank(true);
  request.set_want_entropy(true);
  auto sequence = std::make_shared<ScoreSequence>();
  Parsed first(request, sequence);
  ASSERT_TRUE(first.status.ok()) << first.status;
  Parsed second(Later({4, 0}), sequence);
  ASSERT_TRUE(second.status.ok()) << second.status;
  EXPECT_EQ(second.spec.key, first.spec.key);
  EXPECT_EQ(second.spec.counts, (engine::AxisCounts{2, 2, 4, 4}));
  EXPECT_EQ(second.spec.wanted, kWantRank | kWantEntropy | ops::kAnyWhole);
  std::vector<int32_t> extra_ids;
  const auto rows = second.Rows({}, &extra_ids);
  EXPECT_THAT(extra_ids, ElementsAre(3, 0));
  EXPECT_EQ(rows[0].target, kIgnoredTarget);
  EXPECT_EQ(rows[1].target, 0);
  EXPECT_THAT(
      rows,
      Each(AllOf(Field(&CrossEntropyRow::temperature, 0.5f), Field(&CrossEntropyRow::softcap, 3.0f),
                 Field(&CrossEntropyRow::label_smoothing, 0.25f),
                 Field(&CrossEntropyRow::smoothing, Smoothing::kMegatron),
                 Field(&CrossEntropyRow::z_loss, 2.0f), Field(&CrossEntropyRow::top_logprobs, 2),
                 Field(&CrossEntropyRow::extra_count, 2),
                 Field(&CrossEntropyRow::want, kWantRank | kWantEntropy))));

  // A message with values of its own is scored by those; the others are not affected.
  v1::ScoreRequest own = Later({0, 1});
  for (float t : {2.0f, 3.0f}) own.add_temperature(t);
  own.add_extra_ids(1);
  Parsed third(own, sequence);
  ASSERT_TRUE(third.status.ok()) << third.status;
  EXPECT_EQ(third.Rows()[1].temperature, 3.0f);
  EXPECT_EQ(third.spec.counts[ops::kCrossEntropyExtraEntries], 2);
  Parsed fourth(Later({0}), sequence);
  ASSERT_TRUE(fourth.status.ok()) << fourth.status;
  EXPECT_EQ(fourth.Rows()[0].temperature, 0.5f);
  EXPECT_EQ(fourth.spec.counts[ops::kCrossEntropyExtraEntries], 2);
}

TEST(ScoreSequenceTest, WhatWasSaidRowByRowMustBeSaidAgain) {
  v1::ScoreRequest request = Plain({1, 2, 3});
  for (float t : {1.0f, 2.0f, 3.0f}) request.add_temperature(t);
  auto sequence = std::make_shared<ScoreSequence>();
  ASSERT_TRUE(Parsed(request, sequence).status.ok());
  EXPECT_THAT(
      std::string(Parsed(Later({1, 2, 3}), sequence).status.message()),
      HasSubstr("temperature: got none, allowed values in every message: the sequence's first "
                "one gave them row by row"));
  v1::ScoreRequest later = Later({1, 2});
  later.add_temperature(1);
  EXPECT_TRUE(Parsed(later, sequence).status.ok());

  request = Plain({1, 2});
  for (int n : {1, 0}) request.add_extra_count(n);
  request.add_extra_ids(3);
  sequence = std::make_shared<ScoreSequence>();
  ASSERT_TRUE(Parsed(request, sequence).status.ok());
  EXPECT_THAT(std::string(Parsed(Later({1, 2}), sequence).status.message()),
              HasSubstr("extra_count: got none"));
  later = Later({1, 2});
  later.add_extra_count(0);  // none, and said so
  EXPECT_TRUE(Parsed(later, sequence).status.ok());
}

TEST(ScoreSequenceTest, TheShapeMayOnlyBeSaidAgain) {
  auto sequence = std::make_shared<ScoreSequence>();
  ASSERT_TRUE(Parsed(Plain({1}), sequence).status.ok());
  EXPECT_TRUE(Parsed(Plain({2}), sequence).status.ok());
  v1::ScoreRequest other = Plain({2});
  other.set_dtype(v1::DTYPE_BF16);
  EXPECT_THAT(std::string(Parsed(other, sequence).status.message()),
              HasSubstr("dtype: got 3, allowed 1"));
  EXPECT_THAT(std::string(Parsed(Plain({2}, 6), sequence).status.message()),
              HasSubstr("vocab: got 6, allowed 5"));
  EXPECT_THAT(std::string(Parsed(Hidden({2}), sequence).status.message()),
              HasSubstr("head: got h, allowed none: the sequence's first message had logits"));
}

TEST(ScoreSequenceTest, ALongNameOfAHeadIsNotRepeatedWhicheverMessageHasIt) {
  const testing::OneHead heads;
  for (const v1::ScoreRequest& first : {Plain({1}), Hidden({1})}) {
    auto sequence = std::make_shared<ScoreSequence>();
    ASSERT_TRUE(Parsed(first, sequence, &heads).status.ok());
    v1::ScoreRequest later = Hidden({2});
    later.set_head(std::string(129, 'x'));
    EXPECT_EQ(Parsed(later, sequence).status,
              absl::InvalidArgumentError("head: got a name of 129 bytes, allowed 1..128"));
    later.set_head(std::string(128, 'x'));
    EXPECT_THAT(std::string(Parsed(later, sequence).status.message()), HasSubstr("head: got xxxx"));
  }
}

TEST(ScoreSequenceTest, AMessageGoesOnWhereTheOneBeforeItEnded) {
  auto sequence = std::make_shared<ScoreSequence>();
  v1::ScoreRequest request = Plain({1, 2});
  request.set_offset(7);
  ASSERT_TRUE(Parsed(request, sequence).status.ok());
  v1::ScoreRequest later = Later({1, 2, 3});
  later.set_offset(9);
  EXPECT_TRUE(Parsed(later, sequence).status.ok());
  later.set_offset(9);
  EXPECT_THAT(std::string(Parsed(later, sequence).status.message()),
              HasSubstr("offset: got 9, allowed 12, where the message before it ended"));
  later.clear_offset();
  later.mutable_totals();
  EXPECT_THAT(std::string(Parsed(later, sequence).status.message()),
              HasSubstr("totals: got some at row 12, allowed only in the first message"));
}

TEST(ScoreSequenceTest, TotalsRunInTheOrderOfTheAnswersWhateverWasEncodedFirst) {
  auto sequence = std::make_shared<ScoreSequence>();
  Parsed first(Plain({1, -100, 2}), sequence);
  Parsed second(Later({1, -100, 2}), sequence);
  ASSERT_TRUE(first.status.ok() && second.status.ok());
  const Outputs outputs;
  EncodedMessage second_answer = second.codec.Encode({.outputs = outputs.spans}, {});
  EncodedMessage first_answer = first.codec.Encode({.outputs = outputs.spans}, {});
  first.codec.Conclude(&first_answer);
  second.codec.Conclude(&second_answer);
  v1::ScoreResponse response;
  ASSERT_TRUE(response.ParseFromString(first_answer.ToString()));
  EXPECT_EQ(response.totals().rows(), 3);
  EXPECT_EQ(response.totals().loss_sum(), 1.5);
  ASSERT_TRUE(response.ParseFromString(second_answer.ToString()));
  EXPECT_EQ(response.offset(), 3);
  EXPECT_EQ(response.totals().rows(), 6);
  EXPECT_EQ(response.totals().loss_sum(), 3);
}

TEST(ScoreSequenceTest, KeepsTheHeadItBeganWithAlsoWhenThatIsUnloaded) {
  testing::OneHead heads;
  auto sequence = std::make_shared<ScoreSequence>();
  Parsed first(Hidden({1, 2}), sequence, &heads);
  ASSERT_TRUE(first.status.ok()) << first.status;
  heads.Unload();
  v1::ScoreRequest later = Hidden({0});
  later.clear_dtype();
  later.clear_head();
  later.clear_hidden_size();
  Parsed second(later, sequence, &heads);
  ASSERT_TRUE(second.status.ok()) << second.status;
  EXPECT_EQ(second.spec.key, first.spec.key);
  v1::ScoreRequest named = Hidden({0});  // by the name it had
  named.set_vocab(3);
  Parsed again(named, sequence, &heads);
  EXPECT_TRUE(again.status.ok()) << again.status;
  named.set_head_version(testing::OneHead::kVersion);
  EXPECT_TRUE(Parsed(named, sequence, &heads).status.ok());
  named.set_head_version(testing::OneHead::kVersion + 1);
  EXPECT_EQ(
      Parsed(named, sequence, &heads).status,
      absl::FailedPreconditionError("head_version: got 8, allowed 7, which head h has, or 0"));
  EXPECT_EQ(Parsed(Hidden({0}), std::make_shared<ScoreSequence>(), &heads).status.code(),
            absl::StatusCode::kNotFound);
}

// --- the op

TEST(ScoreCodecTest, EnqueueHandsTheBatchToTheOp) {
  alignas(16) std::byte memory[256];
  std::byte* const inputs[] = {memory, memory + 16, memory + 24};
  std::vector<std::byte*> outputs;
  for (size_t i = 0; i < std::size(ops::kCrossEntropyTraits.outputs); ++i)
    outputs.push_back(memory + 32 + 16 * i);
  const HeadView head = {.weight = {.rows = 7, .cols = 5}, .softcap = 3};
  engine::BatchView batch = {.dtype = DType::kBF16,
                             .counts = {3, 1, 1, 1},
                             .row_elements = 5,
                             .row_stride = 16,
                             .payload = memory + 240,
                             .max_row_entries = 4,
                             .wanted = kWantEntropy,
                             .inputs = inputs,
                             .outputs = outputs};
  FakeStream stream;
  ASSERT_TRUE(ops::kCrossEntropyTraits.enqueue(stream, batch).ok());
  const CrossEntropyArgs args = stream.last<CrossEntropyArgs>();
  EXPECT_EQ(args.logits.data, memory + 240);
  EXPECT_EQ(args.logits.rows, 3);
  EXPECT_EQ(args.logits.cols, 5);
  EXPECT_EQ(args.logits.row_stride, 8);
  EXPECT_EQ(args.want, kWantEntropy);
  EXPECT_EQ(args.max_support, 0);
  EXPECT_EQ(args.max_top_logprobs, 4);
  const CrossEntropyAnswers& answers = args.answers;
  const void* const expected[] = {
      answers.loss,      answers.target_logprob, answers.rank,
      answers.logsumexp, answers.status,         answers.entropy,
      answers.top_ids,   answers.top_logprobs,   answers.extra_logprobs};
  for (size_t i = 0; i < std::size(ops::kCrossEntropyTraits.outputs); ++i)
    EXPECT_EQ(expected[i], outputs[i]) << i;

  batch.head = &head;
  batch.wanted |= kWantRank;
  ASSERT_TRUE(ops::kLinearCrossEntropyTraits.enqueue(stream, batch).ok());
  const auto& linear = stream.last<LinearCrossEntropyArgs>();
  EXPECT_EQ(linear.hidden.data, memory + 240);
  EXPECT_EQ(linear.hidden.cols, 5);
  EXPECT_EQ(linear.head.vocab(), 7);
  EXPECT_EQ(linear.head.softcap, 3);
  EXPECT_EQ(linear.cross_entropy.want, kWantRank | kWantEntropy);
  EXPECT_EQ(linear.cross_entropy.answers.loss, answers.loss);
}

v1::ScoreRequest Supported() {
  v1::ScoreRequest request = Plain({1, -100, 4});
  for (int n : {2, 0, 3}) request.add_support_count(n);
  for (int id : {3, 1, 0, 4, 2}) request.add_support_ids(id);
  return request;
}

TEST(ScoreCodecTest, SupportsCountFromTheJobsPlaceInTheBatch) {
  Parsed p(Supported());
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.spec.counts[ops::kCrossEntropySupportIds], 5);
  EXPECT_EQ(p.spec.wanted, ops::kAnySupport | ops::kAnyWhole);
  const auto rows = p.Rows({10, 20, 30, 40, 50});
  EXPECT_EQ(rows[0].first_support, 50);
  EXPECT_EQ(rows[0].support_count, 2);
  EXPECT_EQ(rows[1].support_count, 0);
  EXPECT_EQ(rows[2].first_support, 52);
  EXPECT_EQ(rows[2].support_count, 3);
  EXPECT_THAT(p.support_ids, ElementsAre(3, 1, 0, 4, 2));

  v1::ScoreRequest skips = Supported();
  skips.set_skip_ignored(true);
  EXPECT_EQ(Parsed(skips).spec.wanted, ops::kAnySupport);
}

TEST(ScoreCodecTest, ABatchTellsTheOpWhatSupportsItHas) {
  std::byte* const none[16] = {};
  engine::BatchView batch = {
      .dtype = DType::kF32, .counts = {3}, .row_elements = 5, .inputs = none, .outputs = none};
  for (const bool any : {false, true}) {
    for (const bool whole : {false, true}) {
      FakeStream stream;
      batch.wanted = (any ? ops::kAnySupport : 0) | (whole ? ops::kAnyWhole : 0) | kWantEntropy;
      ASSERT_TRUE(ops::kCrossEntropyTraits.enqueue(stream, batch).ok());
      const CrossEntropyArgs& args = stream.last<CrossEntropyArgs>();
      EXPECT_EQ(args.want, kWantEntropy);
      EXPECT_EQ(args.max_support, any ? kMaxSupport : 0);
      EXPECT_EQ(args.all_supported, !whole);
    }
  }
}

TEST(ScoreSequenceTest, EveryMessageBringsItsOwnSupports) {
  auto sequence = std::make_shared<ScoreSequence>();
  ASSERT_TRUE(Parsed(Supported(), sequence).status.ok());
  Parsed without(Later({0, 2}), sequence);
  ASSERT_TRUE(without.status.ok()) << without.status;
  EXPECT_EQ(without.Rows()[0].support_count, 0);
  v1::ScoreRequest own = Later({0, 2});
  for (int n : {0, 1}) own.add_support_count(n);
  own.add_support_ids(2);
  Parsed with(own, sequence);
  ASSERT_TRUE(with.status.ok()) << with.status;
  EXPECT_EQ(with.Rows()[1].support_count, 1);
}

TEST(ScoreCodecTest, SkipIgnoredHasIgnoredRowsAskForNothing) {
  v1::ScoreRequest request = Plain({1, -100, 2});
  request.add_top_logprobs(2);
  request.add_extra_ids(0);
  request.set_want_entropy(true);
  request.set_skip_ignored(true);
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.spec.key.op, &ops::kCountedCrossEntropyTraits);
  EXPECT_EQ(p.spec.counts[ops::kCrossEntropyCounted], 2);
  EXPECT_EQ(p.spec.counts[ops::kCrossEntropyTopEntries], 4);
  const auto rows = p.Rows();
  EXPECT_FALSE(AsksForNothing(rows[0]));
  EXPECT_TRUE(AsksForNothing(rows[1]));
  EXPECT_FALSE(AsksForNothing(rows[2]));
}

TEST(ScoreCodecTest, SkipIgnoredTakesTheSupportOfIgnoredRows) {
  v1::ScoreRequest request = Plain({1, -100});
  for (int n : {2, 2}) request.add_support_count(n);
  for (int id : {1, 2, 0, 3}) request.add_support_ids(id);
  request.set_skip_ignored(true);
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  const auto rows = p.Rows();
  EXPECT_EQ(rows[0].support_count, 2);
  EXPECT_EQ(rows[1].support_count, 0);
  EXPECT_TRUE(AsksForNothing(rows[1]));
}

TEST(ScoreCodecTest, SkipIgnoredHoldsForTheWholeStream) {
  const auto sequence = std::make_shared<ScoreSequence>();
  v1::ScoreRequest first = Plain({1, -100});
  first.set_skip_ignored(true);
  ASSERT_TRUE(Parsed(first, sequence).status.ok());
  Parsed second(Plain({-100, -100, 0}), sequence);
  ASSERT_TRUE(second.status.ok()) << second.status;
  EXPECT_EQ(second.spec.key.op, &ops::kCountedCrossEntropyTraits);
  EXPECT_EQ(second.spec.counts[ops::kCrossEntropyCounted], 1);
}

TEST(ScoreCodecTest, ASliceHasNoMoreCountedRowsThanRows) {
  FakeStream stream;
  engine::BatchView batch = {.dtype = DType::kBF16, .counts = {3}, .row_elements = 5};
  batch.counts[ops::kCrossEntropyCounted] = 7;  // of the whole batch
  std::byte* const none[16] = {};
  batch.inputs = batch.outputs = none;
  ASSERT_TRUE(ops::kCountedCrossEntropyTraits.enqueue(stream, batch).ok());
  EXPECT_EQ(stream.last<CrossEntropyArgs>().counted_rows, 3);
  batch.counts[ops::kCrossEntropyCounted] = 2;
  const HeadView head;
  batch.head = &head;
  ASSERT_TRUE(ops::kCountedLinearCrossEntropyTraits.enqueue(stream, batch).ok());
  EXPECT_EQ(stream.last<LinearCrossEntropyArgs>().cross_entropy.counted_rows, 2);
}

// --- the reader, with generated code as the judge

v1::ScoreRequest EveryField() {
  v1::ScoreRequest request = Hidden({2, 0, -100});
  request.set_vocab(3);
  request.set_ignore_index(-100);
  for (float v : {1.0f, 2.0f, 3.0f}) request.add_temperature(v);
  request.add_softcap(0);
  request.add_label_smoothing(0.5f);
  request.add_smoothing(v1::SMOOTHING_CONVENTION_MEGATRON);
  request.add_z_loss(1e-3f);
  request.add_top_logprobs(3);
  for (int n : {1, 0, 1}) request.add_extra_count(n);
  for (int id : {0, 2}) request.add_extra_ids(id);
  request.set_want_rank(true);
  request.set_want_entropy(true);
  request.set_skip_ignored(true);
  for (int n : {1, 0, 2}) request.add_support_count(n);
  for (int id : {2, 0, 1}) request.add_support_ids(id);
  request.set_offset(100);
  v1::ScoreTotals* totals = request.mutable_totals();
  totals->set_rows(100);
  totals->set_counted(90);
  totals->set_ignored(9);
  totals->set_faulty(1);
  totals->set_loss_sum(123.5);
  totals->set_target_logprob_sum(-120);
  totals->set_loss_mean(1.25);
  totals->set_perplexity(3.5);
  return request;
}

TEST(ScoreWireTest, MessagesAreJudgedAsGeneratedCodeJudgesThem) {
  const std::string message = EveryField().SerializeAsString();
  testing::ExpectCutAgrees(message, &testing::ScoreRequestDisagreement);
  testing::ExpectDamagedAgree({message}, 8000, &testing::ScoreRequestDisagreement);
  testing::ExpectCorpusAgrees("score_request_fuzz", &testing::ScoreRequestDisagreement);
}

TEST(ScoreWireTest, TotalsInSeveralPartsAreOneOverTheOther) {
  v1::ScoreRequest first;
  first.mutable_totals()->set_rows(3);
  first.mutable_totals()->set_loss_sum(2);
  v1::ScoreRequest second;
  second.mutable_totals()->set_rows(4);
  const std::string bytes = first.SerializeAsString() + second.SerializeAsString();
  EXPECT_EQ(testing::ScoreRequestDisagreement(bytes), "");
  ScoreFields fields;
  const Piece piece(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
  ASSERT_TRUE(ParseScoreFields(Pieces(&piece, 1), 10, &fields).ok());
  EXPECT_EQ(fields.totals.rows, 4);
  EXPECT_EQ(fields.totals.loss_sum, 2);
}

}  // namespace
}  // namespace logitd::rpc

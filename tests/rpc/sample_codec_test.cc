// The codecs of Sampler.Sample and Sampler.Verify: proto in, job parts out, and back.
#include "server/rpc/codecs/sample_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <iterator>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "logitd/v1/sampler.pb.h"
#include "server/rpc/codecs/verify_codec.h"
#include "tests/fake_backend.h"
#include "tests/fuzz/compare_sample_request.h"
#include "tests/rpc/judged.h"
#include "tests/rpc/one_head.h"

namespace logitd::rpc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kMaxRows = 100;

template <typename Request>
Request Plain(int64_t rows, int64_t vocab) {
  Request request;
  request.set_dtype(v1::DTYPE_F32);
  request.set_rows(rows);
  request.set_vocab(vocab);
  request.set_logits(std::string(static_cast<size_t>(rows * vocab) * sizeof(float), '\1'));
  request.add_seed(1);
  return request;
}

template <typename Codec, typename Request>
struct ParsedAs : testing::ParsedAs<Codec, Request> {
  using testing::ParsedAs<Codec, Request>::ParsedAs;

  // What the codec writes, array after array.
  std::vector<std::vector<std::byte>> Inputs(const engine::AxisCounts& first = {}) {
    std::vector<std::vector<std::byte>> arrays;
    std::vector<std::byte*> inputs;
    for (const engine::Array& array : this->codec.op().inputs) {
      arrays.emplace_back(static_cast<size_t>(this->spec.counts[array.axis]) * array.bytes);
      inputs.push_back(arrays.back().data());
    }
    this->codec.WriteInputs(inputs, first);
    return arrays;
  }
};
using Parsed = ParsedAs<SampleCodec, v1::SampleRequest>;
using ParsedVerify = ParsedAs<VerifyCodec, v1::VerifyRequest>;

template <typename T>
std::vector<T> As(const std::vector<std::byte>& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

TEST(SampleCodecTest, WithoutParametersEveryStepIsOff) {
  Parsed p(Plain<v1::SampleRequest>(2, 5));
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.spec.key.op, &ops::kSampleTraits);
  EXPECT_EQ(p.spec.key.row_elements, 5);
  EXPECT_EQ(p.spec.counts, (engine::AxisCounts{2}));
  const auto rows = As<SampleRow>(p.Inputs()[ops::kSampleInRows.index]);
  for (const SampleRow& row : rows) {
    EXPECT_EQ(row.active, 1);
    EXPECT_EQ(row.seed, 1u);
    EXPECT_EQ(row.position, 0u);
    EXPECT_EQ(row.temperature, 1.0f);
    EXPECT_EQ(row.top_k, 0);
    EXPECT_EQ(row.top_p, 1.0f);
    EXPECT_EQ(row.top_n_sigma, 0.0f);
    EXPECT_EQ(row.min_p, 0.0f);
    EXPECT_EQ(row.typical_p, 1.0f);
    EXPECT_EQ(row.xtc_threshold, 0.1f);
    EXPECT_EQ(row.xtc_probability, 0.0f);
    EXPECT_EQ(row.repetition, 1.0f);
    EXPECT_EQ(row.presence, 0.0f);
    EXPECT_EQ(row.frequency, 0.0f);
    EXPECT_EQ(row.prompt_tokens, 0);
    EXPECT_EQ(row.first_mask_word, -1);
    EXPECT_EQ(row.top_logprobs, 0);
    EXPECT_EQ(row.draws, 0);
    EXPECT_EQ(row.watermark_key, 0u);
    EXPECT_EQ(row.watermark_width, 0);
    EXPECT_EQ(row.logprob_mode, LogprobMode::kRaw);
  }
}

TEST(SampleCodecTest, EveryParameterReachesItsRow) {
  v1::SampleRequest request = Plain<v1::SampleRequest>(2, 40);
  request.clear_seed();
  for (uint64_t seed : {uint64_t{7}, uint64_t{1} << 63}) request.add_seed(seed);
  for (uint64_t position : {3, 4}) request.add_position(position);
  for (float t : {0.5f, 0.0f}) request.add_temperature(t);
  for (int k : {5, 40}) request.add_top_k(k);
  for (float p : {0.9f, 0.25f}) request.add_top_p(p);
  for (float n : {1.5f, 2.0f}) request.add_top_n_sigma(n);
  for (float p : {0.1f, 0.2f}) request.add_min_p(p);
  for (float p : {0.3f, 1.0f}) request.add_typical_p(p);
  for (float t : {0.0f, 0.4f}) request.add_xtc_threshold(t);
  for (float p : {0.6f, 0.7f}) request.add_xtc_probability(p);
  for (float p : {1.1f, 1.2f}) request.add_repetition_penalty(p);
  for (float p : {2.1f, 2.2f}) request.add_presence_penalty(p);
  for (float p : {-3.1f, 3.2f}) request.add_frequency_penalty(p);
  for (int id : {4, 5, 6}) request.add_history(id);
  for (int n : {1, 3}) request.add_prompt_tokens(n);
  for (int n : {2, 3}) request.add_top_logprobs(n);
  for (int n : {5, 1024}) request.add_draws(n);
  request.add_logprob_mode(v1::LOGPROB_MODE_RAW);
  request.add_logprob_mode(v1::LOGPROB_MODE_PROCESSED);
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.spec.counts[ops::kSampleTopEntries], 5);
  EXPECT_EQ(p.spec.counts[ops::kSampleDrawEntries], 1029);
  const auto rows =
      As<SampleRow>(p.Inputs({0, 0, 0, 0, 0, 100, 0, 0, 200})[ops::kSampleInRows.index]);
  EXPECT_EQ(rows[0].seed, 7u);
  EXPECT_EQ(rows[1].seed, uint64_t{1} << 63);
  EXPECT_EQ(rows[1].position, 4u);
  EXPECT_EQ(rows[0].temperature, 0.5f);
  EXPECT_EQ(rows[1].temperature, 0.0f);
  EXPECT_EQ(rows[1].top_k, 40);
  EXPECT_EQ(rows[0].top_p, 0.9f);
  EXPECT_EQ(rows[0].top_n_sigma, 1.5f);
  EXPECT_EQ(rows[1].top_n_sigma, 2.0f);
  EXPECT_EQ(rows[1].min_p, 0.2f);
  EXPECT_EQ(rows[0].typical_p, 0.3f);
  EXPECT_EQ(rows[1].xtc_threshold, 0.4f);
  EXPECT_EQ(rows[0].xtc_probability, 0.6f);
  EXPECT_EQ(rows[0].repetition, 1.1f);
  EXPECT_EQ(rows[1].presence, 2.2f);
  EXPECT_EQ(rows[0].frequency, -3.1f);
  EXPECT_EQ(rows[0].prompt_tokens, 1);
  EXPECT_EQ(rows[1].prompt_tokens, 3);
  EXPECT_EQ(rows[0].first_top_entry, 100);
  EXPECT_EQ(rows[1].first_top_entry, 102);
  EXPECT_EQ(rows[1].top_logprobs, 3);
  EXPECT_EQ(rows[1].draws, 1024);
  EXPECT_EQ(rows[0].first_draw_entry, 200);
  EXPECT_EQ(rows[1].first_draw_entry, 205);
  EXPECT_EQ(rows[1].logprob_mode, LogprobMode::kProcessed);
}

// protobuf writes -1 in ten bytes, some other encoders in five.
TEST(SampleCodecTest, ATopKThatKeepsAllIsTakenAsEveryClientWritesIt) {
  v1::SampleRequest request = Plain<v1::SampleRequest>(4, 5);
  for (int k : {0, -1, 6, std::numeric_limits<int32_t>::max()}) request.add_top_k(k);
  EXPECT_TRUE(Parsed(request).status.ok()) << Parsed(request).status;
  request.clear_top_k();
  request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(
      v1::SampleRequest::kTopKFieldNumber, "\xff\xff\xff\xff\x0f");
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(As<SampleRow>(p.Inputs()[ops::kSampleInRows.index])[3].top_k, -1);
}

// Two rows for the head of one_head.h.
template <typename Request = v1::SampleRequest>
Request Hidden() {
  Request request;
  request.set_dtype(v1::DTYPE_F32);
  request.set_rows(2);
  request.set_head("h");
  request.set_hidden_size(2);
  request.set_hidden(std::string(16, '\1'));
  request.add_seed(5);
  return request;
}

TEST(SampleCodecTest, HiddenStatesAreAJobOfTheirHeadWithTheSameParameters) {
  v1::SampleRequest request = Hidden();
  request.add_top_k(4);  // more than the head's 3 tokens: off
  request.set_allowed_tokens(std::string("\x05\0\0\0", 4));
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.spec.key.op, &ops::kLinearSampleTraits);
  EXPECT_EQ(p.spec.key.row_elements, 2);
  EXPECT_EQ(p.spec.key.head, p.heads.watch().lock().get());
  EXPECT_EQ(p.codec.payload().row_bytes, 8u);
  const auto arrays = p.Inputs();
  EXPECT_EQ(As<SampleRow>(arrays[ops::kSampleInRows.index])[1].seed, 5u);
  EXPECT_THAT(As<uint32_t>(arrays[ops::kSampleInMaskWords.index]), ElementsAre(5u));

  request.set_top_k(0, -2);
  EXPECT_THAT(std::string(Parsed(request).status.message()),
              HasSubstr("top_k: got -2 at row 0, allowed -1 or more"));
  request.set_head("other");
  EXPECT_EQ(Parsed(request).status.code(), absl::StatusCode::kNotFound);
}

// Hands a batch with the request's rows to linear_sample.
struct Enqueued {
  explicit Enqueued(const v1::SampleRequest& request) {
    const Parsed p(request);
    EXPECT_TRUE(p.status.ok()) << p.status;
    const std::vector<std::byte*> inputs(ops::kSampleInputs.size(), memory);
    const std::vector<std::byte*> outputs(ops::kSampleOutputs.size(), memory + 16);
    EXPECT_TRUE(ops::kLinearSampleTraits
                    .enqueue(stream, {.dtype = DType::kF32,
                                      .counts = p.spec.counts,
                                      .row_elements = 5,
                                      .row_stride = 32,
                                      .payload = memory + 48,
                                      .max_row_entries = p.spec.max_row_entries,
                                      .wanted = p.spec.wanted,
                                      .inputs = inputs,
                                      .outputs = outputs,
                                      .head = &head})
                    .ok());
  }

  alignas(16) std::byte memory[64];
  const HeadView head = {.weight = {.rows = 7, .cols = 5}};
  FakeStream stream;
};

TEST(SampleCodecTest, EnqueueHandsHiddenStatesAndTheirHeadToTheOp) {
  Enqueued batch(Hidden());
  const auto& last = batch.stream.last<LinearSampleArgs>();
  EXPECT_EQ(last.hidden.data, batch.memory + 48);
  EXPECT_EQ(last.hidden.rows, 2);
  EXPECT_EQ(last.hidden.cols, 5);
  EXPECT_EQ(last.head.vocab(), 7);
  EXPECT_EQ(static_cast<const void*>(last.sample.tokens), batch.memory + 16);
  EXPECT_FALSE(last.sample.edited);
  EXPECT_FALSE(last.sample.asks_more);
}

TEST(SampleCodecTest, ABatchTellsHowManyTokensItsRowsNeedUnlessOneMayNeedAny) {
  v1::SampleRequest request = Hidden();
  request.add_top_k(2);
  request.add_top_k(1);
  EXPECT_EQ(Enqueued(request).stream.last<LinearSampleArgs>().max_kept, 2);
  request.set_top_k(1, 0);  // off: any token may be drawn
  EXPECT_EQ(Enqueued(request).stream.last<LinearSampleArgs>().max_kept, 0);
  request.add_temperature(1);
  request.add_temperature(0);
  EXPECT_EQ(Enqueued(request).stream.last<LinearSampleArgs>().max_kept, 2);
}

v1::SampleRequest WithLists() {
  v1::SampleRequest request = Plain<v1::SampleRequest>(2, 40);
  for (int n : {3, 1}) request.add_history_count(n);
  for (int id : {5, 5, 6, 7}) request.add_history(id);
  for (int id : {1, 2}) request.add_logit_bias_ids(id);  // no counts: every row's
  for (float v : {0.5f, -std::numeric_limits<float>::infinity()}) request.add_logit_bias(v);
  request.add_extra_count(2);  // one count: every row's
  for (int id : {8, 9}) request.add_extra_ids(id);
  request.set_allowed_tokens(std::string("\xff\xff\xff\xff\x0f\0\0\0", 8));
  for (int mask : {-1, 0}) request.add_allowed_tokens_mask(mask);
  return request;
}

TEST(SampleCodecTest, ListsOfARowAndSharedOnesCountFromTheJobsPlaceInTheBatch) {
  Parsed p(WithLists());
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.spec.counts, (engine::AxisCounts{2, 4, 2, 2, 2, 0, 4}));
  const int64_t before = p.codec.list_bytes();
  const auto arrays = p.Inputs({10, 20, 30, 40, 50, 60, 70});
  EXPECT_LT(p.codec.list_bytes(), before);
  const auto rows = As<SampleRow>(arrays[ops::kSampleInRows.index]);
  EXPECT_EQ(rows[0].first_history, 20);
  EXPECT_EQ(rows[0].history_count, 3);
  EXPECT_EQ(rows[1].first_history, 23);
  EXPECT_EQ(rows[1].history_count, 1);
  for (const SampleRow& row : rows) {
    EXPECT_EQ(row.first_bias, 30);
    EXPECT_EQ(row.bias_count, 2);
    EXPECT_EQ(row.first_extra, 40);
    EXPECT_EQ(row.extra_count, 2);
  }
  EXPECT_EQ(rows[0].first_mask_word, -1);
  EXPECT_EQ(rows[1].first_mask_word, 50);
  EXPECT_EQ(rows[0].first_extra_entry, 70);
  EXPECT_EQ(rows[1].first_extra_entry, 72);
  EXPECT_THAT(As<int32_t>(arrays[ops::kSampleInHistory.index]), ElementsAre(5, 5, 6, 7));
  const auto bias = As<SampleBias>(arrays[ops::kSampleInBias.index]);
  EXPECT_EQ(bias[1].id, 2);
  EXPECT_EQ(bias[0].value, 0.5f);
  EXPECT_THAT(As<int32_t>(arrays[ops::kSampleInExtraIds.index]), ElementsAre(8, 9));
  EXPECT_THAT(As<uint32_t>(arrays[ops::kSampleInMaskWords.index]), ElementsAre(0xffffffffu, 15u));
}

using R = v1::SampleRequest*;
const testing::Refused<v1::SampleRequest> kRefusedSample[] = {
    {"dtype", [](R r) { r->set_dtype(v1::DTYPE_UNSPECIFIED); }, "dtype: got 0"},
    {"bytes_disagree", [](R r) { r->set_dtype(v1::DTYPE_F16); }, "logits"},
    {"vocab_0", [](R r) { r->set_vocab(0); }, "vocab"},
    {"randomness_without_a_seed", [](R r) { r->clear_seed(); },
     "seed: got none with temperature 1 at row 0, allowed 1 or 2 (rows) values"},
    {"three_seeds_for_two_rows",
     [](R r) {
       r->add_seed(1);
       r->add_seed(1);
     },
     "seed: got 3 values, allowed none, 1 or 2 (rows)"},
    {"temperature_negative", [](R r) { r->add_temperature(-1); }, "temperature: got -1"},
    {"top_k_below_minus_1", [](R r) { r->add_top_k(-2); },
     "top_k: got -2 at row 0, allowed -1 or more"},
    {"top_p_0", [](R r) { r->add_top_p(0); }, "top_p: got 0 at row 0, allowed > 0 and <= 1"},
    {"draws_above_1024", [](R r) { r->add_draws(1025); },
     "draws: got 1025 at row 0, allowed 0..1024"},
    {"prompt_longer_than_the_history", [](R r) { r->add_prompt_tokens(4); },
     "prompt_tokens: got 4 at row 0, allowed 0..3"},
    {"top_n_sigma_negative", [](R r) { r->add_top_n_sigma(-1); },
     "top_n_sigma: got -1 at row 0, allowed finite and >= 0"},
    {"top_n_sigma_nan", [](R r) { r->add_top_n_sigma(std::nanf("")); },
     "top_n_sigma: got nan at row 0, allowed finite and >= 0"},
    {"top_n_sigma_inf", [](R r) { r->add_top_n_sigma(INFINITY); },
     "top_n_sigma: got inf at row 0, allowed finite and >= 0"},
    {"typical_p_0", [](R r) { r->add_typical_p(0); },
     "typical_p: got 0 at row 0, allowed > 0 and <= 1"},
    {"xtc_threshold_above_1", [](R r) { r->add_xtc_threshold(1.5f); },
     "xtc_threshold: got 1.5 at row 0, allowed >= 0 and <= 1"},
    {"xtc_probability_negative", [](R r) { r->add_xtc_probability(-1); },
     "xtc_probability: got -1 at row 0, allowed >= 0 and <= 1"},
    {"min_p_nan", [](R r) { r->add_min_p(std::nanf("")); }, "min_p"},
    {"repetition_0", [](R r) { r->add_repetition_penalty(0); }, "repetition_penalty: got 0"},
    {"top_logprobs_beyond", [](R r) { r->add_top_logprobs(1025); }, "top_logprobs: got 1025"},
    {"top_logprobs_negative", [](R r) { r->add_top_logprobs(-1); }, "top_logprobs: got -1"},
    {"unknown_mode", [](R r) { r->add_logprob_mode(static_cast<v1::LogprobMode>(7)); },
     "logprob_mode: got 7"},
    {"counts_that_do_not_add_up", [](R r) { r->set_history_count(0, 2); },
     "history_count: got 3 in total, allowed 4, the number of values of history"},
    {"count_negative",
     [](R r) {
       r->set_history_count(0, 5);
       r->set_history_count(1, -1);
     },
     "history_count: got -1 at row 1"},
    {"counts_without_a_list", [](R r) { r->clear_history(); },
     "history_count: got 4 in total, allowed 0, the number of values of history"},
    {"one_count_of_a_part", [](R r) { r->set_extra_count(0, 1); },
     "extra_count: got 1 in total, allowed 2, the number of values of extra_ids"},
    {"history_token_beyond", [](R r) { r->set_history(3, 40); },
     "history: got token 40 at row 1, entry 0, allowed 0..39"},
    {"biases_without_ids", [](R r) { r->clear_logit_bias_ids(); },
     "logit_bias: got 2 values, allowed 0, one for each of logit_bias_ids"},
    {"bias_twice", [](R r) { r->set_logit_bias_ids(1, 1); }, "logit_bias: got token 1 twice"},
    {"half_a_mask", [](R r) { r->set_allowed_tokens("1234"); },
     "allowed_tokens: got 4 bytes, allowed a multiple of 8"},
    {"mask_index_without_masks", [](R r) { r->clear_allowed_tokens(); },
     "allowed_tokens_mask: got 0 at row 1, allowed -1..-1: allowed_tokens holds 0 masks"},
    {"more_masks_than_rows",
     [](R r) {
       r->clear_allowed_tokens_mask();
       r->set_allowed_tokens(std::string(24, '\xff'));
     },
     "allowed_tokens: got 3 masks without allowed_tokens_mask, allowed 1 or 2 (rows)"}};

TEST(SampleCodecTest, RequestsAreRefusedSayingWhichAndWhy) {
  testing::ExpectRefused(WithLists(), kRefusedSample,
                         [](const v1::SampleRequest& request) { return Parsed(request).status; });
}

TEST(SampleCodecTest, AGreedyRequestNeedsNoSeed) {
  v1::SampleRequest request = Plain<v1::SampleRequest>(2, 40);
  request.clear_seed();
  request.add_temperature(0);
  EXPECT_TRUE(Parsed(request).status.ok());
}

TEST(SampleCodecTest, ARequestWithWatermarksNeedsNoSeedExceptForXtc) {
  v1::SampleRequest request = Plain<v1::SampleRequest>(2, 5);
  request.clear_seed();
  request.add_watermark_key(~uint64_t{0});
  for (int width : {4, 0}) request.add_watermark_width(width);
  for (float t : {1.0f, 0.0f}) request.add_temperature(t);
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  const auto rows = As<SampleRow>(p.Inputs()[ops::kSampleInRows.index]);
  EXPECT_EQ(rows[0].watermark_width, 4);
  EXPECT_EQ(rows[1].watermark_key, ~uint64_t{0});
  EXPECT_EQ(p.spec.wanted & ops::kAsksMore, ops::kAsksMore);
  request.add_xtc_probability(0.5f);
  EXPECT_THAT(std::string(Parsed(request).status.message()),
              HasSubstr("seed: got none with xtc_probability 0.5 at row 0"));
}

TEST(SampleCodecTest, ASharedListCountsForEveryRow) {
  v1::SampleRequest request = Plain<v1::SampleRequest>(100, 1);
  for (int i = 0; i < 167773; ++i) request.add_history(0);  // 100 of them: just above 2^24
  EXPECT_THAT(std::string(Parsed(request).status.message()),
              HasSubstr("history: got 16777300 values over all rows, allowed 0..16777216"));
}

TEST(SampleCodecTest, MoreRowsThanABatchAreRefusedBeforeTheyCostMemory) {
  EXPECT_THAT(std::string(Parsed(Plain<v1::SampleRequest>(101, 1)).status.message()),
              HasSubstr("rows: got 101, allowed 1..100"));
}

template <typename T>
absl::Span<const std::byte> Bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(T)};
}

// Has the request ask for what Outputs holds beside its lists.
template <typename Request>
void AskForAll(Request& request) {
  for (int n : {2, 0}) request.add_top_logprobs(n);
  for (int n : {3, 1}) request.add_want_support(n);
  for (bool want : {true, false}) request.add_want_entropy(want);
  if constexpr (std::is_same_v<Request, v1::SampleRequest>) {
    for (int n : {2, 1}) request.add_draws(n);
  }
}

// Outputs of two rows with 2 extra ids each that AskForAll.
struct Outputs {
  std::vector<int32_t> tokens = {3, -1}, ranks = {1, 0}, top_ids = {3, 4}, accepted = {1};
  std::vector<float> logprobs = {-0.5f, -INFINITY}, logsumexp = {2.5f, NAN},
                     top_logprobs = {-0.5f, -1.5f}, extra = {-1, -2, -3, -4};
  // Two tokens can be drawn in the first row, none in the second: what is left is unused.
  std::vector<int32_t> support_size = {2, 0}, support_ids = {3, 4, -1, -1};
  std::vector<float> support_logprobs = {-0.5f, -1.5f, -INFINITY, -INFINITY},
                     entropies = {0.25f, 0}, raw_entropies = {0.75f, 0};
  std::vector<int32_t> draw_tokens = {3, 4, -1};
  std::vector<float> draw_logprobs = {-0.5f, -1.5f, -INFINITY};
  std::vector<RowStatus> status = {{}, {RowCode::kNanLogit, 17}};
  const std::vector<absl::Span<const std::byte>> spans = {Bytes(tokens),
                                                          Bytes(logprobs),
                                                          Bytes(ranks),
                                                          Bytes(logsumexp),
                                                          Bytes(status),
                                                          Bytes(top_ids),
                                                          Bytes(top_logprobs),
                                                          Bytes(extra),
                                                          Bytes(support_size),
                                                          Bytes(support_ids),
                                                          Bytes(support_logprobs),
                                                          Bytes(entropies),
                                                          Bytes(raw_entropies),
                                                          Bytes(draw_tokens),
                                                          Bytes(draw_logprobs),
                                                          Bytes(accepted)};
};

template <typename Response>
void ExpectOutputs(const Response& response) {
  EXPECT_THAT(response.tokens(), ElementsAre(3, -1));
  EXPECT_THAT(response.logprobs(), ElementsAre(-0.5f, -INFINITY));
  EXPECT_THAT(response.ranks(), ElementsAre(1, 0));
  EXPECT_EQ(response.logsumexp(0), 2.5f);
  EXPECT_THAT(response.status(), ElementsAre(v1::ROW_STATUS_OK, v1::ROW_STATUS_NAN_LOGIT));
  EXPECT_THAT(response.status_position(), ElementsAre(-1, 17));
  EXPECT_THAT(response.top_count(), ElementsAre(2, 0));
  EXPECT_THAT(response.top_ids(), ElementsAre(3, 4));
  EXPECT_THAT(response.top_logprobs(), ElementsAre(-0.5f, -1.5f));
  EXPECT_THAT(response.extra_count(), ElementsAre(2, 2));
  EXPECT_THAT(response.extra_logprobs(), ElementsAre(-1, -2, -3, -4));
  EXPECT_THAT(response.support_size(), ElementsAre(2, 0));
  EXPECT_THAT(response.support_count(), ElementsAre(2, 0));
  EXPECT_THAT(response.support_ids(), ElementsAre(3, 4));
  EXPECT_THAT(response.support_logprobs(), ElementsAre(-0.5f, -1.5f));
  EXPECT_THAT(response.entropies(), ElementsAre(0.25f, 0));
  EXPECT_THAT(response.raw_entropies(), ElementsAre(0.75f, 0));
  EXPECT_EQ(response.timings().total_ns(), 9);
}

TEST(SampleCodecTest, AnswerIsWhatGeneratedCodeReads) {
  v1::SampleRequest request = WithLists();
  AskForAll(request);
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  p.Inputs();
  const Outputs outputs;
  const std::string bytes =
      p.codec
          .Encode({.outputs = absl::MakeConstSpan(outputs.spans).first(ops::kSampleOutputs.size())},
                  {.receive_ns = 1, .total_ns = 9})
          .ToString();
  EXPECT_LE(static_cast<int64_t>(bytes.size()), p.codec.answer_bytes());
  v1::SampleResponse response;
  ASSERT_TRUE(response.ParseFromString(bytes));
  ExpectOutputs(response);
  EXPECT_THAT(response.draw_count(), ElementsAre(2, 1));
  EXPECT_THAT(response.draw_tokens(), ElementsAre(3, 4, -1));
  EXPECT_THAT(response.draw_logprobs(), ElementsAre(-0.5f, -1.5f, -INFINITY));
  EXPECT_EQ(response.SerializeAsString(), bytes);
}

// Four rows of two sequences: drafts by a list and greedy; then one row without a draft; then a
// dense one.
v1::VerifyRequest Drafts() {
  v1::VerifyRequest request = Plain<v1::VerifyRequest>(6, 4);
  for (int rows : {3, 1, 2}) request.add_sequence_rows(rows);
  for (int draft : {2, 0, 3}) request.add_drafts(draft);
  for (v1::DraftKind kind : {v1::DRAFT_KIND_LIST, v1::DRAFT_KIND_GREEDY, v1::DRAFT_KIND_DENSE}) {
    request.add_draft_kind(kind);
  }
  request.add_draft_count(2);
  for (int id : {1, 2}) request.add_draft_ids(id);
  const std::vector<float> probs = {0.25f, 0.75f, 0.1f, 0.2f, 0.3f, 0.4f};
  request.set_draft_probs(std::string(reinterpret_cast<const char*>(probs.data()), 24));
  return request;
}

TEST(SampleCodecTest, AnAnswerSaysTheVersionOfItsHead) {
  v1::SampleRequest request = Hidden();
  AskForAll(request);
  for (int id : {0, 1}) request.add_extra_ids(id);
  Parsed p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  const Outputs outputs;
  const std::string bytes = p.codec.Encode({.outputs = outputs.spans}, {}).ToString();
  v1::SampleResponse response;
  ASSERT_TRUE(response.ParseFromString(bytes));
  EXPECT_EQ(response.head_version(), testing::OneHead::kVersion);
  EXPECT_EQ(response.SerializeAsString(), bytes);
}

TEST(VerifyCodecTest, SequencesAndDraftsCountFromTheJobsPlaceInTheBatch) {
  ParsedVerify p(Drafts());
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.spec.key.op, &ops::kVerifyTraits);
  EXPECT_EQ(p.spec.counts, (engine::AxisCounts{6, 0, 0, 0, 0, 0, 0, 0, 0, 2, 6, 3}));
  const auto arrays = p.Inputs({10, 0, 0, 0, 0, 0, 0, 0, 0, 20, 30, 40});
  const auto sequences = As<VerifySequence>(arrays[ops::kVerifyInSequences.index]);
  EXPECT_EQ(sequences[0].first_row, 10);
  EXPECT_EQ(sequences[1].first_row, 13);
  EXPECT_EQ(sequences[2].first_row, 14);
  EXPECT_EQ(sequences[2].rows, 2);
  const auto drafts = As<VerifyDraft>(arrays[ops::kVerifyInDrafts.index]);
  EXPECT_EQ(drafts[0].token, 2);
  EXPECT_EQ(drafts[0].kind, DraftKind::kList);
  EXPECT_EQ(drafts[0].first_id, 20);
  EXPECT_EQ(drafts[0].first_prob, 30);
  EXPECT_EQ(drafts[0].count, 2);
  EXPECT_EQ(drafts[1].token, 0);
  EXPECT_EQ(drafts[1].kind, DraftKind::kGreedy);
  EXPECT_EQ(drafts[4].token, 3);
  EXPECT_EQ(drafts[4].kind, DraftKind::kDense);
  EXPECT_EQ(drafts[4].first_prob, 32);
  EXPECT_THAT(As<int32_t>(arrays[ops::kVerifyInDraftIds.index]), ElementsAre(1, 2));
  EXPECT_THAT(As<float>(arrays[ops::kVerifyInDraftProbs.index]),
              ElementsAre(0.25f, 0.75f, 0.1f, 0.2f, 0.3f, 0.4f));
}

TEST(VerifyCodecTest, HiddenStatesAreAJobOfTheirHead) {
  v1::VerifyRequest request = Hidden<v1::VerifyRequest>();
  request.add_sequence_rows(2);
  request.add_drafts(2);
  ParsedVerify p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.spec.key.op, &ops::kLinearVerifyTraits);
  EXPECT_EQ(p.spec.key.row_elements, 2);
  EXPECT_EQ(p.spec.key.head, p.heads.watch().lock().get());
  EXPECT_TRUE(p.spec.whole);
  const Outputs outputs;
  const std::string bytes = p.codec.Encode({.outputs = outputs.spans}, {}).ToString();
  EXPECT_LE(static_cast<int64_t>(bytes.size()), p.codec.answer_bytes());
  v1::VerifyResponse response;
  ASSERT_TRUE(response.ParseFromString(bytes));
  EXPECT_EQ(response.head_version(), testing::OneHead::kVersion);
  EXPECT_THAT(response.accepted(), ElementsAre(1));

  request.set_drafts(0, 3);  // the head has 3 tokens
  EXPECT_THAT(std::string(ParsedVerify(request).status.message()),
              HasSubstr("drafts: got token 3 at row 0, allowed 0..2"));
  request.set_drafts(0, 2);
  request.set_head_version(8);
  EXPECT_EQ(ParsedVerify(request).status.code(), absl::StatusCode::kFailedPrecondition);
}

TEST(VerifyCodecTest, BlockVerificationIsOfAllSequences) {
  v1::VerifyRequest request = Drafts();
  request.set_draft_kind(1, v1::DRAFT_KIND_LIST);
  for (int id : {0, 1}) request.add_draft_ids(id);
  const std::vector<float> probs = {0.25f, 0.75f, 0.5f, 0.5f, 0.1f, 0.2f, 0.3f, 0.4f};
  request.set_draft_probs(std::string(reinterpret_cast<const char*>(probs.data()), 32));
  for (const bool block : {false, true}) {
    request.set_block_verification(block);
    ParsedVerify p(request);
    ASSERT_TRUE(p.status.ok()) << p.status;
    EXPECT_EQ((p.spec.wanted & ops::kBlockVerification) != 0, block);
    for (const VerifySequence& sequence :
         As<VerifySequence>(p.Inputs()[ops::kVerifyInSequences.index])) {
      EXPECT_EQ(sequence.block, block ? 1 : 0);
    }
  }
}

TEST(VerifyCodecTest, ATopKThatKeepsAllIsTaken) {
  v1::VerifyRequest request = Drafts();
  for (int k : {0, -1, 4, 5, 1 << 20, 3}) request.add_top_k(k);
  EXPECT_TRUE(ParsedVerify(request).status.ok()) << ParsedVerify(request).status;
}

TEST(VerifyCodecTest, NoKindsMeanGreedyDrafts) {
  v1::VerifyRequest request = Plain<v1::VerifyRequest>(2, 4);
  request.add_sequence_rows(2);
  request.add_drafts(1);
  ParsedVerify p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(As<VerifyDraft>(p.Inputs()[ops::kVerifyInDrafts.index])[0].kind, DraftKind::kGreedy);
}

using V = v1::VerifyRequest*;
const testing::Refused<v1::VerifyRequest> kRefusedVerify[] = {
    {"what_sample_refuses_too", [](V r) { r->add_top_k(-2); },
     "top_k: got -2 at row 0, allowed -1 or more"},
    {"draws", [](V r) { r->add_draws(1); },
     "draws: got 1 at row 0, allowed 0: a sequence has one token at a row"},
    {"no_sequences", [](V r) { r->clear_sequence_rows(); },
     "sequence_rows: got 0 in total, allowed 6 (rows)"},
    {"sequence_of_nothing", [](V r) { r->set_sequence_rows(1, 0); },
     "sequence_rows: got 0 at sequence 1, allowed 1..3"},
    {"more_rows_than_sent", [](V r) { r->set_sequence_rows(2, 3); },
     "sequence_rows: got 3 at sequence 2, allowed 1..2"},
    {"a_draft_too_many", [](V r) { r->add_drafts(1); },
     "drafts: got 4 values, allowed 3: rows 6 less sequences 3"},
    {"draft_beyond_vocab", [](V r) { r->set_drafts(1, 4); }, "drafts: got token 4"},
    {"draft_not_in_its_list", [](V r) { r->set_drafts(0, 3); },
     "drafts: got token 3 at row 0, allowed one of its 2 draft_ids"},
    {"list_out_of_order", [](V r) { r->set_draft_ids(1, 1); }, "allowed ascending"},
    {"two_kinds_for_three_drafts", [](V r) { r->mutable_draft_kind()->RemoveLast(); },
     "draft_kind: got 2 values, allowed none, 1 or 3 (drafts)"},
    {"unknown_kind", [](V r) { r->set_draft_kind(1, static_cast<v1::DraftKind>(3)); },
     "draft_kind: got 3 at row 1"},
    {"lists_without_counts", [](V r) { r->clear_draft_count(); },
     "draft_count: got 0 values, allowed 1, or one for each draft of DRAFT_KIND_LIST: "
     "draft 0 has none"},
    {"counts_without_lists",
     [](V r) {
       r->clear_draft_kind();
       r->clear_draft_ids();
       r->clear_draft_probs();
     },
     "draft_count: got 1 values, allowed 1 for all or one for each of 0 drafts"},
    {"ids_too_few", [](V r) { r->mutable_draft_ids()->RemoveLast(); },
     "draft_ids: got 1 values, allowed 2, the sum of draft_count"},
    {"probabilities_of_greedy_drafts", [](V r) { r->set_draft_kind(2, v1::DRAFT_KIND_GREEDY); },
     "draft_probs: got 6 values, allowed 2"},
    {"block_verification_of_a_greedy_draft", [](V r) { r->set_block_verification(true); },
     "draft_kind: got greedy at row 1, allowed list, dense with block_verification"},
    {"half_a_float", [](V r) { r->mutable_draft_probs()->pop_back(); },
     "draft_probs: got 23 bytes"}};

TEST(VerifyCodecTest, RequestsAreRefusedSayingWhichAndWhy) {
  testing::ExpectRefused(Drafts(), kRefusedVerify, [](const v1::VerifyRequest& request) {
    return ParsedVerify(request).status;
  });
}

TEST(VerifyCodecTest, AnswerIsWhatGeneratedCodeReads) {
  v1::VerifyRequest request = Plain<v1::VerifyRequest>(2, 40);
  request.add_sequence_rows(2);
  request.add_drafts(3);
  AskForAll(request);
  for (int id : {8, 9}) request.add_extra_ids(id);
  ParsedVerify p(request);
  ASSERT_TRUE(p.status.ok()) << p.status;
  p.Inputs();
  const Outputs outputs;
  const std::string bytes =
      p.codec.Encode({.outputs = outputs.spans}, {.receive_ns = 1, .total_ns = 9}).ToString();
  EXPECT_LE(static_cast<int64_t>(bytes.size()), p.codec.answer_bytes());
  v1::VerifyResponse response;
  ASSERT_TRUE(response.ParseFromString(bytes));
  ExpectOutputs(response);
  EXPECT_THAT(response.accepted(), ElementsAre(1));
  EXPECT_EQ(response.SerializeAsString(), bytes);
}

// --- the reader, with generated code as the judge

TEST(SampleWireTest, MessagesAreJudgedAsGeneratedCodeJudgesThem) {
  const std::string sample = WithLists().SerializeAsString();
  const std::string verify = Drafts().SerializeAsString();
  testing::ExpectCutAgrees(sample, &testing::SampleRequestDisagreement);
  testing::ExpectCutAgrees(verify, &testing::VerifyRequestDisagreement);
  for (const testing::Judge judge :
       {&testing::SampleRequestDisagreement, &testing::VerifyRequestDisagreement}) {
    testing::ExpectDamagedAgree({sample, verify}, 4000, judge);
  }
  testing::ExpectCorpusAgrees("sample_request_fuzz", &testing::SampleRequestDisagreement);
  testing::ExpectCorpusAgrees("verify_request_fuzz", &testing::VerifyRequestDisagreement);
}

}  // namespace
}  // namespace logitd::rpc

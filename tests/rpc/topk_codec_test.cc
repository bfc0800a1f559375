// Sampler.TopK's codec: proto in, job parts out, and back.
#include "server/rpc/codecs/topk_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "logitd/v1/sampler.pb.h"
#include "tests/fake_backend.h"
#include "tests/rpc/one_head.h"

namespace logitd::rpc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::TopKRequest Request(int64_t rows, int64_t vocab, const std::vector<int32_t>& k,
                        const std::vector<float>& temperature = {}) {
  v1::TopKRequest request;
  request.set_dtype(v1::DTYPE_F32);
  request.set_rows(rows);
  request.set_vocab(vocab);
  std::string logits(static_cast<size_t>(rows * vocab) * sizeof(float), '\0');
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<char>(i);
  request.set_logits(logits);
  for (const int32_t value : k) request.add_k(value);
  for (const float value : temperature) request.add_temperature(value);
  return request;
}

using Parsed = testing::ParsedAs<TopKCodec, v1::TopKRequest>;
constexpr int64_t kMaxRows = Parsed::kMaxRows;

void WriteRows(TopKCodec* codec, SoftmaxTopKRow* rows, int64_t first_entry) {
  std::byte* const inputs[] = {reinterpret_cast<std::byte*>(rows)};
  codec->WriteInputs(inputs, {0, first_entry});
}

TEST(TopKCodecTest, OneKForAllRows) {
  Parsed p(Request(3, 5, {2}));
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.spec.key.op, &ops::kSoftmaxTopKTraits);
  EXPECT_EQ(p.spec.key.dtype, DType::kF32);
  EXPECT_EQ(p.spec.key.row_elements, 5);
  EXPECT_EQ(p.spec.rows(), 3);
  EXPECT_EQ(p.spec.counts[ops::kTopKEntries], 6);
  EXPECT_EQ(p.spec.max_row_entries, 2);
}

TEST(TopKCodecTest, KAndTemperaturePerRowReachTheParameters) {
  Parsed p(Request(3, 5, {2, 1, 5}, {0.5f, 1.0f, 2.0f}));
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.spec.counts[ops::kTopKEntries], 8);
  EXPECT_EQ(p.spec.max_row_entries, 5);
  SoftmaxTopKRow rows[3];
  WriteRows(&p.codec, rows, 100);
  EXPECT_EQ(rows[0].first_entry, 100);
  EXPECT_EQ(rows[1].first_entry, 102);
  EXPECT_EQ(rows[2].first_entry, 103);
  EXPECT_EQ(rows[0].temperature, 0.5f);
  EXPECT_EQ(rows[2].temperature, 2.0f);
  EXPECT_EQ(rows[1].k, 1);
  EXPECT_EQ(rows[2].k, 5);
}

TEST(TopKCodecTest, NoTemperatureIsOne) {
  Parsed p(Request(2, 5, {1}));
  SoftmaxTopKRow rows[2];
  WriteRows(&p.codec, rows, 0);
  EXPECT_EQ(rows[0].temperature, 1.0f);
  EXPECT_EQ(rows[1].temperature, 1.0f);
}

TEST(TopKCodecTest, PayloadReachesItsStride) {
  const v1::TopKRequest request = Request(2, 3, {1});
  Parsed p(request);
  std::vector<char> slab(2 * 16, '.');
  CopyRows(p.pieces(), p.codec.payload(), reinterpret_cast<std::byte*>(slab.data()), 16);
  EXPECT_EQ(std::string(slab.data(), 12), request.logits().substr(0, 12));
  EXPECT_EQ(std::string(slab.data() + 12, 4), "....");
  EXPECT_EQ(std::string(slab.data() + 16, 12), request.logits().substr(12));
}

// Two rows of hidden states for the head of one_head.h.
v1::TopKRequest HiddenRequest() {
  v1::TopKRequest request;
  request.set_dtype(v1::DTYPE_F32);
  request.set_rows(2);
  request.set_head("h");
  request.set_hidden_size(2);
  request.set_hidden(std::string("0123456789abcdef"));
  request.add_k(3);
  return request;
}

TEST(TopKCodecTest, HiddenStatesAreAJobOfTheirHead) {
  Parsed p(HiddenRequest());
  ASSERT_TRUE(p.status.ok()) << p.status;
  EXPECT_EQ(p.spec.key.op, &ops::kLinearTopKTraits);
  EXPECT_EQ(&p.codec.op(), &ops::kLinearTopKTraits);
  EXPECT_EQ(p.spec.key.row_elements, 2);
  EXPECT_EQ(p.spec.key.head, p.heads.watch().lock().get());
  EXPECT_EQ(p.spec.counts, (engine::AxisCounts{2, 6}));
  EXPECT_EQ(p.codec.payload().row_bytes, 8u);
  EXPECT_EQ(p.codec.payload().range.bytes, 16u);
}

TEST(TopKCodecTest, RequestsOfOneHeadShareABatchAndThoseOfLogitsDoNot) {
  testing::OneHead heads;
  const auto key = [&](const v1::TopKRequest& request) {
    TopKCodec codec(heads.Find());
    engine::JobSpec spec;
    const std::string bytes = request.SerializeAsString();
    const Piece piece(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
    EXPECT_TRUE(codec.Parse(Pieces(&piece, 1), kMaxRows, &spec).ok());
    return spec.key;
  };
  v1::TopKRequest other = HiddenRequest();
  other.set_rows(1);
  other.set_hidden("01234567");
  other.set_vocab(3);  // it may be said
  EXPECT_EQ(key(HiddenRequest()), key(other));
  EXPECT_FALSE(key(HiddenRequest()) == key(Request(2, 2, {1})));
}

TEST(TopKCodecTest, ADemandedVersionIsServedAndAnswersSayTheirs) {
  v1::TopKRequest request = HiddenRequest();
  for (const int64_t demanded : {int64_t{0}, testing::OneHead::kVersion}) {
    request.set_head_version(demanded);
    Parsed p(request);
    ASSERT_TRUE(p.status.ok()) << p.status;
    const std::vector<std::byte> zeros(64);
    const absl::Span<const std::byte> outputs[] = {
        absl::MakeSpan(zeros).first(8), absl::MakeSpan(zeros).first(2 * sizeof(RowStatus)),
        absl::MakeSpan(zeros).first(24), absl::MakeSpan(zeros).first(24)};
    const EncodedMessage answer = p.codec.Encode({.outputs = outputs}, {});
    v1::TopKResponse response;
    ASSERT_TRUE(response.ParseFromString(answer.ToString()));
    EXPECT_EQ(response.head_version(), testing::OneHead::kVersion);
    EXPECT_EQ(response.SerializeAsString(), answer.ToString());
  }
}

TEST(TopKCodecTest, AnUnloadedHeadLivesAsLongAsItsCall) {
  std::weak_ptr<const engine::Head> watch;
  {
    Parsed p(HiddenRequest());
    watch = p.heads.watch();
    p.heads.Unload();
    EXPECT_EQ(p.spec.key.head, watch.lock().get());
    EXPECT_FALSE(watch.expired());
  }
  EXPECT_TRUE(watch.expired());
}

using R = v1::TopKRequest*;
const testing::Refused<v1::TopKRequest> kRefusedHidden[] = {
    {"unknown_head", [](R r) { r->set_head("g"); }, "no head g, only h",
     absl::StatusCode::kNotFound},
    {"no_head", [](R r) { r->clear_head(); },
     "head: got none with hidden states, allowed a loaded head"},
    {"head_of_logits", [](R r) { r->set_logits("01234567"); },
     "head: got \"h\", but the input is logits"},
    {"unknown_head_of_logits",
     [](R r) {
       r->set_head("g");
       r->set_logits("01234567");
     },
     "head: got \"g\", but the input is logits"},
    {"head_of_nothing", [](R r) { r->clear_hidden(); },
     "head: got \"h\", but the input is missing"},
    {"name_too_long", [](R r) { r->set_head(std::string(129, 'h')); },
     "head: got a name of 129 bytes, allowed 1..128"},
    {"vocab_of_another", [](R r) { r->set_vocab(4); },
     "vocab: got 4, allowed 3, which is that of head h, or 0"},
    {"hidden_size_of_another", [](R r) { r->set_hidden_size(4); }, "hidden"},
    {"no_hidden_size", [](R r) { r->clear_hidden_size(); }, "hidden"},
    {"dtype_of_another", [](R r) { r->set_dtype(v1::DTYPE_BF16); }, "dtype"},
    {"bytes_missing", [](R r) { r->mutable_hidden()->pop_back(); }, "hidden"},
    {"k_beyond_the_heads_vocab", [](R r) { r->set_k(0, 4); }, "k: got 4 at row 0, allowed 1..3"},
    {"hidden_size_of_logits",
     [](R r) {
       r->clear_head();
       r->set_vocab(2);
       r->set_logits("0123456789abcdef");
     },
     "hidden_size: got 2, allowed 0"},
    {"another_version", [](R r) { r->set_head_version(6); },
     "head_version: got 6, allowed 7, which head h has, or 0",
     absl::StatusCode::kFailedPrecondition},
    {"no_version", [](R r) { r->set_head_version(-1); }, "head_version: got -1, allowed 0.."}};

TEST(TopKCodecTest, HiddenStatesAreRefusedNamingTheField) {
  testing::ExpectRefused(HiddenRequest(), kRefusedHidden,
                         [](const v1::TopKRequest& request) { return Parsed(request).status; });
}

const testing::Refused<v1::TopKRequest> kRefusedLogits[] = {
    {"no_dtype", [](R r) { r->clear_dtype(); }, "dtype: got 0"},
    {"dtype_of_the_future", [](R r) { r->set_dtype(static_cast<v1::DType>(9)); }, "dtype: got 9"},
    {"no_logits", [](R r) { r->clear_logits(); }, "logits"},
    {"dtype_disagrees_with_bytes", [](R r) { r->set_dtype(v1::DTYPE_F16); }, "logits"},
    {"rows_0", [](R r) { r->set_rows(0); }, "rows: got 0, allowed 1..100"},
    {"rows_negative", [](R r) { r->set_rows(-2); }, "rows: got -2, allowed 1..100"},
    {"rows_that_overflow", [](R r) { r->set_rows(int64_t{1} << 62); },
     "rows: got 4611686018427387904, allowed 1..100"},
    {"vocab_negative", [](R r) { r->set_vocab(-4); }, "vocab: got -4, allowed 1..1048576"},
    {"vocab_beyond_2_20", [](R r) { r->set_vocab((1 << 20) + 1); },
     "vocab: got 1048577, allowed 1..1048576"},
    {"no_k", [](R r) { r->clear_k(); }, "k: got none, allowed 1 or 2 (rows)"},
    {"k_0", [](R r) { r->set_k(0, 0); }, "k: got 0 at row 0, allowed 1..4"},
    {"k_beyond_vocab", [](R r) { r->set_k(0, 5); }, "k: got 5 at row 0, allowed 1..4"},
    {"three_k_for_two_rows",
     [](R r) {
       r->add_k(1);
       r->add_k(1);
     },
     "k: got 3 values, allowed 1 or 2 (rows)"},
    {"more_k_than_any_batch_has_rows",
     [](R r) {
       for (int64_t i = 0; i < kMaxRows; ++i) r->add_k(1);
     },
     "k: got more than 100 values, allowed one for each row, at most 100"},
    {"temperature_0", [](R r) { r->add_temperature(0); },
     "temperature: got 0 at row 0, allowed finite and > 0"},
    {"temperature_nan", [](R r) { r->add_temperature(std::nanf("")); },
     "temperature: got nan at row 0, allowed finite and > 0"},
    {"two_temperatures_for_one_row",
     [](R r) {
       *r = Request(1, 4, {2}, {1, 2});
     },
     "temperature: got 2 values, allowed none or 1 (rows)"},
    {"version_of_logits", [](R r) { r->set_head_version(7); },
     "head_version: got 7, allowed only with hidden states"}};

TEST(TopKCodecTest, RequestsAreRefusedNamingTheField) {
  testing::ExpectRefused(Request(2, 4, {2}), kRefusedLogits,
                         [](const v1::TopKRequest& request) { return Parsed(request).status; });
}

template <typename T>
absl::Span<const std::byte> Bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(T)};
}

TEST(TopKCodecTest, AnswerIsWhatGeneratedCodeReads) {
  Parsed p(Request(3, 200, {1, 200, 2}));
  ASSERT_TRUE(p.status.ok());
  std::vector<float> logsumexp = {1.5f, -2.5f, 3.0f};
  std::vector<RowStatus> status = {{}, {RowCode::kNanLogit, 77}, {RowCode::kEmptySupport, -1}};
  std::vector<int32_t> indices(203);
  std::vector<float> probs(203);
  for (int i = 0; i < 203; ++i) {
    indices[i] = 1000 - i;
    probs[i] = 1.0f / static_cast<float>(i + 1);
  }
  const absl::Span<const std::byte> outputs[] = {Bytes(logsumexp), Bytes(status), Bytes(indices),
                                                 Bytes(probs)};
  const EncodedMessage answer = p.codec.Encode({.outputs = outputs}, {.receive_ns = 1,
                                                                      .total_ns = int64_t{1} << 40,
                                                                      .job = {.copy_ns = 2,
                                                                              .queue_ns = 3,
                                                                              .h2d_ns = 0,
                                                                              .kernel_ns = 5,
                                                                              .d2h_ns = 6,
                                                                              .batch_rows = 7}});
  EXPECT_LE(answer.bytes(), p.codec.answer_bytes());
  v1::TopKResponse response;
  ASSERT_TRUE(response.ParseFromString(answer.ToString()));
  EXPECT_THAT(response.k(), ElementsAre(1, 200, 2));
  EXPECT_EQ(std::vector<int32_t>(response.indices().begin(), response.indices().end()), indices);
  EXPECT_EQ(std::vector<float>(response.probs().begin(), response.probs().end()), probs);
  EXPECT_THAT(response.logsumexp(), ElementsAre(1.5f, -2.5f, 3.0f));
  EXPECT_THAT(response.status(), ElementsAre(v1::ROW_STATUS_OK, v1::ROW_STATUS_NAN_LOGIT,
                                             v1::ROW_STATUS_EMPTY_SUPPORT));
  EXPECT_THAT(response.status_position(), ElementsAre(-1, 77, -1));
  EXPECT_EQ(response.timings().receive_ns(), 1);
  EXPECT_EQ(response.timings().copy_ns(), 2);
  EXPECT_EQ(response.timings().queue_ns(), 3);
  EXPECT_EQ(response.timings().h2d_ns(), 0);
  EXPECT_EQ(response.timings().kernel_ns(), 5);
  EXPECT_EQ(response.timings().d2h_ns(), 6);
  EXPECT_EQ(response.timings().batch_rows(), 7);
  EXPECT_EQ(response.timings().total_ns(), int64_t{1} << 40);
  // Byte for byte what generated code would have sent.
  EXPECT_EQ(response.SerializeAsString(), answer.ToString());
}

TEST(TopKCodecTest, EnqueueHandsTheBatchAndItsHeadToTheOp) {
  alignas(16) std::byte memory[64];
  std::byte* const inputs[] = {memory + 40};
  std::byte* const outputs[] = {memory, memory + 8, memory + 16, memory + 32};
  const HeadView head = {.weight = {.rows = 7, .cols = 5}, .softcap = 3};
  engine::BatchView batch = {.dtype = DType::kBF16,
                             .counts = {3, 9},
                             .row_elements = 5,
                             .row_stride = 16,
                             .payload = memory + 48,
                             .max_row_entries = 4,
                             .inputs = inputs,
                             .outputs = outputs};
  FakeStream stream;
  ASSERT_TRUE(ops::kSoftmaxTopKTraits.enqueue(stream, batch).ok());
  const SoftmaxTopKArgs& last = stream.last<SoftmaxTopKArgs>();
  EXPECT_EQ(last.logits.data, memory + 48);
  EXPECT_EQ(last.logits.dtype, DType::kBF16);
  EXPECT_EQ(last.logits.rows, 3);
  EXPECT_EQ(last.logits.cols, 5);
  EXPECT_EQ(last.logits.row_stride, 8);
  EXPECT_EQ(last.max_k, 4);
  EXPECT_EQ(static_cast<const void*>(last.rows), memory + 40);
  EXPECT_EQ(static_cast<const void*>(last.logsumexp), outputs[ops::kTopKLogsumexp.index]);
  EXPECT_EQ(static_cast<const void*>(last.status), outputs[ops::kTopKStatus.index]);
  EXPECT_EQ(static_cast<const void*>(last.indices), outputs[ops::kTopKIndices.index]);
  EXPECT_EQ(static_cast<const void*>(last.probs), outputs[ops::kTopKProbs.index]);
  EXPECT_EQ(ops::kSoftmaxTopKTraits.outputs[ops::kTopKStatus.index].bytes, sizeof(RowStatus));

  batch.head = &head;
  ASSERT_TRUE(ops::kLinearTopKTraits.enqueue(stream, batch).ok());
  const auto& linear = stream.last<LinearTopKArgs>();
  EXPECT_EQ(linear.hidden.data, memory + 48);
  EXPECT_EQ(linear.hidden.cols, 5);
  EXPECT_EQ(linear.hidden.row_stride, 8);
  EXPECT_EQ(linear.head.vocab(), 7);
  EXPECT_EQ(linear.head.softcap, 3);
  EXPECT_EQ(linear.topk.max_k, 4);
  EXPECT_EQ(static_cast<const void*>(linear.topk.probs), outputs[ops::kTopKProbs.index]);
}

}  // namespace
}  // namespace logitd::rpc

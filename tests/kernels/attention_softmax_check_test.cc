// What CheckAttentionSoftmax lets through, and what it says about the rest.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attention_softmax.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {
namespace {

// The request is for all rows of a [2, 3, 5, 7] f32 tensor, changed by the case.

struct CheckCase {
  const char* name;
  std::function<void(AttentionSoftmaxRequest&)> change;
  std::string want;  // "" = allowed
  std::vector<float> sinks = {};
};

absl::Status Check(const CheckCase& c) {
  AttentionSoftmaxRequest request;
  request.shape = {.batch = 2, .heads = 3, .queries = 5, .keys = 7, .rows = 30};
  request.payload_bytes = 30 * 7 * 4;
  c.change(request);
  request.sinks = c.sinks;
  return CheckAttentionSoftmax(request);
}

using Request = AttentionSoftmaxRequest;
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

void Bool(Request& r, int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t bytes) {
  r.mask = MaskKind::kBool;
  const int64_t shape[4] = {batch, heads, queries, keys};
  for (int axis = 0; axis < 4; ++axis) r.mask_shape[axis] = shape[axis];
  r.mask_bytes = bytes;
}

const CheckCase kCases[] = {
    {"the whole tensor", [](Request&) {}, ""},
    {"a chunk of rows",
     [](Request& r) {
       r.shape.first_row = 13;
       r.shape.rows = 17;
       r.payload_bytes = 17 * 7 * 4;
     },
     ""},
    {"half the bytes for bf16",
     [](Request& r) {
       r.dtype = r.out_dtype = DType::kBF16;
       r.payload_bytes /= 2;
     },
     ""},
    {"f32 out of f16",
     [](Request& r) {
       r.dtype = DType::kF16;
       r.payload_bytes /= 2;
     },
     ""},
    {"backward of f32 into bf16",
     [](Request& r) {
       r.backward = true;
       r.out_dtype = DType::kBF16;
     },
     ""},
    {"longest row",
     [](Request& r) {
       r.shape = {.batch = 1, .heads = 1, .queries = 1, .keys = 1 << 20, .rows = 1};
       r.payload_bytes = 4 << 20;
     },
     ""},
    {"a chunk of a tensor of half an exabyte",
     [](Request& r) {
       r.shape = {.batch = 1 << 20,
                  .heads = 1 << 20,
                  .queries = 1,
                  .keys = 1 << 20,
                  .first_row = (int64_t{1} << 40) - 1,
                  .rows = 1};
       r.payload_bytes = 4 << 20;
     },
     ""},
    {"windows of any size",
     [](Request& r) {
       r.window = {0, kMost};
     },
     ""},
    {"negative scale", [](Request& r) { r.scale = -2; }, ""},
    {"unknown dtype", [](Request& r) { r.dtype = static_cast<DType>(9); },
     "dtype: got 9, allowed f32, f16, bf16"},
    {"unknown out dtype", [](Request& r) { r.out_dtype = static_cast<DType>(9); },
     "out_dtype: got 9, allowed f32, f16, bf16"},
    {"f16 out of f32", [](Request& r) { r.out_dtype = DType::kF16; },
     "out_dtype: got f16, allowed f32"},
    {"f16 out of bf16",
     [](Request& r) {
       r.dtype = DType::kBF16;
       r.out_dtype = DType::kF16;
     },
     "out_dtype: got f16, allowed bf16, f32"},
    {"backward of f16 into f32",
     [](Request& r) {
       r.backward = true;
       r.dtype = DType::kF16;
     },
     "out_dtype: got f32, allowed f16"},
    {"no keys", [](Request& r) { r.shape.keys = 0; }, "keys: got 0, allowed 1..1048576"},
    {"keys too many", [](Request& r) { r.shape.keys = 1048577; },
     "keys: got 1048577, allowed 1..1048576"},
    {"no queries", [](Request& r) { r.shape.queries = 0; },
     "queries: got 0, allowed 1..329406144173384850"},
    {"queries whose bytes overflow", [](Request& r) { r.shape.queries = kMost; },
     "queries: got 9223372036854775807, allowed 1..329406144173384850"},
    {"no heads", [](Request& r) { r.shape.heads = 0; },
     "heads: got 0, allowed 1..65881228834676970"},
    {"heads whose bytes overflow", [](Request& r) { r.shape.heads = kMost; },
     "heads: got 9223372036854775807, allowed 1..65881228834676970"},
    {"negative batch", [](Request& r) { r.shape.batch = -1; },
     "batch: got -1, allowed 1..21960409611558990"},
    {"batch whose bytes overflow", [](Request& r) { r.shape.batch = kMost / 2; },
     "batch: got 4611686018427387903, allowed 1..21960409611558990"},
    {"first row after the last", [](Request& r) { r.shape.first_row = 30; },
     "first_row: got 30, allowed 0..29"},
    {"negative first row", [](Request& r) { r.shape.first_row = -1; },
     "first_row: got -1, allowed 0..29"},
    {"no rows", [](Request& r) { r.shape.rows = 0; }, "rows: got 0, allowed 1..30"},
    {"rows beyond the tensor", [](Request& r) { r.shape.first_row = 1; },
     "rows: got 30, allowed 1..29"},
    {"rows that overflow", [](Request& r) { r.shape.rows = kMost; },
     "rows: got 9223372036854775807, allowed 1..30"},
    {"one byte short", [](Request& r) { --r.payload_bytes; },
     "scores: got 839 bytes, but rows 30 x keys 7 x f32 is 840 bytes"},
    {"bytes of the tensor for a chunk", [](Request& r) { r.shape.rows = 10; },
     "scores: got 840 bytes, but rows 10 x keys 7 x f32 is 280 bytes"},
    {"backward bytes",
     [](Request& r) {
       r.backward = true;
       r.payload_bytes *= 2;
     },
     "probs: got 1680 bytes, but rows 30 x keys 7 x f32 is 840 bytes"},
    {"scale nan", [](Request& r) { r.scale = kNan; }, "scale: got nan, allowed finite"},
    {"scale inf", [](Request& r) { r.scale = -kInf; }, "scale: got -inf, allowed finite"},
    {"window left negative", [](Request& r) { r.window.left = -2; },
     "window_left: got -2, allowed >= 0, or -1 for unbounded"},
    {"window right negative",
     [](Request& r) { r.window.right = std::numeric_limits<int64_t>::min(); },
     "window_right: got -9223372036854775808, allowed >= 0, or -1 for unbounded"},
    {"mask of the whole tensor", [](Request& r) { Bool(r, 2, 3, 5, 7, 210); }, ""},
    {"mask shared by all", [](Request& r) { Bool(r, 1, 1, 1, 7, 7); }, ""},
    {"additive mask shared by heads",
     [](Request& r) {
       Bool(r, 2, 1, 5, 7, 140);
       r.mask = MaskKind::kAdditive;
       r.mask_dtype = DType::kF16;
     },
     ""},
    {"the type of the mask matters only if it adds",
     [](Request& r) {
       Bool(r, 1, 1, 1, 7, 7);
       r.mask_dtype = static_cast<DType>(9);
     },
     ""},
    {"unknown mask", [](Request& r) { r.mask = static_cast<MaskKind>(3); },
     "mask: got kind 3, allowed none, bool, additive"},
    {"bytes without a mask", [](Request& r) { r.mask_bytes = 7; },
     "mask: got 7 bytes, allowed 0 where its kind is none"},
    {"mask for the backward",
     [](Request& r) {
       Bool(r, 1, 1, 1, 7, 7);
       r.backward = true;
     },
     "mask: got one, allowed none for the backward: probs of 0 say what was masked"},
    {"unknown mask dtype",
     [](Request& r) {
       Bool(r, 1, 1, 1, 7, 28);
       r.mask = MaskKind::kAdditive;
       r.mask_dtype = static_cast<DType>(9);
     },
     "mask_dtype: got 9, allowed f32, f16, bf16"},
    {"mask of another batch", [](Request& r) { Bool(r, 3, 3, 5, 7, 315); },
     "mask_shape: got 3 for batch, allowed 1, 2"},
    {"mask of no heads", [](Request& r) { Bool(r, 2, 0, 5, 7, 0); },
     "mask_shape: got 0 for heads, allowed 1, 3"},
    {"mask of negative queries", [](Request& r) { Bool(r, 2, 3, -5, 7, -210); },
     "mask_shape: got -5 for queries, allowed 1, 5"},
    {"mask of one key", [](Request& r) { Bool(r, 2, 3, 5, 1, 30); },
     "mask_shape: got 1 for keys, allowed 7"},
    {"mask one byte long", [](Request& r) { Bool(r, 1, 1, 5, 7, 36); },
     "mask: got 36 bytes, but 1 x 1 x 5 x 7 x bool is 35 bytes"},
    {"mask bytes of another type",
     [](Request& r) {
       Bool(r, 1, 1, 5, 7, 140);
       r.mask = MaskKind::kAdditive;
       r.mask_dtype = DType::kBF16;
     },
     "mask: got 140 bytes, but 1 x 1 x 5 x 7 x bf16 is 70 bytes"},
    {"a sink for each head", [](Request&) {}, "", {0, -kInf, 3e38f}},
    {"sinks for some heads",
     [](Request&) {},
     "sinks: got 2 values, allowed 0 or 3 (heads)",
     {0, 0}},
    {"sink nan", [](Request&) {}, "sinks: got nan at head 1, allowed finite or -inf", {0, kNan, 0}},
    {"sink plus inf",
     [](Request&) {},
     "sinks: got inf at head 2, allowed finite or -inf",
     {0, 0, kInf}},
};

TEST(CheckAttentionSoftmaxTest, SaysFieldValueAndAllowedRange) {
  for (const CheckCase& c : kCases) {
    const absl::Status got = Check(c);
    EXPECT_EQ(std::string(got.message()), c.want) << c.name;
    EXPECT_EQ(got.code(),
              c.want.empty() ? absl::StatusCode::kOk : absl::StatusCode::kInvalidArgument)
        << c.name;
  }
}

TEST(CheckAttentionSoftmaxTest, WhereOneIsAllThereIsItIsNamedOnce) {
  AttentionSoftmaxRequest request{
      .shape = {.batch = 1, .heads = 1, .queries = 1, .keys = 2, .rows = 1},
      .payload_bytes = 8,
      .mask = MaskKind::kBool,
      .mask_shape = {2, 1, 1, 2},
      .mask_bytes = 4};
  EXPECT_EQ(CheckAttentionSoftmax(request).message(), "mask_shape: got 2 for batch, allowed 1");
}

}  // namespace
}  // namespace logitd::testing

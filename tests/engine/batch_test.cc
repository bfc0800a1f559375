// Batches: the jobs that fit, the cuts, and the copies of their slices.
#include "server/engine/batch.h"

#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/costs.h"
#include "server/engine/run_slice.h"
#include "tests/engine/world.h"

namespace logitd::engine {
namespace {

using ::testing::HasSubstr;

TEST(CheckFitsTest, NamesValueAndLimit) {
  struct Case {
    int64_t row_elements, rows, entries, notes;
    const char* message;
  };
  const Case cases[] = {
      {4, 1, 1, 0, ""},
      {4, 64, 64, 0, ""},
      {4, 65, 1, 0, "rows: got 65, allowed 1..64"},
      {4, -1, 1, 0, "rows: got -1, allowed 1..64"},
      {1025, 1, 1, 0,
       "payload: got 4100 bytes (1 rows of 1025 f32 elements and what comes with them)"},
      {1000, 1, 1, 24, ""},
      {1000, 1, 1, 25,
       "payload: got 4100 bytes (1 rows of 1000 f32 elements and what comes with them), allowed "
       "1..4096"},
      {4, 1, 1, -1, "payload: got 9223372036854775807 bytes"},
      {0, 1, 1, 0, "payload: got 0 bytes (1 rows of 0 f32 elements and what comes with them)"},
      {int64_t{1} << 62, 2, 1, 0, "payload: got 9223372036854775807 bytes"},
      {4, 1, 1022, 0, "answer: got 4100 bytes for 1 rows, allowed 0..4096"},
      {4, 1, -1, 0, "answer: got 9223372036854775807 bytes for 1 rows"},
  };
  for (const Case& c : cases) {
    JobSpec spec;
    spec.key = {.op = &kDigest, .dtype = DType::kF32, .row_elements = c.row_elements};
    spec.counts = {c.rows, c.entries, c.notes};
    spec.size = SizeOfJob(spec);
    const absl::Status status = CheckFits(spec, SmallOptions());
    EXPECT_EQ(status.ok(), *c.message == '\0') << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.message));
  }
}

TEST(CheckFitsTest, OnlyBytesBoundAnExclusiveJobAndAnAnswerInPlaceCostsNone) {
  World world({.answer = 1024});
  world.Run("9 a alone 8x128 in_place; b alone 8x128; c alone 8x129 in_place; run");
  EXPECT_EQ(world.Failures(), "b:INVALID_ARGUMENT c:INVALID_ARGUMENT");
  EXPECT_THAT(std::string(world.shift_job('b').status()->message()),
              HasSubstr("answer: got 5120 bytes for 128 rows"));
  EXPECT_THAT(std::string(world.shift_job('c').status()->message()),
              HasSubstr("payload: got 4128 bytes (129 rows of 8 f32 elements"));
}

TEST(RowsOfSliceTest, SlicesAreAboutEqualAndEndWhereOneReadOfAHeadEnds) {
  constexpr SliceRules kRules = {.max_slice_ns = 10'000, .linear_rows = 64};
  FakeBackend backend;
  const auto head = MakeHead({&backend}, 1);
  struct Case {
    const char* name;
    int64_t left;
    double row_ns;
    int64_t rows;
    bool on_head = false;
    bool whole = false;
    int64_t row_elements = 4;
  };
  const Case cases[] = {
      {"nothing_is_left", 0, 1000, 0},
      {"one_slice", 10, 1000, 10},
      {"no_short_last_slice", 14, 1000, 14},
      {"two_equal_slices", 15, 1000, 8},
      {"five_equal_slices", 45, 1000, 9},
      {"a_row_that_takes_longer_than_a_slice", 3, 25000, 1},
      {"whole", 45, 1000, 45, false, true},
      {"a_head_is_read_once_for_each_slice", 200, 1000, 64, true},
      {"the_last_read_of_a_head", 8, 1000, 8, true},
      {"more_reads_of_a_head", 1000, 100, 128, true},
      {"a_kind_that_never_ran_begins_with_a_mebibyte", 64, 0, 4, false, false, 65536},
      {"a_row_of_more_than_that", 64, 0, 1, false, false, 1 << 20},
      {"a_head_that_never_ran", 200, 0, 64, true},
  };
  for (const Case& c : cases) {
    const BatchKey key = {.op = &kDigest,
                          .dtype = DType::kF32,
                          .row_elements = c.row_elements,
                          .head = c.on_head ? head.get() : nullptr};
    EXPECT_EQ(RowsOfSlice(key, c.whole, c.left, c.row_ns, kRules), c.rows) << c.name;
  }
}

TEST(CostsTest, CostsAreThoseOfTheRowsThatRan) {
  Costs costs;
  BatchKey key = {.op = &kDigest, .dtype = DType::kF32, .row_elements = 8};
  EXPECT_EQ(costs.PerRow(key), 0);
  costs.Ran(key, 30, 30 * 32, absl::Milliseconds(30));
  EXPECT_EQ(costs.PerRow(key), 1e6);
  key.row_elements = 16;  // another shape of the op: by bytes
  EXPECT_EQ(costs.PerRow(key), 2e6);
  EXPECT_EQ(costs.OfCall(kDigest, 640), absl::Milliseconds(20));
  EXPECT_EQ(costs.OfCall(kShift, 640), absl::ZeroDuration());
}

// ---- what is copied; every job checks its own answer

TEST(SliceTest, ABatchIsUploadedOnce) {
  World world({});
  world.Run("a 4x50 k3 n2; b 4x51 k0; c 4x52 k2 n1; d 4x53 n2; e 4x54 k3; run");
  EXPECT_EQ(world.Failures(), "");
  int uploads = 0;
  for (const FakeBackend::Ran& ran : world.device(0).log())
    uploads += ran.uploaded_bytes > 0 ? 1 : 0;
  EXPECT_EQ(uploads, 5);
  EXPECT_GT(world.device(0).log().size(), 20u);
}

TEST(SliceTest, RowsThatHaveAPlaceShareABatchWithOthers) {
  World world({});
  world.Run("a placed; b 4x2; c 4x3 placed; d placed; e 4x2; f 4x3 placed; run");
  EXPECT_EQ(world.slices(), "abcdef");
  EXPECT_EQ(world.device(0).log()[0].gathered_bytes, 8 * 16u);
}

TEST(SliceTest, RowsThatHaveAPlaceAreNotUploaded) {
  World world({});
  world.Run("a 250x4 placed; run");
  EXPECT_EQ(world.device(0).log()[0].uploaded_bytes, 4 * sizeof(DigestRow));
  EXPECT_EQ(world.device(0).log()[0].gathered_bytes, 4000u);
}

TEST(SliceTest, OnTheHostSteadyRowsAreReadWhereTheyLie) {
  World world({.on_host = true});
  world.Run("a 4x3 placed steady; b 4x2 placed; c 4x2; run; d 4x45 placed steady; run");
  EXPECT_EQ(world.slices(), "abc|d|d|d|d|d");
  EXPECT_EQ(world.device(0).log()[0].gathered_bytes, 2u * 4 * 4) << "only what others may write";
  EXPECT_EQ(world.device(0).log()[1].gathered_bytes, 0u);
}

TEST(SliceTest, ExclusiveRowsHaveNoPaddingAndInputsMayBeCopiedWithThem) {
  World world({});
  world.Run("a alone 3x7 n5; b alone 3x7 n5 in_place; run");
  // 7 rows of 12 bytes, rounded up to 96, then the notes twice: 20 bytes rounded up to 32, and 20.
  for (const FakeBackend::Ran& ran : world.device(0).log()) {
    EXPECT_EQ(ran.uploaded_bytes, 96u + 32 + 20);
  }
  EXPECT_EQ(world.slices(), "a|b");
}

TEST(SliceTest, ExclusiveInputsThatHaveAPlaceAreNotUploaded) {
  World world({});
  world.Run("a alone 3x7 n5 placed; b alone 3x7 n5 placed in_place; run");
  // The second input is, and what little lies between: bytes 84 to 148.
  for (const FakeBackend::Ran& ran : world.device(0).log()) {
    EXPECT_EQ(ran.uploaded_bytes, 64u);
    EXPECT_EQ(ran.gathered_bytes, 84u + 20);
  }
  EXPECT_EQ(world.slices(), "a|b");
}

}  // namespace
}  // namespace logitd::engine

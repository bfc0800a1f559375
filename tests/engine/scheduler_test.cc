// Which job runs when: the states of the scheduler, in time that stands still.
#include "server/engine/scheduler.h"

#include <memory>
#include <optional>
#include <ostream>
#include <string>

#include "gtest/gtest.h"
#include "tests/engine/world.h"

namespace logitd::engine {
namespace {

struct Scenario {
  const char* name;
  const char* script;         // see World::Run
  const char* slices;         // World::slices at its end
  const char* failures = "";  // World::Failures at its end; null: any
  World::Options world = {};
};

void PrintTo(const Scenario& scenario, std::ostream* out) { *out << scenario.name; }

class SchedulerTest : public ::testing::TestWithParam<Scenario> {};

TEST_P(SchedulerTest, Runs) {
  const Scenario& scenario = GetParam();
  World world(scenario.world);
  world.Run(scenario.script);
  EXPECT_EQ(world.slices(), scenario.slices);
  if (scenario.failures == nullptr) return;
  EXPECT_EQ(world.Failures(), scenario.failures);
}

std::string NameOf(const ::testing::TestParamInfo<Scenario>& info) { return info.param.name; }

const Scenario kBatches[] = {
    {"a_single_job_runs_at_once", "a 4x2 k3; run", "a"},
    {"jobs_of_one_key_share_a_batch", "a; take; b 4x2 k0; c; d 4x3 k2; run", "a|bcd"},
    {"a_batch_holds_one_key", "a; take; b; c 5x1; d; run", "a|bd|c"},
    {"a_batch_holds_one_head", "a; take; b h1; c h2; d h1; e; run", "a|bd|c|e"},
    {"a_batch_holds_one_priority", "a; take; b batch; c; run", "a|c|b"},
    {"a_batch_holds_short_jobs_up_to_a_slice", "25 a; run", "aaaaaaaaaaaaaa|aaaaaaaaaaa"},
    {"a_batch_holds_one_job_of_an_exclusive_op", "a alone; b alone; c alone; run", "a|b|c"},
    {"odd_rows_start_at_aligned_addresses", "a 3x3; b 3x4 k3; c 3x5 k2; run", "abc"},
    {"max_batch_rows_seal_a_batch", "a 4x3; b 4x2; c; run", "a|bc", "", {.max_rows = 4}},
    {"payload_bytes_seal_a_batch", "a 4x3; b 4x2; c; run", "a|bc", "", {.payload = 4 * 16}},
    {"answer_bytes_seal_a_batch", "a k7; b k5; run", "a|b", "", {.answer = 12 + 7 * 4}},
    // 4096 bytes hold 16 + 4 * 1000 of a and 16 + 4 * 10 of b, but not the same again for c.
    {"full_lists_seal_a_batch", "a n1000; b n10; c n10; run", "ab|c"},
    {"lists_of_several_jobs_follow_each_other",
     "a 4x2 n3 k2; b; c 4x3 n5; d 4x2 n1 k3; e n7; cancel c; cancel e; run", "abd",
     "c:CANCELLED e:CANCELLED"},
    {"a_job_that_can_never_fit_is_refused", "a 4x65; b 2000x1; c k2000; d 4x0; run", "",
     "a:INVALID_ARGUMENT b:INVALID_ARGUMENT c:INVALID_ARGUMENT d:INVALID_ARGUMENT"},
    {"max_batch_delay_gathers_jobs",
     "a; pass 49; b; none; pass 1; run",
     "ab",
     "",
     {.delay = absl::Milliseconds(50)}},
    {"a_full_batch_does_not_wait_for_max_batch_delay",
     "a; none; b; run",
     "ab",
     "",
     {.max_rows = 2, .delay = absl::Hours(10)}},
    {"an_exclusive_job_does_not_wait_for_max_batch_delay",
     "a alone; run",
     "a",
     "",
     {.delay = absl::Hours(10)}},
    {"max_batch_delay_of_one_key_ends_while_another_runs",
     "a; b 5x2; take 0; none 1; pass 30; take 1; run",
     "b|a",
     "",
     {.streams = 2, .max_rows = 2, .delay = absl::Milliseconds(30)}},
    {"a_cancelled_job_ends_its_delay",
     "a; cancel a; b; pass 29; none; pass 1; run",
     "b",
     "a:CANCELLED",
     {.delay = absl::Milliseconds(30)}},
};
INSTANTIATE_TEST_SUITE_P(Batches, SchedulerTest, ::testing::ValuesIn(kBatches), NameOf);

const Scenario kOrder[] = {
    {"a_key_that_fills_up_does_not_starve_another",
     "a; take; b 4x2; c 5x1; d 4x2; e 4x2; run",
     "a|b|c|d|e",
     "",
     {.slabs = 6, .max_rows = 2}},
    {"without_a_slab_the_oldest_goes_first_with_others_of_its_key",
     "a; take; b; c 5x1; d; e 5x2; run",
     "a|bd|ce",
     "",
     {.slabs = 1}},
    {"jobs_of_one_key_fill_as_many_batches_as_they_need",
     "a; take; b 4x3; c 4x2; d 4x2; e; run",
     "a|b|cd|e",
     "",
     {.slabs = 1, .max_rows = 4}},
    {"interactive_jobs_go_first_then_fairly_by_caller",
     "a 5x8 c1 batch; b 6x8 c2; c 7x8 c2; d 8x8 c3; run", "b|d|c|a"},
    {"batch_work_runs_only_when_no_interactive_work_waits",
     "b 4x60 c1 w100 batch; run 2; i 4x30 c2; j 4x30 c3; run", "b|b|i|j|i|j|i|j|b|b|b|b"},
    {"long_jobs_of_two_callers_take_turns", "a 4x30 c1; b 4x30 c2; run", "a|b|a|b|a|b"},
    {"callers_share_a_stream_by_weight", "a 4x60 c1; b 4x60 c2 w3; run", "a|b|b|b|a|b|b|b|a|a|a|a"},
    {"a_short_job_runs_between_the_slices_of_a_long_one", "l 4x40; run 1; s 5x1; k; run",
     "l|s|k|l|l|l"},
    {"a_short_job_runs_between_slices_that_hold_all_other_slabs",
     "a 4x60 c1; take; b 4x60 c2; c c3; run",
     "a|c|a|a|a|a|a|b|b|b|b|b|b",
     "",
     {.slabs = 2}},
    {"long_jobs_leave_a_slab_for_short_ones",
     "l 4x30 c1; m 4x30 c2; n 4x30 c3; o 4x30 c4; run 6; s c5; run", "l|m|n|l|m|n|s|l|o|o|m|n|o"},
    {"batch_work_leaves_the_last_slab",
     "l 4x30; take; b batch; end; take; none; run",
     "l|l|l|b",
     "",
     {.slabs = 2}},
    {"slow_slices_leave_a_stream_for_others",
     "v 4x60 whole; w 4x60 whole; take 0; none 1; s; take 1; end 1; none 1; end 0; take 1; run",
     "v|s|w",
     "",
     {.streams = 2}},
    {"slow_slices_leave_a_device_for_others",
     "v 4x60 whole; w 4x60 whole; take 0; none 1; s; take 1; end 1; none 1; end 0; run",
     "v|s|w",
     "",
     {.devices = 2}},
    {"a_flood_of_long_jobs_does_not_delay_a_light_caller", "40 f 4x60 c1; run 4; s 4x2 c2; run 3",
     "f|f|f|f|s|f|f", nullptr},
    {"a_flood_of_short_jobs_does_not_delay_a_light_caller",
     "200 f 4x8 c1; run 2; s 5x1 c2; run 3",
     "f|f|s|f|f",
     nullptr,
     {.streams = 2, .max_rows = 8}},
    {"a_whole_job_is_not_cut", "a 4x45 c1; b 4x45 c2 whole; run", "a|b|a|a|a|a"},
};
INSTANTIATE_TEST_SUITE_P(Order, SchedulerTest, ::testing::ValuesIn(kOrder), NameOf);

const Scenario kEnds[] = {
    {"a_cancelled_job_in_the_middle_is_skipped", "b k2; c 4x2 k5; d k3; cancel c; run", "bd",
     "c:CANCELLED"},
    {"cancelled_jobs_at_the_ends_take_no_rows", "b; c 4x2 k2; d; cancel b; cancel d; run", "c",
     "b:CANCELLED d:CANCELLED"},
    {"cancelled_jobs_do_not_run", "b; c; cancel c; cancel b; none; d 5x1; run", "d",
     "b:CANCELLED c:CANCELLED"},
    {"a_job_without_a_slab_is_cancelled",
     "a; take; b; c; cancel b; run",
     "a|c",
     "b:CANCELLED",
     {.slabs = 1}},
    {"a_job_cancelled_while_it_runs_ends_after_the_slice",
     "a 4x30; take; cancel a; cancel a; end; cancel a; run", "a", "a:CANCELLED"},
    {"a_job_cancelled_beside_others_leaves_them_their_answers",
     "a n2; b k3; c n3; take; cancel b; run", "abc", "b:CANCELLED"},
    {"a_job_cancelled_between_slices_does_not_run_on", "a 4x30; take; end; cancel a; none", "a",
     "a:CANCELLED"},
    {"long_jobs_that_end_leave_the_others_their_answers",
     "a 4x30 k3 n2; b 4x30 k3 n2; c 4x30 k3 n2; run 3; cancel b; run", "a|a|a|c|c|c",
     "b:CANCELLED"},
    {"a_cancel_of_a_finished_job_changes_nothing", "a; run; cancel a", "a"},
    {"a_deadline_passes_while_the_stream_is_busy", "a; take; b due20; c due60000; pass 20; run",
     "a|c", "b:DEADLINE_EXCEEDED"},
    {"a_deadline_passes_without_a_slab",
     "a; take; b due60000; c due20; pass 20; run",
     "a|b",
     "c:DEADLINE_EXCEEDED",
     {.slabs = 1}},
    {"an_earlier_deadline_ends_its_job_first",
     "a; take; b due60000; c due20; d due5; pass 5; pass 14; cancel b; pass 1; run", "a",
     "b:CANCELLED c:DEADLINE_EXCEEDED d:DEADLINE_EXCEEDED"},
    {"a_deadline_that_has_passed_runs_nothing", "a due-5; run", "", "a:DEADLINE_EXCEEDED"},
    {"a_late_job_makes_way_for_others", "a due5; b 5x1 due5; c; late 5; run", "c",
     "a:DEADLINE_EXCEEDED b:DEADLINE_EXCEEDED"},
    {"a_late_job_does_not_leave_its_turn_to_the_next_of_its_key",
     "x; take; a c1 due5; b c1; c 5x1 c2; late 5; run", "x|c|b", "a:DEADLINE_EXCEEDED"},
    {"a_late_job_does_not_leave_the_last_slab_to_the_next_of_its_key",
     "l 4x60 c1; take; a 4x20 c2 due15; b 4x60 c3; end; late 5; take",
     "l|l",
     "l:- a:DEADLINE_EXCEEDED b:-",
     {.slabs = 2}},
    {"a_deadline_passes_during_max_batch_delay",
     "a due5; pass 5; none",
     "",
     "a:DEADLINE_EXCEEDED",
     {.delay = absl::Milliseconds(30)}},
    {"a_deadline_passes_while_the_job_runs", "a 4x30 due15; run", "a|a", "a:DEADLINE_EXCEEDED"},
    {"a_deadline_passes_between_slices", "a 4x30 due15; take; end; pass 5; none", "a",
     "a:DEADLINE_EXCEEDED"},
    {"a_batch_is_abandoned_where_all_its_jobs_are_late", "a due5; b due10; take; pass 10; run",
     "ab", "a:DEADLINE_EXCEEDED b:DEADLINE_EXCEEDED"},
    {"a_late_job_beside_one_in_time_is_answered", "a due5; b due100; take; pass 10; run", "ab"},
    {"a_close_ends_what_does_not_run_its_last_slice",
     "a; l 4x30; take; end; take; b; c 5x1; close; d; run",
     "a|l",
     "l:UNAVAILABLE b:UNAVAILABLE c:UNAVAILABLE d:UNAVAILABLE",
     {.slabs = 2}},
    {"a_close_lets_the_last_slice_end", "a; take; b; close; run", "a", "b:UNAVAILABLE"},
    {"a_close_ends_a_job_between_slices", "a 4x30; take; end; close; none", "a", "a:UNAVAILABLE"},
};
INSTANTIATE_TEST_SUITE_P(Ends, SchedulerTest, ::testing::ValuesIn(kEnds), NameOf);

const Scenario kDevices[] = {
    {"a_failed_upload_fails_its_batch", "fail upload unavailable; a; b; take; c 5x1; run", "ab|c",
     "a:UNAVAILABLE b:UNAVAILABLE"},
    {"a_failed_op_fails_its_batch", "fail op unavailable; a; take; b; run", "a|b", "a:UNAVAILABLE"},
    {"a_failed_wait_fails_its_batch", "fail wait unavailable; a; take; b; run", "a|b",
     "a:UNAVAILABLE"},
    {"a_failed_later_slice_fails_its_batch", "a 4x30; run 2; fail op unavailable; end; b; run",
     "a|a|b", "a:UNAVAILABLE"},
    {"the_only_device_that_is_lost_ends_all_jobs",
     "a; take; b; c 5x1; fail wait internal; end; d; run", "a",
     "a:UNAVAILABLE b:UNAVAILABLE c:UNAVAILABLE d:UNAVAILABLE"},
    {"work_goes_to_the_device_that_is_free_first",
     "a; b; c; d; take 0; take 1; end 1; take 1; end 1; take 1; run",
     "a|b|c|d",
     "",
     {.devices = 2, .max_rows = 1}},
    {"a_batch_that_has_begun_stays_on_its_device",
     "a 4x30; take 1; end 1; none 0; take 1; end 1; none 0; run",
     "a|a|a",
     "",
     {.devices = 2}},
    {"work_that_is_bound_to_a_busy_device_keeps_no_other_idle",
     "a d1; b d1; take 1; none 0; c; take 0; end 0; none 0; run",
     "a|c|b",
     "",
     {.devices = 2, .max_rows = 1}},
    {"a_lost_device_fails_the_batch_that_found_it",
     "a; b 5x1; take 0; take 1; fail wait internal; end 0; end 1; c; none 0; run",
     "a|b|c",
     "a:UNAVAILABLE",
     {.devices = 2}},
    {"work_that_is_bound_to_a_lost_device_ends",
     "a; b d0; c d1; lose 0; d d0; none 0; run",
     "a|c",
     "b:UNAVAILABLE d:UNAVAILABLE",
     {.devices = 2}},
    {"a_last_slice_on_a_lost_device_still_counts",
     "a; take 1; lose 1; end 1; none 1; b; run",
     "a|b",
     "",
     {.devices = 2}},
    {"a_batch_between_slices_ends_with_its_device",
     "a 4x30; take 1; end 1; b 4x30 c1; take 0; lose 1; none 1; run",
     "a|b|b|b",
     "a:UNAVAILABLE",
     {.devices = 2}},
    {"a_slice_is_the_last_one_of_a_lost_device",
     "a 4x30; take 1; lose 1; end 1; none 0",
     "a",
     "a:UNAVAILABLE",
     {.devices = 2}},
    {"the_last_device_ends_all_jobs",
     "a; take; b; lose 1; lose 0; c; end",
     "a",
     "b:UNAVAILABLE c:UNAVAILABLE",
     {.devices = 2}},
    {"heads_over_all_devices_take_turns",
     "a s1; take 0; b s1; c s1; none 1; none 2; d; take 1; end 1; none 1; end 0; none 2; run",
     "a|d|bc",
     "",
     {.devices = 2, .streams = 2}},
    {"a_lost_device_ends_what_waits_for_all_devices",
     "a s1; take; b s1; c; lose 1; end; d s1; run",
     "a|c",
     "b:UNAVAILABLE d:UNAVAILABLE",
     {.devices = 3}},
    {"a_lost_device_ends_a_batch_over_all_devices_between_slices",
     "a 4x100 s1; take; end; lose 2; none; run",
     "a",
     "a:UNAVAILABLE",
     {.devices = 3, .max_rows = 100}},
    {"a_close_ends_what_waits_for_all_devices",
     "a s1; take; b s1; close; run",
     "a",
     "b:UNAVAILABLE",
     {.devices = 2}},
};
INSTANTIATE_TEST_SUITE_P(Devices, SchedulerTest, ::testing::ValuesIn(kDevices), NameOf);

TEST(SchedulerStateTest, TimesBelongToTheJobAndItsBatch) {
  World world({});
  world.Run("a; take; b 4x2; c 4x3; pass 20; run");
  const JobTimes times = world.job('b').times();
  EXPECT_EQ(times.batch_rows, 5);
  EXPECT_EQ(times.h2d_ns, 1);
  EXPECT_EQ(times.kernel_ns, 2 + 5 * absl::ToInt64Nanoseconds(World::kRow));
  EXPECT_EQ(times.d2h_ns, 3);
  EXPECT_EQ(absl::Nanoseconds(times.queue_ns), absl::Milliseconds(20) + World::kRow);
  EXPECT_EQ(world.job('a').times().batch_rows, 1);
  EXPECT_EQ(world.job('a').times().queue_ns, 0);
}

TEST(SchedulerStateTest, TheOldestBatchIsTheOneThatRunsLongest) {
  World world({.devices = 2});
  const auto oldest = [&] {
    return world.scheduler().running().Oldest(absl::ToUnixNanos(world.now()));
  };
  EXPECT_FALSE(oldest().has_value());
  world.Run("a 4x3; take 1; pass 30; b; take 0; pass 1");
  ASSERT_TRUE(oldest().has_value());
  EXPECT_EQ(oldest()->op, kDigest.name);
  EXPECT_EQ(oldest()->rows, 3);
  EXPECT_EQ(oldest()->device, 1);
  EXPECT_EQ(oldest()->age, absl::Milliseconds(31));
  world.Run("run");
  EXPECT_FALSE(oldest().has_value());
}

TEST(SchedulerStateTest, KeptAnswersLeaveEachDeviceASlabForEveryStream) {
  World world({.devices = 2, .streams = 2, .slabs = 2});
  for (const char* step : {"a", "b", "c"}) {
    world.Run(absl::StrCat(step, " alone 4x9 n3 keep; take 0; end 0"));
  }
  EXPECT_TRUE(world.shift_job('a').could_keep());
  EXPECT_TRUE(world.shift_job('b').could_keep());
  EXPECT_FALSE(world.shift_job('c').could_keep());
  EXPECT_EQ(world.scheduler().running().kept(), 2);
  world.Run("d alone 4x9 keep; take 2; end 2");  // stream 2 is of the other device
  EXPECT_TRUE(world.shift_job('d').could_keep());
  world.Run("30 o 4x50; 30 o alone 4x60; run");
  for (const char kept : {'a', 'b', 'd'}) EXPECT_TRUE(world.shift_job(kept).KeptIsRight()) << kept;
  EXPECT_EQ(world.scheduler().running().slabs_in_use(), 3);
  world.Run("drop a; e alone 4x9 in_place keep; take 0; end 0");
  EXPECT_TRUE(world.shift_job('e').KeptIsRight());
}

TEST(SchedulerStateTest, AFailedBatchKeepsNothing) {
  World world({});
  world.Run(
      "fail upload unavailable; a alone keep; take; end; fail op unavailable; b alone keep; take; "
      "end;"
      "fail wait unavailable; c alone keep; run");
  EXPECT_EQ(world.Failures(), "a:UNAVAILABLE b:UNAVAILABLE c:UNAVAILABLE");
  EXPECT_EQ(world.scheduler().running().slabs_in_use(), 0);
}

TEST(SchedulerStateTest, ADeviceUsesItsOwnCopyOfAHead) {
  World world({.devices = 3});
  world.Run("a h1; take 2; end 2; b h1; take 1; end 1; c h1; take 0; end 0");
  EXPECT_EQ(world.job('a').head_device(), 2);
  EXPECT_EQ(world.job('b').head_device(), 1);
  EXPECT_EQ(world.job('c').head_device(), 0);
}

}  // namespace
}  // namespace logitd::engine

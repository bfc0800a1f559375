// Rings, from the client's side: the library, logitctl and the load generator against the real
// server.
#include "client/ring.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/client.h"
#include "formats/ring_protocol.h"
#include "tests/client/running_logitd.h"
#include "tests/client/scoring_logitd.h"
#include "tests/client/test_values.h"

namespace logitd {
namespace {

using ::logitd::client::Arena;
using ::logitd::client::Ring;
using ::logitd::client::RingOptions;
using ::logitd::testing::Becomes;
using ::logitd::testing::Normal;
using ::logitd::testing::NpyF32;
using ::logitd::testing::Ran;
using ::logitd::testing::RunAndKill;
using ::logitd::testing::RunBinary;
using ::logitd::testing::TempDir;
using ::logitd::testing::TinyHead;
using ::logitd::testing::ViewOf;
using ::testing::HasSubstr;

constexpr int64_t kVocab = 1003;
constexpr int64_t kArenaBytes = int64_t{1} << 20;
constexpr int64_t kRingAt = int64_t{1} << 19;
constexpr RingOptions kOptions = {.slots = 8, .entry_bytes = 1024, .answer_bytes = 4096};

template <typename Result>
std::string AnswerOf(const absl::StatusOr<Result>& result) {
  if (!result.ok()) return result.status().ToString();
  auto answer = result->answer;
  answer.clear_timings();
  return answer.SerializeAsString();
}

class RingTest : public ::logitd::testing::LeasingLogitd {
 protected:
  using LeasingLogitd::LeasingLogitd;

  std::unique_ptr<Ring> Open(Arena* arena, const RingOptions& options = kOptions) const {
    auto ring = Ring::Open(arena, kRingAt, options);
    EXPECT_TRUE(ring.ok()) << ring.status();
    return *std::move(ring);
  }

  // Descriptors and threads of the server.
  int Count(const char* what) const {
    const std::filesystem::path folder = absl::StrCat("/proc/", daemon_.pid(), "/", what);
    return static_cast<int>(std::distance(std::filesystem::directory_iterator(folder),
                                          std::filesystem::directory_iterator()));
  }
  // Of shared memory that the server has mapped.
  int Mappings() const {
    std::ifstream maps(absl::StrCat("/proc/", daemon_.pid(), "/maps"));
    int count = 0;
    for (std::string line; std::getline(maps, line);) {
      count += line.find("logitd-arena") != std::string::npos;
    }
    return count;
  }

  static client::TopKRequest TopKOf(absl::string_view logits, const Arena* arena = nullptr) {
    client::TopKRequest request = {.rows = 1, .vocab = kVocab, .logits = {logits}, .arena = arena};
    request.params.add_k(5);
    request.params.add_temperature(0.7f);
    return request;
  }
  static client::SampleRequest SampleOf(absl::string_view logits, uint64_t seed,
                                        const Arena* arena = nullptr) {
    client::SampleRequest request = {
        .rows = 1, .vocab = kVocab, .logits = {logits}, .arena = arena};
    request.params.add_temperature(0.8f);
    request.params.add_top_p(0.9f);
    request.params.add_top_logprobs(3);
    request.params.add_seed(seed);
    return request;
  }
};

TEST_F(RingTest, AnswersAreThoseOfGrpcToTheBit) {
  const auto arena = Lease();
  const auto ring = Open(arena.get());
  const std::vector<float> logits = Normal(kVocab, 1);
  std::memcpy(arena->data(), logits.data(), kVocab * sizeof(float));
  const absl::string_view shared(arena->data(), kVocab * sizeof(float));
  for (uint64_t seed = 0; seed < 30; ++seed) {  // several times around the ring
    EXPECT_EQ(AnswerOf(ring->Sample(SampleOf(shared, seed, arena.get()))),
              AnswerOf(client_->Sample(SampleOf(ViewOf(logits), seed))));
    EXPECT_EQ(AnswerOf(ring->TopK(TopKOf(shared, arena.get()))),
              AnswerOf(client_->TopK(TopKOf(ViewOf(logits)))));
  }
  // Hidden states, and rows that travel in the entry.
  client::TopKRequest hidden = {.rows = 1, .head = "tiny", .hidden_size = 2};
  hidden.params.add_k(2);
  const float state[] = {0.5f, -2};
  std::memcpy(arena->data(), state, sizeof(state));
  hidden.hidden = {{reinterpret_cast<const char*>(state), sizeof(state)}};
  const std::string expected = AnswerOf(client_->TopK(hidden));
  EXPECT_EQ(AnswerOf(ring->TopK(hidden)), expected);
  hidden.hidden = {{arena->data(), sizeof(state)}};
  hidden.arena = arena.get();
  EXPECT_EQ(AnswerOf(ring->TopK(hidden)), expected);
}

TEST_F(RingTest, ManyCallsAreInFlightAndEachAnswerSaysWhose) {
  const auto arena = Lease();
  const auto ring = Open(arena.get());
  std::map<uint64_t, std::string> expected;
  uint64_t tag = 0;
  int answered = 0;
  const absl::string_view shared(arena->data(), kVocab * sizeof(float));
  const std::vector<float> logits = Normal(kVocab, 2);
  std::memcpy(arena->data(), logits.data(), kVocab * sizeof(float));
  for (uint64_t n = 0; n < 100; ++n) {
    const uint64_t id = 7000 + n;
    expected[id] = n % 2 == 0 ? AnswerOf(client_->Sample(SampleOf(ViewOf(logits), n)))
                              : AnswerOf(client_->TopK(TopKOf(ViewOf(logits))));
    const absl::Status status = n % 2 == 0 ? ring->Submit(SampleOf(shared, n, arena.get()), id)
                                           : ring->Submit(TopKOf(shared, arena.get()), id);
    ASSERT_TRUE(status.ok()) << status;
    if (ring->in_flight() < kOptions.slots) continue;
    EXPECT_EQ(ring->Submit(TopKOf(shared, arena.get()), 1).code(),
              absl::StatusCode::kResourceExhausted);
    for (int i = 0; i < 5; ++i) {
      const auto result = ring->Wait(&tag, absl::Seconds(20));
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->topk.has_value()
                    ? AnswerOf(absl::StatusOr<client::TopKResult>(*result->topk))
                    : AnswerOf(absl::StatusOr<client::SampleResult>(*result->sample)),
                expected[tag]);
      expected.erase(tag);
      ++answered;
    }
  }
  while (ring->in_flight() > 0) {
    ASSERT_TRUE(ring->Wait(&tag, absl::Seconds(20)).ok());
    EXPECT_EQ(expected.erase(tag), 1u);
    ++answered;
  }
  EXPECT_EQ(answered, 100);
  EXPECT_EQ(ring->Wait(&tag).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(RingTest, ErrorsOfACallAreThoseOfTheRpcAndEndNothing) {
  const auto arena = Lease();
  const auto ring = Open(arena.get());
  const std::vector<float> logits = Normal(kVocab, 3);
  std::memcpy(arena->data(), logits.data(), kVocab * sizeof(float));
  const absl::string_view shared(arena->data(), kVocab * sizeof(float));
  const auto both = [&](auto change) {
    client::SampleRequest in_arena = SampleOf(shared, 1, arena.get());
    client::SampleRequest sent = SampleOf(ViewOf(logits), 1);
    change(in_arena);
    change(sent);
    const std::string expected = AnswerOf(client_->Sample(sent));
    EXPECT_EQ(AnswerOf(ring->Sample(in_arena)), expected);
    return expected;
  };
  EXPECT_THAT(both([](auto& r) { r.params.set_top_p(0, 2); }), HasSubstr("top_p"));
  EXPECT_THAT(both([](auto& r) { r.params.add_temperature(1); }), HasSubstr("temperature"));
  EXPECT_THAT(both([](auto& r) { r.params.add_extra_ids(1 << 30); }),
              HasSubstr("INVALID_ARGUMENT"));
  client::TopKRequest unknown = {.rows = 1, .head = "none", .hidden_size = 2};
  unknown.params.add_k(1);
  unknown.hidden = {shared.substr(0, 8)};
  unknown.arena = arena.get();
  EXPECT_EQ(ring->TopK(unknown).status().code(), absl::StatusCode::kNotFound);
  // Answers and requests that do not fit a slot.
  client::TopKRequest large = TopKOf(shared, arena.get());
  large.params.set_k(0, 1000);
  const absl::Status too_large = ring->TopK(large).status();
  EXPECT_EQ(too_large.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(too_large.message()), HasSubstr("allowed 4064; ask over gRPC"));
  EXPECT_THAT(std::string(ring->TopK(TopKOf(ViewOf(logits))).status().message()),
              HasSubstr("(entry_bytes); rows belong into the arena"));
  EXPECT_EQ(ring->Sample(SampleOf(shared, 1, arena.get()), absl::Nanoseconds(1)).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(ring->Sample(SampleOf(shared, 1, arena.get())).ok());
}

TEST_F(RingTest, RingsThatCannotBeAreRefusedAndTheLeaseStays) {
  const auto arena = Lease();
  EXPECT_EQ(Ring::Open(arena.get(), kArenaBytes - 64, kOptions).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Ring::Open(arena.get(), -64, kOptions).status().code(),
            absl::StatusCode::kInvalidArgument);
  const auto odd = Ring::Open(arena.get(), 4, kOptions).status();
  EXPECT_EQ(odd.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(odd.message()), HasSubstr("ring.offset: got 4"));
  const RingOptions options = {.slots = 257, .entry_bytes = 128, .answer_bytes = 128};
  EXPECT_THAT(std::string(Ring::Open(arena.get(), 0, options).status().message()),
              HasSubstr("ring.slots: got 257"));
  const auto ring = Open(arena.get());
  EXPECT_TRUE(ring->TopK(TopKOf({arena->data(), kVocab * 4}, arena.get())).ok());
  EXPECT_EQ(Ring::Open(arena.get(), kRingAt, kOptions).status(),
            absl::FailedPreconditionError(
                "ring: got an arena that has had its ring, allowed one for each lease"));
  EXPECT_TRUE(ring->TopK(TopKOf({arena->data(), kVocab * 4}, arena.get())).ok());
}

TEST_F(RingTest, ASleepingPairWakesEachOther) {
  const auto arena = Lease();
  RingOptions options = kOptions;
  options.spin = absl::ZeroDuration();
  const auto ring = Open(arena.get(), options);
  const absl::string_view shared(arena->data(), kVocab * sizeof(float));
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(Becomes([&] { return arena->data()[kRingAt + kServerAsleepAt] != 0; }));
    EXPECT_TRUE(ring->TopK(TopKOf(shared, arena.get())).ok());
  }
  uint64_t tag = 0;
  ASSERT_TRUE(ring->Submit(TopKOf(shared, arena.get()), 3).ok());
  ASSERT_TRUE(ring->Wait(&tag, absl::Seconds(20)).ok());
}

TEST_F(RingTest, KilledClientsLeaveNoDescriptorThreadMappingOrLease) {
  const auto run = [&](int milliseconds) {
    // Until all memory is free again it gets no lease, and ends.
    EXPECT_TRUE(Becomes([&] {
      return RunAndKill(
          "load_bench",
          {"--addr", address_, "--arena", arena_address(), "--ring", "--mix", "sample", "--vocab",
           "3000", "--in-flight", "3", "--warmup", "0", "--duration", "5"},
          absl::Milliseconds(milliseconds));
    }));
    EXPECT_TRUE(AllIsFree());
    EXPECT_TRUE(Becomes([this] { return Mappings() == 0; }));
  };
  run(400);
  const int descriptors = Count("fd");
  const int threads = Count("task");
  for (int i = 0; i < 8; ++i) run(100 + 60 * i);
  EXPECT_TRUE(Becomes([&] { return Count("fd") <= descriptors; }));
  EXPECT_TRUE(Becomes([&] { return Count("task") <= threads; }));
}

// The memory of the ring changes at all times. The scribbler is cut off or gets errors; others go
// on.
TEST_F(RingTest, AClientThatOverwritesTheRingHarmsNoOther) {
  const auto honest_arena = Lease();
  const auto honest = Open(honest_arena.get());
  const std::vector<float> logits = Normal(kVocab, 5);
  std::memcpy(honest_arena->data(), logits.data(), kVocab * sizeof(float));
  const absl::string_view shared(honest_arena->data(), kVocab * sizeof(float));
  const std::string expected = AnswerOf(client_->Sample(SampleOf(ViewOf(logits), 9)));
  for (int round = 0; round < 3; ++round) {
    auto arena = Arena::Lease(arena_address(), kArenaBytes);
    ASSERT_TRUE(arena.ok()) << arena.status();
    auto ring = Ring::Open(arena->get(), kRingAt, kOptions);
    ASSERT_TRUE(ring.ok()) << ring.status();
    std::atomic<bool> stop = false;
    std::thread scribbler([&] {
      uint64_t state = 88172645463325252u + static_cast<uint64_t>(round);
      char* const memory = (*arena)->data() + kRingAt;
      while (!stop) {
        for (int64_t i = 0; i < Ring::Bytes(kOptions); ++i) {
          state ^= state << 13;
          state ^= state >> 7;
          state ^= state << 17;
          memory[i] = static_cast<char>(state % 3 == 0 ? state % 4 : state);
        }
        madvise((*arena)->data(), kArenaBytes, MADV_REMOVE);
        const char bell = 0;
        send((*arena)->socket(), &bell, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
      }
    });
    for (int i = 0; i < 50; ++i) {
      EXPECT_EQ(AnswerOf(honest->Sample(SampleOf(shared, 9, honest_arena.get()))), expected);
      EXPECT_EQ(AnswerOf(client_->Sample(SampleOf(ViewOf(logits), 9))), expected);
    }
    stop = true;
    scribbler.join();
  }
}

TEST_F(RingTest, ADrainEndsCallsWithUnavailableAndThenTheRing) {
  const auto arena = Lease();
  const auto ring = Open(arena.get());
  const absl::string_view shared(arena->data(), kVocab * sizeof(float));
  ASSERT_TRUE(ring->TopK(TopKOf(shared, arena.get())).ok());
  kill(daemon_.pid(), SIGTERM);
  absl::Status status;
  EXPECT_TRUE(Becomes([&] {
    status = ring->TopK(TopKOf(shared, arena.get()), absl::Seconds(10)).status();
    return !status.ok();
  }));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  siginfo_t end = {};
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(daemon_.pid()), &end, WEXITED | WNOWAIT), 0);
  EXPECT_EQ(end.si_code, CLD_EXITED);
  EXPECT_EQ(end.si_status, 0);
  EXPECT_EQ(ring->TopK(TopKOf(shared, arena.get())).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(RingTest, TheCommandLineGivesTheSameAnswer) {
  const std::string file = dir_.Write("rows.npy", NpyF32(2, 3, {1, 2, 3, 3, 2, 1}));
  const std::vector<std::vector<std::string>> kCommands = {
      {"topk", "--logits", file, "--k", "2"},
      {"sample", "--logits", file, "--seed", "1,2", "--temperature", "1"},
  };
  for (std::vector<std::string> command : kCommands) {
    SCOPED_TRACE(command[0]);
    const Ran sent = Logitctl(command);
    ASSERT_EQ(sent.code, 0) << sent.err;
    command.insert(command.end(), {"--arena", arena_address(), "--ring"});
    const Ran shared = Logitctl(command);
    EXPECT_EQ(shared.code, 0) << shared.err;
    const auto rows_of = [](const Ran& ran) { return ran.out.substr(0, ran.out.find("server:")); };
    EXPECT_EQ(rows_of(shared), rows_of(sent));
  }
  EXPECT_EQ(Logitctl({"topk", "--logits", file, "--ring"}).code, 2);
}

TEST_F(RingTest, TheLoadGeneratorUsesRings) {
  const Ran ran = RunBinary("load_bench", {"--addr", address_, "--arena", arena_address(), "--ring",
                                           "--mix", "topk,sample", "--vocab", "100", "--k", "1",
                                           "--warmup", "0", "--duration", "0.3"});
  EXPECT_EQ(ran.code, 0) << ran.err << ran.out;
  const Ran softmax = RunBinary(
      "load_bench", {"--addr", address_, "--arena", arena_address(), "--mix", "softmax", "--vocab",
                     "100", "--rows", "50", "--warmup", "0", "--duration", "0.3"});
  EXPECT_EQ(softmax.code, 0) << softmax.err << softmax.out;
  const Ran alone = RunBinary("load_bench", {"--addr", address_, "--ring", "--duration", "0.1"});
  EXPECT_NE(alone.code, 0);
  EXPECT_THAT(alone.err, HasSubstr("a ring needs --arena"));
}

// Calls through a ring have the identity of the user at its other end, and its quotas.
class RingOfIdentitiesTest : public RingTest {
 protected:
  static Flags Tokens(const TempDir& dir, const std::string& role, const std::string& quota) {
    return {"--tokens",
            dir.Write("tokens", absl::StrCat(R"({"identities": [{"name": "me", "roles": [")", role,
                                             R"("], "uids": [)", geteuid(), "]", quota, "}]}"))};
  }
  explicit RingOfIdentitiesTest(const std::string& role = "infer", const std::string& quota = "")
      : RingTest(Tokens(own_dir_, role, quota)) {}

  static inline const TempDir own_dir_;
};

class RingOfAnotherRoleTest : public RingOfIdentitiesTest {
 protected:
  RingOfAnotherRoleTest() : RingOfIdentitiesTest("score") {}
};

TEST_F(RingOfAnotherRoleTest, ACallWithoutTheRoleIsRefused) {
  const auto arena = Lease();
  const auto ring = Open(arena.get());
  const absl::Status status = ring->TopK(TopKOf({arena->data(), kVocab * 4}, arena.get())).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(status.message()), HasSubstr("me may not call TopK"));
}

class RingOfAQuotaTest : public RingOfIdentitiesTest {
 protected:
  RingOfAQuotaTest() : RingOfIdentitiesTest("infer", R"(, "max_rows_per_second": 5)") {}
};

TEST_F(RingOfAQuotaTest, RowsOfARingCountForTheIdentity) {
  const auto arena = Lease();
  const auto ring = Open(arena.get());
  absl::Status status;
  for (int i = 0; i < 20 && status.ok(); ++i) {
    status = ring->TopK(TopKOf({arena->data(), kVocab * 4}, arena.get())).status();
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("allowed 5 rows per second"));
}

}  // namespace
}  // namespace logitd

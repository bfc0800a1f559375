// Rows in memory of a GPU, and in host memory that the GPU copies from: this process is the client
// of a real logitd on CUDA. Skipped where there is no CUDA device. TEST_DEVICES=0,1 has the
// server use two devices, so that leases are on both.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/arena.h"
#include "client/client.h"
#include "client/ring.h"
#include "tests/becomes.h"
#include "tests/client/running_logitd.h"
#include "tests/client/test_values.h"

namespace logitd {
namespace {

using ::logitd::client::Arena;
using ::logitd::client::ArenaKind;
using ::logitd::testing::Becomes;
using ::logitd::testing::Daemon;
using ::logitd::testing::Normal;
using ::logitd::testing::TempDir;
using ::logitd::testing::TopKParams;
using ::logitd::testing::ViewOf;
using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

// A function of the CUDA driver; null: there is no driver.
template <typename Function>
Function* Driver(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return library == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library, name));
}

bool HasCudaDevice() {
  auto* const init = Driver<int(unsigned)>("cuInit");
  auto* const count_devices = Driver<int(int*)>("cuDeviceGetCount");
  int count = 0;
  return init != nullptr && init(0) == 0 && count_devices(&count) == 0 && count > 0;
}

// An answer without what differs from run to run.
template <typename Result>
std::string AnswerOf(const absl::StatusOr<Result>& result) {
  if (!result.ok()) return result.status().ToString();
  auto answer = result->answer;
  answer.clear_timings();
  return answer.SerializeAsString();
}

class CudaArenaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasCudaDevice()) GTEST_SKIP() << "no CUDA device";
    std::vector<std::string> flags = {"--backend",
                                      "cuda",
                                      "--listen",
                                      address_,
                                      "--metrics-listen",
                                      "off",
                                      "--log-level",
                                      "warn",
                                      "--arena-listen",
                                      arena_address_,
                                      "--max-arena-bytes",
                                      "256MiB",
                                      "--max-device-arena-bytes",
                                      absl::StrCat(device_arena_mib_, "MiB"),
                                      "--head-root",
                                      dir_.path(""),
                                      "--max-leases",
                                      "16",
                                      "--slab-bytes",
                                      "64MiB"};
    if (const char* devices = std::getenv("TEST_DEVICES"); devices != nullptr) {
      flags.insert(flags.end(), {"--device", devices});
    }
    daemon_ = std::make_unique<Daemon>("logitd", flags);
    // The driver takes long to start.
    client_ = *client::Client::Create(
        {.address = address_, .deadline = absl::Seconds(60), .retry = {.max_attempts = 1000}});
    ASSERT_TRUE(::logitd::testing::WaitUntilServing(*client_));
  }
  static void SetUpTestSuite() {
    if (!HasCudaDevice()) std::printf("no CUDA device: every test skipped\n");
  }

  std::unique_ptr<Arena> Lease(ArenaKind kind, int64_t bytes) {
    auto arena = Arena::Lease(arena_address_, bytes, kind);
    EXPECT_TRUE(arena.ok()) << arena.status();
    return arena.ok() ? *std::move(arena) : nullptr;
  }

  // Calls `use` on rows of `width` floats, first sent, then from an arena at several offsets and
  // distances. All answers must be OK and equal.
  template <typename Request, typename Use>
  void ExpectEqualAnswers(Arena& arena, Request request, int64_t width, Use use) {
    const std::vector<float> values = Normal(request.rows * width, 3);
    request.logits = {ViewOf(values)};
    const auto sent = use(request);
    ASSERT_TRUE(sent.ok()) << sent.status();
    const std::string expected = AnswerOf(sent);
    request.arena = &arena;
    const size_t row_bytes = static_cast<size_t>(width) * sizeof(float);
    for (const size_t offset : {size_t{0}, size_t{4}, size_t{8}, size_t{70000}}) {
      for (const size_t gap : {size_t{0}, size_t{4}, size_t{1008}}) {
        SCOPED_TRACE(absl::StrCat("width ", width, ", offset ", offset, ", gap ", gap));
        request.logits.clear();
        for (int64_t row = 0; row < request.rows; ++row) {
          const size_t at = offset + static_cast<size_t>(row) * (row_bytes + gap);
          const absl::string_view from(reinterpret_cast<const char*>(values.data() + row * width),
                                       row_bytes);
          ASSERT_TRUE(arena.Write(static_cast<int64_t>(at), from).ok());
          request.logits.emplace_back(arena.data() + at, row_bytes);
        }
        if (gap == 0) {
          request.logits = {{arena.data() + offset, values.size() * sizeof(float)}};
        }
        EXPECT_EQ(AnswerOf(use(request)), expected);
      }
    }
  }

  // As ExpectEqualAnswers, with a reference that is sent, and one that lies in the arena too.
  void ExpectEqualDivergences(Arena& arena, int64_t width) {
    constexpr int64_t kReferenceAt = 24 * kMiB + 4;
    client::DivergenceRequest pair;
    pair.rows = 5;
    pair.vocab = width;
    const std::vector<float> reference = Normal(pair.rows * width, 9);
    const absl::string_view bytes = ViewOf(reference);
    ASSERT_TRUE(arena.Write(kReferenceAt, bytes).ok());
    ExpectEqualAnswers(arena, pair, width, [&](client::DivergenceRequest request) {
      request.reference_logits = {bytes};
      auto sent = client_->Divergence(request);
      request.reference_logits = {{arena.data() + kReferenceAt, bytes.size()}};
      request.reference_arena = &arena;
      EXPECT_EQ(AnswerOf(client_->Divergence(request)), AnswerOf(sent));
      return sent;
    });
  }

  void ExpectEqualAnswersOfAllOps(ArenaKind kind) {
    const auto arena = Lease(kind, 32 * kMiB);
    ASSERT_NE(arena, nullptr);
    for (const int64_t width : {1, 7, 1003, 4096, 50257, 128256}) {
      client::TopKRequest topk = {.rows = 9, .vocab = width, .params = TopKParams({1})};
      ExpectEqualAnswers(*arena, topk, width, [&](const auto& r) { return client_->TopK(r); });
      client::SampleRequest sample = {.rows = 5, .vocab = width};
      sample.params.add_temperature(0.8f);
      sample.params.add_top_p(0.9f);
      for (uint64_t row = 0; row < 5; ++row) sample.params.add_seed(row);
      ExpectEqualAnswers(*arena, sample, width, [&](const auto& r) { return client_->Sample(r); });
      client::ScoreRequest score = {.rows = 6, .vocab = width};
      for (int i = 0; i < 6; ++i) score.params.add_targets(0);
      ExpectEqualAnswers(*arena, score, width, [&](const auto& r) { return client_->Score(r); });
      ExpectEqualDivergences(*arena, width);
    }
  }

  int64_t device_arena_mib_ = 256;
  TempDir dir_;
  const std::string address_ = "unix:" + dir_.path("socket");
  const std::string arena_address_ = "unix:" + dir_.path("arena");
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<client::Client> client_;
};

TEST_F(CudaArenaTest, AnswersFromAGpuAreThoseOfRowsThatWereSent) {
  ExpectEqualAnswersOfAllOps(ArenaKind::kCuda);
}

TEST_F(CudaArenaTest, AnswersFromPinnedHostMemoryAreThoseOfRowsThatWereSent) {
  ExpectEqualAnswersOfAllOps(ArenaKind::kHost);
}

TEST_F(CudaArenaTest, ANewArenaIsAllZeroEvenWhereAnotherOneWas) {
  for (int i = 0; i < 3; ++i) {
    const auto arena = Lease(ArenaKind::kCuda, 64 * kMiB);
    ASSERT_NE(arena, nullptr);
    std::string all(64 * kMiB, 'x');
    ASSERT_TRUE(arena->Read(0, {all.data(), all.size()}).ok());
    EXPECT_EQ(all.find_first_not_of('\0'), std::string::npos);
    ASSERT_TRUE(arena->Write(0, std::string(64 * kMiB, 's')).ok());
  }
}

TEST_F(CudaArenaTest, AttentionReadsAndWritesAGpusMemory) {
  const client::AttentionShape shape = {.heads = 3, .queries = 65, .keys = 1031};
  const std::vector<float> scores = Normal(3 * 65 * 1031, 5);
  const std::vector<float> d_probs = Normal(3 * 65 * 1031, 6);
  const size_t bytes = scores.size() * sizeof(float);
  client::AttentionSoftmaxRequest request = {.shape = shape, .scores = ViewOf(scores)};
  const auto sent = client_->AttentionSoftmax(request);
  ASSERT_TRUE(sent.ok()) << sent.status();
  client::AttentionSoftmaxBackwardRequest backward = {
      .shape = shape, .probs = sent->values, .d_probs = ViewOf(d_probs)};
  const auto sent_back = client_->AttentionSoftmaxBackward(backward);
  ASSERT_TRUE(sent_back.ok()) << sent_back.status();

  const auto arena = Lease(ArenaKind::kCuda, 4 * static_cast<int64_t>(bytes));
  ASSERT_NE(arena, nullptr);
  const auto at = [&](size_t i) { return absl::string_view(arena->data() + i * bytes, bytes); };
  ASSERT_TRUE(arena->Write(0, ViewOf(scores)).ok());
  ASSERT_TRUE(arena->Write(static_cast<int64_t>(bytes), ViewOf(d_probs)).ok());
  request.scores = at(0);
  request.probs = {arena->data() + 2 * bytes, bytes};
  request.arena = arena.get();
  const auto shared = client_->AttentionSoftmax(request);
  ASSERT_TRUE(shared.ok()) << shared.status();
  std::string probs(bytes, '\0');
  ASSERT_TRUE(arena->Read(static_cast<int64_t>(2 * bytes), {probs.data(), bytes}).ok());
  EXPECT_EQ(probs, sent->values);

  backward.probs = at(2);
  backward.d_probs = at(1);
  backward.d_scores = {arena->data() + 3 * bytes, bytes};
  backward.arena = arena.get();
  const auto shared_back = client_->AttentionSoftmaxBackward(backward);
  ASSERT_TRUE(shared_back.ok()) << shared_back.status();
  std::string d_scores(bytes, '\0');
  ASSERT_TRUE(arena->Read(static_cast<int64_t>(3 * bytes), {d_scores.data(), bytes}).ok());
  EXPECT_EQ(d_scores, sent_back->values);
}

TEST_F(CudaArenaTest, RefusalsComeBeforeAnythingRuns) {
  EXPECT_THAT(
      std::string(
          Arena::Lease(arena_address_, 256 * kMiB + 1, ArenaKind::kCuda).status().message()),
      HasSubstr("bytes of a GPU to lease, allowed 1..268435456"));
  const auto other = Arena::Lease(arena_address_, 1, ArenaKind::kCuda, 99);
  EXPECT_EQ(other.status().code(), absl::StatusCode::kNotFound) << other.status();
  const auto arena = Lease(ArenaKind::kCuda, 2 * kMiB);
  ASSERT_NE(arena, nullptr);
  const auto more = Arena::Lease(arena_address_, 255 * kMiB, ArenaKind::kCuda);
  EXPECT_EQ(more.status().code(), absl::StatusCode::kResourceExhausted) << more.status();
  const auto ring = client::Ring::Open(arena.get(), 0, {});
  EXPECT_EQ(ring.status().code(), absl::StatusCode::kInvalidArgument) << ring.status();
}

// Strangers in arenas of their own, of both kinds, and callers that send their rows.
TEST_F(CudaArenaTest, StrangersShareBatchesAndEachGetsItsOwnAnswer) {
  constexpr int64_t kVocab = 32003;
  std::vector<std::thread> callers;
  for (int c = 0; c < 9; ++c) {
    callers.emplace_back([this, c] {
      const auto client = *client::Client::Create({.address = address_});
      const std::vector<float> logits = Normal(2 * kVocab, static_cast<uint32_t>(100 + c));
      client::TopKRequest request = {
          .rows = 2, .vocab = kVocab, .logits = {ViewOf(logits)}, .params = TopKParams({8})};
      const std::string expected = AnswerOf(client->TopK(request));
      const auto arena = Lease(c % 2 == 0 ? ArenaKind::kCuda : ArenaKind::kHost, 2 * kMiB);
      ASSERT_NE(arena, nullptr);
      if (c % 3 != 0) {
        const int64_t at = 4 * c;
        ASSERT_TRUE(arena->Write(at, ViewOf(logits)).ok());
        request.logits = {{arena->data() + at, logits.size() * sizeof(float)}};
        request.arena = arena.get();
      }
      for (int i = 0; i < 200; ++i) ASSERT_EQ(AnswerOf(client->TopK(request)), expected);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST_F(CudaArenaTest, ARingTakesRowsOfAGpu) {
  constexpr int64_t kVocab = 131072;
  const std::vector<float> logits = Normal(kVocab, 8);
  client::SampleRequest request = {.rows = 1, .vocab = kVocab, .logits = {ViewOf(logits)}};
  request.params.add_top_p(0.9f);
  request.params.add_seed(5);
  const std::string expected = AnswerOf(client_->Sample(request));
  const auto rows = Lease(ArenaKind::kCuda, 2 * kMiB);
  const auto host = Lease(ArenaKind::kHost, client::Ring::Bytes(client::RingOptions()));
  ASSERT_TRUE(rows != nullptr && host != nullptr);
  const auto ring = client::Ring::Open(host.get(), 0, {});
  ASSERT_TRUE(ring.ok()) << ring.status();
  ASSERT_TRUE(rows->Write(0, ViewOf(logits)).ok());
  request.logits = {{rows->data(), logits.size() * sizeof(float)}};
  request.arena = rows.get();
  for (int i = 0; i < 50; ++i)
    EXPECT_EQ(AnswerOf((*ring)->Sample(request, absl::Seconds(10))), expected);
}

// Rows that change while they are copied spoil only the answer of their own call.
TEST_F(CudaArenaTest, AClientThatOverwritesItsRowsSpoilsOnlyItsOwnAnswer) {
  constexpr int64_t kVocab = 65537;
  for (const ArenaKind kind : {ArenaKind::kCuda, ArenaKind::kHost}) {
    const auto arena = Lease(kind, 8 * kMiB);
    ASSERT_NE(arena, nullptr);
    std::atomic<bool> stop = false;
    std::thread scribbler([&] {
      const std::string nan(4 * kMiB, '\xff');
      const std::string other(4 * kMiB, 'a');
      for (int i = 0; !stop; ++i) {
        if (!arena->Write(0, i % 2 == 0 ? nan : other).ok()) return;
      }
    });
    const std::vector<float> logits = Normal(4 * kVocab, 5);
    client::SampleRequest honest = {.rows = 4, .vocab = kVocab, .logits = {ViewOf(logits)}};
    honest.params.add_top_p(0.7f);
    for (uint64_t row = 0; row < 4; ++row) honest.params.add_seed(row);
    const std::string expected = AnswerOf(client_->Sample(honest));
    client::SampleRequest torn = honest;
    torn.logits = {{arena->data(), logits.size() * sizeof(float)}};
    torn.arena = arena.get();
    for (int i = 0; i < 100; ++i) {
      const auto answer = client_->Sample(torn);
      EXPECT_TRUE(answer.ok()) << answer.status();
      EXPECT_EQ(AnswerOf(client_->Sample(honest)), expected);
    }
    stop = true;
    scribbler.join();
  }
}

// A client that takes the pages out of its file gets answers of some kind, and nothing else
// happens.
TEST_F(CudaArenaTest, PagesThatTheClientTakesOutHarmOnlyItself) {
  constexpr int64_t kVocab = 65537;
  const std::vector<float> logits = Normal(4 * kVocab, 9);
  client::TopKRequest honest = {
      .rows = 4, .vocab = kVocab, .logits = {ViewOf(logits)}, .params = TopKParams({3})};
  const std::string expected = AnswerOf(client_->TopK(honest));
  const auto arena = Lease(ArenaKind::kHost, 4 * kMiB);
  ASSERT_NE(arena, nullptr);
  client::TopKRequest own = honest;
  own.logits = {{arena->data(), logits.size() * sizeof(float)}};
  own.arena = arena.get();
  std::atomic<bool> stop = false;
  std::thread puncher([&] {
    while (!stop) {
      EXPECT_EQ(madvise(arena->data(), 4 * kMiB, MADV_REMOVE), 0);
      std::memset(arena->data(), 1, 4 * kMiB);
    }
  });
  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(client_->TopK(own).ok());
    EXPECT_EQ(AnswerOf(client_->TopK(honest)), expected);
  }
  stop = true;
  puncher.join();
}

// Free memory of the first device, as this process sees it.
size_t FreeDeviceMemory() {
  void* context = nullptr;
  void* popped = nullptr;
  size_t free = 0;
  size_t total = 0;
  Driver<int(void**, int)>("cuDevicePrimaryCtxRetain")(&context, 0);
  Driver<int(void*)>("cuCtxPushCurrent_v2")(context);
  Driver<int(size_t*, size_t*)>("cuMemGetInfo_v2")(&free, &total);
  Driver<int(void**)>("cuCtxPopCurrent_v2")(&popped);
  return free;
}

// TEST_LARGE_HEAD=1: a head of 128256 x 4096, whose figures are printed.
class HeadUpdateTest : public CudaArenaTest {
 protected:
  HeadUpdateTest() { device_arena_mib_ = 1200; }

  const bool large_ = std::getenv("TEST_LARGE_HEAD") != nullptr;
  const int64_t vocab_ = large_ ? 128256 : 3000;
  const int64_t hidden_ = large_ ? 4096 : 64;
  const int64_t bytes_ = vocab_ * hidden_ * 2;
};

// Weights are all one number, so that a row's logsumexp tells it.
TEST_F(HeadUpdateTest, CallsGetOneVersionOrTheOtherWhileAHeadIsUpdatedFromAGpuAndFromTheHost) {
  const std::string header = absl::StrFormat(
      R"({"lm_head.weight":{"dtype":"BF16","shape":[%d,%d],"data_offsets":[0,%d]}})", vocab_,
      hidden_, bytes_);
  std::string prefix(8, '\0');
  prefix[0] = static_cast<char>(header.size());  // below 256
  const std::string file = dir_.Write("head.safetensors", prefix + header);
  std::filesystem::resize_file(file, prefix.size() + header.size() + static_cast<size_t>(bytes_));
  v1::LoadHeadRequest load;
  load.set_name("h");
  load.set_path("head.safetensors");
  ASSERT_TRUE(client_->LoadHead(load).ok());

  // Updates of one server count on from its first one.
  v1::UpdateHeadRequest again;
  again.set_name("h");
  again.set_path("head.safetensors");
  const auto begun = client_->UpdateHead(again);
  ASSERT_TRUE(begun.ok()) << begun.status();
  const int64_t begin = begun->head_version();
  std::vector<float> weights(7, 0.0f);  // by version, from `begin` on
  const auto view = [](const std::vector<uint16_t>& values) {
    return absl::string_view(reinterpret_cast<const char*>(values.data()), values.size() * 2);
  };
  const std::vector<uint16_t> ones(static_cast<size_t>(hidden_), 0x3f80);
  const auto call = [&]() -> absl::StatusOr<int64_t> {
    client::TopKRequest request = {.dtype = v1::DTYPE_BF16, .rows = 1, .head = "h"};
    request.hidden_size = hidden_;
    request.hidden = {view(ones)};
    request.params.add_k(1);
    const auto result = client_->TopK(request);
    if (!result.ok()) return result.status();
    const int64_t version = result->answer.head_version() - begin;
    const double expected = std::log(static_cast<double>(vocab_)) +
                            static_cast<double>(hidden_ * weights[static_cast<size_t>(version)]);
    EXPECT_NEAR(result->answer.logsumexp(0), expected, expected * 1e-5) << "version " << version;
    return version;
  };
  for (int64_t version = 1; version < 7; ++version) {
    const bool on_device = large_ || version % 2 == 0;
    const auto arena = Lease(on_device ? ArenaKind::kCuda : ArenaKind::kHost, bytes_);
    ASSERT_NE(arena, nullptr);
    const uint16_t value = static_cast<uint16_t>(0x3f00 + 16 * version);
    const uint32_t wide = uint32_t{value} << 16;
    std::memcpy(&weights[static_cast<size_t>(version)], &wide, sizeof(wide));
    const std::vector<uint16_t> part(size_t{1} << 20, value);
    for (int64_t at = 0; at < bytes_; at += 2 * kMiB) {
      const auto size = static_cast<size_t>(std::min(2 * kMiB, bytes_ - at));
      ASSERT_TRUE(arena->Write(at, view(part).substr(0, size)).ok());
    }
    std::atomic<bool> done = false;
    absl::Duration longest_before, longest;
    std::atomic<bool> updating = false;
    std::thread caller([&] {
      while (!done) {
        const bool during = updating;
        const absl::Time start = absl::Now();
        ASSERT_TRUE(call().ok());
        absl::Duration& most = during ? longest : longest_before;
        most = std::max(most, absl::Now() - start);
      }
    });
    absl::SleepFor(absl::Milliseconds(200));
    v1::UpdateHeadRequest update;
    update.set_name("h");
    v1::HeadRows* const rows = update.add_rows();
    const absl::string_view all(arena->data(), static_cast<size_t>(bytes_));
    *rows->mutable_shared() = arena->Find({all}, vocab_, hidden_ * 2).value();
    rows->set_dtype(v1::DTYPE_BF16);
    rows->set_width(hidden_);
    rows->set_rows(vocab_);
    updating = true;
    const absl::Time start = absl::Now();
    const auto head = client_->UpdateHead(update);
    const absl::Duration took = absl::Now() - start;
    absl::SleepFor(absl::Milliseconds(50));
    done = true;
    caller.join();
    ASSERT_TRUE(head.ok()) << head.status();
    EXPECT_EQ(head->head_version(), begin + version);
    EXPECT_EQ(*call(), version);
    if (!large_) continue;
    std::printf("update %d x %d bf16: %.2f ms, longest call before %.2f ms, during %.2f ms\n",
                static_cast<int>(vocab_), static_cast<int>(hidden_),
                absl::ToDoubleMilliseconds(took), absl::ToDoubleMilliseconds(longest_before),
                absl::ToDoubleMilliseconds(longest));
  }
}

// Clients that are killed at any moment leave no memory, lease or descriptor behind.
TEST_F(CudaArenaTest, KilledClientsLeaveNothingBehind) {
  const auto all_is_free = [this] {
    return Arena::Lease(arena_address_, 256 * kMiB, ArenaKind::kCuda).ok() &&
           Arena::Lease(arena_address_, 256 * kMiB, ArenaKind::kHost).ok();
  };
  const auto descriptors = [] {
    int64_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      std::error_code error;
      const auto exe = std::filesystem::read_symlink(entry.path() / "exe", error);
      if (error || exe.filename() != "logitd") continue;
      for (const auto& fd : std::filesystem::directory_iterator(entry.path() / "fd", error)) {
        (void)fd;
        ++count;
      }
    }
    return count;
  };
  const auto kill_clients = [&](int count) {
    for (int i = 0; i < count; ++i) {
      // Until all memory is free again it gets no lease, and ends.
      ASSERT_TRUE(Becomes([&] {
        return ::logitd::testing::RunAndKill(
            "load_bench",
            {"--addr", address_, "--arena", arena_address_, "--arena-kind",
             i % 2 == 0 ? "cuda" : "host", "--rows", "64", "--vocab", "30000", "--in-flight", "3",
             "--warmup", "0", "--duration", "5"},
            absl::Milliseconds(150 + 60 * i));
      }));
    }
    ASSERT_TRUE(Becomes(all_is_free));
  };
  kill_clients(5);  // what the driver keeps for the first ones, it keeps for all
  const size_t free_before = FreeDeviceMemory();
  const int64_t descriptors_before = descriptors();
  kill_clients(10);
  EXPECT_TRUE(Becomes([&] { return descriptors() <= descriptors_before; }));
  // A killed process's memory is the device's again after a moment.
  EXPECT_TRUE(Becomes([&] { return FreeDeviceMemory() >= free_before; }));
}

}  // namespace
}  // namespace logitd

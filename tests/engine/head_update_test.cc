// New versions of heads, from files and from rows in memory.
#include "server/engine/head_update.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "server/engine/devices.h"
#include "server/engine/metrics.h"
#include "tests/engine/heads_fixture.h"
#include "tests/engine/test_job.h"

namespace logitd::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// named.safetensors: f32, 5 tokens x 3, with a bias.
constexpr int64_t kVocab = 5;
constexpr int64_t kHidden = 3;

float At(const HeadView& view, int64_t row, int64_t column) {
  return static_cast<const float*>(view.weight.data)[row * view.weight.row_stride + column];
}

class HeadUpdateTest : public HeadsTest {
 protected:
  // A file whose weight is f32, with every number's sign turned.
  std::string Negated(const std::string& path) {
    std::ifstream in(files_ + "/" + path, std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    uint64_t header;
    std::memcpy(&header, bytes.data(), sizeof(header));
    for (size_t i = 8 + header + 3; i < bytes.size(); i += 4) bytes[i] ^= '\x80';
    std::ofstream(files_ + "/negated_" + path, std::ios::binary) << bytes;
    return "negated_" + path;
  }
  absl::StatusOr<std::shared_ptr<const Head>> Update(const std::string& path) {
    return heads_.Update(Request(path), Always);
  }
  std::string UpdateError(const std::string& path) { return Update(path).status().ToString(); }

  // `rows` of the weight from row `first` on, all of `value`, as the part of a lease with space
  // between.
  struct Rows {
    Rows(int64_t first, int64_t count, float value, int64_t width = kHidden)
        : memory(static_cast<size_t>(count * (width + 2)), value) {
      rows = {.dtype = DType::kF32,
              .width = width,
              .first = first,
              .count = count,
              .row_stride = static_cast<size_t>(width + 2) * sizeof(float),
              .data = reinterpret_cast<const std::byte*>(memory.data())};
    }
    // Memory that only `read` reaches.
    HeadRows Unpinned() const {
      HeadRows unpinned = rows;
      unpinned.data = nullptr;
      unpinned.read = [from = rows](int64_t first, int64_t count, std::byte* to, size_t stride) {
        for (int64_t r = 0; r < count; ++r) {
          std::memcpy(to + static_cast<size_t>(r) * stride,
                      from.data + static_cast<size_t>(first + r) * from.row_stride,
                      static_cast<size_t>(from.width) * sizeof(float));
        }
      };
      return unpinned;
    }
    std::vector<float> memory;
    HeadRows rows;
  };

  // The head is all Pattern, except for rows [first, first + count), which are of `value`.
  static std::string Unlike(const HeadView& view, int64_t first, int64_t count, float value) {
    for (int64_t r = 0; r < view.vocab(); ++r) {
      for (int64_t c = 0; c < view.weight.row_stride; ++c) {
        const bool is_new = r >= first && r < first + count;
        const float expected = c >= view.hidden() ? 0 : is_new ? value : Pattern(r, c);
        if (At(view, r, c) != expected) return absl::StrFormat("row %d, column %d", r, c);
      }
    }
    return "";
  }
};

TEST_F(HeadUpdateTest, AFileTakesThePlaceOfTheOldHeadWhichItsUsersKeep) {
  std::shared_ptr<const Head> old = *Load(Request("named.safetensors"));
  const size_t bytes = backend_.device_bytes();
  const auto updated = Update(Negated("named.safetensors"));
  ASSERT_TRUE(updated.ok()) << updated.status();
  EXPECT_EQ(*updated, *heads_.Find("h"));
  EXPECT_EQ((*updated)->info().version, 2);
  EXPECT_THAT((*updated)->info().path, HasSubstr("negated"));
  EXPECT_EQ(Wrong(old->view()), "");
  const HeadView& view = (*updated)->view();
  for (int64_t r = 0; r < kVocab; ++r) {
    for (int64_t c = 0; c < kHidden; ++c) EXPECT_EQ(At(view, r, c), -Pattern(r, c));
  }
  EXPECT_EQ(backend_.device_bytes(), 2 * bytes);
  old = nullptr;
  EXPECT_EQ(backend_.device_bytes(), bytes);
  EXPECT_EQ((*Update("named.safetensors"))->info().version, 3);
  ASSERT_TRUE(heads_.Unload("h").ok());
  EXPECT_EQ((*Load(Request("named.safetensors")))->info().version, 4);
  EXPECT_THAT(Scrape(metrics_), AllOf(HasSubstr("logitd_head_updates_total{code=\"OK\"} 2\n"),
                                      HasSubstr("logitd_head_update_seconds_count 2\n"),
                                      HasSubstr("logitd_head_version{head=\"h\"} 4\n")));
}

TEST_F(HeadUpdateTest, TheRequestOfTheLoadHoldsForTheUpdate) {
  ASSERT_TRUE(Load(Request("padded", /*norm=*/true, /*vocab=*/7)).ok());
  const auto updated = Update("padded");
  ASSERT_TRUE(updated.ok()) << updated.status();
  EXPECT_EQ((*updated)->view().vocab(), 7);
  EXPECT_NE((*updated)->view().norm, nullptr);
}

TEST_F(HeadUpdateTest, WhatDoesNotFitOrCannotBeLeavesTheOldHead) {
  const auto old = *Load(Request("named.safetensors"));
  const size_t bytes = backend_.device_bytes();
  EXPECT_THAT(UpdateError("only.safetensors"),
              AllOf(StartsWith("INVALID_ARGUMENT: head h: "),
                    HasSubstr("weight: got bf16 [3,8] without a bias, allowed f32 [5,3] with a "
                              "bias, as the head has")));
  EXPECT_THAT(UpdateError("none"), StartsWith("NOT_FOUND: head h: "));
  EXPECT_THAT(heads_.Update(Named("g", "named.safetensors"), Always).status().ToString(),
              StartsWith("NOT_FOUND: no head \"g\"; loaded: h"));
  backend_.LimitDeviceBytes(bytes + 10);
  EXPECT_THAT(UpdateError("named.safetensors"),
              StartsWith(absl::StrFormat(
                  "RESOURCE_EXHAUSTED: head h: needs %d bytes of device memory", bytes)));
  EXPECT_THAT(heads_.BeginUpdate("h").status().ToString(),
              StartsWith(absl::StrFormat(
                  "RESOURCE_EXHAUSTED: head h: needs %d bytes of device memory", bytes)));
  backend_.LimitDeviceBytes(SIZE_MAX);
  backend_.FailNext(FaultPoint::kWait, absl::UnavailableError("once"));
  EXPECT_THAT(UpdateError("named.safetensors"), StartsWith("UNAVAILABLE: head h: once"));
  EXPECT_EQ(heads_.Update(Request("named.safetensors"), [](const HeadProgress&) { return false; })
                .status()
                .code(),
            absl::StatusCode::kCancelled);
  EXPECT_EQ(*heads_.Find("h"), old);
  EXPECT_EQ(backend_.device_bytes(), bytes);
  EXPECT_EQ(old->info().version, 1);
}

TEST_F(HeadUpdateTest, OneChangeOfANameAtATime) {
  ASSERT_TRUE(Load(Request("named.safetensors")).ok());
  const absl::Status busy =
      absl::AlreadyExistsError("head h is being updated, allowed one update at a time");
  const auto updated = heads_.Update(Request("named.safetensors"), [&](const HeadProgress&) {
    EXPECT_EQ(heads_.BeginUpdate("h").status(), busy);
    EXPECT_EQ(heads_.CheckUpdate(Request("named.safetensors")), busy);
    EXPECT_EQ(Update("named.safetensors").status(), busy);
    return true;
  });
  ASSERT_TRUE(updated.ok()) << updated.status();
  auto update = heads_.BeginUpdate("h");
  ASSERT_TRUE(update.ok()) << update.status();
  EXPECT_EQ(heads_.BeginUpdate("h").status(), busy);
  // An unload is not refused: then there is nothing to replace.
  ASSERT_TRUE(heads_.Unload("h").ok());
  EXPECT_THAT(ErrorOf(Request("named.safetensors")), StartsWith("ALREADY_EXISTS: "));
  const absl::Status gone = (*update)->Commit().status();
  EXPECT_EQ(gone, absl::AbortedError("head h: it was unloaded while it was updated"));
  EXPECT_FALSE(heads_.Find("h").ok());
  update->reset();
  EXPECT_EQ((*Load(Request("named.safetensors")))->info().version, 3);
}

TEST_F(HeadUpdateTest, TheOldHeadAndTheNewOneCountTogether) {
  const int64_t bytes = Load(Request("named.safetensors")).value()->info().device_bytes;
  Heads heads(&backend_, nullptr, 2 * bytes - 1);
  ASSERT_TRUE(heads.Load(Request("named.safetensors"), Always).ok());
  for (const absl::Status& refused :
       {heads.BeginUpdate("h").status(),
        heads.Update(Request("named.safetensors"), Always).status()}) {
    EXPECT_EQ(refused, absl::ResourceExhaustedError(absl::StrFormat(
                           "head h: needs %d bytes of device memory, heads hold %d of %d "
                           "(--max-head-bytes)",
                           bytes, bytes, 2 * bytes - 1)));
  }
  EXPECT_EQ(heads.bytes(0), bytes);
}

TEST_F(HeadUpdateTest, RowsReplaceTheirOwnAndOthersStay) {
  const auto old = *Load(Request("named.safetensors"));
  for (const int device : {kAnyDevice, 0, /*unpinned*/ 1}) {
    SCOPED_TRACE(device);
    auto update = heads_.BeginUpdate("h");
    ASSERT_TRUE(update.ok()) << update.status();
    const HeadView before = (*heads_.Find("h"))->view();
    Rows early(1, 2, 7);
    Rows late(2, 2, 9);  // wins in row 2
    for (Rows* some : {&early, &late}) {
      EXPECT_TRUE((*update)->CheckRows(some->rows).ok());
      if (device == 0) some->rows.device = 0;
      const absl::Status written = (*update)->Write(device == 1 ? some->Unpinned() : some->rows);
      ASSERT_TRUE(written.ok()) << written;
    }
    EXPECT_EQ((*update)->done_bytes(), 4 * kHidden * 4);
    EXPECT_EQ((*heads_.Find("h"))->view().weight.data, before.weight.data);
    const auto head = (*update)->Commit();
    ASSERT_TRUE(head.ok()) << head.status();
    const HeadView& view = (*head)->view();
    for (int64_t c = 0; c < kHidden; ++c) {
      EXPECT_EQ(At(view, 1, c), 7);
      EXPECT_EQ(At(view, 2, c), 9);
      EXPECT_EQ(At(view, 3, c), 9);
      for (const int64_t r : {0, 4}) EXPECT_EQ(At(view, r, c), Pattern(r, c));
    }
    for (int64_t r = 0; r < kVocab; ++r) {
      EXPECT_EQ(At(view, r, kHidden), 0) << "after a row's end";
      EXPECT_EQ(view.bias[r], Pattern(r, 0));
    }
  }
  EXPECT_EQ(Wrong(old->view()), "");
}

TEST_F(HeadUpdateTest, BiasAndNormAreReplacedAsTheHeadUsesThem) {
  ASSERT_TRUE(Load(Request("named.safetensors")).ok());
  ASSERT_TRUE(heads_.Load(Named("normed", "padded", /*norm=*/true), Always).ok());
  {
    auto update = heads_.BeginUpdate("h");
    Rows bias(3, 2, 5, /*width=*/1);
    bias.rows.part = HeadPart::kBias;
    EXPECT_TRUE((*update)->CheckRows(bias.rows).ok());
    ASSERT_TRUE((*update)->Write(bias.rows).ok());
    const auto head = *(*update)->Commit();
    for (int64_t r = 0; r < kVocab; ++r) {
      EXPECT_EQ(head->view().bias[r], r < 3 ? Pattern(r, 0) : 5);
    }
    EXPECT_EQ(Wrong(head->view()), "");
  }
  auto update = heads_.BeginUpdate("normed");
  const int64_t hidden = (*update)->old().view().hidden();
  Rows norm(0, 1, 2.5f, hidden);
  norm.rows.part = HeadPart::kNorm;
  EXPECT_TRUE((*update)->CheckRows(norm.rows).ok());
  ASSERT_TRUE((*update)->Write(norm.rows).ok());
  const auto head = *(*update)->Commit();
  for (int64_t d = 0; d < hidden; ++d) EXPECT_EQ(head->view().norm[d], 2.5f);
}

TEST_F(HeadUpdateTest, RowsThatTheHeadDoesNotHaveAreRefused) {
  ASSERT_TRUE(Load(Request("named.safetensors")).ok());
  const auto update = *heads_.BeginUpdate("h");
  const auto refused = [&](auto change) {
    HeadRows rows = {.dtype = DType::kF32, .width = kHidden, .first = 1, .count = 2};
    change(rows);
    return std::string(update->CheckRows(rows).message());
  };
  EXPECT_EQ(refused([](HeadRows& r) { r.part = HeadPart::kNorm; }),
            "rows.part: got norm, allowed parts of head h, which has none");
  EXPECT_EQ(refused([](HeadRows& r) { r.dtype = DType::kBF16; }),
            "rows.dtype: got bf16, allowed f32, of the weight");
  EXPECT_EQ(refused([](HeadRows& r) { r.width = 4; }),
            "rows.width: got 4, allowed 3, of the weight");
  EXPECT_EQ(refused([](HeadRows& r) { r.part = HeadPart::kBias; }),
            "rows.width: got 3, allowed 1, of the bias");
  EXPECT_EQ(refused([](HeadRows& r) { r.first = -1; }), "rows.first_row: got -1, allowed 0..4");
  EXPECT_EQ(refused([](HeadRows& r) { r.first = 5; }), "rows.first_row: got 5, allowed 0..4");
  EXPECT_EQ(refused([](HeadRows& r) { r.count = 0; }), "rows.rows: got 0, allowed 1..4");
  EXPECT_EQ(refused([](HeadRows& r) { r.count = INT64_MAX; }),
            "rows.rows: got 9223372036854775807, allowed 1..4");
}

TEST_F(HeadUpdateTest, WithoutCommitOrAfterAnErrorTheOldHeadStays) {
  const auto old = *Load(Request("named.safetensors"));
  const size_t bytes = backend_.device_bytes();
  {
    auto update = *heads_.BeginUpdate("h");
    EXPECT_EQ(backend_.device_bytes(), 2 * bytes);
    ASSERT_TRUE(update->Write(Rows(0, 5, 1).rows).ok());
  }
  EXPECT_EQ(backend_.device_bytes(), bytes);
  for (const FaultPoint point : {FaultPoint::kUpload, FaultPoint::kWait}) {
    auto update = *heads_.BeginUpdate("h");
    backend_.FailNext(point, absl::InternalError("for good"));
    const absl::Status failed = update->Write(Rows(0, 5, 1).rows);
    EXPECT_EQ(DeviceOf(failed), 0);
    update = nullptr;
    backend_.FailNext(point, absl::UnavailableError("once"));
    EXPECT_TRUE(absl::IsUnavailable(heads_.BeginUpdate("h").status()));
  }
  EXPECT_EQ(backend_.device_bytes(), bytes);
  EXPECT_EQ(*heads_.Find("h"), old);
  EXPECT_EQ(Wrong(old->view()), "");
  EXPECT_THAT(Scrape(metrics_),
              AllOf(HasSubstr("logitd_head_updates_total{code=\"CANCELLED\"} 1\n"),
                    HasSubstr("logitd_head_updates_total{code=\"INTERNAL\"} 2\n"),
                    HasSubstr("logitd_head_updates_total{code=\"UNAVAILABLE\"} 2\n")));
  EXPECT_TRUE(Update("named.safetensors").ok());
}

TEST_F(HeadUpdateTest, EveryFindReturnsOneWholeVersion) {
  ASSERT_TRUE(Load(Request("named.safetensors")).ok());
  std::atomic<bool> done = false;
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      int64_t last = 0;
      while (!done) {
        const auto head = *heads_.Find("h");
        const int64_t version = head->info().version;
        ASSERT_GE(version, last);
        last = version;
        if (version == 1) continue;
        for (int64_t r = 0; r < kVocab; ++r) {
          ASSERT_EQ(At(head->view(), r, 1), static_cast<float>(version));
        }
      }
    });
  }
  for (int version = 2; version < 200; ++version) {
    auto update = *heads_.BeginUpdate("h");
    const Rows upper(2, 3, static_cast<float>(version));
    const Rows lower(0, 2, static_cast<float>(version));
    ASSERT_TRUE(update->Write(upper.rows).ok());
    ASSERT_TRUE(update->Write(lower.Unpinned()).ok());
    ASSERT_TRUE(update->Commit().ok());
  }
  done = true;
  for (std::thread& reader : readers) reader.join();
}

// ---- Several devices

TEST_F(HeadUpdateTest, EveryDeviceGetsRowsOfTheHostAndOfAnyDevice) {
  FakeBackend second({.backend = "fake", .number = 4, .name = "fake"});
  const auto devices = std::make_shared<Devices>(std::vector<Backend*>{&backend_, &second});
  Heads heads(devices, nullptr);
  ASSERT_TRUE(heads.Load(Request("named.safetensors"), Always).ok());
  for (const int device : {kAnyDevice, 0, 1}) {
    auto update = *heads.BeginUpdate("h");
    Rows rows(1, 2, static_cast<float>(device + 10));
    rows.rows.device = device;
    ASSERT_TRUE(update->Write(rows.rows).ok());
    const auto head = *update->Commit();
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(Unlike(head->view(i), 1, 2, static_cast<float>(device + 10)), "") << device;
    }
  }
  EXPECT_EQ(second.live_slabs(), 0);
  // Rows of a lost device are lost; the others go on.
  devices->Lose(1);
  auto update = *heads.BeginUpdate("h");
  Rows lost(1, 2, 0);
  lost.rows.device = 1;
  EXPECT_EQ(update->Write(lost.rows),
            absl::UnavailableError("rows: got some on device 4, which is lost"));
  update = nullptr;
  EXPECT_TRUE(heads.BeginUpdate("h").ok());
}

TEST_F(HeadUpdateTest, PartsOfAHeadGetTheirRowsAndSwapAtOnce) {
  std::vector<std::unique_ptr<Backend>> cpus;
  std::vector<Backend*> backends;
  for (int i = 0; i < 4; ++i) {
    cpus.push_back(CreateCpuBackend({.device = i, .cpu_threads = 1}).value());
    backends.push_back(cpus.back().get());
  }
  const auto devices = std::make_shared<Devices>(backends);
  Heads heads(devices, nullptr);
  HeadRequest request = Request("wide", /*norm=*/true);
  request.shard = true;
  const auto old = *heads.Load(request, Always);  // 2500 tokens x 3, in parts of 1024
  ASSERT_EQ(old->view().weight.dtype, DType::kBF16);
  {
    auto update = *heads.BeginUpdate("h");
    // Rows 1000 to 2099: of three devices. The bias over one border, and the norm of all.
    const std::vector<uint16_t> weight(1100 * 3, 0x3f80);
    const std::vector<float> ones(1100, 1.0f);
    HeadRows rows = {.dtype = DType::kBF16, .width = 3, .first = 1000, .count = 1100};
    rows.read = [&](int64_t, int64_t count, std::byte* to, size_t stride) {
      for (int64_t r = 0; r < count; ++r) {
        std::memcpy(to + static_cast<size_t>(r) * stride, weight.data(), 6);
      }
    };
    ASSERT_TRUE(update->CheckRows(rows).ok());
    ASSERT_TRUE(update->Write(rows).ok());
    HeadRows bias = {.part = HeadPart::kBias, .width = 1, .first = 1020, .count = 10};
    bias.row_stride = 4;
    bias.data = reinterpret_cast<const std::byte*>(ones.data());
    ASSERT_TRUE(update->CheckRows(bias).ok());
    ASSERT_TRUE(update->Write(bias).ok());
    HeadRows norm = {.part = HeadPart::kNorm, .width = 3, .first = 0, .count = 1};
    norm.row_stride = 12;
    norm.data = bias.data;
    ASSERT_TRUE(update->CheckRows(norm).ok());
    ASSERT_TRUE(update->Write(norm).ok());
    ASSERT_TRUE(update->Commit().ok());
  }
  const auto head = *heads.Find("h");
  EXPECT_TRUE(head->sharded());
  EXPECT_EQ(head->view().vocab(), 2500);
  EXPECT_EQ(head->view().shard_count, 4);
  int64_t first = 0;
  for (int i = 0; i < 4; ++i) {
    const HeadView& part = head->view().shards[i];
    for (int64_t r = 0; r < part.vocab(); ++r) {
      const int64_t row = first + r;
      const auto* at = static_cast<const uint16_t*>(part.weight.data) + r * part.weight.row_stride;
      const bool is_new = row >= 1000 && row < 2100;
      ASSERT_EQ(at[1] == 0x3f80, is_new || Pattern(row, 1) == 1.0f) << row;
      ASSERT_EQ(part.bias[r], row >= 1020 && row < 1030 ? 1.0f : Pattern(r, 0)) << row;
    }
    if (part.vocab() > 0) {
      EXPECT_EQ(part.norm[2], 1.0f) << i;
    }
    first += part.vocab();
  }
  // The same from a file.
  const auto reloaded = heads.Update(request, Always);
  ASSERT_TRUE(reloaded.ok()) << reloaded.status();
  EXPECT_EQ((*reloaded)->info().version, 3);
  EXPECT_EQ(Wrong((*reloaded)->view().shards[1]), "");
  devices->Lose(2);
  for (const absl::Status& lost :
       {heads.BeginUpdate("h").status(), heads.Update(request, Always).status()}) {
    EXPECT_THAT(lost.ToString(), StartsWith("FAILED_PRECONDITION: head h: shard: got 3 of 4"));
  }
}

}  // namespace
}  // namespace logitd::engine

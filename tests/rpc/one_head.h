// Shared by tests of codecs: one loaded head, "h", 3 tokens x 2, f32, and one lease; a parsed
// request; a table of refusals.
#ifndef LOGITD_TESTS_RPC_ONE_HEAD_H_
#define LOGITD_TESTS_RPC_ONE_HEAD_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "server/arena/leases.h"
#include "server/engine/heads.h"
#include "server/engine/job.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/codecs/logits_or_hidden.h"
#include "tests/fake_backend.h"

namespace logitd::rpc::testing {

class OneHead {
 public:
  static constexpr std::string_view kLease = "0123456789abcdef";
  static constexpr size_t kLeaseBytes = 4096;
  static constexpr int64_t kVersion = 7;

  OneHead() {
    const int fd = memfd_create("lease", MFD_CLOEXEC);
    const bool sized = ftruncate(fd, kLeaseBytes) == 0;
    leased_ = mmap(nullptr, kLeaseBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (!sized || leased_ == MAP_FAILED) std::abort();
    arena_ = *arena::Arena::Map(fd, kLeaseBytes);
  }
  ~OneHead() { munmap(leased_, kLeaseBytes); }
  OneHead(const OneHead&) = delete;
  OneHead& operator=(const OneHead&) = delete;

  // This outlives the result.
  Finders Find() const {
    return {
        .head =
            [this](std::string_view name) -> absl::StatusOr<std::shared_ptr<const engine::Head>> {
          if (name == "h" && head_ != nullptr) return head_;
          return absl::NotFoundError(absl::StrCat("no head ", std::string(name), ", only h"));
        },
        .lease =
            [this](std::string_view id) -> absl::StatusOr<std::shared_ptr<const arena::Arena>> {
          if (id == kLease && arena_ != nullptr) return arena_;
          return absl::NotFoundError("no such lease");
        }};
  }

  // The bytes of the lease.
  std::byte* leased() { return static_cast<std::byte*>(leased_); }

  // As engine::Heads::Unload: Find does not return the head any more, and its last user frees it.
  void Unload() { head_.reset(); }

  std::weak_ptr<const engine::Head> watch() const { return head_; }

  // As arena::Leases::End.
  void EndLease() { arena_.reset(); }
  std::weak_ptr<const arena::Arena> watch_lease() const { return arena_; }

 private:
  // The weight is never read.
  std::unique_ptr<FakeBackend> backend_ = std::make_unique<FakeBackend>();
  std::shared_ptr<const engine::Head> head_ = std::make_shared<engine::Head>(
      std::vector<engine::Head::Copy>{
          {.backend = backend_.get(),
           .memory = {},
           .view = {.weight = {.dtype = DType::kF32, .rows = 3, .cols = 2, .row_stride = 4}}}},
      engine::HeadInfo{.name = "h", .version = kVersion});
  void* leased_ = nullptr;
  std::shared_ptr<const arena::Arena> arena_;
};

// A request that its codec has read, with what it may refer to.
template <typename Codec, typename Request>
struct ParsedAs {
  static constexpr int64_t kMaxRows = 100;

  explicit ParsedAs(std::string message)
      : bytes(std::move(message)),
        piece(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()),
        status(codec.Parse(pieces(), kMaxRows, &spec)) {}
  explicit ParsedAs(const Request& request) : ParsedAs(request.SerializeAsString()) {}
  ParsedAs(const ParsedAs&) = delete;

  Pieces pieces() const { return Pieces(&piece, 1); }

  std::string bytes;
  Piece piece;
  OneHead heads;
  Codec codec{heads.Find()};
  engine::JobSpec spec;
  absl::Status status;
};

// A change that makes a good request a bad one, and a part of the error's text.
template <typename Request>
struct Refused {
  const char* name;
  void (*change)(Request* request);
  const char* text;
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

// `parse`: the status of a request.
template <typename Request, size_t n>
void ExpectRefused(const Request& good, const Refused<Request> (&table)[n], auto parse) {
  for (const Refused<Request>& row : table) {
    SCOPED_TRACE(row.name);
    Request request = good;
    row.change(&request);
    const absl::Status status = parse(request);
    EXPECT_EQ(status.code(), row.code) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(row.text));
  }
}

}  // namespace logitd::rpc::testing

#endif  // LOGITD_TESTS_RPC_ONE_HEAD_H_

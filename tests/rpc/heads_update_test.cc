// Heads.Update: new numbers of a head from files and leases, and how updates end.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "logitd/v1/heads.grpc.pb.h"
#include "server/arena/leases.h"
#include "tests/engine/test_job.h"
#include "tests/http2/raw_client.h"
#include "tests/rpc/heads_fixture.h"

namespace logitd::rpc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class HeadsUpdateTest : public HeadsServiceTest {
 protected:
  static constexpr int64_t kVocab = 10;  // of small.safetensors, bf16, with a bias of ones
  static constexpr int64_t kHidden = 4;
  static constexpr int64_t kLeaseBytes = 4096;

  HeadsUpdateTest() {
    leases_ = &all_leases_;
    stub_ = v1::Heads::NewStub(Start(folder_ + "/top"));
    memory_ = static_cast<uint16_t*>(
        mmap(nullptr, kLeaseBytes, PROT_READ | PROT_WRITE, MAP_SHARED, lease_.fd, 0));
    EXPECT_TRUE(Load("h", "small.safetensors").ok());
    bytes_ = backend_.device_bytes();
  }
  ~HeadsUpdateTest() override {
    backend_.Release();
    server_.reset();  // before the leases
    munmap(memory_, kLeaseBytes);
    close(lease_.fd);
  }

  struct UpdateCall {
    grpc::Status Finish() {
      stream->WritesDone();
      for (v1::UpdateHeadResponse answer; stream->Read(&answer);) answers.push_back(answer);
      return stream->Finish();
    }
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<v1::UpdateHeadRequest, v1::UpdateHeadResponse>> stream;
    std::vector<v1::UpdateHeadResponse> answers;
  };
  std::unique_ptr<UpdateCall> Begin(const std::vector<v1::UpdateHeadRequest>& requests) {
    auto call = std::make_unique<UpdateCall>();
    call->context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    call->stream = stub_->Update(&call->context);
    for (const v1::UpdateHeadRequest& request : requests) call->stream->Write(request);
    return call;
  }
  grpc::Status Update(const std::vector<v1::UpdateHeadRequest>& requests) {
    return Begin(requests)->Finish();
  }

  v1::UpdateHeadRequest ByFile(const std::string& path) {
    v1::UpdateHeadRequest request;
    request.set_name("h");
    request.set_path(path);
    return request;
  }
  // Rows [first, first + count) of the weight, which lie one after another from the lease's start.
  v1::UpdateHeadRequest ByRows(int64_t first, int64_t count) {
    v1::UpdateHeadRequest request;
    request.set_name("h");
    v1::HeadRows* const rows = request.add_rows();
    rows->mutable_shared()->set_lease(std::string(lease_.id.begin(), lease_.id.end()));
    rows->set_dtype(v1::DTYPE_BF16);
    rows->set_width(kHidden);
    rows->set_first_row(first);
    rows->set_rows(count);
    return request;
  }
  void Fill(uint16_t value) { std::fill_n(memory_, kLeaseBytes / 2, value); }

  std::shared_ptr<const engine::Head> Head() { return *heads_.Find("h"); }
  // The first number of each row.
  std::vector<uint16_t> Rows() {
    const std::shared_ptr<const engine::Head> head = Head();
    const TensorView& weight = head->view().weight;
    std::vector<uint16_t> rows;
    for (int64_t r = 0; r < kVocab; ++r) {
      rows.push_back(static_cast<const uint16_t*>(weight.data)[r * weight.row_stride]);
    }
    return rows;
  }
  void ExpectUnchanged() {
    EXPECT_TRUE(Becomes([&] { return backend_.device_bytes() == bytes_; }));
    EXPECT_EQ(Head()->info().version, 1);
    EXPECT_THAT(Rows(), ::testing::Each(0));
  }

  // The metric of updates that ended with this code.
  bool Ended(const std::string& code, int count) {
    return engine::Scrape(metrics_).find(absl::StrCat("logitd_head_updates_total{code=\"", code,
                                                      "\"} ", count, "\n")) != std::string::npos;
  }

  arena::Leases all_leases_{{.max_bytes = int64_t{32} << 20, .max_leases = 4}};
  arena::Leases::Lease lease_ = *all_leases_.Open(kLeaseBytes);
  uint16_t* memory_ = nullptr;
  size_t bytes_ = 0;
};

TEST_F(HeadsUpdateTest, AFileGivesTheNextVersion) {
  WriteHead(folder_ + "/top/other.safetensors", kVocab, kHidden);
  auto call = Begin({ByFile("other.safetensors")});
  const grpc::Status status = call->Finish();
  ASSERT_TRUE(status.ok()) << status.error_message();
  const v1::UpdateHeadResponse& last = call->answers.back();
  EXPECT_EQ(last.head().head_version(), 2);
  EXPECT_EQ(last.head().path(), "other.safetensors");
  EXPECT_EQ(last.total_bytes(), kVocab * kHidden * 2 + kVocab * 4);
  EXPECT_EQ(last.done_bytes(), last.total_bytes());
  EXPECT_EQ(backend_.device_bytes(), bytes_);
}

TEST_F(HeadsUpdateTest, RowsGoThroughALeaseThatIsSmallerThanTheHead) {
  const std::shared_ptr<const engine::Head> old = Head();
  Fill(7);
  auto call = Begin({ByRows(6, 4)});
  v1::UpdateHeadResponse answer;
  ASSERT_TRUE(call->stream->Read(&answer));
  EXPECT_EQ(answer.done_bytes(), 4 * kHidden * 2);
  EXPECT_FALSE(answer.has_head());
  EXPECT_THAT(Rows(), ::testing::Each(0));  // still the old one
  Fill(9);
  v1::UpdateHeadRequest more = ByRows(1, 2);
  more.clear_name();
  more.mutable_rows(0)->mutable_shared()->set_row_stride(24);
  ASSERT_TRUE(call->stream->Write(more));
  const grpc::Status status = call->Finish();
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(call->answers.size(), 2u);
  EXPECT_EQ(call->answers[1].head().head_version(), 2);
  EXPECT_EQ(call->answers[1].done_bytes(), 6 * kHidden * 2);
  EXPECT_THAT(Rows(), ElementsAre(0, 9, 9, 0, 0, 0, 7, 7, 7, 7));
  EXPECT_EQ(static_cast<const uint16_t*>(old->view().weight.data)[6 * 8], 0);
}

TEST_F(HeadsUpdateTest, WhatIsWrongIsSaidAndTheOldHeadStays) {
  using R = v1::UpdateHeadRequest*;
  struct Case {
    void (*change)(R request);
    grpc::StatusCode code;
    const char* text;
  };
  const std::vector<Case> cases = {
      {[](R r) { r->set_name("g"); }, grpc::NOT_FOUND, "no head \"g\"; loaded: h"},
      {[](R r) { r->clear_rows(); }, grpc::INVALID_ARGUMENT,
       "rows: got none, allowed 1 or more, or a path"},
      {[](R r) { r->set_path("small.safetensors"); }, grpc::INVALID_ARGUMENT,
       "allowed only in the first message, and without rows"},
      {[](R r) { r->mutable_rows(0)->set_part(static_cast<v1::HeadPart>(9)); },
       grpc::INVALID_ARGUMENT, "rows.part: got 9, allowed 0..2"},
      {[](R r) { r->mutable_rows(0)->set_part(v1::HEAD_PART_NORM); }, grpc::INVALID_ARGUMENT,
       "rows.part: got norm"},
      {[](R r) { r->mutable_rows(0)->clear_dtype(); }, grpc::INVALID_ARGUMENT, "rows.dtype: got 0"},
      {[](R r) { r->mutable_rows(0)->set_dtype(v1::DTYPE_F16); }, grpc::INVALID_ARGUMENT,
       "rows.dtype: got f16, allowed bf16"},
      {[](R r) { r->mutable_rows(0)->set_width(5); }, grpc::INVALID_ARGUMENT,
       "rows.width: got 5, allowed 4"},
      {[](R r) { r->mutable_rows(0)->set_rows(11); }, grpc::INVALID_ARGUMENT,
       "rows.rows: got 11, allowed 1..10"},
      {[](R r) { r->mutable_rows(0)->mutable_shared()->set_offset(kLeaseBytes - 8); },
       grpc::INVALID_ARGUMENT, "rows.shared.offset: got 4088, allowed a multiple of 2 from 0 to"},
      {[](R r) { r->mutable_rows(0)->mutable_shared()->set_lease("short"); },
       grpc::INVALID_ARGUMENT, "rows.shared.lease: got 5 bytes, allowed 16"},
      {[](R r) { r->mutable_rows(0)->mutable_shared()->set_lease("0123456789abcdef"); },
       grpc::NOT_FOUND, "lease"},
  };
  Fill(7);
  for (const Case& test : cases) {
    SCOPED_TRACE(test.text);
    v1::UpdateHeadRequest request = ByRows(0, 10);
    test.change(&request);
    const grpc::Status status = Update({request});
    EXPECT_EQ(status.error_code(), test.code) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(test.text));
    // As the second message too.
    if (test.code == grpc::INVALID_ARGUMENT) {
      EXPECT_EQ(Update({ByRows(0, 10), request}).error_code(), test.code);
    }
    ExpectUnchanged();
  }
  EXPECT_EQ(Update({ByFile("none")}).error_code(), grpc::NOT_FOUND);
  EXPECT_EQ(Update({ByFile("../outside.safetensors")}).error_code(), grpc::PERMISSION_DENIED);
  EXPECT_EQ(Update({ByFile("inner/large.safetensors")}).error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(Update({ByRows(0, 1), ByFile("small.safetensors")}).error_code(),
            grpc::INVALID_ARGUMENT);
  EXPECT_EQ(Update({}).error_code(), grpc::UNIMPLEMENTED);  // as of every call without a message
  all_leases_.End(lease_.id);
  EXPECT_EQ(Update({ByRows(0, 10)}).error_code(), grpc::NOT_FOUND);
  ExpectUnchanged();
}

TEST_F(HeadsUpdateTest, OneUpdateOfAHeadAtATime) {
  auto first = Begin({ByRows(0, 1)});
  v1::UpdateHeadResponse answer;
  ASSERT_TRUE(first->stream->Read(&answer));
  for (const v1::UpdateHeadRequest& second : {ByRows(0, 1), ByFile("small.safetensors")}) {
    const grpc::Status status = Update({second});
    EXPECT_EQ(status.error_code(), grpc::ALREADY_EXISTS) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr("is being updated"));
  }
  ASSERT_TRUE(Unload("h").ok());
  EXPECT_EQ(first->Finish().error_code(), grpc::ABORTED);
  EXPECT_TRUE(Becomes([&] { return backend_.device_bytes() == 0; }));
}

// More bytes than a step copies: the update stands in line again for the rest.
TEST_F(HeadsUpdateTest, AllPiecesOfALargeMessageAreCopied) {
  ASSERT_TRUE(Load("large", "inner/large.safetensors").ok());
  constexpr int64_t kRows = 2048, kWidth = 4096, kPieces = 9;  // of 16 MiB each
  const arena::Leases::Lease lease = *all_leases_.Open(kRows * kWidth * 2);
  auto* const memory = static_cast<uint16_t*>(
      mmap(nullptr, kRows * kWidth * 2, PROT_READ | PROT_WRITE, MAP_SHARED, lease.fd, 0));
  std::fill_n(memory, kRows * kWidth, uint16_t{7});
  v1::UpdateHeadRequest request;
  request.set_name("large");
  for (int64_t piece = 0; piece < kPieces; ++piece) {
    v1::HeadRows* const rows = request.add_rows();
    rows->mutable_shared()->set_lease(std::string(lease.id.begin(), lease.id.end()));
    rows->set_dtype(v1::DTYPE_BF16);
    rows->set_width(kWidth);
    rows->set_rows(kRows - piece);  // the last row only in the first piece
  }
  auto call = Begin({request});
  const grpc::Status status = call->Finish();
  munmap(memory, kRows * kWidth * 2);
  close(lease.fd);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(call->answers.size(), 2u);
  EXPECT_EQ(call->answers[0].done_bytes(),
            (kPieces * kRows - kPieces * (kPieces - 1) / 2) * kWidth * 2);
  const std::shared_ptr<const engine::Head> head = *heads_.Find("large");
  const auto* const weight = static_cast<const uint16_t*>(head->view().weight.data);
  EXPECT_EQ(weight[0], 7);
  EXPECT_EQ(weight[(kRows - 1) * head->view().weight.row_stride], 7);
}

TEST_F(HeadsUpdateTest, AMessageAfterAPathEndsTheUpdate) {
  backend_.Hold(FaultPoint::kUpload);
  auto call = Begin({ByFile("small.safetensors"), ByRows(0, 1)});
  const grpc::Status status = call->Finish();
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("got a second message, allowed none after"));
  backend_.Release();
  EXPECT_TRUE(Becomes([&] { return !server_->loading(); }));
  ExpectUnchanged();
}

TEST_F(HeadsUpdateTest, AnIdleUpdateEndsAndGivesItsMemoryBack) {
  http2_.times.send = absl::Seconds(3);
  stub_ = v1::Heads::NewStub(Start(folder_ + "/top"));
  auto call = Begin({ByRows(0, 10)});
  v1::UpdateHeadResponse answer;
  ASSERT_TRUE(call->stream->Read(&answer));
  ASSERT_FALSE(call->stream->Read(&answer));
  const grpc::Status status = call->stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::DEADLINE_EXCEEDED);
  EXPECT_THAT(status.error_message(), HasSubstr("message not received within 3s"));
  ExpectUnchanged();
  EXPECT_TRUE(Becomes([&] { return Ended("DEADLINE_EXCEEDED", 1); }));
}

TEST_F(HeadsUpdateTest, RefusedUpdatesAreCounted) {
  auto first = Begin({ByRows(0, 1)});
  v1::UpdateHeadResponse answer;
  ASSERT_TRUE(first->stream->Read(&answer));
  EXPECT_EQ(Update({ByRows(0, 1)}).error_code(), grpc::ALREADY_EXISTS);
  EXPECT_EQ(Update({ByFile("small.safetensors")}).error_code(), grpc::ALREADY_EXISTS);
  EXPECT_TRUE(Becomes([&] { return Ended("ALREADY_EXISTS", 2); }));
  v1::UpdateHeadRequest absent = ByFile("small.safetensors");
  absent.set_name("g");
  EXPECT_EQ(Update({absent}).error_code(), grpc::NOT_FOUND);
  EXPECT_TRUE(Becomes([&] { return Ended("NOT_FOUND", 1); }));
  EXPECT_TRUE(first->Finish().ok());
  EXPECT_TRUE(Becomes([&] { return Ended("OK", 1); }));
}

TEST_F(HeadsUpdateTest, ACancelledUpdateGivesItsMemoryBack) {
  Fill(7);
  {  // between its messages
    auto call = Begin({ByRows(0, 10)});
    v1::UpdateHeadResponse answer;
    ASSERT_TRUE(call->stream->Read(&answer));
    EXPECT_EQ(backend_.device_bytes(), 2 * bytes_);
    call->context.TryCancel();
    EXPECT_EQ(call->Finish().error_code(), grpc::CANCELLED);
    ExpectUnchanged();
  }
  for (const v1::UpdateHeadRequest& request : {ByRows(0, 10), ByFile("small.safetensors")}) {
    backend_.Hold(FaultPoint::kUpload);  // while it copies
    auto call = Begin({request});
    EXPECT_TRUE(Becomes([&] { return backend_.held() == 1; }));
    EXPECT_TRUE(server_->loading());
    call->context.TryCancel();
    EXPECT_EQ(call->Finish().error_code(), grpc::CANCELLED);
    EXPECT_TRUE(Becomes([&] { return server_->calls() == 0; }));
    backend_.Release();
    EXPECT_TRUE(Becomes([&] { return !server_->loading(); }));
    ExpectUnchanged();
  }
  EXPECT_TRUE(Update({ByRows(0, 10)}).ok());
  EXPECT_THAT(Rows(), ::testing::Each(7));
}

TEST_F(HeadsUpdateTest, ADrainEndsUpdates) {
  auto idle = Begin({ByRows(0, 10)});
  v1::UpdateHeadResponse answer;
  ASSERT_TRUE(idle->stream->Read(&answer));
  admission_.BeginDrain();
  server_->Drain(absl::Seconds(1));
  const grpc::Status ended = idle->Finish();
  EXPECT_EQ(ended.error_code(), grpc::UNAVAILABLE);
  EXPECT_THAT(ended.error_message(), HasSubstr("draining"));
  ExpectUnchanged();
  EXPECT_EQ(Update({ByRows(0, 10)}).error_code(), grpc::UNAVAILABLE);
}

TEST_F(HeadsUpdateTest, WhoMayNotLoadMayNotUpdateEither) {
  for (const bool has_root : {false, true}) {
    stub_ = v1::Heads::NewStub(has_root ? Start(folder_ + "/top", "0.0.0.0:7450") : Start());
    for (const v1::UpdateHeadRequest& request : {ByRows(0, 10), ByFile("small.safetensors")}) {
      EXPECT_EQ(Update({request}).error_code(),
                has_root ? grpc::PERMISSION_DENIED : grpc::FAILED_PRECONDITION);
    }
  }
  ExpectUnchanged();
}

TEST_F(HeadsUpdateTest, AnUpdateThatLosesTheDeviceTellsTheEnginesOwner) {
  backend_.FailNext(FaultPoint::kWait, absl::InternalError("fell off the bus"));
  EXPECT_EQ(Update({ByRows(0, 10)}).error_code(), grpc::INTERNAL);
  EXPECT_TRUE(Becomes([&] { return !device_lost().ok(); }));
  ExpectUnchanged();
}

// A message that is marked as compressed on a call that names no compression: its peer's mistake is
// INTERNAL too, and no failure of the device's.
TEST_F(HeadsUpdateTest, AMalformedMessageEndsOnlyItsUpdate) {
  const std::string address = server_->listening()[0];
  const sockaddr_in to = {
      .sin_family = AF_INET,
      .sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)))),
      .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
  http2::testing::RawClient peer(fd);
  ASSERT_TRUE(peer.Begin());
  bool answered = false, ended = false;
  const auto take = [&] {
    for (const http2::testing::Frame& frame : peer.Take()) {
      if (frame.stream != 1) continue;
      answered |= frame.type == NGHTTP2_DATA;
      ended |= (frame.flags & NGHTTP2_FLAG_END_STREAM) != 0;
    }
  };
  ASSERT_TRUE(peer.Send(peer.Headers(1, {{":method", "POST"},
                                         {":scheme", "http"},
                                         {":path", "/logitd.v1.Heads/Update"},
                                         {":authority", "test"},
                                         {"te", "trailers"},
                                         {"content-type", "application/grpc"}})));
  const std::string message = ByRows(0, 10).SerializeAsString();
  std::string framed(5, '\0');
  framed[4] = static_cast<char>(message.size());  // below 256
  ASSERT_TRUE(peer.Send(http2::testing::RawClient::Data(1, framed + message)));
  EXPECT_TRUE(Becomes([&] { return take(), answered; }));
  framed[0] = 1;
  framed[4] = 0;
  ASSERT_TRUE(peer.Send(http2::testing::RawClient::Data(1, framed)));
  EXPECT_TRUE(Becomes([&] { return take(), ended; }));
  EXPECT_TRUE(Becomes([&] { return !server_->loading(); }));
  EXPECT_TRUE(device_lost().ok()) << device_lost();
  ExpectUnchanged();
}

}  // namespace
}  // namespace logitd::rpc

// The Heads service over a real server, on a fake device whose copies the tests hold.
#include "server/rpc/heads_service.h"

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "logitd/v1/heads.grpc.pb.h"
#include "server/arena/leases.h"
#include "tests/http2/raw_client.h"
#include "tests/rpc/served_engine.h"

namespace logitd::rpc {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A file with one bf16 matrix of zeros and a bias of ones.
void WriteHead(const std::string& path, int64_t vocab, int64_t hidden) {
  const int64_t weight = vocab * hidden * 2;
  const std::string header =
      absl::StrFormat(R"({"lm_head.weight":{"dtype":"BF16","shape":[%d,%d],"data_offsets":[0,%d]},)"
                      R"("lm_head.bias":{"dtype":"F32","shape":[%d],"data_offsets":[%d,%d]}})",
                      vocab, hidden, weight, vocab, weight, weight + 4 * vocab);
  std::ofstream out(path, std::ios::binary);
  for (int i = 0; i < 8; ++i) out.put(static_cast<char>(header.size() >> 8 * i));
  out << header << std::string(static_cast<size_t>(weight), '\0');
  const float one = 1.0f;
  for (int64_t i = 0; i < vocab; ++i) out.write(reinterpret_cast<const char*>(&one), sizeof(one));
}

class HeadsServiceTest : public ServedEngine {
 protected:
  HeadsServiceTest() : ServedEngine(/*max_bytes=*/1 << 16, /*max_held_bytes=*/1 << 20) {
    std::string name = (std::filesystem::temp_directory_path() / "logitd-rpc-XXXXXX").string();
    folder_ = std::filesystem::canonical(mkdtemp(name.data())).string();
    std::filesystem::create_directories(folder_ + "/top/inner");
    WriteHead(folder_ + "/top/small.safetensors", 10, 4);
    WriteHead(folder_ + "/top/inner/large.safetensors", 2048, 4096);  // two chunks and a bias
    WriteHead(folder_ + "/outside.safetensors", 10, 4);
    channel_ = Start(folder_ + "/top");
    stub_ = v1::Heads::NewStub(channel_);
  }
  ~HeadsServiceTest() override { std::filesystem::remove_all(folder_); }

  struct Call {
    explicit Call(const v1::LoadHeadRequest& request) : request(request) {
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    }
    // Reads to the end.
    grpc::Status Finish() {
      for (v1::LoadHeadResponse message; reader->Read(&message);) messages.push_back(message);
      return reader->Finish();
    }
    v1::LoadHeadRequest request;
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<v1::LoadHeadResponse>> reader;
    std::vector<v1::LoadHeadResponse> messages;
  };

  std::unique_ptr<Call> Begin(const std::string& name, const std::string& path) {
    v1::LoadHeadRequest request;
    request.set_name(name);
    request.set_path(path);
    auto call = std::make_unique<Call>(request);
    call->reader = stub_->Load(&call->context, call->request);
    return call;
  }

  grpc::Status Load(const std::string& name, const std::string& path) {
    return Begin(name, path)->Finish();
  }

  grpc::Status Unload(const std::string& name) {
    grpc::ClientContext context;
    v1::UnloadHeadRequest request;
    request.set_name(name);
    v1::UnloadHeadResponse response;
    return stub_->Unload(&context, request, &response);
  }

  std::vector<std::string> List() {
    grpc::ClientContext context;
    v1::ListHeadsResponse response;
    EXPECT_TRUE(stub_->List(&context, {}, &response).ok());
    std::vector<std::string> names;
    for (const v1::Head& head : response.heads()) names.push_back(head.name());
    return names;
  }

  // Begins a load that waits in its first copy to the device.
  std::unique_ptr<Call> BeginHeld(const std::string& name, const std::string& path) {
    backend_.Hold(FaultPoint::kUpload);
    auto call = Begin(name, path);
    EXPECT_TRUE(Becomes([&] { return backend_.held() == 1; }));
    return call;
  }

  std::string folder_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Heads::Stub> stub_;
};

TEST_F(HeadsServiceTest, ALoadEndsWithItsHeadWhichGetThenReturns) {
  auto call = Begin("large", "inner/large.safetensors");
  const grpc::Status status = call->Finish();
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_FALSE(call->messages.empty());
  constexpr int64_t kBytes = 2048 * 4096 * 2 + 2048 * 4;
  const v1::LoadHeadResponse& last = call->messages.back();
  EXPECT_EQ(last.done_bytes(), kBytes);
  EXPECT_EQ(last.total_bytes(), kBytes);
  for (const v1::LoadHeadResponse& message : call->messages) {
    EXPECT_EQ(message.has_head(), &message == &last);
  }

  grpc::ClientContext context;
  v1::GetHeadRequest request;
  request.set_name("large");
  v1::GetHeadResponse got;
  ASSERT_TRUE(stub_->Get(&context, request, &got).ok());
  EXPECT_EQ(got.head().SerializeAsString(), last.head().SerializeAsString());
  EXPECT_EQ(got.head().name(), "large");
  EXPECT_EQ(got.head().path(), "inner/large.safetensors");
  EXPECT_EQ(got.head().tensor(), "lm_head.weight");
  EXPECT_EQ(got.head().dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(got.head().vocab(), 2048);
  EXPECT_EQ(got.head().hidden(), 4096);
  EXPECT_EQ(got.head().stored_vocab(), 2048);
  EXPECT_TRUE(got.head().bias());
  EXPECT_FALSE(got.head().final_norm());
  EXPECT_EQ(got.head().scale(), 1.0f);
  EXPECT_EQ(got.head().softcap(), 0.0f);
  EXPECT_EQ(got.head().device_bytes(), kBytes);
  EXPECT_NEAR(static_cast<double>(got.head().loaded_unix_ms()),
              static_cast<double>(absl::ToUnixMillis(absl::Now())), 60'000);
}

TEST_F(HeadsServiceTest, HeadsAreListedAndUnloadedByName) {
  ASSERT_TRUE(Load("b", "small.safetensors").ok());
  const size_t bytes_of_one = backend_.device_bytes();
  ASSERT_TRUE(Load("a", "small.safetensors").ok());
  EXPECT_THAT(List(), ElementsAre("a", "b"));
  const grpc::Status twice = Load("a", "small.safetensors");
  EXPECT_EQ(twice.error_code(), grpc::ALREADY_EXISTS);
  EXPECT_TRUE(Unload("b").ok());
  EXPECT_THAT(List(), ElementsAre("a"));
  EXPECT_EQ(backend_.device_bytes(), bytes_of_one);
  const grpc::Status gone = Unload("b");
  EXPECT_EQ(gone.error_code(), grpc::NOT_FOUND);
  EXPECT_THAT(gone.error_message(), HasSubstr("no head \"b\"; loaded: a"));
  grpc::ClientContext context;
  v1::GetHeadRequest request;
  request.set_name("b");
  v1::GetHeadResponse got;
  EXPECT_EQ(stub_->Get(&context, request, &got).error_code(), grpc::NOT_FOUND);
}

TEST_F(HeadsServiceTest, PathsAreShownAsTheCallerGaveThem) {
  ASSERT_TRUE(Load("inside", "inner/large.safetensors").ok());
  std::filesystem::create_directory(folder_ + "/top2");
  const std::string outside = folder_ + "/top2/x.safetensors";
  WriteHead(outside, 10, 4);
  ASSERT_TRUE(heads_
                  .Load({.name = "outside", .path = outside},
                        [](const engine::HeadProgress&) { return true; })
                  .ok());
  grpc::ClientContext context;
  v1::ListHeadsResponse response;
  ASSERT_TRUE(stub_->List(&context, {}, &response).ok());
  ASSERT_EQ(response.heads_size(), 2);
  EXPECT_EQ(response.heads(0).path(), "inner/large.safetensors");
  EXPECT_EQ(response.heads(1).path(), outside);  // loaded by the operator
}

TEST_F(HeadsServiceTest, PathsDoNotLeaveTheRoot) {
  std::filesystem::create_symlink(folder_ + "/outside.safetensors", folder_ + "/top/out");
  std::filesystem::create_symlink(folder_, folder_ + "/top/up");
  std::filesystem::create_directory(folder_ + "/top2");
  WriteHead(folder_ + "/top2/x.safetensors", 10, 4);
  for (const std::string& path :
       {std::string("../outside.safetensors"), std::string("inner/../../outside.safetensors"),
        folder_ + "/outside.safetensors", folder_ + "/top2/x.safetensors", std::string("out"),
        std::string("up/outside.safetensors"), std::string(".."), std::string("../none"),
        std::string("/")}) {
    const grpc::Status status = Load("x", path);
    EXPECT_EQ(status.error_code(), grpc::PERMISSION_DENIED) << path;
    EXPECT_THAT(status.error_message(),
                AllOf(HasSubstr("\"" + path + "\""), HasSubstr("--head-root")))
        << path;
  }
  EXPECT_THAT(List(), ElementsAre());
  // A path that stays inside is accepted in every form.
  std::filesystem::create_symlink("../small.safetensors", folder_ + "/top/inner/link");
  int heads = 0;
  for (const std::string& path :
       {std::string("inner/link"), std::string("inner/../small.safetensors"),
        folder_ + "/top/small.safetensors"}) {
    const grpc::Status status = Load(absl::StrCat("h", heads++), path);
    EXPECT_TRUE(status.ok()) << path << ": " << status.error_message();
  }
  EXPECT_EQ(Load("x", "none.safetensors").error_code(), grpc::NOT_FOUND);
  EXPECT_EQ(Load("x", "inner").error_code(), grpc::NOT_FOUND);  // a folder without a model
  EXPECT_EQ(Load("a b", "small.safetensors").error_code(), grpc::INVALID_ARGUMENT);
}

TEST_F(HeadsServiceTest, WithoutARootClientsLoadAndUnloadNothing) {
  ASSERT_TRUE(Load("there", "small.safetensors").ok());
  stub_ = v1::Heads::NewStub(Start(/*head_root=*/""));
  for (const grpc::Status& status : {Load("x", "small.safetensors"), Unload("there")}) {
    EXPECT_EQ(status.error_code(), grpc::FAILED_PRECONDITION);
    EXPECT_THAT(status.error_message(), HasSubstr("--head-root DIR"));
  }
  EXPECT_THAT(List(), ElementsAre("there"));
}

TEST_F(HeadsServiceTest, OnAnAddressThatIsNotLocalClientsMayOnlyLook) {
  ASSERT_TRUE(Load("there", "small.safetensors").ok());
  stub_ = v1::Heads::NewStub(Start(folder_ + "/top", /*remote_listen=*/"0.0.0.0:7450"));
  for (const grpc::Status& status : {Load("x", "small.safetensors"), Unload("there")}) {
    EXPECT_EQ(status.error_code(), grpc::PERMISSION_DENIED);
    EXPECT_THAT(status.error_message(),
                AllOf(HasSubstr("0.0.0.0:7450"), HasSubstr("--allow-remote-heads")));
  }
  EXPECT_THAT(List(), ElementsAre("there"));
}

TEST_F(HeadsServiceTest, MalformedMessagesAreRefusedWithTheirReason) {
  const grpc::Slice slice("\x0a\xffnot a message");
  const grpc::ByteBuffer bytes(&slice, 1);
  for (const char* method :
       {"/logitd.v1.Heads/Load", "/logitd.v1.Heads/Update", "/logitd.v1.Heads/Unload",
        "/logitd.v1.Heads/List", "/logitd.v1.Heads/Get", "/logitd.v1.Server/GetInfo"}) {
    grpc::GenericStub stub(channel_);
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    grpc::Status status;
    grpc::ByteBuffer answer;
    const auto call = stub.PrepareUnaryCall(&context, method, bytes, &queue);
    call->StartCall();
    call->Finish(&answer, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    ASSERT_TRUE(queue.Next(&tag, &ok));
    EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT) << method;
    EXPECT_THAT(status.error_message(),
                AllOf(HasSubstr("got 15 bytes that are not a protobuf message"),
                      HasSubstr("allowed a logitd.v1.")))
        << method;
  }
}

TEST_F(HeadsServiceTest, ARequestThatIsWrongIsRefusedAtOnceWhileAnotherLoads) {
  ASSERT_TRUE(Load("there", "small.safetensors").ok());
  auto first = BeginHeld("first", "small.safetensors");
  auto second = Begin("second", "small.safetensors");
  v1::LoadHeadResponse waits;
  ASSERT_TRUE(second->reader->Read(&waits));
  EXPECT_EQ(waits.total_bytes(), 0);
  EXPECT_FALSE(waits.has_head());
  struct Case {
    std::string name;
    std::string path;
    grpc::StatusCode code;
  };
  for (const Case& test : {
           Case{"there", "small.safetensors", grpc::ALREADY_EXISTS},
           {"first", "small.safetensors", grpc::ALREADY_EXISTS},
           {"second", "small.safetensors", grpc::ALREADY_EXISTS},
           {std::string(129, 'a'), "small.safetensors", grpc::INVALID_ARGUMENT},
           {"x", "", grpc::INVALID_ARGUMENT},
           {"x", std::string(4097, 'a'), grpc::INVALID_ARGUMENT},
           {"x", "a\nb", grpc::INVALID_ARGUMENT},
           {"x", "../outside.safetensors", grpc::PERMISSION_DENIED},
       }) {
    EXPECT_EQ(Load(test.name, test.path).error_code(), test.code) << test.name << " " << test.path;
  }
  EXPECT_EQ(backend_.held(), 1);
  backend_.Release();
  EXPECT_TRUE(first->Finish().ok());
  EXPECT_TRUE(second->Finish().ok());
}

TEST_F(HeadsServiceTest, ACancelledCallEndsItsLoad) {
  auto call = BeginHeld("large", "inner/large.safetensors");
  EXPECT_THAT(List(), ElementsAre());  // other calls are answered meanwhile
  EXPECT_EQ(server_->calls(), 1);
  call->context.TryCancel();
  EXPECT_EQ(call->Finish().error_code(), grpc::CANCELLED);
  EXPECT_TRUE(Becomes([&] { return server_->calls() == 0; }));  // the server knows
  EXPECT_TRUE(server_->loading());
  backend_.Release();
  EXPECT_TRUE(Becomes([&] { return !server_->loading(); }));
  EXPECT_EQ(backend_.device_bytes(), 0u);
  EXPECT_THAT(List(), ElementsAre());
  EXPECT_TRUE(Load("large", "inner/large.safetensors").ok());
}

TEST_F(HeadsServiceTest, LoadsRunInOrderAndAWaitingOneMayBeCancelled) {
  auto first = BeginHeld("first", "small.safetensors");
  auto second = Begin("second", "small.safetensors");
  auto third = Begin("third", "small.safetensors");
  ASSERT_TRUE(Becomes([&] { return server_->calls() == 3; }));
  second->context.TryCancel();
  EXPECT_EQ(second->Finish().error_code(), grpc::CANCELLED);
  ASSERT_TRUE(Becomes([&] { return server_->calls() == 2; }));
  backend_.Release();
  EXPECT_TRUE(first->Finish().ok());
  EXPECT_TRUE(third->Finish().ok());
  EXPECT_TRUE(Load("last", "small.safetensors").ok());  // by now the second's turn has passed
  EXPECT_THAT(List(), ElementsAre("first", "last", "third"));
}

TEST_F(HeadsServiceTest, ACancelledWaitingLoadMakesRoomInTheLine) {
  auto first = BeginHeld("first", "small.safetensors");
  std::vector<std::unique_ptr<Call>> line;
  for (int i = 0; i < 64; ++i) {
    line.push_back(Begin(absl::StrCat("waits", i), "small.safetensors"));
    v1::LoadHeadResponse waits;
    ASSERT_TRUE(line.back()->reader->Read(&waits));  // it waits in the line
  }
  EXPECT_EQ(Load("more", "small.safetensors").error_code(), grpc::RESOURCE_EXHAUSTED);
  line[10]->context.TryCancel();
  EXPECT_TRUE(Becomes([&] { return server_->calls() == 64; }));
  auto more = Begin("more", "small.safetensors");
  v1::LoadHeadResponse waits;
  EXPECT_TRUE(more->reader->Read(&waits));
  for (auto& call : line) call->context.TryCancel();
  EXPECT_TRUE(Becomes([&] { return server_->calls() == 2; }));
  backend_.Release();
  EXPECT_TRUE(first->Finish().ok());
  EXPECT_TRUE(more->Finish().ok());
  EXPECT_THAT(List(), ElementsAre("first", "more"));
}

TEST_F(HeadsServiceTest, ALoadThatLosesTheDeviceTellsTheEnginesOwner) {
  backend_.FailNext(FaultPoint::kWait, absl::InternalError("fell off the bus"));
  const grpc::Status status = Load("small", "small.safetensors");
  EXPECT_EQ(status.error_code(), grpc::INTERNAL);
  EXPECT_TRUE(Becomes([&] { return !device_lost().ok(); }));
  EXPECT_THAT(std::string(device_lost().message()), HasSubstr("fell off the bus"));
}

TEST_F(HeadsServiceTest, ADrainEndsLoadsAndTakesNoMore) {
  ASSERT_TRUE(Load("small", "small.safetensors").ok());
  auto call = BeginHeld("large", "inner/large.safetensors");
  auto waits = Begin("waits", "small.safetensors");
  ASSERT_TRUE(Becomes([&] { return server_->calls() == 2; }));
  admission_.BeginDrain();
  server_->Drain(absl::Seconds(1));
  // The calls end at once, even though the load itself hangs.
  for (Call* ending : {call.get(), waits.get()}) {
    const grpc::Status ended = ending->Finish();
    EXPECT_EQ(ended.error_code(), grpc::UNAVAILABLE);
    EXPECT_THAT(ended.error_message(), HasSubstr("draining"));
  }
  EXPECT_TRUE(Becomes([&] { return server_->calls() == 0; }));
  EXPECT_TRUE(server_->loading());
  backend_.Release();
  EXPECT_TRUE(Becomes([&] { return !server_->loading(); }));
  EXPECT_EQ(Load("x", "small.safetensors").error_code(), grpc::UNAVAILABLE);
  EXPECT_EQ(Unload("small").error_code(), grpc::UNAVAILABLE);
  EXPECT_THAT(List(), ElementsAre("small"));
}

// ---- Updates

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

  arena::Leases all_leases_{{.max_bytes = 4 * kLeaseBytes, .max_leases = 4}};
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

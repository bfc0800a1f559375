// Heads.Load, Unload, List and Get.
#include "server/rpc/heads_service.h"

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "logitd/v1/heads.grpc.pb.h"
#include "tests/rpc/heads_fixture.h"

namespace logitd::rpc {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

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

}  // namespace
}  // namespace logitd::rpc

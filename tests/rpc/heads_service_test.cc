// The Heads service over a real server, on the CPU with copies that can be held up.
#include "server/rpc/heads_service.h"
#include "server/ops/ops.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "kernels/backend.h"
#include "server/engine/engine.h"
#include "server/rpc/rpc_server.h"

namespace logitd::rpc {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The CPU, whose copies to heads wait between Hold and Release.
class HeldBackend final : public Backend {
 public:
  const DeviceInfo& device() const override { return cpu_->device(); }
  absl::StatusOr<Slab> AllocateSlab(size_t bytes) override { return cpu_->AllocateSlab(bytes); }
  void FreeSlab(const Slab& slab) override { cpu_->FreeSlab(slab); }
  absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes) override {
    {
      absl::MutexLock lock(&mutex_);
      ++pieces_;
    }
    return cpu_->AllocateDevice(bytes);
  }
  void FreeDevice(const DeviceMemory& memory) override {
    cpu_->FreeDevice(memory);
    absl::MutexLock lock(&mutex_);
    --pieces_;
  }
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream(StreamUse use) override {
    return std::make_unique<HeldStream>(*cpu_->CreateStream(use), this);
  }

  void Hold() {
    absl::MutexLock lock(&mutex_);
    held_ = true;
  }
  void Release() {
    absl::MutexLock lock(&mutex_);
    held_ = false;
  }
  void FailNextWait(absl::Status fault) {
    absl::MutexLock lock(&mutex_);
    fault_ = std::move(fault);
  }
  int waiting() {
    absl::MutexLock lock(&mutex_);
    return waiting_;
  }
  int pieces() {
    absl::MutexLock lock(&mutex_);
    return pieces_;
  }

 private:
  class HeldStream final : public Stream {
   public:
    HeldStream(std::unique_ptr<Stream> stream, HeldBackend* backend)
        : stream_(std::move(stream)), backend_(backend) {}
    absl::Status Upload(const Slab& slab, size_t offset, size_t bytes) override {
      return stream_->Upload(slab, offset, bytes);
    }
    absl::Status Download(const Slab& slab, size_t offset, size_t bytes) override {
      return stream_->Download(slab, offset, bytes);
    }
    absl::Status Fill(const Slab& slab, size_t offset, size_t bytes, std::byte* to) override {
      backend_->Pass();
      return stream_->Fill(slab, offset, bytes, to);
    }
    absl::StatusOr<StreamTimes> Wait() override {
      absl::StatusOr<StreamTimes> times = stream_->Wait();
      if (absl::Status fault = backend_->TakeFault(); !fault.ok()) return fault;
      return times;
    }

   private:
    const std::unique_ptr<Stream> stream_;
    HeldBackend* const backend_;
  };

  absl::Status TakeFault() {
    absl::MutexLock lock(&mutex_);
    return std::exchange(fault_, absl::OkStatus());
  }

  void Pass() {
    absl::MutexLock lock(&mutex_);
    ++waiting_;
    const auto free = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !held_; };
    mutex_.Await(absl::Condition(&free));
    --waiting_;
  }

  const std::unique_ptr<Backend> cpu_ = *CreateCpuBackend({.cpu_threads = 1});
  absl::Mutex mutex_;
  bool held_ = false;
  absl::Status fault_;
  int waiting_ = 0;
  int pieces_ = 0;  // of device memory
};

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

class HeadsServiceTest : public ::testing::Test {
 protected:
  HeadsServiceTest() {
    std::string name = (std::filesystem::temp_directory_path() / "logitd-rpc-XXXXXX").string();
    folder_ = std::filesystem::canonical(mkdtemp(name.data())).string();
    std::filesystem::create_directories(folder_ + "/top/inner");
    WriteHead(folder_ + "/top/small.safetensors", 10, 4);
    WriteHead(folder_ + "/top/inner/large.safetensors", 2048, 4096);  // two chunks and a bias
    WriteHead(folder_ + "/outside.safetensors", 10, 4);
    auto engine = engine::Engine::Create(&backend_,
                                         {.streams = 1,
                                          .slab_payload_bytes = 1 << 16,
                                          .slab_answer_bytes = 1 << 16,
                                          .max_batch_rows = 16,
                                          .ops = ops::AllTraits()},
                                         &metrics_, [this](const absl::Status& cause) {
                                           absl::MutexLock lock(&mutex_);
                                           lost_ = cause;
                                         });
    EXPECT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    Start(folder_ + "/top");
  }

  ~HeadsServiceTest() override {
    backend_.Release();
    server_->Shutdown();
    server_.reset();
    engine_.reset();
    std::filesystem::remove_all(folder_);
  }

  void Start(const std::string& root) {
    auto server = RpcServer::Start(
        {.listen = {"127.0.0.1:0"}, .max_request_bytes = 1 << 16, .head_root = root},
        backend_.device(), &admission_, engine_.get(), &heads_, &metrics_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    stub_ = v1::Heads::NewStub(
        grpc::CreateChannel(server_->listening()[0], grpc::InsecureChannelCredentials()));
  }

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

  static bool Becomes(const std::function<bool()>& condition) {
    const absl::Time end = absl::Now() + absl::Seconds(20);
    while (!condition()) {
      if (absl::Now() > end) return false;
      absl::SleepFor(absl::Milliseconds(1));
    }
    return true;
  }

  // What the engine's owner has heard of the device.
  absl::Status lost() {
    absl::MutexLock lock(&mutex_);
    return lost_;
  }

  std::string folder_;
  absl::Mutex mutex_;
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
  HeldBackend backend_;
  engine::Metrics metrics_{{}};
  engine::Admission admission_{{.max_request_bytes = 1 << 17, .max_held_bytes = 1 << 20},
                               &metrics_};
  engine::Heads heads_{&backend_, &metrics_};
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<RpcServer> server_;
  std::unique_ptr<v1::Heads::Stub> stub_;
};

TEST_F(HeadsServiceTest, ALoadEndsWithTheHeadWhichIsThenThere) {
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

TEST_F(HeadsServiceTest, ListsAndUnloadsByName) {
  for (const char* name : {"b", "a"}) {
    ASSERT_TRUE(Load(name, "small.safetensors").ok());
  }
  EXPECT_THAT(List(), ElementsAre("a", "b"));
  const grpc::Status twice = Load("a", "small.safetensors");
  EXPECT_EQ(twice.error_code(), grpc::ALREADY_EXISTS);
  EXPECT_TRUE(Unload("b").ok());
  EXPECT_THAT(List(), ElementsAre("a"));
  EXPECT_EQ(backend_.pieces(), 1);
  const grpc::Status gone = Unload("b");
  EXPECT_EQ(gone.error_code(), grpc::NOT_FOUND);
  EXPECT_THAT(gone.error_message(), HasSubstr("no head \"b\"; loaded: a"));
  grpc::ClientContext context;
  v1::GetHeadRequest request;
  request.set_name("b");
  v1::GetHeadResponse got;
  EXPECT_EQ(stub_->Get(&context, request, &got).error_code(), grpc::NOT_FOUND);
}

TEST_F(HeadsServiceTest, PathsAreShownAsTheyWereAskedFor) {
  ASSERT_TRUE(Load("inside", "inner/large.safetensors").ok());
  std::filesystem::create_directory(folder_ + "/top2");
  const std::string beside = folder_ + "/top2/x.safetensors";
  WriteHead(beside, 10, 4);
  ASSERT_TRUE(heads_
                  .Load({.name = "beside", .path = beside},
                        [](const engine::HeadProgress&) { return true; })
                  .ok());
  grpc::ClientContext context;
  v1::ListHeadsResponse response;
  ASSERT_TRUE(stub_->List(&context, {}, &response).ok());
  ASSERT_EQ(response.heads_size(), 2);
  EXPECT_EQ(response.heads(0).path(), beside);  // by the operator, from outside
  EXPECT_EQ(response.heads(1).path(), "inner/large.safetensors");
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
  // What stays inside is taken, however it is said.
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

TEST_F(HeadsServiceTest, WithoutARootClientsLoadNothing) {
  server_->Shutdown();
  Start("");
  const grpc::Status status = Load("x", "small.safetensors");
  EXPECT_EQ(status.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("--head-root DIR"));
}

TEST_F(HeadsServiceTest, WhatCanBeToldAtOnceIsToldWhileAnotherLoads) {
  ASSERT_TRUE(Load("there", "small.safetensors").ok());
  backend_.Hold();
  auto first = Begin("first", "small.safetensors");
  ASSERT_TRUE(Becomes([&] { return backend_.waiting() == 1; }));
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
  EXPECT_EQ(backend_.waiting(), 1);
  backend_.Release();
  EXPECT_TRUE(first->Finish().ok());
  EXPECT_TRUE(second->Finish().ok());
}

TEST_F(HeadsServiceTest, ACancelledCallGivesItsLoadUp) {
  backend_.Hold();
  auto call = Begin("large", "inner/large.safetensors");
  ASSERT_TRUE(Becomes([&] { return backend_.waiting() == 1; }));
  EXPECT_THAT(List(), ElementsAre());  // and others are answered meanwhile
  EXPECT_EQ(server_->calls(), 1);
  call->context.TryCancel();
  EXPECT_EQ(call->Finish().error_code(), grpc::CANCELLED);
  EXPECT_TRUE(Becomes([&] { return server_->calls() == 0; }));  // the server knows
  EXPECT_TRUE(server_->loading());
  backend_.Release();
  EXPECT_TRUE(Becomes([&] { return !server_->loading(); }));
  EXPECT_EQ(backend_.pieces(), 0);
  EXPECT_THAT(List(), ElementsAre());
  EXPECT_TRUE(Load("large", "inner/large.safetensors").ok());
}

TEST_F(HeadsServiceTest, LoadsWaitTheirTurnAndMayLeaveTheLine) {
  backend_.Hold();
  auto first = Begin("first", "small.safetensors");
  ASSERT_TRUE(Becomes([&] { return backend_.waiting() == 1; }));
  auto second = Begin("second", "small.safetensors");
  auto third = Begin("third", "small.safetensors");
  ASSERT_TRUE(Becomes([&] { return server_->calls() == 3; }));
  second->context.TryCancel();
  EXPECT_EQ(second->Finish().error_code(), grpc::CANCELLED);
  ASSERT_TRUE(Becomes([&] { return server_->calls() == 2; }));
  backend_.Release();
  EXPECT_TRUE(first->Finish().ok());
  EXPECT_TRUE(third->Finish().ok());
  EXPECT_TRUE(Load("last", "small.safetensors").ok());  // by now the second's turn is over
  EXPECT_THAT(List(), ElementsAre("first", "last", "third"));
}

TEST_F(HeadsServiceTest, ThoseWhoLeaveTheLineMakeRoomInIt) {
  backend_.Hold();
  auto first = Begin("first", "small.safetensors");
  ASSERT_TRUE(Becomes([&] { return backend_.waiting() == 1; }));
  std::vector<std::unique_ptr<Call>> line;
  for (int i = 0; i < 64; ++i) {
    line.push_back(Begin(absl::StrCat("waits", i), "small.safetensors"));
    v1::LoadHeadResponse waits;
    ASSERT_TRUE(line.back()->reader->Read(&waits));  // it is in the line
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
  backend_.FailNextWait(absl::InternalError("fell off the bus"));
  const grpc::Status status = Load("small", "small.safetensors");
  EXPECT_EQ(status.error_code(), grpc::INTERNAL);
  EXPECT_TRUE(Becomes([&] { return !lost().ok(); }));
  EXPECT_THAT(std::string(lost().message()), HasSubstr("fell off the bus"));
}

TEST_F(HeadsServiceTest, ADrainEndsLoadsAndTakesNoMore) {
  ASSERT_TRUE(Load("small", "small.safetensors").ok());
  backend_.Hold();
  auto call = Begin("large", "inner/large.safetensors");
  ASSERT_TRUE(Becomes([&] { return backend_.waiting() == 1; }));
  auto waits = Begin("waits", "small.safetensors");
  ASSERT_TRUE(Becomes([&] { return server_->calls() == 2; }));
  admission_.BeginDrain();
  server_->Drain();
  // At once, though the load itself hangs.
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

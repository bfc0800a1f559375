// The Heads service over a real server, on a fake device whose copies the tests hold.
#ifndef LOGITD_TESTS_RPC_HEADS_FIXTURE_H_
#define LOGITD_TESTS_RPC_HEADS_FIXTURE_H_

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "logitd/v1/heads.grpc.pb.h"
#include "tests/rpc/served_engine.h"

namespace logitd::rpc {

// A file with one bf16 matrix of zeros and a bias of ones.
inline void WriteHead(const std::string& path, int64_t vocab, int64_t hidden) {
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

}  // namespace logitd::rpc

#endif  // LOGITD_TESTS_RPC_HEADS_FIXTURE_H_

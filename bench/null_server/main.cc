// null_server: a gRPC server that looks at nothing. What load_bench measures with it is what gRPC
// and the sockets cost on this machine, so a figure of logitd beside it says what logitd adds.
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "google/protobuf/message.h"
#include "logitd/v1/sampler.pb.h"

namespace logitd::bench {
namespace {

grpc::ByteBuffer Serialize(const google::protobuf::Message& response) {
  const grpc::Slice slice(response.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

// What a call takes, on the thread that brings it.
std::chrono::microseconds work_time{0};

void Work() {
  const auto end = std::chrono::steady_clock::now() + work_time;
  while (work_time.count() > 0 && std::chrono::steady_clock::now() < end) {
  }
}

// Reads the message of a unary call and sends the answer, or refuses the call on its headers.
class UnaryCall final : public grpc::ServerGenericBidiReactor {
 public:
  UnaryCall(const grpc::ByteBuffer& answer, bool refuse) : answer_(answer) {
    if (refuse) {
      Finish({grpc::StatusCode::RESOURCE_EXHAUSTED, "refused"});
    } else {
      StartRead(&message_);
    }
  }
  void OnReadDone(bool ok) override {
    if (ok) {
      Work();
      StartWriteAndFinish(&answer_, grpc::WriteOptions(), grpc::Status::OK);
    } else {
      Finish({grpc::StatusCode::INVALID_ARGUMENT, "no message"});
    }
  }
  void OnDone() override { delete this; }

 private:
  grpc::ByteBuffer message_;
  grpc::ByteBuffer answer_;
};

// Answers each message of a stream, one at a time.
class StreamCall final : public grpc::ServerGenericBidiReactor {
 public:
  explicit StreamCall(const grpc::ByteBuffer& answer) : answer_(answer) { StartRead(&message_); }
  void OnReadDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    Work();
    StartWrite(&answer_);
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    StartRead(&message_);
  }
  void OnDone() override { delete this; }

 private:
  grpc::ByteBuffer message_;
  const grpc::ByteBuffer answer_;
};

class Service final : public grpc::CallbackGenericService {
 public:
  Service(grpc::ByteBuffer tokens, grpc::ByteBuffer sampled, bool refuse)
      : tokens_(std::move(tokens)), sampled_(std::move(sampled)), refuse_(refuse) {}

 private:
  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override {
    // load_bench asks what it measures. Here an empty answer says so.
    if (absl::EndsWith(context->method(), "/GetInfo")) return new UnaryCall(nothing_, false);
    if (absl::EndsWith(context->method(), "/SampleStream")) return new StreamCall(sampled_);
    const bool samples = absl::EndsWith(context->method(), "/Sample");
    return new UnaryCall(samples ? sampled_ : tokens_, refuse_);
  }

  const grpc::ByteBuffer tokens_;   // of a TopK, and of all others
  const grpc::ByteBuffer sampled_;  // of a Sample
  const grpc::ByteBuffer nothing_ = Serialize(v1::TopKResponse());
  const bool refuse_;
};

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Two empty paths: plaintext.
std::shared_ptr<grpc::ServerCredentials> Credentials(const std::string& certificate,
                                                     const std::string& key) {
  if (certificate.empty()) return grpc::InsecureServerCredentials();
  grpc::SslServerCredentialsOptions options;
  options.pem_key_cert_pairs = {{ReadFile(key), ReadFile(certificate)}};
  return grpc::SslServerCredentials(options);
}

}  // namespace

int Main(int argc, char** argv) {
  CLI::App app("null_server: a gRPC server that looks at nothing, to measure logitd against.");
  std::string listen = "127.0.0.1:7460";
  int64_t rows = 1;
  int k = 64;
  bool refuse = false;
  bool small_window = false;
  std::string certificate;
  std::string key;
  app.add_option("--listen", listen, "HOST:PORT or unix:PATH")->capture_default_str();
  app.add_option("--rows", rows, "rows of every answer, as load_bench asks for")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--k", k, "tokens of a row")->check(CLI::Range(1, 1 << 20))->capture_default_str();
  int work_us = 0;
  app.add_option("--work-us", work_us, "microseconds for which every call keeps a core busy")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  app.add_flag("--refuse", refuse, "refuse every call on its headers");
  app.add_flag(
      "--small-window", small_window,
      "as logitd: an unread call takes in 64 KiB, and a larger message one round trip more");
  auto* tls_cert = app.add_option("--tls-cert", certificate, "PEM file; all addresses speak TLS")
                       ->check(CLI::ExistingFile);
  auto* tls_key =
      app.add_option("--tls-key", key, "PEM file of its private key")->check(CLI::ExistingFile);
  tls_cert->needs(tls_key);
  tls_key->needs(tls_cert);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }

  work_time = std::chrono::microseconds(work_us);
  v1::TopKResponse response;
  v1::SampleResponse sampled;
  for (int64_t row = 0; row < rows; ++row) {
    response.add_k(k);
    response.add_logsumexp(0);
    response.add_status(v1::ROW_STATUS_OK);
    response.add_status_position(-1);
    sampled.add_tokens(0);
    sampled.add_logprobs(0);
    sampled.add_ranks(1);
    sampled.add_logsumexp(0);
    sampled.add_status(v1::ROW_STATUS_OK);
    sampled.add_status_position(-1);
    sampled.add_top_count(0);
    sampled.add_extra_count(0);
  }
  response.mutable_indices()->Resize(static_cast<int>(rows * k), 0);
  response.mutable_probs()->Resize(static_cast<int>(rows * k), 0);
  Service service(Serialize(response), Serialize(sampled), refuse);

  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGTERM);
  sigaddset(&stop, SIGINT);
  pthread_sigmask(SIG_BLOCK, &stop, nullptr);  // gRPC's threads inherit it
  grpc::ServerBuilder builder;
  builder.AddListeningPort(listen, Credentials(certificate, key));
  builder.RegisterCallbackGenericService(&service);
  builder.SetMaxReceiveMessageSize(-1);
  if (small_window) builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) {
    std::fprintf(stderr, "null_server: cannot listen on %s\n", listen.c_str());
    return 1;
  }
  int signal = 0;
  sigwait(&stop, &signal);
  server->Shutdown();
  return 0;
}

}  // namespace logitd::bench

int main(int argc, char** argv) { return logitd::bench::Main(argc, argv); }

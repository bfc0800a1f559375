// bare_server: an HTTP/2 server of server/http2 with nothing behind it. It answers each call at
// once, so load_bench and h2load measure the transport alone. What logitd takes beyond that is the
// cost of everything else.
#include <signal.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "logitd/v1/sampler.pb.h"
#include "server/http2/server.h"

namespace logitd::bench {
namespace {

// A message with the five bytes before it.
http2::Bytes Frame(const std::string& message) {
  auto bytes = std::make_shared<std::string>(5, '\0');
  for (int i = 0; i < 4; ++i) (*bytes)[4 - i] = static_cast<char>(message.size() >> (8 * i));
  *bytes += message;
  return {.span = {reinterpret_cast<const std::byte*>(bytes->data()), bytes->size()},
          .keep = bytes};
}

// Receives the message of a unary call into one buffer and answers.
class Call final : public http2::StreamEvents, public http2::Task {
 public:
  Call(http2::Stream* stream, const http2::Bytes& answer, bool inline_answer)
      : stream_(stream), answer_(answer), inline_(inline_answer) {
    const http2::Field head[] = {{":status", "200"}, {"content-type", "application/grpc"}};
    stream->Respond(head);
  }
  absl::Span<std::byte> Room(size_t) override {
    return absl::MakeSpan(message_.get(), size_).subspan(received_);
  }
  void OnBody(absl::Span<const std::byte> bytes) override {
    if (size_ == 0) {
      for (size_t i = 1; i < 5; ++i) size_ = size_ << 8 | static_cast<size_t>(bytes[i]);
      size_ += 5;
      message_.reset(new std::byte[size_]);
      stream_->Grant(static_cast<int64_t>(size_));
    }
    std::byte* const to = message_.get() + received_;
    if (to != bytes.data()) std::memcpy(to, bytes.data(), bytes.size());
    received_ += bytes.size();
  }
  void OnEnd() override { Run(); }
  void Run() override {
    stream_->Send(answer_);
    const http2::Field ok[] = {{"grpc-status", "0"}};
    stream_->End(ok);
  }
  void OnClosed(http2::Closed) override {}

 private:
  http2::Stream* const stream_;
  const http2::Bytes& answer_;
  const bool inline_;
  std::unique_ptr<std::byte[]> message_;
  size_t size_ = 0;
  size_t received_ = 0;
};

class Events final : public http2::ServerEvents {
 public:
  Events(http2::Bytes answer, http2::Bytes nothing)
      : answer_(std::move(answer)), nothing_(std::move(nothing)) {}
  std::shared_ptr<http2::StreamEvents> OnStream(http2::Stream* stream) override {
    const bool info = stream->headers().Find(":path").ends_with("/GetInfo");
    return std::make_shared<Call>(stream, info ? nothing_ : answer_, true);
  }

 private:
  const http2::Bytes answer_;
  const http2::Bytes nothing_;
};

int Main(int argc, char** argv) {
  CLI::App app("bare_server: logitd's HTTP/2 server without anything behind it.");
  std::string listen = "127.0.0.1:7461";
  int64_t rows = 1;
  int k = 64;
  int loops = 1;
  app.add_option("--listen", listen, "HOST:PORT or unix:PATH")->capture_default_str();
  app.add_option("--rows", rows, "rows of every answer")->capture_default_str();
  app.add_option("--k", k, "tokens of a row")->capture_default_str();
  app.add_option("--loops", loops, "event loops")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  v1::TopKResponse response;
  for (int64_t row = 0; row < rows; ++row) {
    response.add_k(k);
    response.add_logsumexp(0);
    response.add_status(v1::ROW_STATUS_OK);
    response.add_status_position(-1);
  }
  response.mutable_indices()->Resize(static_cast<int>(rows * k), 0);
  response.mutable_probs()->Resize(static_cast<int>(rows * k), 0);
  Events events(Frame(response.SerializeAsString()), Frame(""));

  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGTERM);
  sigaddset(&stop, SIGINT);
  pthread_sigmask(SIG_BLOCK, &stop, nullptr);  // the loops inherit it
  http2::Server server({.loops = loops}, &events);
  const std::vector<std::string> addresses = {listen};
  if (absl::Status status = server.Listen(addresses, std::nullopt); !status.ok()) {
    std::fprintf(stderr, "bare_server: %s\n", std::string(status.message()).c_str());
    return 1;
  }
  server.Start();
  int signal = 0;
  sigwait(&stop, &signal);
  server.Shutdown();
  return 0;
}

}  // namespace
}  // namespace logitd::bench

int main(int argc, char** argv) { return logitd::bench::Main(argc, argv); }

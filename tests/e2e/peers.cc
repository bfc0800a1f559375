#include "tests/e2e/peers.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>

#include "absl/time/clock.h"

namespace logitd::e2e {
namespace {

// NOLINTNEXTLINE(performance-no-int-to-ptr): a tag is a number that gRPC carries as a pointer.
void* Tag(size_t i) { return reinterpret_cast<void*>(i); }

void AppendVarint(std::string* out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out->push_back(static_cast<char>(value | 0x80));
  out->push_back(static_cast<char>(value));
}

}  // namespace

std::shared_ptr<grpc::Channel> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(-1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

grpc::ByteBuffer ToBuffer(std::string_view bytes) {
  const grpc::Slice slice(bytes.data(), bytes.size());
  return grpc::ByteBuffer(&slice, 1);
}

std::string ToString(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string text;
  if (!buffer.Dump(&slices).ok()) return text;
  for (const grpc::Slice& slice : slices) {
    text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return text;
}

std::string Requests(const std::string& code, const std::string& op) {
  return "logitd_requests_total{code=\"" + code + "\",op=\"" + op + "\"}";
}

std::unique_ptr<grpc::ClientContext> Context() {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(60)));
  return context;
}

v1::TopKRequest Request(const std::vector<float>& logits, int64_t rows, int k) {
  auto request = Of<v1::TopKRequest>(logits, rows);
  request.add_k(k);
  return request;
}

grpc::ByteBuffer LargeRequest(int64_t rows) {
  static const auto* const zeros = new std::vector<float>(65536);
  v1::TopKRequest request;
  request.set_dtype(v1::DTYPE_F32);
  request.set_rows(rows);
  request.set_vocab(65536);
  request.add_k(1);
  std::string head = request.SerializeAsString();
  AppendVarint(&head, v1::TopKRequest::kLogitsFieldNumber << 3 | 2);
  AppendVarint(&head, static_cast<uint64_t>(rows * kLargeRowBytes));
  std::vector<grpc::Slice> slices = {grpc::Slice(head)};
  for (int64_t row = 0; row < rows; ++row) {
    slices.emplace_back(const_cast<float*>(zeros->data()), zeros->size() * sizeof(float),
                        grpc::Slice::STATIC_SLICE);
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

GenericCall::GenericCall(std::shared_ptr<grpc::Channel> channel, const std::string& method,
                         absl::Duration deadline)
    : channel_(std::move(channel)), stub_(channel_) {
  context_.set_deadline(absl::ToChronoTime(absl::Now() + deadline));
  call_ = stub_.PrepareCall(&context_, method, &queue_);
}

GenericCall::~GenericCall() {
  if (!finished_) context_.TryCancel();
  queue_.Shutdown();
  void* tag = nullptr;
  for (bool ok = false; queue_.Next(&tag, &ok);) {
  }
}

bool GenericCall::Next() {
  void* tag = nullptr;
  bool ok = false;
  return queue_.Next(&tag, &ok) && ok;
}

bool GenericCall::Start() {
  call_->StartCall(Tag(1));
  return Next();
}

bool GenericCall::Write(const grpc::ByteBuffer& message, bool last) {
  grpc::WriteOptions options;
  if (last) options.set_last_message();
  call_->Write(message, options, Tag(1));
  return Next();
}

bool GenericCall::WritesDone() {
  call_->WritesDone(Tag(1));
  return Next();
}

bool GenericCall::Read(grpc::ByteBuffer* message) {
  call_->Read(message, Tag(1));
  return Next();
}

grpc::Status GenericCall::Finish() {
  grpc::Status status;
  call_->Finish(&status, Tag(1));
  Next();
  finished_ = true;
  return status;
}

grpc::Status GenericCall::Unary(const grpc::ByteBuffer& message, grpc::ByteBuffer* answer) {
  if (Start() && Write(message, /*last=*/true)) Read(answer);
  return Finish();
}

UnreadCall::UnreadCall(const std::string& address, const std::string& method,
                       const grpc::ByteBuffer& request)
    : stub_(Connect(address)), request_(request) {
  stub_.PrepareBidiStreamingCall(&context_, method, {}, this);
  StartWriteLast(&request_, grpc::WriteOptions());
  StartCall();
}

UnreadCall::~UnreadCall() {
  context_.TryCancel();
  ended_.WaitForNotification();
}

struct ManyCalls::Call {
  explicit Call(const std::shared_ptr<grpc::Channel>& channel) : stub(channel) {}
  grpc::GenericStub stub;
  grpc::ClientContext context;
  grpc::ByteBuffer answer;
  grpc::Status status;
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader;
};

ManyCalls::ManyCalls(const std::string& address, int connections) {
  for (int i = 0; i < connections; ++i) channels_.push_back(Connect(address));
  poller_ = std::thread([this] {
    void* tag = nullptr;
    for (bool ok = false; queue_.Next(&tag, &ok);) {
      absl::MutexLock lock(&mutex_);
      ++ended_;
    }
  });
}

ManyCalls::~ManyCalls() {
  CancelAll();
  WaitAll();
  queue_.Shutdown();
  poller_.join();
}

void ManyCalls::Start(int i, const grpc::ByteBuffer& message, absl::Duration deadline) {
  auto call = std::make_unique<Call>(channels_[static_cast<size_t>(i)]);
  call->context.set_deadline(absl::ToChronoTime(absl::Now() + deadline));
  call->reader = call->stub.PrepareUnaryCall(&call->context, kTopK, message, &queue_);
  call->reader->StartCall();
  call->reader->Finish(&call->answer, &call->status, Tag(1));
  calls_.push_back(std::move(call));
}

void ManyCalls::CancelAll() {
  for (const auto& call : calls_) call->context.TryCancel();
}

std::vector<grpc::Status> ManyCalls::WaitAll() {
  {
    absl::MutexLock lock(&mutex_);
    const auto all = [this]()
                         ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return ended_ == calls_.size(); };
    mutex_.Await(absl::Condition(&all));
  }
  std::vector<grpc::Status> statuses;
  for (const auto& call : calls_) statuses.push_back(call->status);
  return statuses;
}

int ConnectSocket(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    throw std::runtime_error("connect: " + std::string(std::strerror(errno)));
  }
  return fd;
}

BarePeer::BarePeer(int port, uint32_t window) : fd_(ConnectSocket(port)), reader_(fd_) {
  const std::string_view preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  send(fd_, preface.data(), preface.size(), MSG_NOSIGNAL);
  std::string settings;
  AppendBigEndian(&settings, 4, 2);  // SETTINGS_INITIAL_WINDOW_SIZE
  AppendBigEndian(&settings, window, 4);
  SendFrame(kSettings, 0, 0, settings);
}

BarePeer::~BarePeer() { close(fd_); }

void BarePeer::SendFrame(uint8_t type, uint8_t flags, uint32_t stream, std::string_view payload) {
  const std::string frame = Frame(type, flags, stream, payload);
  send(fd_, frame.data(), frame.size(), MSG_NOSIGNAL);
}

void BarePeer::SendHeaders(const std::string& method,
                           const std::vector<std::pair<std::string, std::string>>& more,
                           uint32_t stream) {
  std::string block = "\x83\x86";  // :method POST, :scheme http
  const auto add = [&block](std::string_view head, std::string_view value) {
    block += head;
    block.push_back(static_cast<char>(value.size()));
    block += value;
  };
  add("\x04", method);                  // :path
  add("\x01", "localhost");             // :authority
  add("\x0f\x10", "application/grpc");  // content-type
  add(std::string_view("\0\x02te", 4), "trailers");
  for (const auto& [name, value] : more) {
    add(std::string("\0", 1) + static_cast<char>(name.size()) + name, value);
  }
  SendFrame(kHeaders, kEndHeaders, stream, block);
}

void BarePeer::SendMessage(uint32_t claimed, std::string_view body, bool end_stream,
                           bool marked_compressed, uint32_t stream) {
  std::string message(1, marked_compressed ? '\1' : '\0');
  AppendBigEndian(&message, claimed, 4);
  message += body;
  SendFrame(kData, end_stream ? kEndStream : 0, stream, message);
}

bool BarePeer::WaitForFrame(uint8_t type, absl::Duration timeout) {
  return reader_.Find(
      [type](const ServerFrame& frame) { return frame.type == type && frame.stream == 1; },
      timeout);
}

bool BarePeer::WaitForText(std::string_view text, absl::Duration timeout) {
  return reader_.Find(
      [text](const ServerFrame& frame) { return frame.text.find(text) != std::string::npos; },
      timeout);
}

}  // namespace logitd::e2e

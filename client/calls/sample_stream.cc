// SampleStream: the typed stream of gRPC's synchronous API, with raw messages on both sides.
#include <grpcpp/support/sync_stream.h>

#include <deque>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/client.h"
#include "client/messages/codec.h"
#include "client/transport/transport.h"

namespace logitd::client {
namespace {

class RawSampleStream final : public SampleStream {
 public:
  using Stream = grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;
  using Factory = grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>;

  explicit RawSampleStream(const Transport& transport)
      : method_("/logitd.v1.Sampler/SampleStream", grpc::internal::RpcMethod::BIDI_STREAMING,
                transport.channel()),
        clock_(transport.clock()) {
    transport.Describe(&context_, absl::InfiniteFuture(), /*message_bytes=*/std::nullopt);
    stream_.reset(Factory::Create(transport.channel().get(), method_, &context_));
  }

  ~RawSampleStream() override {
    context_.TryCancel();
    if (!ended_) stream_->Finish();
  }

  absl::Status Write(const SampleRequest& request) override {
    if (done_) {
      return absl::FailedPreconditionError(
          "stream: got a Write after WritesDone, allowed before it");
    }
    std::vector<absl::string_view> payload = PayloadOf(request);
    std::shared_ptr<const void> owner = request.owner;
    if (owner == nullptr && request.arena == nullptr) {
      auto copy = std::make_shared<std::string>();
      for (absl::string_view piece : payload) copy->append(piece.data(), piece.size());
      payload = {*copy};
      owner = std::move(copy);
    }
    const absl::StatusOr<grpc::ByteBuffer> buffer = EncodeRequest(request, payload, owner);
    if (!buffer.ok()) return buffer.status();
    {
      absl::MutexLock lock(&mutex_);
      written_.push_back(clock_.Now());
    }
    if (stream_->Write(*buffer)) return absl::OkStatus();
    return absl::UnavailableError("the stream has ended; Read has the reason");
  }

  void WritesDone() override {
    if (!std::exchange(done_, true)) stream_->WritesDone();
  }

  absl::StatusOr<SampleResult> Read() override {
    grpc::ByteBuffer message;
    if (!ended_ && stream_->Read(&message)) {
      absl::StatusOr<SampleResult> result = DecodeResponse<v1::SampleResponse>(&message);
      absl::MutexLock lock(&mutex_);
      if (result.ok() && !written_.empty()) {
        result->round_trip = clock_.Now() - written_.front();
        result->attempts = 1;
        written_.pop_front();
      }
      return result;
    }
    if (!ended_) end_status_ = ToAbsl(stream_->Finish());
    ended_ = true;
    if (end_status_.ok()) return absl::OutOfRangeError("the stream has ended");
    return end_status_;
  }

 private:
  grpc::ClientContext context_;
  const grpc::internal::RpcMethod method_;
  const Clock& clock_;
  std::unique_ptr<Stream> stream_;
  bool done_ = false;        // the writer's
  bool ended_ = false;       // the reader's
  absl::Status end_status_;  // the reader's
  absl::Mutex mutex_;
  std::deque<absl::Time> written_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<SampleStream> Client::OpenSampleStream() {
  return std::make_unique<RawSampleStream>(*transport_);
}

}  // namespace logitd::client

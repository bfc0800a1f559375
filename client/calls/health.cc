// grpc.health.v1.Health, whose two messages are small enough to write by hand.
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <string>

#include "client/client.h"
#include "client/transport/transport.h"

namespace logitd::client {
namespace {

std::string EncodeHealthRequest(const std::string& service) {
  std::string out;
  if (service.empty()) return out;
  google::protobuf::io::StringOutputStream stream(&out);
  google::protobuf::io::CodedOutputStream coded(&stream);
  coded.WriteTag(1 << 3 | 2);  // HealthCheckRequest.service
  coded.WriteVarint32(service.size());
  coded.WriteString(service);
  return out;
}

// HealthCheckResponse has one field: status = 1, an enum. The default value is not on the wire.
absl::StatusOr<ServingStatus> DecodeHealthResponse(const grpc::ByteBuffer& response) {
  grpc::Slice slice;
  if (!response.Valid() || !response.DumpToSingleSlice(&slice).ok()) {
    return absl::InternalError("the health answer could not be read");
  }
  if (slice.size() == 0) return ServingStatus::kUnknown;
  google::protobuf::io::CodedInputStream in(slice.begin(), static_cast<int>(slice.size()));
  uint32_t value = 0;
  if (in.ReadTag() != (1 << 3 | 0) || !in.ReadVarint32(&value) || value > 3) {
    return absl::InternalError("the health answer is not a grpc.health.v1.HealthCheckResponse");
  }
  return static_cast<ServingStatus>(value);
}

}  // namespace

absl::string_view ServingStatusName(ServingStatus status) {
  switch (status) {
    case ServingStatus::kServing:
      return "SERVING";
    case ServingStatus::kNotServing:
      return "NOT_SERVING";
    case ServingStatus::kServiceUnknown:
      return "SERVICE_UNKNOWN";
    case ServingStatus::kUnknown:
      break;
  }
  return "UNKNOWN";
}

absl::StatusOr<ServingStatus> Client::Health(const std::string& service) {
  const Attempt attempt = transport_->Retry(transport_->Deadline(), [&](absl::Time deadline) {
    grpc::ByteBuffer request = BufferOf(EncodeHealthRequest(service));
    return transport_->Call("/grpc.health.v1.Health/Check", &request, deadline);
  });
  if (!attempt.status.ok()) return attempt.status;
  return DecodeHealthResponse(attempt.response);
}

absl::Status Client::WatchHealth(const std::string& service,
                                 const std::function<bool(ServingStatus)>& on_change) {
  grpc::CompletionQueue cq;
  grpc::ClientContext context;
  auto wait = [&cq] {
    void* tag;
    bool ok = false;
    return cq.Next(&tag, &ok) && ok;
  };
  absl::Status result;
  bool stopped = false;
  auto stream = transport_->stub().PrepareCall(&context, "/grpc.health.v1.Health/Watch", &cq);
  stream->StartCall(nullptr);
  if (wait()) {
    stream->WriteLast(BufferOf(EncodeHealthRequest(service)), grpc::WriteOptions(), nullptr);
    bool more = wait();
    while (more && !stopped) {
      grpc::ByteBuffer message;
      stream->Read(&message, nullptr);
      more = wait();
      if (!more) break;
      absl::StatusOr<ServingStatus> status = DecodeHealthResponse(message);
      if (!status.ok()) result = status.status();
      stopped = !status.ok() || !on_change(*status);
    }
  }
  if (stopped) context.TryCancel();
  grpc::Status status;
  stream->Finish(&status, nullptr);
  wait();
  cq.Shutdown();
  while (wait()) {
  }
  return stopped ? result : ToAbsl(status);
}

}  // namespace logitd::client

// The server's output heads.
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/transport/transport.h"
#include "logitd/v1/heads.grpc.pb.h"

namespace logitd::client {

namespace {

using HeadProgress = std::function<bool(int64_t done_bytes, int64_t total_bytes)>;

// Reads a change of a head to its end. `done`: how it may have ended where `progress` stops it.
template <typename Message>
absl::StatusOr<v1::Head> ReadChange(auto& reader, grpc::ClientContext& context,
                                    const HeadProgress& progress, const char* done) {
  Message message;
  bool stopped = false;
  while (!stopped && reader.Read(&message)) {
    stopped = progress != nullptr && !progress(message.done_bytes(), message.total_bytes());
  }
  if (stopped) context.TryCancel();
  const absl::Status status = ToAbsl(reader.Finish());
  if (!status.ok()) return status;
  if (stopped) return absl::CancelledError(absl::StrCat("cancelled as the ", done));
  if (!message.has_head()) return absl::InternalError("the server's last answer has no head");
  return message.head();
}

}  // namespace

absl::StatusOr<v1::Head> Client::LoadHead(const v1::LoadHeadRequest& request,
                                          const HeadProgress& progress) {
  grpc::ClientContext context;
  transport_->Describe(&context, absl::InfiniteFuture(), /*message_bytes=*/std::nullopt);
  const auto stub = v1::Heads::NewStub(transport_->channel());
  const auto reader = stub->Load(&context, request);
  return ReadChange<v1::LoadHeadResponse>(*reader, context, progress,
                                          "load ended: the head may be loaded");
}

absl::StatusOr<v1::Head> Client::UpdateHead(const v1::UpdateHeadRequest& request,
                                            const HeadProgress& progress) {
  grpc::ClientContext context;
  transport_->Describe(&context, absl::InfiniteFuture(), /*message_bytes=*/std::nullopt);
  const auto stub = v1::Heads::NewStub(transport_->channel());
  const auto stream = stub->Update(&context);
  stream->Write(request);  // of a broken stream Finish says why
  stream->WritesDone();
  return ReadChange<v1::UpdateHeadResponse>(*stream, context, progress,
                                            "update ended: the head may be updated");
}

absl::Status Client::UnloadHead(const std::string& name) {
  v1::UnloadHeadRequest request;
  request.set_name(name);
  int attempts = 0;
  const absl::Status status =
      transport_
          ->CallSmall<v1::UnloadHeadResponse>("/logitd.v1.Heads/Unload", request,
                                              transport_->Deadline(), &attempts)
          .status();
  // The first attempt may have unloaded the head although its answer was lost.
  return attempts > 1 && absl::IsNotFound(status) ? absl::OkStatus() : status;
}

absl::StatusOr<std::vector<v1::Head>> Client::ListHeads() {
  const absl::StatusOr<v1::ListHeadsResponse> list = transport_->CallSmall<v1::ListHeadsResponse>(
      "/logitd.v1.Heads/List", v1::ListHeadsRequest(), transport_->Deadline());
  if (!list.ok()) return list.status();
  return std::vector<v1::Head>(list->heads().begin(), list->heads().end());
}

absl::StatusOr<v1::Head> Client::GetHead(const std::string& name) {
  v1::GetHeadRequest request;
  request.set_name(name);
  const absl::StatusOr<v1::GetHeadResponse> got = transport_->CallSmall<v1::GetHeadResponse>(
      "/logitd.v1.Heads/Get", request, transport_->Deadline());
  if (!got.ok()) return got.status();
  return got->head();
}

}  // namespace logitd::client

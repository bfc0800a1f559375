#include "server/rpc/services.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "grpc/reflection/v1/reflection.pb.h"
#include "grpc/reflection/v1alpha/reflection.pb.h"
#include "server/rpc/transport/plain_call.h"

namespace logitd::rpc {
namespace {

using google::protobuf::DescriptorPool;
using google::protobuf::FieldDescriptor;
using google::protobuf::FileDescriptor;

constexpr PlainMethod kInfo = {.path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                               .open = true,
                               .client_streams = true};
constexpr PlainMethod kInfoAlpha = {
    .path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    .open = true,
    .client_streams = true};

void SetError(absl::StatusCode code, std::string_view text, auto* response) {
  response->mutable_error_response()->set_error_code(static_cast<int>(code));
  response->mutable_error_response()->set_error_message(std::string(text));
}

// The file and all that it imports.
void AddFiles(const FileDescriptor* file, std::set<const FileDescriptor*>* seen, auto* answer) {
  if (!seen->insert(file).second) return;
  google::protobuf::FileDescriptorProto proto;
  file->CopyTo(&proto);
  answer->add_file_descriptor_proto(proto.SerializeAsString());
  for (int i = 0; i < file->dependency_count(); ++i) AddFiles(file->dependency(i), seen, answer);
}

void SetFile(const FileDescriptor* file, auto* response) {
  if (file == nullptr) return SetError(absl::StatusCode::kNotFound, "not found", response);
  std::set<const FileDescriptor*> seen;
  AddFiles(file, &seen, response->mutable_file_descriptor_response());
}

const FileDescriptor* FileOfExtension(const std::string& type, int number) {
  const DescriptorPool* const pool = DescriptorPool::generated_pool();
  const auto* const message = pool->FindMessageTypeByName(type);
  const FieldDescriptor* const field =
      message == nullptr ? nullptr : pool->FindExtensionByNumber(message, number);
  return field == nullptr ? nullptr : field->file();
}

void SetExtensions(const std::string& type, auto* response) {
  const DescriptorPool* const pool = DescriptorPool::generated_pool();
  const auto* const message = pool->FindMessageTypeByName(type);
  if (message == nullptr) return SetError(absl::StatusCode::kNotFound, "not found", response);
  std::vector<const FieldDescriptor*> fields;
  pool->FindAllExtensions(message, &fields);
  auto* const answer = response->mutable_all_extension_numbers_response();
  answer->set_base_type_name(type);
  for (const FieldDescriptor* field : fields) answer->add_extension_number(field->number());
}

template <typename Request, typename Response>
class ReflectionCall final : public PlainCall {
 public:
  ReflectionCall(http2::Stream* stream, const CallEnvironment& environment,
                 const PlainMethod& method, const std::vector<std::string>& services)
      : PlainCall(stream, environment, method), services_(services) {}

 private:
  void OnRequest(std::string_view message) override {
    Request request;
    if (absl::Status status = Parse(message, &request); !status.ok()) return End(status);
    const DescriptorPool* const pool = DescriptorPool::generated_pool();
    Response response;
    response.set_valid_host(request.host());
    *response.mutable_original_request() = request;
    switch (request.message_request_case()) {
      case Request::kFileByFilename:
        SetFile(pool->FindFileByName(request.file_by_filename()), &response);
        break;
      case Request::kFileContainingSymbol:
        SetFile(pool->FindFileContainingSymbol(request.file_containing_symbol()), &response);
        break;
      case Request::kFileContainingExtension:
        SetFile(FileOfExtension(request.file_containing_extension().containing_type(),
                                request.file_containing_extension().extension_number()),
                &response);
        break;
      case Request::kAllExtensionNumbersOfType:
        SetExtensions(request.all_extension_numbers_of_type(), &response);
        break;
      case Request::kListServices:
        for (const std::string& name : services_) {
          response.mutable_list_services_response()->add_service()->set_name(name);
        }
        break;
      case Request::MESSAGE_REQUEST_NOT_SET:
        SetError(absl::StatusCode::kInvalidArgument, "message_request: got none", &response);
        break;
    }
    Send(response);
  }
  void OnHalfClose() override { End(absl::OkStatus()); }

  const std::vector<std::string>& services_;
};

template <typename Request, typename Response>
void AddVersion(const std::vector<std::string>& services, const CallEnvironment& environment,
                const PlainMethod& method, Registry* registry) {
  registry->Add(std::string(method.path), [services, &environment, &method](http2::Stream* stream) {
    return std::make_shared<ReflectionCall<Request, Response>>(stream, environment, method,
                                                               services);
  });
}

}  // namespace

void RegisterReflection(std::vector<std::string> services, const CallEnvironment& environment,
                        Registry* registry) {
  services.insert(services.end(), {"grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection",
                                   "grpc.reflection.v1alpha.ServerReflection"});
  AddVersion<grpc::reflection::v1::ServerReflectionRequest,
             grpc::reflection::v1::ServerReflectionResponse>(services, environment, kInfo,
                                                             registry);
  AddVersion<grpc::reflection::v1alpha::ServerReflectionRequest,
             grpc::reflection::v1alpha::ServerReflectionResponse>(services, environment, kInfoAlpha,
                                                                  registry);
}

}  // namespace logitd::rpc

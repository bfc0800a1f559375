// The comments of the proto files, for help texts.
#ifndef LOGITD_CLIENT_CLI_PROTO_COMMENTS_H_
#define LOGITD_CLIENT_CLI_PROTO_COMMENTS_H_

#include <google/protobuf/descriptor.h>

#include <string>

namespace logitd::cli {

// The first sentence of the comment on `field`, without its full stop; empty: it has no comment.
std::string FirstSentence(const google::protobuf::FieldDescriptor& field);

}  // namespace logitd::cli

#endif  // LOGITD_CLIENT_CLI_PROTO_COMMENTS_H_

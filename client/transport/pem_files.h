// Checks the files of TlsOptions before gRPC reads them: gRPC only writes lines to stderr about a
// bad one, and its calls then never connect.
#ifndef LOGITD_CLIENT_TRANSPORT_PEM_FILES_H_
#define LOGITD_CLIENT_TRANSPORT_PEM_FILES_H_

#include "absl/status/status.h"
#include "client/options.h"

namespace logitd::client {

// INVALID_ARGUMENT: a certificate without its key or a key without its certificate, a file without
// PEM of its kind, or a key of another certificate. NOT_FOUND: a file cannot be read, or is empty.
absl::Status CheckPemFiles(const TlsOptions& tls);

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_TRANSPORT_PEM_FILES_H_

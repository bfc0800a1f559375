// The parameters of draws, from flags and a file.
#ifndef LOGITD_CLIENT_CLI_SAMPLING_PARAMS_H_
#define LOGITD_CLIENT_CLI_SAMPLING_PARAMS_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "client/cli/commands.h"

namespace logitd::cli {

// The parameters of rows with `vocab` tokens. Flags override the file; without a seed every row has
// seed 0. INVALID_ARGUMENT, NOT_FOUND: the flag, got, allowed.
//
// Request: v1::SampleRequest or VerifyRequest.
template <typename Request>
absl::StatusOr<Request> MakeParams(const SamplingFlags& flags, int64_t vocab);

// Gives each of `rows` rows the seed that --seeds says, where it is given.
template <typename Request>
void SpreadSeeds(const SamplingFlags& flags, int64_t rows, Request* params);

}  // namespace logitd::cli

#endif  // LOGITD_CLIENT_CLI_SAMPLING_PARAMS_H_

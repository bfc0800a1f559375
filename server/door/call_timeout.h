// How long a call may take, as its headers say it.
// Source: gRPC over HTTP/2 (grpc-timeout).
#ifndef LOGITD_SERVER_DOOR_CALL_TIMEOUT_H_
#define LOGITD_SERVER_DOOR_CALL_TIMEOUT_H_

#include <cstdint>
#include <optional>
#include <string_view>

namespace logitd::door {

inline constexpr std::string_view kTimeout = "grpc-timeout";

// The value of that field ("200m"), in nanoseconds. nullopt: malformed, or in minutes or hours.
std::optional<int64_t> ParseTimeout(std::string_view text);

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_CALL_TIMEOUT_H_

#include "server/rpc/transport/trace.h"

#include <algorithm>
#include <cstddef>
#include <iterator>

namespace logitd::rpc {
namespace {

constexpr size_t kMaxLength = 128;

// Lower case: an upper-case traceparent is malformed.
bool IsHex(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool IsZero(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c == '0'; });
}

// The value if the call has exactly one and it is well-formed.
std::string Read(const grpc::CallbackServerContext& context, const char* name,
                 bool (*well_formed)(std::string_view)) {
  const auto [first, end] = context.client_metadata().equal_range(name);
  if (first == end || std::next(first) != end) return "";
  const std::string_view value(first->second.data(), first->second.size());
  return well_formed(value) ? std::string(value) : "";
}

}  // namespace

bool IsRequestId(std::string_view text) {
  return !text.empty() && text.size() <= kMaxLength &&
         std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c <= '~'; });
}

bool IsTraceparent(std::string_view text) {
  // "00-" trace of 32 digits "-" parent of 16 "-" flags of 2
  constexpr size_t kLength = 55;
  if (text.size() < kLength || text.size() > kMaxLength) return false;
  const std::string_view version = text.substr(0, 2);
  const std::string_view trace = text.substr(3, 32);
  const std::string_view parent = text.substr(36, 16);
  const std::string_view flags = text.substr(53, 2);
  if (text[2] != '-' || text[35] != '-' || text[52] != '-') return false;
  if (!IsHex(version) || version == "ff" || !IsHex(trace) || !IsHex(parent) || !IsHex(flags)) {
    return false;
  }
  if (IsZero(trace) || IsZero(parent)) return false;
  if (text.size() == kLength) return true;
  return version != "00" && text[kLength] == '-' && IsRequestId(text);
}

Trace ReadAndEchoTrace(grpc::CallbackServerContext* context) {
  Trace trace = {.request_id = Read(*context, kRequestId, &IsRequestId),
                 .traceparent = Read(*context, kTraceparent, &IsTraceparent)};
  if (!trace.request_id.empty()) context->AddTrailingMetadata(kRequestId, trace.request_id);
  if (!trace.traceparent.empty()) context->AddTrailingMetadata(kTraceparent, trace.traceparent);
  return trace;
}

}  // namespace logitd::rpc

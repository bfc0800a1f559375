// Names that a caller gives to its call, so that it can be found in logs. server.proto says how
// they travel.
#ifndef LOGITD_FORMATS_TRACE_CONTEXT_H_
#define LOGITD_FORMATS_TRACE_CONTEXT_H_

#include <string_view>

namespace logitd::formats {

// Visible ASCII without spaces, 1 to 128 characters.
bool IsRequestId(std::string_view text);

// W3C Trace Context, section 3.2: version 00 exactly, or a later version that starts like it, of at
// most 128 characters. Not one whose trace or parent is all zeros.
bool IsTraceparent(std::string_view text);

}  // namespace logitd::formats

#endif  // LOGITD_FORMATS_TRACE_CONTEXT_H_

// Changes bytes that were read before their reader gets them.
#ifndef LOGITD_SERVER_DOOR_EDIT_H_
#define LOGITD_SERVER_DOOR_EDIT_H_

#include <sys/socket.h>

#include <cstddef>
#include <string>

#include "absl/types/span.h"
#include "server/door/frames.h"

namespace logitd::door {

// Applies `edits` to the first `bytes` of `parts`. Returns how many bytes are in `parts` then; those
// that have no place there any more are appended to `beyond`, and come after them.
//
// Cost: nothing for an edit that keeps the size. After another one the rest is moved, unless a frame
// that gRPC skips may take the place of what is missing.
size_t ApplyEdits(absl::Span<const iovec> parts, size_t bytes, absl::Span<const Frames::Edit> edits,
                  std::string* beyond);

// Copies the first bytes of `text` to `parts`, as many as fit. Returns their number.
size_t CopyToParts(std::string_view text, absl::Span<const iovec> parts);

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_EDIT_H_

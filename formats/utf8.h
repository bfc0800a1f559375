// UTF-8 (RFC 3629).
#ifndef LOGITD_FORMATS_UTF8_H_
#define LOGITD_FORMATS_UTF8_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace logitd::formats {

// Bytes of the character at the start of `text`, which is not empty; 0 if there is no valid one.
// Sets `code` to the character's number.
size_t ReadUtf8(std::string_view text, uint32_t* code);

bool IsUtf8(std::string_view text);

}  // namespace logitd::formats

#endif  // LOGITD_FORMATS_UTF8_H_

// The name that somebody who misspelt one may have meant.
#ifndef LOGITD_FORMATS_NEAREST_H_
#define LOGITD_FORMATS_NEAREST_H_

#include <string>
#include <string_view>
#include <vector>

namespace logitd::formats {

// The first of `names` with the fewest steps to `name`; a step adds, removes or changes one
// character. "" if every name takes more steps than half the length of `name`: then it resembles
// none. Thread-safe.
std::string Nearest(std::string_view name, const std::vector<std::string>& names);

}  // namespace logitd::formats

#endif  // LOGITD_FORMATS_NEAREST_H_

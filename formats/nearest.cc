#include "formats/nearest.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace logitd::formats {
namespace {

// Steps of one character from one text to the other (Levenshtein).
size_t Distance(std::string_view from, std::string_view to) {
  std::vector<size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (const char c : from) {
    size_t diagonal = row[0]++;
    for (size_t i = 0; i < to.size(); ++i) {
      const size_t replaced = diagonal + (c == to[i] ? 0 : 1);
      diagonal = row[i + 1];
      row[i + 1] = std::min({replaced, row[i] + 1, row[i + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string Nearest(std::string_view name, const std::vector<std::string>& names) {
  std::string nearest;
  size_t least = name.size() / 2 + 1;
  for (const std::string& candidate : names) {
    const size_t steps = Distance(name, candidate);
    if (steps >= least) continue;
    least = steps;
    nearest = candidate;
  }
  return nearest;
}

}  // namespace logitd::formats

#include "server/door/edit.h"

#include <algorithm>
#include <cstring>
#include <string_view>

namespace logitd::door {
namespace {

// A place in parts that only moves forward.
class Place {
 public:
  explicit Place(absl::Span<const iovec> parts) : parts_(parts) {}

  size_t at() const { return at_; }
  // The bytes up to the end of the part, at most `most`. Empty: the end of the last part.
  absl::Span<char> Run(size_t most) {
    while (!parts_.empty() && in_part_ == parts_.front().iov_len) {
      parts_.remove_prefix(1);
      in_part_ = 0;
    }
    if (parts_.empty()) return {};
    return {static_cast<char*>(parts_.front().iov_base) + in_part_,
            std::min(most, parts_.front().iov_len - in_part_)};
  }
  void Advance(size_t bytes) {
    at_ += bytes;
    in_part_ += bytes;
  }
  void Skip(size_t bytes) {
    while (bytes > 0) {
      const size_t run = Run(bytes).size();
      if (run == 0) return;
      Advance(run);
      bytes -= run;
    }
  }
  // Returns how many bytes had a place.
  size_t Write(std::string_view text) {
    const size_t all = text.size();
    while (!text.empty()) {
      const absl::Span<char> to = Run(text.size());
      if (to.empty()) break;
      std::memmove(to.data(), text.data(), to.size());
      Advance(to.size());
      text.remove_prefix(to.size());
    }
    return all - text.size();
  }

 private:
  absl::Span<const iovec> parts_;
  size_t in_part_ = 0;
  size_t at_ = 0;
};

}  // namespace

size_t ApplyEdits(absl::Span<const iovec> parts, size_t bytes, absl::Span<const Frames::Edit> edits,
                  std::string* beyond) {
  Place in(parts);
  Place out(parts);
  bool moved_out = false;  // bytes are in `beyond`, so all that follow are
  // What stays as it is, up to `end`.
  const auto keep_to = [&](size_t end) {
    const size_t left = end - in.at();
    if (!moved_out && in.at() == out.at()) {
      in.Skip(left);
      out.Skip(left);
      return;
    }
    while (in.at() < end) {
      const absl::Span<char> run = in.Run(end - in.at());
      if (moved_out) {
        beyond->append(run.data(), run.size());
      } else {
        out.Write({run.data(), run.size()});
      }
      in.Advance(run.size());
    }
  };
  for (const Frames::Edit& edit : edits) {
    keep_to(edit.begin);
    in.Skip(edit.end - edit.begin);
    // Bytes that were not read yet must not be overwritten.
    moved_out = moved_out || out.at() + edit.put.size() > in.at();
    if (moved_out) {
      *beyond += edit.put;
    } else {
      out.Write(edit.put);
    }
  }
  keep_to(bytes);
  return out.at();
}

size_t CopyToParts(std::string_view text, absl::Span<const iovec> parts) {
  return Place(parts).Write(text);
}

}  // namespace logitd::door

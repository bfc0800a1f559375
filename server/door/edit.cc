#include "server/door/edit.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>

#include "server/door/answer.h"

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

// So few bytes are moved sooner than gRPC reads the head of a frame.
constexpr size_t kWorthAFrame = 1024;
constexpr size_t kMostInFrame = 16384;  // as every HTTP/2 peer takes it

// The payload of a frame that fills the place of `edit`; nullopt: there is none, or it is not worth it.
std::optional<size_t> FrameToFill(const Frames::Edit& edit, size_t bytes_after) {
  const size_t place = edit.end - edit.begin;
  if (edit.frame > edit.put.size() || bytes_after < kWorthAFrame) return std::nullopt;
  if (place < edit.put.size() + Frames::kHeadBytes) return std::nullopt;
  const size_t payload = place - edit.put.size() - Frames::kHeadBytes;
  return payload <= kMostInFrame ? std::optional(payload) : std::nullopt;
}

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
    if (const auto payload = FrameToFill(edit, bytes - edit.end); payload && in.at() == out.at()) {
      std::string head;
      AppendFrameHead(*payload, Frames::kIgnored, /*flags=*/0, /*stream=*/0, &head);
      const std::string_view put = edit.put;
      in.Skip(edit.end - edit.begin);
      out.Write(put.substr(0, edit.frame));
      out.Write(head);
      out.Skip(*payload);  // whatever is there
      out.Write(put.substr(edit.frame));
      continue;
    }
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

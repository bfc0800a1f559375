// Any bytes in both directions: the account of a connection survives them, is the same however the
// bytes are cut, and its memory is bounded. The first byte says where the server's bytes begin.
#include <cstdio>
#include <cstdlib>

#include "server/door/frames.h"

namespace {

void Check(bool holds, const char* claim) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", claim);
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using logitd::door::Frames;
  using logitd::door::Limit;
  static const logitd::door::FrameLimits limits = {.max_streams = 4, .streams_slack = 4};
  if (size == 0) return 0;
  const size_t border = 1 + (size - 1) * data[0] / 255;
  const absl::Span<const uint8_t> received(data + 1, border - 1);
  const absl::Span<const uint8_t> sent(data + border, size - border);

  Frames whole(limits, 0);
  Frames bytewise(limits, 0);
  const Limit broken = whole.Received(received, 0);
  Limit last = Limit::kNone;
  for (size_t i = 0; i < received.size(); ++i) {
    last = bytewise.Received(received.subspan(i, 1), 0);
  }
  whole.Sent(sent);
  for (size_t i = 0; i < sent.size(); ++i) bytewise.Sent(sent.subspan(i, 1));
  Check(broken == last, "the limit depends on how the bytes are cut");
  Check(whole.open() == bytewise.open(), "the streams depend on how the bytes are cut");
  Check(whole.under_way() == bytewise.under_way(), "the bytes depend on how they are cut");
  Check(whole.open() <= limits.max_streams + limits.streams_slack + 1, "too many streams");
  Check(whole.under_way() >= 0, "fewer than no bytes");
  return 0;
}

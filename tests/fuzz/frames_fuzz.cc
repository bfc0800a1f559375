// Any bytes in both directions: the account of a connection survives them, is the same however the
// bytes are cut, and its memory is bounded. The first byte says where the server's bytes begin.
// Where calls are refused, the account is that of what gRPC gets instead.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "server/door/edit.h"
#include "server/door/frames.h"

namespace {

void Check(bool holds, const char* claim) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", claim);
  std::abort();
}

// Reads in pieces whose sizes come from the bytes, and refuses every second call.
void Refuse(const logitd::door::FrameLimits& limits, absl::Span<const uint8_t> bytes) {
  logitd::door::Frames frames(limits, 0);
  logitd::door::FrameLimits grpcs = limits;  // it gets no message that is too large
  grpcs.max_message = 0xffffff + 1;          // the longest frame and a byte
  logitd::door::Frames grpc(grpcs, 0);
  int64_t asked = 0;
  bool well = true;
  while (!bytes.empty() && well) {
    const size_t run = std::min<size_t>(bytes.size(), 1 + size_t{bytes[0]} * 4);
    std::vector<uint8_t> read(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(run));
    bytes.remove_prefix(run);
    frames.BeginRead();
    well = frames.Received(read, 0, [&](uint32_t stream, bool, const auto& list) {
      Check(list.whole(), "a call is judged by a part of its list");
      for (size_t i = 0; i < list.size(); ++i) {
        Check(list[i].name.size() + list[i].value.size() <= list.bytes(), "a field is too large");
      }
      return ++asked % 2 == 0;
    }) == logitd::door::Limit::kNone;
    if (!well) break;
    size_t last = 0;
    for (const auto& edit : frames.edits()) {
      Check(edit.begin >= last && edit.end >= edit.begin && edit.end <= run, "edits overlap");
      last = edit.end;
    }
    iovec part = {read.data(), read.size()};
    std::string beyond;
    read.resize(logitd::door::ApplyEdits({&part, 1}, run, frames.edits(), &beyond));
    read.insert(read.end(), beyond.begin(), beyond.end());
    const auto limit = grpc.Received(read, 0);
    // gRPC gets a frame instead of each hidden one, and those cost it less than a call.
    well = limit == logitd::door::Limit::kNone;
    Check(grpc.too_large().empty(), "gRPC gets a message that is too large");
  }
  Check(frames.refused() == asked / 2, "a call is refused twice");
  if (well) Check(grpc.open() + frames.held_back() == frames.open(), "gRPC sees other streams");
}

// Both directions in turn, in pieces whose sizes come from the bytes. Writes take a part, and the next
// one begins with the rest.
void Talk(const logitd::door::FrameLimits& limits, absl::Span<const uint8_t> received,
          absl::Span<const uint8_t> sent) {
  constexpr int64_t kRoom = int64_t{3} << 20;
  logitd::door::EarlyRoom room(kRoom);
  {
    logitd::door::Frames frames(limits, 0, &room);
    std::vector<uint8_t> offered;
    while (!received.empty() || !sent.empty()) {
      const size_t got = received.empty() ? 0 : std::min<size_t>(received.size(), 1 + received[0]);
      frames.BeginRead();
      if (frames.Received(received.first(got), 0) != logitd::door::Limit::kNone) break;
      received.remove_prefix(got);
      const size_t more = sent.empty() ? 0 : std::min<size_t>(sent.size(), 1 + sent[0]);
      const size_t taken = sent.empty() ? offered.size() : sent[0] % (offered.size() + more + 1);
      offered.insert(offered.end(), sent.begin(), sent.begin() + static_cast<std::ptrdiff_t>(more));
      sent.remove_prefix(more);
      const iovec part = {offered.data(), offered.size()};
      frames.Offer({&part, 1});
      const std::vector<uint8_t> changed = offered;
      frames.Offer({&part, 1});
      Check(offered == changed, "a second offer of the same bytes changes them");
      frames.Sent(absl::MakeConstSpan(offered).first(taken));
      offered.erase(offered.begin(), offered.begin() + static_cast<std::ptrdiff_t>(taken));
      if (frames.between_sent_frames()) Check(offered.empty(), "bytes that were not sent");
      frames.TakeReplies();
      const logitd::door::Windows& windows = frames.windows();
      Check(windows.early() >= 0, "fewer than no early bytes");
      Check(room.left() == kRoom - windows.early_room() && room.left() >= 0, "room is lost");
      Check(!windows.wide() || windows.early_room() > 0, "wide windows without room");
    }
  }
  Check(room.left() == kRoom, "room is not given back");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using logitd::door::Frames;
  using logitd::door::Limit;
  static const logitd::door::FrameLimits limits = {
      .max_streams = 4, .streams_slack = 4, .max_message = 1000};
  if (size == 0) return 0;
  const size_t border = 1 + (size - 1) * data[0] / 255;
  const absl::Span<const uint8_t> received(data + 1, border - 1);
  const absl::Span<const uint8_t> sent(data + border, size - border);

  Refuse(limits, received);
  static const logitd::door::FrameLimits large = {.max_streams = 4, .streams_slack = 4};
  Talk(large, received, sent);
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

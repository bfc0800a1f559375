#include "server/rpc/transport/copier.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/usable_cores.h"

namespace logitd::rpc {
namespace {

// Below twice this, waking a helper costs more than it saves.
constexpr size_t kPartBytes = size_t{1} << 20;
constexpr int kMaxHelpers = 3;
constexpr size_t kRowsPerRead = 256;

int SpareThreads() { return std::min(kMaxHelpers, UsableCores() / 4); }

// Copies `at.bytes` bytes, which start at byte `first` of the payload. One memcpy for each
// contiguous run.
void CopyPart(Pieces pieces, ByteRange at, size_t first, size_t row_bytes, std::byte* dst,
              size_t row_stride) {
  if (row_stride == row_bytes) row_bytes = row_stride = SIZE_MAX;  // one long row
  size_t in_row = first % row_bytes;
  std::byte* to = dst + (first / row_bytes) * row_stride + in_row;
  while (at.bytes > 0) {
    const Piece& piece = pieces[at.piece];
    const size_t run = std::min({at.bytes, piece.size() - at.offset, row_bytes - in_row});
    std::memcpy(to, piece.data() + at.offset, run);
    at.bytes -= run;
    at.offset += run;
    if (at.offset == piece.size()) {
      ++at.piece;
      at.offset = 0;
    }
    to += run;
    in_row += run;
    if (in_row == row_bytes) {
      in_row = 0;
      to += row_stride - row_bytes;
    }
  }
}

// Copies `bytes` bytes, which start at byte `first` of a payload in an arena. One read for as many
// rows as lie together there.
void ReadPart(const Payload& payload, size_t first, size_t bytes, std::byte* dst,
              size_t row_stride) {
  const auto arena_stride = static_cast<size_t>(payload.arena_stride);
  const bool together = arena_stride == payload.row_bytes;
  if (together && row_stride == payload.row_bytes) {
    const absl::Span<std::byte> all(dst + first, bytes);
    payload.arena->Read(payload.arena_offset + static_cast<int64_t>(first), {&all, 1});
    return;
  }
  std::array<absl::Span<std::byte>, kRowsPerRead> rows;
  while (bytes > 0) {
    const size_t row = first / payload.row_bytes;
    size_t in_row = first % payload.row_bytes;
    const size_t from = row * arena_stride + in_row;
    size_t count = 0;
    while (bytes > 0 && count < (together ? rows.size() : 1)) {
      const size_t run = std::min(bytes, payload.row_bytes - in_row);
      rows[count] = {dst + (row + count) * row_stride + in_row, run};
      ++count;
      first += run;
      bytes -= run;
      in_row = 0;
    }
    payload.arena->Read(payload.arena_offset + static_cast<int64_t>(from),
                        absl::MakeConstSpan(rows.data(), count));
  }
}

// The part that starts at byte `first` of the payload, and that `at` locates in a message.
void CopyAnyPart(Pieces message, const Payload& payload, const ByteRange& at, size_t first,
                 std::byte* dst, size_t row_stride) {
  if (payload.arena != nullptr) {
    ReadPart(payload, first, at.bytes, dst, row_stride);
  } else {
    CopyPart(message, at, first, payload.row_bytes, dst, row_stride);
  }
}

// Moves the start of `at` on by `bytes`.
void Advance(Pieces pieces, size_t bytes, ByteRange* at) {
  at->bytes -= bytes;
  while (bytes > 0) {
    const size_t run = std::min(bytes, pieces[at->piece].size() - at->offset);
    bytes -= run;
    at->offset += run;
    if (at->offset == pieces[at->piece].size()) {
      ++at->piece;
      at->offset = 0;
    }
  }
}

}  // namespace

// Lives on the caller's stack. The copier's mutex guards the members that are not constant.
struct Copier::Task {
  const Pieces message;
  const Payload& payload;
  std::byte* const dst;
  const size_t row_stride;

  ByteRange rest;   // not taken yet
  int running = 0;  // parts taken and not done

  // Takes the next part, which starts at byte `first` of the payload.
  ByteRange Take(size_t* first) {
    ByteRange part = rest;
    part.bytes = std::min(part.bytes, kPartBytes);
    *first = payload.range.bytes - rest.bytes;
    if (payload.arena != nullptr) {
      rest.bytes -= part.bytes;
    } else {
      Advance(message, part.bytes, &rest);
    }
    ++running;
    return part;
  }
};

Copier::Copier() : Copier(SpareThreads()) {}

Copier::Copier(int helpers) {
  for (int i = 0; i < helpers; ++i) helpers_.emplace_back([this] { Help(); });
}

Copier::~Copier() {
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
  }
  for (std::thread& helper : helpers_) helper.join();
}

void Copier::Copy(Pieces message, const Payload& payload, std::byte* dst, size_t row_stride) {
  if (helpers_.empty() || payload.range.bytes < 2 * kPartBytes) {
    CopyAnyPart(message, payload, payload.range, 0, dst, row_stride);
    return;
  }
  Task task = {.message = message,
               .payload = payload,
               .dst = dst,
               .row_stride = row_stride,
               .rest = payload.range};
  absl::MutexLock lock(&mutex_);
  const auto place = tasks_.insert(tasks_.end(), &task);
  while (task.rest.bytes > 0) {
    size_t first = 0;
    const ByteRange part = task.Take(&first);
    mutex_.Unlock();
    CopyAnyPart(message, payload, part, first, dst, row_stride);
    mutex_.Lock();
    --task.running;
  }
  tasks_.erase(place);
  const auto done = [&task] { return task.running == 0; };
  mutex_.Await(absl::Condition(&done));
}

void Copier::Help() {
  absl::MutexLock lock(&mutex_);
  const auto work = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return stop_ || (!tasks_.empty() && tasks_.front()->rest.bytes > 0);
  };
  while (true) {
    mutex_.Await(absl::Condition(&work));
    if (stop_) return;
    Task* const task = tasks_.front();
    while (task->rest.bytes > 0) {
      size_t first = 0;
      const ByteRange part = task->Take(&first);
      mutex_.Unlock();
      CopyAnyPart(task->message, task->payload, part, first, task->dst, task->row_stride);
      mutex_.Lock();
      --task->running;
    }
  }
}

}  // namespace logitd::rpc

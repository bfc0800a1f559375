#include "server/arena/writer.h"

#include <deque>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/time/time.h"

namespace logitd::arena {
namespace {

// How long a thread waits for the next answer of its arena. A new thread takes about 30 us.
constexpr absl::Duration kIdle = absl::Milliseconds(200);

absl::Status WriteOne(Answer& answer) {
  if (!answer.wanted()) return absl::CancelledError("call cancelled");
  return answer.arena->Write(answer.offset, answer.bytes);
}

}  // namespace

// The writer's mutex guards it.
struct Writer::Line {
  std::deque<Answer> answers;
  // Before the first answer is written, so that the arena's address stays its own.
  std::shared_ptr<const Arena> arena;
};

Writer::Writer() = default;

Writer::~Writer() {
  absl::MutexLock lock(&mutex_);
  stop_ = true;
  const auto none = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return lines_.empty(); };
  mutex_.Await(absl::Condition(&none));
}

void Writer::Write(Answer answer) {
  bool failed = false;
  {
    absl::MutexLock lock(&mutex_);
    std::unique_ptr<Line>& line = lines_[answer.arena.get()];
    const bool is_new = line == nullptr;
    if (is_new) {
      line = std::make_unique<Line>();
      line->arena = answer.arena;
      try {
        std::thread([this, line = line.get()] { Run(line); }).detach();
      } catch (const std::system_error&) {
        lines_.erase(answer.arena.get());
        failed = true;
      }
    }
    if (!failed) line->answers.push_back(std::move(answer));
  }
  if (!failed) return;
  answer.keep.reset();
  answer.done(absl::UnavailableError("shared_output: got an answer for which there is no thread"));
}

void Writer::Run(Line* line) {
  absl::MutexLock lock(&mutex_);
  const auto ready = [this, line]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return stop_ || !line->answers.empty();
  };
  while (mutex_.AwaitWithTimeout(absl::Condition(&ready), kIdle) && !line->answers.empty()) {
    Answer answer = std::move(line->answers.front());
    line->answers.pop_front();
    mutex_.Unlock();
    const absl::Status written = WriteOne(answer);
    answer.keep.reset();
    answer.done(written);
    answer = {};
    mutex_.Lock();
  }
  lines_.erase(line->arena.get());  // the destructor may go on from here: no member is used below
}

}  // namespace logitd::arena

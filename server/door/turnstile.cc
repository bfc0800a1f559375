#include "server/door/turnstile.h"

#include <openssl/crypto.h>
#include <time.h>

#include <algorithm>

#include "absl/strings/numbers.h"
#include "server/door/answer.h"
#include "server/door/call_timeout.h"

namespace logitd::door {
namespace {

constexpr std::string_view kPath = ":path";
constexpr std::string_view kMethod = ":method";
constexpr std::string_view kContentType = "content-type";

// A field of a list. `times`: how often the list has it.
struct Value {
  std::string_view text;
  int times = 0;
};

Value Find(const HeaderList& list, std::string_view name) {
  Value value;
  for (size_t i = 0; i < list.size(); ++i) {
    const HeaderField field = list[i];
    if (field.name != name) continue;
    value.text = field.value;
    ++value.times;
  }
  return value;
}

// In a time that does not depend on where they differ: a value may be a token.
bool SameText(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

bool IsAllowed(const LikeCalls::Allowed& allowed, const Value& value) {
  if (value.times > 1) return false;
  return std::any_of(allowed.values.begin(), allowed.values.end(), [&](const auto& one) {
    return one.has_value() ? value.times == 1 && SameText(*one, value.text) : value.times == 0;
  });
}

// What gRPC takes for a call at all.
bool IsCall(const HeaderList& list) {
  const Value method = Find(list, kMethod);
  const Value type = Find(list, kContentType);
  return method.times == 1 && method.text == "POST" && type.times == 1 &&
         type.text.starts_with("application/grpc");
}

// What the call says, if it is like these.
std::optional<Judge::Call> IfLike(const LikeCalls& calls, const HeaderList& list) {
  const Value path = Find(list, kPath);
  const Value timeout = Find(list, kTimeout);
  if (path.times != 1 || path.text != calls.path || timeout.times != 1) return std::nullopt;
  const std::optional<int64_t> timeout_ns = ParseTimeout(timeout.text);
  if (!timeout_ns.has_value()) return std::nullopt;
  Judge::Call call = {.timeout_ns = *timeout_ns, .size = std::nullopt, .coming = 0};
  if (const Value size = Find(list, calls.size); size.times > 0) {
    int64_t parsed = 0;
    if (size.times > 1 || !absl::SimpleAtoi({size.text.data(), size.text.size()}, &parsed) ||
        parsed < 0 || parsed > calls.max_size) {
      return std::nullopt;
    }
    call.size = parsed;
  }
  for (const LikeCalls::Allowed& allowed : calls.allowed) {
    if (!IsAllowed(allowed, Find(list, allowed.name))) return std::nullopt;
  }
  return IsCall(list) ? std::optional(call) : std::nullopt;
}

bool SameKind(const LikeCalls& a, const LikeCalls& b) {
  return a.path == b.path &&
         std::equal(a.allowed.begin(), a.allowed.end(), b.allowed.begin(), b.allowed.end(),
                    [](const LikeCalls::Allowed& x, const LikeCalls::Allowed& y) {
                      return x.name == y.name && x.values == y.values;
                    });
}

}  // namespace

int64_t MonotonicNanos() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void Turnstile::Add(LikeCalls calls, int64_t now_ns) {
  auto added = std::make_shared<const LikeCalls>(std::move(calls));
  absl::MutexLock lock(&mutex_);
  judged_.erase(std::remove_if(judged_.begin(), judged_.end(),
                               [&](const auto& old) { return SameKind(*old, *added); }),
                judged_.end());
  if (judged_.size() >= kMost) judged_.erase(judged_.begin());
  judged_.push_back(std::move(added));
  until_ns_ = now_ns + kStay;
}

void Turnstile::Began() {
  if (empty()) return;
  absl::MutexLock lock(&mutex_);
  if (!coming_.empty()) coming_.pop_front();
}

std::optional<Turnstile::Answer> Turnstile::Ask(const HeaderList& list, int64_t now_ns) {
  std::optional<Judge::Call> call;
  std::shared_ptr<const LikeCalls> like;
  {
    absl::MutexLock lock(&mutex_);
    if (now_ns >= until_ns_) {
      judged_.clear();
      coming_.clear();
      until_ns_ = 0;
      return std::nullopt;
    }
    for (const auto& calls : judged_) {
      call = IfLike(*calls, list);
      if (!call.has_value()) continue;
      like = calls;
      break;
    }
    if (!call.has_value()) return std::nullopt;
    while (!coming_.empty() && now_ns - coming_.front() >= kComing) coming_.pop_front();
    call->coming = static_cast<int>(coming_.size());
  }
  const std::optional<Judge::Verdict> verdict = like->judge->Ask(*call);
  {
    absl::MutexLock lock(&mutex_);
    if (!verdict.has_value()) {
      if (coming_.size() < kMostComing) coming_.push_back(now_ns);
      return std::nullopt;
    }
    until_ns_ = std::max(until_ns_.load(), now_ns + kStay);
  }
  Answer answer = {.fields = EncodeStatus(verdict->code, verdict->text),
                   .reason = verdict->reason,
                   .echoed = {},
                   .judge = like->judge};
  for (const auto& [name, value] : verdict->trailers) AppendField(name, value, &answer.fields);
  for (const LikeCalls::Echo& echo : like->echoes) {
    const Value value = Find(list, echo.name);
    const bool valid = value.times == 1 && echo.well_formed(value.text);
    answer.echoed.emplace_back(valid ? value.text : "");
    if (valid) AppendField(echo.name, value.text, &answer.fields);
  }
  return answer;
}

}  // namespace logitd::door

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

bool IsAllowed(const Refusal::Allowed& allowed, const Value& value) {
  if (value.times > 1) return false;
  return std::any_of(allowed.values.begin(), allowed.values.end(), [&](const auto& one) {
    return one.has_value() ? value.times == 1 && SameText(*one, value.text) : value.times == 0;
  });
}

bool IsInRange(const Refusal::Number& number, const Value& value) {
  if (!number.range.has_value()) return value.times == 0;
  int64_t parsed = 0;
  return value.times == 1 && absl::SimpleAtoi({value.text.data(), value.text.size()}, &parsed) &&
         parsed >= number.range->first && parsed <= number.range->second;
}

// What gRPC takes for a call at all.
bool IsCall(const HeaderList& list) {
  const Value method = Find(list, kMethod);
  const Value type = Find(list, kContentType);
  return method.times == 1 && method.text == "POST" && type.times == 1 &&
         type.text.starts_with("application/grpc");
}

bool IsLike(const Refusal& refusal, const HeaderList& list) {
  const Value path = Find(list, kPath);
  const Value timeout = Find(list, kTimeout);
  if (path.times != 1 || path.text != refusal.path || timeout.times != 1) return false;
  const std::optional<int64_t> timeout_ns = ParseTimeout(timeout.text);
  if (!timeout_ns.has_value() || *timeout_ns > refusal.longest_ns) return false;
  if (!IsInRange(refusal.size, Find(list, refusal.size.name))) return false;
  for (const Refusal::Allowed& allowed : refusal.allowed) {
    if (!IsAllowed(allowed, Find(list, allowed.name))) return false;
  }
  return IsCall(list);
}

// Sizes that one of both would refuse are of the same kind.
bool SameSize(const Refusal::Number& a, const Refusal::Number& b) {
  if (!a.range.has_value() || !b.range.has_value()) return a.range == b.range;
  return a.range->first <= b.range->second && b.range->first <= a.range->second;
}

bool SameKind(const Refusal& a, const Refusal& b) {
  return a.path == b.path && SameSize(a.size, b.size) &&
         std::equal(a.allowed.begin(), a.allowed.end(), b.allowed.begin(), b.allowed.end(),
                    [](const Refusal::Allowed& x, const Refusal::Allowed& y) {
                      return x.name == y.name && x.values == y.values;
                    });
}

}  // namespace

int64_t MonotonicNanos() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void Turnstile::Add(Refusal refusal) {
  Held held;
  held.fields = EncodeStatus(refusal.code, refusal.text);
  for (const auto& [name, value] : refusal.trailers) AppendField(name, value, &held.fields);
  held.refusal = std::move(refusal);
  absl::MutexLock lock(&mutex_);
  held_.erase(std::remove_if(held_.begin(), held_.end(),
                             [&](const Held& old) { return SameKind(old.refusal, held.refusal); }),
              held_.end());
  if (held_.size() >= kMost) held_.erase(held_.begin());
  held_.push_back(std::move(held));
  until_ns_ = std::max<int64_t>(until_ns_, held_.back().refusal.until_ns);
}

void Turnstile::Began() {
  // Calls that passed before there was a refusal were not counted.
  int before = in_transit_.load(std::memory_order_relaxed);
  while (before > 0 && !in_transit_.compare_exchange_weak(before, before - 1)) {
  }
}

bool Turnstile::Holds(const Refusal& refusal, int64_t now_ns) const {
  if (now_ns >= refusal.until_ns) return false;
  if (refusal.under_way == nullptr) return true;
  return *refusal.under_way + in_transit_ >= refusal.least_under_way;
}

std::optional<Turnstile::Answer> Turnstile::Ask(const HeaderList& list, int64_t now_ns) {
  absl::MutexLock lock(&mutex_);
  if (now_ns - kLinger >= until_ns_) {
    held_.clear();
    until_ns_ = 0;
    in_transit_ = 0;
    return std::nullopt;
  }
  bool lingers = false;
  for (const Held& held : held_) {
    const Refusal& refusal = held.refusal;
    if (!IsLike(refusal, list)) continue;
    lingers = true;
    if (!Holds(refusal, now_ns) && in_transit_ < kMostInTransit) continue;
    Answer answer = {.fields = held.fields, .echoed = {}, .events = refusal.events};
    for (const Refusal::Echo& echo : refusal.echoes) {
      const Value value = Find(list, echo.name);
      const bool valid = value.times == 1 && echo.well_formed(value.text);
      answer.echoed.emplace_back(valid ? value.text : "");
      if (valid) AppendField(echo.name, value.text, &answer.fields);
    }
    return answer;
  }
  if (lingers) ++in_transit_;
  return std::nullopt;
}

}  // namespace logitd::door

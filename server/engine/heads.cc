#include "server/engine/heads.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace logitd::engine {

Head::Head(Backend* backend, const DeviceMemory& memory, const HeadView& view, HeadInfo info)
    : backend_(backend), memory_(memory), view_(view), info_(std::move(info)) {}

Head::~Head() { backend_->FreeDevice(memory_); }

Heads::Heads(Backend* backend, Metrics* metrics) : backend_(backend), metrics_(metrics) {}

absl::Status Heads::Unload(std::string_view name) {
  std::shared_ptr<const Head> last;  // freed without the lock
  MutexLock lock(mutex_);
  const auto it = heads_.find(name);
  if (it == heads_.end()) return NoSuchHead(name);
  last = std::move(it->second);
  heads_.erase(it);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const Head>> Heads::Find(std::string_view name) const {
  MutexLock lock(mutex_);
  const auto it = heads_.find(name);
  if (it == heads_.end()) return NoSuchHead(name);
  return it->second;
}

std::vector<std::shared_ptr<const Head>> Heads::List() const {
  std::vector<std::shared_ptr<const Head>> list;
  MutexLock lock(mutex_);
  list.reserve(heads_.size());
  for (const auto& [name, head] : heads_) list.push_back(head);
  return list;
}

absl::Status Heads::NoSuchHead(std::string_view name) const {
  std::vector<std::string> names;
  names.reserve(heads_.size());
  for (const auto& [known, head] : heads_) names.push_back(known);
  return absl::NotFoundError(absl::StrFormat("no head \"%s\"; loaded: %s", name,
                                             names.empty() ? "none" : absl::StrJoin(names, ", ")));
}

}  // namespace logitd::engine

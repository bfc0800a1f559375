#include "server/engine/heads.h"

#include <utility>

namespace logitd::engine {

Head::Head(Backend* backend, const DeviceMemory& memory, const HeadView& view, HeadInfo info)
    : backend_(backend), memory_(memory), view_(view), info_(std::move(info)) {}

Head::~Head() { backend_->FreeDevice(memory_); }

}  // namespace logitd::engine

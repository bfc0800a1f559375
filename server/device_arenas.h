// Arenas on the server's devices.
#ifndef LOGITD_SERVER_DEVICE_ARENAS_H_
#define LOGITD_SERVER_DEVICE_ARENAS_H_

#include <memory>

#include "server/arena/leases.h"
#include "server/engine/devices.h"

namespace logitd {

// Null where the devices neither share nor pin memory: they are no CUDA devices.
std::unique_ptr<arena::ArenaDevices> MakeArenaDevices(
    std::shared_ptr<const engine::Devices> devices);

}  // namespace logitd

#endif  // LOGITD_SERVER_DEVICE_ARENAS_H_

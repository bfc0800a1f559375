// Arenas on the server's devices.
#ifndef LOGITD_SERVER_DEVICE_ARENAS_H_
#define LOGITD_SERVER_DEVICE_ARENAS_H_

#include <memory>

#include "server/arena/leases.h"
#include "server/engine/devices.h"

namespace logitd {

// Null where the devices can neither share nor pin memory: only CUDA devices can.
std::unique_ptr<arena::ArenaDevices> MakeArenaDevices(
    std::shared_ptr<const engine::Devices> devices);

}  // namespace logitd

#endif  // LOGITD_SERVER_DEVICE_ARENAS_H_

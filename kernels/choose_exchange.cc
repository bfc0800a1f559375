#include "kernels/choose_exchange.h"

#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace logitd {

absl::StatusOr<ShardExchange> ChooseExchange(ShardExchange wanted,
                                             absl::FunctionRef<absl::Status()> peers,
                                             absl::FunctionRef<absl::Status()> nccl) {
  std::vector<std::string> why_not, allowed;
  if (wanted != ShardExchange::kNccl) {
    const absl::Status status = peers();
    if (status.ok()) return ShardExchange::kPeers;
    if (absl::IsInternal(status)) return status;
    why_not.emplace_back(status.message());
    allowed.emplace_back("with peer access (NVLink, or PCIe where the machine lets it)");
  }
  if (wanted != ShardExchange::kPeers) {
    const absl::Status status = nccl();
    if (status.ok()) return ShardExchange::kNccl;
    if (absl::IsInternal(status)) return status;
    why_not.emplace_back(status.message());
    allowed.emplace_back("that NCCL can join");
  }
  return absl::FailedPreconditionError(
      absl::StrFormat("shard: %s, allowed devices %s; on others each device holds the whole head",
                      absl::StrJoin(why_not, ", and "), absl::StrJoin(allowed, " or ")));
}

}  // namespace logitd

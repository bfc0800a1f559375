#include "kernels/choose_exchange.h"

#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace logitd {

absl::StatusOr<ShardExchange> ChooseExchange(ShardExchange wanted,
                                             absl::FunctionRef<absl::Status()> peers,
                                             absl::FunctionRef<absl::Status()> nccl) {
  const struct {
    ShardExchange exchange;
    absl::FunctionRef<absl::Status()> check;
    const char* allowed;
  } ways[] = {
      {ShardExchange::kPeers, peers,
       "with peer access (NVLink, or PCIe where the machine lets it)"},
      {ShardExchange::kNccl, nccl, "that NCCL can join"},
  };
  std::vector<std::string> why_not, allowed;
  for (const auto& way : ways) {
    if (wanted != ShardExchange::kAuto && wanted != way.exchange) continue;
    const absl::Status status = way.check();
    if (status.ok()) return way.exchange;
    if (absl::IsInternal(status)) return status;
    why_not.emplace_back(status.message());
    allowed.emplace_back(way.allowed);
  }
  return absl::FailedPreconditionError(
      absl::StrFormat("shard: %s, allowed devices %s; on others each device holds the whole head",
                      absl::StrJoin(why_not, ", and "), absl::StrJoin(allowed, " or ")));
}

}  // namespace logitd

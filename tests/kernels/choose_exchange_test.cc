#include "kernels/choose_exchange.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace logitd::testing {
namespace {

const absl::Status kCan;
const absl::Status kNoPeers =
    absl::FailedPreconditionError("device 1 cannot reach the memory of device 0");
const absl::Status kNoNccl = absl::FailedPreconditionError("NCCL cannot be loaded: no such file");

struct Choice {
  absl::StatusOr<ShardExchange> found;
  std::string asked;
};

Choice Choose(ShardExchange wanted, const absl::Status& peers, const absl::Status& nccl) {
  std::string asked;
  const auto ask = [&asked](const char* what, const absl::Status& status) {
    asked += what;
    return status;
  };
  absl::StatusOr<ShardExchange> found = ChooseExchange(
      wanted, [&] { return ask("peers ", peers); }, [&] { return ask("nccl ", nccl); });
  return {.found = std::move(found), .asked = asked};
}

TEST(ChooseExchangeTest, PeersComeFirstWhereBothCan) {
  const Choice choice = Choose(ShardExchange::kAuto, kCan, kCan);
  EXPECT_EQ(choice.found.value(), ShardExchange::kPeers);
  EXPECT_EQ(choice.asked, "peers ");
}

TEST(ChooseExchangeTest, NcclWherePeersCannot) {
  EXPECT_EQ(Choose(ShardExchange::kAuto, kNoPeers, kCan).found.value(), ShardExchange::kNccl);
}

TEST(ChooseExchangeTest, TheOneThatIsWantedAndNoOther) {
  const Choice nccl = Choose(ShardExchange::kNccl, kCan, kCan);
  EXPECT_EQ(nccl.found.value(), ShardExchange::kNccl);
  EXPECT_EQ(nccl.asked, "nccl ");
  EXPECT_EQ(Choose(ShardExchange::kPeers, kCan, kNoNccl).found.value(), ShardExchange::kPeers);
}

TEST(ChooseExchangeTest, WhereThereIsNoWayASentenceSaysWhy) {
  EXPECT_EQ(Choose(ShardExchange::kAuto, kNoPeers, kNoNccl).found.status(),
            absl::FailedPreconditionError(
                "shard: device 1 cannot reach the memory of device 0, and NCCL cannot be loaded: "
                "no such file, allowed devices with peer access (NVLink, or PCIe where the machine "
                "lets it) or that NCCL can join; on others each device holds the whole head"));
  EXPECT_EQ(Choose(ShardExchange::kPeers, kNoPeers, kCan).found.status(),
            absl::FailedPreconditionError(
                "shard: device 1 cannot reach the memory of device 0, allowed devices with peer "
                "access (NVLink, or PCIe where the machine lets it); on others each device holds "
                "the whole head"));
  EXPECT_EQ(
      Choose(ShardExchange::kNccl, kCan, kNoNccl).found.status(),
      absl::FailedPreconditionError(
          "shard: NCCL cannot be loaded: no such file, allowed devices that NCCL can join; on "
          "others each device holds the whole head"));
}

TEST(ChooseExchangeTest, AFailedDeviceIsNoReasonToTryAnotherWay) {
  const absl::Status lost = absl::InternalError("CUDA: ask for peers: no device");
  const Choice choice = Choose(ShardExchange::kAuto, lost, kCan);
  EXPECT_EQ(choice.found.status(), lost);
  EXPECT_EQ(choice.asked, "peers ");
}

}  // namespace
}  // namespace logitd::testing

// A call's place in the line, which it leaves when it is gone.
#include "server/rpc/transport/admission_wait.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace logitd::rpc {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Gives the places 1, 2, 3, ... At the place `early` the call is let in before it knows its place, as
// by another thread that is quick.
class QuickAdmission {
 public:
  using WaiterId = uint64_t;
  using Ready = std::function<void()>;

  WaiterId Enter(engine::RoomAsk, Ready ready) {
    const WaiterId place = ++places_;
    if (place == early) ready();
    return place;
  }
  void Abandon(WaiterId waiter) { abandoned.push_back(waiter); }

  WaiterId early = 0;
  std::vector<WaiterId> abandoned;

 private:
  WaiterId places_ = 0;
};

TEST(AdmissionWaitTest, ACallThatIsGoneLeavesItsPlace) {
  QuickAdmission admission;
  WaitAt<QuickAdmission> wait(&admission);
  wait.Enter({}, [] {});
  EXPECT_THAT(admission.abandoned, IsEmpty());
  wait.Abandon();
  EXPECT_THAT(admission.abandoned, ElementsAre(1));
}

TEST(AdmissionWaitTest, ACallThatWaitsAgainLeavesItsLastPlace) {
  QuickAdmission admission;
  admission.early = 1;
  WaitAt<QuickAdmission> wait(&admission);
  wait.Enter({}, [&wait] { wait.Enter({}, [] {}); });
  wait.Abandon();
  EXPECT_THAT(admission.abandoned, ElementsAre(2));
}

TEST(AdmissionWaitTest, ACallThatWaitsAfterItIsGoneLeavesAtOnce) {
  QuickAdmission admission;
  WaitAt<QuickAdmission> wait(&admission);
  wait.Abandon();
  EXPECT_THAT(admission.abandoned, IsEmpty());
  wait.Enter({}, [] {});
  EXPECT_THAT(admission.abandoned, ElementsAre(1));
}

}  // namespace
}  // namespace logitd::rpc

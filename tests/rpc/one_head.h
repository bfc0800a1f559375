// One loaded head for codecs: "h", 3 tokens x 2, f32.
#ifndef LOGITD_TESTS_RPC_ONE_HEAD_H_
#define LOGITD_TESTS_RPC_ONE_HEAD_H_

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "server/engine/heads.h"
#include "server/rpc/codecs/logits_or_hidden.h"
#include "tests/fake_backend.h"

namespace logitd::rpc::testing {

class OneHead {
 public:
  // This outlives the result.
  FindHead Find() const {
    return [this](std::string_view name) -> absl::StatusOr<std::shared_ptr<const engine::Head>> {
      if (name == "h" && head_ != nullptr) return head_;
      return absl::NotFoundError(absl::StrCat("no head ", std::string(name), ", only h"));
    };
  }

  // As engine::Heads::Unload: Find does not return the head any more, and its last user frees it.
  void Unload() { head_.reset(); }

  std::weak_ptr<const engine::Head> watch() const { return head_; }

 private:
  // The weight is never read.
  std::unique_ptr<FakeBackend> backend_ = std::make_unique<FakeBackend>();
  std::shared_ptr<const engine::Head> head_ = std::make_shared<engine::Head>(
      backend_.get(), DeviceMemory(),
      HeadView{.weight = {.dtype = DType::kF32, .rows = 3, .cols = 2, .row_stride = 4}},
      engine::HeadInfo{.name = "h"});
};

}  // namespace logitd::rpc::testing

#endif  // LOGITD_TESTS_RPC_ONE_HEAD_H_

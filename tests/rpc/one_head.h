// A server with one loaded head, for codecs: "h", of 3 tokens by 2, in f32.
#ifndef LOGITD_TESTS_RPC_ONE_HEAD_H_
#define LOGITD_TESTS_RPC_ONE_HEAD_H_

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/backend.h"
#include "server/engine/heads.h"
#include "server/rpc/codecs/logits_or_hidden.h"

namespace logitd::rpc::testing {

class OneHead {
 public:
  // Which this outlives.
  FindHead Find() const {
    return [this](std::string_view name) -> absl::StatusOr<std::shared_ptr<const engine::Head>> {
      if (name == "h" && head_ != nullptr) return head_;
      return absl::NotFoundError(absl::StrCat("no head ", std::string(name), ", but h"));
    };
  }

  // As engine::Heads::Unload: not found from here on, and gone with the last who has it.
  void Unload() { head_.reset(); }

  std::weak_ptr<const engine::Head> watch() const { return head_; }

 private:
  // The weight is never read.
  class NoBackend final : public Backend {
   public:
    const DeviceInfo& device() const override { return info_; }
    absl::StatusOr<Slab> AllocateSlab(size_t) override { return Slab(); }
    void FreeSlab(const Slab&) override {}
    absl::StatusOr<DeviceMemory> AllocateDevice(size_t) override { return DeviceMemory(); }
    void FreeDevice(const DeviceMemory&) override {}
    absl::StatusOr<std::unique_ptr<Stream>> CreateStream(StreamUse) override { return nullptr; }

   private:
    const DeviceInfo info_ = {};
  };

  std::unique_ptr<NoBackend> backend_ = std::make_unique<NoBackend>();
  std::shared_ptr<const engine::Head> head_ = std::make_shared<engine::Head>(
      backend_.get(), DeviceMemory(),
      HeadView{.weight = {.dtype = DType::kF32, .rows = 3, .cols = 2, .row_stride = 4}},
      engine::HeadInfo{.name = "h"});
};

}  // namespace logitd::rpc::testing

#endif  // LOGITD_TESTS_RPC_ONE_HEAD_H_

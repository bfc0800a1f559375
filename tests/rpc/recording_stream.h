// A stream that keeps what it is asked to run.
#ifndef LOGITD_TESTS_RPC_RECORDING_STREAM_H_
#define LOGITD_TESTS_RPC_RECORDING_STREAM_H_

#include <variant>

#include "absl/status/status.h"
#include "kernels/backend.h"

namespace logitd::rpc {

class RecordingStream final : public Stream {
 public:
  absl::Status Upload(const Slab&, size_t, size_t) override { return absl::OkStatus(); }
  absl::Status Download(const Slab&, size_t, size_t) override { return absl::OkStatus(); }
  absl::Status Fill(const Slab&, size_t, size_t, std::byte*) override { return absl::OkStatus(); }
  absl::Status SoftmaxTopK(const SoftmaxTopKArgs& args) override { return Keep(args); }
  absl::Status Sample(const SampleArgs& args) override { return Keep(args); }
  absl::Status Verify(const VerifyArgs& args) override { return Keep(args); }
  absl::Status AttentionSoftmax(const AttentionSoftmaxArgs& args) override { return Keep(args); }
  absl::Status AttentionSoftmaxBackward(const AttentionSoftmaxBackwardArgs& args) override {
    return Keep(args);
  }
  absl::Status CrossEntropy(const CrossEntropyArgs& args) override { return Keep(args); }
  absl::Status LinearTopK(const LinearTopKArgs& args) override { return Keep(args); }
  absl::Status LinearSample(const LinearSampleArgs& args) override { return Keep(args); }
  absl::Status LinearCrossEntropy(const LinearCrossEntropyArgs& args) override {
    return Keep(args);
  }
  absl::StatusOr<StreamTimes> Wait() override { return StreamTimes(); }

  // Throws where another op was run.
  template <typename Args>
  const Args& last() const {
    return std::get<Args>(last_);
  }

 private:
  template <typename Args>
  absl::Status Keep(const Args& args) {
    last_ = args;
    return absl::OkStatus();
  }

  std::variant<SoftmaxTopKArgs, SampleArgs, VerifyArgs, AttentionSoftmaxArgs,
               AttentionSoftmaxBackwardArgs, CrossEntropyArgs, LinearTopKArgs, LinearSampleArgs,
               LinearCrossEntropyArgs>
      last_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_TESTS_RPC_RECORDING_STREAM_H_

// The place of an output head in files, and how its model uses it. Reads headers and settings, not
// the numbers.
#ifndef LOGITD_SERVER_ENGINE_HEAD_SOURCE_H_
#define LOGITD_SERVER_ENGINE_HEAD_SOURCE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/head.h"
#include "server/engine/head_tensors.h"
#include "server/engine/heads.h"

namespace logitd::engine {

struct HeadSource {
  StoredTensor weight;               // [stored vocab, hidden]
  std::optional<StoredTensor> bias;  // [stored vocab]
  std::optional<StoredTensor> norm;  // [hidden]
  int64_t vocab = 0;                 // rows to keep, 1..stored vocab
  float norm_offset = 0.0f;          // the model adds this to every weight of its norm
  float norm_epsilon = 0.0f;
  float scale = 1.0f;  // of the logits, bias included
  float softcap = 0.0f;
  std::vector<std::string> warnings;  // one line each

  // The head without its numbers.
  HeadView Shape() const {
    return {.weight = {.dtype = weight.dtype, .rows = vocab, .cols = weight.shape[1]},
            .norm_epsilon = norm_epsilon,
            .scale = scale,
            .softcap = softcap};
  }
};

// Errors: those of Heads::Load about files and settings. Thread-safe.
//
// docs/operations.md lists the keys of settings and the names of tensors. A folder's settings are
// in its config.json, where "text_config" comes first; a single file's are in its metadata.
// hidden_size is not read: the weight's own width counts, because models that project their states
// before the head state another size.
absl::StatusOr<HeadSource> OpenHeadSource(const HeadRequest& request);

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_HEAD_SOURCE_H_

// Where the numbers of an output head lie in files, and how a model uses them. Reads headers and
// settings, not the numbers.
#ifndef LOGITD_SERVER_ENGINE_HEAD_SOURCE_H_
#define LOGITD_SERVER_ENGINE_HEAD_SOURCE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/types.h"
#include "server/engine/heads.h"

namespace logitd::engine {

// A regular file that is read piece by piece. Thread-safe.
//
// Not mapped: touching a page of a mapping that another process has cut off ends this one with
// SIGBUS; a read of it is an error of that load alone.
class DataFile {
 public:
  // `root`: as a HeadRequest has it. NOT_FOUND, PERMISSION_DENIED; INVALID_ARGUMENT: not a regular
  // file, or no path; UNAVAILABLE: else.
  static absl::StatusOr<std::shared_ptr<const DataFile>> Open(const std::string& root,
                                                              const std::string& path);
  ~DataFile();
  DataFile(const DataFile&) = delete;
  DataFile& operator=(const DataFile&) = delete;

  const std::string& path() const { return path_; }  // as it was asked for
  int64_t bytes() const { return bytes_; }           // when it was opened

  // All of [offset, offset + bytes), or UNAVAILABLE.
  absl::Status Read(int64_t offset, size_t bytes, void* to) const;

 private:
  DataFile(std::string path, int fd, int64_t bytes);

  const std::string path_;
  const int fd_;
  const int64_t bytes_;
};

struct StoredTensor {
  std::string name;
  std::shared_ptr<const DataFile> file;
  int64_t offset = 0;  // of its first byte in the file
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
};

// PERMISSION_DENIED where `path` leads out of `root` by its letters, whatever there is. What its
// links say is known when it is opened.
absl::Status CheckInRoot(const std::string& root, const std::string& path);

struct HeadSource {
  StoredTensor weight;               // [stored vocab, hidden]
  std::optional<StoredTensor> bias;  // [stored vocab]
  std::optional<StoredTensor> norm;  // [hidden]
  int64_t vocab = 0;                 // rows to keep, 1..stored vocab
  float norm_offset = 0.0f;          // what the model adds to every weight of its norm
  float norm_epsilon = 0.0f;
  float scale = 1.0f;  // of the logits, bias included
  float softcap = 0.0f;
};

// Errors as Heads::Load has of files and settings. Thread-safe.
//
// The settings are those of a folder's config.json, looked for under "text_config" first, or of a
// file's own metadata, under the same keys: vocab_size, tie_word_embeddings, logit_scale and
// lm_head_multiplier (multiply), logits_scaling (divides), dim_model_base (multiplies, divided by
// the weight's width), final_logit_softcapping, rms_norm_eps, model_type. None is required but
// rms_norm_eps for the norm. Keys that are known to change logits in other ways are refused.
// hidden_size is not one of them: the weight's own width counts, since models that project their
// states before the head state another.
absl::StatusOr<HeadSource> OpenHeadSource(const HeadRequest& request);

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_HEAD_SOURCE_H_

// The tensors of a head's file, or of all files of its folder. Reads headers, not the numbers.
#ifndef LOGITD_SERVER_ENGINE_HEAD_TENSORS_H_
#define LOGITD_SERVER_ENGINE_HEAD_TENSORS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "formats/safetensors.h"
#include "kernels/types.h"
#include "server/engine/data_file.h"

namespace logitd::engine {

struct StoredTensor {
  std::string name;
  std::shared_ptr<const DataFile> file;
  int64_t offset = 0;  // of its first byte in the file
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
};

// Printable ASCII on one line, or nothing.
bool IsPrintable(std::string_view text);

// A tensor that only a quantised matrix has.
struct QuantisedPart {
  std::string name;
  std::string_view scheme;
};

// Errors: those of Heads::Load about files. Not thread-safe.
//
// Names are those of the model: a wrapper that all names begin with, "_orig_mod." (torch.compile),
// "module." (DDP) or several of them, is left out, except in the names of StoredTensor and of
// texts.
class HeadTensors {
 public:
  static absl::StatusOr<HeadTensors> OfFile(const std::string& root, const std::string& path);

  // "model.safetensors", or the files that "model.safetensors.index.json" names. With both, the
  // first, as in transformers. Of an index it has only the tensors outside the model's layers.
  static absl::StatusOr<HeadTensors> OfFolder(const std::string& root, const std::string& folder);

  bool Has(const std::string& name) const { return file_of_.contains(name); }

  // The first of the names that exists, or "".
  template <typename Names>
  std::string FirstOf(const Names& names, std::string_view rest = "") const {
    for (const char* start : names) {
      if (std::string name = absl::StrCat(start, std::string(rest)); Has(name)) return name;
    }
    return "";
  }
  // The first name that exists of a head's own tensors, such as "lm_head.weight" for "weight"; and
  // of input embeddings, which are the head of a model that ties them.
  std::string OfHead(std::string_view rest) const;
  std::string Embeddings() const;

  // A tensor by which the matrix is quantised whose weight has this name, or would have it; of a
  // head under any of its names.
  std::optional<QuantisedPart> QuantisedPartOf(std::string_view weight) const;
  std::optional<QuantisedPart> QuantisedHead() const;

  // For error texts, bounded: the names of a head's weight; the tensors outside layers, a head's
  // first.
  static std::string HeadNames();
  std::string Listed() const;

  // The names of a single file's tensors of 2 dimensions.
  std::vector<std::string> Matrices() const;
  // The header of a single file.
  const formats::SafetensorsHeader& header() const { return open_.begin()->second.header; }

  // `want`: its shape; -1: any size above 0.
  absl::StatusOr<StoredTensor> Get(const std::string& name, const std::vector<int64_t>& want);

  // That the folder has files that are not read, or "".
  const std::string& warning() const { return warning_; }

 private:
  // A file and the tensors in it.
  struct OpenFile {
    std::shared_ptr<const DataFile> file;
    formats::SafetensorsHeader header;
    int64_t data = 0;  // where it begins
  };

  HeadTensors(std::string root, std::string where)
      : root_(std::move(root)), where_(std::move(where)) {}

  static absl::StatusOr<OpenFile> OpenSafetensors(const std::string& root, const std::string& path);

  std::string root_;
  std::string where_;    // the file that lists the tensors
  std::string folder_;   // with '/', before the file names of an index; of a single file ""
  std::string wrapper_;  // before all names in the files
  std::map<std::string, std::string, std::less<>> file_of_;  // without folder_
  std::map<std::string, OpenFile> open_;                     // by the names in file_of_
  std::string warning_;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_HEAD_TENSORS_H_

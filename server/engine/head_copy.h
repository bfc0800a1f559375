// Copies heads from their files to devices.
#ifndef LOGITD_SERVER_ENGINE_HEAD_COPY_H_
#define LOGITD_SERVER_ENGINE_HEAD_COPY_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/head.h"
#include "kernels/shards.h"
#include "server/engine/head_source.h"
#include "server/engine/heads.h"

namespace logitd::engine {

// The layout of a head in the memory of a device that holds the tokens of `part`: the weight, each
// row on a border of 16 bytes, then bias and norm as floats. A device without tokens holds nothing.
struct HeadLayout {
  HeadLayout(const HeadSource& source, const VocabShard& part);

  HeadView View(const HeadSource& source, const std::byte* memory) const;

  size_t first;  // the first token
  size_t vocab;  // tokens
  size_t hidden;
  size_t row_bytes;   // in the file
  size_t row_stride;  // bytes, on the device
  size_t bias;        // offset on the device
  size_t norm;        // offset on the device
  size_t bytes;       // on the device
  int64_t file_bytes;
};

// Fills the memory of all `copies` that have a backend; layouts[i] is that of copies[i]. `sharded`:
// they are different parts; else all are equal, and the files are read once. `name`: for the log.
// `progress` as in Heads::Load.
//
// RESOURCE_EXHAUSTED: no memory to copy through. Otherwise those errors of Heads::Load that come
// after a file was opened; one of a device says which.
absl::Status CopyHead(const HeadSource& source, const std::vector<HeadLayout>& layouts,
                      const std::vector<Head::Copy>& copies, bool sharded, const std::string& name,
                      absl::FunctionRef<bool(const HeadProgress&)> progress);

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_HEAD_COPY_H_

// Tensors in .npy and .safetensors files, mapped into memory and not copied.
//
// The files are not trusted: every length is checked against the file before it is used, and an
// error names the file and the fault. A file that another process shortens while it is mapped ends
// this one with SIGBUS, as with any mmap.
#ifndef LOGITD_CLIENT_TENSOR_FILE_H_
#define LOGITD_CLIENT_TENSOR_FILE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "logitd/v1/types.pb.h"

namespace logitd::client {

// Bytes of one element: 4, 2 or 2. `dtype` is one of the three.
int64_t DTypeSize(v1::DType dtype);
absl::string_view DTypeShortName(v1::DType dtype);  // "f32", "f16", "bf16"

// A tensor in a mapped file. Copies are cheap and share the mapping, which lives as long as any of
// them.
struct FileTensor {
  v1::DType dtype = v1::DTYPE_UNSPECIFIED;  // UNSPECIFIED for booleans and integers
  bool boolean = false;                     // one byte each, 0 or not
  int integer_bytes = 0;                    // of each, 4 or 8, signed; 0: no integers
  std::vector<int64_t> shape;               // outermost first
  absl::string_view bytes;                  // row-major, little-endian, of any alignment
  std::shared_ptr<const void> mapping;
};

// The element types that a caller accepts.
enum class Elements {
  kFloats,         // f32, f16, bf16
  kFloatsOrBools,  // these too
  kIntegers,       // int32, int64
};

// Immutable after Open, hence thread-safe.
class SafetensorsFile {
 public:
  // NOT_FOUND, PERMISSION_DENIED: the file. INVALID_ARGUMENT: its content.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);

  // In ascending order.
  std::vector<std::string> names() const;

  // NOT_FOUND lists the names there are. INVALID_ARGUMENT: another dtype than asked for.
  absl::StatusOr<FileTensor> Find(const std::string& name,
                                  Elements elements = Elements::kFloats) const;

 private:
  struct Entry {
    std::string dtype;  // as in the file; may be one we do not read
    FileTensor tensor;
  };
  std::string path_;
  std::map<std::string, Entry> entries_;
};

// A matrix of logits from FILE.npy, FILE.safetensors (one tensor in it) or FILE.safetensors:NAME.
// Shape [rows, vocab]; a 1-D tensor is one row. npy: '<f4' or '<f2' in C order.
absl::StatusOr<FileTensor> LoadMatrix(const std::string& spec);

// A tensor of 1 to 4 dimensions, none empty, from the same files. With `allow_bool` also booleans:
// npy '|b1', safetensors BOOL.
absl::StatusOr<FileTensor> LoadTensor(const std::string& spec, bool allow_bool = false);

// The integers of a 1-D tensor from the same files: npy '<i4' or '<i8', safetensors I32 or I64.
absl::StatusOr<std::vector<int64_t>> LoadIntegers(const std::string& spec);

// Writes FILE.npy (f32, f16) or FILE.safetensors, one tensor called "tensor" in it, in place of
// what is there. INVALID_ARGUMENT as CheckSavable.
absl::Status SaveTensor(const std::string& path, v1::DType dtype, const std::vector<int64_t>& shape,
                        absl::string_view bytes);

// INVALID_ARGUMENT: another ending, or bf16 to npy, which has none.
absl::Status CheckSavable(const std::string& path, v1::DType dtype);

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_TENSOR_FILE_H_

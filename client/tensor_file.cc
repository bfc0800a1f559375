#include "client/tensor_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "formats/lfs_pointer.h"
#include "formats/safetensors.h"

namespace logitd::client {
namespace {

struct Mapping {
  ~Mapping() {
    if (data != nullptr) munmap(data, size);
  }
  void* data = nullptr;
  size_t size = 0;
  absl::string_view bytes() const { return {static_cast<const char*>(data), size}; }
};

absl::Status Bad(const std::string& path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", what));
}

absl::StatusOr<std::shared_ptr<const Mapping>> Map(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return absl::Status(absl::ErrnoToStatusCode(errno), absl::StrCat(path, ": ", strerror(errno)));
  }
  auto mapping = std::make_shared<Mapping>();
  absl::Status status;
  struct stat info;
  if (fstat(fd, &info) != 0) {
    status = Bad(path, strerror(errno));
  } else if (!S_ISREG(info.st_mode)) {
    status = Bad(path, "not a regular file");
  } else if (info.st_size == 0) {
    status = Bad(path, "empty file");
  } else {
    void* data = mmap(nullptr, info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) {
      status = Bad(path, absl::StrCat("cannot be mapped: ", strerror(errno)));
    } else {
      mapping->data = data;
      mapping->size = info.st_size;
      const absl::string_view bytes = mapping->bytes();
      status = formats::CheckNoLfsPointer(path, {bytes.data(), bytes.size()});
    }
  }
  close(fd);
  if (!status.ok()) return status;
  return mapping;
}

// Bytes of a tensor; nothing where that overflows or a dimension is negative.
std::optional<uint64_t> TensorBytes(const std::vector<int64_t>& shape, uint64_t element) {
  uint64_t bytes = element;
  for (int64_t dim : shape) {
    if (dim < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(dim), &bytes)) {
      return std::nullopt;
    }
  }
  return bytes;
}

// What numpy writes before the data: a Python dict literal of three keys. Reads exactly that
// grammar.
class NpyHeaderParser {
 public:
  explicit NpyHeaderParser(absl::string_view text) : text_(text) {}

  // An empty string on success, otherwise what is wrong.
  std::string Parse() {
    if (!Take('{')) return "header is not a dict";
    while (!Take('}')) {
      std::string key;
      if (!String(&key)) return "a header key is not a string";
      if (!Take(':')) return absl::StrFormat("no ':' after header key '%s'", key);
      bool ok = true;
      bool twice = false;
      if (key == "descr") {
        twice = std::exchange(has_descr, true);
        ok = String(&descr);
      } else if (key == "fortran_order") {
        twice = std::exchange(has_order, true);
        ok = Bool(&fortran_order);
      } else if (key == "shape") {
        twice = std::exchange(has_shape, true);
        ok = Tuple(&shape);
      } else {
        return absl::StrFormat("unknown header key '%s'", key);
      }
      if (!ok) return absl::StrFormat("header key '%s' has a value that is not understood", key);
      if (twice) return absl::StrFormat("header key '%s' twice", key);
      if (!Take(',') && Peek() != '}') return "header is not a dict";
    }
    if (Peek() != '\0') return "text after the header's dict";
    if (!has_descr || !has_order || !has_shape) {
      return "header lacks one of 'descr', 'fortran_order', 'shape'";
    }
    return "";
  }

  std::string descr;
  bool fortran_order = false;
  std::vector<int64_t> shape;

 private:
  char Peek() {
    while (!text_.empty() && (text_[0] == ' ' || text_[0] == '\n')) text_.remove_prefix(1);
    return text_.empty() ? '\0' : text_[0];
  }
  bool Take(char c) {
    if (Peek() != c || text_.empty()) return false;
    text_.remove_prefix(1);
    return true;
  }
  bool String(std::string* out) {
    const char quote = Peek();
    if (quote != '\'' && quote != '"') return false;
    const size_t end = text_.find(quote, 1);
    if (end == absl::string_view::npos) return false;
    *out = std::string(text_.substr(1, end - 1));
    text_.remove_prefix(end + 1);
    return true;
  }
  bool Bool(bool* out) {
    Peek();
    if (absl::ConsumePrefix(&text_, "True")) {
      *out = true;
      return true;
    }
    *out = false;
    return absl::ConsumePrefix(&text_, "False");
  }
  bool Tuple(std::vector<int64_t>* out) {
    if (!Take('(')) return false;
    while (!Take(')')) {
      Peek();
      size_t digits = 0;
      while (digits < text_.size() && absl::ascii_isdigit(text_[digits])) ++digits;
      int64_t dim;
      if (!absl::SimpleAtoi(text_.substr(0, digits), &dim)) return false;
      out->push_back(dim);
      text_.remove_prefix(digits);
      if (!Take(',') && Peek() != ')') return false;
    }
    return true;
  }

  absl::string_view text_;
  bool has_descr = false;
  bool has_order = false;
  bool has_shape = false;
};

// An element type that is read here, by its name in a file.
struct ElementType {
  absl::string_view name;
  v1::DType dtype;
  bool boolean;
  int integer_bytes;

  bool In(Elements elements) const {
    if (elements == Elements::kIntegers) return integer_bytes > 0;
    return integer_bytes == 0 && (!boolean || elements == Elements::kFloatsOrBools);
  }
};
constexpr ElementType kNpyTypes[] = {{"<f4", v1::DTYPE_F32, false, 0},
                                     {"<f2", v1::DTYPE_F16, false, 0},
                                     {"|b1", v1::DTYPE_UNSPECIFIED, true, 0},
                                     {"<i4", v1::DTYPE_UNSPECIFIED, false, 4},
                                     {"<i8", v1::DTYPE_UNSPECIFIED, false, 8}};
constexpr ElementType kSafetensorsTypes[] = {
    {"F32", v1::DTYPE_F32, false, 0},         {"F16", v1::DTYPE_F16, false, 0},
    {"BF16", v1::DTYPE_BF16, false, 0},       {"BOOL", v1::DTYPE_UNSPECIFIED, true, 0},
    {"I32", v1::DTYPE_UNSPECIFIED, false, 4}, {"I64", v1::DTYPE_UNSPECIFIED, false, 8}};

// False: not one of those.
bool TypeOf(absl::Span<const ElementType> types, absl::string_view name, Elements elements,
            FileTensor* tensor) {
  for (const ElementType& type : types) {
    if (type.name != name || !type.In(elements)) continue;
    tensor->dtype = type.dtype;
    tensor->boolean = type.boolean;
    tensor->integer_bytes = type.integer_bytes;
    return true;
  }
  return false;
}

// How to turn elements that are not read here into some that are; empty: it is not known.
std::string HowToConvert(absl::string_view type, Elements elements) {
  const bool npy = type.size() > 1 && !absl::ascii_isalpha(static_cast<unsigned char>(type[0]));
  const absl::string_view kind = npy ? type.substr(1, 1) : type.substr(0, 1);
  const bool integer = absl::StrContains("iuIU", kind);
  const bool real = absl::StrContains("fF", kind);
  if (elements == Elements::kIntegers ? !integer : !integer && !real) return "";
  const bool to_integer = elements == Elements::kIntegers;
  if (npy) {
    return absl::StrFormat("; numpy.save(FILE, x.astype(\"<%s\")) converts it",
                           to_integer ? "i8" : "f4");
  }
  return absl::StrFormat("; x.to(torch.%s) or x.astype(numpy.%s) converts it",
                         to_integer ? "int64" : "float32", to_integer ? "int64" : "float32");
}

std::string NamesOf(absl::Span<const ElementType> types, Elements elements) {
  std::vector<absl::string_view> names;
  for (const ElementType& type : types) {
    if (type.In(elements)) names.push_back(type.name);
  }
  return absl::StrJoin(names, ", ");
}

absl::StatusOr<FileTensor> OpenNpy(const std::string& path, Elements elements) {
  absl::StatusOr<std::shared_ptr<const Mapping>> mapping = Map(path);
  if (!mapping.ok()) return mapping.status();
  const absl::string_view file = (*mapping)->bytes();
  if (file.size() < 10 || !absl::StartsWith(file, "\x93NUMPY")) {
    return Bad(path, "not an npy file: no \\x93NUMPY at its start");
  }
  auto byte = [&](size_t i) { return static_cast<uint64_t>(static_cast<uint8_t>(file[i])); };
  const int major = static_cast<int>(byte(6));
  if (major < 1 || major > 3) {
    return Bad(path, absl::StrFormat("npy version %d; allowed: 1, 2, 3", major));
  }
  const size_t start = major == 1 ? 10 : 12;
  if (file.size() < start) return Bad(path, "ends inside the npy header length");
  uint64_t length = byte(8) | byte(9) << 8;
  if (major > 1) length |= byte(10) << 16 | byte(11) << 24;
  if (length > file.size() - start) {
    return Bad(path,
               absl::StrFormat("npy header of %d bytes in a file of %d", length, file.size()));
  }
  NpyHeaderParser header(file.substr(start, length));
  if (std::string fault = header.Parse(); !fault.empty()) return Bad(path, fault);

  FileTensor tensor;
  if (!TypeOf(kNpyTypes, header.descr, elements, &tensor)) {
    return Bad(path, absl::StrFormat("dtype '%s'; allowed: %s", header.descr,
                                     NamesOf(kNpyTypes, elements)) +
                         (elements == Elements::kIntegers
                              ? " (little-endian)"
                              : " (little-endian); bfloat16 goes into a .safetensors file") +
                         HowToConvert(header.descr, elements));
  }
  if (header.fortran_order) {
    return Bad(path, "Fortran order; allowed: C order (save numpy.ascontiguousarray(x))");
  }
  tensor.shape = std::move(header.shape);
  tensor.bytes = file.substr(start + length);
  const uint64_t element = tensor.boolean             ? 1
                           : tensor.integer_bytes > 0 ? tensor.integer_bytes
                                                      : DTypeSize(tensor.dtype);
  const std::optional<uint64_t> need = TensorBytes(tensor.shape, element);
  if (!need.has_value() || *need != tensor.bytes.size()) {
    return Bad(
        path, absl::StrFormat("shape %s of %s disagrees with the %d data bytes in the file",
                              formats::ShapeName(tensor.shape), header.descr, tensor.bytes.size()));
  }
  tensor.mapping = *mapping;
  return tensor;
}

}  // namespace

int64_t DTypeSize(v1::DType dtype) { return dtype == v1::DTYPE_F32 ? 4 : 2; }

absl::string_view DTypeShortName(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_F32:
      return "f32";
    case v1::DTYPE_F16:
      return "f16";
    case v1::DTYPE_BF16:
      return "bf16";
    default:
      return "unspecified";
  }
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  absl::StatusOr<std::shared_ptr<const Mapping>> mapping = Map(path);
  if (!mapping.ok()) return mapping.status();
  const absl::string_view bytes = (*mapping)->bytes();
  const std::string_view file(bytes.data(), bytes.size());
  const absl::StatusOr<int64_t> length = formats::SafetensorsHeaderBytes(
      path, file.substr(0, formats::kSafetensorsPrefix), static_cast<int64_t>(file.size()));
  if (!length.ok()) return length.status();
  const size_t data = formats::kSafetensorsPrefix + static_cast<size_t>(*length);
  absl::StatusOr<formats::SafetensorsHeader> header = formats::ParseSafetensorsHeader(
      path, file.substr(formats::kSafetensorsPrefix, static_cast<size_t>(*length)),
      static_cast<int64_t>(file.size() - data));
  if (!header.ok()) return header.status();

  SafetensorsFile out;
  out.path_ = path;
  for (auto& [name, tensor] : header->tensors) {
    out.entries_[name] = {.dtype = tensor.dtype,
                          .tensor = {.shape = std::move(tensor.shape),
                                     .bytes = bytes.substr(data + static_cast<size_t>(tensor.begin),
                                                           static_cast<size_t>(tensor.bytes)),
                                     .mapping = *mapping}};
  }
  return out;
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  names.reserve(entries_.size());
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

absl::StatusOr<FileTensor> SafetensorsFile::Find(const std::string& name, Elements elements) const {
  const auto it = entries_.find(name);
  if (it == entries_.end()) {
    return absl::NotFoundError(absl::StrFormat("%s: no tensor '%s'; there are: %s", path_, name,
                                               absl::StrJoin(names(), ", ")));
  }
  FileTensor tensor = it->second.tensor;
  if (!TypeOf(kSafetensorsTypes, it->second.dtype, elements, &tensor)) {
    return Bad(path_, absl::StrFormat("tensor '%s' has dtype %s; allowed: %s%s", name,
                                      it->second.dtype, NamesOf(kSafetensorsTypes, elements),
                                      HowToConvert(it->second.dtype, elements)));
  }
  return tensor;
}

namespace {

absl::StatusOr<FileTensor> Open(const std::string& spec, Elements elements) {
  constexpr absl::string_view kSafetensors = ".safetensors";
  absl::StatusOr<FileTensor> tensor = absl::InvalidArgumentError(
      absl::StrFormat("\"%s\": allowed: FILE.npy, FILE.safetensors, FILE.safetensors:NAME", spec));
  const size_t split = spec.rfind(absl::StrCat(kSafetensors, ":"));
  if (absl::EndsWith(spec, ".npy")) {
    tensor = OpenNpy(spec, elements);
  } else if (absl::EndsWith(spec, kSafetensors) || split != std::string::npos) {
    std::string name;
    std::string path = spec;
    if (split != std::string::npos) {
      path = spec.substr(0, split + kSafetensors.size());
      name = spec.substr(path.size() + 1);
    }
    absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path);
    if (!file.ok()) return file.status();
    if (split == std::string::npos) {
      const std::vector<std::string> names = file->names();
      if (names.size() != 1) {
        return Bad(path,
                   absl::StrFormat("%d tensors in the file; name one, e.g. %s:%s. There are: %s",
                                   names.size(), path, names[0], absl::StrJoin(names, ", ")));
      }
      name = names[0];
    }
    tensor = file->Find(name, elements);
  }
  return tensor;
}

}  // namespace

absl::StatusOr<FileTensor> LoadMatrix(const std::string& spec) {
  absl::StatusOr<FileTensor> tensor = Open(spec, Elements::kFloats);
  if (!tensor.ok()) return tensor;
  if (tensor->shape.size() == 1) tensor->shape.insert(tensor->shape.begin(), 1);
  if (tensor->shape.size() != 2 || tensor->shape[0] == 0 || tensor->shape[1] == 0) {
    return Bad(spec, absl::StrFormat("shape %s; allowed: [rows,vocab] or [vocab], nothing empty",
                                     formats::ShapeName(tensor->shape)));
  }
  return tensor;
}

absl::StatusOr<FileTensor> LoadTensor(const std::string& spec, bool allow_bool) {
  absl::StatusOr<FileTensor> tensor =
      Open(spec, allow_bool ? Elements::kFloatsOrBools : Elements::kFloats);
  if (!tensor.ok()) return tensor;
  const std::vector<int64_t>& shape = tensor->shape;
  if (shape.empty() || shape.size() > 4 || std::count(shape.begin(), shape.end(), 0) > 0) {
    return Bad(spec, absl::StrFormat("shape %s; allowed: 1 to 4 dimensions, none empty",
                                     formats::ShapeName(shape)));
  }
  return tensor;
}

absl::StatusOr<std::vector<int64_t>> LoadIntegers(const std::string& spec) {
  const absl::StatusOr<FileTensor> tensor = Open(spec, Elements::kIntegers);
  if (!tensor.ok()) return tensor.status();
  if (tensor->shape.size() != 1) {
    return Bad(spec, absl::StrFormat("shape %s; allowed: one dimension",
                                     formats::ShapeName(tensor->shape)));
  }
  std::vector<int64_t> values(static_cast<size_t>(tensor->shape[0]));
  for (size_t i = 0; i < values.size(); ++i) {
    const char* at = tensor->bytes.data() + i * static_cast<size_t>(tensor->integer_bytes);
    if (tensor->integer_bytes == 8) {
      std::memcpy(&values[i], at, 8);
    } else {
      int32_t value = 0;
      std::memcpy(&value, at, 4);
      values[i] = value;
    }
  }
  return values;
}

absl::Status CheckSavable(const std::string& path, v1::DType dtype) {
  if (absl::EndsWith(path, ".safetensors")) return absl::OkStatus();
  if (!absl::EndsWith(path, ".npy")) {
    return absl::InvalidArgumentError(
        absl::StrFormat("\"%s\": allowed: FILE.npy, FILE.safetensors", path));
  }
  if (dtype == v1::DTYPE_BF16) {
    return Bad(path, "npy files have no bfloat16; allowed: FILE.safetensors, or another dtype");
  }
  return absl::OkStatus();
}

absl::Status SaveTensor(const std::string& path, v1::DType dtype, const std::vector<int64_t>& shape,
                        absl::string_view bytes) {
  if (absl::Status status = CheckSavable(path, dtype); !status.ok()) return status;
  std::string head;
  if (absl::EndsWith(path, ".npy")) {
    std::string header =
        absl::StrFormat("{'descr': '%s', 'fortran_order': False, 'shape': (%s,), }",
                        dtype == v1::DTYPE_F32 ? "<f4" : "<f2", absl::StrJoin(shape, ", "));
    constexpr size_t kPrefix = 10;
    constexpr size_t kBorder = 64;  // the data starts on one
    header.append(kBorder - 1 - (kPrefix + header.size()) % kBorder, ' ');
    header += '\n';
    head = absl::StrCat(absl::string_view("\x93NUMPY\x01\0", 8),
                        std::string(1, static_cast<char>(header.size() & 0xff)),
                        std::string(1, static_cast<char>(header.size() >> 8)), header);
  } else {
    const char* name = dtype == v1::DTYPE_F32 ? "F32" : dtype == v1::DTYPE_F16 ? "F16" : "BF16";
    std::string header =
        nlohmann::json(
            {{"tensor",
              {{"dtype", name}, {"shape", shape}, {"data_offsets", {size_t{0}, bytes.size()}}}}})
            .dump();
    header.append((8 - header.size() % 8) % 8, ' ');
    for (int i = 0; i < 8; ++i) head += static_cast<char>(header.size() >> 8 * i & 0xff);
    head += header;
  }
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(head.data(), static_cast<std::streamsize>(head.size()));
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  out.close();
  if (!out)
    return absl::Status(absl::ErrnoToStatusCode(errno), absl::StrCat(path, ": ", strerror(errno)));
  return absl::OkStatus();
}

}  // namespace logitd::client

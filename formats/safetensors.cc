#include "formats/safetensors.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace logitd::formats {
namespace {

constexpr size_t kMaxShown = 100;  // characters of a name or number in an error text
constexpr char kMetadata[] = "__metadata__";

struct DTypeRow {
  std::string_view name;
  uint64_t bits;
};
constexpr DTypeRow kDTypes[] = {
    {"F32", 32},    {"F16", 16},    {"BF16", 16}, {"F64", 64},    {"I64", 64},
    {"I32", 32},    {"I16", 16},    {"I8", 8},    {"U64", 64},    {"U32", 32},
    {"U16", 16},    {"U8", 8},      {"BOOL", 8},  {"C64", 64},    {"F8_E4M3", 8},
    {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F4", 4},    {"F6_E2M3", 6}, {"F6_E3M2", 6},
};

absl::Status Bad(std::string_view path, std::string_view what) {
  return absl::InvalidArgumentError(absl::StrFormat("%s: %s", path, what));
}

// Bytes of a tensor; nothing where they overflow or are not whole.
std::optional<uint64_t> TensorBytes(const std::vector<int64_t>& shape, uint64_t element_bits) {
  uint64_t bits = element_bits;
  for (int64_t dim : shape) {
    if (__builtin_mul_overflow(bits, static_cast<uint64_t>(dim), &bits)) return std::nullopt;
  }
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

// Takes the header's JSON piece by piece and stops at the first piece that the format does not
// allow. It builds no tree, so that a hostile header costs no more memory than its own size.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(int64_t data_bytes) : data_bytes_(data_bytes) {}

  const std::string& fault() const { return fault_; }  // empty: none
  SafetensorsHeader& header() { return header_; }

  bool null() override { return Other(); }
  bool boolean(bool) override { return Other(); }
  bool number_integer(int64_t value) override { return Number(absl::StrCat(value), std::nullopt); }
  bool number_unsigned(uint64_t value) override {
    return Number(absl::StrCat(value),
                  value >> 63 == 0 ? std::optional<int64_t>(value) : std::nullopt);
  }
  bool number_float(double, const std::string& text) override {
    return Number(text.substr(0, kMaxShown), std::nullopt);
  }
  bool binary(nlohmann::json::binary_t&) override { return Other(); }

  bool string(std::string& value) override {
    if (place_ == kInMetadata) {
      header_.metadata[key_] = std::move(value);
      return true;
    }
    if (place_ == kInTensor && key_ == "dtype") {
      tensor_.dtype = std::move(value);
      has_dtype_ = true;
      return true;
    }
    return Other();
  }

  bool start_object(size_t) override {
    if (place_ == kOutside) {
      place_ = kInHeader;
      return true;
    }
    if (place_ != kInHeader) return Other();
    if (name_ == kMetadata) {
      place_ = kInMetadata;
      return true;
    }
    place_ = kInTensor;
    tensor_ = {};
    offsets_.clear();
    offsets_text_.clear();
    has_dtype_ = has_shape_ = has_offsets_ = false;
    return true;
  }

  bool key(std::string& key) override {
    if (place_ == kInHeader) {
      name_ = std::move(key);
      const bool twice =
          name_ == kMetadata ? std::exchange(has_metadata_, true) : header_.tensors.contains(name_);
      return twice ? Fail("there twice") : true;
    }
    key_ = std::move(key);
    if (place_ == kInMetadata) {
      return header_.metadata.contains(key_) ? Fail(absl::StrCat("key ", Shown(key_), " twice"))
                                             : true;
    }
    const bool twice = (key_ == "dtype" && has_dtype_) || (key_ == "shape" && has_shape_) ||
                       (key_ == "data_offsets" && has_offsets_);
    if (twice) return Fail(absl::StrCat(key_, " twice"));
    if (key_ == "dtype" || key_ == "shape" || key_ == "data_offsets") return true;
    return Fail(absl::StrFormat("key: got %s, allowed dtype, shape, data_offsets", Shown(key_)));
  }

  bool end_object() override {
    if (place_ == kInHeader) {
      place_ = kOutside;
      return true;
    }
    if (place_ == kInTensor && !EndTensor()) return false;
    place_ = kInHeader;
    return true;
  }

  bool start_array(size_t) override {
    if (place_ != kInTensor) return Other();
    if (key_ == "shape") {
      place_ = kInShape;
      has_shape_ = true;
      return true;
    }
    if (key_ == "data_offsets") {
      place_ = kInOffsets;
      has_offsets_ = true;
      return true;
    }
    return Other();
  }

  bool end_array() override {
    if (place_ == kInOffsets && offsets_.size() != 2) return Other();
    place_ = kInTensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    fault_ = absl::StrFormat("header is not a JSON object, at its byte %d", position);
    return false;
  }

 private:
  enum Place { kOutside, kInHeader, kInMetadata, kInTensor, kInShape, kInOffsets };

  bool Fail(std::string_view what) {
    fault_ = name_ == kMetadata ? absl::StrFormat("'%s': %s", name_, what)
                                : absl::StrFormat("tensor %s: %s", Shown(name_), what);
    return false;
  }

  // Refuses a value that does not belong where it is.
  bool Other() {
    switch (place_) {
      case kOutside:
        fault_ = "header is not a JSON object";
        return false;
      case kInHeader:
        return Fail("not a JSON object");
      case kInMetadata:
        return Fail(absl::StrCat("the value of ", Shown(key_), " is not a string"));
      case kInShape:
        return Fail("a dimension of shape is not a size");
      case kInOffsets:
        return Fail("no data_offsets [begin, end]");
      case kInTensor:
        break;
    }
    return Fail(key_ == "data_offsets" ? "no data_offsets [begin, end]"
                                       : absl::StrCat("no ", key_));
  }

  // `size`: the value where it is a whole number >= 0.
  bool Number(const std::string& text, std::optional<int64_t> size) {
    if (place_ == kInShape && size.has_value()) {
      tensor_.shape.push_back(*size);
      return true;
    }
    if (place_ == kInOffsets && offsets_.size() < 2) {
      offsets_.push_back(size.value_or(-1));
      absl::StrAppend(&offsets_text_, offsets_text_.empty() ? "" : ",", text);
      return true;
    }
    return Other();
  }

  bool EndTensor() {
    for (const auto& [key, has] :
         {std::pair{"dtype", has_dtype_}, {"shape", has_shape_}, {"data_offsets", has_offsets_}}) {
      if (!has) return Fail(absl::StrCat("no ", key));
    }
    const int64_t begin = offsets_[0];
    const int64_t end = offsets_[1];
    if (begin < 0 || end < begin || end > data_bytes_) {
      return Fail(absl::StrFormat("data_offsets: got [%s], allowed inside the file's %d data bytes",
                                  offsets_text_, data_bytes_));
    }
    tensor_.begin = begin;
    tensor_.bytes = end - begin;
    const auto* row = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                   [&](const DTypeRow& r) { return r.name == tensor_.dtype; });
    if (row != std::end(kDTypes)) {
      const std::optional<uint64_t> need = TensorBytes(tensor_.shape, row->bits);
      if (need != static_cast<uint64_t>(tensor_.bytes)) {
        return Fail(absl::StrFormat("shape: got %s of %s, allowed one with its %d data bytes",
                                    ShapeName(tensor_.shape), tensor_.dtype, tensor_.bytes));
      }
    }
    header_.tensors.emplace(std::move(name_), std::move(tensor_));
    return true;
  }

  const int64_t data_bytes_;
  SafetensorsHeader header_;
  std::string fault_;
  Place place_ = kOutside;
  std::string name_;  // of the tensor being read
  std::string key_;   // its member being read
  SafetensorsTensor tensor_;
  std::vector<int64_t> offsets_;  // -1: not a size
  std::string offsets_text_;
  bool has_metadata_ = false;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
};

// OK where the tensors fill the data, one after the other, without a gap.
absl::Status CheckFilled(std::string_view path, const SafetensorsHeader& header,
                         int64_t data_bytes) {
  using Entry = std::pair<const std::string, SafetensorsTensor>;
  std::vector<const Entry*> order;
  order.reserve(header.tensors.size());
  for (const Entry& entry : header.tensors) order.push_back(&entry);
  std::sort(order.begin(), order.end(), [](const Entry* a, const Entry* b) {
    return std::pair(a->second.begin, a->second.bytes) <
           std::pair(b->second.begin, b->second.bytes);
  });
  int64_t filled = 0;
  const Entry* before = nullptr;
  for (const Entry* entry : order) {
    const int64_t begin = entry->second.begin;
    if (begin != filled) {
      return Bad(path,
                 absl::StrFormat("tensor %s: data_offsets: got begin %d, %s, allowed %d, where %s",
                                 Shown(entry->first), begin,
                                 begin < filled ? "inside another tensor" : "after a gap", filled,
                                 before == nullptr
                                     ? "the data start"
                                     : absl::StrCat("tensor ", Shown(before->first), " ends")));
    }
    filled = begin + entry->second.bytes;
    before = entry;
  }
  if (filled != data_bytes) {
    return Bad(path,
               absl::StrFormat("end of the tensors: got %d, allowed %d, the file's data bytes",
                               filled, data_bytes));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<int64_t> SafetensorsHeaderBytes(std::string_view path, std::string_view first_bytes,
                                               int64_t file_bytes, int64_t most) {
  if (first_bytes.size() < kSafetensorsPrefix || file_bytes < kSafetensorsPrefix) {
    return Bad(path, "shorter than the 8 bytes of a safetensors header length");
  }
  uint64_t length = 0;
  for (int i = kSafetensorsPrefix - 1; i >= 0; --i) {
    length = length << 8 | static_cast<uint8_t>(first_bytes[i]);
  }
  if (length > static_cast<uint64_t>(file_bytes - kSafetensorsPrefix)) {
    return Bad(path,
               absl::StrFormat("header length: got %d, allowed 0..%d, as the file has %d bytes",
                               length, file_bytes - kSafetensorsPrefix, file_bytes));
  }
  if (length > static_cast<uint64_t>(most)) {
    return Bad(path, absl::StrFormat("header length: got %d, allowed 0..%d", length, most));
  }
  return static_cast<int64_t>(length);
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view path,
                                                         std::string_view text,
                                                         int64_t data_bytes) {
  HeaderReader reader(data_bytes);
  // The parser takes a NUL as the end of the text.
  if (const size_t nul = text.find('\0'); nul != text.npos) {
    return Bad(path, absl::StrFormat("header is not a JSON object, at its byte %d", nul + 1));
  }
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &reader)) {
    return Bad(path, reader.fault());
  }
  if (reader.header().tensors.empty()) return Bad(path, "no tensor in the file");
  if (absl::Status status = CheckFilled(path, reader.header(), data_bytes); !status.ok()) {
    return status;
  }
  return std::move(reader.header());
}

std::string ShapeName(const std::vector<int64_t>& shape) {
  constexpr size_t kMaxDims = 16;  // shown
  if (shape.size() > kMaxDims) {
    return absl::StrFormat("[%s,... of %d]",
                           absl::StrJoin(shape.begin(), shape.begin() + kMaxDims, ","),
                           shape.size());
  }
  return absl::StrFormat("[%s]", absl::StrJoin(shape, ","));
}

std::string Shown(std::string_view name) {
  const bool cut = name.size() > kMaxShown;
  if (cut) name = name.substr(0, kMaxShown);
  return absl::StrFormat("'%s'%s", absl::CHexEscape({name.data(), name.size()}), cut ? "..." : "");
}

}  // namespace logitd::formats

#include "server/engine/head_source.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <limits>
#include <map>
#include <string_view>
#include <utility>
#include <variant>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "formats/json_fields.h"
#include "formats/safetensors.h"
#include "kernels/status_macros.h"

namespace logitd::engine {
namespace {

constexpr int64_t kMaxConfigBytes = int64_t{1} << 20;
constexpr int64_t kMaxIndexBytes = int64_t{16} << 20;
// 100 bytes a tensor, and no model's file comes near. What parses it cannot be cancelled: about a
// second at this size.
constexpr int64_t kMaxHeaderBytes = int64_t{16} << 20;

constexpr size_t kMaxTensorName = 128;  // that a file itself gives

// Prefixes of what models call their parts; multimodal ones nest their language model.
constexpr const char* kHeadPrefixes[] = {"lm_head.", "language_model.lm_head.",
                                         "model.language_model.lm_head."};
constexpr const char* kModelPrefixes[] = {"model.", "language_model.model.",
                                          "model.language_model."};

constexpr std::string_view kHeadTensors[] = {"weight", "bias"};
constexpr std::string_view kModelTensors[] = {"embed_tokens.weight", "norm.weight", "norm.bias"};

constexpr char kWeightMap[] = "weight_map";  // of an index
constexpr char kInnerModel[] = "text_config";
constexpr std::string_view kSettings[] = {
    "vocab_size",         "tie_word_embeddings", "logit_scale",
    "lm_head_multiplier", "logits_scaling",      "final_logit_softcapping",
    "rms_norm_eps",       "dim_model_base",      "model_type"};

// By which models are known to change their logits in ways that the others of kSettings do not
// tell: Phi-3-small, Cerebras' and Jais, Grok, RecurrentGemma, xLSTM.
constexpr const char* kOtherScales[] = {"mup_width_multiplier", "mup_output_alpha",
                                        "output_multiplier_scale", "logits_soft_cap",
                                        "output_logit_soft_cap"};

// Models whose final RMSNorm is named as others' but multiplies by 1 + weight; those of like names
// that do not; and how the names of their families begin or go on.
constexpr std::string_view kOnePlusWeight[] = {"gemma",        "gemma2",      "gemma3",
                                               "gemma3_text",  "qwen3_next",  "qwen3_5",
                                               "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"};
constexpr std::string_view kPlainGemmas[] = {"gemma3n", "gemma3n_text"};
constexpr std::string_view kDoubtful[] = {"gemma", "qwen3_next", "qwen3_5"};

template <typename Names>
bool Contains(const Names& names, std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

// Of all that a folder's index may name.
bool IsOfInterest(std::string_view tensor) {
  const auto one_of = [tensor](const auto& prefixes, const auto& rests) {
    return std::any_of(std::begin(prefixes), std::end(prefixes), [&](std::string_view prefix) {
      return tensor.starts_with(prefix) && Contains(rests, tensor.substr(prefix.size()));
    });
  };
  return one_of(kHeadPrefixes, kHeadTensors) || one_of(kModelPrefixes, kModelTensors);
}

bool OneLine(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return absl::ascii_isprint(static_cast<unsigned char>(c)); });
}

absl::Status Bad(std::string_view path, std::string_view what) {
  return absl::InvalidArgumentError(absl::StrFormat("%s: %s", path, what));
}

absl::Status FileError(const std::string& path, int error) {
  const std::string text = absl::StrCat(path, ": ", strerror(error));
  if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(text);
  if (error == EACCES || error == EPERM) return absl::PermissionDeniedError(text);
  if (error == ENAMETOOLONG || error == ELOOP) return absl::InvalidArgumentError(text);
  return absl::UnavailableError(text);
}

bool IsIn(const std::filesystem::path& path, const std::filesystem::path& root) {
  return std::mismatch(root.begin(), root.end(), path.begin(), path.end()).first == root.end();
}

absl::Status Outside(const std::string& path) {
  constexpr size_t kMaxShown = 1024;
  return absl::PermissionDeniedError(
      absl::StrFormat("path: got \"%s\", allowed: what is in the server's --head-root, links and "
                      "what they point to included",
                      path.substr(0, kMaxShown)));
}

// Where `path` is, without links in it if there is a root.
absl::StatusOr<std::string> Locate(const std::string& root, const std::string& path) {
  if (root.empty()) return path;
  LOGITD_RETURN_IF_ERROR(CheckInRoot(root, path));
  std::error_code error;
  const std::filesystem::path real =
      std::filesystem::canonical(std::filesystem::path(root) / path, error);
  if (error) return FileError(path, error.value());
  if (!IsIn(real, root)) return Outside(path);
  return real.string();
}

absl::StatusOr<bool> IsThere(const std::string& root, const std::string& path) {
  const absl::StatusOr<std::string> located = Locate(root, path);
  if (absl::IsNotFound(located.status())) return false;
  if (!located.ok()) return located.status();
  std::error_code ignored;
  return std::filesystem::exists(*located, ignored);
}

absl::StatusOr<std::string> ReadAll(const std::string& root, const std::string& path,
                                    int64_t most) {
  absl::StatusOr<std::shared_ptr<const DataFile>> file = DataFile::Open(root, path);
  if (!file.ok()) return file.status();
  if ((*file)->bytes() > most) {
    return Bad(path, absl::StrFormat("%d bytes; allowed: to %d", (*file)->bytes(), most));
  }
  std::string text(static_cast<size_t>((*file)->bytes()), '\0');
  LOGITD_RETURN_IF_ERROR((*file)->Read(0, text.size(), text.data()));
  return text;
}

// A file and the tensors in it.
struct OpenFile {
  std::shared_ptr<const DataFile> file;
  formats::SafetensorsHeader header;
  int64_t data = 0;  // where it begins
};

absl::StatusOr<OpenFile> OpenSafetensors(const std::string& root, const std::string& path) {
  absl::StatusOr<std::shared_ptr<const DataFile>> file = DataFile::Open(root, path);
  if (!file.ok()) return file.status();
  const int64_t bytes = (*file)->bytes();
  char prefix[formats::kSafetensorsPrefix];
  const size_t there = static_cast<size_t>(std::min<int64_t>(bytes, sizeof(prefix)));
  LOGITD_RETURN_IF_ERROR((*file)->Read(0, there, prefix));
  const absl::StatusOr<int64_t> length = formats::SafetensorsHeaderBytes(
      path, std::string_view(prefix, there), bytes, kMaxHeaderBytes);
  if (!length.ok()) return length.status();
  std::string text(static_cast<size_t>(*length), '\0');
  LOGITD_RETURN_IF_ERROR((*file)->Read(formats::kSafetensorsPrefix, text.size(), text.data()));
  const int64_t data = formats::kSafetensorsPrefix + *length;
  absl::StatusOr<formats::SafetensorsHeader> header =
      formats::ParseSafetensorsHeader(path, text, bytes - data);
  if (!header.ok()) return header.status();
  return OpenFile{.file = *std::move(file), .header = *std::move(header), .data = data};
}

// The tensors of a head's file, or of all files of its folder.
class Tensors {
 public:
  static absl::StatusOr<Tensors> OfFile(const std::string& root, const std::string& path) {
    absl::StatusOr<OpenFile> file = OpenSafetensors(root, path);
    if (!file.ok()) return file.status();
    Tensors out(root, path);
    for (const auto& [name, tensor] : file->header.tensors) out.file_of_[name] = path;
    out.open_.emplace(path, *std::move(file));
    return out;
  }

  // "model.safetensors", or the files that "model.safetensors.index.json" names.
  static absl::StatusOr<Tensors> OfFolder(const std::string& root, const std::string& folder) {
    const std::string single = absl::StrCat(folder, "/model.safetensors");
    const std::string index = absl::StrCat(folder, "/model.safetensors.index.json");
    absl::StatusOr<bool> there = IsThere(root, single);
    if (!there.ok()) return there.status();
    if (*there) return OfFile(root, single);
    there = IsThere(root, index);
    if (!there.ok()) return there.status();
    if (!*there) {
      return absl::NotFoundError(absl::StrFormat(
          "%s: neither model.safetensors nor model.safetensors.index.json in the folder", folder));
    }
    const absl::StatusOr<std::string> text = ReadAll(root, index, kMaxIndexBytes);
    if (!text.ok()) return text.status();
    const auto fields =
        formats::ReadJsonFields(index, *text, [](std::string_view object, std::string_view key) {
          return object.empty() ? key == kWeightMap : object == kWeightMap && IsOfInterest(key);
        });
    if (!fields.ok()) return fields.status();
    const auto map = fields->find({"", kWeightMap});
    if (map == fields->end() || map->second != formats::JsonValue(formats::JsonParts{true})) {
      return Bad(index, "no \"weight_map\" of tensors to files");
    }
    Tensors out(root, index);
    for (const auto& [key, value] : *fields) {
      const auto* file = std::get_if<std::string>(&value);
      if (key.first.empty() || file == nullptr) continue;
      if (file->empty() || file->size() > NAME_MAX || (*file)[0] == '.' ||
          absl::StrContains(*file, '/') || !OneLine(*file)) {
        return Bad(index, absl::StrFormat("tensor %s is in %s; allowed: the name of a file in the "
                                          "folder",
                                          formats::Shown(key.second), formats::Shown(*file)));
      }
      out.file_of_[key.second] = absl::StrCat(folder, "/", *file);
    }
    return out;
  }

  bool Has(const std::string& name) const { return file_of_.contains(name); }

  // The first of the names that is there, or "".
  template <typename Prefixes>
  std::string FirstOf(const Prefixes& prefixes, std::string_view rest) const {
    for (const char* prefix : prefixes) {
      if (std::string name = absl::StrCat(prefix, std::string(rest)); Has(name)) return name;
    }
    return "";
  }

  // Of a single file: the names of its tensors of 2 dimensions.
  std::vector<std::string> Matrices() const {
    std::vector<std::string> names;
    for (const auto& [path, file] : open_) {
      for (const auto& [name, tensor] : file.header.tensors) {
        if (tensor.shape.size() == 2) names.push_back(name);
      }
    }
    return names;
  }

  const formats::SafetensorsHeader& header() const { return open_.begin()->second.header; }

  // `shape`: what it must be; -1: 1 or more.
  absl::StatusOr<StoredTensor> Get(const std::string& name, const std::vector<int64_t>& want) {
    const std::string& path = file_of_.find(name)->second;
    auto it = open_.find(path);
    if (it == open_.end()) {
      absl::StatusOr<OpenFile> file = OpenSafetensors(root_, path);
      if (!file.ok()) {
        return absl::Status(file.status().code(),
                            absl::StrFormat("%s (where tensor %s is, by %s)",
                                            file.status().message(), formats::Shown(name), where_));
      }
      it = open_.emplace(path, *std::move(file)).first;
    }
    const auto found = it->second.header.tensors.find(name);
    if (found == it->second.header.tensors.end()) {
      return Bad(
          path, absl::StrFormat("no tensor %s, which is here by %s", formats::Shown(name), where_));
    }
    const formats::SafetensorsTensor& tensor = found->second;
    StoredTensor out{.name = name,
                     .file = it->second.file,
                     .offset = it->second.data + tensor.begin,
                     .shape = tensor.shape};
    if (tensor.dtype == "F32") {
      out.dtype = DType::kF32;
    } else if (tensor.dtype == "F16") {
      out.dtype = DType::kF16;
    } else if (tensor.dtype == "BF16") {
      out.dtype = DType::kBF16;
    } else {
      return Bad(path, absl::StrFormat("tensor %s has dtype %s; allowed: F32, F16, BF16",
                                       formats::Shown(name), formats::Shown(tensor.dtype)));
    }
    bool fits = tensor.shape.size() == want.size();
    for (size_t i = 0; fits && i < want.size(); ++i) {
      fits = want[i] == -1 ? tensor.shape[i] > 0 : tensor.shape[i] == want[i];
    }
    if (!fits) {
      return Bad(
          path,
          absl::StrFormat(
              "tensor %s has shape %s; allowed: %s%s", formats::Shown(name),
              formats::ShapeName(tensor.shape), formats::ShapeName(want),
              std::count(want.begin(), want.end(), -1) > 0 ? ", -1 being any size above 0" : ""));
    }
    return out;
  }

 private:
  Tensors(std::string root, std::string where) : root_(std::move(root)), where_(std::move(where)) {}

  std::string root_;
  std::string where_;  // that says which tensors there are
  std::map<std::string, std::string, std::less<>> file_of_;
  std::map<std::string, OpenFile> open_;
};

// What a model says of its head. Remembers the first error.
class Settings {
 public:
  static absl::StatusOr<Settings> OfFolder(const std::string& root, const std::string& folder) {
    const std::string path = absl::StrCat(folder, "/config.json");
    const absl::StatusOr<std::string> text = ReadAll(root, path, kMaxConfigBytes);
    if (!text.ok()) return text.status();
    absl::StatusOr<formats::JsonFields> fields =
        formats::ReadJsonFields(path, *text, [](std::string_view object, std::string_view key) {
          return (object.empty() || object == kInnerModel) &&
                 (Contains(kSettings, key) || Contains(kOtherScales, key));
        });
    if (!fields.ok()) return fields.status();
    return Settings(path, *std::move(fields));
  }

  // Metadata are strings; those that read as a number or a boolean are one.
  static Settings OfMetadata(const std::string& path, const formats::SafetensorsHeader& header) {
    formats::JsonFields fields;
    for (const auto& [key, text] : header.metadata) {
      formats::JsonValue& value = fields[{"", key}];
      int64_t integer;
      double number;
      if (text == "true" || text == "false") {
        value = text == "true";
      } else if (absl::SimpleAtoi(text, &integer)) {
        value = integer;
      } else if (absl::SimpleAtod(text, &number)) {
        value = number;
      } else {
        value = text;
      }
    }
    return Settings(path, std::move(fields));
  }

  const absl::Status& status() const { return status_; }
  const std::string& where() const { return where_; }

  std::optional<double> Number(const char* key) {
    const formats::JsonValue* value = Find(key);
    if (value == nullptr) return std::nullopt;
    if (const auto* number = std::get_if<double>(value)) return *number;
    if (const auto* integer = std::get_if<int64_t>(value)) return static_cast<double>(*integer);
    return Fail(key, *value, "a number"), std::nullopt;
  }

  std::optional<int64_t> Size(const char* key) {
    const formats::JsonValue* value = Find(key);
    if (value == nullptr) return std::nullopt;
    const auto* size = std::get_if<int64_t>(value);
    if (size != nullptr && *size >= 1) return *size;
    return Fail(key, *value, "an integer of 1 or more"), std::nullopt;
  }

  void RefuseAny(const char* key) {
    if (const formats::JsonValue* value = Find(key); value != nullptr) Fail(key, *value, "none");
  }

  std::string Text(const char* key) {
    const formats::JsonValue* value = Find(key);
    const auto* text = value != nullptr ? std::get_if<std::string>(value) : nullptr;
    return text != nullptr ? *text : "";
  }

  // True where it is said, and said to be false wherever it is.
  bool Denied(const char* key) {
    int said = 0;
    for (const char* object : kPlaces) {
      const auto it = fields_.find({object, key});
      const auto* truth = it != fields_.end() ? std::get_if<bool>(&it->second) : nullptr;
      if (truth == nullptr) continue;
      if (*truth) return false;
      ++said;
    }
    return said > 0;
  }

 private:
  // The inner model's own settings before those of the whole.
  static constexpr const char* kPlaces[] = {kInnerModel, ""};

  Settings(std::string where, formats::JsonFields fields)
      : where_(std::move(where)), fields_(std::move(fields)) {}

  const formats::JsonValue* Find(const char* key) const {
    for (const char* object : kPlaces) {
      const auto it = fields_.find({object, key});
      if (it != fields_.end() && !std::holds_alternative<std::monostate>(it->second)) {
        return &it->second;
      }
    }
    return nullptr;
  }

  void Fail(const char* key, const formats::JsonValue& value, const char* allowed) {
    if (!status_.ok()) return;
    status_ = Bad(
        where_, absl::StrFormat("%s is %s; allowed: %s", key, formats::ShownValue(value), allowed));
  }

  std::string where_;
  formats::JsonFields fields_;
  absl::Status status_;
};

// NaN and infinities stay: CheckHead refuses them.
absl::Status ToFloat(const std::string& where, const char* what, double value, float* to) {
  constexpr float kLeast = std::numeric_limits<float>::min();
  constexpr float kMost = std::numeric_limits<float>::max();
  if (std::isfinite(value) && value != 0 && (std::abs(value) < kLeast || std::abs(value) > kMost)) {
    return Bad(where, absl::StrFormat("%s is %g; allowed: 0, or a magnitude of %g to %g", what,
                                      value, kLeast, kMost));
  }
  *to = static_cast<float>(value);
  return absl::OkStatus();
}

absl::Status ReadSettings(Settings& settings, const HeadRequest& request, HeadSource* head) {
  const int64_t stored = head->weight.shape[0];
  const int64_t stated = settings.Size("vocab_size").value_or(stored);
  const double scale = settings.Number("logit_scale").value_or(1.0);
  const double factor = settings.Number("lm_head_multiplier").value_or(1.0);
  const double divisor = settings.Number("logits_scaling").value_or(1.0);
  const std::optional<int64_t> base = settings.Size("dim_model_base");
  const double softcap = settings.Number("final_logit_softcapping").value_or(0.0);
  for (const char* key : kOtherScales) settings.RefuseAny(key);
  LOGITD_RETURN_IF_ERROR(settings.status());
  if (divisor == 0) return Bad(settings.where(), "logits_scaling is 0; allowed: any other number");
  // What divides the hidden states divides the logits, but for a bias.
  const double of_hidden =
      base.has_value() ? static_cast<double>(*base) / static_cast<double>(head->weight.shape[1])
                       : 1.0;
  if (base.has_value() && head->bias.has_value()) {
    return Bad(settings.where(), "dim_model_base and a bias; allowed: one of them");
  }
  LOGITD_RETURN_IF_ERROR(ToFloat(settings.where(), "the scale of the logits",
                                 scale * factor / divisor * of_hidden, &head->scale));
  LOGITD_RETURN_IF_ERROR(
      ToFloat(settings.where(), "final_logit_softcapping", softcap, &head->softcap));
  head->vocab = request.vocab > 0 ? request.vocab : stated;
  if (head->vocab > stored) {
    return Bad(request.vocab > 0 ? head->weight.file->path() : settings.where(),
               absl::StrFormat("vocab%s is %d; allowed: 1 to %d, the rows of tensor %s",
                               request.vocab > 0 ? "" : "_size", head->vocab, stored,
                               formats::Shown(head->weight.name)));
  }
  return absl::OkStatus();
}

absl::Status FindNorm(Tensors& tensors, Settings& settings, HeadSource* head) {
  const std::string& where = settings.where();
  const std::string name = tensors.FirstOf(kModelPrefixes, "norm.weight");
  if (name.empty()) {
    return Bad(where, absl::StrFormat("no final norm: none of the tensors %s",
                                      absl::StrJoin(kModelPrefixes, ", ",
                                                    [](std::string* out, const char* prefix) {
                                                      absl::StrAppend(out, prefix, "norm.weight");
                                                    })));
  }
  const std::string bias = absl::StrCat(name.substr(0, name.rfind('.')), ".bias");
  if (tensors.Has(bias)) {
    return Bad(where, absl::StrFormat("the final norm has a bias, tensor %s, so it is a LayerNorm; "
                                      "allowed: an RMSNorm",
                                      formats::Shown(bias)));
  }
  const std::optional<double> epsilon = settings.Number("rms_norm_eps");
  LOGITD_RETURN_IF_ERROR(settings.status());
  if (!epsilon.has_value()) {
    return Bad(where, "no rms_norm_eps, so the final norm is not known to be an RMSNorm");
  }
  LOGITD_RETURN_IF_ERROR(ToFloat(where, "rms_norm_eps", *epsilon, &head->norm_epsilon));
  const std::string type = settings.Text("model_type");
  const bool doubtful =
      std::any_of(std::begin(kDoubtful), std::end(kDoubtful),
                  [&](std::string_view family) { return type.find(family) != type.npos; });
  if (Contains(kOnePlusWeight, type)) {
    head->norm_offset = 1.0f;
  } else if (doubtful && !Contains(kPlainGemmas, type)) {
    return Bad(
        where,
        absl::StrFormat(
            "model_type is %s, and whether its norm multiplies by weight or by 1 + "
            "weight is not known; allowed with a norm, of its like: %s, %s",
            formats::Shown(type),
            absl::StrJoin(std::begin(kOnePlusWeight), std::end(kOnePlusWeight), ", ",
                          [](std::string* out, std::string_view known) { out->append(known); }),
            absl::StrJoin(std::begin(kPlainGemmas), std::end(kPlainGemmas), ", ",
                          [](std::string* out, std::string_view known) { out->append(known); })));
  }
  absl::StatusOr<StoredTensor> norm = tensors.Get(name, {head->weight.shape[1]});
  if (!norm.ok()) return norm.status();
  head->norm = *std::move(norm);
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckInRoot(const std::string& root, const std::string& path) {
  const std::filesystem::path asked = (std::filesystem::path(root) / path).lexically_normal();
  return IsIn(asked, root) ? absl::OkStatus() : Outside(path);
}

absl::StatusOr<std::shared_ptr<const DataFile>> DataFile::Open(const std::string& root,
                                                               const std::string& path) {
  const absl::StatusOr<std::string> located = Locate(root, path);
  if (!located.ok()) return located.status();
  // Not to wait for the other end of a pipe that is no file at all.
  const int fd = open(located->c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return FileError(path, errno);
  struct stat info;
  if (fstat(fd, &info) != 0) {
    const int error = errno;
    close(fd);
    return FileError(path, error);
  }
  if (!S_ISREG(info.st_mode)) {
    close(fd);
    return Bad(path, "not a regular file");
  }
  return std::shared_ptr<const DataFile>(new DataFile(path, fd, info.st_size));
}

DataFile::DataFile(std::string path, int fd, int64_t bytes)
    : path_(std::move(path)), fd_(fd), bytes_(bytes) {}

DataFile::~DataFile() { close(fd_); }

absl::Status DataFile::Read(int64_t offset, size_t bytes, void* to) const {
  char* out = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t got = pread(fd_, out, bytes, offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return absl::UnavailableError(absl::StrCat(path_, ": ", strerror(errno)));
    if (got == 0) {
      return absl::UnavailableError(absl::StrFormat(
          "%s: ends at %d, and had %d bytes: it was cut while it was read", path_, offset, bytes_));
    }
    out += got;
    offset += got;
    bytes -= static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

absl::StatusOr<HeadSource> OpenHeadSource(const HeadRequest& request) {
  std::error_code ignored;
  const absl::StatusOr<std::string> located = Locate(request.root, request.path);
  if (!located.ok()) return located.status();
  const bool folder = std::filesystem::is_directory(*located, ignored);
  absl::StatusOr<Tensors> tensors = folder ? Tensors::OfFolder(request.root, request.path)
                                           : Tensors::OfFile(request.root, request.path);
  if (!tensors.ok()) return tensors.status();
  absl::StatusOr<Settings> settings = folder
                                          ? Settings::OfFolder(request.root, request.path)
                                          : Settings::OfMetadata(request.path, tensors->header());
  if (!settings.ok()) return settings.status();

  std::string weight = tensors->FirstOf(kHeadPrefixes, "weight");
  std::string bias;
  if (!weight.empty()) {
    bias = absl::StrCat(weight.substr(0, weight.size() - 6), "bias");
  } else if (weight = tensors->FirstOf(kModelPrefixes, "embed_tokens.weight"); !weight.empty()) {
    if (settings->Denied("tie_word_embeddings")) {
      return Bad(settings->where(),
                 "no tensor 'lm_head.weight', and tie_word_embeddings is false; allowed: either");
    }
    bias = tensors->FirstOf(kHeadPrefixes, "bias");
  } else {
    const std::vector<std::string> matrices =
        folder ? std::vector<std::string>() : tensors->Matrices();
    if (matrices.size() != 1) {
      return Bad(request.path,
                 absl::StrFormat("no tensor 'lm_head.weight' and none 'model.embed_tokens.weight'"
                                 "%s",
                                 folder ? ""
                                        : absl::StrFormat(", and %d of 2 dimensions; allowed: one",
                                                          matrices.size())));
    }
    weight = matrices[0];
    // The others are known names; this one goes into the log and to whoever lists heads.
    if (weight.empty() || weight.size() > kMaxTensorName || !OneLine(weight)) {
      return Bad(request.path,
                 absl::StrFormat("tensor %s, the only one of 2 dimensions, has a "
                                 "name of %d bytes; allowed: 1 to %d of printable "
                                 "ASCII",
                                 formats::Shown(weight), weight.size(), kMaxTensorName));
    }
    if (absl::EndsWith(weight, "weight")) {
      bias = absl::StrCat(weight.substr(0, weight.size() - 6), "bias");
    }
  }

  HeadSource head;
  absl::StatusOr<StoredTensor> found = tensors->Get(weight, {-1, -1});
  if (!found.ok()) return found.status();
  head.weight = *std::move(found);
  if (!bias.empty() && tensors->Has(bias)) {
    found = tensors->Get(bias, {head.weight.shape[0]});
    if (!found.ok()) return found.status();
    head.bias = *std::move(found);
  }
  LOGITD_RETURN_IF_ERROR(ReadSettings(*settings, request, &head));
  if (request.final_norm) LOGITD_RETURN_IF_ERROR(FindNorm(*tensors, *settings, &head));
  return head;
}

}  // namespace logitd::engine

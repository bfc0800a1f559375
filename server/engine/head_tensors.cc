#include "server/engine/head_tensors.h"

#include <algorithm>
#include <climits>
#include <iterator>
#include <utility>
#include <variant>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "formats/json_fields.h"
#include "kernels/status_macros.h"

namespace logitd::engine {
namespace {

constexpr int64_t kMaxIndexBytes = int64_t{16} << 20;
// About 100 bytes a tensor; no model's file comes near. Parsing cannot be cancelled and takes about
// a second at this size.
constexpr int64_t kMaxHeaderBytes = int64_t{16} << 20;
constexpr char kWeightMap[] = "weight_map";  // key of an index
constexpr size_t kMaxListed = 8;             // tensors in a text

// Prefixes of a head's own tensors, the most usual first. Multimodal models nest their language
// model. GPT-NeoX, BioGPT and TrOCR, XLNet, RWKV.
constexpr const char* kHeadPrefixes[] = {
    "lm_head.",   "language_model.lm_head.", "model.language_model.lm_head.",
    "embed_out.", "output_projection.",      "lm_loss.",
    "head."};
// Input embeddings, which are the head of a model that ties them.
constexpr const char* kEmbeddings[] = {
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "transformer.wte.weight",  // GPT-2, GPT-Neo, GPT-BigCode, MPT
    "wte.weight",
    "transformer.word_embeddings.weight",  // BLOOM, Falcon
    "word_embeddings.weight",
    "gpt_neox.embed_in.weight",
    "gpt_neox_japanese.embed_in.weight",
    "model.decoder.embed_tokens.weight",  // OPT, BART's decoder
    "decoder.embed_tokens.weight",
    "biogpt.embed_tokens.weight",
    "backbone.embeddings.weight",  // Mamba, FalconMamba, xLSTM
    "model.embeddings.weight",     // Nemotron-H
    "transformer.tokens_embed.weight",
    "tokens_embed.weight",                // GPT
    "transformer.w.weight",               // CTRL
    "transformer.word_embedding.weight",  // XLNet
    "embed_tokens.weight",
};

struct QuantisedScheme {
  std::string_view part;
  std::string_view name;
};
// Tensors of quantised matrices, beside or in place of their weight. The first that is there
// counts.
constexpr QuantisedScheme kSchemes[] = {
    {"g_idx", "GPTQ"},
    {"qweight", "GPTQ or AWQ"},
    {"weight_packed", "compressed-tensors"},
    {"weight.absmax", "bitsandbytes in 4 bits"},
    {"weight.quant_map", "bitsandbytes in 4 bits"},
    {"SCB", "bitsandbytes in 8 bits"},
    {"weight_scale_inv", "fp8 with scales"},
    {"weight_scale_2", "NVFP4"},
    {"weight_scale", "fp8 or int8 with scales"},
    {"weight_scales", "int8 with scales"},
    {"weight_blocks", "MXFP4"},
    {"weight._data", "quanto"},
    {"_weight_qdata", "torchao"},
    {"W_q", "HQQ"},
    {"codebooks", "AQLM"},
    {"Qidxs", "QuIP#"},
    {"q_weight", "EXL2"},
    {"trellis", "EXL3"},
    {"biases", "MLX"},
    {"scales", "integers with scales"},
};

// For the text of an error, after the dtype of a weight.
const char* QuantisedType(std::string_view dtype) {
  if (dtype.starts_with("F8")) return "; a weight quantised to fp8 is not read";
  if (dtype.starts_with("F6") || dtype.starts_with("F4")) {
    return "; a weight quantised to small floats is not read";
  }
  const bool integers = dtype.starts_with("I") || dtype.starts_with("U");
  return integers ? "; a weight quantised to integers is not read" : "";
}

// No part of the name is a layer's number.
bool IsOutsideLayers(std::string_view name) {
  for (size_t start = 0; start <= name.size();) {
    const size_t end = std::min(name.find('.', start), name.size());
    const std::string_view part = name.substr(start, end - start);
    if (!part.empty() && part.find_first_not_of("0123456789") == part.npos) return false;
    start = end + 1;
  }
  return true;
}

// Shortens `prefix`, which has no value before the first name, to what `name` also begins with.
void KeepCommon(std::string_view name, std::optional<std::string>* prefix) {
  if (!prefix->has_value()) *prefix = name;
  const auto end = std::mismatch(name.begin(), name.end(), (*prefix)->begin(), (*prefix)->end());
  (*prefix)->erase(end.second, (*prefix)->end());
}

// The wrappers at the start of a name.
std::string WrappersOf(const std::string& name) {
  absl::string_view rest = name;
  while (absl::ConsumePrefix(&rest, "_orig_mod.") || absl::ConsumePrefix(&rest, "module.")) {
  }
  return name.substr(0, name.size() - rest.size());
}

}  // namespace

bool IsPrintable(std::string_view text) {
  return std::ranges::all_of(text, [](unsigned char c) { return absl::ascii_isprint(c); });
}

absl::StatusOr<HeadTensors::OpenFile> HeadTensors::OpenSafetensors(const std::string& root,
                                                                   const std::string& path) {
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

absl::StatusOr<HeadTensors> HeadTensors::OfFile(const std::string& root, const std::string& path) {
  absl::StatusOr<OpenFile> file = OpenSafetensors(root, path);
  if (!file.ok()) return file.status();
  std::optional<std::string> common;
  for (const auto& [name, tensor] : file->header.tensors) KeepCommon(name, &common);
  HeadTensors out(root, path);
  out.wrapper_ = WrappersOf(common.value_or(""));
  for (const auto& [name, tensor] : file->header.tensors) {
    out.file_of_[name.substr(out.wrapper_.size())] = path;
  }
  out.open_.emplace(path, *std::move(file));
  return out;
}

absl::StatusOr<HeadTensors> HeadTensors::OfFolder(const std::string& root,
                                                  const std::string& folder) {
  const std::string single = absl::StrCat(folder, "/model.safetensors");
  const std::string index = absl::StrCat(folder, "/model.safetensors.index.json");
  absl::StatusOr<HeadTensors> whole = OfFile(root, single);
  if (!absl::IsNotFound(whole.status())) {
    if (whole.ok() && !absl::IsNotFound(DataFile::Open(root, index).status())) {
      whole->warning_ =
          "the folder has model.safetensors and model.safetensors.index.json; model.safetensors is "
          "taken, and the files that the index names are not read";
    }
    return whole;
  }
  const absl::StatusOr<std::string> text = ReadFile(root, index, kMaxIndexBytes);
  if (absl::IsNotFound(text.status())) {
    return absl::NotFoundError(absl::StrFormat(
        "%s: the folder has neither model.safetensors nor model.safetensors.index.json", folder));
  }
  if (!text.ok()) return text.status();
  std::optional<std::string> common;
  const auto fields =
      formats::ReadJsonFields(index, *text, [&](std::string_view object, std::string_view key) {
        if (object.empty()) return key == kWeightMap;
        if (object != kWeightMap) return false;
        KeepCommon(key, &common);
        return IsOutsideLayers(key);
      });
  if (!fields.ok()) return fields.status();
  const auto map = fields->find({"", kWeightMap});
  if (map == fields->end() || map->second != formats::JsonValue(formats::JsonParts{true})) {
    return FileError(index, "weight_map: got none, allowed an object from tensors to files");
  }
  HeadTensors out(root, index);
  out.folder_ = folder + "/";
  out.wrapper_ = WrappersOf(common.value_or(""));
  for (const auto& [key, value] : *fields) {
    const auto* file = std::get_if<std::string>(&value);
    if (key.first.empty() || file == nullptr) continue;
    out.file_of_[key.second.substr(out.wrapper_.size())] = *file;
  }
  return out;
}

std::string HeadTensors::OfHead(std::string_view rest) const {
  return FirstOf(kHeadPrefixes, rest);
}

std::string HeadTensors::Embeddings() const { return FirstOf(kEmbeddings); }

std::optional<QuantisedPart> HeadTensors::QuantisedPartOf(std::string_view weight) const {
  const std::string_view matrix = weight.substr(0, weight.rfind('.') + 1);
  for (const QuantisedScheme& scheme : kSchemes) {
    const std::string name = absl::StrCat(std::string(matrix), std::string(scheme.part));
    if (Has(name)) return QuantisedPart{wrapper_ + name, scheme.name};
  }
  return std::nullopt;
}

std::optional<QuantisedPart> HeadTensors::QuantisedHead() const {
  for (const char* prefix : kHeadPrefixes) {
    if (auto part = QuantisedPartOf(prefix); part.has_value()) return part;
  }
  return std::nullopt;
}

std::string HeadTensors::HeadNames() {
  return absl::StrJoin(kHeadPrefixes, ", ", [](std::string* out, const char* prefix) {
    absl::StrAppend(out, prefix, "weight");
  });
}

std::string HeadTensors::Listed() const {
  const auto rank = [](std::string_view name) {
    const bool of_head = std::ranges::any_of(
        kHeadPrefixes, [&](std::string_view prefix) { return name.starts_with(prefix); });
    if (of_head) return 0;
    return std::ranges::find(kEmbeddings, name) != std::end(kEmbeddings) ? 1 : 2;
  };
  std::vector<std::string> names;
  for (const auto& [name, file] : file_of_) {
    if (IsOutsideLayers(name)) names.push_back(name);
  }
  std::ranges::stable_sort(names, {}, rank);
  const size_t more = names.size() - std::min(names.size(), kMaxListed);
  names.resize(names.size() - more);
  std::string text = absl::StrJoin(names, ", ", [&](std::string* out, const std::string& name) {
    absl::StrAppend(out, formats::Shown(wrapper_ + name));
  });
  if (more > 0) absl::StrAppend(&text, " and ", more, " more");
  return text.empty() ? "none outside layers" : text;
}

std::vector<std::string> HeadTensors::Matrices() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : header().tensors) {
    if (tensor.shape.size() == 2) names.push_back(name.substr(wrapper_.size()));
  }
  return names;
}

absl::StatusOr<StoredTensor> HeadTensors::Get(const std::string& name,
                                              const std::vector<int64_t>& want) {
  const std::string stored = wrapper_ + name;
  const std::string& file_name = file_of_.find(name)->second;
  const std::string path = folder_ + file_name;
  auto it = open_.find(file_name);
  if (it == open_.end()) {
    if (file_name.empty() || file_name.size() > NAME_MAX || file_name[0] == '.' ||
        absl::StrContains(file_name, '/') || !IsPrintable(file_name)) {
      return FileError(where_, "file of tensor %s: got %s, allowed a file in the folder",
                       formats::Shown(stored), formats::Shown(file_name));
    }
    absl::StatusOr<OpenFile> file = OpenSafetensors(root_, path);
    if (!file.ok()) {
      return absl::Status(file.status().code(),
                          absl::StrFormat("%s (the file of tensor %s in %s)",
                                          file.status().message(), formats::Shown(stored), where_));
    }
    it = open_.emplace(file_name, *std::move(file)).first;
  }
  const auto found = it->second.header.tensors.find(stored);
  if (found == it->second.header.tensors.end()) {
    return FileError(path, "no tensor %s, which %s says is here", formats::Shown(stored), where_);
  }
  const formats::SafetensorsTensor& tensor = found->second;
  StoredTensor out{.name = stored,
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
    return FileError(path, "dtype of tensor %s: got %s, allowed F32, F16, BF16%s",
                     formats::Shown(stored), formats::Shown(tensor.dtype),
                     QuantisedType(tensor.dtype));
  }
  bool fits = tensor.shape.size() == want.size();
  for (size_t i = 0; fits && i < want.size(); ++i) {
    fits = want[i] == -1 ? tensor.shape[i] > 0 : tensor.shape[i] == want[i];
  }
  if (!fits) {
    return FileError(path, "shape of tensor %s: got %s, allowed %s%s", formats::Shown(stored),
                     formats::ShapeName(tensor.shape), formats::ShapeName(want),
                     std::count(want.begin(), want.end(), -1) > 0 ? "; -1: any size above 0" : "");
  }
  return out;
}

}  // namespace logitd::engine

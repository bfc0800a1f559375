#include "server/engine/head_source.h"

#include <algorithm>
#include <climits>
#include <cmath>
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
#include "server/engine/model_types.h"

namespace logitd::engine {
namespace {

constexpr int64_t kMaxConfigBytes = int64_t{1} << 20;
constexpr int64_t kMaxIndexBytes = int64_t{16} << 20;
// About 100 bytes a tensor; no model's file comes near. Parsing cannot be cancelled and takes about
// a second at this size.
constexpr int64_t kMaxHeaderBytes = int64_t{16} << 20;

constexpr size_t kMaxTensorName = 128;  // of a name that only the file gives

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
constexpr const char* kNorms[] = {"model.norm.weight", "language_model.model.norm.weight",
                                  "model.language_model.norm.weight"};
// Encoder-decoder models add it to their logits, with a shape of its own.
constexpr const char kOtherBias[] = "final_logits_bias";

constexpr std::string_view kHeadTensors[] = {"weight", "bias", "dense.weight"};

constexpr char kWeightMap[] = "weight_map";  // key of an index
constexpr char kInnerModel[] = "text_config";

// Settings that scale the logits.
struct Scale {
  const char* key;
  bool divides;
  bool of_hidden;  // scales the hidden states: the same only without a bias
};
constexpr Scale kScales[] = {
    {"logit_scale", false, false},                // Cohere
    {"lm_head_multiplier", false, false},         // Falcon-H1
    {"output_multiplier", false, false},          // Muse
    {"logits_scaling", true, false},              // Granite; see kLogitsScalingMultiplies
    {"logits_mup_width_multiplier", true, true},  // Inkling
};
constexpr char kLogitsScalingMultiplies[] = "hyperclovax";  // as part of model_type
// Settings with the softcap; a model has one of them. Gemma and NanoChat, RecurrentGemma, xLSTM.
constexpr const char* kSoftcaps[] = {"final_logit_softcapping", "logits_soft_cap",
                                     "output_logit_soft_cap"};
constexpr std::string_view kSettings[] = {
    "vocab_size",   "unpadded_vocab_size", "tie_word_embeddings", "is_encoder_decoder",
    "rms_norm_eps", "dim_model_base",      "model_type",          "norm_head"};

// Settings that these models have by default: a configuration may leave them out, and then says
// nothing of their value.
struct NeededSetting {
  std::string_view model_type;
  const char* key;
};
constexpr NeededSetting kNeededSettings[] = {
    {"cohere", "logit_scale"},
    {"cohere2", "logit_scale"},
    {"gemma2", "final_logit_softcapping"},
    {"gemma3n_text", "final_logit_softcapping"},
    {"nanochat", "final_logit_softcapping"},
    {"recurrent_gemma", "logits_soft_cap"},
    {"xlstm", "output_logit_soft_cap"},
};

// Keys by which models change their logits in ways that are not part of transformers, and not
// known here: Phi-3-small, Cerebras and Jais, Grok.
constexpr const char* kOtherScales[] = {"mup_width_multiplier", "mup_width_scale",
                                        "mup_output_alpha", "output_multiplier_scale"};
// Bailing (Ling) normalises the rows of its head's weight where this says so.
constexpr char kNormHead[] = "norm_head";
// Baichuan 2 always does; only Baichuan 1 has this vocabulary.
constexpr char kBaichuan[] = "baichuan";  // as part of model_type
constexpr int64_t kBaichuan1Vocab = 64000;

// model_type of models whose final RMSNorm multiplies by 1 + weight; of models with similar names
// whose norm multiplies by weight; and parts of names for which one of the two must be known.
constexpr std::string_view kOnePlusWeight[] = {
    "gemma",       "gemma2",           "gemma3",        "gemma3_text",
    "vaultgemma",  "qwen3_next",       "qwen3_5",       "qwen3_5_text",
    "qwen3_5_moe", "qwen3_5_moe_text", "minimax_m3_vl", "minimax_m3_vl_text"};
constexpr std::string_view kPlainGemmas[] = {"gemma3n", "gemma3n_text"};
constexpr std::string_view kAmbiguousFamilies[] = {"gemma",     "qwen3_next", "qwen3_5",
                                                   "qwen4_exp", "minimax_m3", "step3p7"};

template <typename Names>
bool Contains(const Names& names, std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

std::string BiasOf(const std::string& weight) {
  return absl::StrCat(weight.substr(0, weight.rfind('.') + 1), "bias");
}

// A tensor of an index that this file reads.
bool IsHeadTensor(std::string_view tensor) {
  const bool of_head =
      std::any_of(std::begin(kHeadPrefixes), std::end(kHeadPrefixes), [&](std::string_view prefix) {
        return tensor.starts_with(prefix) && Contains(kHeadTensors, tensor.substr(prefix.size()));
      });
  return of_head || tensor == kOtherBias || Contains(kEmbeddings, tensor) ||
         std::any_of(std::begin(kNorms), std::end(kNorms), [&](const std::string& norm) {
           return tensor == norm || tensor == BiasOf(norm);
         });
}

// A key of config.json that this file reads.
bool IsSetting(std::string_view key) {
  return Contains(kSettings, key) || Contains(kOtherScales, key) || Contains(kSoftcaps, key) ||
         std::any_of(std::begin(kScales), std::end(kScales),
                     [&](const Scale& scale) { return key == scale.key; });
}

bool OneLine(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return absl::ascii_isprint(static_cast<unsigned char>(c)); });
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
    absl::StatusOr<PathKind> there = KindOf(root, single);
    if (!there.ok()) return there.status();
    if (*there != PathKind::kNone) return OfFile(root, single);
    there = KindOf(root, index);
    if (!there.ok()) return there.status();
    if (*there == PathKind::kNone) {
      return absl::NotFoundError(absl::StrFormat(
          "%s: the folder has neither model.safetensors nor model.safetensors.index.json", folder));
    }
    const absl::StatusOr<std::string> text = ReadFile(root, index, kMaxIndexBytes);
    if (!text.ok()) return text.status();
    const auto fields =
        formats::ReadJsonFields(index, *text, [](std::string_view object, std::string_view key) {
          return object.empty() ? key == kWeightMap : object == kWeightMap && IsHeadTensor(key);
        });
    if (!fields.ok()) return fields.status();
    const auto map = fields->find({"", kWeightMap});
    if (map == fields->end() || map->second != formats::JsonValue(formats::JsonParts{true})) {
      return FileError(index, "weight_map: got none, allowed an object from tensors to files");
    }
    Tensors out(root, index);
    for (const auto& [key, value] : *fields) {
      const auto* file = std::get_if<std::string>(&value);
      if (key.first.empty() || file == nullptr) continue;
      if (file->empty() || file->size() > NAME_MAX || (*file)[0] == '.' ||
          absl::StrContains(*file, '/') || !OneLine(*file)) {
        return FileError(index,
                         absl::StrFormat("file of tensor %s: got %s, allowed a file in the folder",
                                         formats::Shown(key.second), formats::Shown(*file)));
      }
      out.file_of_[key.second] = absl::StrCat(folder, "/", *file);
    }
    return out;
  }

  bool Has(const std::string& name) const { return file_of_.contains(name); }

  // The first of the names, each with `rest` at its end, that exists, or "".
  template <typename Prefixes>
  std::string FirstOf(const Prefixes& prefixes, std::string_view rest = "") const {
    for (const char* prefix : prefixes) {
      if (std::string name = absl::StrCat(prefix, std::string(rest)); Has(name)) return name;
    }
    return "";
  }

  // The names of a single file's tensors of 2 dimensions.
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

  // `want`: its shape; -1: any size above 0.
  absl::StatusOr<StoredTensor> Get(const std::string& name, const std::vector<int64_t>& want) {
    const std::string& path = file_of_.find(name)->second;
    auto it = open_.find(path);
    if (it == open_.end()) {
      absl::StatusOr<OpenFile> file = OpenSafetensors(root_, path);
      if (!file.ok()) {
        return absl::Status(file.status().code(),
                            absl::StrFormat("%s (the file of tensor %s in %s)",
                                            file.status().message(), formats::Shown(name), where_));
      }
      it = open_.emplace(path, *std::move(file)).first;
    }
    const auto found = it->second.header.tensors.find(name);
    if (found == it->second.header.tensors.end()) {
      return FileError(path, absl::StrFormat("no tensor %s, which %s says is here",
                                             formats::Shown(name), where_));
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
      return FileError(path, absl::StrFormat("dtype of tensor %s: got %s, allowed F32, F16, BF16",
                                             formats::Shown(name), formats::Shown(tensor.dtype)));
    }
    bool fits = tensor.shape.size() == want.size();
    for (size_t i = 0; fits && i < want.size(); ++i) {
      fits = want[i] == -1 ? tensor.shape[i] > 0 : tensor.shape[i] == want[i];
    }
    if (!fits) {
      return FileError(
          path, absl::StrFormat(
                    "shape of tensor %s: got %s, allowed %s%s", formats::Shown(name),
                    formats::ShapeName(tensor.shape), formats::ShapeName(want),
                    std::count(want.begin(), want.end(), -1) > 0 ? "; -1: any size above 0" : ""));
    }
    return out;
  }

 private:
  Tensors(std::string root, std::string where) : root_(std::move(root)), where_(std::move(where)) {}

  std::string root_;
  std::string where_;  // the file that lists the tensors
  std::map<std::string, std::string, std::less<>> file_of_;
  std::map<std::string, OpenFile> open_;
};

// A model's settings. Keeps the first error.
class Settings {
 public:
  static absl::StatusOr<Settings> OfFolder(const std::string& root, const std::string& folder) {
    const std::string path = absl::StrCat(folder, "/config.json");
    const absl::StatusOr<std::string> text = ReadFile(root, path, kMaxConfigBytes);
    if (!text.ok()) return text.status();
    absl::StatusOr<formats::JsonFields> fields =
        formats::ReadJsonFields(path, *text, [](std::string_view object, std::string_view key) {
          return (object.empty() || object == kInnerModel) && IsSetting(key);
        });
    if (!fields.ok()) return fields.status();
    return Settings(path, *std::move(fields));
  }

  // Metadata are strings. A string that reads as a number or a boolean becomes one.
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

  void RefuseTrue(const char* key) {
    const formats::JsonValue* value = Find(key);
    if (value != nullptr && *value != formats::JsonValue(false)) Fail(key, *value, "false");
  }

  std::string Text(const char* key) {
    const formats::JsonValue* value = Find(key);
    const auto* text = value != nullptr ? std::get_if<std::string>(value) : nullptr;
    return text != nullptr ? *text : "";
  }

  // Also where it is null.
  bool Has(const char* key) const {
    return std::any_of(std::begin(kPlaces), std::end(kPlaces), [&](const char* object) {
      return fields_.find({object, key}) != fields_.end();
    });
  }

  // True if the key is there, and `want` wherever it is.
  bool IsEverywhere(const char* key, bool want) const {
    int found = 0;
    for (const char* object : kPlaces) {
      const auto it = fields_.find({object, key});
      const auto* value = it != fields_.end() ? std::get_if<bool>(&it->second) : nullptr;
      if (value == nullptr) continue;
      if (*value != want) return false;
      ++found;
    }
    return found > 0;
  }

 private:
  // The inner model's settings before those of the whole model.
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
    status_ = FileError(where_, absl::StrFormat("%s: got %s, allowed %s", key,
                                                formats::ShownValue(value), allowed));
  }

  std::string where_;
  formats::JsonFields fields_;
  absl::Status status_;
};

// Passes NaN and infinities on: CheckHead refuses them.
absl::Status ToFloat(const std::string& where, const char* what, double value, float* to) {
  constexpr float kLeast = std::numeric_limits<float>::min();
  constexpr float kMost = std::numeric_limits<float>::max();
  if (std::isfinite(value) && value != 0 && (std::abs(value) < kLeast || std::abs(value) > kMost)) {
    return FileError(where, absl::StrFormat("%s: got %g, allowed 0, or a magnitude of %g to %g",
                                            what, value, kLeast, kMost));
  }
  *to = static_cast<float>(value);
  return absl::OkStatus();
}

// All scales of the settings as one factor of the logits.
absl::StatusOr<double> ScaleOf(Settings& settings, const HeadSource& head) {
  double factor = 1.0;
  for (const Scale& scale : kScales) {
    const std::optional<double> value = settings.Number(scale.key);
    if (!value.has_value()) continue;
    const bool divides = scale.divides && !(std::string_view(scale.key) == "logits_scaling" &&
                                            absl::StrContains(settings.Text("model_type"),
                                                              kLogitsScalingMultiplies));
    if (divides && *value == 0) {
      return FileError(settings.where(),
                       absl::StrFormat("%s: got 0, allowed any other number", scale.key));
    }
    if (scale.of_hidden && head.bias.has_value()) {
      return FileError(settings.where(),
                       absl::StrFormat("%s: got one and a bias, allowed one of them", scale.key));
    }
    factor = divides ? factor / *value : factor * *value;
  }
  // A factor of the hidden states is a factor of the logits if there is no bias.
  const std::optional<int64_t> base = settings.Size("dim_model_base");
  if (base.has_value() && head.bias.has_value()) {
    return FileError(settings.where(), "dim_model_base: got one and a bias, allowed one of them");
  }
  if (base.has_value()) {
    factor *= static_cast<double>(*base) / static_cast<double>(head.weight.shape[1]);
  }
  return factor;
}

absl::Status CheckNeeded(Settings& settings) {
  const std::string type = settings.Text("model_type");
  for (const NeededSetting& needed : kNeededSettings) {
    if (needed.model_type != type || settings.Has(needed.key)) continue;
    return FileError(settings.where(),
                     absl::StrFormat("%s: got none, allowed a number or null: a model of type %s "
                                     "has one by default",
                                     needed.key, type));
  }
  return absl::OkStatus();
}

absl::Status ReadSettings(Settings& settings, const HeadRequest& request, HeadSource* head) {
  LOGITD_RETURN_IF_ERROR(CheckNeeded(settings));
  const int64_t stored = head->weight.shape[0];
  std::optional<int64_t> stated = settings.Size("unpadded_vocab_size");
  if (!stated.has_value()) stated = settings.Size("vocab_size");
  const absl::StatusOr<double> scale = ScaleOf(settings, *head);
  const char* softcap = kSoftcaps[0];
  double cap = 0.0;
  for (const char* key : kSoftcaps) {
    const std::optional<double> value = settings.Number(key);
    if (!value.has_value()) continue;
    softcap = key;
    cap = *value;
    break;
  }
  for (const char* key : kOtherScales) settings.RefuseAny(key);
  LOGITD_RETURN_IF_ERROR(settings.status());
  if (!scale.ok()) return scale.status();
  LOGITD_RETURN_IF_ERROR(
      ToFloat(settings.where(), "the scale of the logits", *scale, &head->scale));
  LOGITD_RETURN_IF_ERROR(ToFloat(settings.where(), softcap, cap, &head->softcap));
  head->vocab = request.vocab > 0 ? request.vocab : stated.value_or(stored);
  if (head->vocab > stored) {
    return FileError(request.vocab > 0 ? head->weight.file->path() : settings.where(),
                     absl::StrFormat("vocab%s: got %d, allowed 1 to %d, the rows of tensor %s",
                                     request.vocab > 0 ? "" : "_size", head->vocab, stored,
                                     formats::Shown(head->weight.name)));
  }
  return absl::OkStatus();
}

// Refuses models that normalise their head's weight: with the weight as it is stored, their logits
// would be wrong without a sign of it.
absl::Status CheckNormalised(Settings& settings) {
  const std::string type = settings.Text("model_type");
  if (absl::StrContains(type, kBaichuan) &&
      (type != kBaichuan || settings.Size("vocab_size") != kBaichuan1Vocab)) {
    return FileError(settings.where(),
                     absl::StrFormat("model_type: got %s, which normalises the weight of its head; "
                                     "allowed is only its first version, with a vocab_size of %d",
                                     formats::Shown(type), kBaichuan1Vocab));
  }
  settings.RefuseTrue(kNormHead);
  return settings.status();
}

// Refuses models whose logits are not a product with the last hidden states.
absl::Status CheckKind(const Tensors& tensors, Settings& settings) {
  LOGITD_RETURN_IF_ERROR(CheckNormalised(settings));
  // T5 scales its states if it ties its embeddings; BART and others add a bias.
  if (settings.IsEverywhere("is_encoder_decoder", true) &&
      !settings.IsEverywhere("tie_word_embeddings", false)) {
    return FileError(
        settings.where(),
        "is_encoder_decoder: got true with tied embeddings, allowed false: such models "
        "change their logits in ways that are not known");
  }
  if (tensors.Has(kOtherBias)) {
    return FileError(settings.where(),
                     absl::StrFormat("tensor '%s': got one, allowed none: only encoder-decoder "
                                     "models add it to their logits",
                                     kOtherBias));
  }
  // The heads of masked language models first transform the states.
  const std::string dense = tensors.FirstOf(kHeadPrefixes, "dense.weight");
  if (!dense.empty()) {
    return FileError(settings.where(),
                     absl::StrFormat("tensor '%s': got one, allowed none: the head must be one "
                                     "matrix and a bias",
                                     dense));
  }
  return absl::OkStatus();
}

absl::Status FindNorm(Tensors& tensors, Settings& settings, HeadSource* head) {
  const std::string& where = settings.where();
  const std::string name = tensors.FirstOf(kNorms);
  if (name.empty()) {
    return FileError(where, absl::StrCat("final norm: got none, allowed one of the tensors ",
                                         absl::StrJoin(kNorms, ", ")));
  }
  const std::string bias = BiasOf(name);
  if (tensors.Has(bias)) {
    return FileError(
        where, absl::StrFormat("final norm: got a LayerNorm with the bias %s, allowed an RMSNorm",
                               formats::Shown(bias)));
  }
  const std::optional<double> epsilon = settings.Number("rms_norm_eps");
  LOGITD_RETURN_IF_ERROR(settings.status());
  if (!epsilon.has_value()) {
    return FileError(
        where, "rms_norm_eps: got none, allowed a number: only an RMSNorm can be the final norm");
  }
  LOGITD_RETURN_IF_ERROR(ToFloat(where, "rms_norm_eps", *epsilon, &head->norm_epsilon));
  const std::string type = settings.Text("model_type");
  const bool doubtful =
      std::any_of(std::begin(kAmbiguousFamilies), std::end(kAmbiguousFamilies),
                  [&](std::string_view family) { return type.find(family) != type.npos; });
  if (Contains(kOnePlusWeight, type)) {
    head->norm_offset = 1.0f;
  } else if (doubtful && !Contains(kPlainGemmas, type)) {
    return FileError(
        where,
        absl::StrFormat(
            "model_type: got %s, whose norm multiplies by weight or by 1 + weight, which is not "
            "known; allowed with a norm %s, %s",
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

absl::StatusOr<HeadSource> OpenHeadSource(const HeadRequest& request) {
  const absl::StatusOr<PathKind> kind = KindOf(request.root, request.path);
  if (!kind.ok()) return kind.status();
  const bool folder = *kind == PathKind::kFolder;
  absl::StatusOr<Tensors> tensors = folder ? Tensors::OfFolder(request.root, request.path)
                                           : Tensors::OfFile(request.root, request.path);
  if (!tensors.ok()) return tensors.status();
  absl::StatusOr<Settings> settings = folder
                                          ? Settings::OfFolder(request.root, request.path)
                                          : Settings::OfMetadata(request.path, tensors->header());
  if (!settings.ok()) return settings.status();

  LOGITD_RETURN_IF_ERROR(CheckKind(*tensors, *settings));
  std::string weight = tensors->FirstOf(kHeadPrefixes, "weight");
  std::string bias;
  if (!weight.empty()) {
    bias = BiasOf(weight);
  } else if (weight = tensors->FirstOf(kEmbeddings); !weight.empty()) {
    if (settings->IsEverywhere("tie_word_embeddings", false)) {
      return FileError(
          settings->where(),
          "tie_word_embeddings: got false, allowed true if there is no tensor 'lm_head.weight'");
    }
    bias = tensors->FirstOf(kHeadPrefixes, "bias");
  } else {
    const std::vector<std::string> matrices =
        folder ? std::vector<std::string>() : tensors->Matrices();
    if (matrices.size() != 1) {
      return FileError(
          request.path,
          absl::StrFormat("no tensor 'lm_head.weight', 'model.embed_tokens.weight' or another name "
                          "of a known head%s",
                          folder ? ""
                                 : absl::StrFormat("; tensors of 2 dimensions: got %d, allowed 1",
                                                   matrices.size())));
    }
    weight = matrices[0];
    // The log and the list of heads show this name, and only the file gives it.
    if (weight.empty() || weight.size() > kMaxTensorName || !OneLine(weight)) {
      return FileError(
          request.path,
          absl::StrFormat("name of the weight: got %s of %d bytes, allowed 1 to %d of printable "
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
  if (std::string type = settings->Text("model_type"); !type.empty() && !IsSurveyed(type)) {
    head.unknown_type = std::move(type);
  }
  return head;
}

}  // namespace logitd::engine

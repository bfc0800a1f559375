#include "server/engine/head_source.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
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
constexpr size_t kMaxTensorName = 128;  // of a name that only the file gives

constexpr const char* kNorms[] = {"model.norm.weight", "language_model.model.norm.weight",
                                  "model.language_model.norm.weight"};
// Encoder-decoder models add it to their logits, with a shape of its own.
constexpr const char kOtherBias[] = "final_logits_bias";

constexpr char kInnerModel[] = "text_config";
constexpr char kTies[] = "tie_word_embeddings";
// LFM2's own name for it, which wins.
constexpr char kOtherTies[] = "tie_embedding";
constexpr std::string_view kLfm2 = "lfm2";  // at the start of model_type
// The key of a quantised model's object that names the scheme.
constexpr std::pair<const char*, const char*> kQuantMethod = {"quantization_config",
                                                              "quant_method"};

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
constexpr std::string_view kSettings[] = {"vocab_size",     "unpadded_vocab_size", kTies,
                                          kOtherTies,       "is_encoder_decoder",  "rms_norm_eps",
                                          "dim_model_base", "model_type",          "norm_head"};

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

// A key of config.json that this file reads.
bool IsSetting(std::string_view key) {
  return Contains(kSettings, key) || Contains(kOtherScales, key) || Contains(kSoftcaps, key) ||
         std::any_of(std::begin(kScales), std::end(kScales),
                     [&](const Scale& scale) { return key == scale.key; });
}

// A model's settings. Keeps the first error.
class Settings {
 public:
  static absl::StatusOr<Settings> OfFolder(const std::string& root, const std::string& folder) {
    const std::string path = absl::StrCat(folder, "/config.json");
    const absl::StatusOr<std::string> text = ReadFile(root, path, kMaxConfigBytes);
    if (!text.ok()) return text.status();
    absl::StatusOr<formats::JsonFields> fields =
        formats::ReadJsonFields(path, *text, [](std::string_view object, std::string_view key) {
          return ((object.empty() || object == kInnerModel) && IsSetting(key)) ||
                 (object == kQuantMethod.first && key == kQuantMethod.second);
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

  std::string Text(const char* key) const {
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

  // The stated value: true if it is true anywhere, false if it is false or null wherever it is there.
  std::optional<bool> Stated(const char* key) {
    std::optional<bool> stated;
    for (const char* object : kPlaces) {
      const auto it = fields_.find({object, key});
      if (it == fields_.end()) continue;
      const bool none = std::holds_alternative<std::monostate>(it->second);
      const auto* value = std::get_if<bool>(&it->second);
      if (!none && value == nullptr) Fail(key, it->second, "true or false");
      stated = stated.value_or(false) || (value != nullptr && *value);
    }
    return stated;
  }

  // The key that says whether the embeddings are the head.
  const char* TiesKey() const {
    return Text("model_type").starts_with(kLfm2) && Has(kOtherTies) ? kOtherTies : kTies;
  }

  // True if the embeddings are the head; nothing if neither the settings nor the model_type tell.
  std::optional<bool> Ties() {
    if (const std::optional<bool> stated = Stated(TiesKey())) return stated;
    for (const char* object : kPlaces) {
      const auto it = fields_.find({object, "model_type"});
      const auto* type = it != fields_.end() ? std::get_if<std::string>(&it->second) : nullptr;
      if (type == nullptr) continue;
      if (const std::optional<bool> ties = TiesByDefault(*type)) return ties;
    }
    return std::nullopt;
  }

  // The scheme that a configuration states; "" without one.
  std::string QuantMethod() const {
    const auto it = fields_.find(kQuantMethod);
    const auto* text = it != fields_.end() ? std::get_if<std::string>(&it->second) : nullptr;
    return text != nullptr ? *text : "";
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
absl::Status CheckKind(const HeadTensors& tensors, Settings& settings) {
  LOGITD_RETURN_IF_ERROR(CheckNormalised(settings));
  // T5 scales its states if it ties its embeddings; BART and others add a bias.
  if (settings.IsEverywhere("is_encoder_decoder", true) && settings.Ties() != false) {
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
  const std::string dense = tensors.OfHead("dense.weight");
  if (!dense.empty()) {
    return FileError(settings.where(),
                     absl::StrFormat("tensor '%s': got one, allowed none: the head must be one "
                                     "matrix and a bias",
                                     dense));
  }
  return absl::OkStatus();
}

absl::Status FindNorm(HeadTensors& tensors, Settings& settings, HeadSource* head) {
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

// The names of a head's weight and of its bias. The bias need not exist; "": none.
struct Choice {
  std::string weight;
  std::string bias;
};

// "'lm_head.qweight' is of a matrix quantised by GPTQ (quant_method: 'gptq'), ..."
std::string QuantisedText(const QuantisedPart& part, const Settings& settings) {
  const std::string method = settings.QuantMethod();
  return absl::StrFormat(
      "%s is of a matrix quantised by %s%s, allowed F32, F16, BF16", formats::Shown(part.name),
      part.scheme,
      method.empty() ? ""
                     : absl::StrFormat(" (%s: %s)", kQuantMethod.second, formats::Shown(method)));
}

absl::Status CheckNotQuantised(const HeadTensors& tensors, const Settings& settings,
                               const std::string& weight) {
  const std::optional<QuantisedPart> part = tensors.QuantisedPartOf(weight);
  if (!part.has_value()) return absl::OkStatus();
  return FileError(settings.where(), absl::StrFormat("head: got %s, and %s", formats::Shown(weight),
                                                     QuantisedText(*part, settings)));
}

// For an error text: the tensors that are a head's, those that are there, and the quantised head
// among them.
std::string LookedFor(const HeadTensors& tensors, const Settings& settings) {
  const std::optional<QuantisedPart> part = tensors.QuantisedHead();
  return absl::StrFormat(
      "looked for %s; there: %s%s", HeadTensors::HeadNames(), tensors.Listed(),
      part.has_value() ? absl::StrCat("; ", QuantisedText(*part, settings)) : "");
}

// The error of a model that has no head and does not tie its embeddings, or for which that is not
// known.
absl::Status NotTied(const HeadTensors& tensors, Settings& settings) {
  const char* const key = settings.TiesKey();
  const std::string type = settings.Text("model_type");
  std::string got = "none";
  if (settings.Stated(key).has_value()) {
    got = "false";
  } else if (settings.Ties().has_value()) {
    absl::StrAppend(&got, ", which means false for model_type ", formats::Shown(type));
  } else if (!type.empty()) {
    absl::StrAppend(&got, ", and the default of model_type ", formats::Shown(type),
                    " is not known");
  }
  return FileError(settings.where(),
                   absl::StrFormat("%s: got %s, allowed true if there is no head; %s", key, got,
                                   LookedFor(tensors, settings)));
}

// The embeddings, if the model ties them. Without a model_type it is taken to do so, since nothing
// says otherwise.
absl::StatusOr<Choice> ChooseEmbeddings(const HeadTensors& tensors, Settings& settings,
                                        std::vector<std::string>* warnings) {
  const std::optional<bool> ties = settings.Ties();
  const std::optional<QuantisedPart> part = tensors.QuantisedHead();
  const std::string embeddings = tensors.Embeddings();
  if (!ties.has_value() && settings.Text("model_type").empty() && !part.has_value()) {
    warnings->push_back(absl::StrFormat(
        "%s is taken as the head: there is no other one, and neither %s nor a model_type is stated",
        embeddings, kTies));
  } else if (ties != true) {
    return NotTied(tensors, settings);
  }
  LOGITD_RETURN_IF_ERROR(CheckNotQuantised(tensors, settings, embeddings));
  if (part.has_value()) {
    warnings->push_back(
        absl::StrFormat("%s is true, so %s is the head; %s, of a quantised head, is not read",
                        settings.TiesKey(), embeddings, part->name));
  }
  return Choice{embeddings, tensors.OfHead("bias")};
}

// A head of its own, or the embeddings. Without both, nothing.
absl::StatusOr<Choice> ChooseKnown(const HeadTensors& tensors, Settings& settings,
                                   std::vector<std::string>* warnings) {
  const std::optional<bool> ties = settings.Ties();
  LOGITD_RETURN_IF_ERROR(settings.status());
  const std::string head = tensors.OfHead("weight");
  const std::string embeddings = tensors.Embeddings();
  if (head.empty() && !embeddings.empty()) return ChooseEmbeddings(tensors, settings, warnings);
  if (head.empty()) {
    if (!tensors.QuantisedHead().has_value()) return Choice{};
    return FileError(settings.where(),
                     absl::StrCat("head: got none; ", LookedFor(tensors, settings)));
  }
  LOGITD_RETURN_IF_ERROR(CheckNotQuantised(tensors, settings, head));
  if (ties == true && !embeddings.empty()) {
    warnings->push_back(absl::StrFormat(
        "%s is true%s, and there are %s and %s. The first is the head here, and in transformers "
        "5 if the two differ; in transformers 4 the second is",
        settings.TiesKey(), settings.Stated(settings.TiesKey()) == true ? "" : " by default", head,
        embeddings));
  }
  return Choice{head, BiasOf(head)};
}

// The only matrix of a file without a known name.
absl::StatusOr<Choice> ChooseOnlyMatrix(const HeadTensors& tensors, const std::string& path,
                                        bool folder) {
  const std::vector<std::string> matrices =
      folder ? std::vector<std::string>() : tensors.Matrices();
  if (matrices.size() != 1) {
    return FileError(
        path, absl::StrFormat(
                  "no tensor 'lm_head.weight', 'model.embed_tokens.weight' or another name of a "
                  "known head; there: %s%s",
                  tensors.Listed(),
                  folder ? ""
                         : absl::StrFormat("; tensors of 2 dimensions: got %d, allowed 1",
                                           matrices.size())));
  }
  const std::string& weight = matrices[0];
  // The log and the list of heads show this name, and only the file gives it.
  const bool printable = std::all_of(weight.begin(), weight.end(), [](char c) {
    return absl::ascii_isprint(static_cast<unsigned char>(c));
  });
  if (weight.empty() || weight.size() > kMaxTensorName || !printable) {
    return FileError(path,
                     absl::StrFormat("name of the weight: got %s of %d bytes, allowed 1 to %d "
                                     "of printable ASCII",
                                     formats::Shown(weight), weight.size(), kMaxTensorName));
  }
  const std::string_view stem = weight;
  return Choice{weight, stem.ends_with("weight")
                            ? absl::StrCat(std::string(stem.substr(0, stem.size() - 6)), "bias")
                            : ""};
}

}  // namespace

absl::StatusOr<HeadSource> OpenHeadSource(const HeadRequest& request) {
  const absl::StatusOr<PathKind> kind = KindOf(request.root, request.path);
  if (!kind.ok()) return kind.status();
  const bool folder = *kind == PathKind::kFolder;
  absl::StatusOr<HeadTensors> tensors = folder ? HeadTensors::OfFolder(request.root, request.path)
                                               : HeadTensors::OfFile(request.root, request.path);
  if (!tensors.ok()) return tensors.status();
  absl::StatusOr<Settings> settings = folder
                                          ? Settings::OfFolder(request.root, request.path)
                                          : Settings::OfMetadata(request.path, tensors->header());
  if (!settings.ok()) return settings.status();

  HeadSource head;
  if (!tensors->warning().empty()) head.warnings.push_back(tensors->warning());
  LOGITD_RETURN_IF_ERROR(CheckKind(*tensors, *settings));
  absl::StatusOr<Choice> choice = ChooseKnown(*tensors, *settings, &head.warnings);
  if (choice.ok() && choice->weight.empty()) {
    choice = ChooseOnlyMatrix(*tensors, request.path, folder);
  }
  if (!choice.ok()) return choice.status();
  absl::StatusOr<StoredTensor> found = tensors->Get(choice->weight, {-1, -1});
  if (!found.ok()) return found.status();
  head.weight = *std::move(found);
  if (!choice->bias.empty() && tensors->Has(choice->bias)) {
    found = tensors->Get(choice->bias, {head.weight.shape[0]});
    if (!found.ok()) return found.status();
    head.bias = *std::move(found);
  }
  LOGITD_RETURN_IF_ERROR(ReadSettings(*settings, request, &head));
  if (request.final_norm) LOGITD_RETURN_IF_ERROR(FindNorm(*tensors, *settings, &head));
  if (const std::string type = settings->Text("model_type"); !type.empty() && !IsSurveyed(type)) {
    head.warnings.push_back(
        absl::StrFormat("model_type %s is not known; its logits are taken as the product with %s. "
                        "Compare some with "
                        "the model's own",
                        formats::Shown(type), head.weight.name));
  }
  return head;
}

}  // namespace logitd::engine

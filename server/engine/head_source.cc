#include "server/engine/head_source.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <string_view>
#include <utility>
#include <variant>

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

constexpr char kTies[] = "tie_word_embeddings";
// LFM2's own name for it, which wins.
constexpr char kOtherTies[] = "tie_embedding";
constexpr std::string_view kLfm2 = "lfm2";  // at the start of model_type

constexpr char kQuantMethod[] = "quant_method";  // in the object "quantization_config"

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
    {"dim_model_base", false, true},              // MiniCPM: its ratio to the width
};
constexpr char kLogitsScalingMultiplies[] = "hyperclovax";  // as part of model_type
// Settings with the softcap; a model has one of them. Gemma and NanoChat, RecurrentGemma, xLSTM.
constexpr const char* kSoftcaps[] = {"final_logit_softcapping", "logits_soft_cap",
                                     "output_logit_soft_cap"};

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
constexpr const char* kOnePlusWeight[] = {
    "gemma",       "gemma2",           "gemma3",        "gemma3_text",
    "vaultgemma",  "qwen3_next",       "qwen3_5",       "qwen3_5_text",
    "qwen3_5_moe", "qwen3_5_moe_text", "minimax_m3_vl", "minimax_m3_vl_text"};
constexpr const char* kPlainGemmas[] = {"gemma3n", "gemma3n_text"};
constexpr const char* kAmbiguousFamilies[] = {"gemma",     "qwen3_next", "qwen3_5",
                                              "qwen4_exp", "minimax_m3", "step3p7"};

// The name of the bias that belongs to a weight; "": none could.
std::string BiasOf(const std::string& weight) {
  constexpr std::string_view kWeight = "weight";
  if (!weight.ends_with(kWeight)) return "";
  return weight.substr(0, weight.size() - kWeight.size()) + "bias";
}

// A model's settings. Keeps the first error.
class Settings {
 public:
  static absl::StatusOr<Settings> OfFolder(const std::string& root, const std::string& folder) {
    const std::string path = absl::StrCat(folder, "/config.json");
    const absl::StatusOr<std::string> text = ReadFile(root, path, kMaxConfigBytes);
    if (!text.ok()) return text.status();
    absl::StatusOr<formats::JsonFields> fields = formats::ReadJsonFields(
        path, *text, [](std::string_view, std::string_view) { return true; });
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
  template <typename... Args>
  absl::Status Error(const absl::FormatSpec<Args...>& format, const Args&... args) const {
    return FileError(where_, format, args...);
  }

  // "" without one.
  std::string type() const { return TextOf(Find("model_type")); }
  // The scheme that a quantised model states; "" without one.
  std::string quant_method() const {
    const auto it = fields_.find({"quantization_config", kQuantMethod});
    return TextOf(it != fields_.end() ? &it->second : nullptr);
  }

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

  // Also where it is null.
  bool Has(const char* key) const { return !All(key).empty(); }

  // The stated value: true if it is true anywhere, false if it is false or null wherever it is
  // there.
  std::optional<bool> Stated(const char* key) {
    std::optional<bool> stated;
    for (const formats::JsonValue* each : All(key)) {
      const auto* value = std::get_if<bool>(each);
      if (!IsNull(*each) && value == nullptr) Fail(key, *each, "true or false");
      stated = stated.value_or(false) || (value != nullptr && *value);
    }
    return stated;
  }

  // The key that says whether the embeddings are the head.
  const char* TiesKey() const {
    return type().starts_with(kLfm2) && Has(kOtherTies) ? kOtherTies : kTies;
  }

  // True if the embeddings are the head; nothing if neither the settings nor the model_type tell.
  std::optional<bool> Ties() {
    std::optional<bool> ties = Stated(TiesKey());
    for (const formats::JsonValue* each : All("model_type")) {
      const std::optional<ModelFamily> family = FamilyOf(TextOf(each));
      if (!ties.has_value() && family.has_value()) ties = family->ties;
    }
    return ties;
  }

  // Both models of an encoder-decoder, or the only one, say so.
  bool IsEncoderDecoder() const {
    bool stated = false;
    for (const formats::JsonValue* each : All("is_encoder_decoder")) {
      if (*each == formats::JsonValue(false)) return false;
      stated = stated || *each == formats::JsonValue(true);
    }
    return stated;
  }

 private:
  Settings(std::string where, formats::JsonFields fields)
      : where_(std::move(where)), fields_(std::move(fields)) {}

  static bool IsNull(const formats::JsonValue& value) {
    return std::holds_alternative<std::monostate>(value);
  }
  static std::string TextOf(const formats::JsonValue* value) {
    const auto* text = value != nullptr ? std::get_if<std::string>(value) : nullptr;
    return text != nullptr ? *text : "";
  }

  // The inner model's setting before that of the whole model.
  std::vector<const formats::JsonValue*> All(const char* key) const {
    std::vector<const formats::JsonValue*> values;
    for (const char* object : {"text_config", ""}) {
      const auto it = fields_.find({object, key});
      if (it != fields_.end()) values.push_back(&it->second);
    }
    return values;
  }

  // The first that is not null; null: there is none.
  const formats::JsonValue* Find(const char* key) const {
    for (const formats::JsonValue* value : All(key)) {
      if (!IsNull(*value)) return value;
    }
    return nullptr;
  }

  void Fail(const char* key, const formats::JsonValue& value, const char* allowed) {
    if (!status_.ok()) return;
    status_ = Error("%s: got %s, allowed %s", key, formats::ShownValue(value), allowed);
  }

  std::string where_;
  formats::JsonFields fields_;
  absl::Status status_;
};

// Passes NaN and infinities on: CheckHead refuses them.
absl::Status ToFloat(const Settings& settings, const char* what, double value, float* to) {
  constexpr float kLeast = std::numeric_limits<float>::min();
  constexpr float kMost = std::numeric_limits<float>::max();
  if (std::isfinite(value) && value != 0 && (std::abs(value) < kLeast || std::abs(value) > kMost)) {
    return settings.Error("%s: got %g, allowed 0, or a magnitude of %g to %g", what, value, kLeast,
                          kMost);
  }
  *to = static_cast<float>(value);
  return absl::OkStatus();
}

// All scales of the settings as one factor of the logits.
absl::StatusOr<double> ScaleOf(Settings& settings, const HeadSource& head) {
  double factor = 1.0;
  for (const Scale& scale : kScales) {
    const std::string_view key = scale.key;
    const bool is_base = key == "dim_model_base";
    if (is_base) settings.Size(scale.key);  // refuses what is not a size
    const std::optional<double> value = settings.Number(scale.key);
    if (!value.has_value()) continue;
    const bool divides =
        scale.divides &&
        !(key == "logits_scaling" && absl::StrContains(settings.type(), kLogitsScalingMultiplies));
    if (divides && *value == 0) {
      return settings.Error("%s: got 0, allowed any other number", scale.key);
    }
    if (scale.of_hidden && head.bias.has_value()) {
      return settings.Error("%s: got one and a bias, allowed one of them", scale.key);
    }
    factor = divides ? factor / *value : factor * *value;
    if (is_base) factor /= static_cast<double>(head.weight.shape[1]);
  }
  return factor;
}

absl::Status CheckNeeded(Settings& settings) {
  const std::string type = settings.type();
  for (const NeededSetting& needed : kNeededSettings) {
    if (needed.model_type != type || settings.Has(needed.key)) continue;
    return settings.Error(
        "%s: got none, allowed a number or null: a model of type %s has one by default", needed.key,
        type);
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
  LOGITD_RETURN_IF_ERROR(ToFloat(settings, "the scale of the logits", *scale, &head->scale));
  LOGITD_RETURN_IF_ERROR(ToFloat(settings, softcap, cap, &head->softcap));
  head->vocab = request.vocab > 0 ? request.vocab : stated.value_or(stored);
  if (head->vocab > stored) {
    const std::string got = absl::StrFormat("got %d, allowed 1 to %d, the rows of tensor %s",
                                            head->vocab, stored, formats::Shown(head->weight.name));
    return request.vocab > 0 ? FileError(head->weight.file->path(), "vocab: %s", got)
                             : settings.Error("vocab_size: %s", got);
  }
  return absl::OkStatus();
}

// Refuses models that normalise their head's weight: with the weight as it is stored, their logits
// would be wrong without a sign of it.
absl::Status CheckNormalised(Settings& settings) {
  const std::string type = settings.type();
  if (absl::StrContains(type, kBaichuan) &&
      (type != kBaichuan || settings.Size("vocab_size") != kBaichuan1Vocab)) {
    return settings.Error(
        "model_type: got %s, which normalises the weight of its head; "
        "allowed is only its first version, with a vocab_size of %d",
        formats::Shown(type), kBaichuan1Vocab);
  }
  settings.RefuseTrue(kNormHead);
  return settings.status();
}

// Refuses models whose logits are not a product with the last hidden states.
absl::Status CheckKind(const HeadTensors& tensors, Settings& settings) {
  LOGITD_RETURN_IF_ERROR(CheckNormalised(settings));
  // T5 scales its states if it ties its embeddings; BART and others add a bias.
  if (settings.IsEncoderDecoder() && settings.Ties() != false) {
    return settings.Error(
        "is_encoder_decoder: got true with tied embeddings, allowed false: such models "
        "change their logits in ways that are not known");
  }
  if (tensors.Has(kOtherBias)) {
    return settings.Error(
        "tensor '%s': got one, allowed none: only encoder-decoder models add it to their logits",
        kOtherBias);
  }
  // The heads of masked language models first transform the states.
  const std::string dense = tensors.OfHead("dense.weight");
  if (!dense.empty()) {
    return settings.Error(
        "tensor '%s': got one, allowed none: the head must be one matrix and a bias", dense);
  }
  return absl::OkStatus();
}

absl::Status FindNorm(HeadTensors& tensors, Settings& settings, HeadSource* head) {
  const std::string name = tensors.FirstOf(kNorms);
  if (name.empty()) {
    return settings.Error("final norm: got none, allowed one of the tensors %s",
                          absl::StrJoin(kNorms, ", "));
  }
  const std::string bias = BiasOf(name);
  if (tensors.Has(bias)) {
    return settings.Error("final norm: got a LayerNorm with the bias %s, allowed an RMSNorm",
                          formats::Shown(bias));
  }
  const std::optional<double> epsilon = settings.Number("rms_norm_eps");
  LOGITD_RETURN_IF_ERROR(settings.status());
  if (!epsilon.has_value()) {
    return settings.Error(
        "rms_norm_eps: got none, allowed a number: only an RMSNorm can be the final norm");
  }
  LOGITD_RETURN_IF_ERROR(ToFloat(settings, "rms_norm_eps", *epsilon, &head->norm_epsilon));
  const std::string type = settings.type();
  const bool doubtful = std::ranges::any_of(
      kAmbiguousFamilies, [&](std::string_view family) { return type.find(family) != type.npos; });
  if (std::ranges::find(kOnePlusWeight, type) != std::end(kOnePlusWeight)) {
    head->norm_offset = 1.0f;
  } else if (doubtful && std::ranges::find(kPlainGemmas, type) == std::end(kPlainGemmas)) {
    return settings.Error(
        "model_type: got %s, whose norm multiplies by weight or by 1 + weight, which is not "
        "known; allowed with a norm %s, %s",
        formats::Shown(type), absl::StrJoin(kOnePlusWeight, ", "),
        absl::StrJoin(kPlainGemmas, ", "));
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
  const std::string method = settings.quant_method();
  return absl::StrFormat(
      "%s is of a matrix quantised by %s%s, allowed F32, F16, BF16", formats::Shown(part.name),
      part.scheme,
      method.empty() ? "" : absl::StrFormat(" (%s: %s)", kQuantMethod, formats::Shown(method)));
}

absl::Status CheckNotQuantised(const HeadTensors& tensors, const Settings& settings,
                               const std::string& weight) {
  const std::optional<QuantisedPart> part = tensors.QuantisedPartOf(weight);
  if (!part.has_value()) return absl::OkStatus();
  return settings.Error("head: got %s, and %s", formats::Shown(weight),
                        QuantisedText(*part, settings));
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
  const std::string type = settings.type();
  std::string got = "none";
  if (settings.Stated(key).has_value()) {
    got = "false";
  } else if (settings.Ties().has_value()) {
    absl::StrAppend(&got, ", which means false for model_type ", formats::Shown(type));
  } else if (!type.empty()) {
    absl::StrAppend(&got, ", and the default of model_type ", formats::Shown(type),
                    " is not known");
  }
  return settings.Error("%s: got %s, allowed true if there is no head; %s", key, got,
                        LookedFor(tensors, settings));
}

// The embeddings, if the model ties them. Without a model_type it is taken to do so, since nothing
// says otherwise.
absl::StatusOr<Choice> ChooseEmbeddings(const HeadTensors& tensors, Settings& settings,
                                        std::vector<std::string>* warnings) {
  const std::optional<bool> ties = settings.Ties();
  const std::optional<QuantisedPart> part = tensors.QuantisedHead();
  const std::string embeddings = tensors.Embeddings();
  if (!ties.has_value() && settings.type().empty() && !part.has_value()) {
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
    return settings.Error("head: got none; %s", LookedFor(tensors, settings));
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
        path,
        "no tensor 'lm_head.weight', 'model.embed_tokens.weight' or another name of a "
        "known head; there: %s%s",
        tensors.Listed(),
        folder ? ""
               : absl::StrFormat("; tensors of 2 dimensions: got %d, allowed 1", matrices.size()));
  }
  const std::string& weight = matrices[0];
  // The log and the list of heads show this name, and only the file gives it.
  if (weight.empty() || weight.size() > kMaxTensorName || !IsPrintable(weight)) {
    return FileError(path,
                     "name of the weight: got %s of %d bytes, allowed 1 to %d of printable ASCII",
                     formats::Shown(weight), weight.size(), kMaxTensorName);
  }
  return Choice{weight, BiasOf(weight)};
}

}  // namespace

absl::StatusOr<HeadSource> OpenHeadSource(const HeadRequest& request) {
  const bool folder = IsFolder(request.root, request.path);
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
  const std::string type = settings->type();
  const std::optional<ModelFamily> family = FamilyOf(type);
  if (!type.empty() && (!family.has_value() || !family->surveyed)) {
    head.warnings.push_back(absl::StrFormat(
        "model_type %s is not known; its logits are taken as the product with %s. Compare some "
        "with the model's own",
        formats::Shown(type), head.weight.name));
  }
  return head;
}

}  // namespace logitd::engine

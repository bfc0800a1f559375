// Families of models whose heads are known.
#ifndef LOGITD_SERVER_ENGINE_MODEL_TYPES_H_
#define LOGITD_SERVER_ENGINE_MODEL_TYPES_H_

#include <optional>
#include <string_view>

namespace logitd::engine {

struct ModelFamily {
  // The default of `tie_word_embeddings`, as transformers 4.57 and 5.23 both have it. For a
  // multimodal model: the default of its text model.
  bool ties;
  // One of the causal models of transformers 5.23, all of which were looked at: what changes their
  // logits is either done or refused. The others are multimodal models, and text models inside
  // them.
  bool surveyed;
};

// By the `model_type` of config.json. Nothing for a type that neither version has, or that has no
// head. Thread-safe.
std::optional<ModelFamily> FamilyOf(std::string_view model_type);

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_MODEL_TYPES_H_

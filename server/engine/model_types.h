// Families of models whose heads are known.
#ifndef LOGITD_SERVER_ENGINE_MODEL_TYPES_H_
#define LOGITD_SERVER_ENGINE_MODEL_TYPES_H_

#include <optional>
#include <string_view>

namespace logitd::engine {

// Whether a `model_type` of config.json is one of the causal models of transformers 5.23, all of
// which were looked at: what changes their logits is either done or refused. Thread-safe.
bool IsSurveyed(std::string_view model_type);

// The default of `tie_word_embeddings` for a `model_type`, as transformers 4.57 and 5.23 both have it;
// nothing for a type that neither has, or that has no head. For a multimodal model: the default of its
// text model. Thread-safe.
std::optional<bool> TiesByDefault(std::string_view model_type);

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_MODEL_TYPES_H_

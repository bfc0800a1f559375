// A small GRU language model in plain C++ (f32), enough to give logitd real logits to work on.
//
// A model directory holds
//   config.json        {"architecture": "gru_lm", "vocab_size": V, "embed_dim": E,
//                       "hidden_size": H, "num_layers": L, "bos_token_id": B,
//                       "tie_embeddings": bool}
//   vocab.json         array of V token strings in the order of ids; a code point 0..255 is a byte
//   model.safetensors  model.embed_tokens.weight [V,E]
//                      of each layer l from 0: model.layers.{l}.weight_ih [3H,in],
//                      .weight_hh [3H,H], .bias_ih [3H], .bias_hh [3H]
//                      optional: model.proj.weight [D,H] with model.proj.bias [D]
//                      lm_head.weight [V,D], unless the embeddings are tied
//                      optional: lm_head.bias [V]
//
// One layer, with gates stacked r, z, n as PyTorch stacks them:
//   r = s(Wir x + bir + Whr h + bhr), z = s(Wiz x + biz + Whz h + bhz),
//   n = tanh(Win x + bin + r * (Whn h + bhn)), h' = (1 - z) * n + z * h.
#ifndef LOGITD_CLIENT_LANGUAGE_MODEL_H_
#define LOGITD_CLIENT_LANGUAGE_MODEL_H_

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace logitd::client {

// Immutable after Load, hence thread-safe; a State belongs to one thread at a time.
class LanguageModel {
 public:
  struct State {
    std::vector<std::vector<float>> hidden;  // [layers][H]
  };

  // NOT_FOUND: a file or tensor is missing. INVALID_ARGUMENT: a field, a shape or a vocabulary that
  // does not fit.
  static absl::StatusOr<LanguageModel> Load(const std::string& directory);

  int32_t vocab_size() const { return vocab_size_; }
  int32_t hidden_dim() const { return head_.cols; }  // D, what Step gives and Logits takes
  int32_t bos_token_id() const { return bos_; }

  // Greedy longest match over the bytes of `text`, from the left. Never fails, never gives bos.
  std::vector<int32_t> Tokenize(absl::string_view text) const;

  // The bytes of a token, 0 <= token < V; of several, one after the other, without bos.
  const std::string& TokenBytes(int32_t token) const { return vocab_[token]; }
  std::string Detokenize(absl::Span<const int32_t> tokens) const;

  State InitialState() const;  // zeros

  // Reads one token, 0 <= token < V; gives the hidden state [D] that meets the head.
  std::vector<float> Step(State& state, int32_t token) const;

  // `hidden` [D] -> logits [V].
  std::vector<float> Logits(absl::Span<const float> hidden) const;

 private:
  struct Matrix {
    int32_t rows = 0;
    int32_t cols = 0;
    std::vector<float> values;  // row-major
  };
  struct Layer {
    Matrix weight_ih, weight_hh;
    std::vector<float> bias_ih, bias_hh;
  };
  class Loader;

  static void Multiply(const Matrix& matrix, absl::Span<const float> x,
                       absl::Span<const float> bias, std::vector<float>& out);

  int32_t vocab_size_ = 0;
  int32_t hidden_size_ = 0;
  int32_t bos_ = 0;
  std::vector<std::string> vocab_;
  std::unordered_map<std::string, int32_t> token_of_;  // every token but bos
  size_t longest_token_ = 0;
  Matrix embedding_;
  std::vector<Layer> layers_;
  Matrix projection_;  // empty: none
  std::vector<float> projection_bias_;
  Matrix head_;  // a copy of the embedding where tied
  std::vector<float> head_bias_;
};

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_LANGUAGE_MODEL_H_

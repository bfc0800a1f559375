#include "client/language_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/tensor_file.h"
#include "formats/half.h"

namespace logitd::client {
namespace {

using nlohmann::json;

absl::StatusOr<json> ReadJson(const std::string& path) {
  std::ifstream in(path);
  if (!in) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened"));
  json value = json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded()) return absl::InvalidArgumentError(absl::StrCat(path, ": not JSON"));
  return value;
}

// A string of code points 0..255, in UTF-8, to the bytes it stands for.
bool BytesOfLatin1(absl::string_view utf8, std::string* out) {
  out->clear();
  for (size_t i = 0; i < utf8.size(); ++i) {
    const uint8_t c = utf8[i];
    if (c < 0x80) {
      out->push_back(static_cast<char>(c));
    } else if ((c == 0xc2 || c == 0xc3) && i + 1 < utf8.size()) {
      out->push_back(static_cast<char>((c & 3) << 6 | (utf8[++i] & 0x3f)));
    } else {
      return false;
    }
  }
  return true;
}

float Sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

}  // namespace

// Reads what Load needs, and remembers the first error.
class LanguageModel::Loader {
 public:
  Loader(std::string config_path, json config, SafetensorsFile tensors)
      : config_path_(std::move(config_path)),
        config_(std::move(config)),
        tensors_(std::move(tensors)),
        names_(tensors_.names()) {}

  const absl::Status& status() const { return status_; }

  int32_t Int(const char* key, int64_t least, int64_t most) {
    const auto it = config_.find(key);
    if (it == config_.end() || !it->is_number_integer() || it->get<int64_t>() < least ||
        it->get<int64_t>() > most) {
      Fail(absl::StrFormat("%s: %s is %s; allowed: %d..%d", config_path_, key,
                           it == config_.end() ? "missing" : it->dump(), least, most));
      return static_cast<int32_t>(least);
    }
    return it->get<int32_t>();
  }

  bool Bool(const char* key) {
    const auto it = config_.find(key);
    if (it == config_.end() || !it->is_boolean()) {
      Fail(absl::StrFormat("%s: %s is %s; allowed: true, false", config_path_, key,
                           it == config_.end() ? "missing" : it->dump()));
      return false;
    }
    return it->get<bool>();
  }

  bool Has(const std::string& name) const {
    return std::binary_search(names_.begin(), names_.end(), name);
  }

  // A dimension of -1 takes what the file has, above 0.
  Matrix Get(const std::string& name, int64_t rows, int64_t cols) {
    return Read(name, {rows, cols});
  }
  std::vector<float> Get(const std::string& name, int64_t size) {
    return Read(name, {size}).values;
  }

 private:
  Matrix Read(const std::string& name, const std::vector<int64_t>& want) {
    if (!status_.ok()) return {};
    absl::StatusOr<FileTensor> tensor = tensors_.Find(name);
    if (!tensor.ok()) {
      status_ = tensor.status();
      return {};
    }
    bool fits = tensor->shape.size() == want.size();
    for (size_t i = 0; fits && i < want.size(); ++i) {
      fits = want[i] == -1 ? tensor->shape[i] > 0 && tensor->shape[i] <= 1 << 20
                           : tensor->shape[i] == want[i];
    }
    if (!fits) {
      Fail(absl::StrFormat("tensor %s has shape [%s]; by config.json it is [%s]%s", name,
                           absl::StrJoin(tensor->shape, ","), absl::StrJoin(want, ","),
                           absl::c_count(want, -1) > 0 ? " (-1: any)" : ""));
      return {};
    }
    Matrix matrix;
    matrix.rows = static_cast<int32_t>(tensor->shape[0]);
    matrix.cols = tensor->shape.size() > 1 ? static_cast<int32_t>(tensor->shape[1]) : 1;
    matrix.values.resize(static_cast<size_t>(matrix.rows) * matrix.cols);
    if (tensor->dtype == v1::DTYPE_F32) {
      std::memcpy(matrix.values.data(), tensor->bytes.data(), tensor->bytes.size());
      return matrix;
    }
    for (size_t i = 0; i < matrix.values.size(); ++i) {
      uint16_t bits;
      std::memcpy(&bits, tensor->bytes.data() + 2 * i, 2);
      matrix.values[i] =
          tensor->dtype == v1::DTYPE_BF16 ? formats::BF16ToFloat(bits) : formats::F16ToFloat(bits);
    }
    return matrix;
  }

  void Fail(const std::string& text) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(text);
  }

  const std::string config_path_;
  const json config_;
  const SafetensorsFile tensors_;
  const std::vector<std::string> names_;
  absl::Status status_;
};

absl::StatusOr<LanguageModel> LanguageModel::Load(const std::string& directory) {
  const std::string config_path = directory + "/config.json";
  absl::StatusOr<json> config = ReadJson(config_path);
  if (!config.ok()) return config.status();
  if (!config->is_object() || config->value("architecture", json()) != "gru_lm") {
    return absl::InvalidArgumentError(
        absl::StrCat(config_path, ": architecture is not \"gru_lm\", the only one known here"));
  }
  absl::StatusOr<SafetensorsFile> tensors = SafetensorsFile::Open(directory + "/model.safetensors");
  if (!tensors.ok()) return tensors.status();

  Loader loader(config_path, *std::move(config), *std::move(tensors));
  LanguageModel model;
  const int32_t vocab = loader.Int("vocab_size", 256, 1 << 20);
  const int32_t embed = loader.Int("embed_dim", 1, 1 << 16);
  const int32_t hidden = loader.Int("hidden_size", 1, 1 << 16);
  const int32_t layers = loader.Int("num_layers", 1, 64);
  model.vocab_size_ = vocab;
  model.hidden_size_ = hidden;
  model.bos_ = loader.Int("bos_token_id", 0, vocab - 1);
  const bool tied = loader.Bool("tie_embeddings");
  model.embedding_ = loader.Get("model.embed_tokens.weight", vocab, embed);
  for (int32_t l = 0; l < layers; ++l) {
    const std::string prefix = absl::StrCat("model.layers.", l, ".");
    Layer layer;
    layer.weight_ih = loader.Get(prefix + "weight_ih", 3 * hidden, l == 0 ? embed : hidden);
    layer.weight_hh = loader.Get(prefix + "weight_hh", 3 * hidden, hidden);
    layer.bias_ih = loader.Get(prefix + "bias_ih", 3 * hidden);
    layer.bias_hh = loader.Get(prefix + "bias_hh", 3 * hidden);
    model.layers_.push_back(std::move(layer));
  }
  int64_t dim = hidden;
  if (loader.Has("model.proj.weight")) {
    model.projection_ = loader.Get("model.proj.weight", -1, hidden);
    dim = model.projection_.rows;
    model.projection_bias_ = loader.Get("model.proj.bias", dim);
  }
  model.head_ = loader.Get(tied ? "model.embed_tokens.weight" : "lm_head.weight", vocab, dim);
  if (loader.Has("lm_head.bias")) model.head_bias_ = loader.Get("lm_head.bias", vocab);
  if (!loader.status().ok()) return loader.status();

  const std::string vocab_path = directory + "/vocab.json";
  absl::StatusOr<json> tokens = ReadJson(vocab_path);
  if (!tokens.ok()) return tokens.status();
  if (!tokens->is_array() || tokens->size() != static_cast<size_t>(vocab)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: not an array of the %d strings that vocab_size says", vocab_path, vocab));
  }
  for (int32_t id = 0; id < vocab; ++id) {
    std::string bytes;
    const json& token = (*tokens)[id];
    if (!token.is_string() || !BytesOfLatin1(token.get_ref<const std::string&>(), &bytes)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: entry %d is not a string of code points 0..255", vocab_path, id));
    }
    if (id != model.bos_) {
      if (bytes.empty() || !model.token_of_.emplace(bytes, id).second) {
        return absl::InvalidArgumentError(
            absl::StrFormat("%s: entry %d is empty or there twice", vocab_path, id));
      }
      model.longest_token_ = std::max(model.longest_token_, bytes.size());
    }
    model.vocab_.push_back(std::move(bytes));
  }
  for (int byte = 0; byte < 256; ++byte) {
    if (model.token_of_.count(std::string(1, static_cast<char>(byte))) == 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: byte %d is not a token; all 256 must be", vocab_path, byte));
    }
  }
  return model;
}

std::vector<int32_t> LanguageModel::Tokenize(absl::string_view text) const {
  std::vector<int32_t> tokens;
  while (!text.empty()) {
    for (size_t size = std::min(longest_token_, text.size()); size > 0; --size) {
      const auto it = token_of_.find(std::string(text.substr(0, size)));
      if (it == token_of_.end()) continue;
      tokens.push_back(it->second);
      text.remove_prefix(size);
      break;
    }
  }
  return tokens;
}

std::string LanguageModel::Detokenize(absl::Span<const int32_t> tokens) const {
  std::string text;
  for (int32_t token : tokens) {
    if (token != bos_) text += vocab_[token];
  }
  return text;
}

LanguageModel::State LanguageModel::InitialState() const {
  return {std::vector<std::vector<float>>(layers_.size(), std::vector<float>(hidden_size_, 0.0f))};
}

void LanguageModel::Multiply(const Matrix& matrix, absl::Span<const float> x,
                             absl::Span<const float> bias, std::vector<float>& out) {
  out.resize(matrix.rows);
  for (int32_t row = 0; row < matrix.rows; ++row) {
    const float* w = matrix.values.data() + static_cast<size_t>(row) * matrix.cols;
    float sum = 0.0f;
    for (int32_t col = 0; col < matrix.cols; ++col) sum += w[col] * x[col];
    out[row] = bias.empty() ? sum : sum + bias[row];
  }
}

std::vector<float> LanguageModel::Step(State& state, int32_t token) const {
  const int32_t hidden = hidden_size_;
  absl::Span<const float> x =
      absl::MakeConstSpan(embedding_.values)
          .subspan(static_cast<size_t>(token) * embedding_.cols, embedding_.cols);
  std::vector<float> from_input;
  std::vector<float> from_hidden;
  for (size_t l = 0; l < layers_.size(); ++l) {
    std::vector<float>& h = state.hidden[l];
    Multiply(layers_[l].weight_ih, x, layers_[l].bias_ih, from_input);
    Multiply(layers_[l].weight_hh, h, layers_[l].bias_hh, from_hidden);
    for (int32_t i = 0; i < hidden; ++i) {
      const float r = Sigmoid(from_input[i] + from_hidden[i]);
      const float z = Sigmoid(from_input[hidden + i] + from_hidden[hidden + i]);
      const float n = std::tanh(from_input[2 * hidden + i] + r * from_hidden[2 * hidden + i]);
      h[i] = (1.0f - z) * n + z * h[i];
    }
    x = h;
  }
  if (projection_.rows == 0) return std::vector<float>(x.begin(), x.end());
  std::vector<float> out;
  Multiply(projection_, x, projection_bias_, out);
  return out;
}

std::vector<float> LanguageModel::Logits(absl::Span<const float> hidden) const {
  std::vector<float> logits;
  Multiply(head_, hidden, head_bias_, logits);
  return logits;
}

}  // namespace logitd::client

// A language model small enough to follow by hand: E = H = 1, one layer, V = 259: the 256 bytes,
// "ab", "abc", bos.
#ifndef LOGITD_TESTS_CLIENT_TEST_MODEL_H_
#define LOGITD_TESTS_CLIENT_TEST_MODEL_H_

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "formats/half.h"
#include "tests/client/test_files.h"

namespace logitd::testing {

struct TinyModel {
  struct Tensor {
    std::vector<int64_t> shape;
    std::vector<float> values;
  };

  TinyModel() {
    for (int byte = 0; byte < 256; ++byte) {
      std::string utf8;
      if (byte >= 0x80) utf8.push_back(static_cast<char>(0xc0 | byte >> 6));
      utf8.push_back(static_cast<char>(byte >= 0x80 ? 0x80 | (byte & 0x3f) : byte));
      vocab.push_back(utf8);
    }
    for (const char* token : {"ab", "abc", "<bos>"}) vocab.push_back(token);
    config = {{"architecture", "gru_lm"}, {"vocab_size", 259}, {"embed_dim", 1},
              {"hidden_size", 1},         {"num_layers", 1},   {"bos_token_id", 258},
              {"tie_embeddings", false}};
    std::vector<float> embedding(259, 0.0f);
    embedding[258] = 0.5f;
    embedding['a'] = -1.0f;
    std::vector<float> head(259, 0.0f);
    head['a'] = 2.0f;
    head['b'] = -3.0f;
    std::vector<float> head_bias(259, 0.0f);
    head_bias['b'] = 1.0f;
    tensors["model.embed_tokens.weight"] = {{259, 1}, embedding};
    tensors["model.layers.0.weight_ih"] = {{3, 1}, {1, 2, -1}};
    tensors["model.layers.0.weight_hh"] = {{3, 1}, {0.5f, -0.5f, 0.25f}};
    tensors["model.layers.0.bias_ih"] = {{3}, {0.125f, 0.25f, 0.375f}};
    tensors["model.layers.0.bias_hh"] = {{3}, {-0.125f, 0.5f, 0.0625f}};
    tensors["lm_head.weight"] = {{259, 1}, head};
    tensors["lm_head.bias"] = {{259}, head_bias};
  }

  // Into `dir`; gives its path.
  std::string Write(const TempDir& dir) const {
    nlohmann::json header;
    std::string data;
    for (const auto& [name, tensor] : tensors) {
      const size_t begin = data.size();
      if (dtype == "F32") {
        data += BytesOf(tensor.values);
      } else {
        for (float value : tensor.values) {
          data += LittleEndian(
              dtype == "F16" ? formats::FloatToF16(value) : formats::FloatToBF16(value), 2);
        }
      }
      header[name] = {
          {"dtype", dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
    }
    dir.Write("model.safetensors", Safetensors(header.dump(), data));
    dir.Write("config.json", config.dump());
    dir.Write("vocab.json", vocab.dump());
    return dir.path("");
  }

  nlohmann::json config;
  nlohmann::json vocab;
  std::map<std::string, Tensor> tensors;
  std::string dtype = "F32";
};

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_CLIENT_TEST_MODEL_H_

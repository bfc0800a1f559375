#include "client/cli/sampling_params.h"

#include <google/protobuf/util/json_util.h>

#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace logitd::cli {
namespace {

template <typename Request>
absl::StatusOr<Request> LoadParams(const std::string& file) {
  Request params;
  if (file.empty()) return params;
  std::ifstream in(file, std::ios::binary);
  const std::string json{std::istreambuf_iterator<char>(in), {}};
  if (!in.good() && json.empty()) {
    return absl::NotFoundError(absl::StrFormat("--params: %s cannot be read", file));
  }
  const auto status = google::protobuf::util::JsonStringToMessage(json, &params);
  if (!status.ok()) {
    return absl::InvalidArgumentError(absl::StrFormat("--params: %s is not a %s in JSON: %s", file,
                                                      Request::descriptor()->full_name(),
                                                      status.ToString()));
  }
  if (params.dtype() != 0 || params.rows() != 0 || params.vocab() != 0 || !params.head().empty() ||
      params.hidden_size() != 0 || params.input_case() != Request::INPUT_NOT_SET) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--params: %s has dtype, rows, vocab, logits, head, hidden_size or hidden; allowed: "
        "parameters only (the rows come from the other flags)",
        file));
  }
  return params;
}

// The mask of allowed tokens with the bits of `ids`.
absl::StatusOr<std::string> MaskOf(const std::vector<int32_t>& ids, int64_t vocab) {
  std::string mask(static_cast<size_t>((vocab + 31) / 32 * 4), '\0');
  for (int32_t id : ids) {
    if (id < 0 || id >= vocab) {
      return absl::InvalidArgumentError(
          absl::StrFormat("--allow: got token %d, allowed 0..%d", id, vocab - 1));
    }
    mask[static_cast<size_t>(id) / 8] |= static_cast<char>(1 << id % 8);
  }
  return mask;
}

// Output `i`, from 0, of the generator SplitMix64 that starts at `start`.
// Source: Steele, Lea & Flood, Fast splittable pseudorandom number generators, OOPSLA 2014.
uint64_t SplitMix64(uint64_t start, uint64_t i) {
  uint64_t z = start + (i + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

}  // namespace

template <typename Request>
absl::StatusOr<Request> MakeParams(const SamplingFlags& flags, int64_t vocab) {
  absl::StatusOr<Request> loaded = LoadParams<Request>(flags.file);
  if (!loaded.ok()) return loaded;
  Request& params = *loaded;
  if (absl::Status good = Apply(flags.params, &params); !good.ok()) return good;
  if (!flags.logit_bias.empty()) {
    params.clear_logit_bias_count();
    params.clear_logit_bias_ids();
    params.clear_logit_bias();
  }
  for (const std::string& pair : flags.logit_bias) {
    const std::vector<std::string> sides = absl::StrSplit(pair, '=');
    int32_t id = 0;
    float value = 0;
    if (sides.size() != 2 || !absl::SimpleAtoi(sides[0], &id) ||
        !absl::SimpleAtof(sides[1], &value)) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "--logit-bias: got \"%s\", allowed ID=VALUE, like 17=-2.5 or 17=-inf", pair));
    }
    params.add_logit_bias_ids(id);
    params.add_logit_bias(value);
  }
  if (!flags.allow.empty()) {
    absl::StatusOr<std::string> mask = MaskOf(flags.allow, vocab);
    if (!mask.ok()) return mask.status();
    params.set_allowed_tokens(*std::move(mask));
    params.clear_allowed_tokens_mask();
  }
  if (params.seed().empty()) params.add_seed(0);
  return loaded;
}

template <typename Request>
void SpreadSeeds(const SamplingFlags& flags, int64_t rows, Request* params) {
  if (!flags.seeds.has_value()) return;
  params->clear_seed();
  for (int64_t row = 0; row < rows; ++row) {
    params->add_seed(SplitMix64(*flags.seeds, static_cast<uint64_t>(row)));
  }
}

template absl::StatusOr<v1::SampleRequest> MakeParams(const SamplingFlags&, int64_t);
template absl::StatusOr<v1::VerifyRequest> MakeParams(const SamplingFlags&, int64_t);
template void SpreadSeeds(const SamplingFlags&, int64_t, v1::SampleRequest*);
template void SpreadSeeds(const SamplingFlags&, int64_t, v1::VerifyRequest*);

}  // namespace logitd::cli

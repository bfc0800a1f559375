// logitctl softmax and logitctl softmax-backward.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/arena.h"
#include "client/cli/commands.h"
#include "client/cli/input.h"
#include "client/cli/output.h"
#include "client/cli/output_file.h"
#include "client/client.h"
#include "client/tensor_file.h"

namespace logitd::cli {
namespace {

// The sizes of a file as [batch, heads, queries, keys]: missing sizes in front are 1.
std::array<int64_t, 4> FourSizes(const std::vector<int64_t>& shape) {
  std::array<int64_t, 4> sizes = {1, 1, 1, 1};
  for (size_t i = 0; i < shape.size(); ++i) sizes[4 - shape.size() + i] = shape[i];
  return sizes;
}

absl::StatusOr<client::FileTensor> LoadRows(absl::string_view flag, const std::string& file) {
  absl::StatusOr<client::FileTensor> tensor = client::LoadTensor(file);
  if (tensor.ok() && tensor->shape.size() < 2) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: %s: shape: got [%d], allowed [queries,keys], [heads,queries,keys] or "
                        "[batch,heads,queries,keys]",
                        flag, file, tensor->shape[0]));
  }
  return tensor;
}

client::AttentionShape ShapeOf(const client::FileTensor& tensor) {
  const std::array<int64_t, 4> sizes = FourSizes(tensor.shape);
  return {.batch = sizes[0], .heads = sizes[1], .queries = sizes[2], .keys = sizes[3]};
}

// "L,R", each a number, or inf or -1.
absl::StatusOr<client::AttentionWindow> ParseWindow(const std::string& text, bool causal) {
  client::AttentionWindow window;
  if (causal) window.right = 0;
  if (text.empty()) return window;
  if (causal) {
    return absl::InvalidArgumentError(
        "--window next to a causal mask; allowed: one of them (causal is --window inf,0)");
  }
  const std::vector<std::string> sides = absl::StrSplit(text, ',');
  bool good = sides.size() == 2;
  for (size_t i = 0; good && i < 2; ++i) {
    int64_t keys = 0;
    if (sides[i] == "inf") continue;
    good = absl::SimpleAtoi(sides[i], &keys) && keys >= -1;
    if (keys >= 0) (i == 0 ? window.left : window.right) = keys;
  }
  if (good) return window;
  return absl::InvalidArgumentError(absl::StrFormat(
      "--window: got \"%s\", allowed L,R: how many keys a query sees to its left and right, each 0 "
      "or more, or inf (also -1)",
      text));
}

absl::StatusOr<std::vector<float>> LoadFloats(absl::string_view flag, const std::string& file) {
  std::vector<float> values;
  if (file.empty()) return values;
  const absl::StatusOr<client::FileTensor> tensor = client::LoadTensor(file);
  if (!tensor.ok()) return tensor.status();
  if (tensor->dtype != v1::DTYPE_F32) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: %s: dtype: got %s, allowed f32", flag,
                                                      file, client::DTypeShortName(tensor->dtype)));
  }
  values.resize(tensor->bytes.size() / sizeof(float));
  std::memcpy(values.data(), tensor->bytes.data(), tensor->bytes.size());
  return values;
}

// `name`: a value of --out-dtype; empty: `otherwise`.
v1::DType DTypeOf(const std::string& name, v1::DType otherwise) {
  if (name == "f32") return v1::DTYPE_F32;
  if (name == "f16") return v1::DTYPE_F16;
  if (name == "bf16") return v1::DTYPE_BF16;
  return otherwise;
}

// A file that will be written; "" is none.
absl::Status CheckOutput(absl::string_view flag, const std::string& file, v1::DType dtype) {
  if (file.empty()) return absl::OkStatus();
  absl::Status good = client::CheckSavable(file, dtype);
  return good.ok() ? CheckWritable(flag, file) : good;
}

// Leased memory with copies of the inputs, one after another, and room for the answer.
struct Shared {
  std::unique_ptr<client::Arena> arena;  // null: the inputs are sent
  std::vector<absl::string_view> inputs;
  absl::Span<char> out;  // empty: the answer comes in the message
};

// `address`: of --arena; empty: the inputs stay where they are.
absl::StatusOr<Shared> MoveToArena(const std::string& address,
                                   const std::vector<absl::string_view>& inputs,
                                   int64_t out_bytes) {
  constexpr size_t kAlignment = 64;
  const auto aligned = [](size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  };
  Shared shared;
  if (address.empty()) {
    shared.inputs = inputs;
    return shared;
  }
  size_t bytes = static_cast<size_t>(out_bytes);
  for (const absl::string_view input : inputs) bytes += aligned(input.size());
  auto lease = client::Arena::Lease(address, static_cast<int64_t>(bytes));
  if (!lease.ok()) return lease.status();
  shared.arena = *std::move(lease);
  char* to = shared.arena->data();
  for (const absl::string_view input : inputs) {
    std::copy(input.begin(), input.end(), to);
    shared.inputs.emplace_back(to, input.size());
    to += aligned(input.size());
  }
  shared.out = {to, static_cast<size_t>(out_bytes)};
  return shared;
}

int64_t OutBytes(const client::FileTensor& tensor, v1::DType out_dtype) {
  return static_cast<int64_t>(tensor.bytes.size()) / client::DTypeSize(tensor.dtype) *
         client::DTypeSize(out_dtype);
}

// The answer, wherever it is.
absl::string_view Values(const client::AttentionResult& result, const Shared& shared) {
  if (shared.arena == nullptr) return result.values;
  return {shared.out.data(), shared.out.size()};
}

}  // namespace

int RunSoftmax(const Session& session, const SoftmaxFlags& flags) {
  const absl::StatusOr<client::FileTensor> scores = LoadRows("--scores", flags.scores);
  if (!scores.ok()) return BadInput(scores.status());
  const absl::StatusOr<client::AttentionWindow> window =
      ParseWindow(flags.window, flags.mask == "causal");
  if (!window.ok()) return BadInput(window.status());
  absl::StatusOr<std::vector<float>> sinks = LoadFloats("--sinks", flags.sinks);
  if (!sinks.ok()) return BadInput(sinks.status());
  client::AttentionSoftmaxRequest request = {
      .dtype = scores->dtype,
      .shape = ShapeOf(*scores),
      .scores = scores->bytes,
      .scale = flags.scale,
      .window = *window,
      .sinks = *std::move(sinks),
      .out_dtype = DTypeOf(flags.out_dtype, scores->dtype),
      .want_logsumexp = !flags.logsumexp.empty(),
  };
  client::FileTensor mask;
  if (flags.mask != "none" && flags.mask != "causal") {
    absl::StatusOr<client::FileTensor> loaded = client::LoadTensor(flags.mask, /*allow_bool=*/true);
    if (!loaded.ok()) return BadInput(loaded.status());
    mask = *std::move(loaded);
    request.mask = {.kind = mask.boolean ? v1::MASK_KIND_BOOL : v1::MASK_KIND_ADDITIVE,
                    .dtype = mask.dtype,
                    .shape = FourSizes(mask.shape),
                    .bytes = mask.bytes};
  }
  absl::Status good = CheckOutput("--out", flags.out, request.out_dtype);
  if (good.ok()) good = CheckOutput("--logsumexp", flags.logsumexp, v1::DTYPE_F32);
  if (!good.ok()) return BadInput(good);
  const absl::StatusOr<Shared> shared =
      MoveToArena(flags.arena, {scores->bytes}, OutBytes(*scores, request.out_dtype));
  if (!shared.ok()) return NoArena(session, shared.status());
  request.scores = shared->inputs[0];
  request.probs = shared->out;
  request.arena = shared->arena.get();
  const absl::StatusOr<client::AttentionResult> result = session.client().AttentionSoftmax(request);
  if (!result.ok()) return session.CallFailed(result.status());
  absl::Status saved =
      client::SaveTensor(flags.out, result->dtype, scores->shape, Values(*result, *shared));
  if (saved.ok() && !flags.logsumexp.empty()) {
    std::vector<int64_t> shape = scores->shape;
    shape.pop_back();
    saved = client::SaveTensor(flags.logsumexp, v1::DTYPE_F32, shape,
                               {reinterpret_cast<const char*>(result->logsumexp.data()),
                                result->logsumexp.size() * sizeof(float)});
  }
  if (!saved.ok()) return OutputFileLost(saved);
  return session.Show(
      AttentionOutput{.result = &*result, .shape = scores->shape, .file = flags.out});
}

int RunSoftmaxBackward(const Session& session, const SoftmaxBackwardFlags& flags) {
  const absl::StatusOr<client::FileTensor> probs = LoadRows("--probs", flags.probs);
  if (!probs.ok()) return BadInput(probs.status());
  const absl::StatusOr<client::FileTensor> d_probs = LoadRows("--d-probs", flags.d_probs);
  if (!d_probs.ok()) return BadInput(d_probs.status());
  if (d_probs->shape != probs->shape || d_probs->dtype != probs->dtype) {
    return BadInput(absl::InvalidArgumentError(
        absl::StrFormat("--d-probs: got [%s] of %s, allowed [%s] of %s as --probs",
                        absl::StrJoin(d_probs->shape, ","), client::DTypeShortName(d_probs->dtype),
                        absl::StrJoin(probs->shape, ","), client::DTypeShortName(probs->dtype))));
  }
  const absl::StatusOr<client::AttentionWindow> window = ParseWindow(flags.window, flags.causal);
  if (!window.ok()) return BadInput(window.status());
  absl::StatusOr<std::vector<float>> sinks = LoadFloats("--sinks", flags.sinks);
  if (!sinks.ok()) return BadInput(sinks.status());
  const absl::StatusOr<std::vector<float>> logsumexp = LoadFloats("--logsumexp", flags.logsumexp);
  if (!logsumexp.ok()) return BadInput(logsumexp.status());
  const v1::DType out_dtype = DTypeOf(flags.out_dtype, probs->dtype);
  if (absl::Status good = CheckOutput("--out", flags.out, out_dtype); !good.ok()) {
    return BadInput(good);
  }
  const absl::StatusOr<Shared> shared =
      MoveToArena(flags.arena, {probs->bytes, d_probs->bytes}, OutBytes(*probs, out_dtype));
  if (!shared.ok()) return NoArena(session, shared.status());
  const client::AttentionSoftmaxBackwardRequest request = {
      .dtype = probs->dtype,
      .shape = ShapeOf(*probs),
      .probs = shared->inputs[0],
      .d_probs = shared->inputs[1],
      .scale = flags.scale,
      .window = *window,
      .sinks = *std::move(sinks),
      .logsumexp = *logsumexp,
      .out_dtype = out_dtype,
      .d_scores = shared->out,
      .arena = shared->arena.get(),
  };
  const absl::StatusOr<client::AttentionResult> result =
      session.client().AttentionSoftmaxBackward(request);
  if (!result.ok()) return session.CallFailed(result.status());
  if (absl::Status saved =
          client::SaveTensor(flags.out, result->dtype, probs->shape, Values(*result, *shared));
      !saved.ok()) {
    return OutputFileLost(saved);
  }
  return session.Show(
      AttentionOutput{.result = &*result, .shape = probs->shape, .file = flags.out});
}

}  // namespace logitd::cli

#include "client/cli/input.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "formats/half.h"
#include "formats/ring_protocol.h"

namespace logitd::cli {

absl::StatusOr<client::LanguageModel> LoadModel(const std::string& directory) {
  absl::StatusOr<client::LanguageModel> model = client::LanguageModel::Load(directory);
  if (model.ok()) return model;
  return absl::Status(
      model.status().code(),
      absl::StrCat(model.status().message(),
                   "\n  hint: --model names a directory with config.json, vocab.json and "
                   "model.safetensors"));
}

std::vector<std::string> TextOf(const client::LanguageModel* model,
                                absl::Span<const int32_t> tokens) {
  std::vector<std::string> text;
  if (model == nullptr) return text;
  for (int32_t token : tokens) {
    const bool known = token >= 0 && token < model->vocab_size();
    text.push_back(known ? model->TokenBytes(token) : "");
  }
  return text;
}

std::string ToDType(absl::Span<const float> values, v1::DType dtype) {
  std::string bytes(values.size() * static_cast<size_t>(client::DTypeSize(dtype)), '\0');
  if (dtype == v1::DTYPE_F32) {
    if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t half =
        dtype == v1::DTYPE_F16 ? formats::FloatToF16(values[i]) : formats::FloatToBF16(values[i]);
    std::memcpy(bytes.data() + 2 * i, &half, 2);
  }
  return bytes;
}

absl::StatusOr<v1::Head> FindHead(const Session& session, const std::string& name,
                                  const client::LanguageModel& model) {
  if (name.empty()) return v1::Head();
  absl::StatusOr<v1::Head> head = session.client().GetHead(name);
  if (!head.ok()) return head;
  if (head->hidden() == model.hidden_dim() && head->vocab() == model.vocab_size()) return head;
  return absl::InvalidArgumentError(
      absl::StrFormat("--head %s is of %d tokens by %d; the model of --model has %d by %d", name,
                      head->vocab(), head->hidden(), model.vocab_size(), model.hidden_dim()));
}

int NoHead(const Session& session, const absl::Status& status) {
  return absl::IsInvalidArgument(status) ? BadInput(status) : session.CallFailed(status);
}

int NoArena(const Session& session, const absl::Status& status) {
  if (absl::IsInvalidArgument(status)) return BadInput(status);
  if (!absl::IsUnavailable(status)) return session.CallFailed(status);
  Complain(status.message(), "does logitd lease memory there? Its flag is --arena-listen");
  return kExitUnavailable;
}

absl::Status Input::MoveToArena(const InputFlags& flags, bool with_ring) {
  if (flags.arena.empty()) return absl::OkStatus();
  const auto lease = [&flags](int64_t bytes, client::ArenaKind kind,
                              std::unique_ptr<client::Arena>* leased) -> absl::Status {
    if (*leased != nullptr && (*leased)->bytes() >= bytes) return absl::OkStatus();
    absl::StatusOr<std::unique_ptr<client::Arena>> got =
        client::Arena::Lease(flags.arena, bytes, kind);
    if (got.ok()) *leased = *std::move(got);
    return got.status();
  };
  // Room for the largest request and the largest answer, one at a time.
  constexpr client::RingOptions kRing = {
      .slots = 1, .entry_bytes = kMaxRingSlotBytes, .answer_bytes = kMaxRingSlotBytes};
  const int64_t ring_bytes = with_ring ? client::Ring::Bytes(kRing) : 0;
  const bool on_host = flags.arena_kind != "cuda";
  const auto end = static_cast<int64_t>((payload.size() + 63) / 64 * 64);
  absl::Status status = on_host ? lease(end + ring_bytes, client::ArenaKind::kHost, &arena)
                                : lease(end, client::ArenaKind::kCuda, &arena);
  if (status.ok()) status = arena->Write(0, payload);
  if (!status.ok()) return status;
  payload = {arena->data(), payload.size()};
  if (!with_ring) return absl::OkStatus();
  if (!on_host) {  // a ring is in memory of the host
    status = lease(ring_bytes, client::ArenaKind::kHost, &ring_arena);
    if (!status.ok()) return status;
  }
  absl::StatusOr<std::unique_ptr<client::Ring>> opened =
      on_host ? client::Ring::Open(arena.get(), end, kRing)
              : client::Ring::Open(ring_arena.get(), 0, kRing);
  if (!opened.ok()) return opened.status();
  ring = *std::move(opened);
  return absl::OkStatus();
}

void Input::SetRow(absl::Span<const float> state, const v1::Head& to) {
  rows = 1;
  head = to.name();
  dtype = head.empty() ? v1::DTYPE_F32 : to.dtype();
  width = head.empty() ? model->vocab_size() : to.hidden();
  computed = head.empty() ? ToDType(model->Logits(state), dtype) : ToDType(state, dtype);
  payload = computed;
}

absl::StatusOr<Input> LoadFile(const InputFlags& flags, const std::string& prefix,
                               bool takes_text) {
  const bool hidden = !flags.hidden.empty();
  if (hidden && flags.head.empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%shead is missing; with %shidden it names a head that the server has "
                        "loaded",
                        prefix, prefix));
  }
  if (!hidden && !flags.head.empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%shead next to %slogits; allowed with %shidden%s", prefix, prefix, prefix,
                        takes_text ? " or a text" : ""));
  }
  absl::StatusOr<client::FileTensor> loaded =
      client::LoadMatrix(hidden ? flags.hidden : flags.logits);
  if (!loaded.ok()) return loaded.status();
  Input input = {.dtype = loaded->dtype,
                 .rows = loaded->shape[0],
                 .width = loaded->shape[1],
                 .head = flags.head,
                 .head_version = flags.head_version,
                 .payload = loaded->bytes};
  input.tensor = *std::move(loaded);
  return input;
}

absl::StatusOr<std::vector<int32_t>> LoadIds(const std::string& flag, const std::string& file) {
  const absl::StatusOr<std::vector<int64_t>> wide = client::LoadIntegers(file);
  if (!wide.ok()) return wide.status();
  std::vector<int32_t> ids;
  ids.reserve(wide->size());
  for (int64_t id : *wide) {
    if (id < std::numeric_limits<int32_t>::min() || id > std::numeric_limits<int32_t>::max()) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: %s: got %d at place %d, allowed numbers of 32 bits", flag, file, id, ids.size()));
    }
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

absl::StatusOr<std::vector<int32_t>> LoadTargets(const std::string& file, int64_t rows) {
  absl::StatusOr<std::vector<int32_t>> targets = LoadIds("--targets", file);
  if (targets.ok() && static_cast<int64_t>(targets->size()) != rows) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--targets: %s: got %d values, allowed %d (rows)", file, targets->size(), rows));
  }
  return targets;
}

absl::StatusOr<Input> LoadPrompt(const InputFlags& flags) {
  absl::StatusOr<client::LanguageModel> model = LoadModel(flags.model);
  if (!model.ok()) return model.status();
  Input input;
  input.head_version = flags.head_version;
  input.model = std::make_unique<client::LanguageModel>(*std::move(model));
  input.tokens = input.model->Tokenize(flags.text);
  return input;
}

std::vector<float> ReadTokens(const client::LanguageModel& model,
                              client::LanguageModel::State* state,
                              absl::Span<const int32_t> tokens) {
  std::vector<float> hidden = model.Step(*state, model.bos_token_id());
  for (int32_t token : tokens) hidden = model.Step(*state, token);
  return hidden;
}

}  // namespace logitd::cli

// The rows of a request: from a file, or from the language model.
#ifndef LOGITD_CLIENT_CLI_INPUT_H_
#define LOGITD_CLIENT_CLI_INPUT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cli/commands.h"
#include "client/client.h"
#include "client/language_model.h"
#include "client/ring.h"
#include "client/tensor_file.h"

namespace logitd::cli {

absl::StatusOr<client::LanguageModel> LoadModel(const std::string& directory);

// The bytes of each token, none for an id that the model does not have (a damaged row has ids of
// -1); nothing without a model.
std::vector<std::string> TextOf(const client::LanguageModel* model,
                                absl::Span<const int32_t> tokens);

// A row's values as the server takes them.
std::string ToDType(absl::Span<const float> values, v1::DType dtype);

// The head of the server that gets the model's hidden states; with an empty `name` a head without a
// name. INVALID_ARGUMENT: it does not fit the model. Other errors as Client::GetHead.
absl::StatusOr<v1::Head> FindHead(const Session& session, const std::string& name,
                                  const client::LanguageModel& model);
// For an error of FindHead: a head that does not fit is bad input, all else the call's failure.
int NoHead(const Session& session, const absl::Status& status);

// Rows, and what keeps their bytes alive.
struct Input {
  v1::DType dtype = v1::DTYPE_F32;
  int64_t rows = 0;
  int64_t width = 0;         // of a row: the vocabulary, or a hidden state
  std::string head;          // of hidden states; empty: logits
  int64_t head_version = 0;  // that it must have; 0: any
  absl::string_view payload;

  client::FileTensor tensor;                     // of a file
  std::unique_ptr<client::LanguageModel> model;  // null: from a file
  std::vector<int32_t> tokens;                   // of the text
  std::string computed;                          // by the model
  std::unique_ptr<client::Arena> arena;          // with a copy of the payload; null: it is sent
  std::unique_ptr<client::Arena> ring_arena;     // for the ring, where `arena` is on a GPU
  std::unique_ptr<client::Ring> ring;            // null: calls go over gRPC

  std::vector<std::string> TextOf(absl::Span<const int32_t> ids) const {
    return cli::TextOf(model.get(), ids);
  }
  // The row that the model sends: its hidden state for `to`, or without a name its logits.
  void SetRow(absl::Span<const float> hidden, const v1::Head& to);

  // Copies the payload into memory that the server leases at `address`; with "" nothing is done.
  // `with_ring`: opens a ring there too. Errors as Arena::Lease and Ring::Open.
  absl::Status MoveToArena(const InputFlags& flags, bool with_ring = false);

  // Makes this the rows of a request.
  template <typename Params>
  void Fill(client::LogitsRequest<Params>* request) const {
    request->dtype = dtype;
    request->rows = rows;
    request->head = head;
    if (head_version != 0) request->params.set_head_version(head_version);
    request->arena = arena.get();
    (head.empty() ? request->vocab : request->hidden_size) = width;
    (head.empty() ? request->logits : request->hidden) = {payload};
  }
};

// For an error of MoveToArena: complains, and returns the exit code.
int NoArena(const Session& session, const absl::Status& status);

// The rows of --logits or --hidden, whose names begin with `prefix`. `takes_text`: the command
// takes a text too. INVALID_ARGUMENT also for flags that do not go together.
absl::StatusOr<Input> LoadFile(const InputFlags& flags, const std::string& prefix = "--",
                               bool takes_text = true);

// The token ids in a file, the value of `flag`.
absl::StatusOr<std::vector<int32_t>> LoadIds(const std::string& flag, const std::string& file);

// The token ids of --targets, one for each row.
absl::StatusOr<std::vector<int32_t>> LoadTargets(const std::string& file, int64_t rows);

// The model and the tokens of --text.
absl::StatusOr<Input> LoadPrompt(const InputFlags& flags);

// The model's state after bos and `tokens`; returns the last hidden state.
std::vector<float> ReadTokens(const client::LanguageModel& model,
                              client::LanguageModel::State* state,
                              absl::Span<const int32_t> tokens);

}  // namespace logitd::cli

#endif  // LOGITD_CLIENT_CLI_INPUT_H_

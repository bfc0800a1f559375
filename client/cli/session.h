// What the subcommands of logitctl share: complaints, the connection, logits from a file or a
// prompt.
#ifndef LOGITD_CLIENT_CLI_SESSION_H_
#define LOGITD_CLIENT_CLI_SESSION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cli/commands.h"
#include "client/client.h"
#include "client/language_model.h"
#include "client/tensor_file.h"

namespace logitd::cli {

void Print(absl::string_view text);
void Complain(absl::string_view text, absl::string_view hint = "");

// Each complains and returns the exit code: of a call that the server or the way to it failed; of
// a flag or a file.
int CallFailed(const absl::Status& status, const std::string& address);
int BadInput(const absl::Status& status);

// Of FindHead: a head that does not fit is a flag's fault, all else the call's.
int NoHead(const absl::Status& status, const std::string& address);

absl::StatusOr<std::unique_ptr<client::Client>> Connect(const CommonFlags& common);

absl::StatusOr<client::LanguageModel> LoadModel(const std::string& directory);

// The bytes of each token, none of one that the model does not have (a damaged row's are -1);
// nothing without a model.
std::vector<std::string> TextOf(const client::LanguageModel* model,
                                absl::Span<const int32_t> tokens);

// Logits, and what keeps them alive.
struct Logits {
  v1::DType dtype = v1::DTYPE_F32;
  int64_t rows = 0;
  int64_t vocab = 0;
  absl::string_view payload;
  std::unique_ptr<client::LanguageModel> model;  // null: from a file
  std::vector<int32_t> prompt;                   // its tokens
  client::FileTensor tensor;                     // keeps the file mapped
  std::vector<float> computed;                   // after the prompt
  std::vector<float> hidden;                     // what they were computed of
  std::string converted;                         // that, as a head takes it

  std::vector<std::string> TextOf(absl::Span<const int32_t> tokens) const {
    return cli::TextOf(model.get(), tokens);
  }
};

// Of `file`, or where that is empty after the prompt `text`.
absl::StatusOr<Logits> LoadLogits(const std::string& file, const std::string& text,
                                  const std::string& model);

// Hidden states as a head takes them.
std::string ToDType(absl::Span<const float> values, v1::DType dtype);

// Where `name` is not empty: what the server says of that head. INVALID_ARGUMENT where it does not
// fit the model, whose hidden states it is to take; else as Client::GetHead.
absl::StatusOr<v1::Head> FindHead(client::Client& client, const std::string& name,
                                  const client::LanguageModel& model);

// The rows of a request: the logits that were loaded, or the model's hidden state after the prompt
// for `head`, where that has a name. The bytes are those of `loaded`.
template <typename Request>
void SetInput(Logits& loaded, const v1::Head& head, Request* request) {
  request->rows = loaded.rows;
  if (head.name().empty()) {
    request->dtype = loaded.dtype;
    request->vocab = loaded.vocab;
    request->logits = {loaded.payload};
    return;
  }
  loaded.converted = ToDType(loaded.hidden, head.dtype());
  request->dtype = head.dtype();
  request->head = head.name();
  request->hidden_size = head.hidden();
  request->hidden = {loaded.converted};
}

}  // namespace logitd::cli

#endif  // LOGITD_CLIENT_CLI_SESSION_H_

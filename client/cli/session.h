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

absl::StatusOr<std::unique_ptr<client::Client>> Connect(const CommonFlags& common);

absl::StatusOr<client::LanguageModel> LoadModel(const std::string& directory);

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

  // The bytes of each token; nothing without a model.
  std::vector<std::string> TextOf(absl::Span<const int32_t> tokens) const;
};

// Of `file`, or where that is empty after the prompt `text`.
absl::StatusOr<Logits> LoadLogits(const std::string& file, const std::string& text,
                                  const std::string& model);

}  // namespace logitd::cli

#endif  // LOGITD_CLIENT_CLI_SESSION_H_

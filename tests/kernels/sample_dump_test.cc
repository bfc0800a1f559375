// Writes rows, parameters and the tokens the CPU backend drew for sample_replay.py, which draws
// them again from only the text of docs/semantics.md.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <type_traits>
#include <variant>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/sample_cases.h"

namespace logitd::testing {
namespace {

std::string Json(std::string_view name, absl::Span<const uint32_t> values) {
  return absl::StrFormat("\"%s\": [%s], ", name, absl::StrJoin(values, ", "));
}

// "name": value for every parameter of the row, exactly.
std::string Params(const SampleRow& row) {
  std::string text;
  for (const RowParam<SampleRow>& param : kSampleParams) {
    std::visit(
        [&]<typename T>(T SampleRow::*member) {
          absl::StrAppendFormat(&text, "\"%s\": ", param.name);
          if constexpr (std::is_same_v<T, float>) {
            absl::StrAppendFormat(&text, "%.17g, ", row.*member);
          } else {
            absl::StrAppendFormat(&text, "%d, ", row.*member);
          }
        },
        param.member);
  }
  return text;
}

// Logits and biases are written as the bits of f32.
std::string Describe(const HostTensor& tensor, int64_t r, const SampleBatch& batch,
                     const SampleAnswer& got) {
  const SampleRow& row = batch.rows[r];
  std::vector<uint32_t> logits, history, bias_ids, bias_values, mask;
  for (float x : RowOf(tensor, r)) logits.push_back(BitsOf(x));
  for (int32_t i = 0; i < row.history_count; ++i) {
    history.push_back(batch.history[row.first_history + i]);
  }
  for (int32_t i = 0; i < row.bias_count; ++i) {
    bias_ids.push_back(batch.bias[row.first_bias + i].id);
    bias_values.push_back(BitsOf(batch.bias[row.first_bias + i].value));
  }
  for (int64_t w = 0; row.first_mask_word >= 0 && w < MaskWords(tensor.cols()); ++w) {
    mask.push_back(batch.mask_words[row.first_mask_word + w]);
  }
  std::string line = "{";
  line += Json("logits", logits) + Json("history", history) + Json("bias_ids", bias_ids) +
          Json("bias_values", bias_values) + Json("mask", mask);
  line += Params(row);
  absl::StrAppendFormat(&line, "\"code\": %d, \"status_position\": %d, ",
                        static_cast<int>(got.status[r].code), got.status[r].position);
  absl::StrAppendFormat(&line, "\"entropy\": %d, \"raw_entropy\": %d, ", BitsOf(got.entropies[r]),
                        BitsOf(got.raw_entropies[r]));
  const auto first = got.support_ids.begin() + row.first_support_entry;
  absl::StrAppendFormat(&line, "\"support_size\": %d, \"support_ids\": [%s], ", got.support_size[r],
                        absl::StrJoin(first, first + row.want_support, ", "));
  const auto first_draw = got.draw_tokens.begin() + row.first_draw_entry;
  absl::StrAppendFormat(&line, "\"draw_tokens\": [%s], ",
                        absl::StrJoin(first_draw, first_draw + row.draws, ", "));
  absl::StrAppendFormat(&line, "\"token\": %d, \"logprob\": %d, \"rank\": %d}", got.tokens[r],
                        BitsOf(got.logprobs[r]), got.ranks[r]);
  return line;
}

TEST(SampleDumpTest, WritesRowsForTheReplay) {
  const char* path = std::getenv("LOGITD_SAMPLE_DUMP");
  std::ofstream out(path != nullptr ? path : ::testing::TempDir() + "sample_dump.json");
  auto backend = CreateBackend("cpu", {.cpu_threads = 2}).value();
  auto runner = OpRunner::Create(backend.get()).value();
  for (const int64_t vocab : {1, 5, 100, 1500}) {
    for (Fill fill : kAllFills) {
      const int64_t rows = 30;
      HostTensor tensor(DType::kF32, rows, vocab, vocab, 0);
      SampleBatch batch;
      std::mt19937_64 random(vocab);
      for (int64_t r = 0; r < rows; ++r) {
        FillRow(tensor, r, fill, 21);
        AddRandomRow(batch, vocab, random);
      }
      const SampleAnswer got = runner->Sample(tensor, batch).value();
      for (int64_t r = 0; r < rows; ++r) {
        if (batch.rows[r].active != 0) out << Describe(tensor, r, batch, got) << "\n";
      }
    }
  }
  out.close();
  EXPECT_TRUE(out.good());
}

}  // namespace
}  // namespace logitd::testing

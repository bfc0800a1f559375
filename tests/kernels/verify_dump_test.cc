// Writes sequences of drafts and what the CPU backend did with them for verify_replay.py, which
// decides again from only the text of docs/semantics.md.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/backend.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/verify_cases.h"

namespace logitd::testing {
namespace {

std::string Bits(const float* values, size_t count) {
  std::vector<uint32_t> bits(count);
  for (size_t i = 0; i < count; ++i) bits[i] = BitsOf(values[i]);
  return absl::StrJoin(bits, ", ");
}

// A row with its draft. Logits and probabilities are written as the bits of f32.
std::string Describe(const HostTensor& tensor, int64_t r, const SampleBatch& batch,
                     const VerifyBatch& verify, const VerifyAnswer& got) {
  const SampleRow& row = batch.rows[r];
  const VerifyDraft& draft = verify.drafts[r];
  const int64_t probs = draft.kind == DraftKind::kDense ? tensor.cols() : draft.count;
  const auto first_id = verify.draft_ids.begin() + draft.first_id;
  const std::vector<float> logits = RowOf(tensor, r);
  return absl::StrFormat(
      "{\"logits\": [%s], \"seed\": %d, \"position\": %d, \"temperature\": %.17g, \"top_k\": %d, "
      "\"draft\": %d, \"kind\": %d, \"ids\": [%s], \"probs\": [%s], \"code\": %d, \"token\": %d}",
      Bits(logits.data(), logits.size()), row.seed, row.position, row.temperature, row.top_k,
      draft.token, static_cast<int>(draft.kind),
      absl::StrJoin(first_id, first_id + draft.count, ", "),
      Bits(verify.draft_probs.data() + draft.first_prob, probs),
      static_cast<int>(got.rows.status[r].code), got.rows.tokens[r]);
}

TEST(VerifyDumpTest, WritesSequencesForTheReplay) {
  const char* path = std::getenv("LOGITD_VERIFY_DUMP");
  std::ofstream out(path != nullptr ? path : ::testing::TempDir() + "verify_dump.json");
  auto backend = CreateBackend("cpu", {.cpu_threads = 2}).value();
  auto runner = OpRunner::Create(backend.get()).value();
  for (const int64_t vocab : {2, 5, 100, 1500}) {
    for (const Fill fill : {Fill::kNormal, Fill::kManyTies, Fill::kWithNan, Fill::kWithPlusInf}) {
      const int64_t rows = 120;
      HostTensor tensor(DType::kF32, rows, vocab, vocab, 0);
      SampleBatch batch;
      std::mt19937_64 random(vocab);
      for (int64_t r = 0; r < rows; ++r) {
        FillRow(tensor, r, r % 4 == 3 ? fill : Fill::kNormal, 22);
        SampleRow row = PlainRow();
        row.seed = random();
        row.position = random();
        row.temperature = r % 7 == 6 ? 0 : 0.5f + static_cast<float>(r % 3);
        row.top_k = r % 2 == 0 ? 0 : static_cast<int32_t>(1 + random() % vocab);
        batch.rows.push_back(row);
      }
      const SampleAnswer sampled = runner->Sample(tensor, batch).value();
      const VerifyBatch verify = RandomDrafts(sampled.tokens, vocab, 6, 0, Blocks::kSome, random);
      const VerifyAnswer got = runner->Verify(tensor, batch, verify).value();
      for (size_t s = 0; s < verify.sequences.size(); ++s) {
        const VerifySequence& sequence = verify.sequences[s];
        std::vector<std::string> lines;
        for (int64_t r = sequence.first_row; r < sequence.first_row + sequence.rows; ++r)
          lines.push_back(Describe(tensor, r, batch, verify, got));
        out << absl::StrFormat("{\"block\": %d, \"accepted\": %d, \"rows\": [%s]}\n",
                               sequence.block, got.accepted[s], absl::StrJoin(lines, ", "));
      }
    }
  }
  out.close();
  EXPECT_TRUE(out.good());
}

}  // namespace
}  // namespace logitd::testing

// Heads that are cut over devices, and calls on them, over gRPC.
#ifndef LOGITD_TESTS_E2E_SHARDED_CASES_H_
#define LOGITD_TESTS_E2E_SHARDED_CASES_H_

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "logitd/v1/heads.grpc.pb.h"
#include "logitd/v1/sampler.grpc.pb.h"
#include "logitd/v1/scorer.grpc.pb.h"
#include "tests/e2e/elements.h"
#include "tests/e2e/peers.h"
#include "tests/e2e/server_process.h"

namespace logitd::e2e {

inline constexpr int64_t kVocab = 5003;  // five cells, the last one short
inline constexpr int64_t kHidden = 48;
inline constexpr int64_t kReferenceHidden = 32;

// A folder with two heads of one vocabulary, each in a safetensors file, with a bias.
class HeadFolder {
 public:
  HeadFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "logitd-sharded-XXXXXX").string();
    path_ = mkdtemp(name.data());
    Write(File(), kHidden, 1);
    Write(ReferenceFile(), kReferenceHidden, 3);
  }
  ~HeadFolder() { std::filesystem::remove_all(path_); }

  const std::string& path() const { return path_; }
  std::string File() const { return path_ + "/head.safetensors"; }
  std::string ReferenceFile() const { return path_ + "/reference.safetensors"; }
  // The flags of heads "h" and "g".
  std::vector<std::string> Flags(const char* options, const char* reference_options) const {
    return {absl::StrCat("--head=h=", File(), options),
            absl::StrCat("--head=g=", ReferenceFile(), reference_options)};
  }

 private:
  static void Write(const std::string& file, int64_t hidden, uint32_t seed) {
    const size_t weight = static_cast<size_t>(kVocab * hidden) * 2;
    const size_t end = weight + kVocab * 2;
    const std::string header = absl::StrFormat(
        R"({"__metadata__":{"final_logit_softcapping":"20"},)"
        R"("lm_head.weight":{"dtype":"BF16","shape":[%d,%d],"data_offsets":[0,%d]},)"
        R"("lm_head.bias":{"dtype":"BF16","shape":[%d],"data_offsets":[%d,%d]}})",
        kVocab, hidden, weight, kVocab, weight, end);
    std::ofstream out(file, std::ios::binary);
    const uint64_t length = header.size();
    out.write(reinterpret_cast<const char*>(&length), sizeof(length));
    out << header << Encode(v1::DTYPE_BF16, Normal<double>(kVocab * hidden, seed, 0.5))
        << Encode(v1::DTYPE_BF16, Normal<double>(kVocab, seed + 1, 1));
  }

  std::string path_;
};

template <typename Request>
Request OfHead(int64_t rows, uint32_t seed) {
  Request request;
  request.set_dtype(v1::DTYPE_BF16);
  request.set_rows(rows);
  request.set_head("h");
  request.set_hidden_size(kHidden);
  request.set_hidden(Encode(v1::DTYPE_BF16, Normal<double>(rows * kHidden, seed, 1)));
  return request;
}

inline v1::ScoreRequest Scored(int64_t rows, uint32_t seed) {
  v1::ScoreRequest request = OfHead<v1::ScoreRequest>(rows, seed);
  for (int64_t row = 0; row < rows; ++row) {
    request.add_targets(row % 7 == 6 ? -100 : static_cast<int32_t>((row * 977 + seed) % kVocab));
  }
  request.set_want_entropy(seed % 2 == 0);
  request.set_want_rank(seed % 3 != 0);
  if (seed % 4 == 1) {
    request.add_label_smoothing(0.1f);
    request.add_smoothing(seed % 8 == 1 ? v1::SMOOTHING_CONVENTION_TORCH
                                        : v1::SMOOTHING_CONVENTION_MEGATRON);
    request.add_z_loss(1e-3f);
  }
  if (seed % 5 == 0) request.add_temperature(0.7f);
  if (seed % 2 == 1) request.add_top_logprobs(20);
  if (seed % 3 == 1) {
    for (const int32_t id : {0, 1023, 1024, 5002}) request.add_extra_ids(id);
  }
  return request;
}

// Every third row has no support.
inline v1::ScoreRequest Supported(int64_t rows, uint32_t seed) {
  v1::ScoreRequest request = OfHead<v1::ScoreRequest>(rows, seed);
  for (int64_t row = 0; row < rows; ++row) {
    const auto target = static_cast<int32_t>((row * 977 + seed) % kVocab);
    request.add_targets(target);
    request.add_support_count(row % 3 == 2 ? 0 : 3);
    if (row % 3 == 2) continue;
    for (const int64_t step : {0, 1, 2500})
      request.add_support_ids(static_cast<int32_t>((target + step) % kVocab));
  }
  request.set_want_entropy(seed % 2 == 0);
  request.add_temperature(0.7f);
  return request;
}

inline v1::SampleRequest Drawn(int64_t rows, uint32_t seed) {
  v1::SampleRequest request = OfHead<v1::SampleRequest>(rows, seed);
  request.add_seed(seed);
  for (int64_t row = 0; row < rows; ++row) request.add_position(static_cast<uint64_t>(row));
  request.add_temperature(seed % 4 == 0 ? 0.0f : 0.9f);
  if (seed % 2 == 1) request.add_top_p(0.9f);
  if (seed % 3 == 1) request.add_top_k(50);
  if (seed % 5 == 1) request.add_min_p(0.01f);
  if (seed % 5 == 2) request.add_top_n_sigma(2);
  if (seed % 3 == 0) request.add_want_support(40);
  if (seed % 4 == 2) request.add_draws(5);
  if (seed % 4 == 3) {
    request.add_watermark_key(seed);
    request.add_watermark_width(3);
    for (const int32_t id : {7, 1024, 5002, 7}) request.add_history(id);
  }
  request.add_repetition_penalty(1.2f);
  request.add_top_logprobs(3);
  return request;
}

// The tokens that Drawn has got as drafts, which are certain or, for block verification, likely.
inline v1::VerifyRequest Drafted(int64_t rows, uint32_t seed, const v1::SampleResponse& drawn) {
  v1::SampleRequest sample = Drawn(rows, seed);
  sample.clear_draws();
  v1::VerifyRequest request = OfHead<v1::VerifyRequest>(rows, seed);
  request.MergeFromString(sample.SerializeAsString());  // the same fields
  request.add_sequence_rows(static_cast<int32_t>(rows));
  const bool block = seed % 4 < 2 && rows > 1;
  request.set_block_verification(block);
  if (block) request.add_draft_kind(v1::DRAFT_KIND_LIST);
  if (block) request.add_draft_count(1);
  for (int i = 0; i + 1 < rows; ++i) {
    const int64_t token = (std::max(0, drawn.tokens(i)) + (i % 9 == 8 ? 1 : 0)) % kVocab;
    request.add_drafts(static_cast<int32_t>(token));
    if (block) request.add_draft_ids(static_cast<int32_t>(token));
  }
  if (block) {
    request.set_draft_probs(
        Encode(v1::DTYPE_F32, std::vector<double>(static_cast<size_t>(rows - 1), 0.25)));
  }
  return request;
}

// Both heads, or "h" beside logits.
inline v1::DivergenceRequest Compared(int64_t rows, uint32_t seed) {
  v1::DivergenceRequest request = OfHead<v1::DivergenceRequest>(rows, seed);
  if (seed % 3 == 1) {
    request.set_reference_dtype(v1::DTYPE_F32);
    request.set_reference_logits(Encode(v1::DTYPE_F32, Normal<double>(rows * kVocab, seed + 7, 2)));
  } else {
    request.set_reference_head("g");
    request.set_reference_hidden_size(kReferenceHidden);
    request.set_reference_hidden(
        Encode(v1::DTYPE_BF16, Normal<double>(rows * kReferenceHidden, seed + 7, 1)));
  }
  for (int64_t row = 0; row < rows; ++row)
    request.add_targets(static_cast<int32_t>((row * 977 + seed) % kVocab));
  request.add_temperature(0.8f);
  return request;
}

inline v1::TopKRequest Top(int64_t rows, uint32_t seed) {
  v1::TopKRequest request = OfHead<v1::TopKRequest>(rows, seed);
  for (int64_t row = 0; row < rows; ++row) {
    request.add_k(row % 3 == 0 ? 1 : row % 3 == 1 ? 40 : 2000);
  }
  request.add_temperature(0.8f);
  return request;
}

// The answers that four threads get, by thread and call. `divergence`: Divergence is called too.
inline std::vector<std::vector<std::string>> Answers(const ServerProcess& server,
                                                     bool divergence = false) {
  constexpr int kThreads = 4;
  constexpr uint32_t kCalls = 12;
  std::vector<std::vector<std::string>> answers(kThreads);
  std::vector<std::thread> callers;
  for (int t = 0; t < kThreads; ++t) {
    callers.emplace_back([&, t] {
      const auto channel = Connect(server.tcp());
      const auto scorer = v1::Scorer::NewStub(channel);
      const auto sampler = v1::Sampler::NewStub(channel);
      for (uint32_t i = 0; i < kCalls; ++i) {
        const uint32_t seed = static_cast<uint32_t>(t) * 100 + i;
        const int64_t rows = i == 7 ? 90 : 1 + i % 5;
        v1::ScoreResponse scored;
        v1::SampleResponse drawn;
        v1::TopKResponse top;
        const grpc::Status score = scorer->Score(Context().get(), Scored(rows, seed), &scored);
        const grpc::Status draw = sampler->Sample(Context().get(), Drawn(rows, seed), &drawn);
        const grpc::Status topk = sampler->TopK(Context().get(), Top(rows, seed), &top);
        v1::ScoreResponse supported;
        v1::VerifyResponse verified;
        v1::DivergenceResponse compared;
        const grpc::Status support =
            scorer->Score(Context().get(), Supported(rows, seed), &supported);
        const grpc::Status verify =
            sampler->Verify(Context().get(), Drafted(rows, seed, drawn), &verified);
        const grpc::Status compare =
            divergence ? scorer->Divergence(Context().get(), Compared(rows, seed), &compared)
                       : grpc::Status::OK;
        for (const grpc::Status* status : {&score, &draw, &topk, &support, &verify, &compare})
          EXPECT_TRUE(status->ok()) << status->error_message();
        answers[static_cast<size_t>(t)].push_back(Bits(scored) + Bits(drawn) + Bits(top) +
                                                  Bits(supported) + Bits(verified) +
                                                  Bits(compared));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  return answers;
}

inline grpc::Status Load(const ServerProcess& server, bool shard, v1::Head* head,
                         const std::string& name = "h",
                         const std::string& path = "head.safetensors") {
  v1::LoadHeadRequest request;
  request.set_name(name);
  request.set_path(path);
  request.set_shard(shard);
  const auto context = Context();
  const auto stub = v1::Heads::NewStub(Connect(server.tcp()));
  const auto stream = stub->Load(context.get(), request);
  v1::LoadHeadResponse message;
  while (stream->Read(&message)) {
  }
  *head = message.head();
  return stream->Finish();
}

}  // namespace logitd::e2e

#endif  // LOGITD_TESTS_E2E_SHARDED_CASES_H_

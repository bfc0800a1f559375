// The subcommands of logitctl. Each prints its answer on stdout, its errors on stderr, and returns
// the exit code.
#ifndef LOGITD_CLIENT_CLI_COMMANDS_H_
#define LOGITD_CLIENT_CLI_COMMANDS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "client/cli/parameters.h"
#include "client/cli/session.h"
#include "logitd/v1/sampler.pb.h"
#include "logitd/v1/scorer.pb.h"

namespace logitd::cli {

// Where the rows come from: exactly one of `logits`, `hidden`, `text` and `text_file` is given.
struct InputFlags {
  std::string logits;     // a file
  std::string hidden;     // a file, for `head`
  std::string text;       // a prompt or text, for `model`
  std::string text_file;  // the same in a file
  std::string model = "demo/model";
  std::string head;  // of the server; with a text: the model's own, which gets its hidden states
  int64_t head_version = 0;         // that the head must have; 0: any
  std::string arena;                // where the server leases memory; empty: the rows are sent
  std::string arena_kind = "host";  // of `arena`: host or cuda
  bool ring = false;  // with `arena`, of topk and sample: through a ring of leased memory

  bool is_file() const { return !logits.empty() || !hidden.empty(); }
};

struct TopKFlags {
  InputFlags input;
  std::vector<ParameterFlag> params = FlagsOf(*v1::TopKRequest::descriptor());
};
int RunTopK(const Session& session, const TopKFlags& flags);

// Parameters of Sample and Verify. What is not given stays as the parameter file has it, or off.
struct SamplingFlags {
  std::string file;  // the request in protobuf's JSON
  std::vector<ParameterFlag> params;
  std::vector<std::string> logit_bias;  // ID=VALUE
  std::vector<int32_t> allow;           // the only tokens that may be drawn; empty: all
  std::optional<uint64_t> seeds;        // where the rows' seeds start; none: params or the file say
};

struct SampleFlags {
  InputFlags input;
  SamplingFlags sampling = {.params =
                                FlagsOf(*v1::SampleRequest::descriptor(),
                                        {"logit_bias", "logit_bias_ids", "allowed_tokens_mask"})};
};
int RunSample(const Session& session, const SampleFlags& flags);

struct VerifyFlags {
  InputFlags input;                     // a file
  std::vector<int32_t> sequence_rows;   // of each sequence; empty: all rows are one
  std::string drafts;                   // a file; empty: they are `ids`
  std::vector<int32_t> ids;             // the draft tokens themselves
  std::vector<std::string> draft_kind;  // "greedy", "list" or "dense"
  std::vector<int32_t> draft_count;     // of each list; empty: all have the same
  std::string draft_ids;                // files; none where empty
  std::string draft_probs;
  bool block_verification = false;
  SamplingFlags sampling = {
      .params = FlagsOf(*v1::VerifyRequest::descriptor(),
                        {"logit_bias", "logit_bias_ids", "allowed_tokens_mask", "draws"},
                        v1::SampleRequest::descriptor())};
};
int RunVerify(const Session& session, const VerifyFlags& flags);

struct GenerateFlags {
  InputFlags input;
  int tokens = 64;
  bool details = false;
  SamplingFlags sampling = {.params =
                                FlagsOf(*v1::SampleRequest::descriptor(),
                                        {"logit_bias", "logit_bias_ids", "allowed_tokens_mask",
                                         "position", "history", "extra_ids", "draws"})};
};
int RunGenerate(const Session& session, const GenerateFlags& flags);

struct ScoreFlags {
  InputFlags input;
  std::string targets;  // a file, with --logits and --hidden
  std::vector<ParameterFlag> params = FlagsOf(*v1::ScoreRequest::descriptor(), {"targets"});
  bool totals = false;  // no line for every token
  std::string out;      // files that are written; none where empty
  std::string plot;
};
int RunScore(const Session& session, const ScoreFlags& flags);

struct DivergenceFlags {
  InputFlags input;      // a file
  InputFlags reference;  // a file; its arena is that of `input`
  std::string targets;   // a file; none where empty
  std::vector<ParameterFlag> params = FlagsOf(*v1::DivergenceRequest::descriptor(), {"targets"});
  bool totals = false;  // no line for every row
  std::string out;      // a file that is written; none where empty
};
int RunDivergence(const Session& session, const DivergenceFlags& flags);

struct AttentionFlags {
  std::string window;  // "L,R"; empty: none
  float scale = 1;
  std::string sinks;      // a file; empty: none
  std::string out_dtype;  // "f32", "f16", "bf16"; empty: that of the input
  std::string out;        // a file that is written
  std::string logsumexp;  // a file: written by softmax, read by softmax-backward; empty: none
  std::string arena;      // where the server leases memory; empty: the tensor is sent
};

struct SoftmaxFlags : AttentionFlags {
  std::string scores;
  std::string mask = "none";  // "none", "causal" or a file
};
int RunSoftmax(const Session& session, const SoftmaxFlags& flags);

struct SoftmaxBackwardFlags : AttentionFlags {
  std::string probs;
  std::string d_probs;
  bool causal = false;
};
int RunSoftmaxBackward(const Session& session, const SoftmaxBackwardFlags& flags);

struct LoadHeadFlags {
  std::string name;
  std::string path;
  bool final_norm = false;
  int64_t vocab = 0;  // 0: what the model says
  bool shard = false;
};
int RunLoadHead(const Session& session, const LoadHeadFlags& flags);
int RunUpdateHead(const Session& session, const LoadHeadFlags& flags);
int RunUnloadHead(const Session& session, const std::string& name);
int RunListHeads(const Session& session);
int RunGetHead(const Session& session, const std::string& name);

struct DetectWatermarkFlags {
  std::string file;          // of token ids; exactly one of `file` and `ids` is given
  std::vector<int32_t> ids;  // the token ids themselves
  uint64_t key = 0;
  int width = 0;
  int prompt_tokens = 0;
};
int RunDetectWatermark(const Session& session, const DetectWatermarkFlags& flags);

int RunToken(const Session& session);
int RunInfo(const Session& session);
int RunLoad(const Session& session);

struct HealthFlags {
  std::string service;
  bool watch = false;
};
int RunHealth(const Session& session, const HealthFlags& flags);

}  // namespace logitd::cli

#endif  // LOGITD_CLIENT_CLI_COMMANDS_H_

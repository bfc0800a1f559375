// The subcommands of logitctl. Each prints its answer on stdout, its errors on stderr, and returns
// the exit code.
#ifndef LOGITD_CLIENT_CLI_COMMANDS_H_
#define LOGITD_CLIENT_CLI_COMMANDS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace logitd::cli {

enum ExitCode {
  kExitOk = 0,
  kExitCallFailed = 1,   // the server refused or failed the call
  kExitBadInput = 2,     // the command line or a file
  kExitUnavailable = 3,  // nobody answers, or not serving
};

struct CommonFlags {
  std::string address = "127.0.0.1:7450";
  double deadline_s = 30;
  int max_attempts = 4;
  std::string format = "table";  // or "json"
};

struct TopKFlags {
  std::string logits;  // a file; or
  std::string text;    // a prompt, and
  std::string model = "demo/model";
  std::string head;  // of the server, for the model's hidden state; empty: its own, here
  int k = 10;
  float temperature = 1;
};

// Parameters of Sample; what is not given stays as the parameter file has it, or off.
struct SamplingFlags {
  std::string params;  // a file: logitd.v1.SampleRequest in protobuf's JSON
  std::optional<uint64_t> seed;
  std::optional<float> temperature, top_p, min_p;
  std::optional<float> repetition_penalty, presence_penalty, frequency_penalty;
  std::optional<int32_t> top_k, top_logprobs;
  std::vector<std::string> logit_bias;  // ID=VALUE
  std::vector<int32_t> allow;           // ids of the only tokens that may be drawn; empty: all
};

struct SampleFlags {
  std::string logits;  // a file; or
  std::string hidden;  // a file, for `head`; or
  std::string text;    // a prompt, and
  std::string model = "demo/model";
  std::string head;  // with `hidden` any of the server, with `text` as in TopKFlags
  SamplingFlags sampling;
  std::optional<uint64_t> position;
  std::vector<int32_t> history;
  std::vector<int32_t> extra_ids;
  std::string logprob_mode;  // "raw", "processed", or not given
};
int RunSample(const CommonFlags& common, const SampleFlags& flags);

struct GenerateFlags {
  std::string text;
  std::string model = "demo/model";
  std::string head;  // as in TopKFlags
  int tokens = 64;
  bool details = false;
  SamplingFlags sampling;
};
int RunGenerate(const CommonFlags& common, const GenerateFlags& flags);

struct ScoreFlags {
  std::string logits;     // a file; or
  std::string hidden;     // a file, for
  std::string head;       // of the server; or
  std::string text;       // to score, or
  std::string text_file;  // that has it, and
  std::string model = "demo/model";
  std::string targets;  // a file, with --logits and --hidden
  int64_t ignore_index = -100;
  float temperature = 1;
  float softcap = 0;
  float label_smoothing = 0;
  std::string smoothing = "torch";  // or "megatron"
  float z_loss = 0;
  int32_t top_logprobs = 0;
  std::vector<int32_t> extra_ids;
  bool rank = false;
  bool entropy = false;
  bool totals = false;  // no line for every token
  std::string out;      // files that are written; those empty are not
  std::string plot;
};
int RunScore(const CommonFlags& common, const ScoreFlags& flags);

struct SoftmaxFlags {
  std::string scores;
  std::string mask = "none";  // "none", "causal" or a file
  std::string window;         // "L,R"; empty: none
  float scale = 1;
  std::string sinks;      // a file, or none
  std::string out_dtype;  // "f32", "f16", "bf16", or that of the input
  std::string out;        // files that are written; those empty are not
  std::string logsumexp;
};
int RunSoftmax(const CommonFlags& common, const SoftmaxFlags& flags);

struct SoftmaxBackwardFlags {
  std::string probs;
  std::string d_probs;
  bool causal = false;
  std::string window;
  float scale = 1;
  std::string sinks;
  std::string logsumexp;
  std::string out_dtype;
  std::string out;
};
int RunSoftmaxBackward(const CommonFlags& common, const SoftmaxBackwardFlags& flags);

struct LoadHeadFlags {
  std::string name;
  std::string path;
  bool final_norm = false;
  int64_t vocab = 0;  // 0: what the model says
};
int RunLoadHead(const CommonFlags& common, const LoadHeadFlags& flags);
int RunUnloadHead(const CommonFlags& common, const std::string& name);
int RunListHeads(const CommonFlags& common);
int RunGetHead(const CommonFlags& common, const std::string& name);

int RunTopK(const CommonFlags& common, const TopKFlags& flags);
int RunInfo(const CommonFlags& common);

struct HealthFlags {
  std::string service;
  bool watch = false;
};
int RunHealth(const CommonFlags& common, const HealthFlags& flags);

}  // namespace logitd::cli

#endif  // LOGITD_CLIENT_CLI_COMMANDS_H_

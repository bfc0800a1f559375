// logitctl: asks a logitd from the command line.
#include <grpcpp/grpcpp.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/completion.h"
#include "client/cli/unknown_word.h"
#include "client/cli/usage.h"

namespace logitd::cli {
namespace {

constexpr char kFooter[] = R"(Examples:
  logitctl info --addr unix:/run/logitd.sock
  logitctl topk --logits logits.npy --k 5
  logitctl generate --text "It is a truth" --tokens 40 --seed 7 --temperature 0.8

`logitctl COMMAND --help` has the flags and examples of a command.

Exit codes:
  0  done
  1  the server refused or failed the call, or output was lost (a full disk, a closed stdout)
  2  a bad flag, value, subcommand or file, whether logitctl or the server found it
  3  no answer at the address, or the server is not serving)";

constexpr char kTopKHelp[] =
    R"(The k most probable tokens of every row of a tensor of logits, or after a prompt.

Probabilities are of the full softmax of logits / temperature. JSON has the keys of
logitd.v1.TopKResponse: row i's tokens are entries [k_0 + ... + k_(i-1), + k_i) of indices and
probs. With --text there is one more key, text. A file larger than the server takes at once goes in
several requests of whole rows; the timings are then sums.)";
constexpr char kTopKExamples[] = R"(  logitctl topk --logits logits.npy --k 5
  logitctl topk --logits batch.safetensors:logits --k 50 --temperature 0.7 --format json
  logitctl topk --text "It is a truth universally" --model demo/model --k 10)";

constexpr char kSampleHelp[] =
    R"(One token from every row of a tensor of logits, or of hidden states, or after a prompt.

Hidden states need a head that the server has loaded, and its dtype. After a prompt, --model sends
its logits, or with --head its hidden state.

The steps are, in this order: logit bias, penalties, allowed tokens, temperature, top-n-sigma,
min-p, top-k, top-p, typical-p, xtc, draw or watermark. The same seed and position always draw the
same token. Parameters come as flags or from a JSON file with the keys of logitd.v1.SampleRequest; a
flag overrides the file. JSON output has the keys of logitd.v1.SampleResponse; with --text also text
and top_text.)";
constexpr char kSampleExamples[] =
    R"(  logitctl sample --text "It is a truth" --seed 7 --top-k 50 --top-p 0.9 --top-logprobs 5
  logitctl sample --logits logits.npy --params params.json --seeds 7 --format json
  logitctl sample --hidden states.npy --head llama --seed 7 --top-p 0.9)";

constexpr char kVerifyHelp[] =
    R"(Speculative decoding: which draft tokens the target model accepts, and the bonus token after them.

Rows are those of the target, sequence after sequence: one at each draft, and one after the last.
Every token has the distribution that logitctl sample draws from. Give the rows of a sequence
different positions, or seeds by --seeds. Kinds say how drafts were drawn: greedy, with certainty or
unknown; list, from --draft-ids with --draft-probs; dense, from the whole vocabulary with
--draft-probs. Files of ids have int32 or int64, as --targets of logitctl score; --draft-probs has
f32, draft after draft.

Parameters come as flags or from a JSON file with the keys of logitd.v1.VerifyRequest. The file may
also have the drafts, and a history for each row, which includes the drafts before it. A flag
overrides the file. JSON output has the keys of logitd.v1.VerifyResponse.)";
constexpr char kVerifyExamples[] =
    R"(  logitctl verify --logits target.npy --ids 17,5,9 --seeds 7 --temperature 0.8
  logitctl verify --logits target.npy --sequence-rows 4,3 --drafts drafts.npy --temperature 0
  logitctl verify --hidden h.npy --head llama --ids 5,9 --draft-kind dense --draft-probs q.npy)";

constexpr char kGenerateHelp[] =
    R"(Continues a prompt, and prints the tokens as they are drawn.

The language model of --model runs here, and the server draws: one message of a stream per token,
with positions from 0. The same seed and flags give the same text. Penalties count the prompt and
the tokens drawn so far. With --head the server has the model's output head (logitd --head
NAME=PATH), and gets hidden states instead of logits.)";
constexpr char kGenerateExamples[] =
    R"(  logitctl generate --text "It is a truth" --tokens 40 --seed 7 --temperature 0.8 --top-p 0.9
  logitctl generate --text "It is a truth" --head demo --tokens 40 --seed 7)";

constexpr char kScoreHelp[] =
    R"(How probable the tokens of a text are: loss and log-probability of every token, and perplexity.

The rows come from one of three places. A text, one paragraph per line: the language model of
--model runs here and sends its logits, or with --head its hidden states. A file of hidden states,
for a head that the server has loaded. A file of logits. Row i of a file is the state before token
i of --targets, which is a file of int32 or int64: FILE.npy, FILE.safetensors or
FILE.safetensors:NAME. Rows whose target is --ignore-index do not count.

Long input goes as a stream of messages. If the stream is lost, a new one continues after the last
answer; --deadline is then how long one answer may take. The perplexity is exp of the mean negative
log-probability, without smoothing and z-loss. JSON has the keys of logitd.v1.ScoreResponse, and
targets; with a text also text and top_text.)";
constexpr char kScoreExamples[] =
    R"(  logitctl score --text-file chapter.txt --model demo/model --head demo --plot loss.png
  logitctl score --hidden states.npy --head llama --targets ids.npy --totals --out losses.npy
  logitctl score --logits logits.npy --targets ids.npy --label-smoothing 0.1 --rank --entropy)";

constexpr char kDivergenceHelp[] =
    R"(How far two distributions are from each other, row by row: KL divergences, both ways, and entropies.

Each of the two inputs is a file of logits, or of hidden states for a head that the server has
loaded; both have the same rows and vocabulary. Forward is KL(p || q), with p of the first input and
q of the reference, in nats; reverse is KL(q || p). With --targets, token ids in a file, also the
log-probabilities of these; rows whose target is --ignore-index do not count. With --top-logprobs
and --reference-top-logprobs also the most probable tokens of either.

Long input goes as a stream of messages, as that of logitctl score. JSON has the keys of
logitd.v1.DivergenceResponse.)";
constexpr char kDivergenceExamples[] =
    R"(  logitctl divergence --logits student.npy --reference-logits teacher.npy --reference-temperature 2
  logitctl divergence --hidden s.npy --head student --reference-hidden t.npy --reference-head teacher)";

constexpr char kSoftmaxHelp[] =
    R"(Attention: softmax(scale * scores + mask) of every row of a tensor of scores, into a file.

Files are FILE.npy (f32, f16), FILE.safetensors or FILE.safetensors:NAME (also bf16), of shape
[queries,keys], [heads,queries,keys] or [batch,heads,queries,keys]. A mask is booleans, true where a
key is hidden, or floats that are added to the scaled scores. Its sizes are those of the scores or
1; missing sizes in front are 1. If queries and keys differ in number, the last query is aligned
with the last key. Hidden keys get exactly 0; a row with no visible key is all zeros, and is listed.
A tensor larger than the server takes at once is streamed; the timings are then sums.)";
constexpr char kSoftmaxExamples[] =
    R"(  logitctl softmax --scores scores.npy --mask causal --scale 0.125 --out probs.npy
  logitctl softmax --scores scores.safetensors --window 128,0 --sinks sinks.npy --out probs.safetensors)";

constexpr char kSoftmaxBackwardHelp[] =
    R"(The gradient of softmax: from probabilities and their gradient to that of the scores.

Files and shapes are as in logitctl softmax, with the same scale and window. No mask is needed: where
a probability is 0, so is the gradient. With --sinks, --logsumexp is the file that logitctl softmax
wrote, and the gradient of the sinks is printed.)";
constexpr char kSoftmaxBackwardExamples[] =
    R"(  logitctl softmax-backward --probs probs.npy --d-probs d.npy --scale 0.125 --causal --out g.npy)";

constexpr char kHeadsHelp[] =
    R"(Output heads: the last matrices of models, which the server holds on its device by name.

A head turns hidden states into logits. With a loaded head, calls send hidden states and its name,
and nothing as wide as the vocabulary travels.)";

constexpr char kLoadHeadHelp[] =
    R"(Loads a head from the server's own files, while other calls continue.

PATH is a safetensors file, or a folder of a Hugging Face model, inside the directory that logitd was
started with (--head-root). In a folder, config.json says how the model uses its head: the real size
of a padded vocabulary, tied embeddings, scale and softcap of the logits. A terminal shows a bar.
--deadline does not count here: Ctrl-C cancels the load.)";
constexpr char kLoadHeadExamples[] = R"(  logitctl heads load llama models/llama --norm
  logitctl heads load gpt2 gpt2/model.safetensors --vocab 50257)";

constexpr char kUpdateHeadHelp[] =
    R"(Gives a loaded head new weights, from the server's own files, while other calls continue.

PATH is as of heads load; the new head has the shape, type, bias and norm of the old one. The new
version is written beside the old one, then new calls get it; calls in flight end on the old one. A
terminal shows a bar. --deadline does not count here: Ctrl-C cancels the update.)";

constexpr char kWatermarkHelp[] =
    R"(Watermarks: whether a text was drawn with a key.

logitctl sample and generate draw with one, by --watermark-key and --watermark-width.)";

constexpr char kDetectWatermarkHelp[] =
    R"(How much a text's tokens say for the watermark of a key.

No server is asked. Every pair of the last --width tokens and the token after them counts once. The
score is about the number of such tokens where there is no watermark, and larger where there is one;
the p-value is the chance of such a score without it. --tokens names a file of int32 or int64, as
--targets of logitctl score.)";
constexpr char kDetectWatermarkExamples[] =
    R"(  logitctl watermark detect --tokens text.npy --key 7 --width 4
  logitctl watermark detect --ids 5,17,3,29 --key 7 --width 2 --prompt-tokens 1 --format json)";

constexpr char kCompletionHelp[] =
    R"(Prints a script that completes subcommands, flags, values and files in a shell.

The package of logitd installs it.)";
constexpr char kCompletionExamples[] = R"(  . <(logitctl completion bash))";

// A subcommand, and what runs it.
struct Command {
  CLI::App* app;
  std::function<int(const Session&)> run;
  bool calls = true;  // a server; otherwise it has no flags for that
};
using Commands = std::vector<Command>;

// A probe asks how the server is now. It does not wait until one has started, as other commands do.
constexpr int kProbeAttempts = 4;
bool IsProbe(const CLI::App& command) { return command.get_name() == "health"; }

// For commands that call a server.
void AddCallFlags(CLI::App* command, CommonFlags* common) {
  AddConnectionFlags(command, &common->connection);
  Numbers(command->add_option("--deadline", common->deadline_s,
                              "seconds for one call, retries included"),
          0.001, 86400)
      ->capture_default_str();
  Integers(command->add_option("--max-attempts", common->max_attempts,
                               "attempts of one call while the server is full or away"),
           1, 1000)
      ->default_str(absl::StrCat(IsProbe(*command) ? kProbeAttempts : common->max_attempts));
  Words(command->add_option("--priority", common->priority,
                            "batch: the server runs it when no interactive work waits"),
        {"batch", "interactive"})
      ->capture_default_str();
  command->add_option("--request-id", common->request_id, "names the call in the server's log");
  command->add_option("--traceparent", common->traceparent,
                      "names it there too: W3C Trace Context, 00-TRACE-PARENT-FLAGS");
}

void AddFormat(CLI::App* command, CommonFlags* common) {
  Words(command->add_option("--format", common->format, "how to print the answer"),
        {"table", "json"})
      ->capture_default_str();
}

// Adds a subcommand. The first line of `help` is what the list of subcommands says.
CLI::App* AddText(CLI::App* parent, const char* name, const char* help, const char* examples) {
  CLI::App* command = parent->add_subcommand(name, help);
  command->footer(absl::StrCat("Examples:\n", examples));
  return command;
}

// Adds a subcommand whose flags live as long as it does.
template <typename Flags>
std::pair<CLI::App*, Flags*> AddCommand(CLI::App* parent, Commands* commands, const char* name,
                                        const char* help, const char* examples,
                                        int (*run)(const Session&, const Flags&)) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = AddText(parent, name, help, examples);
  commands->push_back(
      {command, [flags, run](const Session& session) { return run(session, *flags); }});
  return {command, flags.get()};
}

enum Sources { kLogits = 1, kHidden = 2, kText = 4, kTextFile = 8 };

void AddArena(CLI::App* command, std::string* address,
              const char* help =
                  "where logitd leases memory (its --arena-listen): hands the rows "
                  "over there, without sending them") {
  command->add_option("--arena", *address, help)->type_name("unix:PATH");
}

// After AddArena.
void AddArenaKind(CLI::App* command, std::string* kind) {
  Words(command->add_option("--arena-kind", *kind,
                            "the memory that is leased: the host's, or that of a GPU of this "
                            "machine"),
        {"host", "cuda"})
      ->needs("--arena")
      ->capture_default_str();
}

void AddHeadVersion(CLI::App* command, const std::string& prefix, InputFlags* input) {
  command
      ->add_option(prefix + "head-version", input->head_version,
                   "the version that the head must have, or the call fails; 0: any")
      ->check(CLI::NonNegativeNumber)
      ->needs(prefix + "head");
}

// Flags for where the rows come from, exactly one of `sources`.
void AddInput(CLI::App* command, InputFlags* input, int sources, const char* head_help) {
  CLI::Option_group* group = command->add_option_group("input", "one of");
  CLI::Option* logits =
      group
          ->add_option("--logits", input->logits,
                       "FILE.npy, FILE.safetensors or FILE.safetensors:NAME; [rows,vocab] or "
                       "[vocab], f32, f16 or (safetensors) bf16")
          ->type_name("FILE");
  if ((sources & kHidden) != 0) {
    group->add_option("--hidden", input->hidden, "a file, [rows,hidden], in the dtype of the head")
        ->type_name("FILE");
  }
  group->add_option("--text", input->text, "a text, for the language model of --model");
  if ((sources & kTextFile) != 0) {
    group->add_option("--text-file", input->text_file, "a file that has it")->type_name("FILE");
  }
  group->require_option(1);
  command->add_option("--model", input->model, "directory of the language model for a text")
      ->type_name("DIR")
      ->capture_default_str();
  CLI::Option* head = command->add_option("--head", input->head, head_help);
  if ((sources & kTextFile) == 0) head->excludes(logits);
  AddHeadVersion(command, "--", input);
  AddArena(command, &input->arena);
  AddArenaKind(command, &input->arena_kind);
}

// Flags for an input of a command whose rows come from files. Their names begin with `prefix`.
void AddFiles(CLI::App* command, const char* name, const std::string& prefix, InputFlags* input) {
  CLI::Option_group* group = command->add_option_group(name, "one of");
  group
      ->add_option(prefix + "logits", input->logits, "a file as for score, [rows,vocab] or [vocab]")
      ->type_name("FILE");
  group
      ->add_option(prefix + "hidden", input->hidden,
                   "a file, [rows,hidden], in the dtype of the head")
      ->type_name("FILE");
  group->require_option(1);
  command->add_option(prefix + "head", input->head,
                      "a head that the server has loaded; required with " + prefix + "hidden");
  AddHeadVersion(command, prefix, input);
}

void AddParameters(CLI::App* command, std::vector<ParameterFlag>* flags) {
  for (ParameterFlag& flag : *flags) {
    CLI::Option* option = flag.is_switch() ? command->add_flag(flag.names, flag.text, flag.help)
                                           : command->add_option(flag.names, flag.text, flag.help);
    option->type_name(flag.is_switch() ? "" : flag.type)
        ->group(
            "Parameters: one value for all rows, or V,V,... with one per row; ids: a list for all "
            "rows")
        ->check([&flag](const std::string& value) { return flag.Fault(value); });
  }
}

void AddSampling(CLI::App* command, SamplingFlags* flags) {
  for (ParameterFlag& flag : flags->params) {
    if (flag.names == "--seed") flag.help += "; default 0: the same tokens in every run";
  }
  AddParameters(command, &flags->params);
  command
      ->add_option("--params", flags->file,
                   "a JSON file of parameters, e.g. {\"top_k\": [50], \"top_p\": [0.9]}")
      ->type_name("FILE");
  command->add_option("--logit-bias", flags->logit_bias, "ID=VALUE, added to a logit; repeatable")
      ->delimiter(',');
  Integers(
      command->add_option("--allow", flags->allow, "the only tokens that may be drawn: ID,ID,..."),
      0, std::numeric_limits<int32_t>::max())
      ->type_name("ID")
      ->delimiter(',');
}

// After AddSampling.
void AddSeeds(CLI::App* command, SamplingFlags* flags) {
  Integers(command->add_option("--seeds", flags->seeds,
                               "a number from which every row gets its own seed: row i has output "
                               "i, from 0, of SplitMix64 started at it"),
           0, std::numeric_limits<uint64_t>::max())
      ->excludes("--seed");
}

// After AddInput.
void AddRing(CLI::App* command, bool* ring) {
  command
      ->add_flag("--ring", *ring,
                 "with --arena: the call goes through a ring in the leased memory, not over --addr")
      ->needs("--arena");
}

void AddTopK(CLI::App* app, Commands* commands) {
  const auto [command, flags] =
      AddCommand(app, commands, "topk", kTopKHelp, kTopKExamples, &RunTopK);
  AddInput(command, &flags->input, kLogits | kText,
           "with --text: the server's copy of the model's head; a hidden state is sent instead of "
           "logits");
  AddRing(command, &flags->input.ring);
  for (ParameterFlag& flag : flags->params) {
    if (flag.names == "--k") flag.text = "10";
  }
  AddParameters(command, &flags->params);
  command->get_option("--k")->capture_default_str();
}

void AddSample(CLI::App* app, Commands* commands) {
  const auto [command, flags] =
      AddCommand(app, commands, "sample", kSampleHelp, kSampleExamples, &RunSample);
  AddInput(command, &flags->input, kLogits | kHidden | kText,
           "a head that the server has loaded; required with --hidden; with --text the model's "
           "own, and its hidden state is sent");
  AddRing(command, &flags->input.ring);
  AddSampling(command, &flags->sampling);
  AddSeeds(command, &flags->sampling);
}

void AddGenerate(CLI::App* app, Commands* commands) {
  const auto [command, flags] =
      AddCommand(app, commands, "generate", kGenerateHelp, kGenerateExamples, &RunGenerate);
  command->add_option("--text", flags->input.text, "the prompt")->required();
  command->add_option("--model", flags->input.model, "directory of the language model")
      ->type_name("DIR")
      ->capture_default_str();
  command->add_option(
      "--head", flags->input.head,
      "the server's copy of the model's head; hidden states are sent instead of logits");
  AddArena(command, &flags->input.arena);
  AddArenaKind(command, &flags->input.arena_kind);
  Integers(command->add_option("--tokens", flags->tokens, "how many to draw"), 1, 100000)
      ->capture_default_str();
  command->add_flag("--details", flags->details,
                    "a line for every token, with the --top-logprobs it was drawn from");
  AddSampling(command, &flags->sampling);
}

void AddScore(CLI::App* app, Commands* commands) {
  const auto [command, flags] =
      AddCommand(app, commands, "score", kScoreHelp, kScoreExamples, &RunScore);
  AddInput(command, &flags->input, kLogits | kHidden | kText | kTextFile,
           "a head that the server has loaded; required with --hidden");
  command
      ->add_option("--targets", flags->targets,
                   "a file of token ids, [rows]; required with --logits and --hidden")
      ->type_name("FILE");
  AddParameters(command, &flags->params);
  command->add_flag("--totals", flags->totals,
                    "print only the totals, without a line for each token");
  command->add_option("--out", flags->out, "FILE.npy or FILE.safetensors: the losses")
      ->type_name("FILE");
  command->add_option("--plot", flags->plot, "FILE.png: the loss along the text")
      ->type_name("FILE");
}

void AddVerify(CLI::App* app, Commands* commands) {
  const auto [command, flags] =
      AddCommand(app, commands, "verify", kVerifyHelp, kVerifyExamples, &RunVerify);
  AddFiles(command, "input", "--", &flags->input);
  AddArena(command, &flags->input.arena);
  AddArenaKind(command, &flags->input.arena_kind);
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  Integers(command->add_option("--sequence-rows", flags->sequence_rows,
                               "rows of each sequence, its drafts + 1: R,R,...; default: all rows "
                               "are one sequence"),
           1, kMost)
      ->delimiter(',');
  CLI::Option* drafts =
      command->add_option("--drafts", flags->drafts, "a file of draft tokens, row after row")
          ->type_name("FILE");
  Integers(command->add_option("--ids", flags->ids, "the draft tokens themselves: ID,ID,..."), 0,
           kMost)
      ->type_name("ID")
      ->delimiter(',')
      ->excludes(drafts);
  Words(command->add_option("--draft-kind", flags->draft_kind,
                            "how drafts were drawn: one for all, or K,K,... with one per draft"),
        {"greedy", "list", "dense"})
      ->delimiter(',');
  command
      ->add_option("--draft-ids", flags->draft_ids,
                   "a file: the ids that each draft of kind list was drawn from, ascending")
      ->type_name("FILE");
  Integers(command->add_option("--draft-count", flags->draft_count,
                               "ids of each draft of kind list: one for all, or C,C,...; default: "
                               "as many for each"),
           1, 1 << 20)
      ->delimiter(',');
  command
      ->add_option("--draft-probs", flags->draft_probs,
                   "a file: the probabilities that drafts were drawn with, f32")
      ->type_name("FILE");
  command->add_flag(
      "--block-verification", flags->block_verification,
      "decide about all drafts of a sequence together; each is of kind list or dense");
  AddSampling(command, &flags->sampling);
  AddSeeds(command, &flags->sampling);
}

void AddDivergence(CLI::App* app, Commands* commands) {
  const auto [command, flags] =
      AddCommand(app, commands, "divergence", kDivergenceHelp, kDivergenceExamples, &RunDivergence);
  AddFiles(command, "input", "--", &flags->input);
  AddFiles(command, "reference", "--reference-", &flags->reference);
  AddArena(command, &flags->input.arena);
  AddArenaKind(command, &flags->input.arena_kind);
  command->add_option("--targets", flags->targets, "a file of token ids, [rows]")
      ->type_name("FILE");
  AddParameters(command, &flags->params);
  command->add_flag("--totals", flags->totals,
                    "print only the totals, without a line for each row");
  command
      ->add_option("--out", flags->out,
                   "FILE.npy or FILE.safetensors: [rows,2], forward and reverse")
      ->type_name("FILE");
}

void AddAttention(CLI::App* command, AttentionFlags* flags, const char* logsumexp_help) {
  command->add_option("--window", flags->window,
                      "L,R: keys that a query sees to its left and right; inf: no bound");
  FiniteNumbers(command->add_option("--scale", flags->scale, "multiplies the scores"))
      ->capture_default_str();
  command
      ->add_option(
          "--sinks", flags->sinks,
          "a file [heads], f32: one logit per head, which joins the denominator; 0 is softmax off "
          "by one")
      ->type_name("FILE");
  Words(command->add_option("--out-dtype", flags->out_dtype,
                            "of the answer; default: that of the input"),
        {"f32", "f16", "bf16"});
  command->add_option("--out", flags->out, "FILE.npy or FILE.safetensors to write")
      ->type_name("FILE")
      ->required();
  command->add_option("--logsumexp", flags->logsumexp, logsumexp_help)->type_name("FILE");
  AddArena(command, &flags->arena,
           "where logitd leases memory (its --arena-listen): hands the tensor over there, and gets "
           "the answer there");
}

void AddSoftmax(CLI::App* app, Commands* commands) {
  const auto [command, flags] =
      AddCommand(app, commands, "softmax", kSoftmaxHelp, kSoftmaxExamples, &RunSoftmax);
  command->add_option("--scores", flags->scores, "the scores, a file")
      ->type_name("FILE")
      ->required();
  command->add_option("--mask", flags->mask, "none, causal, or a file of bool or float")
      ->type_name("none|causal|FILE")
      ->capture_default_str();
  AddAttention(command, flags, "a file to write, f32: the rows' log-sum-exp, sinks included");
}

void AddSoftmaxBackward(CLI::App* app, Commands* commands) {
  const auto [command, flags] = AddCommand(app, commands, "softmax-backward", kSoftmaxBackwardHelp,
                                           kSoftmaxBackwardExamples, &RunSoftmaxBackward);
  command->add_option("--probs", flags->probs, "the answer of softmax, a file")
      ->type_name("FILE")
      ->required();
  command->add_option("--d-probs", flags->d_probs, "its gradient, a file")
      ->type_name("FILE")
      ->required();
  command->add_flag("--causal", flags->causal, "the mask was causal");
  AddAttention(command, flags, "the rows' log-sum-exp, a file; with --sinks");
}

void AddName(CLI::App* command, std::string* name) {
  command->add_option("NAME", *name, "of the head: 1 to 128 of A-Z, a-z, 0-9, '.', '_', '-'")
      ->required();
}

void AddHeads(CLI::App* app, Commands* commands) {
  CLI::App* heads = AddText(app, "heads", kHeadsHelp,
                            "  logitctl heads load llama models/llama --norm\n"
                            "  logitctl heads list");
  heads->require_subcommand(1);
  const auto [load, flags] =
      AddCommand(heads, commands, "load", kLoadHeadHelp, kLoadHeadExamples, &RunLoadHead);
  AddName(load, &flags->name);
  load->add_option("PATH", flags->path, "of the file or folder, in the server's --head-root")
      ->required();
  load->add_flag("--norm", flags->final_norm,
                 "with the model's final RMSNorm: callers send states from before it");
  Integers(
      load->add_option("--vocab", flags->vocab, "rows to keep of a padded weight; 0: by the model"),
      0, 1 << 20);
  load->add_flag("--shard", flags->shard,
                 "cut the vocabulary over all devices, each of which holds a part");
  const auto [update, update_flags] =
      AddCommand(heads, commands, "update", kUpdateHeadHelp,
                 "  logitctl heads update llama models/llama-step-2", &RunUpdateHead);
  AddName(update, &update_flags->name);
  update
      ->add_option("PATH", update_flags->path, "of the file or folder, in the server's --head-root")
      ->required();
  const auto [unload, unload_name] = AddCommand<std::string>(
      heads, commands, "unload",
      "Takes a head away from new calls; calls in flight keep it until they end.",
      "  logitctl heads unload llama", &RunUnloadHead);
  AddName(unload, unload_name);
  commands->push_back(
      {AddText(heads, "list", "All heads that are loaded.", "  logitctl heads list --format json"),
       &RunListHeads});
  const auto [get, get_name] = AddCommand<std::string>(
      heads, commands, "get", "One head by its name.", "  logitctl heads get llama", &RunGetHead);
  AddName(get, get_name);
}

void AddWatermark(CLI::App* app, Commands* commands) {
  CLI::App* watermark = AddText(app, "watermark", kWatermarkHelp,
                                "  logitctl watermark detect --tokens text.npy --key 7 --width 4");
  watermark->require_subcommand(1);
  const auto [detect, flags] = AddCommand(watermark, commands, "detect", kDetectWatermarkHelp,
                                          kDetectWatermarkExamples, &RunDetectWatermark);
  commands->back().calls = false;
  CLI::Option_group* text = detect->add_option_group("text", "one of");
  text->add_option("--tokens", flags->file, "a file of the text's token ids")->type_name("FILE");
  Integers(text->add_option("--ids", flags->ids, "the token ids themselves: ID,ID,..."), 0,
           std::numeric_limits<int32_t>::max())
      ->type_name("ID")
      ->delimiter(',');
  text->require_option(1);
  Integers(detect->add_option("--key", flags->key, "the watermark_key of the draws"), 0,
           std::numeric_limits<uint64_t>::max())
      ->required();
  Integers(detect->add_option("--width", flags->width, "the watermark_width of the draws"), 1, 16)
      ->required();
  Integers(detect->add_option("--prompt-tokens", flags->prompt_tokens,
                              "how many of the first tokens were not drawn: they only are context"),
           0, std::numeric_limits<int32_t>::max())
      ->capture_default_str();
}

void AddServer(CLI::App* app, Commands* commands) {
  commands->push_back(
      {AddText(app, "info", "What the server is: version, backend, device, limits, ops.",
               "  logitctl info\n  logitctl info --addr unix:/run/logitd.sock --format json"),
       &RunInfo});
  commands->push_back({AddText(app, "load", "What the server is doing now.",
                               "  logitctl load\n  logitctl load --format json"),
                       &RunLoad});
  commands->push_back(
      {AddText(app, "token",
               "Makes a random token, and its SHA-256 for the server's --tokens file.",
               "  logitctl token\n  logitctl token --format json"),
       &RunToken, /*calls=*/false});
  const auto [health, flags] = AddCommand(
      app, commands, "health",
      "Whether the server serves (grpc.health.v1); exit code 0 only for SERVING.",
      "  logitctl health --addr 10.0.0.7:7450 --tls-ca ca.crt\n  logitctl health --watch",
      &RunHealth);
  health->add_option("--service", flags->service, "a service's name; empty: the server");
  health->add_flag("--watch", flags->watch,
                   "print the status and every change of it until the server ends");
}

// The list of subcommands has the first line of each help.
class Formatter : public CLI::Formatter {
 public:
  std::string make_subcommand(const CLI::App* command) const override {
    const std::string help = command->get_description();
    std::ostringstream out;
    CLI::detail::format_help(out, command->get_display_name(true), help.substr(0, help.find('\n')),
                             get_column_width());
    return out.str();
  }
};

int Main(int argc, char** argv) {
  CLI::App app("logitctl: asks a logitd, the server that turns logits into tokens.", "logitctl");
  app.formatter(std::make_shared<Formatter>());
  app.footer(kFooter);
  app.set_version_flag("--version",
                       absl::StrCat("logitctl ", LOGITD_VERSION, ", gRPC ", grpc::Version()));
  app.require_subcommand(1);
  Commands commands;
  for (auto add : {AddTopK, AddSample, AddGenerate, AddVerify, AddScore, AddDivergence, AddSoftmax,
                   AddSoftmaxBackward, AddHeads, AddWatermark, AddServer}) {
    add(&app, &commands);
  }
  CommonFlags common;
  for (const Command& command : commands) {
    if (command.calls) AddCallFlags(command.app, &common);
    AddFormat(command.app, &common);
  }
  CLI::App* const completion = AddText(&app, "completion", kCompletionHelp, kCompletionExamples);
  std::string shell;
  Words(completion->add_option("SHELL", shell, "the shell"), {"bash"})->required();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    const std::string unknown = UnknownWord(app, {argv + 1, argv + argc});
    Complain(unknown.empty() ? UsageText(error) : unknown, "--help says more");
    return kExitBadInput;
  }
  if (completion->parsed()) {
    Print(BashCompletion(app));
    return kExitOk;
  }
  const auto command = std::find_if(commands.begin(), commands.end(),
                                    [](const Command& each) { return each.app->parsed(); });
  if (command == commands.end()) return kExitBadInput;
  if (IsProbe(*command->app) && command->app->count("--max-attempts") == 0) {
    common.max_attempts = kProbeAttempts;
  }
  const absl::StatusOr<Session> session = Session::Open(common);
  return session.ok() ? command->run(*session) : BadInput(session.status());
}

}  // namespace
}  // namespace logitd::cli

int main(int argc, char** argv) try {
  logitd::cli::HoldStandardStreams();
  return logitd::cli::ExitCodeOf(logitd::cli::Main(argc, argv));
} catch (const std::exception& error) {
  std::cerr << "logitctl: " << error.what() << "\n";
  return logitd::cli::kExitCallFailed;
}

// logitctl: asks a logitd from the command line.
#include <CLI/CLI.hpp>
#include <exception>
#include <iostream>
#include <string>

#include "client/cli/commands.h"

namespace {

constexpr char kFooter[] = R"(Examples:
  logitctl topk --logits logits.npy --k 5
  logitctl topk --logits batch.safetensors:logits --k 50 --temperature 0.7 --format json
  logitctl topk --text "It is a truth universally" --model demo/model --k 10
  logitctl sample --text "It is a truth" --seed 7 --top-k 50 --top-p 0.9 --top-logprobs 5
  logitctl sample --logits logits.npy --params params.json --format json
  logitctl sample --hidden states.npy --head llama --seed 7 --top-p 0.9
  logitctl generate --text "It is a truth" --tokens 40 --seed 7 --temperature 0.8 --top-p 0.9
  logitctl generate --text "It is a truth" --head demo --tokens 40 --seed 7
  logitctl score --text-file chapter.txt --model demo/model --head demo --plot loss.png
  logitctl score --hidden states.npy --head llama --targets ids.npy --totals --out losses.npy
  logitctl score --logits logits.npy --targets ids.npy --label-smoothing 0.1 --rank --entropy
  logitctl softmax --scores scores.npy --mask causal --scale 0.125 --out probs.npy
  logitctl softmax-backward --probs probs.npy --d-probs d.npy --scale 0.125 --causal --out g.npy
  logitctl heads load llama models/llama --norm
  logitctl heads list
  logitctl info --addr unix:/run/logitd.sock
  logitctl health --watch

Exit codes:
  0  done
  1  the server refused or failed the call
  2  bad usage or a bad file
  3  nobody answers at the address, or the server is not serving)";

constexpr char kTopKHelp[] =
    R"(The k most probable tokens of every row of a tensor of logits, or after a prompt.

Probabilities are of the full softmax of logits / temperature. JSON has the keys of
logitd.v1.TopKResponse: row i's tokens are entries [k_0 + ... + k_(i-1), + k_i) of indices and
probs; with --text there is one more key, text. A file larger than the server takes at once is
sent in several requests of whole rows; the phases of the timings are then sums.)";

constexpr char kSampleHelp[] =
    R"(One token out of every row of a tensor of logits, or of hidden states, or after a prompt.

Hidden states are for a head that the server has loaded, and of its dtype; so is, with --head, the
state of --model after a prompt, which else sends its logits.

In this order: logit bias, penalties, allowed tokens, temperature, min-p, top-k, top-p, draw. A seed
and a position always draw the same. Parameters come as flags, for all rows, or from a JSON file
with the keys of logitd.v1.SampleRequest, whose lists may differ from row to row; a flag wins over
the file. JSON out has the keys of logitd.v1.SampleResponse; with --text also text and top_text.)";

constexpr char kGenerateHelp[] =
    R"(A prompt continued, token by token, as they are drawn.

The language model of --model runs here, the server draws: a message of one stream for each token,
positions counted from 0. The same seed and flags give the same text. Penalties are over the prompt and what was drawn.
With --head the server has the model's output head (logitd --head NAME=PATH), and is sent hidden states instead of logits.)";

constexpr char kScoreHelp[] =
    R"(How probable the tokens of a text were: loss, log-probability and more of every token, and perplexity.

Of one of three: a text, a paragraph a line, and the language model of --model, which runs here (with
--head the server has its output head, and is sent hidden states; without, its logits); hidden states in a file, for a
head that the server has loaded; or logits in a file. Row i of a file is what was known before token
i of --targets, which is a file of int32 or int64: FILE.npy, FILE.safetensors or
FILE.safetensors:NAME. Rows whose target is --ignore-index are not counted.

Long input goes as a stream of messages, and where that is lost goes on after the last answer;
--deadline is then how long one answer may take. The perplexity is exp of the mean negative
log-probability: smoothing and z-loss are not in it. JSON has the keys of logitd.v1.ScoreResponse,
and targets; with a text also text and top_text.)";

constexpr char kSoftmaxHelp[] =
    R"(Attention: softmax(scale * scores + mask) of every row of a tensor of scores, into a file.

Files are FILE.npy (f32, f16), FILE.safetensors or FILE.safetensors:NAME (also bf16), of shape
[queries,keys], [heads,queries,keys] or [batch,heads,queries,keys]. A mask is booleans, true where a
key is hidden, or floats that are added to the scaled scores; its sizes are those of the scores or
1, and what it lacks in front is 1. Where queries and keys differ in number, the last query is
aligned with the last key. Hidden keys get exactly 0; a row that sees none is zeros, and is listed.
A tensor larger than the server takes at once is streamed; the phases of the timings are then
sums.)";

constexpr char kSoftmaxBackwardHelp[] =
    R"(The gradient of softmax: from probabilities and the gradient for them to that for the scores.

Files and shapes as in logitctl softmax, scale and window as they were there. Its mask is not asked
for: where a probability is 0, so is the gradient. With --sinks, --logsumexp is what logitctl softmax
wrote, and the gradient for the sinks is printed.)";

constexpr char kHeadsHelp[] =
    R"(Output heads: the last matrices of models, which the server holds on its device by name.

A head turns hidden states into logits. With one loaded, calls send hidden states and its name, and
nothing as wide as the vocabulary travels.)";

constexpr char kLoadHeadHelp[] =
    R"(Loads a head from the server's own files, while other calls go on.

PATH is a safetensors file, or a folder as Hugging Face models have them, inside the directory that
logitd was started with (--head-root). Of a folder, config.json says how the model uses its head: the
real size of a padded vocabulary, tied embeddings, scale and softcap of the logits. A terminal sees a
bar. --deadline does not count here: Ctrl-C gives the load up.)";

void AddSampling(CLI::App* command, logitd::cli::SamplingFlags* flags) {
  command->add_option("--params", flags->params,
                      "a JSON file of parameters, e.g. {\"top_k\": [50], \"top_p\": [0.9]}");
  command->add_option("--seed", flags->seed, "of the random numbers; 0 if not given");
  command->add_option("--temperature", flags->temperature,
                      "divides the logits; 0: always the highest; 1 if not given");
  command->add_option("--top-k", flags->top_k, "keeps the k most probable; 0: all");
  command->add_option("--top-p", flags->top_p,
                      "keeps the most probable that reach this share; 1: all");
  command->add_option("--min-p", flags->min_p,
                      "keeps those of this share of the most probable one; 0: all");
  command->add_option("--repetition-penalty", flags->repetition_penalty,
                      "divides positive logits of tokens seen, multiplies negative ones; 1: off");
  command->add_option("--presence-penalty", flags->presence_penalty,
                      "off the logits of tokens seen; 0: off");
  command->add_option("--frequency-penalty", flags->frequency_penalty,
                      "off the logits of tokens for each time they were seen; 0: off");
  command->add_option("--logit-bias", flags->logit_bias, "ID=VALUE, added to a logit; repeatable")
      ->delimiter(',');
  command->add_option("--allow", flags->allow, "the only tokens that may be drawn: ID,ID,...")
      ->delimiter(',');
  command->add_option("--top-logprobs", flags->top_logprobs, "how many top tokens to report");
}

}  // namespace

int main(int argc, char** argv) try {
  using namespace logitd::cli;
  CLI::App app("logitctl: asks a logitd, the server that turns logits into tokens.", "logitctl");
  app.footer(kFooter);
  app.require_subcommand(1);

  CommonFlags common;
  auto add_common = [&common](CLI::App* command) {
    command->add_option("--addr", common.address, "HOST:PORT or unix:PATH of the server")
        ->envname("LOGITD_ADDR")
        ->capture_default_str();
    command->add_option("--deadline", common.deadline_s, "seconds for one call, retries included")
        ->check(CLI::Range(0.001, 86400.0))
        ->capture_default_str();
    command
        ->add_option("--max-attempts", common.max_attempts,
                     "tries of one call while the server is full or away")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
    command->add_option("--format", common.format, "how to print the answer")
        ->check(CLI::IsMember({"table", "json"}))
        ->capture_default_str();
  };

  TopKFlags topk;
  CLI::App* topk_command = app.add_subcommand("topk", kTopKHelp);
  CLI::Option_group* input = topk_command->add_option_group("input", "one of");
  input->add_option("--logits", topk.logits,
                    "FILE.npy, FILE.safetensors or FILE.safetensors:NAME; [rows,vocab] or [vocab], "
                    "f32, f16 or (safetensors) bf16");
  input->add_option("--text", topk.text, "a prompt, for the language model of --model");
  input->require_option(1);
  topk_command->add_option("--model", topk.model, "directory of the language model for --text")
      ->capture_default_str();
  topk_command
      ->add_option("--head", topk.head,
                   "with --text: a head of the server that is the model's; sends its hidden state")
      ->excludes("--logits");
  topk_command->add_option("--k", topk.k, "tokens a row, 1 to the vocabulary's size")
      ->capture_default_str();
  topk_command->add_option("--temperature", topk.temperature, "divides the logits; above 0")
      ->capture_default_str();
  add_common(topk_command);

  SampleFlags sample;
  CLI::App* sample_command = app.add_subcommand("sample", kSampleHelp);
  CLI::Option_group* sample_input = sample_command->add_option_group("input", "one of");
  sample_input->add_option("--logits", sample.logits,
                           "FILE.npy, FILE.safetensors or FILE.safetensors:NAME, as for topk");
  sample_input->add_option("--hidden", sample.hidden,
                           "a file, [rows,hidden], in the dtype of the head");
  sample_input->add_option("--text", sample.text, "a prompt, for the language model of --model");
  sample_input->require_option(1);
  sample_command->add_option("--model", sample.model, "directory of the language model for --text")
      ->capture_default_str();
  sample_command
      ->add_option("--head", sample.head,
                   "a head that the server has loaded; required with --hidden; with --text the "
                   "model's own, and its hidden state is sent")
      ->excludes("--logits");
  AddSampling(sample_command, &sample.sampling);
  sample_command->add_option("--position", sample.position,
                             "place in the seed's sequence of random numbers; 0 if not given");
  sample_command
      ->add_option("--history", sample.history,
                   "ids the penalties are over: ID,ID,...; with --text the prompt's if not given")
      ->delimiter(',');
  sample_command
      ->add_option("--extra-ids", sample.extra_ids,
                   "ids whose log-probability to report: ID,ID,...")
      ->delimiter(',');
  sample_command
      ->add_option("--logprob-mode", sample.logprob_mode,
                   "raw: of the logits as sent; processed: of what may be drawn")
      ->check(CLI::IsMember({"raw", "processed"}));
  add_common(sample_command);

  GenerateFlags generate;
  CLI::App* generate_command = app.add_subcommand("generate", kGenerateHelp);
  generate_command->add_option("--text", generate.text, "the prompt")->required();
  generate_command->add_option("--model", generate.model, "directory of the language model")
      ->capture_default_str();
  generate_command->add_option("--head", generate.head,
                               "a head of the server that is the model's; sends hidden states");
  generate_command->add_option("--tokens", generate.tokens, "how many to draw")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  generate_command->add_flag("--details", generate.details,
                             "a line for every token, with --top-logprobs of what it was drawn of");
  AddSampling(generate_command, &generate.sampling);
  add_common(generate_command);

  ScoreFlags score;
  CLI::App* score_command = app.add_subcommand("score", kScoreHelp);
  CLI::Option_group* score_input = score_command->add_option_group("input", "one of");
  score_input->add_option("--logits", score.logits, "a file, [rows,vocab], as for topk");
  score_input->add_option("--hidden", score.hidden,
                          "a file, [rows,hidden], in the dtype of the head");
  score_input->add_option("--text", score.text, "a text, for the language model of --model");
  score_input->add_option("--text-file", score.text_file, "a file that has it");
  score_input->require_option(1);
  score_command->add_option("--model", score.model, "directory of the language model for a text")
      ->capture_default_str();
  score_command->add_option("--head", score.head,
                            "a head that the server has loaded; required with --hidden");
  score_command->add_option("--targets", score.targets,
                            "a file of token ids, [rows]; required with --logits and --hidden");
  score_command
      ->add_option("--ignore-index", score.ignore_index, "the target of rows that do not count")
      ->capture_default_str();
  score_command->add_option("--temperature", score.temperature, "divides the logits; above 0")
      ->capture_default_str();
  score_command
      ->add_option("--softcap", score.softcap,
                   "c of c tanh(logit / c); 0: off; not with --head, which has its own")
      ->capture_default_str();
  score_command->add_option("--label-smoothing", score.label_smoothing, "0 to below 1; 0: off")
      ->capture_default_str();
  score_command
      ->add_option("--smoothing", score.smoothing,
                   "who shares the smoothing: torch: every token; megatron: all but the target")
      ->check(CLI::IsMember({"torch", "megatron"}))
      ->capture_default_str();
  score_command->add_option("--z-loss", score.z_loss, "adds this times logsumexp^2; 0: off")
      ->capture_default_str();
  score_command->add_option("--top-logprobs", score.top_logprobs, "how many top tokens to report");
  score_command
      ->add_option("--extra-ids", score.extra_ids,
                   "ids whose log-probability to report of every row: ID,ID,...")
      ->delimiter(',');
  score_command->add_flag("--rank", score.rank, "the targets' places, 1 for the most probable");
  score_command->add_flag("--entropy", score.entropy, "of the rows, in nats");
  score_command->add_flag("--totals", score.totals, "no line for every token");
  score_command->add_option("--out", score.out, "FILE.npy or FILE.safetensors: the losses");
  score_command->add_option("--plot", score.plot, "FILE.png: the loss along the text");
  add_common(score_command);

  const auto add_attention = [](CLI::App* command, auto* flags) {
    command->add_option("--window", flags->window,
                        "L,R: keys a query sees to its left and right; inf: no bound");
    command->add_option("--scale", flags->scale, "multiplies the scores")->capture_default_str();
    command->add_option("--sinks", flags->sinks,
                        "a file [heads], f32: a logit a head that takes its share; 0 is softmax "
                        "off by one");
    command
        ->add_option("--out-dtype", flags->out_dtype,
                     "of the answer; that of the input if not given")
        ->check(CLI::IsMember({"f32", "f16", "bf16"}));
    command->add_option("--out", flags->out, "FILE.npy or FILE.safetensors to write")->required();
  };

  SoftmaxFlags softmax;
  CLI::App* softmax_command = app.add_subcommand("softmax", kSoftmaxHelp);
  softmax_command->add_option("--scores", softmax.scores, "the scores, a file")->required();
  softmax_command->add_option("--mask", softmax.mask, "none, causal, or a file of bool or float")
      ->capture_default_str();
  add_attention(softmax_command, &softmax);
  softmax_command->add_option("--logsumexp", softmax.logsumexp,
                              "a file to write, f32: the rows' log-sum-exp, sinks included");
  add_common(softmax_command);

  SoftmaxBackwardFlags backward;
  CLI::App* backward_command = app.add_subcommand("softmax-backward", kSoftmaxBackwardHelp);
  backward_command->add_option("--probs", backward.probs, "what softmax answered, a file")
      ->required();
  backward_command->add_option("--d-probs", backward.d_probs, "the gradient for it, a file")
      ->required();
  backward_command->add_flag("--causal", backward.causal, "the mask was causal");
  add_attention(backward_command, &backward);
  backward_command->add_option("--logsumexp", backward.logsumexp,
                               "the rows' log-sum-exp, a file; with --sinks");
  add_common(backward_command);

  CLI::App* heads_command = app.add_subcommand("heads", kHeadsHelp);
  heads_command->require_subcommand(1);
  const auto add_name = [](CLI::App* command, std::string* name) {
    command->add_option("NAME", *name, "of the head: 1 to 128 of A-Z, a-z, 0-9, '.', '_', '-'")
        ->required();
  };
  LoadHeadFlags load;
  CLI::App* load_command = heads_command->add_subcommand("load", kLoadHeadHelp);
  add_name(load_command, &load.name);
  load_command->add_option("PATH", load.path, "of the file or folder, in the server's --head-root")
      ->required();
  load_command->add_flag("--norm", load.final_norm,
                         "with the model's final RMSNorm: callers send states from before it");
  load_command
      ->add_option("--vocab", load.vocab, "rows to keep of a padded weight; 0: by the model")
      ->check(CLI::Range(0, 1 << 20));
  add_common(load_command);
  std::string head_name;
  CLI::App* unload_command = heads_command->add_subcommand(
      "unload", "Takes a head away from new calls; those under way keep it until they end.");
  add_name(unload_command, &head_name);
  add_common(unload_command);
  CLI::App* list_command = heads_command->add_subcommand("list", "All heads that are loaded.");
  add_common(list_command);
  CLI::App* get_command = heads_command->add_subcommand("get", "One head by its name.");
  add_name(get_command, &head_name);
  add_common(get_command);

  CLI::App* info_command =
      app.add_subcommand("info", "What the server is: version, backend, device, limits, ops.");
  add_common(info_command);

  HealthFlags health;
  CLI::App* health_command = app.add_subcommand(
      "health", "Whether the server serves (grpc.health.v1); exit code 0 only for SERVING.");
  health_command->add_option("--service", health.service, "a service's name; empty: the server");
  health_command->add_flag("--watch", health.watch,
                           "print the status and every change of it until the server goes");
  add_common(health_command);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitBadInput;
  }
  if (topk_command->parsed()) return RunTopK(common, topk);
  if (sample_command->parsed()) return RunSample(common, sample);
  if (generate_command->parsed()) return RunGenerate(common, generate);
  if (score_command->parsed()) return RunScore(common, score);
  if (softmax_command->parsed()) return RunSoftmax(common, softmax);
  if (backward_command->parsed()) return RunSoftmaxBackward(common, backward);
  if (load_command->parsed()) return RunLoadHead(common, load);
  if (unload_command->parsed()) return RunUnloadHead(common, head_name);
  if (list_command->parsed()) return RunListHeads(common);
  if (get_command->parsed()) return RunGetHead(common, head_name);
  if (info_command->parsed()) return RunInfo(common);
  return RunHealth(common, health);
} catch (const std::exception& error) {
  std::cerr << "logitctl: " << error.what() << "\n";
  return logitd::cli::kExitCallFailed;
}

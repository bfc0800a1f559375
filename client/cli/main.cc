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
  topk_command->add_option("--k", topk.k, "tokens a row, 1 to the vocabulary's size")
      ->capture_default_str();
  topk_command->add_option("--temperature", topk.temperature, "divides the logits; above 0")
      ->capture_default_str();
  add_common(topk_command);

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
  if (info_command->parsed()) return RunInfo(common);
  return RunHealth(common, health);
} catch (const std::exception& error) {
  std::cerr << "logitctl: " << error.what() << "\n";
  return logitd::cli::kExitCallFailed;
}

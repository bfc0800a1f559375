// The subcommands of logitctl. Each prints its answer on stdout, its errors on stderr, and returns
// the exit code.
#ifndef LOGITD_CLIENT_CLI_COMMANDS_H_
#define LOGITD_CLIENT_CLI_COMMANDS_H_

#include <string>

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
  int k = 10;
  float temperature = 1;
};

int RunTopK(const CommonFlags& common, const TopKFlags& flags);
int RunInfo(const CommonFlags& common);

struct HealthFlags {
  std::string service;
  bool watch = false;
};
int RunHealth(const CommonFlags& common, const HealthFlags& flags);

}  // namespace logitd::cli

#endif  // LOGITD_CLIENT_CLI_COMMANDS_H_

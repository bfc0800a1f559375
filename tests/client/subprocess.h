// Runs our own binaries, as a shell would.
#ifndef LOGITD_TESTS_CLIENT_SUBPROCESS_H_
#define LOGITD_TESTS_CLIENT_SUBPROCESS_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace logitd::testing {

struct Ran {
  int code = -1;
  std::string out;
  std::string err;
};

// Where the binary `name` is: next to the test, as in the build directory.
std::string BinaryPath(const std::string& name);

// Runs the binary `name`, or that of an absolute path. Killed, and the test failed, after 60 s.
// `on_output` runs after every piece of stdout with all of it so far.
Ran RunBinary(const std::string& name, std::vector<std::string> args,
              const std::function<void(const std::string&)>& on_output = nullptr);

// Runs the binary `name` and kills it after `time`, at any moment of its work. False: it had ended
// by itself.
bool RunAndKill(const std::string& name, std::vector<std::string> args, absl::Duration time);

// A binary of ours that keeps running: started here, asked to stop by SIGTERM at the end, killed 20
// s later.
class Daemon {
 public:
  Daemon(const std::string& name, std::vector<std::string> args);
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  int pid() const { return pid_; }

 private:
  int pid_ = 0;
};

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_CLIENT_SUBPROCESS_H_

// The real server as a subprocess on ports of its own choosing.
#ifndef LOGITD_TESTS_E2E_SERVER_PROCESS_H_
#define LOGITD_TESTS_E2E_SERVER_PROCESS_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace logitd::e2e {

// The most that a test waits for what must come, beside other work.
inline constexpr absl::Duration kPatience = absl::Seconds(30);

// The result of a run of the binary.
struct Ended {
  int exit_code = -1;
  std::string text;  // both outputs
};

// Path of the server: $LOGITD_BINARY, else `logitd` next to the test or in ../bin.
std::string ServerBinary();

// Runs the server with `flags` until it ends by itself.
Ended RunToEnd(const std::vector<std::string>& flags);

// Not thread-safe, except Metric.
class ServerProcess {
 public:
  // Starts the server with a TCP port, a Unix socket, a metrics port and `flags`, on the CPU
  // backend unless they name another. Waits until it listens, and throws std::runtime_error where
  // it ends before. `max_files`: its hard limit of open files; 0: that of this process.
  explicit ServerProcess(std::vector<std::string> flags = {}, int max_files = 0);
  // Kills it if it still runs.
  ~ServerProcess();
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  const std::string& tcp() const { return tcp_; }                  // "127.0.0.1:PORT"
  const std::string& unix_socket() const { return unix_socket_; }  // "unix:PATH"
  int port() const;
  int metrics_port() const { return metrics_port_; }
  pid_t pid() const { return pid_; }

  void Signal(int signal);
  // The exit code, or nullopt if it still runs after `timeout`; 128 + n if signal n ended it.
  std::optional<int> Wait(absl::Duration timeout);

  // Resident memory now, and its peak.
  int64_t RssBytes() const { return StatusBytes("VmRSS:"); }
  int64_t PeakRssBytes() const { return StatusBytes("VmHWM:"); }

  // Expects that the peak of memory is less than `mib` above `before`. Only in the suite
  // ResidentMemoryTest.
  void ExpectGrownLess(int64_t before, int64_t mib) const;

  // The metrics page, and one sample by its name with labels as printed; -1 if there is none.
  std::string Scrape() const;
  double Metric(const std::string& sample) const;
  // True when the sample is equal to ('=') or above ('>') `value`. False after `timeout`.
  bool WaitForMetric(const std::string& sample, char what, double value,
                     absl::Duration timeout = kPatience) const;

  std::string Log() const;

 private:
  int64_t StatusBytes(const std::string& key) const;

  std::string directory_;
  std::string log_path_;
  std::string unix_socket_;
  std::string tcp_;
  int metrics_port_ = 0;
  pid_t pid_ = -1;
  std::optional<int> exit_code_;
};

}  // namespace logitd::e2e

#endif  // LOGITD_TESTS_E2E_SERVER_PROCESS_H_

#include "tests/e2e/server_process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"

namespace logitd::e2e {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

pid_t Spawn(const std::vector<std::string>& flags, const std::string& output, int max_files = 0) {
  const std::string binary = ServerBinary();
  std::vector<std::string> words = {binary};
  words.insert(words.end(), flags.begin(), flags.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    const int out = open(output.c_str(), O_CREAT | O_WRONLY | O_TRUNC | O_APPEND, 0600);
    dup2(out, 1);
    dup2(out, 2);
    if (max_files > 0) {
      const auto files = static_cast<rlim_t>(max_files);
      const rlimit limit = {.rlim_cur = files / 2, .rlim_max = files};
      setrlimit(RLIMIT_NOFILE, &limit);
    }
    execv(binary.c_str(), argv.data());
    _exit(127);
  }
  return pid;
}

int ExitCode(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

std::string MakeDirectory() {
  std::string pattern = ::testing::TempDir() + "/logitd_e2e_XXXXXX";
  if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp " + pattern);
  return pattern;
}

// The text from `key` to the end of its line; empty while the line is not complete.
std::string LineAfter(const std::string& text, const std::string& key) {
  const size_t at = text.find(key);
  if (at == std::string::npos) return "";
  const size_t end = text.find('\n', at);
  if (end == std::string::npos) return "";
  return text.substr(at + key.size(), end - at - key.size());
}

}  // namespace

std::string ServerBinary() {
  if (const char* path = std::getenv("LOGITD_BINARY")) return path;
  const std::filesystem::path here = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  for (const auto& path : {here / "logitd", here / ".." / "bin" / "logitd"}) {
    if (std::filesystem::exists(path)) return path.string();
  }
  throw std::runtime_error("no logitd next to " + here.string() + "; set LOGITD_BINARY");
}

Ended RunToEnd(const std::vector<std::string>& flags) {
  const std::string directory = MakeDirectory();
  const std::string output = directory + "/output";
  const pid_t pid = Spawn(flags, output);
  int status = 0;
  waitpid(pid, &status, 0);
  Ended ended = {.exit_code = ExitCode(status), .text = ReadFile(output)};
  std::filesystem::remove_all(directory);
  return ended;
}

ServerProcess::ServerProcess(std::vector<std::string> flags, int max_files)
    : directory_(MakeDirectory()) {
  log_path_ = directory_ + "/log";
  unix_socket_ = "unix:" + directory_ + "/socket";
  const bool names_backend = std::any_of(flags.begin(), flags.end(), [](const std::string& flag) {
    return absl::StartsWith(flag, "--backend=");
  });
  if (!names_backend) flags.push_back("--backend=cpu");
  for (const std::string& flag : {std::string("--listen=127.0.0.1:0"), "--listen=" + unix_socket_,
                                  std::string("--metrics-listen=127.0.0.1:0")}) {
    flags.push_back(flag);
  }
  pid_ = Spawn(flags, log_path_, max_files);
  const absl::Time end = absl::Now() + absl::Seconds(30);
  std::string listening;
  while (listening.empty()) {
    if (absl::Now() > end || Wait(absl::ZeroDuration()).has_value()) {
      throw std::runtime_error("the server did not start:\n" + Log());
    }
    absl::SleepFor(absl::Milliseconds(5));
    listening = LineAfter(Log(), "listening on ");
  }
  tcp_ = std::string(absl::StripAsciiWhitespace(listening.substr(0, listening.find(' '))));
  const std::string metrics = LineAfter(Log(), "metrics on ");
  metrics_port_ = std::atoi(metrics.substr(metrics.rfind(':') + 1).c_str());
}

ServerProcess::~ServerProcess() {
  if (!exit_code_.has_value()) {
    Signal(SIGKILL);
    Wait(absl::Seconds(10));
  }
  std::filesystem::remove_all(directory_);
}

int ServerProcess::port() const { return std::atoi(tcp_.substr(tcp_.rfind(':') + 1).c_str()); }

void ServerProcess::Signal(int signal) { kill(pid_, signal); }

std::optional<int> ServerProcess::Wait(absl::Duration timeout) {
  const absl::Time end = absl::Now() + timeout;
  while (!exit_code_.has_value()) {
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      exit_code_ = ExitCode(status);
    } else if (absl::Now() >= end) {
      break;
    } else {
      absl::SleepFor(absl::Milliseconds(2));
    }
  }
  return exit_code_;
}

int64_t ServerProcess::StatusBytes(const std::string& key) const {
  std::ifstream file(absl::StrCat("/proc/", pid_, "/status"));
  for (std::string word; file >> word;) {
    int64_t kib = 0;
    if (word == key && file >> kib) return kib << 10;
  }
  return -1;
}

void ServerProcess::ExpectGrownLess(int64_t before, int64_t mib) const {
  // scripts/test leaves this suite out where a sanitizer multiplies the memory.
  EXPECT_STREQ(::testing::UnitTest::GetInstance()->current_test_info()->test_suite_name(),
               "ResidentMemoryTest");
  const int64_t grown = (PeakRssBytes() - before) >> 20;
  ::testing::Test::RecordProperty("grown_mib", static_cast<int>(grown));
  EXPECT_LT(grown, mib) << "grew by " << grown << " MiB";
}

std::string ServerProcess::Scrape() const {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(metrics_port_));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string page;
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
    const std::string request =
        "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) > 0) {
      char buffer[16384];
      for (ssize_t got = 0; (got = recv(fd, buffer, sizeof(buffer), 0)) > 0;) {
        page.append(buffer, static_cast<size_t>(got));
      }
    }
  }
  close(fd);
  return page;
}

double ServerProcess::Metric(const std::string& sample) const {
  const std::string page = Scrape();
  const std::string value = LineAfter(page, "\n" + sample + " ");
  return value.empty() ? -1 : std::atof(value.c_str());
}

bool ServerProcess::WaitForMetric(const std::string& sample, char what, double value,
                                  absl::Duration timeout) const {
  const absl::Time end = absl::Now() + timeout;
  do {
    const double now = Metric(sample);
    if (what == '=' ? now == value : now > value) return true;
    absl::SleepFor(absl::Milliseconds(5));
  } while (absl::Now() < end);
  return false;
}

std::string ServerProcess::Log() const { return ReadFile(log_path_); }

}  // namespace logitd::e2e

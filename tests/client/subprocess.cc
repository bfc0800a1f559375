#include "tests/client/subprocess.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <utility>

#include "absl/time/clock.h"

namespace logitd::testing {
namespace {

// `args[0]` is a path. 0 and a failed test where it cannot be started.
pid_t Spawn(std::vector<std::string> args, const posix_spawn_file_actions_t* actions) {
  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);
  pid_t pid = 0;
  if (posix_spawn(&pid, argv[0], actions, nullptr, argv.data(), environ) != 0) {
    ADD_FAILURE() << "cannot run " << argv[0];
    return 0;
  }
  return pid;
}

}  // namespace

std::string BinaryPath(const std::string& name) {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / name;
}

Ran RunBinary(const std::string& name, std::vector<std::string> args,
              const std::function<void(const std::string&)>& on_output) {
  std::array<int, 2> out;
  std::array<int, 2> err;
  EXPECT_EQ(pipe2(out.data(), O_CLOEXEC), 0);
  EXPECT_EQ(pipe2(err.data(), O_CLOEXEC), 0);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, out[1], 1);
  posix_spawn_file_actions_adddup2(&actions, err[1], 2);
  args.insert(args.begin(), BinaryPath(name));
  const pid_t pid = Spawn(std::move(args), &actions);
  posix_spawn_file_actions_destroy(&actions);
  close(out[1]);
  close(err[1]);
  Ran ran;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  std::array<pollfd, 2> fds = {pollfd{out[0], POLLIN, 0}, pollfd{err[0], POLLIN, 0}};
  int open = 2;
  bool late = false;
  while (open > 0) {
    if (!late && std::chrono::steady_clock::now() > end) {
      late = true;
      if (pid != 0) kill(pid, SIGKILL);
      ADD_FAILURE() << name << " took more than 60 s";
    }
    poll(fds.data(), fds.size(), 200);
    for (pollfd& fd : fds) {
      if (fd.fd < 0 || fd.revents == 0) continue;
      char buffer[4096];
      const ssize_t n = read(fd.fd, buffer, sizeof(buffer));
      if (n <= 0) {
        fd.fd = -1;
        --open;
        continue;
      }
      (fd.fd == out[0] ? ran.out : ran.err).append(buffer, n);
      if (fd.fd == out[0] && on_output != nullptr) on_output(ran.out);
    }
  }
  close(out[0]);
  close(err[0]);
  int status = 0;
  if (pid != 0) waitpid(pid, &status, 0);
  ran.code = pid != 0 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return ran;
}

bool RunAndKill(const std::string& name, std::vector<std::string> args, absl::Duration time) {
  args.insert(args.begin(), BinaryPath(name));
  const pid_t pid = Spawn(std::move(args), nullptr);
  absl::SleepFor(time);
  kill(pid, SIGKILL);
  int status = 0;
  return waitpid(pid, &status, 0) == pid && WIFSIGNALED(status);
}

// setpriv becomes the daemon, which then ends with this process: one that outlives a test that
// crashes would hold its output open, and whoever reads that would wait.
Daemon::Daemon(const std::string& name, std::vector<std::string> args) {
  args.insert(args.begin(), {"/usr/bin/setpriv", "--pdeathsig", "KILL", BinaryPath(name)});
  pid_ = Spawn(std::move(args), nullptr);
}

Daemon::~Daemon() {
  if (pid_ == 0) return;
  kill(pid_, SIGTERM);
  pollfd end = {static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)), POLLIN, 0};
  if (poll(&end, 1, 20000) != 1) {
    ADD_FAILURE() << "the daemon did not stop within 20 s of SIGTERM";
    kill(pid_, SIGKILL);
  }
  close(end.fd);
  waitpid(pid_, nullptr, 0);
}

}  // namespace logitd::testing

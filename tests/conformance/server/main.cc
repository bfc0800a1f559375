// Serves gRPC's interoperability cases until SIGTERM or SIGINT.
//
// usage: conformance_server HOST:PORT [CERTIFICATE KEY]. The files are PEM: with them it speaks
// TLS. At the end it prints what is left when all clients have gone, which is all zeros.
#include <csignal>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "tests/conformance/server/interop_server.h"

namespace {

std::string ReadFile(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc != 4) {
    std::fprintf(stderr, "usage: %s HOST:PORT [CERTIFICATE KEY]\n", argv[0]);
    return 2;
  }
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGTERM);
  sigaddset(&ends, SIGINT);
  pthread_sigmask(SIG_BLOCK, &ends, nullptr);  // before the loops' threads, which inherit it
  std::shared_ptr<logitd::door::TlsSource> tls;
  if (argc == 4) {
    tls = std::make_shared<logitd::door::TlsSource>();
    const absl::Status set =
        tls->Set({.certificate = ReadFile(argv[2]), .key = ReadFile(argv[3]), .client_ca = {}});
    if (!set.ok()) return Fail(set);
  }
  logitd::conformance::InteropServer server(tls);
  if (const absl::Status started = server.Start(argv[1]); !started.ok()) return Fail(started);
  absl::PrintF("listening on %s\n", server.listening());
  std::fflush(stdout);
  int signal = 0;
  sigwait(&ends, &signal);
  // Clients have closed their connections; the loops may still have to read that.
  const absl::Time limit = absl::Now() + absl::Seconds(10);
  while (server.connections() > 0 && absl::Now() < limit) absl::SleepFor(absl::Milliseconds(1));
  absl::PrintF("left: %d connections, %d calls, %d bytes; cut: %d\n", server.connections(),
               server.calls(), server.held_bytes(), server.cuts());
  return 0;
}

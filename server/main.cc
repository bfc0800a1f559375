// logitd. Exit codes: 0 drained, 1 could not start, 2 a bad flag or file, 3 all devices were lost,
// or one does not end a batch (the orchestrator should start a new process).
#include <stdlib.h>

#include <cstdlib>
#include <exception>
#include <iostream>

#include "kernels/backend.h"
#include "server/config.h"
#include "server/log.h"
#include "server/serve.h"

int main(int argc, char** argv) try {
  logitd::Config config;
  if (const auto code = logitd::ParseConfig(argc, argv, &config, std::cout, std::cerr)) {
    return *code;
  }
  logitd::SetUpLogging(config.log_level, config.log_format);
  // Otherwise CUDA loads a kernel at its first use, and the first caller of an op waits for it.
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
  return logitd::Serve(config, [&config] {
    return logitd::CreateBackends(config.backend,
                                  {.devices = config.devices, .cpu_threads = config.cpu_threads});
  });
} catch (const std::exception& error) {
  std::cerr << "logitd: " << error.what() << "\n";
  return EXIT_FAILURE;
}

#!/usr/bin/env python3
"""Other projects can use an installed logitd: examples/cpp builds against it by CMake and runs, and examples/c by cc.

    install_test.py BUILD_DIR
"""

import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(__file__).resolve().parent.parent.parent
LOGITS = [[0, 3, 1, 2], [5, 4, 7, 6]]  # as in examples/cpp


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def expected():
    lines = []
    for row in LOGITS:
        total = sum(math.exp(x) for x in row)
        best = sorted(range(4), key=lambda i: -row[i])[:3]
        lines.append(" ".join(f"{i} {math.exp(row[i]) / total:.4f}" for i in best))
    return "\n".join(lines) + "\n"


def check_relocatable(prefix, build):
    """No installed file of CMake names a directory of the build."""
    for file in prefix.rglob("*.cmake"):
        for path in (SOURCE, build, prefix):
            if str(path) + "/" in file.read_text():
                sys.exit(f"{file.name}: names {path}, allowed no path of the build or of the installation")


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory(prefix="logitd-install-") as scratch:
        scratch = pathlib.Path(scratch)
        prefix = scratch / "prefix"
        run("cmake", "--install", build, "--component", "development", "--prefix", prefix)
        check_relocatable(prefix, build)
        run("cmake", "--install", build, "--component", "runtime", "--prefix", prefix)
        prefix = prefix.rename(scratch / "moved")
        configure = ["cmake", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_BUILD_TYPE=Release"]
        run(*configure, "-S", SOURCE / "examples/cpp", "-B", scratch / "example")
        run("cmake", "--build", scratch / "example", "-j", "2")

        # The ops need no gRPC, no protobuf and no CUDA toolkit.
        (scratch / "ops").mkdir()
        (scratch / "ops/CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.24)\nproject(ops LANGUAGES CXX)\n"
            "find_package(logitd REQUIRED COMPONENTS kernels)\n"
            "if(TARGET gRPC::grpc++ OR TARGET protobuf::libprotobuf)\n  message(FATAL_ERROR \"gRPC was found\")\nendif()\n"
            "find_package(logitd QUIET COMPONENTS nothing)\n"
            "if(logitd_FOUND)\n  message(FATAL_ERROR \"a component that does not exist was found\")\nendif()\n")
        run(*configure, "-DCMAKE_DISABLE_FIND_PACKAGE_gRPC=ON", "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON",
            "-S", scratch / "ops", "-B", scratch / "ops/build")
        for file in prefix.rglob("*.cmake"):
            if "CUDAToolkit" in file.read_text() or "CUDA::" in file.read_text():
                sys.exit(f"{file.name}: asks for the CUDA toolkit")

        (library,) = prefix.rglob("liblogitd.so")
        run("cc", "-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", f"-I{prefix}/include",
            SOURCE / "examples/c/top_k.c", f"-L{library.parent}", "-llogitd", "-o", scratch / "top_k_c")
        answers = {
            "top_k": run(scratch / "example/top_k"),
            "examples/c": run(scratch / "top_k_c", env={**os.environ, "LD_LIBRARY_PATH": str(library.parent)}),
        }
        server = subprocess.Popen([build / "logitd", "--backend", "cpu", "--metrics-listen", "off", "--listen",
                                   f"unix:{scratch}/socket"], stderr=subprocess.PIPE, text=True)
        try:
            for line in server.stderr:
                if re.search("listening on", line):
                    break
            answers["ask"] = run(scratch / "example/ask", f"unix:{scratch}/socket", timeout=60)
        finally:
            server.send_signal(signal.SIGTERM)
            server.stderr.read()
            code = server.wait(60)
        if code != 0:
            sys.exit(f"logitd: got exit code {code}, allowed 0")
        for name, answer in answers.items():
            if answer != expected():
                sys.exit(f"{name}: got\n{answer}allowed\n{expected()}")
    print("examples/cpp and examples/c: all programs give the probabilities worked out here")


if __name__ == "__main__":
    main()

"""gRPC's interoperability cases by gRPC's C++ client, the program that is named before the target."""

import os
import re
import subprocess
import sys

SUITE = "GrpcCppTest"


def main():
    program, target, authorities, *names = sys.argv[1:]
    environment = {
        **os.environ,
        "CONFORMANCE_TARGET": target,
        "CONFORMANCE_AUTHORITIES": authorities,
        "GTEST_FILTER": ":".join(f"{SUITE}.{name}" for name in names),
        "GTEST_BRIEF": "0",
    }
    environment.pop("GTEST_OUTPUT", None)
    done = subprocess.run(
        [program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    for name in names:
        if re.search(rf"^\[ +OK \] {SUITE}\.{name} ", done.stdout, re.MULTILINE):
            print(f"{name} ok")
        else:
            found = re.search(rf"\[ RUN +\] {SUITE}\.{name}\n(.*?)\n\[ ", done.stdout, re.DOTALL)
            print(f"{name} failed: {' '.join((found[1] if found else done.stdout).split())[:300]}")


if __name__ == "__main__":
    main()

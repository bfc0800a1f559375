"""Runs tests of deploy/ and of the documentation's commands against a real server.

usage: run.py SERVER LOGITCTL LOAD_BENCH TOOLS MODULE. TOOLS: a folder of the build tree that keeps what the tests
fetch. Exits with 77 (skipped) where all of the module's tests skip.
"""

import importlib
import os
import pathlib
import sys
import unittest

OPTIONAL = ("yaml", "grpc", "numpy", "google", "matplotlib")
HERE = pathlib.Path(__file__).resolve().parent


def main():
    server, logitctl, load_bench, tools, module = sys.argv[1:]
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # tests start processes while gRPC's threads run
    for name, path in (
        ("LOGITD_BINARY", server),
        ("LOGITCTL_BINARY", logitctl),
        ("LOAD_BENCH_BINARY", load_bench),
        ("DEPLOY_TOOLS", tools),
    ):
        os.environ[name] = os.path.abspath(path)
    sys.dont_write_bytecode = True  # scripts are read as modules
    sys.path.insert(0, str(HERE))
    try:
        tests = importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] not in OPTIONAL:
            raise
        print(f"skipped: {missing}")
        return 77
    suite = unittest.defaultTestLoader.loadTestsFromModule(tests)
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    if not result.wasSuccessful():
        return 1
    return 77 if len(result.skipped) >= max(result.testsRun, 1) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs the Python client's tests against a server.

usage: run.py SERVER [unittest arguments]. Tests the package `logitd` that is installed; where none is, that of this
repository, with its descriptors made by protoc. Exits with 77 (skipped) where grpcio, NumPy or protobuf is missing.
"""

import importlib.util
import os
import pathlib
import secrets
import shutil
import subprocess
import sys
import tempfile
import unittest

# Tests start servers while gRPC's threads run. Its handlers of fork() may hang the new process before the exec.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

try:
    import google.protobuf
    import grpc
    import numpy
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

HERE = pathlib.Path(__file__).resolve().parent


def stage(folder):
    """The package as a build makes it, in `folder`."""
    root = HERE.parents[2]
    shutil.copytree(root / "client/python/logitd", pathlib.Path(folder, "logitd"), dirs_exist_ok=True)
    subprocess.run(
        [
            "protoc",
            f"-I{root}/proto",
            "--include_imports",
            f"--descriptor_set_out={folder}/logitd/descriptors.binpb",
            *map(str, sorted(root.glob("proto/logitd/v1/*.proto"))),
        ],
        check=True,
    )
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = folder  # for processes of a test


def main():
    os.environ["LOGITD_BINARY"] = os.path.abspath(sys.argv.pop(1))
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # broken connections are what some tests are about
    sys.path.insert(0, str(HERE))
    print(
        f"Python {sys.version.split()[0]}, grpcio {grpc.__version__}, protobuf {google.protobuf.__version__}, "
        f"NumPy {numpy.__version__}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray writes one to the home directory
        if importlib.util.find_spec("logitd") is None:
            stage(folder)
        unittest.main(
            module=None, argv=[sys.argv[0], *(sys.argv[1:] or ["discover", "-s", str(HERE), "-p", "*_test.py"])]
        )


if __name__ == "__main__":
    main()

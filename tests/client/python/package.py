"""The Python client as users get it: installed with pip, as a wheel and as an sdist, with old and new protobuf.

usage: package.py SERVER LIBRARY, the library of logitd.ops. Exits with 77 (skipped) where no virtual environment can be made or no package index be
    reached.
"""

import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
CLIENT = ROOT / "client/python"
TESTS = ROOT / "tests/client/python"
GRPCIO = ("1.49.1", "1.62.3")  # the oldest that the package takes, and one between it and the newest
PROTOBUF = ("3.20.3", "5.26.1", "6.31.1")  # besides the newest, which pip installs, and Debian's
MODULES = {"logitd/__init__.py", "logitd/client.py", "logitd/aio.py", "logitd/ring.py"}
IN_ALL = {*MODULES, "logitd/py.typed", "logitd/descriptors.binpb"}
TYPED = """
from typing import Any
import logitd
import numpy as np

with logitd.Client("127.0.0.1:7450", deadline=5.0) as client:
    logits = np.zeros((2, 10), np.float32)
    result = client.sample(logits, seed=[1, 2], top_p=0.9, logprob_mode="raw")
    rows: int = len(result.top_ids)
    tokens: np.ndarray[Any, np.dtype[np.int32]] = result.tokens
    ids: np.ndarray[Any, np.dtype[np.int32]] = client.top_k(logits, k=np.int64(2)).indices.dense()
    client.sample(logits, seed=np.arange(2), temperature=np.float32(0.5), history=[[1, 2], [3]])
    client.verify(logits, sequence_rows=[2], drafts=[1], draft_probs=[np.ones(1)], draft_ids=[[1]], draft_kind="list")
    totals: logitd.ScoreTotals = client.score(logits, targets=[1, 2], want_rank=True).totals
    apart: logitd.DivergenceResult = client.divergence(logits, logits, temperature=[1, 2], targets=[1, 2])
    with logitd.Arena.lease("unix:/run/logitd/arena.sock", 1 << 20) as arena:
        client.top_k(arena.empty((2, 10), "f16"), k=3, arena=arena)
        with arena.ring(slots=4) as ring:
            drawn: np.ndarray[Any, np.dtype[np.int32]] = ring.sample(arena.empty(10), seed=1, arena=arena).tokens
            begun: int = ring.submit_top_k(arena.empty(10), k=3, arena=arena, temperature=0.5)
            tag, answer = ring.wait(timeout=1.5)
            if isinstance(answer, logitd.TopKResult):
                ids = answer.indices.dense()
"""
WRONG = (
    'client.sample(logits, seed=1, topp=0.9)',
    'client.sample(logits, seed=1, temperature="x")',
    'client.sample("x", seed=1)',
    'client.top_k(logits)',
    'client.divergence(logits, logits, softcap=1.0)',
    'client.attention_softmax(logits, window=3)',
    'client.verify(logits, sequence_rows=[2], drafts=[1], draft_probs="x")',
    'client.sample(logits, seed=1).tokens.no_such_method()',
    'client.sample(logits, seed=1).top_ids.dense().no_such_method()',
    'logitd.Client(deadline="soon")',
    'logitd.Arena.lease("unix:/x", 1).ring().sample(logits, topp=1)',
    'logitd.Arena.lease("unix:/x", 1).ring(slots="x")',
    'logitd.Arena.lease("unix:/x", 1).ring().wait()[1].tokens',
)
WRONG_HEAD = """
import logitd
import numpy as np

client, logits = logitd.Client(), np.zeros((2, 10), np.float32)
"""


class Failed(Exception):
    pass


def run(*command, **environment):
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise Failed(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def skip_where(what, *command):
    try:
        run(*command)
    except Failed as reason:
        print(f"skipped: {what}: {reason}")
        sys.exit(77)


def check_contents(folder):
    """Both archives have everything, and nothing but the package."""
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    in_sdist = {name.split("/", 1)[1] for name in tarfile.open(sdist).getnames() if "/" in name}
    missing = (IN_ALL - in_wheel) | ((IN_ALL | {"LICENSE", "README.md", "hatch_build.py", "pyproject.toml"}) - in_sdist)
    strange = {name for name in in_wheel if not name.startswith(("logitd/", "logitd-"))}
    if missing or strange or not any(name.endswith("LICENSE") for name in in_wheel):
        raise Failed(f"archives: missing {missing}, not expected {strange}; the wheel has {sorted(in_wheel)}")


def install_as_documented(folder):
    """With the commands of the README and of docs/python.md, as they stand."""
    for entry in ("client", "proto", "LICENSE"):
        (folder / entry).symlink_to(ROOT / entry)
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    for page in ("README.md", "docs/python.md"):
        (block,) = re.findall(r"^```sh client_python_package\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
        run("sh", "-ec", f"cd '{folder}'\n{block}", PATH=path)


def check_library(folder, pip, python, library):
    """A wheel of the checkout has the library that is built, and what it needs beside it; the library loads."""
    run(python, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--wheel-dir", folder / "ops", CLIENT, LOGITD_OPS=library)  # fmt: skip
    (wheel,) = (folder / "ops").glob("*.whl")
    if not re.search(r"-py3-none-linux_\w+\.whl$", wheel.name):
        raise Failed(f"wheel: got the name {wheel.name}, allowed one with the platform's tag")
    run(*pip, "--no-deps", "--target", folder / "with_ops", wheel)
    load = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).logitd_abi_version())"
    installed = folder / "with_ops/logitd"
    if run(python, "-c", load, installed / "liblogitd.so").strip() != "1":
        raise Failed("liblogitd.so: got another version, allowed 1")
    for name, path in re.findall(r"(lib(?:absl|hwy)\S+) => (\S+)", run("ldd", installed / "liblogitd.so")):
        if not path.startswith(str(installed)):
            raise Failed(f"{name}: got {path}, allowed the one that the wheel has")


def main():
    server, library = map(os.path.abspath, sys.argv[1:3])
    os.environ["LOGITD_OPS"] = "off"  # the client alone
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        python = folder / "build/venv/bin/python"
        skip_where("no virtual environment", sys.executable, "-m", "venv", folder / "build/venv")
        pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
        skip_where("no package index", *pip, "build", "mypy", "hatchling", "grpcio-tools")

        install_as_documented(folder)
        print(run(python, TESTS / "run.py", server, "rows_test", "wire_test", PYTHONPATH=str(TESTS)))

        run(
            python, "-m", "build", "--no-isolation", "--outdir", folder / "dist", CLIENT
        )  # the wheel is built from the sdist
        check_contents(folder / "dist")
        check_library(folder, pip, python, library)

        for version in PROTOBUF:
            run(*pip, "--no-deps", "--target", folder / version, f"protobuf=={version}")
            run(
                python,
                TESTS / "run.py",
                server,
                "wire_test",
                "rows_test.SampleTest",
                PYTHONPATH=f"{folder / version}:{TESTS}",
            )
            print(f"protobuf {version}: ok")
        for version in GRPCIO:
            run(*pip, "--target", folder / f"grpcio-{version}", f"grpcio=={version}")
            older = f"{folder / f'grpcio-{version}'}:{TESTS}"
            run(python, TESTS / "run.py", server, "exit_test", "calls_test.LifeTest", PYTHONPATH=older)
            print(f"grpcio {version}: ok")

        mypy = (python, "-m", "mypy", "--cache-dir", folder / "mypy")
        run(*mypy, "--config-file", CLIENT / "pyproject.toml", "-p", "logitd")
        for text, typed in ((TYPED, True), (WRONG_HEAD, True), *((WRONG_HEAD + line, False) for line in WRONG)):
            (folder / "user.py").write_text(text)
            try:
                run(*mypy, "--ignore-missing-imports", folder / "user.py")
                accepted = True
            except Failed:
                accepted = False
            if accepted != typed:
                raise Failed(f"mypy: accepted is {accepted}, but should be {typed}: {text}")
    print("1 passed, 0 failed")


if __name__ == "__main__":
    try:
        main()
    except Failed as failure:
        print(failure)
        sys.exit(1)

"""logitd.ops and the adapters as users get them: each with its extra, in a virtual environment of its own.

usage: adapters.py SERVER LIBRARY [SET...]. The sets are the keys of SETS; default: all. The wheel has LIBRARY in it.
torch, which all of them need, is installed once, in an environment that the others see. Exits with 77 (skipped) where no
virtual environment can be made or no package index be reached.
"""

import os
import pathlib
import sys
import tempfile
import time

from package import CLIENT, TESTS, Failed, run, skip_where

OPS = ("structs", "losses", "parallel", "fsdp", "attention", "tokens", "divergence")
SETS = {  # extra: modules of tests
    "torch": tuple(f"ops_{name}_test" for name in OPS),
    "transformers": ("transformers_test", "assisted_test"),
    "trl": ("trl_test",),
    "lm-eval": ("lm_eval_test",),
}
ROOT = CLIENT.parents[1]
# Programs that run in an environment too, and the packages that they need.
PROGRAMS = {
    "torch": (("examples/training/tiny_transformer.py",),),
    "trl": (
        ("tests/client/python/run.py", "SERVER", "discover", "-s", ROOT / "tests/examples", "-p", "teachers_test.py"),
        ("tests/examples/notebooks_test.py", "SERVER"),
    ),
}
PACKAGES = {"trl": ("nbclient", "ipykernel", "ray[data]")}


def environment(folder, base=None):
    """A virtual environment, which sees the packages of `base` after its own; the path of its interpreter."""
    skip_where("no virtual environment", sys.executable, "-m", "venv", folder)
    if base is not None:
        (packages,) = base.glob("lib/python*/site-packages")
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "base.pth").write_text(f"{packages}\n")
    return folder / "bin/python"


def install(python, *packages):
    return (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *packages)


def main():
    server, library, sets = *map(os.path.abspath, sys.argv[1:3]), sys.argv[3:] or list(SETS)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        start = time.monotonic()
        skip_where("no package index", *install(environment(folder / "base"), "torch"))
        print(f"torch: installed in {time.monotonic() - start:.0f} s", flush=True)
        for extra in sets:
            start = time.monotonic()
            python = environment(folder / extra, folder / "base")
            run(*install(python, f"{CLIENT}[{extra}]", *PACKAGES.get(extra, ())), LOGITD_OPS=library)
            installed = time.monotonic()
            said = run(python, TESTS / "run.py", server, *SETS[extra], PYTHONPATH=str(TESTS))
            if "skipped" in said or "OK" not in said:
                raise Failed(f"{extra}: not all tests ran\n{said}")
            for program, *arguments in PROGRAMS.get(extra, ()):
                said = run(python, ROOT / program, *(server if of == "SERVER" else of for of in arguments))
                if "skipped:" in said:
                    raise Failed(f"{program}: not all of it ran\n{said}")
                print(said, end="")
            print(f"{extra}: installed in {installed - start:.0f} s, ran in {time.monotonic() - installed:.0f} s", flush=True)
    print("1 passed, 0 failed")


if __name__ == "__main__":
    try:
        main()
    except Failed as failure:
        print(failure)
        sys.exit(1)

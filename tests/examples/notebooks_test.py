"""Runs the notebooks of examples/ from the first cell to the last, each in a kernel of its own.

usage: notebooks_test.py SERVER [NOTEBOOK]. Their assertions are the test. A notebook is skipped where a package of its
imports is missing; exits with 77 (skipped) where none could run.
"""

import importlib.util
import os
import pathlib
import re
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/client/python"))
# It exits with 77 where grpcio, NumPy or protobuf is missing.
from run import stage

try:
    import ipykernel  # noqa: F401
    import nbclient
    import nbformat
except ImportError as lacking:
    print(f"skipped: {lacking}")
    sys.exit(77)

CELL_SECONDS = 300  # so long on a machine with much else to do


def missing(notebook):
    """Packages that the notebook imports and that are not installed."""
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    names = set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))
    return sorted(name for name in names if importlib.util.find_spec(name) is None)


def faults(notebook):
    """House rules that the file breaks."""
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if any(cell.outputs or cell.execution_count for cell in code):
        yield "outputs: got some, allowed none"
    if notebook.cells[0].cell_type != "markdown":
        yield "first cell: got code, allowed prose"
    if not any(re.search(r"^assert .*, \"", cell.source, re.MULTILINE) for cell in code):
        yield "assertions: got none with a text, allowed one or more"


def check(path):
    """True: it ran. None: it was skipped. False: it failed, and why was printed."""
    notebook = nbformat.read(path, as_version=4)
    found = [f"{path.name}: {fault}" for fault in faults(notebook)]
    if found:
        print("\n".join(found))
        return False
    lacking = missing(notebook)
    if lacking:
        print(f"{path.name}: skipped: {', '.join(lacking)} not installed")
        return None
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            nbclient.NotebookClient(
                notebook, timeout=CELL_SECONDS, kernel_name="python3", resources={"metadata": {"path": folder}}
            ).execute()
        except (nbclient.exceptions.CellExecutionError, nbclient.exceptions.CellTimeoutError) as failure:
            print(f"{path.name}: {failure}")
            return False
    printed = [out.text for cell in notebook.cells for out in cell.get("outputs", ()) if out.get("name") == "stdout"]
    print(f"{path.name}: ok, {time.monotonic() - begin:.0f} s\n{''.join(printed)}", flush=True)
    return True


def main():
    os.environ["LOGITD_BINARY"] = os.path.abspath(sys.argv[1])
    os.environ.setdefault("RAY_AUTH_TOKEN", "0" * 64)  # else Ray writes one to the home directory
    with tempfile.TemporaryDirectory() as folder:
        if importlib.util.find_spec("logitd") is None:
            stage(folder)
        paths = sorted(ROOT.glob("examples/notebooks/*.ipynb"))
        results = [check(path) for path in paths if path.stem in (sys.argv[2:] or [path.stem])]
    print(f"{results.count(True)} passed, {results.count(False)} failed, {results.count(None)} skipped")
    sys.exit(1 if False in results else 0 if True in results else 77)


if __name__ == "__main__":
    main()

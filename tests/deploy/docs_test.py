"""The commands of the documentation: those of the README and of docs/deploying.md are run as they stand.

A block of commands starts with ```sh run (or ```python run), or with ```sh and the name of the script or ctest that
does the same. A page's blocks run in order, as one script, in a folder where the repository's and the build tree's
names are, and in a network of their own, so the default ports are free.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from haproxy_test import python_client
from processes import Logitd, program, stated_memory
from tools import ROOT

PAGES = ("README.md", "docs/deploying.md")  # their blocks run here
CPU_OVERLAY = "deploy/kubernetes/overlays/cpu/device.yaml"
CHECKED = (*PAGES, "docs/python.md", "docs/operations.md")
BLOCK = re.compile(r"^```(sh|python) *(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page):
    """(language, what runs it, text)"""
    return BLOCK.findall((ROOT / page).read_text())


def script_of(page):
    """One bash script of the page's blocks that run here."""
    script = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT"]
    for language, how, text in blocks(page):
        if how != "run":
            continue
        if language == "python":
            script.append(f"python3 - <<'END_OF_PYTHON'\n{text}END_OF_PYTHON")
            continue
        script.append(text)
    return "\n".join(script) + "\n"


class DocsTest(unittest.TestCase):
    def test_every_block_says_what_runs_it(self):
        cmake = (ROOT / "CMakeLists.txt").read_text()
        (deploy,) = re.findall(r"foreach\(deploy IN ITEMS ([\w ]+)\)", cmake)
        known = {"run", *re.findall(r"add_test\(NAME (\w+)", cmake), *(f"deploy_{name}" for name in deploy.split())}
        known |= {f"{name}_test" for name in re.findall(r"logitd_test\((\w+)", cmake)}
        for page in CHECKED:
            text = (ROOT / page).read_text()
            self.assertEqual(text.count("\n```sh"), sum(language == "sh" for language, _, _ in blocks(page)))
            for language, how, block in blocks(page):
                if language == "sh":
                    self.assertTrue(how in known or (ROOT / how).is_file() and how, f"{page}: {how!r}: {block}")

    def test_what_the_readme_starts_with_is_installed(self):
        """By scripts/setup as scripts/demo runs it, without --checks."""
        (base,) = re.findall(r"^packages=\((.*?)^\)", (ROOT / "scripts/setup").read_text(), re.MULTILINE | re.DOTALL)
        base = re.sub(r"#.*", "", base).split()
        text = "".join(block for _, _, block in blocks("README.md"))
        for used, package in (("import numpy", "python3-numpy"), ("python3 -m venv", "python3-venv")):
            self.assertIn(used, text)
            self.assertIn(package, base)

    def test_pip_installs_into_a_virtual_environment(self):
        """Debian's Python refuses the rest: externally-managed-environment."""
        for page in CHECKED:
            for _, how, block in blocks(page):
                for line in block.splitlines():
                    if "pip install" in line:
                        self.assertRegex(line, r"venv/bin/pip install", f"{page}: {how}")

    def test_the_memory_that_a_container_needs_is_what_the_server_states(self):
        with tempfile.TemporaryDirectory() as name:
            server = Logitd(pathlib.Path(name), "server")
            memory = stated_memory(server.log)
            self.assertEqual(server.stop(), 0)
        parts = [memory[part] for part in ("slabs", "messages", "connections", "their scratch", "process")]
        rest = memory["sum"] - memory["heads"]
        share = 1 / round(memory["usable"] / memory["heads"])  # of any memory, by default
        with_heads = round(rest / (1 - share))
        text = " ".join((ROOT / "docs/operations.md").read_text().split())
        self.assertIn(f"{' + '.join(map(str, parts))} = {rest} MiB without heads, and {with_heads} MiB with them", text)
        (limit,) = re.findall(r"limits: \{memory: (\d+)Gi\}", (ROOT / CPU_OVERLAY).read_text())
        self.assertIn(f"the CPU overlay of Kubernetes has {limit} GiB", text)

    def run_page(self, page):
        program("haproxy")
        isolated = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
        if subprocess.run([*isolated, "ip", "link", "set", "lo", "up"], check=False, capture_output=True).returncode:
            self.skipTest("may not make a network namespace")
        script = script_of(page)
        self.assertRegex(script, r"(?m)^(\S*/)?logitd\b[^#\n]*&", "nothing of the page runs")
        with tempfile.TemporaryDirectory() as name:
            place = pathlib.Path(name)
            python_client(place / "package")
            for entry in ("demo", "deploy", "scripts", "client", "proto"):
                (place / entry).symlink_to(ROOT / entry)
            programs = place / "build/release"
            programs.mkdir(parents=True)
            for variable in ("LOGITD_BINARY", "LOGITCTL_BINARY", "LOAD_BENCH_BINARY"):
                (programs / pathlib.Path(os.environ[variable]).name).symlink_to(os.environ[variable])
            (programs / "python3").symlink_to(sys.executable)  # with NumPy and grpcio
            environment = {
                "PATH": f"{programs}:/usr/sbin:{os.environ['PATH']}",
                "PYTHONPATH": str(place / "package"),
                "HOME": name,
                "LOGITD_CPU_THREADS": "1",
            }
            inside = [*isolated, "sh", "-c", 'ip link set lo up && exec bash -c "$1"', "sh", script]
            with open(place / "output", "w+", encoding="utf-8") as output:
                to = {"stdout": output, "stderr": subprocess.STDOUT}
                done = subprocess.run(inside, cwd=place, env=environment, timeout=200, check=False, **to)
                output.seek(0)
                self.assertEqual(done.returncode, 0, f"{page}:\n{output.read()[-6000:]}")


def page_test(page):
    def test(self):
        self.run_page(page)

    return test


for each in PAGES:
    setattr(DocsTest, f"test_the_commands_of_{re.sub(r'[^a-z]+', '_', each.lower())}_run", page_test(each))

"""The examples of the documentation, run as they stand against a real server."""

import contextlib
import importlib.util
import io
import re
import sys

from harness import REPOSITORY, RunningServer, TestCase

PAGES = ("README.md", "docs/python.md", "client/python/README.md")


def examples(page):
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", (REPOSITORY / page).read_text(), re.MULTILINE | re.DOTALL)


class DocsTest(TestCase):
    def has_ops(self):
        try:
            importlib.import_module("logitd.ops")
        except ImportError:  # no torch, or no liblogitd.so
            return False
        return True

    def test_every_example_runs(self):
        server = RunningServer(arenas=True)
        self.addCleanup(server.close)
        self.addCleanup(lambda: sys.modules["ray"].shutdown() if "ray" in sys.modules else None)  # an example's cluster
        for page in PAGES:
            found = examples(page)
            self.assertTrue(found, page)
            for example in found:
                if "from logitd import ops" in example:
                    if not self.has_ops():
                        continue
                else:
                    self.assertIn('"127.0.0.1:7450"', example)
                if any(importlib.util.find_spec(name) is None for name in re.findall(r"^import (\w+)", example, re.M)):
                    continue  # transformers, where it is not installed
                ours = example.replace("127.0.0.1:7450", server.tcp)
                ours = ours.replace("unix:/run/logitd/arena.sock", server.arena)
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    exec(compile(ours, page, "exec"), {"__name__": "example"})
                self.assertTrue(printed.getvalue(), f"{page}: {example}")
                for claimed in re.findall(r"print\(.*\)  # (.*)", example):
                    self.assertIn(claimed, printed.getvalue())

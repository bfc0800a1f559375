"""Processes of a test: logitd, Prometheus, HAProxy. Each ends with its test."""

import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import unittest

from tools import ROOT, run, wait_for


def program(name):
    """The path of a Debian program; the test skips where scripts/setup --checks has not run."""
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if not found:
        raise unittest.SkipTest(f"no {name}: scripts/setup --checks installs it")
    return found


class Process:
    """A command with its output in a file of `place`."""

    def __init__(self, place, name, *command, environment=None):
        self.log_file = pathlib.Path(place, f"{name}.log")
        with open(self.log_file, "wb") as file:
            self.process = subprocess.Popen(
                list(map(str, command)), stdout=file, stderr=subprocess.STDOUT, env=environment
            )

    @property
    def log(self):
        return self.log_file.read_text(errors="replace")

    def wait_for(self, what, condition, limit=60.0):
        """As tools.wait_for; a process that ends first is an error with its log."""

        def asked():
            value = condition()
            if not value and self.process.poll() is not None:
                raise AssertionError(f"ended with {self.process.returncode} before {what}:\n{self.log}")
            return value

        return wait_for(what, asked, limit)

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def stop(self, limit=60):
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.terminate()
        try:
            return self.process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"SIGTERM did not end it within {limit} s:\n{self.log}") from None


class Logitd(Process):
    """logitd on free ports of loopback: `address` for calls, `metrics` for Prometheus."""

    def __init__(self, place, name, *flags, listen="127.0.0.1:0"):
        super().__init__(
            place,
            name,
            os.environ["LOGITD_BINARY"],
            "--backend=cpu",
            "--cpu-threads=1",
            f"--listen={listen}",
            "--metrics-listen=127.0.0.1:0",
            *flags,
        )
        self.address = self.wait_for("listening", lambda: re.search(r"listening on (127\S+)", self.log))[1]
        self.metrics = self.wait_for("metrics", lambda: re.search(r"metrics on \S*?(127\.0\.0\.1:\d+)", self.log))[1]


def stated_memory(log):
    """The most host memory by a server's log, in MiB: `sum`, `usable`, and each part by its name."""
    line = re.search(r"host memory: at most (\d+) MiB of (\d+), which the process may use: ([^;\"\n]*)", log)
    parts = {name: int(mib) for name, mib in re.findall(r"([a-z ]+?) (\d+)(?:, |$)", line[3])}
    return {"sum": int(line[1]), "usable": int(line[2]), **parts}


def load(place, address, *flags, name="load"):
    """load_bench against `address`."""
    return Process(place, name, os.environ["LOAD_BENCH_BINARY"], "--addr", address, *flags)


def logitctl(*arguments):
    return run(os.environ["LOGITCTL_BINARY"], *arguments)


def python_client(place):
    """The package of this repository, with its descriptors made by protoc."""
    spec = importlib.util.spec_from_file_location("client_run", ROOT / "tests/client/python/run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.stage(str(place))
    import logitd  # only now can it be found

    return logitd

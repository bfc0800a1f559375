#!/usr/bin/python3
"""Runs a container's root file system as its image says: as its user, read-only, without a shell; and stops it.

usage: image_check.py ROOT CONFIG. ROOT: a folder with the root file system. CONFIG: a file with the image's
configuration as Docker keeps it (User, Env, Entrypoint, Cmd, Healthcheck, StopSignal, Labels). Needs root.
"""

import json
import os
import pathlib
import shlex
import signal
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from tools import free_ports, run, wait_for

# A file system of its own, read-only but for what every container has, until the process ends.
INSIDE = """
set -eu
mount --bind "$1" "$1"
mount --bind "$2" "$1/tmp"
mount -t proc proc "$1/proc"
mount -o remount,bind,ro "$1"
root=$1 user=$3
shift 3
exec env -i ENVIRONMENT "$(command -v chroot)" --userspec="$user" "$root" "$@"
"""


def npy(rows):
    """A .npy file of f32 rows."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({len(rows)}, {len(rows[0])}), }}"
    header += " " * (-(10 + len(header) + 1) % 64) + "\n"
    data = b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data


class Container:
    def __init__(self, root, config, scratch):
        self.root, self.config, self.scratch = root, config, scratch
        self.environment = dict(entry.split("=", 1) for entry in config["Env"])

    def command(self, *arguments):
        values = shlex.join(f"{name}={value}" for name, value in self.environment.items())
        inside = INSIDE.replace("ENVIRONMENT", values)
        script = ["unshare", "--mount", "sh", "-c", inside, "sh", self.root, self.scratch, self.config["User"]]
        program, *rest = arguments
        for folder in self.environment["PATH"].split(":"):  # as a container's runtime looks it up
            if (pathlib.Path(self.root) / folder.lstrip("/") / program).exists():
                return [*script, f"{folder}/{program}", *rest]
        raise AssertionError(f"no {program} in {self.environment['PATH']} of the image")

    def run(self, *arguments):
        return run(*self.command(*arguments))


def check(root, config):
    """Raises AssertionError where the image does not do what it should; returns what the server said of itself."""
    root = str(root)
    assert not list(pathlib.Path(root).glob("**/bin/*sh")), "a shell in the image"
    user = config["User"]
    assert user.split(":")[0] not in ("", "0", "root"), f"User: got {user!r}, allowed one without privileges"
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0", config["Labels"]
    sbom = json.loads(pathlib.Path(root, "usr/share/doc/logitd/sbom.spdx.json").read_text())
    assert {"logitd", "libc6"} <= {package["name"] for package in sbom["packages"]}, sbom
    grpc_port, metrics_port = free_ports(2)  # the machine's network is shared
    start = [*config["Entrypoint"], *config["Cmd"]]
    assert any(":7450" in each for each in start) and any(":9464" in each for each in start), start
    start = [each.replace(":7450", f":{grpc_port}").replace(":9464", f":{metrics_port}") for each in start]
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o755)
        pathlib.Path(scratch, "logits.npy").write_bytes(npy([[0, 1, 6, 2, 3, 9, 4, 5], [8, 1, 2, 3, 4, 5, 6, 9]]))
        container = Container(root, config, scratch)
        container.environment["LOGITD_ADDR"] = f"127.0.0.1:{grpc_port}"  # of logitctl, in place of 127.0.0.1:7450
        server = subprocess.Popen(container.command(*start), stderr=subprocess.PIPE, text=True)
        try:
            kind, *probe = config["Healthcheck"]["Test"]
            assert kind == "CMD", f"Healthcheck: got {kind}, allowed CMD, which needs no shell"

            def healthy():
                assert server.poll() is None, server.stderr.read()
                return subprocess.run(container.command(*probe), check=False, capture_output=True).returncode == 0

            wait_for("healthy", healthy)
            status = pathlib.Path(f"/proc/{server.pid}/status").read_text()
            uid = next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1:]
            assert uid == [config["User"].split(":")[0]] * 4, f"runs as {uid}, not as {config['User']}"
            info = container.run("logitctl", "info")
            answer = json.loads(
                container.run("logitctl", "topk", "--logits", "/tmp/logits.npy", "--k", "2", "--format", "json")
            )
            got = answer["indices"]
            assert got == [5, 2, 7, 0], f"top-2: got {got}, allowed 5 2 and 7 0"
            server.send_signal(getattr(signal, config.get("StopSignal") or "SIGTERM"))
            _, log = server.communicate(timeout=60)
            assert server.returncode == 0 and "drained" in log, f"exit code {server.returncode}\n{log}"
        finally:
            if server.poll() is None:
                server.kill()
                server.wait()
    return info


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(check(sys.argv[1], json.loads(pathlib.Path(sys.argv[2]).read_text())).rstrip())


if __name__ == "__main__":
    main()

#!/usr/bin/python3
"""Runs a container's root file system as its image says: as its user, read-only, without a shell; and stops it.

usage: image_check.py [--backend cpu | --gpu] [--json FILE] ROOT CONFIG

ROOT: a folder with the root file system. CONFIG: a file with the image's configuration as Docker keeps it (User, Env,
Entrypoint, Cmd, Healthcheck, StopSignal, Labels). Needs root, and mount namespaces.
--gpu: with this machine's GPUs and its driver's libraries, as NVIDIA's container runtime adds them; cuBLASLt too, if it
was left out of ROOT. The answers are then compared with those of the same image on the CPU.
--backend cpu: where the configuration says another backend, for an image of which the GPU is not here.
--json FILE: writes what was seen.
"""

import argparse
import glob
import json
import math
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from tools import ROOT, free_ports, http, run, wait_for

TEXT = "It is a truth universally acknowledged, that a single man"
# A file system of its own, read-only but for what every container has, until the process ends. BINDS are pairs of an
# absolute path of this machine and one inside the root.
INSIDE = """
set -eu
root=$1 scratch=$2 user=$3
shift 3
mount --bind "$root" "$root"
mount --bind "$scratch" "$root/tmp"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in DEVICES; do
  mkdir -p "$root$(dirname "$device")"
  touch "$root$device"
  mount --bind "$device" "$root$device"
done
set -- "$@"
for pair in BINDS; do
  mount --bind "${pair%%:*}" "$root${pair#*:}"
done
mount -o remount,bind,ro "$root"
exec env -i ENVIRONMENT "$(command -v chroot)" --userspec="$user" "$root" "$@"
"""


def npy(rows, form="f"):
    """A .npy file of rows of f32 (form f), or of one row of i32 (form i)."""
    shape = f"({len(rows)}, {len(rows[0])})" if form == "f" else f"({len(rows)},)"
    header = f"{{'descr': '<{form}4', 'fortran_order': False, 'shape': {shape}, }}"
    header += " " * (-(10 + len(header) + 1) % 64) + "\n"
    values = [value for row in rows for value in row] if form == "f" else rows
    head = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
    return head + struct.pack(f"<{len(values)}{form}", *values)


class Gpu:
    """What NVIDIA's container runtime adds to a container: devices, and the driver's libraries."""

    LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1", "libnvidia-gpucomp.so.*")

    def __init__(self, root, scratch):
        found = run("ldconfig", "-p")
        folders = re.findall(r"libcuda\.so\.1 .*x86-64.*=> (\S+)/libcuda", found)
        folders += [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), "/usr/local/nvidia/lib64", "/usr/local/nvidia/lib"]
        (folder, *_) = [each for each in folders if each and os.path.exists(f"{each}/libcuda.so.1")] or [None]
        if folder is None:
            raise SystemExit("image_check: --gpu: found no libcuda.so.1 on this machine")
        driver = pathlib.Path(scratch, "driver")
        driver.mkdir()
        for pattern in self.LIBRARIES:
            for library in glob.glob(f"{folder}/{pattern}"):
                shutil.copy(library, driver)
        self.devices = [each for each in glob.glob("/dev/nvidia*") if stat.S_ISCHR(os.stat(each).st_mode)]
        self.binds = [(driver, "/usr/local/nvidia/lib64")]
        self.cublas = "the image's"
        if not (root / "usr/local/cuda/lib64/libcublasLt.so.13").exists():
            self.binds.append(("/usr/local/cuda/lib64", "/usr/local/cuda/lib64"))
            self.cublas = "this machine's"


class Container:
    def __init__(self, root, config, scratch, gpu=None):
        self.root, self.config, self.scratch, self.gpu = root, config, scratch, gpu
        self.environment = dict(entry.split("=", 1) for entry in config["Env"])

    def command(self, *arguments):
        values = shlex.join(f"{name}={value}" for name, value in self.environment.items())
        devices = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"]
        binds = []
        if self.gpu:
            devices += self.gpu.devices
            binds += [f"{outside}:{inside}" for outside, inside in self.gpu.binds]
        # The last one may hold any text.
        inside = INSIDE.replace("in DEVICES", f"in {shlex.join(devices)}").replace("in BINDS", f"in {shlex.join(binds)}")
        inside = inside.replace("env -i ENVIRONMENT", f"env -i {values}")
        script = ["unshare", "--mount", "sh", "-c", inside, "sh", self.root, self.scratch, self.config["User"]]
        program, *rest = arguments
        for folder in self.environment["PATH"].split(":"):  # as a container's runtime looks it up
            if (pathlib.Path(self.root) / folder.lstrip("/") / program).exists():
                return [*script, f"{folder}/{program}", *rest]
        raise AssertionError(f"no {program} in {self.environment['PATH']} of the image")

    def run(self, *arguments):
        return run(*self.command(*arguments))


def inputs(scratch):
    """Writes what the calls send; returns the loss of each row of `small`, worked out here."""
    small = [[0, 1, 6, 2, 3, 9, 4, 5], [8, 1, 2, 3, 4, 5, 6, 9]]
    targets = [2, 0]
    generator = random.Random(1)
    large = [[generator.gauss(0, 2) for _ in range(50257)] for _ in range(8)]
    for name, content in (("small", npy(small)), ("targets", npy(targets, "i")), ("large", npy(large))):
        pathlib.Path(scratch, f"{name}.npy").write_bytes(content)
    shutil.copytree(ROOT / "demo/model", pathlib.Path(scratch, "model"))
    for each in pathlib.Path(scratch).rglob("*"):  # whatever this process's umask is
        os.chmod(each, 0o755 if each.is_dir() else 0o644)
    return [math.log(sum(map(math.exp, row))) - row[target] for row, target in zip(small, targets)]


def calls(container, losses):
    """What users ask for, with logits and through a head; returns the answers."""

    def ask(command, *arguments):
        return json.loads(container.run("logitctl", *command.split(), *arguments, "--format", "json"))

    top = ask("topk --logits /tmp/small.npy --k 2")["indices"]
    assert top == [5, 2, 7, 0], f"top-2: got {top}, allowed 5 2 and 7 0"
    greedy = ask("sample --logits /tmp/small.npy --seed 1 --temperature 0")["tokens"]
    assert greedy == [5, 7], f"tokens at temperature 0: got {greedy}, allowed 5 and 7"
    scored = ask("score --logits /tmp/small.npy --targets /tmp/targets.npy")["losses"]
    assert all(abs(a - b) < 1e-5 for a, b in zip(scored, losses, strict=True)), f"losses: got {scored}, allowed {losses}"
    model = ("--model", "/tmp/model", "--head", "demo", "--text", TEXT)
    return {
        "top_k": ask("topk --logits /tmp/large.npy --k 5")["indices"],
        "tokens": ask("sample --logits /tmp/large.npy --seed 7 --temperature 0.8 --top-p 0.9")["tokens"],
        "head_losses": ask("score", *model)["losses"],
        "head_text": container.run("logitctl", "generate", *model, "--seed", "7", "--tokens", "24"),
    }


def serve(container, start, losses, ports, more=None):
    """Starts the server as `start` says, calls it and stops it; returns what was seen. more(ADDRESS): calls too."""
    grpc_port, metrics_port = ports
    container.environment["LOGITD_ADDR"] = f"127.0.0.1:{grpc_port}"  # of logitctl, in place of 127.0.0.1:7450
    server = subprocess.Popen(container.command(*start), stderr=subprocess.PIPE, text=True)
    try:
        kind, *probe = container.config["Healthcheck"]["Test"]
        assert kind == "CMD", f"Healthcheck: got {kind}, allowed CMD, which needs no shell"

        def healthy():
            assert server.poll() is None, server.stderr.read()
            return subprocess.run(container.command(*probe), check=False, capture_output=True).returncode == 0

        wait_for("healthy", healthy)
        status = pathlib.Path(f"/proc/{server.pid}/status").read_text()
        uid = next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1:]
        user = container.config["User"]
        assert uid == [user.split(":")[0]] * 4, f"runs as {uid}, not as {user}"
        seen = {"info": container.run("logitctl", "info"), **calls(container, losses)}
        if more:
            more(f"127.0.0.1:{grpc_port}")
        page = http(f"http://127.0.0.1:{metrics_port}/metrics")
        seen["device_metrics"] = sorted(set(re.findall(r"^(logitd_device_(?:memory|utilization)\w*)", page, re.MULTILINE)))
        server.send_signal(getattr(signal, container.config.get("StopSignal") or "SIGTERM"))
        _, log = server.communicate(timeout=60)
        assert server.returncode == 0 and "drained" in log, f"exit code {server.returncode}\n{log}"
        return seen
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def mebibytes(root):
    """Of all files: what the root file system takes, unpacked."""
    return sum(each.lstat().st_size for each in root.rglob("*") if not each.is_dir() or each.is_symlink()) / 2**20


def check(root, config, backend=None, with_gpu=False, more=None):
    """Raises AssertionError where the image does not do what it should; returns what was seen of it."""
    root = pathlib.Path(root).resolve()
    assert not list(root.glob("**/bin/*sh")), "a shell in the image"
    user = config["User"]
    assert user.split(":")[0] not in ("", "0", "root"), f"User: got {user!r}, allowed one without privileges"
    licence = config["Labels"]["org.opencontainers.image.licenses"]
    assert licence.startswith("Apache-2.0"), licence
    sbom = json.loads((root / "usr/share/doc/logitd/sbom.spdx.json").read_text())
    assert {"logitd", "libc6", "nlohmann-json3-dev"} <= {package["name"] for package in sbom["packages"]}, sbom
    ports = free_ports(2)  # the machine's network is shared
    start = [*config["Entrypoint"], *config["Cmd"]]
    assert any(":7450" in each for each in start) and any(":9464" in each for each in start), start
    start = [each.replace(":7450", f":{ports[0]}").replace("0.0.0.0:9464", f"127.0.0.1:{ports[1]}") for each in start]
    start += ["--head", "demo=/tmp/model/model.safetensors"]
    on_cpu = [*start[: start.index("--backend")], "--backend", "cpu", *start[start.index("--backend") + 2 :]]
    seen = {"user": user, "unpacked_mib": round(mebibytes(root), 1), "packages_in_sbom": len(sbom["packages"])}
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o755)
        losses = inputs(scratch)
        if not with_gpu:
            command = on_cpu if backend == "cpu" else start
            return {**seen, **serve(Container(root, config, scratch), command, losses, ports, more)}
        gpu = Gpu(root, scratch)
        seen |= {"cublaslt": gpu.cublas, "cpu": serve(Container(root, config, scratch), on_cpu, losses, ports)}
        seen |= serve(Container(root, config, scratch, gpu), start, losses, ports)
    assert "cuda" in seen["info"] and seen["device_metrics"], f"not on the GPU: {seen}"
    for what in ("top_k", "tokens"):
        assert seen[what] == seen["cpu"][what], f"{what}: got {seen[what]} on the GPU, {seen['cpu'][what]} on the CPU"
    apart = max(abs(a - b) for a, b in zip(seen["head_losses"], seen["cpu"]["head_losses"], strict=True))
    assert apart < 1e-3, f"losses through a head: {apart} apart between GPU and CPU"
    return {**seen, "head_losses_apart": apart}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--backend", choices=["cpu"])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("root")
    parser.add_argument("config", type=pathlib.Path)
    options = parser.parse_args()
    seen = check(options.root, json.loads(options.config.read_text()), options.backend, options.gpu)
    if options.json:
        options.json.write_text(json.dumps(seen, indent=1) + "\n")
    print(seen["info"].rstrip())


if __name__ == "__main__":
    main()

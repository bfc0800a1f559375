"""Tools of the deployment tests that Debian 12 does not have: kustomize, from the next Debian, and Python packages.

They are fetched once into a folder of the build tree. Where the registries cannot be reached, tests skip.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import unittest
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
MIRROR = "http://deb.debian.org/debian"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class ToolMissing(unittest.SkipTest):
    pass


def folder():
    path = pathlib.Path(os.environ["DEPLOY_TOOLS"])
    path.mkdir(parents=True, exist_ok=True)
    return path


def run(*command, **options):
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False, **options
    )
    if done.returncode != 0:
        raise AssertionError(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def fetch(*command, **options):
    """As run(), but a test that cannot fetch its tool skips."""
    try:
        return run(*command, **options)
    except (AssertionError, FileNotFoundError) as reason:
        raise ToolMissing(f"not reachable: {reason}") from None


def debian_package(name, suite):
    """The folder with the contents of a package of another Debian release. apt checks the archive's signature."""
    root = folder() / suite
    tree = root / name
    if (tree / "usr").exists():
        return tree
    for part in ("state/lists/partial", "cache/archives/partial", "etc/apt.conf.d", "etc/preferences.d"):
        (root / part).mkdir(parents=True, exist_ok=True)
    (root / "state/status").touch()
    (root / "etc/sources.list").write_text(f"deb [signed-by={KEYRING}] {MIRROR} {suite} main\n")
    (root / "apt.conf").write_text(
        f'Dir "{root}/"; Dir::State "state"; Dir::State::status "state/status"; Dir::Cache "cache"; Dir::Etc "etc";\n'
        'Acquire::Languages "none"; APT::Sandbox::User "root";\n'
        'Acquire::Check-Valid-Until "false";\n'  # a mirror may be weeks late; signatures are checked
    )
    proxies = subprocess.run(["apt-config", "dump", "Acquire"], stdout=subprocess.PIPE, text=True, check=False).stdout
    with open(root / "apt.conf", "a", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in proxies.splitlines() if "roxy" in line)
    environment = {**os.environ, "APT_CONFIG": str(root / "apt.conf")}
    fetch("apt-get", "-qq", "update", env=environment)
    fetch("apt-get", "-qq", "download", name, env=environment, cwd=root)
    (package,) = root.glob(f"{name}_*.deb")
    run("dpkg", "-x", package, tree)
    return tree


def kustomize():
    return debian_package("kustomize", "trixie") / "usr/bin/kustomize"


def python_with(*packages):
    """The python of a virtual environment that has these packages of PyPI."""
    place = folder() / "venv"
    python = place / "bin/python"
    if not python.exists():
        fetch(sys.executable, "-m", "venv", place)
    have = {entry["name"] for entry in json.loads(fetch(python, "-m", "pip", "list", "--format=json"))}
    missing = [package for package in packages if package.split("==")[0] not in have]
    if missing:
        fetch(python, "-m", "pip", "install", "--quiet", *missing)
    return python


def free_ports(count):
    """Ports of loopback that were free a moment ago."""
    held = [socket.socket() for _ in range(count)]
    try:
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


def wait_for(what, condition, limit=60.0):
    """The first true value of condition(), which is asked until `limit` seconds have passed."""
    end = time.monotonic() + limit
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {limit} s: {what}")
        time.sleep(0.05)
    return value


def http(url):
    """The body of a GET, or None where nobody answers yet."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}: {error.read().decode()}" if error.code != 503 else None
    except OSError:
        return None


def certificate(directory, *names):
    """Writes tls.crt and tls.key, self-signed for these names, into `directory`."""
    subject = ",".join(f"IP:{name}" if name[0].isdigit() else f"DNS:{name}" for name in names)
    run(
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30"),
        *("-subj", f"/CN={names[0]}", "-addext", f"subjectAltName={subject}"),
        *("-keyout", f"{directory}/tls.key", "-out", f"{directory}/tls.crt"),
    )

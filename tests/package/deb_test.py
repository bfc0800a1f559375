#!/usr/bin/env python3
"""cpack makes a tarball and a .deb that have what they should; the tarball's server runs from any folder; systemd accepts
the unit and finds it hardened.

    deb_test.py BUILD_DIR
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(__file__).resolve().parent.parent.parent
# systemd-analyze security: 0 is locked up, 10 is open. The unit needs the network and NVIDIA's devices.
MOST_EXPOSED = 25  # tenths

RUNTIME = {
    "usr/bin/logitd", "usr/bin/logitctl", "usr/bin/load_bench", "usr/lib/systemd/system/logitd.service",
    "usr/share/bash-completion/completions/logitctl", "usr/share/doc/logitd/copyright",
    "usr/share/doc/logitd/operations.md", "usr/share/doc/logitd/security.md", "usr/share/doc/logitd/semantics.md",
    "usr/share/doc/logitd/README.md", "usr/lib/liblogitd.so.1", "usr/lib/liblogitd.so.1.0",
}
DEVELOPMENT = {"usr/include/logitd/client/client.h", "usr/include/logitd/kernels/backend.h", "usr/include/logitd/kernels/c_api.h", "usr/lib/liblogitd.so",
               "usr/include/logitd/v1/sampler.pb.h", "usr/share/logitd/proto/logitd/v1/sampler.proto"}


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def check(what, good):
    if not good:
        sys.exit(f"wrong: {what}")


def contents(package):
    names = set()
    for line in run("dpkg-deb", "--contents", package).splitlines():
        mode, owner, *_, name = line.split()
        check(f"{package.name}: {name} of {owner}", owner == "root/root")
        if mode[0] == "l":  # a link has the mode of its target; tar shows "name -> target"
            names.add(line.split(" -> ")[0].split()[-1].removeprefix("./"))
            continue
        check(f"{package.name}: {name} has mode {mode}", mode[1:4] in ("rwx", "rw-") and "w" not in mode[4:])
        if not name.endswith("/"):
            names.add(name.removeprefix("./"))
    return names


def check_packages(folder):
    (runtime,) = folder.glob("logitd_*.deb")
    (development,) = folder.glob("liblogitd-dev_*.deb")
    check(f"files of {runtime.name}: got {sorted(contents(runtime) ^ RUNTIME)} too much or missing", contents(runtime) == RUNTIME)
    check(f"files missing from {development.name}", DEVELOPMENT <= contents(development))
    depends = run("dpkg-deb", "--field", runtime, "Depends")
    for library in ("libc6", "libgrpc++", "libprotobuf", "libssl3", "libspdlog", "libmicrohttpd", "libnghttp2"):
        check(f"Depends: {depends} without {library}", library in depends)
    check(f"Depends: {depends}: a -dev package", "-dev" not in depends)


def check_scripts(package, scratch):
    """An upgrade restarts a server that runs, once and only after the new files are there; an installation starts nothing."""
    run("dpkg-deb", "--control", package, scratch / "control")
    (scratch / "bin").mkdir()
    stub = scratch / "bin/systemctl"
    stub.write_text(f'#!/bin/sh\necho "$1" >> {scratch}/called\n')
    stub.chmod(0o755)
    called = scratch / "called"
    for script, arguments, expected in (
        ("postinst", ["configure", ""], ["daemon-reload"]),
        ("prerm", ["upgrade", "0.2.0"], []),
        ("postrm", ["upgrade", "0.2.0"], []),
        ("postinst", ["configure", "0.0.9"], ["daemon-reload", "try-restart"]),
        ("prerm", ["remove"], ["disable"]),
        ("postrm", ["remove"], ["daemon-reload"]),
    ):
        # As where systemd runs, which is not so in every container.
        text = (scratch / "control" / script).read_text().replace("/run/systemd/system", str(scratch))
        called.write_text("")
        run("sh", "-c", text, script, *arguments, env={"PATH": f"{scratch}/bin:/usr/bin:/bin"})
        got = called.read_text().split()
        check(f"{script} {' '.join(arguments)}: systemctl got {got}, allowed {expected}", got == expected)


def check_completion(prefix):
    listed = run("bash", "-c", 'source "$0" && COMP_WORDS=(logitctl heads l) COMP_CWORD=2 && _logitctl && '
                 'echo "${COMPREPLY[@]}"', prefix / "share/bash-completion/completions/logitctl")
    check(f"completion of `heads l`: {listed}", listed.split() == ["load", "list"])


def check_server(prefix, scratch):
    """With the variables and the umask of the unit: all users of the machine reach it on its socket."""
    unit = (prefix / "lib/systemd/system/logitd.service").read_text()
    check("RuntimeDirectoryMode of the unit", "\nRuntimeDirectoryMode=0755\n" in unit)
    variables = dict(re.findall(r"^Environment=(\w+)=(\S+)$", unit, re.MULTILINE))
    variables["LOGITD_LISTEN"] = (variables["LOGITD_LISTEN"].replace("/run/logitd/logitd.sock", f"{scratch}/socket")
                                  .replace(":7450", ":0"))
    umask = int(re.search(r"^UMask=(\d+)$", unit, re.MULTILINE)[1], 8)
    server = subprocess.Popen([prefix / "bin/logitd", "--backend", "cpu", "--metrics-listen", "off"],
                              stderr=subprocess.PIPE, text=True, umask=umask, env={**os.environ, **variables})
    try:
        for line in server.stderr:
            if re.search("listening on", line):
                break
        check("health of the server", run(prefix / "bin/logitctl", "health", "--addr", f"unix:{scratch}/socket") == "SERVING\n")
        mode = (scratch / "socket").stat().st_mode & 0o777
        check(f"mode of the socket: got {mode:o}, allowed 666", mode == 0o666)
    finally:
        server.send_signal(signal.SIGTERM)
        server.stderr.read()
        code = server.wait(60)
    check(f"exit code {code} of the server", code == 0)


def check_unit(prefix, scratch):
    if shutil.which("systemd-analyze") is None:
        print("no systemd-analyze: the unit was not checked")
        return
    unit = scratch / "logitd.service"
    text = (prefix / "lib/systemd/system/logitd.service").read_text()
    check("ExecStart of the unit", "ExecStart=/usr/bin/logitd\n" in text)
    unit.write_text(text.replace("/usr/bin/logitd\n", f"{prefix}/bin/logitd\n"))
    verified = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    faults = [line for line in verified.stderr.splitlines() if "logitd" in line]
    check(f"systemd-analyze verify: {faults}", not faults)
    answer = subprocess.run(["systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSED}", unit],
                            capture_output=True, text=True)
    level = re.search(r"Overall exposure level for \S+: ([\d.]+)", answer.stdout)
    check(f"systemd-analyze security: {answer.stdout[-300:]}{answer.stderr}", level and answer.returncode == 0)
    print(f"systemd-analyze security: exposure {level[1]} of 10, allowed {MOST_EXPOSED / 10}")


def main():
    if shutil.which("dpkg-deb") is None or shutil.which("cpack") is None:
        print("skipped: no dpkg-deb or no cpack")
        sys.exit(77)
    build = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory(prefix="logitd-deb-") as scratch:
        scratch = pathlib.Path(scratch)
        run("cpack", "-G", "TGZ;DEB", "-B", scratch / "packages", cwd=build)
        check_packages(scratch / "packages")
        (package,) = (scratch / "packages").glob("logitd_*.deb")
        check_scripts(package, scratch)
        (tarball,) = (scratch / "packages").glob("logitd-*-runtime.tar.gz")
        run("tar", "-xzf", tarball, "-C", scratch)
        (prefix,) = scratch.glob("logitd-*/")
        check_completion(prefix)
        check_server(prefix, scratch)
        check_unit(prefix, scratch)


if __name__ == "__main__":
    main()

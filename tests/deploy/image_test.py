"""The CPU image's root file system, as the Dockerfile's last stage describes it, with the programs built here.

scripts/image builds the image itself; this test needs no base system and no compiler, only root.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import image_check
import yaml
from processes import Process, logitctl, python_client
from tools import ROOT, python_with, run


def configuration(stage):
    """What the Dockerfile's stage says, as Docker keeps it."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = re.split(r"^FROM \S+ AS (\S+)\n", text, flags=re.MULTILINE)
    commands = [line.split(maxsplit=1) for line in lines[lines.index(stage) + 1].splitlines() if line.strip()]
    found = {name: value for name, value in commands}
    probe = found["HEALTHCHECK"][found["HEALTHCHECK"].index("CMD ") + 4 :]
    return {
        "User": found["USER"],
        "Env": found["ENV"].split(),
        "Entrypoint": json.loads(found["ENTRYPOINT"]),
        "Cmd": json.loads(found["CMD"]),
        "StopSignal": found["STOPSIGNAL"],
        "Healthcheck": {"Test": ["CMD", *json.loads(probe)]},
        "Labels": dict(re.findall(r'(\S+)="([^"]*)"', found["LABEL"])),
    }


class ImageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        place = tempfile.TemporaryDirectory()
        cls.addClassCleanup(place.cleanup)
        cls.root = pathlib.Path(place.name, "root")
        version = run(os.environ["LOGITD_BINARY"], "--version").split()[1].rstrip(",")
        programs = (os.environ["LOGITD_BINARY"], os.environ["LOGITCTL_BINARY"])
        run(ROOT / "deploy/rootfs", cls.root, version, *programs)
        os.chmod(place.name, 0o755)
        cls.sbom = cls.root / "usr/share/doc/logitd/sbom.spdx.json"
        cls.version = version

    def test_the_root_file_system_serves_read_only_without_privileges(self):
        if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode != 0:
            self.skipTest("may not make a mount namespace: needs root")
        answers = []

        def newcomer(address):
            """Runs the README's script against the container, with the Python client of this repository."""
            page = (ROOT / "README.md").read_text().split("## Python in ten lines")[1]
            script = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
            self.assertLessEqual(len([line for line in script.splitlines() if line]), 10)
            self.assertEqual(script.count("127.0.0.1:7450"), 1)
            with tempfile.TemporaryDirectory() as place:
                python_client(place)
                answers.append(
                    run(sys.executable, "-c", script.replace("127.0.0.1:7450", address),
                        env={**os.environ, "PYTHONPATH": place})
                )

        self.assertIn("cpu", image_check.check(self.root, configuration("cpu"), more=newcomer)["info"])
        self.assertRegex(answers[0], r"(?m)^\[ *\d+ +\d+\]$")  # two tokens

    def test_a_build_stage_has_what_its_setup_runs(self):
        """scripts/setup runs before the sources are copied, so that its result can be kept."""
        used = set(re.findall(r'\$\(dirname "\$0"\)/(\w+)', (ROOT / "scripts/setup").read_text()))
        self.assertTrue(used)
        stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
        stages = [stage for stage in stages if "RUN scripts/setup" in stage]
        self.assertEqual(len(stages), 2)
        for stage in stages:
            (copied,) = re.findall(r"^COPY (.*)\nRUN scripts/setup$", stage, re.MULTILINE)
            self.assertEqual({pathlib.Path(each).name for each in copied.split()[:-1]}, used | {"setup"})

    def test_whatever_the_programs_load_at_run_time_is_in_the_cuda_image(self):
        """deploy/rootfs with a toolkit of one library: what ldd does not tell."""
        with tempfile.TemporaryDirectory() as place:
            toolkit, root = pathlib.Path(place, "toolkit"), pathlib.Path(place, "root")
            for folder in ("lib64", "include"):
                (toolkit / folder).mkdir(parents=True)
            run("sh", "-c", 'cp "$(ldd "$1" | awk \'/libm.so/ { print $3 }\')" "$2"', "sh",
                os.environ["LOGITD_BINARY"], toolkit / "lib64/libcublasLt.so.13")
            (toolkit / "include/cublas_api.h").write_text(
                "#define CUBLAS_VER_MAJOR 13\n#define CUBLAS_VER_MINOR 1\n#define CUBLAS_VER_PATCH 0\n"
                "#define CUBLAS_VER_BUILD 3\n")
            (toolkit / "include/cuda.h").write_text("#define CUDA_VERSION 13010\n")
            programs = (os.environ["LOGITD_BINARY"], os.environ["LOGITCTL_BINARY"])
            without_terms = subprocess.run([ROOT / "deploy/rootfs", "--cuda", toolkit, root, "1.2.3", *programs],
                                           check=False, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            if not list(pathlib.Path("/usr/share/doc").glob("libcublas-13-*")):
                self.assertIn("no licence of cuBLASLt", without_terms.stderr)
            (toolkit / "EULA.txt").write_text("terms")
            run(ROOT / "deploy/rootfs", "--cuda", toolkit, root, "1.2.3", *programs)
            self.assertTrue((root / "usr/local/cuda/lib64/libcublasLt.so.13").exists())
            for package, version in (("nvidia-cublas", "13.1.0.3"), ("nvidia-cuda-toolkit", "13.1")):
                self.assertEqual((root / "usr/share/doc" / package / "copyright").read_text(), "terms")
                document = json.loads((root / "usr/share/doc/logitd/sbom.spdx.json").read_text())
                (found,) = [each for each in document["packages"] if each["name"] == package]
                self.assertEqual(found["versionInfo"], version)

    def test_the_images_run_alike(self):
        cpu, cuda = configuration("cpu"), configuration("cuda")
        for what in ("User", "Entrypoint", "StopSignal", "Healthcheck"):
            self.assertEqual(cpu[what], cuda[what], what)
        self.assertEqual([each.replace("cpu", "cuda") for each in cpu["Cmd"]], cuda["Cmd"])

    def test_the_sbom_is_valid_and_names_every_library(self):
        python = python_with("spdx-tools")
        run(python.parent / "pyspdxtools", "-i", self.sbom)
        document = json.loads(self.sbom.read_text())
        packages = {package["name"]: package for package in document["packages"]}
        self.assertEqual(packages["logitd"]["versionInfo"], self.version)
        # Libraries that are only headers leave no trace in the program; their licences want to be with it all the same.
        compiled = {
            each["relatedSpdxElement"].removeprefix("SPDXRef-")
            for each in document["relationships"]
            if each["relationshipType"] == "STATIC_LINK"
        }
        includes = "\n".join(path.read_text() for room in ("server", "client", "kernels", "formats")
                             for path in (ROOT / room).rglob("*.[ch]*") if path.is_file() and path.suffix in (".h", ".cc"))
        for header, package in (("nlohmann/json.hpp", "nlohmann-json3-dev"), ("CLI/CLI.hpp", "libcli11-dev"),
                                ("hwy/highway.h", "libhwy-dev"), ("spdlog/spdlog.h", "libspdlog-dev")):
            self.assertIn(header, includes)
            self.assertIn(package, compiled)
            self.assertTrue((self.root / "usr/share/doc" / package / "copyright").exists(), package)
        for library in self.root.glob("usr/lib/x86_64-linux-gnu/*.so*"):
            path = f"/usr/lib/x86_64-linux-gnu/{library.name}"
            owners = subprocess.run(
                ["dpkg-query", "-S", path, os.path.realpath(path), path[4:], os.path.realpath(path)[4:]],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                check=False,
            ).stdout
            owner = owners.split(":")[0]
            self.assertIn(owner, packages, library)
            installed = run("dpkg-query", "-W", "-f=${Version}", owner)
            self.assertEqual(packages[owner]["versionInfo"], installed)
            self.assertTrue((self.root / "usr/share/doc" / owner / "copyright").exists(), owner)

    def test_the_version_is_the_projects(self):
        (project,) = re.findall(r"^project\(logitd VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)
        (image,) = re.findall(r"^ARG VERSION=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
        self.assertEqual(image, project)


class ComposeTest(unittest.TestCase):
    def test_every_service_runs_with_its_flags_and_stops_within_its_grace(self):
        services = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
        servers = {name: service for name, service in services.items() if service["image"].startswith("logitd:")}
        self.assertEqual({s["build"]["target"] for s in servers.values()}, {"cpu", "cuda"})
        for name, service in servers.items():
            with self.subTest(name), tempfile.TemporaryDirectory() as place:
                self.assertTrue(service["read_only"])
                self.assertEqual(service["cap_drop"], ["ALL"])
                flags = dict(flag.split("=", 1) for flag in service["command"] if "=" in flag)
                drain, grace = (int(t.rstrip("s")) for t in (flags["--drain-grace"], service["stop_grace_period"]))
                self.assertGreater(grace, drain + 5)  # a slice that hangs takes 5 s more
                for port, flag in (("7450", "--listen"), ("9464", "--metrics-listen")):
                    self.assertEqual(flags[flag], f"0.0.0.0:{port}")
                command = [flag.replace("=cuda", "=cpu") for flag in service["command"]]  # there may be no GPU
                command = [re.sub(r"0\.0\.0\.0:\d+", "127.0.0.1:0", flag) for flag in command]
                server = Process(place, name, os.environ["LOGITD_BINARY"], *command)
                self.addCleanup(server.stop)
                address = server.wait_for("listening", lambda: re.search(r"listening on (\S+)", server.log))[1]
                self.assertEqual(logitctl("health", "--addr", address).strip(), "SERVING")
                self.assertEqual(server.stop(), 0, server.log)

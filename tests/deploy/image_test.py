"""The CPU image's root file system, as the Dockerfile's last stage describes it, with the programs built here.

scripts/image builds the image itself; this test needs no base system and no compiler, only root.
"""

import json
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

import image_check
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
        "Env": [found["ENV"]] if "ENV" in found else [],
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
        self.assertIn("cpu", image_check.check(self.root, configuration("cpu")))

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

"""scripts/setup installs packages whose set-up writes to its output, with and without /dev/pts.

The real apt and dpkg install packages of this test from an archive of this test into a folder of this test. setup runs
as a user without rights, whose `sudo` changes nothing of this machine.
"""
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SETUP = ROOT / "scripts" / "setup"

# sudo passes no descriptors beyond the first three on, and no variables except what apt needs for this test.
SUDO = """#!/bin/bash
for fd in 3 4 5 6 7 8 9; do eval "exec $fd>&-"; done
case $1 in
  env | apt-get) exec env -i PATH="$PATH" APT_CONFIG="$APT_CONFIG" "$@" ;;
  tee) cat >/dev/null ;;
esac
"""
APT_CONFIG = """Dir "{root}/apt";
Dir::State::status "{root}/system/var/lib/dpkg/status";
Dir::Bin::methods "/usr/lib/apt/methods";
Dir::Bin::dpkg "/usr/bin/dpkg";
APT::Sandbox::User "root";
DPkg::Options {{ "--root={root}/system"; "--force-script-chrootless"; "--log=/dev/null"; }};
"""
FOLDERS = (
    "bin", "archive", "apt/etc/apt/apt.conf.d", "apt/etc/apt/preferences.d", "apt/var/lib/apt/lists/partial",
    "apt/var/cache/apt/archives/partial", "apt/var/log/apt", "system/var/lib/dpkg/info", "system/var/lib/dpkg/updates",
)  # fmt: skip
POSTINST = "#!/bin/sh\nset -e\necho 'the set-up writes this'\n"


def run(command, **options):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    return done.returncode, done.stdout


class SetupTest(unittest.TestCase):
    def setUp(self):
        self.isolated = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c"]
        if run([*self.isolated, "mount -t tmpfs none /dev/pts"])[0] != 0:
            self.skipTest("may not make a mount namespace")
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = pathlib.Path(scratch.name)
        for folder in FOLDERS:
            (self.root / folder).mkdir(parents=True)
        (self.root / "system/var/lib/dpkg/status").touch()
        (self.root / "apt.conf").write_text(APT_CONFIG.format(root=self.root))
        (self.root / "apt/etc/apt/sources.list").write_text(f"deb [trusted=yes] file:{self.root}/archive ./\n")
        self.program("sudo", SUDO)
        self.program("id", "#!/bin/sh\necho 1000\n")

    def program(self, name, text):
        (self.root / "bin" / name).write_text(text)
        (self.root / "bin" / name).chmod(0o755)

    def pack(self, name, postinst=POSTINST):
        """Adds a package to the archive."""
        control = f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: nobody <nobody@localhost>\n"
        source = self.root / "source" / name / "DEBIAN"
        source.mkdir(parents=True)
        (source / "control").write_text(control + "Description: of a test\n")
        (source / "postinst").write_text(postinst)
        (source / "postinst").chmod(0o755)
        package = self.root / "archive" / f"{name}.deb"
        code, text = run(["dpkg-deb", "--build", "--root-owner-group", source.parent, package])
        self.assertEqual(code, 0, text)
        data = package.read_bytes()
        with open(self.root / "archive/Packages", "a", encoding="utf-8") as index:
            index.write(f"{control}Filename: ./{package.name}\nSize: {len(data)}\n")
            index.write(f"SHA256: {hashlib.sha256(data).hexdigest()}\nDescription: of a test\n\n")

    def setup(self, before=""):
        environment = {
            "PATH": f"{self.root}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "APT_CONFIG": str(self.root / "apt.conf"),
            "DPKG_ADMINDIR": str(self.root / "system/var/lib/dpkg"),
            "LC_ALL": "C",
        }
        return run([*self.isolated, before + f"exec {SETUP}"], env=environment, stdin=subprocess.DEVNULL)

    def installed(self):
        query = ["dpkg-query", f"--admindir={self.root}/system/var/lib/dpkg", "-W", "-f=${Package} ${Status}\n"]
        return {line.split()[0] for line in run(query)[1].splitlines() if line.endswith(" install ok installed")}

    def wanted(self):
        (names,) = re.findall(r"^packages=\((.*?)^\)", SETUP.read_text(), re.MULTILINE | re.DOTALL)
        return set(re.sub(r"#.*", "", names).split())

    def test_packages_are_set_up_with_and_without_a_place_for_terminals(self):
        for name in self.wanted():
            self.pack(name)
        for before in ("mount -t tmpfs none /dev/pts && ", ""):
            with self.subTest(before):
                (self.root / "system/var/lib/dpkg/status").write_text("")
                code, text = self.setup(before)
                self.assertEqual(code, 0, text)
                self.assertEqual(self.installed(), self.wanted())
                self.assertRegex(text, r"-- setup: \d+%, ")  # how far apt is
                self.assertNotIn("the set-up writes this", text)

    def test_a_package_that_fails_is_named(self):
        for name in self.wanted():
            self.pack(name, POSTINST + ("echo broken >&2\nexit 3\n" if name == "ccache" else ""))
        code, text = self.setup()
        self.assertNotEqual(code, 0)
        self.assertIn("broken", text)
        self.assertRegex(text, r"ccache.*\n.*exit status 3")
        self.assertNotIn("ccache", self.installed())


if __name__ == "__main__":
    result = unittest.main(exit=False).result
    sys.exit(77 if result.skipped else not result.wasSuccessful())

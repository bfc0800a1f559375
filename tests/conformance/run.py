"""gRPC's interoperability cases on the server's rpc layer: clients of several languages, directly and through proxies.

usage: run.py SERVER CPP_TEST FOLDER [unittest arguments]. SERVER: conformance_server. CPP_TEST: conformance_test, which
is also gRPC's C++ client. FOLDER, of the build tree, keeps what clients need: virtual environments with packages of PyPI,
and the Go client. Remove it to get newer packages. What a machine lacks skips, and says what it is; the program exits
with 77 (skipped) if all does.

A test is a case by a client on a way: test_ping_pong_by_grpclib_through_nginx.
"""

import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "deploy"))

from processes import Process, program  # noqa: E402
from tools import certificate, free_ports  # noqa: E402

# gRPC's cases, and two of this repository: a refused upload, and the refused compression.
CASES = (
    "empty_unary", "large_unary", "client_streaming", "server_streaming", "ping_pong", "empty_stream",
    "status_code_and_message", "special_status_message", "custom_metadata", "unimplemented_method",
    "unimplemented_service", "timeout_on_sleeping_server", "cancel_after_begin", "cancel_after_first_response",
    "refused_upload", "compressed_request_is_refused",
)  # fmt: skip
HAND_MADE = ("mark_without_encoding_is_refused", "other_content_type_is_refused", "other_http_method_is_refused")
ENDS_EARLY = ("timeout_on_sleeping_server", "cancel_after_begin", "cancel_after_first_response")
ANSWERED_EARLY = ("refused_upload", "unimplemented_method", "unimplemented_service", "other_content_type_is_refused")
LIMIT = 100  # of one client on one way, in seconds


def without(cases, *others):
    return tuple(case for case in cases if case not in sum(others, ()))


class Clients:
    """Each method returns the command of one client, to which a target, authorities and cases are added. What it needs
    is made once."""

    def __init__(self, cpp, folder):
        self.cpp_test = cpp
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            import google.protobuf  # noqa: F401
        except ImportError:
            raise unittest.SkipTest("no protobuf of Python: scripts/setup --checks installs it") from None
        subprocess.run(["protoc", f"-I{HERE}", f"--python_out={folder}", "interop.proto"], check=True)

    def python(self, script, name, *packages, base=sys.executable):
        """A script by a Python that has these packages of PyPI; none: this Python with its own."""
        python = base
        if packages:
            place = self.folder / name
            python, done = place / "bin/python", place / "installed"
            if not done.exists() or done.read_text() != repr(packages):
                shutil.rmtree(place, ignore_errors=True)
                self.fetch(base, "-m", "venv", place)
                pip = (python, "-m", "pip", "--timeout=10", "--retries=1", "install", "--quiet")
                self.fetch(*pip, "--only-binary=:all:", *packages)
                done.write_text(repr(packages))
        return [python, HERE / "clients" / script]

    def fetch(self, *command):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            raise unittest.SkipTest(f"PyPI is not reachable: {done.stdout.strip()}")

    def grpc_cpp(self):
        return [sys.executable, HERE / "clients/grpc_cpp.py", self.cpp_test]

    def grpcio_debian(self):
        try:
            import grpc  # noqa: F401
        except ImportError:
            raise unittest.SkipTest("no grpcio of this Python: scripts/setup --checks installs it") from None
        return self.python("grpcio_client.py", "")

    def grpcio_newest(self):
        return self.python("grpcio_client.py", "grpcio-newest", "grpcio", "protobuf")

    def grpcio_oldest(self):
        """The oldest that the Python client takes, and that Python 3.11 has a package of."""
        return self.python("grpcio_client.py", "grpcio-oldest", "grpcio==1.49.1", "protobuf")

    def grpcio_python39(self):
        """The first that Python 3.9 has a package of."""
        found = [shutil.which("python3.9"), *pathlib.Path.home().glob(".pyenv/versions/3.9.*/bin/python")]
        for python in filter(None, found):
            if subprocess.run([python, "-c", ""], stderr=subprocess.DEVNULL, check=False).returncode == 0:
                packages = ("grpcio==1.33.1", "protobuf==3.20.3")
                return self.python("grpcio_client.py", "grpcio-python39", *packages, base=python)
        raise unittest.SkipTest("no Python 3.9")

    def grpclib(self):
        return self.python("grpclib_client.py", "grpclib", "grpclib", "protobuf")

    def grpc_go(self):
        library = pathlib.Path("/usr/share/gocode")
        if not (library / "src/google.golang.org/grpc").exists():
            raise unittest.SkipTest("no golang-google-grpc-dev: scripts/setup --checks installs it")
        go = program("go")
        messages = self.folder / "go/src/interop"
        messages.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "GO111MODULE": "off",
            "GOPATH": f"{self.folder}/go:{library}",
            "GOCACHE": f"{self.folder}/go-cache",
        }

        def build(package, binary):
            subprocess.run([go, "build", "-o", binary, package], env=environment, check=True)
            return binary

        plugin = build("github.com/golang/protobuf/protoc-gen-go", self.folder / "protoc-gen-go")
        subprocess.run(
            ["protoc", f"-I{HERE}", f"--plugin={plugin}", f"--go_out=plugins=grpc:{messages}", "interop.proto"],
            check=True,
        )
        return [build(HERE / "clients/go/client.go", self.folder / "go-client")]

    def curl(self):
        program("curl")
        return [*self.python("hand_made.py", ""), "curl"]

    def nghttp(self):
        program("nghttp")
        return [*self.python("hand_made.py", ""), "nghttp"]


# Which cases a client has.
CLIENTS = {
    "grpc_cpp": CASES,
    "grpcio_debian": CASES,
    "grpcio_newest": CASES,
    "grpcio_oldest": CASES,
    # Where a call ends before its stream has opened, grpcio 1.33.1 may reset that stream, and the peer the connection.
    "grpcio_python39": without(CASES, ("timeout_on_sleeping_server", "cancel_after_begin")),
    "grpclib": without(CASES, ("compressed_request_is_refused",)),  # it cannot compress
    "grpc_go": CASES,
    "curl": without(CASES + HAND_MADE, ENDS_EARLY, ANSWERED_EARLY),  # hand_made.py has why
    "nghttp": without(CASES + HAND_MADE, ENDS_EARLY),
}


class Server(Process):
    def __init__(self, place, name, binary, *certificates):
        super().__init__(place, name, binary, "127.0.0.1:0", *certificates)
        self.address = self.wait_for("listening", lambda: re.search(r"listening on (\S+)", self.log))[1]


class Ways:
    """Each method returns a target and a file of authorities. Every way has a server of its own."""

    def __init__(self, place, binary):
        self.place, self.binary = pathlib.Path(place), binary
        self.processes, self.servers = [], {}

    def server(self, name, *certificates):
        self.servers[name] = Server(self.place, name, self.binary, *certificates)
        return self.servers[name].address

    def directly(self):
        return self.server("directly"), ""

    def with_tls(self):
        certificate(self.place, "localhost", "127.0.0.1")
        authorities = self.place / "tls.crt"
        return self.server("with_tls", authorities, self.place / "tls.key"), authorities

    def proxy(self, name, config, *command):
        """Starts a proxy before a server, by the configuration of this directory."""
        (port,) = free_ports(1)
        text = (HERE / config).read_text()
        for word, value in (
            ("LISTEN", f"127.0.0.1:{port}"),
            ("SERVER", self.server(f"through_{name}")),
            ("PLACE", str(self.place)),
        ):
            text = text.replace(f"@{word}@", value)
        (self.place / config).write_text(text)
        proxy = Process(self.place, name, *command, self.place / config)
        self.processes.append(proxy)
        proxy.wait_for("listening", lambda: listens(port))
        return f"127.0.0.1:{port}", ""

    def through_haproxy(self):
        return self.proxy("haproxy", "haproxy.cfg", program("haproxy"), "-f")

    def through_nginx(self):
        return self.proxy("nginx", "nginx.conf", program("nginx"), "-p", self.place, "-e", "stderr", "-c")

    def stop(self):
        """What each server says when its clients have gone: {way: line}."""
        for process in self.processes:
            process.stop()
        left = {}
        for way, server in self.servers.items():
            code = server.stop()
            found = re.search(r"^left: .*$", server.log, re.MULTILINE)
            left[way] = found[0] if code == 0 and found else f"exit code {code}: {server.log}"
        return left


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


WAYS = ("directly", "with_tls", "through_haproxy", "through_nginx")
NOTHING_LEFT = "left: 0 connections, 0 calls, 0 bytes; cut: 0"


class ConformanceTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.place = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.place)
        cls.clients = Clients(cls.cpp_test, cls.folder)
        cls.ways = Ways(cls.place, cls.server)
        cls.addClassCleanup(cls.ways.stop)
        cls.table = {}

    @classmethod
    def once(cls, owner, name):
        """What a method of `owner` returns; it runs once, and skips again if it has skipped."""
        key = (type(owner), name)
        if key not in cls.table:
            try:
                cls.table[key] = getattr(owner, name)()
            except unittest.SkipTest as reason:
                cls.table[key] = reason
        if isinstance(cls.table[key], unittest.SkipTest):
            raise cls.table[key]
        return cls.table[key]

    @classmethod
    def results(cls, client, way):
        """What became of each case of a client, which runs once for each way."""
        key = (client, way)
        if key not in cls.table:
            command = cls.once(cls.clients, client)
            target, authorities = cls.once(cls.ways, way)
            environment = {**os.environ, "PYTHONPATH": str(cls.folder), "GRPC_VERBOSITY": "NONE"}
            done = subprocess.run(
                [*map(str, command), target, str(authorities), *CLIENTS[client]],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT, check=False,
            )  # fmt: skip
            found = dict(re.findall(r"^(\w+) (ok|failed: .*)$", done.stdout, re.MULTILINE))
            cls.table[key] = {case: found.get(case, f"no result:\n{done.stdout}") for case in CLIENTS[client]}
        return cls.table[key]

    def test_z_nothing_is_left_when_clients_have_gone(self):
        """The last of all: each server has closed every connection, and its account is empty."""
        left = self.ways.stop()
        self.assertEqual(left, {way: NOTHING_LEFT for way in left})


def add_tests():
    for client, cases in CLIENTS.items():
        for way in WAYS:
            for case in cases:

                def test(self, client=client, way=way, case=case):
                    self.assertEqual(self.results(client, way)[case], "ok")

                setattr(ConformanceTest, f"test_{case}_by_{client}_{way}", test)


def print_matrix():
    """A line for each client, a column for each way: cases that passed of those it has. Then what the machine lacks."""
    print(f"{'':16}" + "".join(f"{way:>18}" for way in WAYS))
    for client, cases in CLIENTS.items():
        cells = []
        for way in WAYS:
            results = ConformanceTest.table.get((client, way))
            passed = sum(result == "ok" for result in results.values()) if results else 0
            cells.append(f"{passed}/{len(cases)}" if results else "not run")
        print(f"{client:16}" + "".join(f"{cell:>18}" for cell in cells))
    for (_, name), reason in ConformanceTest.table.items():
        if isinstance(reason, unittest.SkipTest):
            print(f"skipped {name}: {reason}")
    sys.stdout.flush()


def main():
    ConformanceTest.server, ConformanceTest.cpp_test, folder = map(os.path.abspath, sys.argv[1:4])
    ConformanceTest.folder = folder
    add_tests()
    result = unittest.main(argv=[sys.argv[0], *sys.argv[4:]], exit=False).result
    print_matrix()
    if not result.wasSuccessful():
        return 1
    return 77 if len(result.skipped) >= max(result.testsRun - 1, 1) else 0


if __name__ == "__main__":
    sys.exit(main())

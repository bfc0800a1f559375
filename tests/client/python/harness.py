"""A real server, a server that does what a test says, and both clients with the same methods."""

import asyncio
import atexit
import contextlib
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest
import urllib.request
from concurrent import futures
from unittest import mock

import grpc
import logitd

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]


class RunningServer:
    """logitd of $LOGITD_BINARY on a free TCP port and a Unix socket.

    arenas: it leases memory on another Unix socket, `arena`, and has metrics.
    """

    def __init__(self, *flags, arenas=False, backend="cpu"):
        self.backend = backend
        self.directory = tempfile.mkdtemp()
        self.arena = f"unix:{self.directory}/arena"
        leasing = (f"--arena-listen={self.arena}", "--metrics-listen=127.0.0.1:0")
        self.flags = (*flags, *(leasing if arenas else ("--metrics-listen=off",)))
        self.unix = f"unix:{self.directory}/socket"
        self.tcp = None
        atexit.register(self.close)  # also where a test's set-up fails
        self.start()

    def start(self):
        """Starts it; after stop(), at the address that it had."""
        log = pathlib.Path(self.directory, "log")
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                [
                    os.environ["LOGITD_BINARY"],
                    f"--backend={self.backend}",
                    "--cpu-threads=2",
                    f"--listen={self.tcp or '127.0.0.1:0'}",
                    f"--listen={self.unix}",
                    *self.flags,
                ],
                stderr=file,
            )
        line = re.compile(r"listening on (\S+) .*\n")
        until(lambda: line.search(log.read_text()) or self.process.poll() is not None)
        listening = line.search(log.read_text())
        if not listening:
            raise RuntimeError(log.read_text())
        self.tcp = listening.group(1)

    def metric(self, name):
        """A metric; of one with labels, the name has them."""
        address = re.search(r"metrics on (\S+)", pathlib.Path(self.directory, "log").read_text()).group(1)
        page = urllib.request.urlopen(f"http://{address}/metrics", timeout=20).read().decode()
        return float(re.search(rf"^{re.escape(name)} (\S+)", page, re.M).group(1))

    def start_when_called(self):
        """Starts it after a client has tried to connect in vain. Returns the thread that does so."""
        host, port = self.tcp.rsplit(":", 1)
        listener = socket.create_server((host, int(port)))

        def start():
            listener.accept()[0].close()
            listener.close()
            self.start()

        return later(0, start)

    def stop(self):
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def close(self):
        atexit.unregister(self.close)
        code = self.stop() if self.process.poll() is None else 0
        shutil.rmtree(self.directory)
        assert code == 0, code


class FakeServer:
    """Answers every method with a function of the test's.

    unary: {method: f(message, context) -> message}; stream: {method: f(messages, context) -> messages}. `metadata` has
    that of every call of these, and `sizes` the size of every unary one's message.
    """

    def __init__(self, unary=None, stream=None, credentials=None):
        self.metadata, self.sizes = [], []
        self._server = grpc.server(
            futures.ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)]
        )
        outer = self

        class Handler(grpc.GenericRpcHandler):
            def service(self, details):
                name = details.method.rsplit("/", 1)[-1]
                if name in {**(unary or {}), **(stream or {})}:
                    outer.metadata.append(dict(details.invocation_metadata))
                if name in (unary or {}):

                    def call(message, context):
                        outer.sizes.append(len(message))
                        return unary[name](message, context)

                    return grpc.unary_unary_rpc_method_handler(call)
                if name in (stream or {}):
                    return grpc.stream_stream_rpc_method_handler(stream[name])
                if name == "GetInfo":  # no limits
                    return grpc.unary_unary_rpc_method_handler(lambda message, context: b"")
                return None

        self._server.add_generic_rpc_handlers((Handler(),))
        port = (
            self._server.add_secure_port("127.0.0.1:0", credentials)
            if credentials is not None
            else self._server.add_insecure_port("127.0.0.1:0")
        )
        self.address = f"127.0.0.1:{port}"
        self._server.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.stop(None).wait()


def forward(address, method):
    """A stream handler that hands everything to the server at `address`."""

    def handle(messages, context):
        with grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
            yield from channel.stream_stream(method)(messages)

    return handle


_LOOP = asyncio.new_event_loop()  # one for all: gRPC logs faults of its own where loops come and go


def run(task):
    """As asyncio.run."""
    return _LOOP.run_until_complete(task)


class Blocking:
    """An AsyncClient whose methods block, so that one test serves both clients."""

    def __init__(self, *args, **kwargs):
        async def make():
            return logitd.AsyncClient(*args, **kwargs)

        self.client = run(make())

    def __getattr__(self, name):
        method = getattr(self.client, name)
        return lambda *args, **kwargs: run(method(*args, **kwargs))

    def close(self):
        run(self.client.close())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


CLIENTS = (logitd.Client, Blocking)


class TestCase(unittest.TestCase):
    def both(self, *args, **kwargs):
        """A client of each kind."""
        for kind in CLIENTS:
            with kind(*args, **kwargs) as client:
                yield client

    @contextlib.contextmanager
    def refused(self, error, *texts):
        """The call raises `error`, and its text has all of `texts`."""
        with self.assertRaises(error) as caught:
            yield caught
        for text in texts:
            self.assertIn(text, str(caught.exception))


class ServerTestCase(TestCase):
    """With one server for all tests of the class."""

    FLAGS = ()
    ARENAS = False

    @classmethod
    def setUpClass(cls):
        cls.server = RunningServer(*cls.FLAGS, arenas=cls.ARENAS)

    @classmethod
    def tearDownClass(cls):
        cls.server.close()


def until(holds):
    """Waits until holds() does."""
    end = time.monotonic() + 30
    while not holds():
        if time.monotonic() > end:
            raise AssertionError("what was waited for did not come")
        time.sleep(0.01)


class Clock:
    """The clock of clients while it is entered. It stands still; a wait before a retry moves it and is over at once."""

    def __init__(self):
        self.now, self.waits = 1000.0, []  # seconds
        self._patches = contextlib.ExitStack()

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.waits.append(seconds)
        self.now += seconds

    def __enter__(self):
        async def sleep(seconds):
            self.sleep(seconds)

        for module in (logitd._calls, logitd.client, logitd.aio):
            self._patches.enter_context(mock.patch.object(module, "time", self))
        self._patches.enter_context(mock.patch("asyncio.sleep", sleep))
        return self

    def __exit__(self, *_):
        self._patches.close()


def later(seconds, run):
    timer = threading.Timer(seconds, run)
    timer.start()
    return timer

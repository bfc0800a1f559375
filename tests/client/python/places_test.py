"""A client in other places than where it was made: in a pickle, in a forked process, in another event loop."""

import asyncio
import copy
import os
import pickle
import subprocess
import sys
import unittest

import grpc
import logitd
import numpy as np
from harness import ServerTestCase, run

ROWS = np.zeros((2, 10), np.float32)
FORK = """
import os, signal, sys
import logitd
import numpy as np

rows = np.zeros((2, 10), np.float32)
client = logitd.Client(sys.argv[1])
if "used" in sys.argv or "stream" in sys.argv:
    client.top_k(rows, k=1)
if "stream" in sys.argv:
    stream = client.sample_stream()

def say(call):
    try:
        print(call(), flush=True)
    except logitd.LogitdError as error:
        print(error, flush=True)

child = os.fork()
if child == 0:
    signal.alarm(30)  # it must not stay where gRPC hangs
    say(lambda: client.top_k(rows, k=1))
    if "stream" in sys.argv:
        say(lambda: stream.write(rows, seed=1))
        say(stream.read)
    client.close()
    say(lambda: logitd.Client(sys.argv[1]).top_k(rows, k=1).indices.dense().tolist())
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
say(lambda: client.top_k(rows, k=1).indices.dense().tolist())
"""
# In a process that has used gRPC, the fork handlers of Debian 12's may hang in fork(), and where a stream is open they
# crash it.
FORK_IS_BROKEN = grpc.__version__.startswith("1.51.")
REFUSED = "client: got a call in a process that was forked from the client's, allowed in the client's own"


class PickleTest(ServerTestCase):
    def test_a_pickled_client_is_a_new_one_with_the_same_options(self):
        more = dict(deadline=7.0, retry=logitd.Retry(max_attempts=2), priority="batch", score_message_bytes=1 << 16)
        for kind in (logitd.Client, logitd.AsyncClient):
            client = kind(self.server.unix, **more)
            made = [pickle.loads(pickle.dumps(client, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
            for other in (*made, copy.copy(client), copy.deepcopy(client)):
                self.assertIsNot(other, client)
                self.assertEqual((type(other), other.options), (kind, client.options))
                answer = other.top_k(ROWS, k=1)
                answer = run(answer) if kind is logitd.AsyncClient else answer
                self.assertEqual(answer.indices.dense().tolist(), [[0], [0]])
                run(other.close()) if kind is logitd.AsyncClient else other.close()

    def test_a_client_goes_to_another_process(self):
        program = (
            "import pickle, sys\nimport numpy as np\nclient = pickle.load(sys.stdin.buffer)\n"
            "print(client.top_k(np.zeros((2, 10), np.float32), k=1).indices.dense().tolist())"
        )
        with logitd.Client(self.server.unix) as client:
            client.info()
            done = subprocess.run(
                [sys.executable, "-c", program], input=pickle.dumps(client), capture_output=True, timeout=60
            )
        self.assertEqual((done.returncode, done.stdout), (0, b"[[0], [0]]\n"), done.stderr)


class ForkTest(ServerTestCase):
    def said(self, *arguments, **environment):
        """The lines of the forked process, and then one of its parent."""
        kept = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
        done = subprocess.run(
            [sys.executable, "-c", FORK, self.server.tcp, *arguments],
            env={**kept, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.splitlines()

    def test_a_client_is_refused_after_a_fork_and_a_new_one_works(self):
        for arguments, calls in ((["used"], 1), ([], 1), (["stream"], 3)):
            if arguments and FORK_IS_BROKEN:
                continue
            lines = self.said(*arguments)
            self.assertEqual(len(lines), calls + 2)
            for line in lines[:calls]:
                self.assertIn(REFUSED, line)
                self.assertIn("make a client in each process", line)
            self.assertEqual(lines[calls:], ["[[0], [0]]"] * 2)

    def test_a_new_client_is_refused_where_it_would_hang(self):
        for setting in ("0", "false"):
            lines = self.said("used", GRPC_ENABLE_FORK_SUPPORT=setting)
            self.assertIn("client: got made in a process that was forked after gRPC was in use, with", lines[1])
            self.assertIn(f"GRPC_ENABLE_FORK_SUPPORT={setting}, allowed without this setting", lines[1])
            self.assertEqual(lines[2:], ["[[0], [0]]"])


class LoopTest(ServerTestCase):
    def test_an_async_client_may_be_made_before_its_loop(self):
        client = logitd.AsyncClient(self.server.unix)

        async def use():
            async with client:
                return (await client.top_k(ROWS, k=1)).indices.dense().tolist()

        self.assertEqual(run(use()), [[0], [0]])

    def test_an_async_client_is_refused_in_a_second_loop(self):
        client = logitd.AsyncClient(self.server.unix)

        async def open_stream():
            await client.info()
            return client.sample_stream()

        stream = run(open_stream())
        other = asyncio.new_event_loop()
        self.addCleanup(other.close)
        calls = (
            lambda: client.top_k(ROWS, k=1),
            client.info,
            lambda: anext_of(client.watch_health()),
            lambda: stream.write(ROWS, seed=1),
            stream.read,
            client.close,
        )
        for call in calls:
            with self.refused(
                logitd.FailedPrecondition, "client: got a call in a second event loop", "make an AsyncClient in each loop"
            ):
                other.run_until_complete(call())
        run(stream.close())
        run(client.close())

    def test_an_async_client_that_called_nothing_is_closed_anywhere(self):
        other = asyncio.new_event_loop()
        self.addCleanup(other.close)
        other.run_until_complete(logitd.AsyncClient(self.server.unix).close())


async def anext_of(iterator):
    return await iterator.__anext__()


if __name__ == "__main__":
    unittest.main()

"""Processes whose clients were not closed: they end, and say nothing of their own accord."""

import subprocess
import sys
import unittest

from harness import ServerTestCase

RUN = {
    "an error that nobody caught": """
logitd.Client("127.0.0.1:1", deadline=0.5).health()
""",
    "an error that was caught": """
client = logitd.Client("127.0.0.1:1", deadline=0.5)
try:
    client.health()
except logitd.Unavailable:
    pass
""",
    "an error, and a while": """
client = logitd.Client("127.0.0.1:1", deadline=0.5)
try:
    client.health()
except logitd.Unavailable:
    time.sleep(0.5)
""",
    "a client that is closed at once": """
with logitd.Client("127.0.0.1:1", deadline=0.5) as client:
    try:
        client.health()
    except logitd.Unavailable:
        pass
time.sleep(0.5)
""",
    "a thread that still tries": """
def ask():
    try:
        logitd.Client("127.0.0.1:1").health()
    except logitd.LogitdError:
        pass
threading.Thread(target=ask, daemon=True).start()
time.sleep(0.5)
""",
    "one replica of two away": """
replicas = [logitd.Client(address, deadline=0.5) for address in (SERVER, "127.0.0.1:1")]
def score(i):
    try:
        return replicas[i % 2].score_stream(np.zeros((3, 10), np.float32), targets=[1, 2, 3]).totals.rows
    except logitd.Unavailable:
        return 0
with ThreadPoolExecutor(4) as pool:
    assert list(pool.map(score, range(4))) == [3, 0, 3, 0]
""",
    "a stream with an answer unread": """
client = logitd.Client(SERVER)
stream = client.sample_stream()
stream.write(np.zeros((1, 10), np.float32), seed=1)
""",
    "a watch": """
client = logitd.Client(SERVER)
watch = client.watch_health()
assert next(watch) == "SERVING"
""",
    "with asyncio": """
async def main():
    client = logitd.AsyncClient("127.0.0.1:1", deadline=0.5)
    try:
        await client.health()
    except logitd.Unavailable:
        pass
asyncio.run(main())
""",
}
IMPORTS = """
import asyncio, threading, time
from concurrent.futures import ThreadPoolExecutor
import logitd
import numpy as np
SERVER = {server!r}
"""


class ExitTest(ServerTestCase):
    def test_a_process_ends_without_close(self):
        for name, program in RUN.items():
            with self.subTest(program=name):
                try:
                    done = subprocess.run(
                        [sys.executable, "-c", IMPORTS.format(server=self.server.tcp) + program],
                        timeout=20,
                        capture_output=True,
                        text=True,
                    )
                except subprocess.TimeoutExpired:
                    self.fail("it does not end")
                uncaught = "nobody caught" in name
                self.assertEqual(done.returncode, int(uncaught), done.stderr)
                self.assertEqual(done.stdout, "")
                if uncaught:
                    self.assertIn("logitd.errors.Unavailable", done.stderr)
                    self.assertNotIn("Exception in thread", done.stderr)
                else:
                    self.assertNotIn("Traceback", done.stderr)

    def test_a_call_that_succeeds_after_retries_does_not_keep_the_process(self):
        self.server.stop()
        program = IMPORTS.format(server=self.server.tcp) + "client = logitd.Client(SERVER)\nprint(client.health())"
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        try:
            try:
                process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                pass  # it tries
            self.server.start()
            self.assertEqual(process.communicate(timeout=25)[0], "SERVING\n")
            self.assertEqual(process.returncode, 0)
        finally:
            process.kill()


if __name__ == "__main__":
    unittest.main()

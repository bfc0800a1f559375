"""One client of several servers."""

import pathlib
import threading
import unittest

import logitd
import numpy as np
from harness import RunningServer, TestCase, run, until

ROW = np.array([[0.0, 3.0, 1.0]], np.float32)


class SeveralServersTest(TestCase):
    def setUp(self):
        self.servers = [RunningServer("--slow-call=0s"), RunningServer("--slow-call=0s")]
        for server in self.servers:
            self.addCleanup(server.close)
        self.address = "ipv4:" + ",".join(server.tcp for server in self.servers)

    def busy(self):
        """The servers that have answered a call of TopK: their logs have lines of such calls."""
        return [s for s in self.servers if "Sampler/TopK" in pathlib.Path(s.directory, "log").read_text()]

    def test_a_drained_server_loses_no_call(self):
        with logitd.Client(self.address, round_robin=True) as client:
            answers, stop = [], threading.Event()

            def call():
                while not stop.is_set():
                    try:
                        answers.append(client.top_k(ROW, k=1).indices[0].tolist())
                    except logitd.LogitdError as error:
                        answers.append(error)

            callers = [threading.Thread(target=call) for _ in range(3)]
            for caller in callers:
                caller.start()
            try:
                until(lambda: len(self.busy()) == 2)
                self.assertEqual(self.servers[0].stop(), 0)
                before = len(answers)
                until(lambda: len(answers) >= before + 50)
            finally:
                stop.set()
                for caller in callers:
                    caller.join()
            self.assertEqual([answer for answer in answers if answer != [1]], [])

    def test_asyncio_spreads_calls_too(self):
        async def main():
            async with logitd.AsyncClient(self.address, round_robin=True) as client:
                for _ in range(20):
                    await client.top_k(ROW, k=1)

        until(lambda: run(main()) or len(self.busy()) == 2)

    def test_without_round_robin_one_server_gets_all(self):
        with logitd.Client(self.address) as client:
            for _ in range(20):
                client.top_k(ROW, k=1)
            self.assertEqual(len(self.busy()), 1)

    def test_every_server_needs_a_port_and_a_token_stays_on_this_machine(self):
        for address in ("ipv4:127.0.0.1", "ipv4:127.0.0.1:1,127.0.0.2", "dns:///name", "ipv6:[::1]:0"):
            with self.refused(logitd.InvalidArgument, f"address: got {address!r}"):
                logitd.Client(address)
        with self.refused(logitd.InvalidArgument, "token: got one without tls"):
            logitd.Client("ipv4:127.0.0.1:1,10.0.0.1:1", token="a" * 32)
        logitd.Client("ipv4:127.0.0.1:1,127.0.0.2:1", token="a" * 32).close()


if __name__ == "__main__":
    unittest.main()

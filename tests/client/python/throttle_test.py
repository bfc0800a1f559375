"""Calls that are not sent because the server refuses most."""

import unittest

import grpc
import logitd
import numpy as np
from harness import CLIENTS, FakeServer, TestCase
from logitd._throttle import FREE, Throttle

ROW = np.array([[1.0, 3.0, 2.0]], np.float32)
FULL = logitd.ResourceExhausted("full", retry_delay=0.007)


class ThrottleTest(unittest.TestCase):
    def run_calls(self, throttle, seconds, calls, takes):
        """How many of `calls` calls were sent and taken. `takes(now)`: whether the server takes one."""
        sent = taken = 0
        for i in range(calls):
            now = 1000 + seconds * (i + 1) / calls
            if throttle.ask(now) is not None:
                continue
            sent += 1
            taken += takes(now)
            throttle.ended(None if takes(now) else FULL, now)
        return sent, taken

    def test_sends_everything_while_most_is_taken(self):
        self.assertEqual(self.run_calls(Throttle(), 1, 1000, lambda now: True), (1000, 1000))

    def test_few_refusals_keep_nothing_back(self):
        throttle = Throttle()
        for _ in range(FREE):
            self.assertIsNone(throttle.ask(1))
            throttle.ended(FULL, 1)
        self.assertIsNone(throttle.ask(1))

    def test_sends_about_half_as_much_again_as_the_server_takes(self):
        room = {"left": 0.0, "at": 1000.0}

        def takes(now):  # 1000 a second, of 5000; asked twice for each call
            if now > room["at"]:
                room["left"] = min(room["left"] + 1000 * (now - room["at"]), 10)
                room["at"] = now
                room["takes"] = room["left"] >= 1
                room["left"] -= room["takes"]
            return room["takes"]

        sent, taken = self.run_calls(Throttle(), 10, 50000, takes)
        self.assertAlmostEqual(taken, 10000, delta=500)
        self.assertAlmostEqual(sent, 15000, delta=2500)

    def test_sends_again_when_calls_are_forgotten(self):
        throttle = Throttle()
        self.run_calls(throttle, 1, 5000, lambda now: False)
        self.assertIsNotNone(next(filter(None, (throttle.ask(1001) for _ in range(100)))))
        self.assertIsNone(throttle.ask(1020))

    def test_other_errors_keep_nothing_back(self):
        throttle = Throttle()
        for error in (
            logitd.DeadlineExceeded("late"),
            logitd.Unavailable("away", retry_delay=1),
            logitd.InvalidArgument("k"),
            logitd.ResourceExhausted("send less at once"),
        ):
            for _ in range(100):
                throttle.ended(error, 1)
                self.assertIsNone(throttle.ask(1))


class ThrottledClientTest(TestCase):
    def calls_of(self, kind, **options):
        """How many of 200 calls came to a server that refuses all."""
        calls = []

        def full(message, context):
            calls.append(message)
            context.set_trailing_metadata((("grpc-retry-pushback-ms", "1"),))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

        retry = logitd.Retry(max_attempts=1)
        with FakeServer({"TopK": full}) as server, kind(server.address, retry=retry, **options) as client:
            for _ in range(200):
                with self.assertRaises(logitd.ResourceExhausted) as raised:
                    client.top_k(ROW, k=1)
                self.assertRegex(raised.exception.message, "^(full|not sent: of the last [0-9]+ calls .*)$")
                self.assertEqual(raised.exception.retry_delay, 0.001)
        return len(calls)

    def test_does_not_send_most_calls_that_would_be_refused(self):
        for kind in CLIENTS:
            self.assertGreater(self.calls_of(kind), FREE)
            self.assertLess(self.calls_of(kind), 150)

    def test_can_be_told_to_send_all(self):
        for kind in CLIENTS:
            self.assertEqual(self.calls_of(kind, throttle=False), 200)


if __name__ == "__main__":
    unittest.main()

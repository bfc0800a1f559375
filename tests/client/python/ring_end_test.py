"""How rings end, and what servers may answer: killed servers, scribbled rings, closed arenas, interrupts, forks."""

import contextlib
import mmap
import signal
import socket
import struct
import subprocess
import sys
import time
from unittest import mock

import logitd
from arena_test import MIB
from harness import RunningServer, TestCase, later, until
from ring_test import WAIT, RingTestCase, frozen, values

HOLDER = """
import os, sys
import logitd
import numpy as np
arena = logitd.Arena.lease(sys.argv[1], 1 << 20)
rows = arena.empty(100)
rows[:] = np.arange(100)
ring = arena.ring(slots=4, entry_bytes=512, answer_bytes=512)
ring.submit_top_k(rows, k=1, arena=arena)
if os.fork() == 0:
    texts = []
    calls = (ring.wait, lambda: ring.top_k(rows, k=1, arena=arena), lambda: ring.submit_sample(rows, temperature=0))
    for call in (*calls, lambda: logitd.Ring.open(arena)):
        try:
            call()
        except logitd.FailedPrecondition as error:
            texts.append(str(error))
    ring.close()
    assert len(texts) == 4 and all("in a forked child" in text for text in texts), texts
    os._exit(0)
assert os.wait()[1] == 0
tag, answer = ring.wait(30)
assert (tag, answer.indices[0].tolist()) == (0, [99]), answer
assert ring.top_k(rows, k=2, arena=arena).indices[0].tolist() == [99, 98]
print("done", flush=True)
sys.stdin.readline()
"""


class EndTest(RingTestCase):
    """What ends a ring, and what an interrupt leaves."""

    def doomed(self, *flags):
        """A server of its own, with an arena and a ring in it."""
        server = RunningServer(*flags, arenas=True)
        self.addCleanup(server.close)
        arena = logitd.Arena.lease(server.arena, MIB)
        self.addCleanup(arena.close)
        return server, arena, arena.ring(slots=4)

    def assert_over(self, ring, *texts):
        self.assertEqual(ring.in_flight, 0)
        row = values(1, 50)
        for call in (
            lambda: ring.top_k(row, k=1),
            lambda: ring.submit_top_k(row, k=1),
            lambda: ring.submit_sample(row, seed=1),
            lambda: ring.wait(1),
        ):
            with self.refused(logitd.Unavailable, "ring: it has ended: ", *texts):
                call()

    def test_a_killed_server_ends_calls_in_flight(self):
        for kill in (signal.SIGKILL, signal.SIGTERM):
            server, arena, ring = self.doomed()
            self.assertTrue(ring.top_k(values(1, 50), k=1).ok.all())
            with frozen(server):
                for _ in range(2):
                    ring.submit_top_k(values(1, 50), k=1)
                timer = later(0.1, lambda kill=kill, server=server: server.process.send_signal(kill))
                if kill == signal.SIGKILL:
                    with self.refused(logitd.Unavailable, "ring: it has ended: the server closed the connection"):
                        ring.wait(WAIT)
                timer.join()
            with contextlib.suppress(logitd.Unavailable):
                while ring.in_flight:  # a drain may still answer
                    ring.wait(WAIT)
            server.process.wait(WAIT)
            self.assert_over(ring)

    def test_a_server_that_went_away_between_calls(self):
        server, arena, ring = self.doomed()
        self.assertTrue(ring.top_k(values(1, 50), k=1).ok.all())
        server.process.kill()
        server.process.wait(WAIT)
        with self.refused(logitd.Unavailable, "ring: it has ended: the server closed the connection"):
            ring.top_k(values(1, 50), k=1)
        self.assert_over(ring)

    def test_answers_from_before_the_end_are_still_given(self):
        server, arena, ring = self.doomed()
        ring.submit_top_k(values(1, 50), k=1)
        until(ring._ready)
        server.process.kill()
        server.process.wait(WAIT)
        with self.refused(logitd.Unavailable, "ring: it has ended: the server closed the connection"):
            ring.submit_top_k(values(1, 50), k=1)
        self.assertEqual(ring.in_flight, 1)
        tag, answer = ring.wait(WAIT)
        self.assertEqual((tag, answer.indices.counts.tolist()), (0, [1]))
        self.assert_over(ring)

    def test_a_ring_that_is_cut_off_says_why(self):
        for at, value, text in (
            (1, 9, "ring: got a submission of method 9"),
            (2, 7, "priority 7"),
            (4, 255, "allowed 0..4064"),
        ):
            for sleeping in (False, True):
                arena, ring = self.ring(MIB, slots=2, spin=0 if sleeping else 0.5)
                rows = self.filled(arena, values(1, 50))
                self.assertTrue(ring.top_k(rows, k=1, arena=arena).ok.all())
                fence = ring._fence

                def scribble():
                    ring._memory[128 + 4096 + at] = value
                    ring._memory[128 + 4096 + 5] = 255 if at == 4 else 0
                    fence()

                ring._fence = scribble
                with self.refused(logitd.Unavailable, "ring: it has ended: ", text):
                    ring.top_k(rows, k=1, arena=arena)
                ring._fence = fence
                self.assert_over(ring, text)
                until(lambda: self.server.metric("logitd_arena_leases") == 0)
                with logitd.Client(self.server.unix) as client:  # the lease is gone, and nobody else is harmed
                    with self.refused(logitd.NotFound, "shared.lease"):
                        client.top_k(rows, k=1, arena=arena)
                    self.assertTrue(client.top_k(values(1, 50), k=1).ok.all())
                self.doCleanups()

    def test_a_scribbled_answer_ends_the_ring(self):
        for at, value in ((8, 255), (16, 77)):  # its size, its tag
            arena, ring = self.ring(MIB, slots=1, entry_bytes=512, answer_bytes=512)
            ring.submit_top_k(values(1, 50), k=1)
            until(lambda: ring._memory[128 + 512] == 1)
            ring._memory[128 + 512 + at] = value
            ring._memory[128 + 512 + at + 1] = value
            with self.refused(logitd.Unavailable, "got a completion that is not of this protocol"):
                ring.wait(WAIT)
            self.assert_over(ring, "not of this protocol")
            self.doCleanups()

    def test_an_answer_that_is_no_message_is_internal(self):
        arena, ring = self.ring(MIB, slots=1, entry_bytes=512, answer_bytes=512)
        ring.submit_top_k(values(1, 50), k=1)
        until(lambda: ring._memory[128 + 512] == 1)
        ring._memory[128 + 512 + 32 : 128 + 512 + 40] = b"\xff" * 8
        tag, error = ring.wait(WAIT)
        self.assertEqual((tag, type(error)), (0, logitd.Internal))
        self.assertTrue(ring.top_k(values(1, 50), k=1).ok.all())

    def test_an_arena_closed_under_the_ring(self):
        for wait in (False, True):
            arena, ring = self.ring(MIB, slots=2, spin=0)
            with frozen(self.server):
                ring.submit_top_k(values(1, 50), k=1)
                timer = later(0.3 if wait else 0, arena.close)
                if not wait:
                    timer.join()
                with self.refused(logitd.Unavailable, "ring: it has ended: its arena was closed"):
                    ring.wait(WAIT)
                timer.join()
            self.assert_over(ring, "its arena was closed")
            self.doCleanups()

    def test_a_lease_that_ended(self):
        arena, ring = self.ring(MIB, slots=2)
        ring.top_k(values(1, 50), k=1)
        arena._connection.shutdown(socket.SHUT_RDWR)
        with self.refused(logitd.Unavailable, "ring: it has ended: the server closed the connection"):
            ring.top_k(values(1, 50), k=1)
        self.assert_over(ring)

    def test_close_with_calls_in_flight(self):
        arena, ring = self.ring(8 * MIB, slots=4)
        rows = self.filled(arena, values(32, 30000))
        with ring:
            for _ in range(4):
                ring.submit_sample(rows, seed=1, top_p=0.9, arena=arena)
        ring.close()
        for call in (ring.wait, lambda: ring.top_k(rows, k=1, arena=arena), lambda: ring.submit_sample([1], seed=1)):
            with self.assertRaises((logitd.FailedPrecondition, logitd.InvalidArgument)):
                call()
        with self.refused(logitd.FailedPrecondition, "ring: got a call after close(), allowed before it"):
            ring.submit_top_k(rows, k=1, arena=arena)
        with logitd.Client(self.server.unix) as client:
            self.assertTrue(client.top_k(rows, k=1, arena=arena).ok.all())  # the lease is as it was
        until(lambda: self.server.metric("logitd_arena_rings") == 1)
        arena.close()
        until(lambda: self.server.metric("logitd_arena_rings") == 0)

    def test_close_by_another_thread_ends_a_wait(self):
        arena, ring = self.ring(MIB, slots=2)
        with frozen(self.server):
            ring.submit_top_k(values(1, 50), k=1)
            timer = later(0.2, ring.close)
            with self.refused(logitd.FailedPrecondition, "after close()"):
                ring.wait(WAIT)
            timer.join()

    def test_an_interrupted_call_leaves_the_ring_whole(self):
        class Interrupt(Exception):
            pass

        def interrupt(*_):
            raise Interrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        self.addCleanup(signal.signal, signal.SIGALRM, before)
        arena, ring = self.ring(MIB, slots=16)
        rows = self.filled(arena, values(1, 3000))
        interrupted = 0
        for step in range(120):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.00002 + step % 40 * 0.00001)
                ring.top_k(rows, k=1 + step % 7, arena=arena)
                while True:
                    time.sleep(1)
            except Interrupt:
                interrupted += 1
            self.assertEqual(ring.in_flight, 0)
            self.assertEqual(ring._memory[64], 0)
            for k in (2, 3):
                self.assertEqual(ring.top_k(rows, k=k, arena=arena).indices.counts.tolist(), [k])
        self.assertEqual(interrupted, 120)

    def test_a_submit_interrupted_after_its_phase_is_dropped(self):
        class Interrupt(Exception):
            pass

        arena, ring = self.ring(MIB, slots=12)
        for step in range(5):
            with mock.patch.object(ring, "_ring_doorbell", mock.Mock(side_effect=Interrupt)):
                with self.assertRaises(Interrupt):
                    ring.submit_top_k(values(1, 50), k=5)
            if step % 2:
                ring._submitted -= 1  # as if even earlier, before it was counted
            self.assertEqual(ring.in_flight, 0)
            self.assertEqual(ring.top_k(values(1, 50), k=2).indices.counts.tolist(), [2])

    def test_fork_leaves_the_ring_to_its_parent(self):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, self.server.arena], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait, WAIT)
        self.addCleanup(process.stdin.close)
        self.assertEqual(process.stdout.readline(), b"done\n")
        process.kill()  # with the ring open
        process.wait(WAIT)
        until(lambda: self.server.metric("logitd_arena_rings") == 0)


class StrangeRingTest(TestCase):
    """A peer that answers what a test says, to the ring's request too."""

    def open(self, answer, timeout=WAIT):
        peers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for peer in peers:
            self.addCleanup(peer.close)
        arena = logitd.Arena(peers[0], mmap.mmap(-1, MIB), b"0123456789abcdef")
        if answer == b"":
            peers[1].shutdown(socket.SHUT_WR)
        elif answer is not None:
            peers[1].send(answer)
        try:
            return arena.ring(slots=2, entry_bytes=256, answer_bytes=512, timeout=timeout), arena
        finally:
            self.assertEqual(peers[1].recv(100), struct.pack("<4sIIIIIQ", b"LDRG", 1, 2, 256, 512, 0, 0))

    def test_answers_that_are_no_ring(self):
        head = struct.Struct("<4sIII")
        for answer, error, text in (
            (head.pack(b"NOPE", 1, 0, 0), logitd.Internal, "got an answer of 16 bytes that is not of this protocol"),
            (head.pack(b"LDRG", 1, 0, 3), logitd.Internal, "got an answer of 16 bytes"),
            (b"x", logitd.Internal, "got an answer of 1 bytes"),
            (b"", logitd.Unavailable, "the lease has ended, or the server knows no rings"),
            (head.pack(b"LDRG", 1, 8, 4) + b"full", logitd.ResourceExhausted, "full"),
            (head.pack(b"LDRG", 1, 99, 4) + b"what", logitd.Unknown, "what"),
        ):
            with self.subTest(answer=answer), self.refused(error, text):
                self.open(answer)
        with self.refused(logitd.Unavailable, "no answer in 0.05 s"):
            self.open(None, timeout=0.05)

    def test_a_busy_server_says_when_to_try_again(self):
        ring, _ = self.open(struct.pack("<4sIII", b"LDRG", 1, 0, 0))
        for number, (code, retry_ms, error, delay) in enumerate(
            (
                (8, 250, logitd.ResourceExhausted, 0.25),
                (8, 0, logitd.ResourceExhausted, None),
                (77, 0, logitd.Unknown, None),
            )
        ):
            ring.submit_top_k(values(1, 20), k=1)
            at = 128 + 2 * 256 + number % 2 * 512
            struct.pack_into("<BxxxIIIQQ4s", ring._memory, at, 0, code, 4, retry_ms, number, 0, b"full")
            with self.refused(logitd.DeadlineExceeded):
                ring.wait(0)
            ring._memory[at] = 1 + number // 2
            tag, answer = ring.wait(WAIT)
            self.assertEqual((tag, type(answer), answer.retry_delay, answer.attempts), (number, error, delay, 1))
            self.assertEqual(answer.message, "full")

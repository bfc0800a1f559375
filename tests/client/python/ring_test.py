"""Calls through a ring: the same answers and errors, which side wakes the other, and every refusal."""

import contextlib
import gc
import importlib.util
import pathlib
import platform
import signal
import socket
import struct
import threading
import time
import unittest
from unittest import mock

import logitd
import numpy as np
from arena_test import MIB, LeaseTestCase, layouts, mapped
from harness import until
from logitd import ring as ring_module
from rows_test import bf16_bits

RANDOM = np.random.default_rng(78)
WAIT = 30  # seconds for what must come
ROWS, VOCAB = 5, 1003

SAMPLED = {  # parameters of sample that each use another part of the request or the answer
    "greedy": dict(temperature=0),
    "per_row": dict(seed=[1, 2, 3, 4, 2**64 - 1], position=[0, 1, 2, 3, 2**63], temperature=[0, 0.5, 1, 1.5, 2]),
    "filters": dict(seed=3, top_k=[0, 1, 10, 500, VOCAB], top_p=0.9, min_p=0.01, top_n_sigma=[0, 1, 2, 3, 1e30]),
    "top_k_of_all": dict(seed=3, top_k=[-1, 0, VOCAB, VOCAB + 1, 2**31 - 1], logprob_mode="processed"),
    "penalties": dict(
        seed=4,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.1,
        history=[[1, 2, 2], [], [5], [1002], [7, 7, 7]],
    ),
    "prompts": dict(
        seed=4,
        repetition_penalty=1.2,
        presence_penalty=5,
        history=[[1, 2, 2], [], [5], [1002], [7, 7, 7]],
        prompt_tokens=[1, 0, 1, 0, 3],
    ),
    "biases": dict(seed=5, logit_bias=[{1: 5.0}, None, {2: -np.inf, 1002: 3.0}, {}, {0: 1.0}]),
    "masks": dict(seed=6, allowed_tokens=np.arange(VOCAB) % 3 == 0),
    "reports": dict(
        seed=7, top_logprobs=[0, 1, 2, 3, 20], logprob_mode="processed", extra_ids=[[1], [], [5, 4], [9], [1002]]
    ),
    "tempered": dict(seed=7, temperature=0.7, top_k=[0, 1, 10, 500, VOCAB], logprob_mode="tempered", top_logprobs=2),
    "entropy": dict(seed=7, temperature=0.7, top_p=[1, 0.9, 0.5, 1, 0.1], want_entropy=[True, False, True, True, True]),
    "many_tops": dict(seed=7, top_logprobs=[VOCAB, 0, 129, 128, 1], logprob_mode=["raw", "processed"] * 2 + ["raw"]),
    "draws": dict(seed=7, temperature=0.7, top_p=[1, 0.9, 0.5, 1, 0.1], draws=[3, 0, 1, 1024, 2]),
    "rank": dict(seed=8, want_rank=[True, False, True, False, True]),
}

def values(rows=ROWS, width=VOCAB):
    return RANDOM.standard_normal((rows, width)).astype(np.float32) * 4


@contextlib.contextmanager
def frozen(server):
    """The server stands still, all of its threads."""

    def stands():
        states = set()
        for task in pathlib.Path(f"/proc/{server.process.pid}/task").glob("*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends
                states.add(task.read_text().rpartition(")")[2].split()[0])
        return states == {"T"}

    server.process.send_signal(signal.SIGSTOP)
    try:
        until(stands)
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


class RingTestCase(LeaseTestCase):
    def filled(self, arena, data):
        rows = arena.empty(data.shape)
        rows[:] = data
        return rows

    def ring(self, nbytes=4 * MIB, **options):
        """An arena of its own, and its ring."""
        arena = self.lease(nbytes)
        ring = arena.ring(**options)
        self.addCleanup(ring.close)
        return arena, ring


class AnswersTest(RingTestCase):
    def test_answers_are_those_of_grpc_to_the_bit(self):
        arena, ring = self.ring()
        with logitd.Client(self.server.unix) as client:
            for dtype in ("f32", "f16", "bf16"):
                data = values()
                data[3, 17] = np.nan
                data[4] = -np.inf
                kind = dict(dtype="bf16") if dtype == "bf16" else {}
                data = bf16_bits((data.view(np.uint32) & 0xFFFF0000).view(np.float32)) if kind else data.astype(
                    {"f32": np.float32, "f16": np.float16}[dtype]
                )
                for layout, rows in layouts(arena, ROWS, VOCAB, dtype).items():
                    rows.view(data.dtype)[:] = data
                    given = kind if rows.dtype == np.uint16 else {}
                    with self.subTest(dtype=dtype, layout=layout):
                        want = client.top_k(data, k=[1, 2, 3, 4, 50], temperature=0.7, **kind)
                        got = ring.top_k(rows, k=[1, 2, 3, 4, 50], temperature=0.7, arena=arena, **given)
                        self.assert_same(got, want)
                        self.assertEqual(got.attempts, 1)
                        self.assertTrue(0 < got.round_trip < WAIT)
                        self.assertGreater(got.timings.total_ns, 0)
                    for name, params in SAMPLED.items():
                        with self.subTest(dtype=dtype, layout=layout, params=name):
                            want = client.sample(data, **params, **kind)
                            self.assert_same(ring.sample(rows, arena=arena, **params, **given), want)
        self.assertEqual(ring.in_flight, 0)

    def test_hidden_states_for_a_head(self):
        hidden = RANDOM.standard_normal((6, 64)).astype(np.float32)
        arena, ring = self.ring()
        with logitd.Client(self.server.unix) as client:
            client.load_head("lm", "tiny")
            self.addCleanup(self.unload)
            rows = self.filled(arena, hidden)
            self.assert_same(
                ring.top_k(hidden=rows, head="lm", k=4, arena=arena), client.top_k(hidden=hidden, head="lm", k=4)
            )
            params = dict(seed=[1, 2, 3, 4, 5, 6], top_p=0.8, top_logprobs=2)
            self.assert_same(
                ring.sample(hidden=rows, head="lm", arena=arena, **params),
                client.sample(hidden=hidden, head="lm", **params),
            )
            with self.refused(logitd.NotFound, "nothing") as caught:
                ring.top_k(hidden=rows, head="nothing", k=4, arena=arena)
            self.assertEqual(caught.exception.attempts, 1)

    def unload(self):
        with logitd.Client(self.server.unix) as client:
            client.unload_head("lm")

    def test_rows_in_another_arena_or_in_the_request(self):
        data = values(2, 100)
        arena, ring = self.ring(MIB, slots=2)
        other = self.lease(MIB)
        rows = self.filled(other, data)
        with logitd.Client(self.server.unix) as client:
            want = client.sample(data, seed=[1, 2], top_logprobs=3)
            self.assert_same(ring.sample(rows, seed=[1, 2], top_logprobs=3, arena=other), want)
            self.assert_same(ring.sample(data, seed=[1, 2], top_logprobs=3), want)
            self.assert_same(ring.top_k(data[0], k=5), client.top_k(data[0], k=5))

    @unittest.skipIf(importlib.util.find_spec("torch") is None, "no torch")
    def test_answers_are_tensors_where_the_rows_are(self):
        import torch

        arena, ring = self.ring(slots=2)
        rows = arena.empty_tensor((2, 100))
        rows[:] = torch.arange(100)
        self.assertIsInstance(ring.sample(rows, temperature=0, arena=arena).tokens, torch.Tensor)

    def test_many_in_flight_come_in_any_order_each_with_its_tag(self):
        arena, ring = self.ring(8 * MIB, slots=16)
        small, large = self.filled(arena, values(1, 50)), self.filled(arena, values(32, 30000))
        with logitd.Client(self.server.unix) as client:
            wants = {
                False: client.top_k(np.array(small), k=3),
                True: client.sample(np.array(large), seed=list(range(32)), top_p=0.9),
            }
        overtaken = 0
        for _ in range(20):
            tags = {}
            for i in range(16):
                if i % 5 == 0:
                    tags[ring.submit_sample(large, seed=list(range(32)), top_p=0.9, arena=arena)] = True
                else:
                    tags[ring.submit_top_k(small, k=3, arena=arena)] = False
            self.assertEqual(ring.in_flight, 16)
            order = list(tags)
            self.assertEqual(order, list(range(order[0], order[0] + 16)))
            came = []
            while ring.in_flight:
                tag, answer = ring.wait(WAIT)
                self.assert_same(answer, wants[tags.pop(tag)])
                came.append(tag)
            self.assertEqual(tags, {})
            overtaken += came != order
        self.assertGreater(overtaken, 0)

    def test_slots_are_used_again_and_again(self):
        for slots in (1, 2, 3, 7):
            arena, ring = self.ring(MIB, slots=slots, entry_bytes=512, answer_bytes=512)
            rows = self.filled(arena, np.eye(40, dtype=np.float32))
            expected, given = [], []
            for step in range(40 * slots + 5):
                row = step * 7 % 40
                expected.append(row)
                self.assertEqual(ring.submit_top_k(rows[row], k=1, arena=arena), step)
                while ring.in_flight == slots or (ring.in_flight and step % 11 == 0):
                    given.append(ring.wait(WAIT))
            while ring.in_flight:
                given.append(ring.wait(WAIT))
            self.assertEqual(len(given), len(expected))
            for tag, answer in given:
                self.assertEqual(answer.indices[0].tolist(), [expected[tag]])
            self.doCleanups()  # leases are few

    def test_answers_outlive_slots_ring_and_arena(self):
        before = mapped()
        arena, ring = self.ring(MIB, slots=1)
        rows = self.filled(arena, values(2, 100))
        first = ring.top_k(rows, k=5, arena=arena)
        copies = np.array(first.indices.values), np.array(first.probs.values)
        rows[:] = values(2, 100)
        for _ in range(3):
            ring.top_k(rows, k=5, arena=arena)
        np.testing.assert_array_equal(first.indices.values, copies[0])
        self.doCleanups()
        del arena, rows
        gc.collect()
        self.assertEqual(mapped(), before + 1)  # the ring's
        del ring
        gc.collect()
        self.assertEqual(mapped(), before)
        np.testing.assert_array_equal(first.probs.values, copies[1])


class OrderTest(RingTestCase):
    """What makes a call visible, and what wakes a client."""

    def test_the_fence_of_arm_works_on_this_machine(self):
        real = ring_module._fence_of
        fences = []

        def counted(machine):
            fence = real(machine, always=True)

            def count():
                fences.append(1)
                fence()

            return count

        with mock.patch.object(ring_module, "_fence_of", counted):
            arena, ring = self.ring(MIB, slots=2)
        rows = self.filled(arena, values(1, 100))
        for _ in range(50):
            self.assertEqual(ring.top_k(rows, k=1, arena=arena).indices[0][0], rows.argmax())
        self.assertGreaterEqual(len(fences), 100)  # one before a phase is written, one after one is read

    def test_a_phase_is_the_last_thing_written_and_one_byte(self):
        arena, ring = self.ring(MIB, slots=2, entry_bytes=512, answer_bytes=512)
        rows = self.filled(arena, values(1, 100))
        for step in range(5):  # so that the slots hold what was before
            ring.top_k(rows, k=1, arena=arena)
        seen = []
        slot = 128 + 5 % 2 * 512
        ring._fence = lambda: seen.append(bytes(ring._memory[slot : slot + 512]))
        tag = ring.submit_top_k(rows, k=2, temperature=0.5, arena=arena, deadline=7)
        after = bytes(ring._memory[slot : slot + 512])
        before = seen[0]
        self.assertEqual((before[0], after[0]), (2, 1))  # the second time around, and the third
        self.assertEqual(before[1:], after[1:])
        method, priority, unused, size, number, timeout_us, unused2 = struct.unpack_from("<BBBIQQQ", after, 1)
        self.assertEqual((method, priority, unused, number, timeout_us, unused2), (1, 0, 0, tag, 7000000, 0))
        self.assertLess(size, 100)
        self.assertEqual(len(ring.wait(WAIT)[1].indices[0]), 2)

    @unittest.skipIf(platform.machine() != "x86_64", "the machine needs a fence")
    def test_other_machines_are_refused(self):
        arena = self.lease(MIB)
        for machine in ("riscv64", "ppc64le", "", "armv7l"):
            with mock.patch.object(platform, "machine", lambda machine=machine: machine):
                with self.refused(logitd.Unimplemented, f"got a machine of type {machine!r}, allowed x86-64"):
                    arena.ring()
        arena.ring(slots=1).close()  # nothing was taken

    def test_where_the_fence_is_forbidden_the_ring_is_refused(self):
        with mock.patch.object(ring_module, "_REGISTER_GLOBAL_EXPEDITED", 1 << 30):
            with self.refused(logitd.Unimplemented, "membarrier: Invalid argument"):
                ring_module._fence_of(platform.machine(), always=True)

    def test_the_priority_is_that_of_the_ring(self):
        for number, priority in enumerate(("interactive", "batch")):
            arena, ring = self.ring(MIB, slots=2, priority=priority)
            self.assertTrue(ring.top_k(values(1, 50), k=1).ok.all())
            self.assertEqual(ring._memory[128 + 2], number)
            self.doCleanups()

    def test_a_client_that_sleeps_is_woken(self):
        arena, ring = self.ring(8 * MIB, slots=4, spin=0)
        rows = self.filled(arena, values(32, 30000))
        small = self.filled(arena, values(1, 100))
        polls = []
        real = ring._heard

        def heard(seconds):
            polls.append(seconds)
            return real(seconds)

        ring._heard = heard
        for _ in range(20):
            ring.sample(rows, seed=1, top_p=0.9, arena=arena)
            self.assertEqual(ring._memory[64], 0)  # awake
        self.assertGreater(len(polls), 0)
        for _ in range(3):
            until(lambda: ring._memory[0])  # the server's thread sleeps too
            self.assertEqual(ring.top_k(small, k=1, arena=arena).indices[0][0], small.argmax())

    def test_a_missed_doorbell_costs_a_short_nap(self):
        arena, ring = self.ring(MIB, slots=2, spin=0)
        row = self.filled(arena, values(1, 100))
        # As if the server had looked at client_asleep too early, each time.
        with mock.patch.object(ring_module, "_CLIENT_ASLEEP", 72), mock.patch.object(
            ring, "_heard", wraps=ring._heard
        ) as naps:
            for _ in range(30):
                self.assertTrue(ring.top_k(row, k=1, arena=arena).ok.all())
        self.assertLess(max(nap.args[0] for nap in naps.call_args_list), 1)

    def test_a_long_wait_does_not_use_the_processor(self):
        arena, ring = self.ring(MIB, slots=2)
        with frozen(self.server):
            ring.submit_top_k(values(1, 50), k=1)
            used = time.process_time()
            with self.refused(logitd.DeadlineExceeded, "ring: no answer came in time; the calls stay in flight"):
                ring.wait(1.5)
            self.assertLess(time.process_time() - used, 0.5)
            with self.refused(logitd.DeadlineExceeded, "no answer came in time"):
                ring.wait(0)
        self.assertEqual(ring.in_flight, 1)
        self.assertTrue(ring.wait(WAIT)[1].ok.all())

    def test_a_doorbell_that_found_the_socket_full_is_rung_again_by_who_waits(self):
        arena, ring = self.ring(MIB, slots=4)
        row = self.filled(arena, values(1, 100))
        for _ in range(3):
            until(lambda: ring._memory[0])  # the server sleeps
            with mock.patch.object(ring, "_socket") as full:
                full.send.side_effect = BlockingIOError
                ring.submit_top_k(row, k=1, arena=arena)
            self.assertTrue(ring.wait(WAIT)[1].ok.all())
            self.assertFalse(ring._rings_again)

    def test_a_full_socket_of_doorbells_loses_no_call(self):
        arena, ring = self.ring(MIB, slots=4)
        row = self.filled(arena, values(1, 100))
        for _ in range(3):
            with contextlib.suppress(BlockingIOError):
                for _ in range(100000):
                    arena._connection.send(b"\0", socket.MSG_DONTWAIT)
                self.fail("the socket is never full")
            for _ in range(50):
                self.assertTrue(ring.top_k(row, k=1, arena=arena).ok.all())
            until(lambda: ring._memory[0])


class RefusedTest(RingTestCase):
    def test_shapes_that_cannot_be_are_refused_and_take_nothing(self):
        arena = self.lease(MIB)
        for options, text in (
            (dict(slots=0), "slots: got 0, allowed whole numbers, 1 to 256"),
            (dict(slots=257), "slots: got 257"),
            (dict(slots=1.5), "slots: got 1.5"),
            (dict(slots=True), "slots: got True"),
            (dict(entry_bytes=64), "entry_bytes: got 64, allowed whole numbers, 128 to 65536"),
            (dict(entry_bytes=65600), "entry_bytes: got 65600"),
            (dict(entry_bytes=130), "entry_bytes: got 130, allowed a multiple of 64 from 128 to 65536"),
            (dict(answer_bytes=4095), "answer_bytes: got 4095, allowed a multiple of 64"),
            (dict(slots=64), "ring: got 64 slots in 1310848 bytes, allowed the 1048576 bytes that are left"),
            (dict(priority="low"), "priority: got 'low', allowed 'interactive', 'batch'"),
            (dict(spin=-1), "spin: got -1, allowed seconds, 0 to 1"),
            (dict(spin=1.1), "spin: got 1.1"),
            (dict(spin=float("nan")), "spin: got nan"),
            (dict(deadline=0), "deadline: got 0 s"),
            (dict(deadline="1"), "deadline: got '1'"),
            (dict(timeout=0), "timeout: got 0"),
            (dict(timeout=None), "timeout: got None"),
        ):
            with self.subTest(options), self.refused(logitd.InvalidArgument, text) as caught:
                arena.ring(**options)
            self.assertEqual(caught.exception.attempts, 0)
        for wrong in (None, "arena", object()):
            with self.refused(logitd.InvalidArgument, "allowed an Arena, of the host"):
                logitd.Ring.open(wrong)
        self.assertEqual(arena._taken, 0)
        self.assertEqual(logitd.Ring.nbytes(slots=3, entry_bytes=128, answer_bytes=192), 128 + 3 * 320)
        rest = arena.empty((MIB - logitd.Ring.nbytes(3, 128, 512)) // 4)
        ring = arena.ring(slots=3, entry_bytes=128, answer_bytes=512)  # fits exactly
        rest[:100] = 0
        rest[7] = 1
        self.assertEqual(ring.top_k(rest[:100], k=1, arena=arena).indices[0].tolist(), [7])

    def test_the_servers_refusal_gives_the_bytes_back(self):
        arena = self.lease(MIB)
        with mock.patch.object(ring_module, "_VERSION", 9):
            with self.refused(logitd.Unimplemented, "ring: got version 9 of the protocol, allowed 1") as caught:
                arena.ring(slots=4)
        self.assertEqual((caught.exception.attempts, arena._taken), (1, 0))
        with arena.ring(slots=4) as ring:
            self.assertTrue(ring.top_k(values(1, 50), k=1).ok.all())

    def test_a_second_ring_is_refused(self):
        arena, ring = self.ring(MIB, slots=2)
        taken = arena._taken
        for _ in range(2):
            with self.refused(logitd.FailedPrecondition, "got an arena that has one, allowed one ring for each lease"):
                arena.ring(slots=2)
            ring.top_k(values(1, 50), k=1)
        ring.close()
        with self.refused(logitd.FailedPrecondition, "got an arena that has one"):
            logitd.Ring.open(arena, slots=2)
        self.assertEqual(arena._taken, taken)

    def test_a_closed_arena_or_an_ended_lease_has_no_ring(self):
        arena = self.lease(MIB)
        arena.close()
        with self.refused(logitd.InvalidArgument, "arena: got one that is closed"):
            arena.ring(slots=2)
        arena = self.lease(MIB)
        arena._connection.shutdown(socket.SHUT_RDWR)
        with self.refused(logitd.Unavailable, "ring: "):
            arena.ring(slots=2)

    def test_wrong_parameters_are_refused_as_by_the_client_and_take_no_slot(self):
        arena, ring = self.ring(MIB, slots=1, entry_bytes=512)
        rows = self.filled(arena, values(2, 100))
        cases = (
            (dict(k=0), "k: got 0"),
            (dict(k=101), "k: got 101"),
            (dict(k=[1, 2, 3]), "k: got 3 values"),
            (dict(k=1, temperature="x"), "temperature"),
            (dict(k=1, temperature=[0, 1]), "temperature: got 0"),
            (dict(k=1, deadline=-1), "deadline: got -1"),
            (dict(k=1, dtype="f16"), "allowed dtype='f32'"),
            (dict(k=1, hidden=rows), "got both logits and hidden"),
        )
        with logitd.Client(self.server.unix) as client:
            for params, text in cases:
                with self.subTest(params):
                    errors = []
                    for call in (client.top_k, ring.top_k):
                        with self.refused(logitd.InvalidArgument, text) as caught:
                            call(rows, arena=arena, **params)
                        errors.append((str(caught.exception), caught.exception.attempts))
                    self.assertEqual(errors[0], errors[1])
            for call in (client.sample, ring.sample):
                with self.refused(logitd.InvalidArgument, "seed"):
                    call(rows, arena=arena)
                with self.refused(logitd.InvalidArgument, "history"):
                    call(rows, arena=arena, seed=1, history=[[1], [500]])
                with self.assertRaisesRegex(TypeError, "unknown parameter 'topp'"):
                    call(rows, arena=arena, seed=1, topp=1)
                with self.refused(logitd.InvalidArgument, "logits: got an array that does not lie in the arena"):
                    call(np.array(rows), arena=arena, seed=1)
        odd = np.frombuffer(arena.array(0, 200).data, np.uint8)[1:401].view(np.float32)
        with self.refused(logitd.InvalidArgument, "shared.offset", "allowed a multiple of 4"):
            ring.top_k(odd, k=1, arena=arena)
        self.assertEqual(ring.in_flight, 0)
        self.assertTrue(ring.top_k(rows, k=1, arena=arena).ok.all())

    def test_a_request_that_does_not_fit_into_a_slot_is_refused(self):
        arena, ring = self.ring(MIB, slots=1, entry_bytes=512)
        with self.refused(
            logitd.InvalidArgument, "got a request of", "allowed 480 (entry_bytes); rows belong into an arena"
        ) as caught:
            ring.top_k(values(1, 200), k=1)
        self.assertEqual(caught.exception.attempts, 0)
        empty = len(ring_module.encoded("top_k", *ring_module.row_request("top_k", values(1, 100), {"k": 1})[:2])) - 400
        fits = (480 - empty) // 4
        self.assertTrue(ring.top_k(values(1, fits), k=1).ok.all())
        with self.refused(logitd.InvalidArgument, "entry_bytes"):
            ring.top_k(values(1, fits + 1), k=1)

    def test_an_answer_that_does_not_fit_is_an_error_of_its_call(self):
        arena, ring = self.ring(MIB, slots=1, answer_bytes=512)
        rows = self.filled(arena, values(1, 5000))
        with self.refused(logitd.InvalidArgument, "a request whose answer may have", "allowed 480"):
            ring.top_k(rows, k=1000, arena=arena)
        self.assertTrue(ring.top_k(rows, k=10, arena=arena).ok.all())

    def test_more_calls_than_slots_are_refused_until_wait_makes_room(self):
        arena, ring = self.ring(MIB, slots=3)
        rows = self.filled(arena, values(1, 100))
        for _ in range(3):
            for _ in range(3):
                ring.submit_top_k(rows, k=1, arena=arena)
            for _ in range(2):
                with self.refused(logitd.ResourceExhausted, "the 3 in flight, allowed 3 (slots)") as caught:
                    ring.submit_sample(rows, seed=1, arena=arena)
                self.assertEqual(caught.exception.attempts, 0)
            self.assertIsInstance(ring.wait(WAIT)[1], logitd.TopKResult)
            ring.submit_sample(rows, seed=1, arena=arena)
            with self.refused(logitd.FailedPrecondition, "while others are in flight"):
                ring.top_k(rows, k=1, arena=arena)
            while ring.in_flight:
                ring.wait(WAIT)

    def test_a_wait_with_nothing_in_flight_is_refused(self):
        _, ring = self.ring(MIB, slots=3)
        for timeout in (None, 0, 1):
            with self.refused(logitd.FailedPrecondition, "no call is in flight"):
                ring.wait(timeout)
        for timeout in (-1, "1", float("nan"), True):
            with self.refused(logitd.InvalidArgument, "timeout: got"):
                ring.wait(timeout)

    def test_an_error_of_a_call_is_given_by_wait_with_its_tag(self):
        arena, ring = self.ring(MIB, slots=4)
        rows = self.filled(arena, values(2, 100))
        good = ring.submit_top_k(rows, k=1, arena=arena)
        bad = ring.submit_top_k(rows, k=[1, 700], arena=arena)
        answers = dict(ring.wait(WAIT) for _ in range(2))
        self.assertTrue(answers[good].ok.all())
        self.assertIsInstance(answers[bad], logitd.InvalidArgument)
        self.assertEqual(str(answers[bad]), "INVALID_ARGUMENT: k: got 700 at row 1, allowed 1..100")
        self.assertEqual(answers[bad].attempts, 1)

    def test_a_deadline_is_the_servers_and_the_clients(self):
        arena, ring = self.ring(8 * MIB, slots=4, deadline=20.0)
        rows = self.filled(arena, values(32, 30000))
        with self.refused(logitd.DeadlineExceeded):
            ring.sample(rows, seed=1, top_p=0.9, arena=arena, deadline=0.000001)
        tag = ring.submit_sample(rows, seed=1, top_p=0.9, arena=arena, deadline=0.000001)
        given, error = ring.wait(WAIT)
        self.assertEqual((given, type(error)), (tag, logitd.DeadlineExceeded))
        with frozen(self.server):
            with self.refused(logitd.DeadlineExceeded, "no answer came within the deadline"):
                ring.top_k(rows, k=1, arena=arena, deadline=0.2)
            self.assertEqual(ring.in_flight, 0)
        # The late answer is not taken for that of a later call.
        for k in (2, 3, 4, 5, 6):
            self.assertEqual(ring.top_k(rows, k=k, arena=arena).indices.counts.tolist(), [k] * 32)

    def test_calls_that_were_given_up_make_room_when_their_answers_come(self):
        arena, ring = self.ring(MIB, slots=2)
        rows = self.filled(arena, values(1, 100))
        with frozen(self.server):
            for _ in range(2):
                with self.refused(logitd.DeadlineExceeded):
                    ring.top_k(rows, k=1, arena=arena, deadline=0.05)
            with self.refused(logitd.ResourceExhausted, "allowed 2 (slots)"):
                ring.top_k(rows, k=1, arena=arena)

        def goes():
            with contextlib.suppress(logitd.ResourceExhausted):
                return ring.top_k(rows, k=1, arena=arena).ok.all()

        until(goes)

    def test_two_threads_at_once_are_refused(self):
        arena, ring = self.ring(MIB, slots=2)
        waited = []
        with frozen(self.server):
            ring.submit_top_k(values(1, 50), k=1)
            thread = threading.Thread(target=lambda: waited.append(ring.wait(WAIT)))
            thread.start()
            until(lambda: ring._memory[64] == 1)  # it sleeps
            for call in (lambda: ring.wait(1), lambda: ring.submit_top_k(values(1, 50), k=1)):
                with self.refused(logitd.FailedPrecondition, "while another thread uses it"):
                    call()
        thread.join(WAIT)
        self.assertTrue(waited[0][1].ok.all())
        self.assertTrue(ring.top_k(values(1, 50), k=1).ok.all())

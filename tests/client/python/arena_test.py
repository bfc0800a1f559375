"""Rows in leased memory: the same answers, and every refusal."""

import contextlib
import dataclasses
import fcntl
import gc
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading

import grpc
import logitd
import numpy as np
from harness import FakeServer, RunningServer, ServerTestCase, TestCase, run, until
from logitd import _messages
from rows_test import bf16_bits, write_head

RANDOM = np.random.default_rng(77)
MIB = 1 << 20
WAIT = 30  # seconds for what must come

HOLDER = """
import os, sys
import logitd
arena = logitd.Arena.lease(sys.argv[1], 1 << 20)
arena.empty(1000)[:] = 1
ended, held = os.pipe()
child = os.fork() if sys.argv[2:] == ["fork"] else None
if child == 0:
    arena.close()  # ends only the child's copy
    os.close(held)
    os.write(1, b"forked")
    os.read(ended, 1)  # until the parent ends
    os._exit(0)
if child is None:
    print("leased", flush=True)
sys.stdin.readline()
arena.close()
sys.stdin.readline()
"""
INHERITOR = HOLDER.replace("    arena.close()  # ends only the child's copy\n", "")


def files():
    """The descriptors of arenas, and of connections to sockets that lease them. gRPC opens and closes only others."""
    gc.collect()
    unix = [line.split() for line in pathlib.Path("/proc/net/unix").read_text().splitlines()[1:]]
    leasing = {f"socket:[{inode}]" for _, _, _, _, kind, _, inode, *_ in unix if int(kind) == socket.SOCK_SEQPACKET}
    found = 0
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            link = os.readlink(f"/proc/self/fd/{file}")
            found += link in leasing or link.startswith("/memfd:")
    return found


def mapped():
    return pathlib.Path("/proc/self/maps").read_text().count("logitd-arena")


class LeaseTestCase(ServerTestCase):
    FLAGS = ("--max-arena-bytes=64MiB", "--max-leases=3")

    @classmethod
    def setUpClass(cls):
        cls.root = tempfile.TemporaryDirectory()
        write_head(os.path.join(cls.root.name, "tiny"), RANDOM.standard_normal((500, 64)))
        cls.server = RunningServer(f"--head-root={cls.root.name}", *cls.FLAGS, arenas=True)

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        cls.root.cleanup()

    def setUp(self):
        self.addCleanup(until, lambda: self.metrics() == (0, 0))

    def metrics(self):
        """Leases and their bytes. The server shows them soon after it has answered."""
        return tuple(self.server.metric(f"logitd_arena_{name}") for name in ("leases", "bytes"))

    def lease(self, nbytes=4 * MIB):
        arena = logitd.Arena.lease(self.server.arena, nbytes)
        self.addCleanup(arena.close)
        return arena

    def assert_same(self, got, want):
        """Results equal to the bit, except for times."""
        for field in dataclasses.fields(want):
            if field.name in ("timings", "round_trip", "attempts"):
                continue
            a, b = getattr(got, field.name), getattr(want, field.name)
            if isinstance(b, logitd.Ragged):
                np.testing.assert_array_equal(a.counts, b.counts, field.name)
                a, b = a.values, b.values
            if isinstance(b, np.ndarray):
                self.assertEqual((a.dtype, a.shape, a.tobytes()), (b.dtype, b.shape, b.tobytes()), field.name)
            else:
                self.assertEqual(a, b, field.name)


def layouts(arena, rows, width, dtype):
    """Arrays in the arena of one shape, by the way they lie there."""
    return {
        "contiguous": arena.empty((rows, width), dtype),
        "columns": arena.empty((rows, width + 5), dtype)[:, :width],
        "last_columns": arena.empty((rows, width + 3), dtype)[:, 3:],
        "every_third_row": arena.empty((3 * rows, width), dtype)[1::3],
    }


def calls(client, rows, width):
    """Every call with a payload, for the shape, as functions of the input."""
    seeds, targets = list(range(rows)), RANDOM.integers(0, width, rows)
    drafts = RANDOM.integers(0, width, rows - 1)
    return {
        "top_k": lambda *a, **k: client.top_k(*a, k=3, temperature=0.7, **k),
        "sample": lambda *a, **k: client.sample(*a, seed=seeds, top_p=0.9, top_logprobs=2, **k),
        "verify": lambda *a, **k: client.verify(*a, sequence_rows=rows, drafts=drafts, seed=5, **k),
        "score": lambda *a, **k: client.score(*a, targets=targets, want_rank=True, want_entropy=True, **k),
        "score_stream": lambda *a, **k: client.score_stream(*a, targets=targets, top_logprobs=1, **k),
    }


class AnswersTest(LeaseTestCase):
    def values(self, dtype, rows, width):
        values = RANDOM.standard_normal((rows, width)).astype(np.float32) * 4
        if dtype == "bf16":
            return bf16_bits((values.view(np.uint32) & 0xFFFF0000).view(np.float32))
        return values.astype({"f32": np.float32, "f16": np.float16}[dtype])

    def test_answers_are_those_of_sent_rows_to_the_bit(self):
        with self.lease() as arena:
            for dtype in ("f32", "f16", "bf16"):
                kind = dict(dtype="bf16") if dtype == "bf16" else {}
                values = self.values(dtype, 7, 1300)
                for layout, rows in layouts(arena, 7, 1300, dtype).items():
                    rows.view(values.dtype)[:] = values
                    for client in self.both(self.server.unix):
                        for name, call in calls(client, 7, 1300).items():
                            with self.subTest(dtype=dtype, layout=layout, call=name):
                                given = kind if rows.dtype == np.uint16 else {}
                                self.assert_same(call(rows, arena=arena, **given), call(values, **kind))

    def test_one_row_needs_no_second_dimension(self):
        values = self.values("f32", 1, 900)[0]
        with self.lease() as arena:
            row = arena.empty((4, 900))[2]
            row[:] = values
            for client in self.both(self.server.unix):
                self.assert_same(client.top_k(row, k=5, arena=arena), client.top_k(values, k=5))

    def test_hidden_states_lie_in_an_arena_too(self):
        values = RANDOM.standard_normal((6, 64)).astype(np.float32)
        with self.lease() as arena, logitd.Client(self.server.unix) as loader:
            loader.load_head("lm", "tiny")
            self.addCleanup(self.unload)
            for layout, hidden in layouts(arena, 6, 64, "f32").items():
                hidden[:] = values
                for client in self.both(self.server.unix):
                    for name, call in calls(client, 6, 500).items():
                        with self.subTest(layout=layout, call=name):
                            got = call(hidden=hidden, head="lm", arena=arena)
                            self.assert_same(got, call(hidden=values, head="lm"))

    def unload(self):
        with logitd.Client(self.server.unix) as client:
            client.unload_head("lm")

    def test_a_decode_loop_fills_one_array_again_and_again(self):
        steps = self.values("f32", 30, 200).reshape(5, 6, 200)
        with self.lease() as arena, logitd.Client(self.server.unix) as client:
            rows = arena.empty((6, 300))[:, :200]
            seeds = [1, 2, 3, 4, 5, 6]
            wants = [client.sample(values, seed=seeds, position=step) for step, values in enumerate(steps)]
            with client.sample_stream() as stream:
                for step, values in enumerate(steps):
                    rows[:] = values
                    stream.write(rows, arena=arena, seed=seeds, position=step)
                    self.assert_same(stream.read(), wants[step])

    def test_a_decode_loop_with_asyncio(self):
        async def loop(arena):
            rows = arena.empty((2, 100))
            rows[:] = RANDOM.standard_normal((2, 100))
            async with logitd.AsyncClient(self.server.unix) as client:
                want = await client.sample(np.array(rows), seed=3)
                async with client.sample_stream() as stream:
                    await stream.write(rows, arena=arena, seed=3)
                    self.assert_same(await stream.read(), want)

        with self.lease() as arena:
            run(loop(arena))

    def test_every_message_of_a_stream_names_its_own_rows(self):
        values = self.values("f32", 333, 64)
        targets = RANDOM.integers(0, 64, 333)
        with self.lease() as arena:
            for layout, rows in layouts(arena, 333, 64, "f32").items():
                rows[:] = values
                for message_rows, messages in ((1, 333), (10, 34), (1 << 20, 1)):
                    for client in self.both(self.server.unix, score_message_bytes=message_rows * 64 * 4):
                        seen = []
                        got = client.score_stream(
                            rows,
                            targets=targets,
                            arena=arena,
                            temperature=np.linspace(0.5, 2, 333),
                            progress=seen.append,
                        )
                        want = client.score(values, targets=targets, temperature=np.linspace(0.5, 2, 333))
                        self.assertEqual(len(seen), messages, layout)
                        for name in ("losses", "target_logprobs", "logsumexp", "status"):
                            np.testing.assert_array_equal(getattr(got, name), getattr(want, name), name)

    def test_a_request_names_the_rows_and_states_its_true_size(self):
        seen = []

        def answer(message, context):
            seen.append(_messages.Codec("TopKRequest").decode(message))
            context.abort(grpc.StatusCode.ABORTED, "seen")

        with self.lease() as arena, FakeServer({"TopK": answer}) as fake:
            rows = arena.array(4096, (100, 5000))[10:90:2, :4000]
            for client in self.both(fake.address):
                with self.refused(logitd.Aborted, "seen"):
                    client.top_k(rows, k=1, arena=arena)
                arrays, message = seen[-1]
                self.assertEqual((message.rows, message.vocab, arrays["logits"].size), (40, 4000, 0))
                shared = message.shared
                self.assertEqual((shared.lease, shared.row_stride), (arena.lease_id, 2 * 5000 * 4))
                self.assertEqual(shared.offset, 4096 + 10 * 5000 * 4)
                self.assertLess(fake.sizes[-1], 100)
                self.assertEqual(fake.metadata[-1]["logitd-payload-bytes"], str(fake.sizes[-1]))

    def test_max_message_bytes_counts_what_is_sent(self):
        with self.lease() as arena:
            for shape, messages in (((1, 2000), 1), ((90, 2000), 2)):
                rows = arena.empty(shape)
                rows[:] = 0
                targets = np.zeros(shape[0], np.int32)
                for client in self.both(self.server.unix, max_message_bytes=1000):
                    self.assertTrue(client.top_k(rows, k=1, arena=arena).ok.all())
                    seen = []
                    self.assertTrue(
                        client.score_stream(rows, targets=targets, arena=arena, progress=seen.append).ok.all()
                    )
                    self.assertEqual(len(seen), messages)


class AttentionTest(LeaseTestCase):
    SHAPE = (2, 3, 9, 70)

    def into(self, arena, values, dtype="f32"):
        array = arena.empty(values.shape, dtype)
        array.view(values.dtype)[:] = values
        return array

    def test_answers_are_those_of_sent_tensors_to_the_bit(self):
        scores = RANDOM.standard_normal(self.SHAPE).astype(np.float32)
        scores[1, 2, 3, 4] = np.nan
        gradient = RANDOM.standard_normal(self.SHAPE).astype(np.float32)
        mask = RANDOM.standard_normal((1, 3, 1, 70)) < 0
        sinks = np.float32([0.5, -1, 2])
        with self.lease(8 * MIB) as arena:
            held, held_gradient = self.into(arena, scores), self.into(arena, gradient)
            probs, d_scores = arena.empty(self.SHAPE), arena.empty(self.SHAPE, "f16")
            for message_bytes in (8 << 20, 1000):  # a call, and a stream
                for client in self.both(self.server.unix, attention_message_bytes=message_bytes):
                    want = client.attention_softmax(scores, mask=mask, sinks=sinks, want_logsumexp=True)
                    for out in (None, np.empty(self.SHAPE, np.float32), probs):
                        got = client.attention_softmax(
                            held, mask=mask, sinks=sinks, want_logsumexp=True, out=out, arena=arena
                        )
                        self.assert_same(got, want)
                        self.assertTrue(out is None or got.probs is out)
                    args = {"sinks": sinks, "logsumexp": want.logsumexp, "out_dtype": "f16"}
                    back = client.attention_softmax_backward(want.probs, gradient, **args)
                    for out in (None, d_scores):
                        got = client.attention_softmax_backward(probs, held_gradient, out=out, arena=arena, **args)
                        self.assert_same(got, back)

    def test_the_message_names_both_places(self):
        seen = []

        def answer(message, context):
            seen.append(_messages.Codec("AttentionSoftmaxRequest").decode(message))
            context.abort(grpc.StatusCode.ABORTED, "seen")

        with self.lease() as arena, FakeServer({"Softmax": answer}) as fake:
            held, out = arena.array(4096, (8, 100)), arena.array(65536, (8, 100))
            for client in self.both(fake.address):
                with self.refused(logitd.Aborted, "seen"):
                    client.attention_softmax(held, out=out, arena=arena)
                arrays, message = seen[-1]
                self.assertEqual(arrays["scores"].size, 0)
                self.assertEqual((message.shared.lease, message.shared.offset), (arena.lease_id, 4096))
                self.assertEqual(message.shared_output.offset, 65536)
                self.assertEqual(message.shared_rows, 8)

    def test_what_cannot_be_named_is_refused_unsent(self):
        with self.lease() as arena:
            held = arena.empty((8, 100))
            for client in self.both(self.server.unix):
                for scores, out, text in (
                    (np.zeros((8, 100), np.float32), None, "scores: got an array that does not lie in the arena"),
                    (held[:, :50], None, "scores: got an array that does not lie in the arena"),
                    (held, held, "out: got an array that overlaps scores"),
                    (held[:4], held[2:6], "out: got an array that overlaps scores"),
                ):
                    with self.refused(logitd.InvalidArgument, text) as caught:
                        client.attention_softmax(scores, out=out, arena=arena)
                    self.assertEqual(caught.exception.attempts, 0)


class RefusedRowsTest(LeaseTestCase):
    def test_rows_that_cannot_be_named_are_refused_unsent(self):
        with self.lease() as arena, self.lease() as other:
            rows = arena.array(0, (8, 100))
            tail = np.frombuffer(arena.array(0, arena.nbytes // 4).data, np.float32)[-150:]
            cases = {
                "of this process": (
                    np.zeros((2, 3), np.float32),
                    "logits: got an array that does not lie in the arena",
                ),
                "of another arena": (other.empty((2, 3)), "does not lie in the arena, allowed one from its empty()"),
                "a copy": (rows[:, ::2].copy(), "does not lie in the arena"),
                "a list": (np.float32([1, 2]).tolist(), "logits: got an array of float64"),
                "before the arena": (
                    np.lib.stride_tricks.as_strided(rows[:1], (2, 100), (-400, 4))[1:],
                    "does not lie in the arena",
                ),
                "over the end": (
                    np.lib.stride_tricks.as_strided(tail, (2, 100), (400, 4)),
                    "does not lie in the arena",
                ),
                "every other column": (rows[:, ::2], "logits: got strides [400, 8] of shape [8, 50], allowed"),
                "columns": (rows.T, "got strides [4, 400] of shape [100, 8], allowed"),
                "descending": (rows[::-1], "got strides [-400, 4]"),
                "one row for all": (np.broadcast_to(rows[0], (3, 100)), "got strides [0, 4]"),
                "rows that overlap": (
                    np.lib.stride_tricks.as_strided(rows, (2, 100), (396, 4)),
                    "got strides [396, 4]",
                ),
                "backwards": (rows[0, ::-1], "got strides [-4] of shape [100], allowed with an arena elements of 4"),
                "big-endian": (rows.view(">f4"), "got big-endian elements"),
                "three dimensions": (rows.reshape(2, 4, 100), "got shape [2, 4, 100]"),
            }
            for client in self.both(self.server.unix):
                for name, (wrong, text) in cases.items():
                    with self.subTest(name), self.refused(logitd.InvalidArgument, text) as caught:
                        client.top_k(wrong, k=1, arena=arena)
                    self.assertEqual(caught.exception.attempts, 0)
                with self.refused(logitd.InvalidArgument, "hidden: got an array that does not lie"):
                    client.score_stream(hidden=np.zeros((2, 4), np.float32), head="x", targets=[0, 0], arena=arena)
            self.assertTrue(np.shares_memory(tail, arena.array(arena.nbytes - 600, 150)))

    def test_the_server_checks_what_only_it_can(self):
        with self.lease() as arena:
            odd = np.frombuffer(arena.array(0, (4, 100)).data, np.uint8)[1:401].view(np.float32)
            for client in self.both(self.server.unix):
                with self.refused(logitd.InvalidArgument, "shared.offset: got 1, allowed a multiple of 4"):
                    client.top_k(odd, k=1, arena=arena)
                with self.refused(logitd.InvalidArgument, "rows: got 0"):
                    client.top_k(arena.array(0, (0, 100)), k=1, arena=arena)
                with self.refused(logitd.NotFound, "nothing"):
                    client.top_k(hidden=arena.array(0, (1, 64)), head="nothing", k=1, arena=arena)

    def test_a_closed_arena_is_refused_unsent(self):
        arena = self.lease()
        rows = arena.empty((2, 50))
        arena.close()
        arena.close()
        for client in self.both(self.server.unix):
            with self.refused(logitd.InvalidArgument, "arena: got one that is closed, allowed an open one"):
                client.top_k(rows, k=1, arena=arena)
        with self.refused(logitd.InvalidArgument, "arena: got one that is closed"):
            arena.empty(1)

    def test_a_lease_that_the_server_ended_is_not_found(self):
        server = RunningServer(arenas=True)
        self.addCleanup(server.close)
        with logitd.Arena.lease(server.arena, MIB) as arena:
            rows = arena.empty((2, 50))
            rows[:] = 1
            self.assertEqual(server.stop(), 0)
            server.start()
            for client in self.both(server.tcp):
                with self.refused(logitd.NotFound, "shared.lease: got one that is unknown here"):
                    client.top_k(rows, k=1, arena=arena)
                with self.refused(logitd.NotFound, "shared.lease"):
                    client.score_stream(rows, targets=[0, 0], arena=arena)
        until(lambda: not rows.any())  # the server took its memory back

    def test_another_server_does_not_know_the_lease(self):
        for arenas, text in ((True, "unknown here"), (False, "allowed only where the server has --arena-listen")):
            server = RunningServer(arenas=arenas)
            self.addCleanup(server.close)
            with self.lease() as arena:
                for client in self.both(server.unix):
                    with self.refused(logitd.NotFound, text):
                        client.top_k(arena.empty((2, 50)), k=1, arena=arena)

    def test_a_stream_ends_with_the_refusal(self):
        with self.lease() as arena, logitd.Client(self.server.unix) as client, contextlib.ExitStack() as stack:
            rows = arena.empty((1, 50))
            client.sample(rows, arena=arena, seed=1)  # connects
            stream = stack.enter_context(client.sample_stream())
            stream.write(rows, arena=arena, seed=1)
            self.assertTrue(stream.read().ok.all())
            until(lambda: self.metrics()[0] == 1)
            arena._connection.shutdown(socket.SHUT_RDWR)  # the lease ends, and its client does not know
            until(lambda: self.server.metric("logitd_arena_leases") == 0)
            stream.write(rows, arena=arena, seed=1)
            with self.refused(logitd.NotFound, "shared.lease"):
                stream.read()


class LeaseTest(LeaseTestCase):
    def test_an_arena_is_zeroed_whole_pages_and_has_a_name(self):
        before = self.server.metric("logitd_arena_leases_total")
        with self.lease(5000) as arena, self.lease(1) as other:
            self.assertEqual((arena.nbytes, other.nbytes), (8192, 4096))
            self.assertEqual((len(arena.lease_id), len(other.lease_id)), (16, 16))
            self.assertNotEqual(arena.lease_id, other.lease_id)
            self.assertFalse(arena.array(0, 2048).any())
            self.assertNotIn(repr(arena.lease_id), repr(arena))
            until(lambda: self.metrics() == (2, 12288))
        until(lambda: self.metrics() == (0, 0))
        self.assertEqual(self.server.metric("logitd_arena_leases_total"), before + 2)

    def test_arrays_lie_one_after_another_until_the_arena_is_full(self):
        with self.lease(8192) as arena:
            a, b, c = arena.empty((3, 5)), arena.empty((), "f16"), arena.empty([2, 7], "bf16")
            whole = arena.array(0, 8192 // 4)
            start = whole.ctypes.data
            self.assertEqual([x.ctypes.data - start for x in (a, b, c)], [0, 64, 128])
            self.assertEqual([x.shape for x in (a, b, c)], [(3, 5), (), (2, 7)])
            self.assertEqual([x.itemsize for x in (a, b, c)], [4, 2, 2])
            a[:] = 3
            self.assertEqual(whole[:16].tolist(), [3.0] * 15 + [0.0])
            with self.refused(logitd.InvalidArgument, "shape: got [2001] of f32, 8004 bytes, allowed the 8000 bytes"):
                arena.empty(2001)
            self.assertEqual(arena.empty(2000).ctypes.data - start, 192)
            with self.refused(logitd.InvalidArgument, "allowed the 0 bytes that are left of the arena's 8192"):
                arena.empty(1)
            self.assertEqual(arena.empty((0, 9)).size, 0)

    def test_arrays_outside_are_refused(self):
        with self.lease(4096) as arena:
            self.assertEqual(arena.array(4000, 24).size, 24)
            for arguments, text in (
                ((4000, 25), "offset: got 4000 for 100 bytes, allowed a multiple of 4 in an arena of 4096"),
                ((-4, 1), "offset: got -4"),
                ((2, 1), "offset: got 2 for 4 bytes, allowed a multiple of 4"),
                ((0, (2**40, 2**40)), "offset: got 0"),
                ((0, (3, -1)), "shape: got [3, -1], allowed sizes of 0 or more"),
                ((0, 1, "f64"), "dtype: got 'f64', allowed f32, f16, bf16"),
            ):
                with self.refused(logitd.InvalidArgument, text):
                    arena.array(*arguments)
            with self.assertRaises(TypeError):
                arena.array(0.5, 1)

    def test_arrays_outlive_the_arena(self):
        before = files()
        arena = self.lease()
        self.assertEqual(files(), before + 2)
        rows = arena.empty((10, 1000))[:, 5:]
        self.assertEqual(mapped(), 1)
        until(lambda: self.metrics() == (1, 4 * MIB))
        rows[:] = 3
        arena.close()
        self.assertEqual(mapped(), 1)
        until(lambda: self.server.metric("logitd_arena_bytes") == 0)  # the server has its memory back
        self.assertFalse(rows.any())
        rows[:] = 7
        self.assertEqual(rows.sum(), 7 * rows.size)
        self.doCleanups()  # the last reference to the arena
        del arena
        gc.collect()
        self.assertEqual(rows.max(), 7)
        del rows
        gc.collect()
        self.assertEqual((mapped(), files()), (0, before))

    def test_refusals_of_the_server_have_its_code_and_text(self):
        before = files()
        for nbytes in (64 * MIB + 1, 2**62):
            with self.refused(
                logitd.InvalidArgument, f"got {nbytes} bytes to lease, allowed 1..{64 * MIB} (--max-arena-bytes)"
            ) as caught:
                self.lease(nbytes)
            self.assertEqual(caught.exception.attempts, 1)
        with self.lease(60 * MIB), self.refused(logitd.ResourceExhausted, f"allowed {4 * MIB}", "--max-arena-bytes"):
            self.lease(5 * MIB)
        until(lambda: self.server.metric("logitd_arena_bytes") == 0)
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(self.lease(1))
            with self.refused(logitd.ResourceExhausted, "the 3 in use, allowed 3 (--max-leases)"):
                self.lease(1)
        self.assertEqual(files(), before)

    def test_arguments_that_cannot_work_are_refused(self):
        for arguments, error, text in (
            (("127.0.0.1:7450", 1), logitd.InvalidArgument, "address: got '127.0.0.1:7450', allowed unix:PATH"),
            (("unix:", 1), logitd.InvalidArgument, "address: got 'unix:'"),
            (("unix:/" + "x" * 107, 1), logitd.InvalidArgument, "a path of 1 to 107 bytes"),
            (("unix:/nobody/here", 1), logitd.Unavailable, "cannot connect: No such file"),
            ((self.server.unix, 1), logitd.Unavailable, "cannot connect: Protocol wrong type"),
            ((self.server.arena, 0), logitd.InvalidArgument, "nbytes: got 0, allowed 1 or more"),
            ((self.server.arena, 2**63), logitd.InvalidArgument, "below 2^63"),
            ((self.server.arena, 1, 0), logitd.InvalidArgument, "timeout: got 0 s, allowed above 0"),
        ):
            with self.refused(error, text):
                logitd.Arena.lease(*arguments)
        with self.assertRaises(TypeError):
            logitd.Arena.lease(self.server.arena, 1.5)


class LifeTest(LeaseTestCase):
    def hold(self, script, *arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", script, self.server.arena, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait, WAIT)
        self.addCleanup(process.stdin.close)
        return process

    def test_a_killed_client_leaves_no_lease(self):
        process = self.hold(HOLDER)
        self.assertEqual(process.stdout.readline(), b"leased\n")
        until(lambda: self.metrics() == (1, MIB))
        process.send_signal(signal.SIGKILL)
        self.assertEqual(process.wait(WAIT), -signal.SIGKILL)
        until(lambda: self.metrics() == (0, 0))

    def test_a_forked_child_cannot_end_the_lease(self):
        process = self.hold(HOLDER, "fork")
        self.assertEqual(process.stdout.read(6), b"forked")  # by the child
        with self.lease(MIB):  # after the server has heard of what the child did
            until(lambda: self.metrics() == (2, 2 * MIB))

    def test_close_ends_the_lease_although_a_forked_child_holds_it(self):
        process = self.hold(INHERITOR, "fork")
        self.assertEqual(process.stdout.read(6), b"forked")  # the child runs
        until(lambda: self.metrics() == (1, MIB))
        process.stdin.write(b"\n")
        process.stdin.flush()
        until(lambda: self.metrics() == (0, 0))
        self.assertIsNone(process.poll())


class StrangeServerTest(TestCase):
    """A peer that answers what a test says."""

    ANSWER = struct.Struct("<4sIIIQ16s")

    def ask(self, answer, file=None, timeout=WAIT, nbytes=5000):
        """Arena.lease of a peer that answers so; None: nothing, and it waits for the client."""
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(f"{folder}/socket")
            listener.listen(1)
            asked = []

            def serve():
                peer, _ = listener.accept()
                with peer:
                    asked.append(peer.recv(100))
                    if answer is not None:
                        socket.send_fds(peer, [answer], [] if file is None else [file])
                    while answer != b"" and peer.recv(100):
                        pass

            thread = threading.Thread(target=serve)
            thread.start()
            try:
                return logitd.Arena.lease(f"unix:{folder}/socket", nbytes, timeout)
            finally:
                if sys.exc_info()[0] is not None:
                    thread.join()
                    self.assertEqual(asked, [struct.pack("<4sIIIQ", b"LDAR", 1, 1, 0, nbytes)])

    def memfd(self, size, seal=True):
        file = os.memfd_create("logitd-arena", os.MFD_ALLOW_SEALING)
        self.addCleanup(os.close, file)
        os.ftruncate(file, size)
        if seal:
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return file

    def answer(self, magic=b"LDAR", version=1, code=0, text=b"", size=8192, text_bytes=None):
        text_bytes = len(text) if text_bytes is None else text_bytes
        return self.ANSWER.pack(magic, version, code, text_bytes, size, b"0123456789abcdef") + text

    def test_a_lease_is_what_the_answer_says(self):
        with self.ask(self.answer(), self.memfd(8192)) as arena:
            self.assertEqual((arena.nbytes, arena.lease_id), (8192, b"0123456789abcdef"))

    def test_an_answer_that_is_no_lease_is_internal(self):
        whole, temporary = self.memfd(8192), tempfile.TemporaryFile()
        self.addCleanup(temporary.close)
        temporary.truncate(8192)
        before = files()
        for answer, file, text in (
            (b"x", None, "got 1 bytes that begin with b'x', allowed 40 from b'LDAR'"),
            (self.answer()[:39], whole, "got 39 bytes"),
            (self.answer(magic=b"NOPE"), whole, "begin with b'NOPE'"),
            (self.answer(version=2), whole, "got version 2, 8192 bytes and 1 descriptors, allowed version 1"),
            (self.answer(size=4999), whole, "4999 bytes and 1 descriptors, allowed version 1, 5000 bytes or more"),
            (self.answer(size=2**64 - 1), whole, "18446744073709551615 bytes"),
            (self.answer(), None, "0 descriptors"),
            (self.answer(text_bytes=9), whole, "got 0 bytes of text, allowed 9"),
            (self.answer(code=3, text=b"why", text_bytes=2), None, "got 3 bytes of text, allowed 2"),
            (self.answer(), self.memfd(8191), "got a file of 8191 bytes, allowed 8192 or more"),
            (self.answer(), self.memfd(8192, seal=False), "got a file that can shrink, allowed one that is sealed"),
            (self.answer(), temporary.fileno(), "got a file that can shrink"),
        ):
            with self.subTest(text), self.refused(logitd.Internal, "the answer is not a lease", text):
                self.ask(answer, file)
        self.assertEqual(files(), before + 2)  # the two of the table

    def test_a_refusal_has_the_class_of_its_code(self):
        for code, error in (
            (3, logitd.InvalidArgument),
            (4, logitd.DeadlineExceeded),
            (7, logitd.PermissionDenied),
            (8, logitd.ResourceExhausted),
            (12, logitd.Unimplemented),
            (14, logitd.Unavailable),
            (99, logitd.Unknown),
        ):
            with self.refused(error, "no: \N{SNOWMAN} \N{REPLACEMENT CHARACTER}") as caught:
                self.ask(self.answer(code=code, text="no: \N{SNOWMAN} ".encode() + b"\xff", size=0))
            self.assertEqual(caught.exception.attempts, 1)

    def test_a_server_that_does_not_answer_is_unavailable(self):
        with self.refused(logitd.Unavailable, "no answer in 0.2 s"):
            self.ask(None, timeout=0.2)
        with self.refused(logitd.Unavailable, "no answer: the server closed the connection"):
            self.ask(b"")

    def test_a_server_that_does_not_accept_is_unavailable(self):
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(f"{folder}/socket")
            listener.listen(0)
            first = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            first.connect(f"{folder}/socket")  # fills the queue
            with self.refused(logitd.Unavailable, "cannot connect in 0.2 s"):
                logitd.Arena.lease(f"unix:{folder}/socket", 1, timeout=0.2)

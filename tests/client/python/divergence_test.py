"""divergence and its stream, against the definitions of docs/semantics.md in double precision."""

import os
import tempfile

import grpc
import logitd
import numpy as np
from arena_test import LeaseTestCase
from harness import CLIENTS, FakeServer, RunningServer, forward
from reference import log_softmax
from rows_test import write_head

RANDOM = np.random.default_rng(77)
VOCAB = 500
FIELDS = (
    "forward_kl",
    "reverse_kl",
    "entropies",
    "reference_entropies",
    "logsumexp",
    "reference_logsumexp",
    "target_logprobs",
    "reference_target_logprobs",
)


def expected(logits, reference, temperature=1.0, reference_temperature=1.0, targets=None):
    p, lse = log_softmax(logits, temperature)
    q, reference_lse = log_softmax(reference, reference_temperature)
    want = {
        "forward_kl": (np.exp(p) * (p - q)).sum(-1),
        "reverse_kl": (np.exp(q) * (q - p)).sum(-1),
        "entropies": -(np.exp(p) * p).sum(-1),
        "reference_entropies": -(np.exp(q) * q).sum(-1),
        "logsumexp": lse,
        "reference_logsumexp": reference_lse,
    }
    if targets is not None:
        ids = np.maximum(targets, 0)[:, None]
        counts = np.asarray(targets) >= 0
        want["target_logprobs"] = np.take_along_axis(p, ids, 1)[:, 0] * counts
        want["reference_target_logprobs"] = np.take_along_axis(q, ids, 1)[:, 0] * counts
    return want


def expected_tops(logits, counts, temperature=1.0):
    """Ids and log-probabilities, row after row, by (logit descending, id ascending)."""
    logprobs, _ = log_softmax(logits, temperature)
    order = np.argsort(-logits.astype(np.float64), axis=-1, kind="stable")
    ids = [row[:count] for row, count in zip(order, counts)]
    return np.concatenate(ids), np.concatenate([logprobs[i][row] for i, row in enumerate(ids)])


class DivergenceTest(LeaseTestCase):
    @classmethod
    def setUpClass(cls):
        cls.root = tempfile.TemporaryDirectory()
        cls.weights = {}
        # The teacher's rows, of 4132 bytes, are long enough to be read where they came in, and no multiple of 16.
        for name, hidden, scale in (("student", 20, 0.4), ("teacher", 1033, 0.06)):
            cls.weights[name] = RANDOM.standard_normal((VOCAB, hidden)).astype(np.float32) * np.float32(scale)
            write_head(os.path.join(cls.root.name, name), cls.weights[name])
        write_head(os.path.join(cls.root.name, "wide"), RANDOM.standard_normal((VOCAB + 1, 20)))
        heads = [f"--head={name}={cls.root.name}/{name}" for name in ("student", "teacher", "wide")]
        cls.server = RunningServer(*heads, *cls.FLAGS, arenas=True)
        cls.logits, cls.reference = RANDOM.standard_normal((2, 60, VOCAB)).astype(np.float32)
        cls.states = RANDOM.standard_normal((60, 20)).astype(np.float32)
        cls.teacher = RANDOM.standard_normal((60, 1033)).astype(np.float32)
        cls.targets = np.where(np.arange(60) % 4 == 3, -100, np.arange(60) * 7 % VOCAB)

    def assert_near(self, result, want):
        for name in FIELDS:
            got = getattr(result, name)
            if name not in want:
                self.assertIsNone(got)
                continue
            np.testing.assert_allclose(got, want[name], rtol=3e-5, atol=3e-5, err_msg=name)
        self.assertTrue(result.ok.all())

    def test_logits_of_every_type(self):
        for dtype in (np.float32, np.float16):
            first, second = self.logits.astype(dtype), self.reference.astype(dtype)
            for client in self.both(self.server.unix):
                self.assert_near(client.divergence(first, second), expected(first, second))
                params = dict(temperature=np.linspace(0.5, 2, 60), reference_temperature=1.5)
                result = client.divergence(first, second, targets=self.targets, **params)
                want = expected(first, second, targets=self.targets, **params)
                self.assert_near(result, want)
                self.assertEqual((result.totals.counted, result.totals.ignored), (45, 15))
                counted = self.targets >= 0
                self.assertAlmostEqual(result.totals.forward_kl_sum, want["forward_kl"][counted].sum(), places=3)
                self.assertAlmostEqual(result.totals.reverse_kl_mean, want["reverse_kl"][counted].mean(), places=4)
                self.assertEqual((result.head_version, result.reference_head_version), (0, 0))

    def assert_tops(self, ids, logprobs, counts, want):
        np.testing.assert_array_equal(ids.counts, counts)
        np.testing.assert_array_equal(logprobs.counts, counts)
        np.testing.assert_array_equal(ids.values, want[0])
        np.testing.assert_allclose(logprobs.values, want[1], rtol=1e-5, atol=1e-5)

    def test_top_tokens_of_both_inputs(self):
        counts = np.arange(60) % 5
        params = dict(temperature=2.0, top_logprobs=counts, reference_top_logprobs=7)
        want = expected_tops(self.logits, counts, 2.0)
        reference = expected_tops(self.reference, [7] * 60)
        for client in self.both(self.server.unix, score_message_bytes=VOCAB * 4 * 2 * 7):
            for call in (client.divergence, client.divergence_stream):
                result = call(self.logits, self.reference, **params)
                self.assert_tops(result.top_ids, result.top_logprobs, counts, want)
                self.assert_tops(result.reference_top_ids, result.reference_top_logprobs, [7] * 60, reference)
                self.assertEqual(result.top_ids[3].shape, (3,))
            none = client.divergence(self.logits, self.reference)
            self.assertEqual((none.top_ids.values.size, none.reference_top_logprobs.values.size), (0, 0))
            np.testing.assert_array_equal(none.forward_kl, client.divergence(self.logits, self.reference).forward_kl)
            with self.refused(logitd.InvalidArgument, "reference_top_logprobs: got 501 at row 0, allowed 0..500"):
                client.divergence(self.logits, self.reference, reference_top_logprobs=501)

    def test_top_tokens_of_faulty_rows(self):
        first, second = self.logits[:3].copy(), self.reference[:3].copy()
        first[0, 30] = np.nan
        first[1] = -np.inf
        for client in self.both(self.server.unix):
            result = client.divergence(first, second, top_logprobs=2, reference_top_logprobs=2)
            self.assertEqual(result.status.tolist(), [1, 2, 0])
            self.assertEqual(result.top_ids.values[:4].tolist(), [-1, -1, 0, 1])
            self.assertEqual(result.reference_top_ids.values[:2].tolist(), [-1, -1])
            self.assertTrue(np.isnan(result.top_logprobs[0]).all())
            self.assertTrue(np.isnan(result.reference_top_logprobs[0]).all())
            self.assertEqual(result.top_logprobs[1].tolist(), [-np.inf, -np.inf])
            want = expected_tops(second[1:], [2, 2])
            np.testing.assert_array_equal(result.reference_top_ids.values[2:], want[0])
            np.testing.assert_allclose(result.reference_top_logprobs.values[2:], want[1], rtol=1e-5)

    def test_hidden_states_of_two_heads_and_beside_logits(self):
        logits = {
            "student": self.states.astype(np.float64) @ self.weights["student"].T,
            "teacher": self.teacher.astype(np.float64) @ self.weights["teacher"].T,
        }
        student = dict(hidden=self.states, head="student")
        teacher = dict(reference_hidden=self.teacher, reference_head="teacher")
        for client in self.both(self.server.tcp):
            two = client.divergence(**student, **teacher)
            self.assert_near(two, expected(logits["student"], logits["teacher"]))
            self.assertEqual((two.head_version, two.reference_head_version), (1, 1))
            same = client.divergence(**student, **teacher, head_version=1, reference_head_version=1)
            self.assert_same(same, two)
            first = client.divergence(**student, reference_logits=self.reference)
            self.assert_near(first, expected(logits["student"], self.reference))
            second = client.divergence(self.logits, **teacher)
            self.assert_near(second, expected(self.logits, logits["teacher"]))
            with self.refused(logitd.FailedPrecondition, "reference_head_version: got 2, allowed 1"):
                client.divergence(**student, **teacher, reference_head_version=2)

    def test_what_does_not_go_together_is_refused(self):
        for client in self.both(self.server.unix):
            for call in (client.divergence, client.divergence_stream):
                with self.refused(logitd.InvalidArgument, "reference: got none, allowed reference_logits"):
                    call(self.logits)
                with self.refused(logitd.InvalidArgument, "reference: got 59 rows, allowed 60"):
                    call(self.logits, self.reference[1:])
                with self.refused(logitd.InvalidArgument, "reference_logits: got a vocabulary of 7, allowed 500"):
                    call(self.logits, self.reference[:, :7])
                with self.refused(logitd.InvalidArgument, "reference_head: got 'x' with logits"):
                    call(self.logits, self.reference, reference_head="x")
                with self.refused(logitd.InvalidArgument, "targets: got 59 values, allowed 60 (rows)"):
                    call(self.logits, self.reference, targets=self.targets[1:])
                with self.refused(logitd.InvalidArgument, "reference_head: got wide with a vocabulary of 501"):
                    call(hidden=self.states, head="student", reference_hidden=self.states, reference_head="wide")
                with self.refused(logitd.InvalidArgument, "reference_dtype: got f16, allowed f32"):
                    call(self.logits, self.reference.astype(np.float16))
                with self.refused(TypeError, "unknown parameter 'softcap'"):
                    call(self.logits, self.reference, softcap=3)

    def test_a_nan_affects_only_its_row(self):
        first, second = self.logits[:4].copy(), self.reference[:4].copy()
        first[1, 30] = second[1, 20] = second[2, 9] = np.nan
        second[3] = -np.inf
        for client in self.both(self.server.unix):
            result = client.divergence(first, second)
            self.assertEqual(result.status.tolist(), [0, 1, 1, 2])
            self.assertEqual(result.status_position.tolist(), [-1, 20, 9, -1])
            self.assertTrue(np.isnan(result.forward_kl[1:]).all())
            whole = client.divergence(self.logits[:1], self.reference[:1])
            self.assertEqual(result.forward_kl[0], whole.forward_kl[0])
            self.assertEqual((result.totals.counted, result.totals.faulty), (1, 3))

    def test_a_stream_has_the_bits_of_a_call_and_continues(self):
        with logitd.Client(self.server.unix) as client:
            whole = client.divergence(self.logits, self.reference, targets=self.targets)
        for kind in CLIENTS:
            seen = []
            with kind(self.server.unix, score_message_bytes=VOCAB * 4 * 2 * 7) as client:
                result = client.divergence_stream(self.logits, self.reference, targets=self.targets, progress=seen.append)
                self.assertEqual(len(seen), 9)
                for name in FIELDS:
                    np.testing.assert_array_equal(getattr(result, name), getattr(whole, name))
                self.assertEqual(result.totals.counted, 45)
                self.assertAlmostEqual(result.totals.forward_kl_sum, whole.totals.forward_kl_sum, places=9)
                rest = client.divergence_stream(
                    self.logits[14:],
                    self.reference[14:],
                    targets=self.targets[14:],
                    offset=14,
                    totals=seen[1].totals,
                )
                self.assertEqual(rest.totals, result.totals)

    def test_a_lost_stream_goes_on_with_the_heads_of_its_answers(self):
        calls = []

        def handle(messages, context):
            calls.append(0)
            for answer in forward(self.server.tcp, "/logitd.v1.Scorer/DivergenceStream")(messages, context):
                if calls[-1] == 2:
                    context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
                calls[-1] += 1
                yield answer

        heads = dict(hidden=self.states, head="student", reference_hidden=self.teacher, reference_head="teacher")
        with logitd.Client(self.server.unix) as client:
            whole = client.divergence(**heads)
        for kind in CLIENTS:
            calls.clear()
            with FakeServer(stream={"DivergenceStream": handle}) as server:
                with kind(server.address, score_message_bytes=(80 + 4144) * 15) as client:
                    result = client.divergence_stream(**heads)
            self.assertEqual((result.attempts, calls), (2, [2, 2]))
            np.testing.assert_array_equal(result.reverse_kl, whole.reverse_kl)
            self.assertEqual(result.reference_head_version, 1)

    def test_both_inputs_may_lie_in_an_arena(self):
        with self.lease() as arena:
            first, second = arena.empty((60, VOCAB)), arena.empty((60, VOCAB + 6))[:, 3:-3]
            first[:], second[:] = self.logits, self.reference
            states, teacher = arena.empty((60, 20)), arena.empty((60, 1033))
            states[:], teacher[:] = self.states, self.teacher
            heads = dict(head="student", reference_head="teacher")
            for client in self.both(self.server.unix):
                want = client.divergence(self.logits, self.reference)
                for here in (dict(arena=arena), dict(reference_arena=arena), dict(arena=arena, reference_arena=arena)):
                    one = first if "arena" in here else self.logits
                    other = second if "reference_arena" in here else self.reference
                    self.assert_same(client.divergence(one, other, **here), want)
                    stream = client.divergence_stream(one, other, **here)
                    np.testing.assert_array_equal(stream.forward_kl, want.forward_kl)
                hidden = client.divergence(hidden=self.states, reference_hidden=self.teacher, **heads)
                shared = client.divergence(
                    hidden=states, reference_hidden=teacher, arena=arena, reference_arena=arena, **heads
                )
                self.assert_same(shared, hidden)

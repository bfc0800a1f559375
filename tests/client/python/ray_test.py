"""Scoring of a dataset with Ray Data: a local cluster and two servers. Skipped where Ray is not installed."""

import os
import tempfile
import threading
import unittest

import grpc
import logitd
import numpy as np
from harness import FakeServer, RunningServer, TestCase, forward, later
from reference import log_softmax
from rows_test import write_head

try:
    import ray
    import ray.data
    from logitd.ray import Score, score, totals
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from None

RANDOM = np.random.default_rng(31)


class RayTest(TestCase):
    @classmethod
    def setUpClass(cls):
        cls.root = tempfile.TemporaryDirectory()
        cls.weight = RANDOM.standard_normal((200, 16)).astype(np.float32)
        write_head(os.path.join(cls.root.name, "tiny"), cls.weight)
        cls.servers = [RunningServer(f"--head=lm={cls.root.name}/tiny") for _ in range(2)]
        cls.sequences = []
        for i in range(40):
            length = int(RANDOM.integers(1, 30))
            targets = RANDOM.integers(0, 200, length)
            targets[: i % 3] = -100
            cls.sequences.append(
                dict(id=i, hidden=RANDOM.standard_normal((length, 16)).astype(np.float32), targets=targets)
            )
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
        ray.data.DataContext.get_current().enable_progress_bars = False

    @classmethod
    def tearDownClass(cls):
        ray.shutdown()
        for server in cls.servers:
            server.close()
        cls.root.cleanup()

    def want(self, sequence):
        """Log-probabilities of the targets in double precision, and which rows count."""
        logprobs, _ = log_softmax(sequence["hidden"].astype(np.float64) @ self.weight.T.astype(np.float64))
        counted = sequence["targets"] != -100
        at = logprobs[np.arange(len(counted)), np.where(counted, sequence["targets"], 0)]
        return np.where(counted, at, 0), counted

    def test_a_dataset_is_scored_over_two_replicas(self):
        streams = [0, 0]

        def counted(i):
            def handle(messages, context):
                streams[i] += 1
                yield from forward(self.servers[i].tcp, "/logitd.v1.Scorer/ScoreStream")(messages, context)

            return {"ScoreStream": handle}

        with FakeServer(stream=counted(0)) as first, FakeServer(stream=counted(1)) as second:
            scored = score(
                ray.data.from_items(self.sequences),
                [first.address, second.address],
                head="lm",
                batch_size=3,
                concurrency=2,
            ).materialize()
            rows = {row["id"]: row for row in scored.take_all()}
            found = totals(scored)
            self.assertEqual({m.get("logitd-priority") for m in first.metadata}, {"batch"})
        self.assertEqual(len(rows), 40)
        logprob_sum = counted_sum = 0
        for sequence in self.sequences:
            row = rows[sequence["id"]]
            logprobs, counted = self.want(sequence)
            np.testing.assert_allclose(row["target_logprobs"], logprobs, rtol=1e-5)
            np.testing.assert_allclose(row["losses"], -logprobs, rtol=1e-5)
            self.assertEqual((row["rows"], row["counted"], row["faulty"]), (len(counted), counted.sum(), 0))
            self.assertNotIn("hidden", row)
            logprob_sum, counted_sum = logprob_sum + logprobs.sum(), counted_sum + counted.sum()
        self.assertEqual((found.counted, found.rows - found.ignored), (counted_sum, counted_sum))
        self.assertAlmostEqual(found.perplexity / np.exp(-logprob_sum / counted_sum), 1, places=5)
        self.assertGreaterEqual(min(streams), 4)  # both did a part of the 14 batches

    def test_a_replica_that_is_gone_is_passed_over(self):
        scored = score(
            ray.data.from_items(self.sequences),
            ["127.0.0.1:1", self.servers[0].tcp],
            head="lm",
            batch_size=10,
            concurrency=1,
            options=dict(retry=logitd.Retry(max_attempts=1)),
        )
        self.assertEqual(totals(scored).rows, sum(len(s["targets"]) for s in self.sequences))

    def test_a_replica_that_hangs_is_passed_over(self):
        streams = []

        def hang(messages, context):
            streams.append(1)
            over = threading.Event()
            if context.add_callback(over.set):  # else the call is over
                over.wait()
            yield b""

        batch = dict(logits=np.zeros((2, 3, 50), np.float32), targets=np.zeros((2, 3), np.int64))
        with FakeServer(stream={"ScoreStream": hang}) as hung:
            for addresses in ([hung.address, self.servers[0].tcp], [self.servers[0].tcp, hung.address]):
                streams.clear()
                worker = Score(addresses, inputs="logits", options=dict(deadline=0.5))
                for _ in range(5):
                    self.assertEqual(worker(batch)["rows"].tolist(), [3, 3])
                self.assertEqual(len(streams), 1)
            worker = Score([hung.address, hung.address], inputs="logits", options=dict(deadline=0.3))
            with self.refused(logitd.DeadlineExceeded, "no answer for 0.3 s"):
                worker(batch)

    def test_a_replica_without_room_does_not_end_the_job(self):
        def full(messages, context):
            context.set_trailing_metadata((("grpc-retry-pushback-ms", "1"),))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

        batch = dict(logits=np.zeros((2, 3, 50), np.float32), targets=np.zeros((2, 3), np.int64))
        with FakeServer(stream={"ScoreStream": full}) as busy:
            worker = Score([busy.address, self.servers[0].tcp], inputs="logits")
            for _ in range(4):
                self.assertEqual(worker(batch)["rows"].tolist(), [3, 3])

    def test_replicas_that_restart_are_waited_for(self):
        server = RunningServer()
        self.addCleanup(server.close)
        worker = Score(["127.0.0.1:1", server.tcp], inputs="logits")
        batch = dict(logits=np.zeros((2, 3, 50), np.float32), targets=np.zeros((2, 3), np.int64))
        server.stop()
        starter = later(1.5, server.start)
        self.assertEqual(worker(batch)["rows"].tolist(), [3, 3])
        starter.join()

    def test_logits_with_nan_and_nothing_to_count(self):
        logits = RANDOM.standard_normal((2, 3, 50)).astype(np.float32)
        logits[0, 1, 7] = np.nan
        batch = dict(logits=logits, targets=np.array([[1, 2, 3], [9, 9, 9]]))
        worker = Score([self.servers[0].tcp], inputs="logits", params=dict(ignore_index=9))
        out = worker(batch)
        self.assertEqual([out[n].tolist() for n in ("counted", "ignored", "faulty")], [[2, 0], [0, 3], [1, 0]])
        logprobs, _ = log_softmax(logits[0, [0, 2]])
        self.assertAlmostEqual(out["loss_sum"][0], -(logprobs[0, 1] + logprobs[1, 3]), places=5)
        self.assertTrue(np.isnan(totals(ray.data.from_items([])).perplexity))

    def score_of(self, sequences, **options):
        """Scored rows by id, and the totals."""
        dataset = ray.data.from_items(sequences)
        options = {"inputs": "logits", "batch_size": 2, "concurrency": 1, **options}
        scored = score(dataset, [self.servers[0].tcp], **options).materialize()
        return {row["id"]: row for row in scored.take_all()}, totals(scored)

    def test_sequences_without_rows_have_no_rows(self):
        def sequence(i, length):
            logits = RANDOM.standard_normal((length, 50)).astype(np.float32)
            return dict(id=i, logits=logits, targets=RANDOM.integers(0, 50, length))

        for lengths in ([0, 0], [2, 0, 0, 0, 1]):  # a dataset, and a batch, without any rows
            sequences = [sequence(i, length) for i, length in enumerate(lengths)]
            rows, found = self.score_of(sequences)
            self.assertEqual((found.rows, found.counted), (sum(lengths), sum(lengths)), lengths)
            self.assertEqual(np.isnan(found.perplexity), sum(lengths) == 0)
            for i, length in enumerate(lengths):
                self.assertEqual((rows[i]["rows"], rows[i]["counted"]), (length, length))
                self.assertEqual((np.shape(rows[i]["losses"]), np.shape(rows[i]["target_logprobs"])), ((length,),) * 2)
                logprobs, _ = log_softmax(sequences[i]["logits"])
                want = -logprobs[np.arange(length), sequences[i]["targets"]].sum()
                self.assertAlmostEqual(rows[i]["loss_sum"], want, places=4)

    def test_sequences_without_rows_may_have_lost_their_type_and_width(self):
        worker = Score([self.servers[0].tcp], inputs="logits")
        full = np.zeros((2, 50), np.float32)
        for empty in (np.zeros((0, 50)), np.zeros(0), np.zeros((0, 0), np.float32), np.zeros(0, object)):
            for others in ([], [(full, [1, 2])], [(full, [1, 2]), (full, [3, 4])]):
                pairs = [(empty, []), *others, (empty, [])]
                batch = dict(logits=np.empty(len(pairs), object), targets=np.empty(len(pairs), object))
                batch["logits"][:] = [inputs for inputs, _ in pairs]
                batch["targets"][:] = [np.array(targets) for _, targets in pairs]
                out = worker(batch)
                self.assertEqual(out["rows"].tolist(), [0, *(2 for _ in others), 0])
                self.assertEqual([len(losses) for losses in out["losses"]], out["rows"].tolist())
                self.assertEqual([out[name].dtype.kind for name in ("rows", "loss_sum")], ["i", "f"])
        out = worker(dict(logits=np.empty(0, object), targets=np.empty(0, object)))
        self.assertEqual([len(values) for values in out.values()], [0] * 9)

    def test_a_dataset_without_sequences_or_without_counted_rows_is_scored(self):
        rows, found = self.score_of([])
        self.assertEqual((rows, found.rows, np.isnan(found.perplexity)), ({}, 0, True))
        ignored = [dict(id=i, logits=np.zeros((n, 50), np.float32), targets=np.full(n, -100)) for i, n in enumerate((2, 1))]
        rows, found = self.score_of(ignored)
        self.assertEqual((found.rows, found.ignored, found.counted, np.isnan(found.perplexity)), (3, 3, 0, True))
        self.assertEqual(rows[0]["losses"].tolist(), [0, 0])

    def test_a_perplexity_beyond_doubles_is_infinite_as_the_clients(self):
        for loss in (700, 709, 710, 800, 3e38, np.inf):
            logits = np.zeros((3, 50), np.float32)
            logits[:, 1] = -loss
            targets = np.ones(3, np.int64)
            with logitd.Client(self.servers[0].tcp) as client:
                want = client.score(logits, targets=targets).totals
            out = Score([self.servers[0].tcp], inputs="logits")(dict(logits=logits[:, None], targets=targets[:, None]))
            found = totals(ray.data.from_items([{name: out[name][i] for name in out} for i in range(3)]))
            self.assertEqual(found.loss_mean, want.loss_mean)
            self.assertEqual(found.perplexity, want.perplexity, loss)
            self.assertEqual(np.isinf(found.perplexity), want.loss_mean > 709.78)

    def test_bfloat16_goes_as_bits(self):
        values = RANDOM.standard_normal((2, 5, 50)).astype(np.float32)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        exact = (bits.astype(np.uint32) << 16).view(np.float32)
        targets = RANDOM.integers(0, 50, (2, 5))
        rows, _ = self.score_of(
            [dict(id=i, logits=bits[i], targets=targets[i]) for i in range(2)], params=dict(dtype="bf16")
        )
        for i in range(2):
            logprobs, _ = log_softmax(exact[i])
            np.testing.assert_allclose(rows[i]["target_logprobs"], logprobs[np.arange(5), targets[i]], rtol=1e-5)

    def test_what_cannot_work_is_refused(self):
        for addresses in ([], "127.0.0.1:1"):
            with self.refused(logitd.InvalidArgument, "addresses: got"):
                Score(addresses)
        worker = Score(["127.0.0.1:1"], options=dict(retry=logitd.Retry(max_attempts=1)))
        with self.refused(logitd.InvalidArgument, "inputs: got 'hidden', allowed one of the columns x"):
            worker(dict(x=np.zeros(1)))
        with self.refused(logitd.InvalidArgument, "got a sequence of shape [3, 4] with targets of shape [2]"):
            worker(dict(hidden=np.zeros((1, 3, 4)), targets=np.zeros((1, 2))))
        with self.assertRaises(logitd.Unavailable):
            worker(dict(hidden=np.zeros((1, 2, 4), np.float32), targets=np.zeros((1, 2), np.int64)))

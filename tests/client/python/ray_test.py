"""Scoring of a dataset with Ray Data: a local cluster and two servers. Skipped where Ray is not installed."""

import os
import tempfile
import time
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
            while context.is_active():
                time.sleep(0.02)
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

    def test_what_cannot_work_is_refused(self):
        for addresses in ([], "127.0.0.1:1"):
            with self.refused(logitd.InvalidArgument, "addresses: got"):
                Score(addresses)
        worker = Score(["127.0.0.1:1"], options=dict(retry=logitd.Retry(max_attempts=1)))
        with self.refused(logitd.InvalidArgument, "columns: got x, allowed are those with 'hidden'"):
            worker(dict(x=np.zeros(1)))
        with self.refused(logitd.InvalidArgument, "got a sequence of shape [3, 4] with targets of shape [2]"):
            worker(dict(hidden=np.zeros((1, 3, 4)), targets=np.zeros((1, 2))))
        with self.assertRaises(logitd.Unavailable):
            worker(dict(hidden=np.zeros((1, 2, 4), np.float32), targets=np.zeros((1, 2), np.int64)))

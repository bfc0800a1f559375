"""New versions of a loaded head: from files and from an arena, and what calls and streams of each version get."""

import os
import threading

import logitd
import numpy as np
from arena_test import LeaseTestCase
from harness import until
from rows_test import write_head

RANDOM = np.random.default_rng(35)


class HeadUpdateTest(LeaseTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.hidden = RANDOM.standard_normal((8, 64)).astype(np.float32)
        cls.targets = RANDOM.integers(0, 500, 8)
        cls.weights = {name: RANDOM.standard_normal((500, 64)).astype(np.float32) for name in ("first", "second")}
        for name, weight in cls.weights.items():
            write_head(os.path.join(cls.root.name, name), weight)
            with logitd.Client(cls.server.unix) as client:
                client.load_head(f"only_{name}", name)  # what each version answers
        with logitd.Client(cls.server.unix) as client:
            client.load_head("lm", "first")
            client.update_head("lm", "first")  # from here on each update counts one
            client.unload_head("lm")

    def setUp(self):
        super().setUp()
        with logitd.Client(self.server.unix) as client:
            self.first = client.load_head("lm", "first").head_version
        self.addCleanup(self.unload)

    def unload(self):
        with logitd.Client(self.server.unix) as client:
            client.unload_head("lm")

    def score(self, client, head="lm", **params):
        return client.score(hidden=self.hidden, head=head, targets=self.targets, **params)

    def assert_served(self, client, name, version):
        """Every call answers with the weights `name`, and says and takes the version."""
        expected = self.score(client, f"only_{name}")
        for params in (dict(), dict(head_version=version)):
            got = self.score(client, **params)
            self.assertEqual(got.losses.tobytes(), expected.losses.tobytes())
            self.assertEqual(got.head_version, version)
        top = client.top_k(hidden=self.hidden, head="lm", k=3, head_version=version)
        self.assertEqual(top.head_version, version)
        drawn = client.sample(hidden=self.hidden, head="lm", seeds=3, head_version=version)
        same = client.sample(hidden=self.hidden, head=f"only_{name}", seeds=3)
        self.assertEqual(drawn.tokens.tolist(), same.tokens.tolist())
        self.assertEqual(drawn.head_version, version)
        for other in (version - 1, version + 1):
            if other == 0:
                continue
            with self.refused(logitd.FailedPrecondition, f"head_version: got {other}, allowed {version}"):
                self.score(client, head_version=other)

    def test_a_file_and_an_arena_give_new_versions(self):
        version = self.first
        with self.lease() as arena:
            weight = arena.empty((500, 64))
            for client in self.both(self.server.unix):
                self.assert_served(client, "first", version)
                seen = []
                head = client.update_head("lm", "second", progress=lambda done, total: seen.append((done, total)))
                self.assertGreater(head.head_version, version)
                version = head.head_version
                self.assertEqual(client.get_head("lm"), head)
                self.assertEqual(seen[-1], (500 * 64 * 4, 500 * 64 * 4))
                self.assert_served(client, "second", version)
                weight[:] = self.weights["first"]
                version += 1
                self.assertEqual(client.update_head("lm", weight=weight, arena=arena).head_version, version)
                self.assert_served(client, "first", version)

    def test_rows_come_in_any_order_and_not_all(self):
        new = self.weights["second"]
        with self.lease() as arena, logitd.Client(self.server.unix) as client:
            upper, lower = arena.empty((300, 64)), arena.empty((200, 70))[:, 6:]
            upper[:], lower[:] = new[200:], new[:200]
            client.update_head("lm", weight=[(200, upper)], arena=arena)
            mixed = np.concatenate([self.weights["first"][:200], new[200:]])
            best = client.top_k(hidden=self.hidden, head="lm", k=1).indices.values
            self.assertEqual(best.tolist(), (self.hidden @ mixed.T).argmax(axis=1).tolist())
            head = client.update_head("lm", weight=[(200, upper), (0, lower)], arena=arena)
            self.assert_served(client, "second", head.head_version)

    def test_more_pieces_than_a_message_has(self):
        version = self.first
        with self.lease() as arena:
            rows = arena.empty((500, 64))
            for client in self.both(self.server.unix):
                for name in ("second", "first"):
                    rows[:] = self.weights[name]
                    pieces = [(i, rows[i : i + 1]) for i in reversed(range(500))]
                    # The last two rows twice, in messages of their own: the last ones win.
                    head = client.update_head("lm", weight=[(0, rows[1:2]), *pieces, *pieces[-2:]], arena=arena)
                    self.assertGreater(head.head_version, version)
                    version = head.head_version
                    self.assert_served(client, name, version)
                # A later message is refused: the head stays as it was, and the caller gets the server's reason.
                count = 'logitd_head_updates_total{code="INVALID_ARGUMENT"}'
                refused = self.server.metric(count)
                with self.refused(logitd.InvalidArgument, "rows.first_row: got 500, allowed 0..499"):
                    client.update_head("lm", weight=[*pieces, (500, rows[:1])], arena=arena)
                self.assert_served(client, "first", version)
                until(lambda: self.server.metric(count) == refused + 1)  # noqa: B023

    def test_a_stream_keeps_the_version_of_its_first_message(self):
        hidden = np.concatenate([self.hidden] * 6)
        targets = np.concatenate([self.targets] * 6)
        for client in self.both(self.server.unix, score_message_bytes=64 * 4 * 8):
            with logitd.Client(self.server.unix) as other:
                before = other.get_head("lm").head_version
                updated = []

                def progress(_):
                    if not updated:
                        updated.append(other.update_head("lm", "second").head_version)

                got = client.score_stream(hidden=hidden, head="lm", targets=targets, progress=progress)
                self.assertEqual(updated, [before + 1])
                self.assertEqual(got.head_version, before)
                self.assertEqual(
                    got.losses.tobytes(),
                    other.score_stream(hidden=hidden, head="only_first", targets=targets).losses.tobytes(),
                )
                other.update_head("lm", "first")

    def test_a_failed_update_leaves_the_head(self):
        with self.lease() as arena:
            wide, halves = arena.empty((10, 65)), arena.empty((10, 64), "f16")
            outside = np.zeros((10, 64), np.float32)
            rows = arena.empty((10, 64))
            for client in self.both(self.server.unix):
                for given, text in (
                    (dict(), "path: got None and 0 pieces"),
                    (dict(path="second", weight=rows, arena=arena), "path: got 'second' and 1 pieces"),
                    (dict(weight=rows), "weight: got arrays without an arena"),
                    (dict(weight=outside, arena=arena), "does not lie in the arena"),
                    (dict(weight=wide, arena=arena), "rows.width: got 65, allowed 64"),
                    (dict(weight=halves, arena=arena), "rows.dtype: got f16, allowed f32"),
                    (dict(weight=[(491, rows)], arena=arena), "rows.rows: got 10, allowed 1..9"),
                    (dict(weight=[(1.7, rows)], arena=arena), "weight, a first row: got 1.7, allowed whole numbers"),
                    (dict(weight=[(True, rows)], arena=arena), "weight, a first row: got True, allowed whole numbers"),
                    (dict(weight=[(2**70, rows)], arena=arena), "weight, a first row: got 1180591620717411303424"),
                    (dict(weight=[rows, rows], arena=arena), "allowed an array, or pairs of a first row and an array"),
                    (dict(weight=[(0, rows, 1)], arena=arena), "allowed an array, or pairs of a first row and an"),
                    (dict(weight=[(0, None)], arena=arena), "weight: got"),
                    (dict(weight=rows.astype(np.float64), arena=arena), "weight: got an array of float64"),
                    (dict(bias=rows[0], arena=arena), "rows.part: got bias"),
                ):
                    with self.refused(logitd.InvalidArgument, text):
                        client.update_head("lm", **given)
                with self.refused(logitd.NotFound, "missing"):
                    client.update_head("lm", "missing")
                with self.refused(logitd.NotFound, "no head"):
                    client.update_head("absent", "first")
                with self.refused(logitd.Cancelled, "stopped by progress"):
                    client.update_head("lm", "second", progress=lambda done, total: total == 0)
        with logitd.Client(self.server.unix) as client:
            with self.refused(logitd.InvalidArgument, "arena: got one that is closed"):
                client.update_head("lm", weight=rows, arena=arena)

    def test_scores_during_updates_are_of_one_version_each(self):
        done = threading.Event()
        failures = []
        with logitd.Client(self.server.unix) as client:
            expected = [self.score(client, f"only_{name}").losses.tobytes() for name in ("first", "second")]

            def scores():
                with logitd.Client(self.server.unix) as own:
                    while not done.is_set():
                        got = self.score(own)
                        if got.losses.tobytes() != expected[(got.head_version - self.first) % 2]:
                            failures.append(got.head_version)

            threads = [threading.Thread(target=scores) for _ in range(3)]
            for thread in threads:
                thread.start()
            with self.lease() as arena:
                weight = arena.empty((500, 64))
                for step in range(20):
                    name = ("second", "first")[step % 2]
                    weight[:] = self.weights[name]
                    client.update_head("lm", weight=weight, arena=arena)
            done.set()
            for thread in threads:
                thread.join()
            self.assertEqual(failures, [])
            self.assert_served(client, "first", self.first + 20)

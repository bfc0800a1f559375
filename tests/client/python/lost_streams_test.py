"""Streams of score_stream and of attention that end before their last answer."""

import asyncio
import threading
import unittest
from unittest import mock

import grpc
import logitd
import numpy as np
from harness import CLIENTS, Clock, FakeServer, ServerTestCase, forward

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class LostStreamTest(ServerTestCase):
    """A server in between that loses streams of a real one."""

    LOGITS = np.random.default_rng(5).standard_normal((60, 40)).astype(np.float32)
    SCORE = dict(targets=list(range(40)) + list(range(20)), want_rank=True)

    def losing(self, answers, code=UNAVAILABLE, times=3):
        """The first streams end after so many answers."""
        calls = []

        def handle(messages, context):
            calls.append(0)
            for answer in forward(self.server.tcp, "/logitd.v1.Scorer/ScoreStream")(messages, context):
                if len(calls) <= times and calls[-1] == answers:
                    context.abort(code, "lost")
                calls[-1] += 1
                yield answer

        return handle, calls

    def test_goes_on_after_the_last_answer(self):
        with logitd.Client(self.server.unix) as client:
            whole = client.score(self.LOGITS, **self.SCORE)
        for code in (UNAVAILABLE, grpc.StatusCode.CANCELLED):
            for kind in CLIENTS:
                handle, calls = self.losing(2, code, times=9)
                with FakeServer(stream={"ScoreStream": handle}) as server:
                    with kind(server.address, score_message_bytes=40 * 4 * 5) as client:
                        result = client.score_stream(self.LOGITS, **self.SCORE)  # 12 messages, 2 a stream
                np.testing.assert_array_equal(result.losses, whole.losses)
                np.testing.assert_array_equal(result.ranks, whole.ranks)
                self.assertEqual(result.totals.rows, 60)
                self.assertEqual((result.attempts, calls), (6, [2] * 6))

    def test_a_server_that_stays_away_is_given_up(self):
        handle, calls = self.losing(0, times=99)
        with FakeServer(stream={"ScoreStream": handle}) as server:
            with logitd.Client(server.address, retry=logitd.Retry(max_attempts=4)) as client:
                with self.refused(logitd.Unavailable, "lost (gave up after 4"):
                    client.score_stream(self.LOGITS, **self.SCORE)
            self.assertEqual(len(calls), 4)
            for client in self.both(server.address):
                with self.refused(logitd.Unavailable, "lost (attempt", "would pass the deadline"), Clock() as clock:
                    client.score_stream(self.LOGITS, deadline=20, **self.SCORE)
                self.assertLess(sum(clock.waits), 20)

    def test_a_stream_that_makes_progress_is_not_given_up_at_the_deadline(self):
        handle, calls = self.losing(1, times=99)
        clock = Clock()

        def slow(messages, context):
            for answer in handle(messages, context):
                clock.now += 15
                yield answer

        with FakeServer(stream={"ScoreStream": slow}) as server:
            for client in self.both(server.address, score_message_bytes=40 * 4 * 10):
                with clock:
                    self.assertEqual(client.score_stream(self.LOGITS, deadline=20, **self.SCORE).totals.rows, 60)

    def test_another_error_is_not_tried_again(self):
        handle, calls = self.losing(1, grpc.StatusCode.INTERNAL)
        with FakeServer(stream={"ScoreStream": handle}) as server:
            for client in self.both(server.address, score_message_bytes=40 * 4 * 5):
                with self.refused(logitd.Internal, "lost"):
                    client.score_stream(self.LOGITS, **self.SCORE)
        self.assertEqual(len(calls), 2)

    def test_all_answers_are_a_result_however_the_stream_ends(self):
        def handle(messages, context):
            yield from forward(self.server.tcp, "/logitd.v1.Scorer/ScoreStream")(messages, context)
            context.abort(UNAVAILABLE, "late")

        with FakeServer(stream={"ScoreStream": handle}) as server:
            for client in self.both(server.address):
                self.assertEqual(client.score_stream(self.LOGITS, **self.SCORE).totals.rows, 60)

    def test_an_answer_that_does_not_come_is_not_waited_for_for_ever(self):
        def handle(messages, context):
            answers = forward(self.server.tcp, "/logitd.v1.Scorer/ScoreStream")(messages, context)
            yield next(answers)
            over = threading.Event()
            if context.add_callback(over.set):  # else the call is over
                over.wait()

        answered, after, wait_for = threading.Event(), logitd.client._after, asyncio.wait_for

        def patience(seconds):  # counts from the first answer on, which a busy machine delays
            return seconds if answered.is_set() else 20

        with FakeServer(stream={"ScoreStream": handle}) as server, mock.patch.object(
            logitd.client, "_after", lambda seconds, run: after(patience(seconds), run)
        ), mock.patch("asyncio.wait_for", lambda read, seconds: wait_for(read, patience(seconds))):
            for client in self.both(server.address, score_message_bytes=40 * 4 * 5):
                answered.clear()
                with self.refused(logitd.DeadlineExceeded, "no answer for 0.3 s, after 1 of 12 messages"):
                    client.score_stream(self.LOGITS, deadline=0.3, progress=lambda now: answered.set(), **self.SCORE)

    def test_what_progress_raises_comes_out(self):
        def progress(now):
            raise KeyError("mine")

        for client in self.both(self.server.unix):
            with self.assertRaisesRegex(KeyError, "mine"):
                client.score_stream(self.LOGITS, progress=progress, **self.SCORE)
            self.assertEqual(client.health(), "SERVING")

    def test_a_lost_attention_stream_starts_over(self):
        x = np.random.default_rng(6).standard_normal((40, 30)).astype(np.float32)
        with logitd.Client(self.server.unix) as client:
            whole = client.attention_softmax(x).probs
        calls = []

        def handle(messages, context):
            calls.append(1)
            for i, answer in enumerate(
                forward(self.server.tcp, "/logitd.v1.Attention/SoftmaxStream")(messages, context)
            ):
                if len(calls) % 2 == 1 and i == 2:
                    context.abort(UNAVAILABLE, "lost")
                yield answer

        with FakeServer(stream={"SoftmaxStream": handle}) as server:
            for client in self.both(server.address, attention_message_bytes=30 * 4 * 6):
                result = client.attention_softmax(x)
                np.testing.assert_array_equal(result.probs, whole)
                self.assertEqual((result.attempts, result.messages), (2, 7))

    def test_too_few_and_too_many_answers_are_internal(self):
        def few(messages, context):
            yield next(forward(self.server.tcp, "/logitd.v1.Scorer/ScoreStream")(messages, context))

        def many(messages, context):
            for answer in forward(self.server.tcp, "/logitd.v1.Scorer/ScoreStream")(messages, context):
                last = answer
                yield answer
            yield last

        for handle, text in ((few, "sent 1 answers to 12 messages"), (many, "more answers than there were messages")):
            with FakeServer(stream={"ScoreStream": handle}) as server:
                for client in self.both(server.address, score_message_bytes=40 * 4 * 5):
                    with self.refused(logitd.Internal, text):
                        client.score_stream(self.LOGITS, **self.SCORE)


if __name__ == "__main__":
    unittest.main()

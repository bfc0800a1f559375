"""Attention's softmax and its gradient against a real server, by definition."""

import logitd
import numpy as np
from harness import ServerTestCase
from reference import attention, attention_backward, window

RANDOM = np.random.default_rng(7)
SHAPE = (2, 3, 17, 29)
SINKS = [0.5, -np.inf, 3.0]


def scores(shape=SHAPE):
    return (RANDOM.standard_normal(shape) * 4).astype(np.float32)


class AttentionTest(ServerTestCase):
    def test_windows_masks_and_sinks_are_the_definition(self):
        x = scores()
        hidden_keys = RANDOM.random((1, 3, 17, 29)) < 0.3
        bias = RANDOM.standard_normal((2, 1, 1, 29)).astype(np.float32)
        everything = np.ones((17, 29), bool)
        cases = (
            (dict(), everything, {}),
            (dict(causal=True), window(17, 29, right=0), {}),
            (dict(window=(3, 5), sinks=SINKS), window(17, 29, 3, 5), dict(sinks=SINKS)),
            (dict(mask=hidden_keys, sinks=SINKS), ~hidden_keys, dict(sinks=SINKS)),
            (dict(mask=bias, causal=True), window(17, 29, right=0), dict(additive=bias)),
        )
        for params, seen, reference in cases:
            probs, logsumexp = attention(x, 0.25, np.broadcast_to(seen, SHAPE), **reference)
            # In one message, in one per few rows, and in one per some heads.
            for message_bytes in (8 << 20, 29 * 4 * 40, 29 * 4 * 5):
                for client in self.both(self.server.unix, attention_message_bytes=message_bytes):
                    result = client.attention_softmax(x, scale=0.25, want_logsumexp=True, **params)
                    self.assertEqual(result.probs.shape, SHAPE)
                    np.testing.assert_allclose(result.probs, probs, rtol=1e-5, atol=1e-30)
                    np.testing.assert_allclose(result.logsumexp, logsumexp, rtol=1e-5, atol=1e-5)
                    self.assertEqual(result.faults, ())
                    self.assertEqual(result.messages > 1, message_bytes < 8 << 20)

    def test_any_number_of_messages_gives_the_same_bits(self):
        x = scores((2, 2, 50, 300)).astype(np.float16)
        mask = RANDOM.random((2, 1, 50, 300)) < 0.5
        for client in self.both(self.server.unix):
            whole = client.attention_softmax(x, mask=mask).probs
            self.assertEqual(whole.dtype, np.float16)
        for client in self.both(self.server.unix, attention_message_bytes=7000):
            out = np.empty_like(x)
            result = client.attention_softmax(x, mask=mask, out=out)
            self.assertIs(result.probs, out)
            np.testing.assert_array_equal(out.view(np.uint16), whole.view(np.uint16))
            self.assertGreater(result.messages, 10)

    def test_leading_dimensions_may_be_missing(self):
        x = scores((5, 8))
        want, _ = attention(x[None, None], 1.0, np.ones((1, 1, 5, 8), bool))
        for client in self.both(self.server.unix):
            np.testing.assert_allclose(client.attention_softmax(x).probs, want[0, 0], rtol=1e-5)
            np.testing.assert_allclose(client.attention_softmax(x[None]).probs, want[0], rtol=1e-5)

    def test_rows_without_keys_and_with_nan_are_reported(self):
        x = scores((1, 1, 3, 4))
        x[0, 0, 1, 2] = np.nan
        mask = np.zeros((3, 4), bool)
        mask[2] = True
        for client in self.both(self.server.unix, attention_message_bytes=20):
            result = client.attention_softmax(x, mask=mask)
            self.assertEqual(
                result.faults,
                (
                    logitd.AttentionFault(1, logitd.RowStatus.NAN_LOGIT, 2),
                    logitd.AttentionFault(2, logitd.RowStatus.EMPTY_SUPPORT, -1),
                ),
            )
            self.assertEqual(result.probs[0, 0, 2].tolist(), [0] * 4)

    def test_types_of_the_answer(self):
        bits = (scores().view(np.uint32) >> 16).astype(np.uint16)
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        want, _ = attention(values, 1.0, np.ones(SHAPE, bool))
        for client in self.both(self.server.unix):
            result = client.attention_softmax(bits, dtype="bf16", out_dtype="f32")
            self.assertEqual(result.probs.dtype, np.float32)
            np.testing.assert_allclose(result.probs, want, rtol=1e-5)
            same = client.attention_softmax(bits, dtype="bf16").probs
            self.assertEqual(same.dtype, np.uint16)
            np.testing.assert_allclose((same.astype(np.uint32) << 16).view(np.float32), want, rtol=2**-8)

    def test_gradients_are_the_definition_and_add_up_over_messages(self):
        x, d_probs = scores(), scores()
        for message_bytes in (8 << 20, 29 * 8 * 11):
            for client in self.both(self.server.unix, attention_message_bytes=message_bytes):
                forward = client.attention_softmax(x, scale=0.5, causal=True, sinks=SINKS, want_logsumexp=True)
                d_scores, dot = attention_backward(forward.probs, d_probs, 0.5)
                sink = np.exp(np.array(SINKS)[None, :, None] - forward.logsumexp.astype(np.float64))
                out = np.empty_like(x)
                result = client.attention_softmax_backward(
                    forward.probs, d_probs, scale=0.5, causal=True, sinks=SINKS, logsumexp=forward.logsumexp, out=out
                )
                np.testing.assert_allclose(out, d_scores, rtol=1e-4, atol=1e-6)
                np.testing.assert_allclose(result.d_sinks, -(sink * dot).sum(axis=(0, 2)), rtol=1e-4, atol=1e-5)
                self.assertEqual(result.messages > 1, message_bytes < 8 << 20)

    def test_sizes_that_disagree_are_refused_unsent(self):
        x = scores()
        frozen = x.copy()
        frozen.flags.writeable = False
        for client in self.both(self.server.unix):
            for call, text in (
                (lambda: client.attention_softmax(x[0, 0, 0]), "scores: got shape [29]"),
                (
                    lambda: client.attention_softmax(x, mask=np.zeros((2, 2, 1, 29), bool)),
                    "mask: got shape [2, 2, 1, 29], allowed [2 or 1, 3 or 1, 17 or 1, 29]",
                ),
                (lambda: client.attention_softmax(x, causal=True, window=(1, 2)), "window: got 2 keys to the right"),
                (lambda: client.attention_softmax(x, out=np.empty((1,), np.float32)), "out: got [1] of f32"),
                (lambda: client.attention_softmax(x, out=frozen), "out: got an array that cannot be written"),
                (lambda: client.attention_softmax(x, out_dtype="f8"), "out_dtype: got 'f8'"),
                (lambda: client.attention_softmax_backward(x, x[0]), "d_probs: got [3, 17, 29] of f32"),
                (lambda: client.attention_softmax_backward(x, x, sinks=SINKS), "logsumexp: got 0 values, allowed 102"),
                (lambda: client.attention_softmax_backward(x, x, logsumexp=x), "logsumexp: got 2958 values"),
            ):
                with self.refused(logitd.InvalidArgument, text) as caught:
                    call()
                self.assertEqual(caught.exception.attempts, 0)
            with self.refused(logitd.InvalidArgument, "sinks") as caught:  # the server's own refusal
                client.attention_softmax(x, sinks=[1.0])
            self.assertEqual(caught.exception.attempts, 1)


class SmallServerTest(ServerTestCase):
    FLAGS = ("--max-request-bytes=64KiB", "--slab-bytes=64KiB", "--max-held-bytes=16MiB")

    def test_a_tensor_larger_than_the_server_takes_goes_in_messages(self):
        x = scores((1, 2, 100, 300))  # 240 kB
        want, _ = attention(x, 1.0, np.ones(x.shape, bool))
        for client in self.both(self.server.tcp):
            result = client.attention_softmax(x)
            np.testing.assert_allclose(result.probs, want, rtol=1e-5)
            self.assertGreaterEqual(result.messages, 4)
            with self.refused(logitd.InvalidArgument, "a row of 80000 bytes", "is more than one message carries"):
                client.attention_softmax(np.zeros((1, 20000), np.float32))

    def test_a_sequence_larger_than_the_server_takes_goes_in_messages(self):
        logits = RANDOM.standard_normal((100, 1000)).astype(np.float32)
        for client in self.both(self.server.tcp):
            seen = []
            client.score_stream(logits, targets=[0] * 100, progress=seen.append)
            self.assertEqual([p.rows for p in seen], [16, 32, 48, 64, 80, 96, 100])
            with self.refused(logitd.InvalidArgument, "one row of 80000 bytes", "max_request_bytes 65536"):
                client.score_stream(np.zeros((1, 20000), np.float32), targets=[0])
            with self.refused(logitd.InvalidArgument, "got 400000 bytes, allowed 1..65536"):
                client.score(logits, targets=[0] * 100)

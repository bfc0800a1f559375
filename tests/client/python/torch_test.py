"""Tensors of torch in and out. Skipped where torch is not installed."""

import unittest
import warnings

import logitd
import numpy as np
from harness import ServerTestCase, until
from reference import attention, log_softmax, order, window

try:
    import torch
except ImportError:
    raise unittest.SkipTest("torch is not installed") from None


class TorchTest(ServerTestCase):
    ARENAS = True

    def setUp(self):
        torch.manual_seed(5)
        warnings.simplefilter("error")  # torch warns of tensors over memory that cannot be written
        self.addCleanup(warnings.resetwarnings)

    def test_rows_of_every_type_come_back_as_tensors(self):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            logits = torch.randn(3, 400).to(dtype)
            exact = logits.double().numpy()
            for client in self.both(self.server.unix):
                top = client.top_k(logits, k=torch.tensor([2, 2, 2]))
                self.assertEqual(top.indices.dense().tolist(), [order(row)[:2].tolist() for row in exact])
                self.assertEqual((top.probs.values.dtype, top.indices.values.dtype), (torch.float32, torch.int32))
                drawn = client.sample(logits, seed=1, temperature=0)
                self.assertTrue(torch.equal(drawn.tokens.long(), logits.argmax(dim=1)))
                targets = torch.tensor([5, 6, 7])
                for score in (client.score, client.score_stream):
                    losses = score(logits.requires_grad_(), targets=targets).losses
                    want = -log_softmax(exact)[0][np.arange(3), targets]
                    np.testing.assert_allclose(losses.numpy(), want, rtol=1e-5)
                    losses += 1  # may be written

    def test_rows_of_a_stream_are_joined_as_tensors(self):
        logits = torch.randn(100, 50)
        for client in self.both(self.server.unix, score_message_bytes=50 * 4 * 7):
            result = client.score_stream(logits, targets=torch.zeros(100, dtype=torch.int64), top_logprobs=2)
            self.assertEqual((result.losses.shape, result.top_ids.dense().shape), ((100,), (100, 2)))
            np.testing.assert_allclose(result.losses.numpy(), -log_softmax(logits.numpy())[0][:, 0], rtol=1e-5)

    def test_attention_and_its_gradient_are_those_of_autograd(self):
        for message_bytes in (8 << 20, 2000):
            for client in self.both(self.server.unix, attention_message_bytes=message_bytes):
                scores = torch.randn(2, 3, 11, 13, requires_grad=True)
                seen = torch.from_numpy(window(11, 13, right=0))
                want = torch.softmax((scores * 0.5).masked_fill(~seen, -torch.inf), dim=-1)
                result = client.attention_softmax(scores, scale=0.5, causal=True, want_logsumexp=True)
                torch.testing.assert_close(result.probs, want)
                self.assertEqual(result.logsumexp.shape, (2, 3, 11))
                d_probs = torch.randn_like(want)
                want.backward(d_probs)
                out = torch.empty_like(d_probs)
                gradient = client.attention_softmax_backward(result.probs, d_probs, scale=0.5, causal=True, out=out)
                self.assertIs(gradient.d_scores, out)
                torch.testing.assert_close(out, scores.grad, atol=1e-6, rtol=1e-4)

    def test_attention_in_bfloat16(self):
        scores = torch.randn(1, 2, 5, 9).bfloat16()
        want, _ = attention(scores.double().numpy(), 1.0, np.ones((1, 2, 5, 9), bool))
        mask = torch.zeros(5, 9, dtype=torch.bool)
        for client in self.both(self.server.unix):
            for params in (dict(), dict(mask=mask), dict(mask=mask.bfloat16()), dict(out=torch.empty_like(scores))):
                probs = client.attention_softmax(scores, **params).probs
                self.assertEqual((probs.dtype, probs.shape), (torch.bfloat16, scores.shape))
                np.testing.assert_allclose(probs.double().numpy(), want, rtol=2**-8)
            exact = client.attention_softmax(scores, out_dtype="f32").probs
            self.assertEqual(exact.dtype, torch.float32)
            np.testing.assert_allclose(exact.numpy(), want, rtol=1e-5)

    def test_tensors_in_an_arena_are_named_and_answers_are_tensors(self):
        with logitd.Arena.lease(self.server.arena, 1 << 20) as arena:
            for name, dtype in (("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)):
                logits = torch.randn(6, 400).to(dtype)
                shared = arena.empty_tensor((6, 500), name)
                self.assertEqual((shared.dtype, shared.shape), (dtype, (6, 500)))
                rows = shared[::2, 100:]
                rows.copy_(logits[:3])
                for client in self.both(self.server.unix):
                    got, want = client.top_k(rows, k=4, arena=arena), client.top_k(logits[:3], k=4)
                    self.assertTrue(torch.equal(got.indices.values, want.indices.values))
                    self.assertTrue(torch.equal(got.probs.values, want.probs.values))
                    with self.refused(logitd.InvalidArgument, "does not lie in the arena"):
                        client.top_k(logits, k=1, arena=arena)
                    with self.refused(logitd.InvalidArgument, "got strides"):
                        client.top_k(shared[:, ::2], k=1, arena=arena)

    def test_tensors_outlive_the_arena(self):
        arena = logitd.Arena.lease(self.server.arena, 4096)
        tensor = arena.tensor(1024, (2, 8), "bf16")
        arena.array(1024, (2, 8), "f16")[1, 7] = 1  # 0x3c00, in bf16 2^-7
        self.assertEqual(tensor[1, 7].item(), 2.0**-7)
        until(lambda: self.server.metric("logitd_arena_bytes") == 4096)
        arena.close()
        del arena
        until(lambda: self.server.metric("logitd_arena_bytes") == 0)
        tensor[:] = 3
        self.assertEqual(tensor.sum().item(), 48)

    def test_other_types_are_refused(self):
        for client in self.both(self.server.unix):
            with self.refused(logitd.InvalidArgument, "logits: got an array of float64, allowed float32"):
                client.top_k(torch.zeros(1, 3, dtype=torch.float64), k=1)

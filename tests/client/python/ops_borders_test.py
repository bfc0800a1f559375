"""logitd.ops at its borders: no rows, modes of torch, second derivatives, and tensors that an op cannot serve."""

import os
import subprocess
import sys
import unittest

from ops_harness import DEVICES, OpsTestCase, ops, torch

from logitd.errors import InvalidArgument

F = torch.nn.functional


def head(rows, dtype=torch.float32, device="cpu"):
    """Hidden states [rows, 8], a weight [9, 8] and targets."""
    hidden, weight = (torch.randn(count, 8, device=device).to(dtype).requires_grad_() for count in (rows, 9))
    return hidden, weight, torch.arange(rows, device=device) % 9


class NoRowsTest(OpsTestCase):
    def test_losses(self):
        for device in DEVICES:
            for reduction in ("sum", "none"):
                hidden, weight, target = head(0, device=device)
                bias = torch.zeros(9, device=device, requires_grad=True)
                loss = ops.linear_cross_entropy(hidden, weight, target, bias=bias, reduction=reduction)
                loss.sum().backward()
                self.assertEqual(loss.sum().item(), 0)
                self.assertEqual(hidden.grad.shape, (0, 8))
                for parameter in (weight, bias):
                    self.assertEqual(parameter.grad.abs().sum().item(), 0)
            for parameter in (weight, weight.detach()):
                self.assertTrue(ops.linear_cross_entropy(hidden.detach(), parameter, target).isnan())  # as torch's mean
                loss = ops.linear_cross_entropy(hidden.detach(), parameter, target, reduction="sum")
                self.assertEqual(loss.item(), 0)

    def test_divergence(self):
        for reduction in ("sum", "none"):
            hidden, weight, _ = head(0)
            ops.linear_divergence(hidden, weight, hidden, weight, reduction=reduction).sum().backward()
            self.assertEqual(weight.grad.abs().sum().item(), 0)

    def test_attention(self):
        scores, sinks = torch.randn(0, 2, 3, 4, requires_grad=True), torch.randn(2, requires_grad=True)
        ops.scaled_masked_softmax(scores, sinks=sinks).sum().backward()
        self.assertEqual(scores.grad.shape, (0, 2, 3, 4))
        self.assertEqual(sinks.grad.tolist(), [0, 0])

    def test_tokens(self):
        logits = torch.randn(0, 9)
        self.assertEqual(ops.softmax_topk(logits, 3).probs.shape, (0, 3))
        self.assertEqual(ops.sample(logits, seed=1, history=[], bias=[]).tokens.shape, (0,))


class ModesTest(OpsTestCase):
    def test_training_after_inference_mode(self):
        for dtype in (torch.float32, torch.float16):
            hidden, weight, target = head(5, dtype)
            with torch.inference_mode():
                seen = ops.linear_cross_entropy(hidden, weight, target, reduction="sum")
            loss = ops.linear_cross_entropy(hidden, weight, target, reduction="sum")
            loss.backward()
            self.assertEqual(loss.item(), seen.item())
            self.assertGreater(weight.grad.abs().sum().item(), 0)

    def test_other_default_dtypes(self):
        hidden, weight, target = head(5)
        expected = F.cross_entropy(hidden @ weight.T, target).item()
        for dtype in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            try:
                loss = ops.linear_cross_entropy(hidden, weight, target)
                loss.backward()
                ops.linear_divergence(hidden, weight, hidden, weight, mask=target > 0).backward()
                tokens = ops.sample(hidden.detach(), seed=1, bias={2: 1.0}, history=[[1]] * 5, top_k=3).tokens
            finally:
                torch.set_default_dtype(torch.float32)
            self.assertAlmostEqual(loss.item(), expected, delta=1e-6)
            self.assertEqual(tokens.shape, (5,))

    def test_fake_tensors_leave_nothing_behind(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            fake = ops.linear_cross_entropy(*head(7), reduction="sum")
        self.assertEqual(fake.shape, ())
        hidden, weight, target = head(7)
        loss = ops.linear_cross_entropy(hidden, weight, target, reduction="sum")
        self.assert_close(loss, F.cross_entropy(hidden @ weight.T, target, reduction="sum"), 1e-5)

    def test_checkpointed_and_accumulated(self):
        from torch.utils.checkpoint import checkpoint

        hidden, weight, target = head(4)
        for _ in range(2):
            loss = checkpoint(ops.linear_cross_entropy, hidden, weight, target, use_reentrant=False)
            (loss / 2).backward()
        own = weight.detach().double().requires_grad_()
        F.cross_entropy(hidden.detach().double() @ own.T, target).backward()
        self.assert_close(weight.grad, own.grad, 1e-6)

    def test_compiled_for_any_number_of_rows(self):
        step = torch.compile(
            lambda h, w, t: ops.linear_cross_entropy(h * 1, w * 1, t, reduction="sum"),
            backend="aot_eager", fullgraph=True, dynamic=True,
        )  # fmt: skip
        for rows in (5, 9, 13):
            hidden, weight, target = head(rows)
            step(hidden, weight, target).backward()
            own = hidden.detach().double().requires_grad_()
            F.cross_entropy(own @ weight.detach().double().T, target, reduction="sum").backward()
            self.assert_close(hidden.grad, own.grad, 1e-6)


class RefusedTest(OpsTestCase):
    def test_second_derivatives(self):
        hidden, weight, target = head(4)
        scores = torch.randn(1, 2, 3, 4, requires_grad=True)
        other = torch.randn(4, 8), torch.randn(9, 8)
        for value, loss in (
            (hidden, ops.linear_cross_entropy(hidden, weight, target)),
            (hidden, ops.linear_cross_entropy(hidden, weight, target, reduction="none").sum()),
            (hidden, ops.linear_divergence(hidden, weight, *other)),
            (hidden, ops.linear_divergence(hidden, weight, *other, reduction="none").sum()),
            (scores, ops.scaled_masked_softmax(scores).square().sum()),
        ):
            (gradient,) = torch.autograd.grad(loss, value, create_graph=True)
            with self.assertRaisesRegex(RuntimeError, "backward: got a second derivative"):
                gradient.sum().backward()

    def test_a_mask_that_wants_a_gradient(self):
        scores, mask = torch.randn(1, 2, 3, 4), torch.zeros(3, 4, requires_grad=True)
        with self.assertRaisesRegex(InvalidArgument, "mask: got a tensor that requires a gradient"):
            ops.scaled_masked_softmax(scores, mask)
        with torch.no_grad():
            self.assert_close(ops.scaled_masked_softmax(scores, mask), scores.double().softmax(-1), 1e-6)

    def test_a_masked_row_of_a_divergence_does_not_count(self):
        hidden, weight, _ = head(4)
        mask = torch.tensor([True, False, True, True])
        reference, reference_weight = torch.randn(4, 8), torch.randn(9, 8)
        expected = ops.linear_divergence(hidden[mask], weight, reference[mask], reference_weight)
        with torch.no_grad():
            hidden[1] = torch.nan
        loss = ops.linear_divergence(hidden, weight, reference, reference_weight, mask=mask)
        loss.backward()
        self.assert_close(loss, expected, 1e-6)
        self.assertTrue(weight.grad.isfinite().all())


class LayoutsTest(OpsTestCase):
    def test_views_have_the_gradients_of_their_bases(self):
        target = torch.arange(3)
        for view in (
            lambda base: base[::2, :13],
            lambda base: base[:, :3].T,
            lambda base: base[:1].expand(3, 20),
            lambda base: base[:3, 1:],
        ):
            base = torch.randn(6, 20, requires_grad=True)
            x = view(base)
            ops.cross_entropy(x, target).backward()
            own = base.detach().double().requires_grad_()
            F.cross_entropy(view(own), target).backward()
            self.assert_close(base.grad, own.grad, 1e-6)

    def test_one_hidden_state_without_leading_dimensions(self):
        hidden, weight, _ = head(1)
        loss = ops.linear_cross_entropy(hidden[0], weight, torch.tensor(3))
        self.assert_close(loss, F.cross_entropy(hidden @ weight.T, torch.tensor([3])), 1e-6)

    def test_a_banned_end_of_the_vocabulary(self):
        hidden, weight, target = head(4)
        bias = torch.zeros(9)
        bias[7:] = -torch.inf  # padding, as trainers add it
        ops.linear_cross_entropy(hidden, weight, target, bias=bias).backward()
        own = weight.detach().double().requires_grad_()
        F.cross_entropy(hidden.detach().double() @ own[:7].T, target).backward()
        self.assert_close(weight.grad, own.grad, 1e-6)

    def test_gradients_are_not_copied(self):
        """A copy of the weight's gradient would double the memory of a step."""
        hidden, weight, target = head(4)
        loss = ops.linear_cross_entropy(hidden, weight, target)
        made = [of.data_ptr() for of in loss.grad_fn.gradients[:2]]
        loss.backward()
        self.assertEqual([hidden.grad.data_ptr(), weight.grad.data_ptr()], made)


class LibraryTest(unittest.TestCase):
    def test_a_library_that_is_not_there_or_another_one_is_an_import_error(self):
        for path, text in (
            ("/nowhere/liblogitd.so", "got no /nowhere/liblogitd.so"),
            ("libc.so.6", "logitd_abi_version"),
        ):
            done = subprocess.run(
                [sys.executable, "-c", "import logitd.ops"],
                env={**os.environ, "LOGITD_LIBRARY": path},
                capture_output=True,
                text=True,
            )
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr.splitlines()[-1], f"^ImportError: .*{text}")


class ArgumentsTest(OpsTestCase):
    def test_what_is_no_number_or_no_tensor_is_refused_with_its_name(self):
        hidden, weight, target = torch.randn(4, 8), torch.randn(20, 8), torch.tensor([0, 1, 2, 3])
        scores = torch.randn(1, 1, 2, 3)

        def loss(**options):
            return ops.linear_cross_entropy(hidden, weight, target, **options)

        for text, call in (
            (r"temperature: got str, allowed one number", lambda: loss(temperature="x")),
            (r"temperature: got Tensor, allowed one number", lambda: loss(temperature=torch.ones(4))),
            (r"ignore_index: got 1180591620717411303424, allowed", lambda: loss(ignore_index=2**70)),
            (r"weight: got layout", lambda: ops.linear_cross_entropy(hidden, weight.to_sparse(), target)),
            (r"k: got 1099511627776, allowed 1..8", lambda: ops.softmax_topk(hidden, 2**40)),
            (r"top_logprobs: got 8589934592, allowed 0..8", lambda: ops.sample(hidden, seed=1, top_logprobs=2**33)),
            (r"want_support: got str, allowed 0..8", lambda: ops.sample(hidden, seed=1, want_support="a")),
            (r"history: got numbers with fractions", lambda: ops.sample(hidden, seed=1, history=[[1.5]] * 4)),
            (r"window: got \(1,\), allowed two", lambda: ops.scaled_masked_softmax(scores, window=(1,))),
            (r"window: got float, allowed -1..", lambda: ops.scaled_masked_softmax(scores, window=(1.5, 0))),
            (r"scores cols: got 0, allowed 1..", lambda: ops.scaled_masked_softmax(scores[..., :0])),
            (r"beta: got str", lambda: ops.linear_divergence(hidden, weight, hidden, weight, beta="x")),
        ):
            with self.assertRaisesRegex(InvalidArgument, text):
                call()


if __name__ == "__main__":
    unittest.main()

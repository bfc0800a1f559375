"""logitd.ops.cross_entropy and linear_cross_entropy beside torch's own in double precision."""

import itertools
import unittest

from ops_harness import DEVICES, DTYPES, TOLERANCE, OpsTestCase, double, ops, torch
from torch import library

from logitd.errors import FailedPrecondition, InvalidArgument

F = torch.nn.functional


def expected(logits, target, reduction, label_smoothing=0.0, z_loss=0.0, softcap=0.0, temperature=1.0, megatron=False):
    """The reduced loss of logits in double precision, from torch's ops."""
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    vocab, flat = logits.shape[-1], target.reshape(-1)
    e = label_smoothing * (vocab / (vocab - 1) if megatron else 1)
    lse = logits.logsumexp(-1).reshape(-1)
    counted = flat != -100
    x = logits.reshape(-1, vocab)
    at = x.gather(1, flat.clamp(min=0)[:, None])[:, 0]
    loss = torch.where(counted, (1 - e) * (lse - at) + e * (lse - x.mean(-1)) + z_loss * lse**2, 0.0)
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() / (counted.sum() if reduction == "mean" else 1)


class CrossEntropyTest(OpsTestCase):
    def compare(self, tensors, loss_of, reference_of, note, target):
        got = loss_of(*tensors)
        doubles = [double(of) for of in tensors]
        reference = reference_of(*doubles)
        weights = torch.randn(got.shape, device=got.device)
        (got * weights).sum().backward()
        (reference * weights.double()).sum().backward()
        self.assert_close(got, reference, 5e-6, note)
        for mine, own in zip(tensors, doubles):
            if mine is not None:
                self.assertEqual(mine.grad.dtype, mine.dtype, note)
                self.assert_close(mine.grad, own.grad, TOLERANCE[mine.dtype], note)

    def test_every_option_of_the_linear_op(self):
        options = (
            {},
            {"label_smoothing": 0.1},
            {"label_smoothing": 0.2, "smoothing": "megatron"},
            {"z_loss": 1e-2, "temperature": 0.7},
            {"softcap": 5.0, "scale": 0.5, "label_smoothing": 0.1, "z_loss": 1e-3},
        )
        for device, dtype, reduction, with_bias, chosen in itertools.product(
            DEVICES, DTYPES, ("mean", "sum", "none"), (False, True), options
        ):
            with self.subTest(device=device, dtype=dtype, reduction=reduction, bias=with_bias, **chosen):
                hidden = torch.randn(2, 7, 40, device=device).to(dtype).requires_grad_()
                weight = (torch.randn(131, 40, device=device) * 0.3).to(dtype).requires_grad_()
                bias = torch.randn(131, device=device).requires_grad_() if with_bias else None
                target = torch.randint(0, 131, (2, 7), device=device)
                target[1, 2] = target[0, 0] = -100
                rest = dict(chosen)
                scale, megatron = rest.pop("scale", 1.0), rest.pop("smoothing", "torch") == "megatron"
                self.compare(
                    (hidden, weight, bias),
                    lambda h, w, b: ops.linear_cross_entropy(h, w, target, bias=b, reduction=reduction, **chosen),
                    lambda h, w, b: expected(
                        scale * (h @ w.T) + (0 if b is None else b), target, reduction, megatron=megatron, **rest
                    ),
                    (device, dtype, reduction, with_bias, chosen),
                    target,
                )

    def test_logits(self):
        for device, dtype, reduction in itertools.product(DEVICES, DTYPES, ("mean", "sum", "none")):
            logits = (3 * torch.randn(3, 4, 1500, device=device)).to(dtype).requires_grad_()
            target = torch.randint(0, 1500, (3, 4), device=device)
            target[2, 1] = -100
            self.compare(
                (logits,),
                lambda x: ops.cross_entropy(x, target, reduction=reduction, label_smoothing=0.1, softcap=9.0),
                lambda x: expected(x, target, reduction, label_smoothing=0.1, softcap=9.0),
                (device, dtype, reduction),
                target,
            )

    def test_gradients_are_those_of_finite_differences(self):
        hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
        target = torch.randint(0, 30, (5,))
        ops.linear_cross_entropy(hidden, weight, target, z_loss=0.01).backward()
        step = 1e-2
        for row, column in ((0, 0), (3, 5), (4, 7)):
            ends = []
            for sign in (1, -1):
                moved = hidden.detach().clone()
                moved[row, column] += sign * step
                ends.append(ops.linear_cross_entropy(moved, weight.detach(), target, z_loss=0.01).item())
            self.assertAlmostEqual((ends[0] - ends[1]) / (2 * step), hidden.grad[row, column].item(), delta=2e-4)

    def test_stats_are_those_of_the_rows(self):
        hidden, weight = torch.randn(2, 3, 16), torch.randn(50, 16)
        target = torch.tensor([[1, 2, -100], [4, 49, 0]])
        stats = ops.linear_cross_entropy(hidden, weight, target, stats=True, reduction="sum")
        logits = hidden.double() @ weight.double().T
        logprobs = logits.log_softmax(-1).gather(2, target.clamp(min=0)[..., None])[..., 0]
        logprobs[0, 2] = 0
        self.assert_close(stats.target_logprob, logprobs, 4e-6)
        self.assert_close(stats.losses, -logprobs, 4e-6)
        self.assert_close(stats.logsumexp, logits.logsumexp(-1), 4e-6)
        self.assert_close(stats.loss, -logprobs.sum(), 4e-6)

    def test_rows_of_odd_sizes_views_and_frozen_parts(self):
        base = torch.randn(9, 64)
        hidden = base[:, 1:14]  # neither aligned nor contiguous
        weight = torch.randn(21, 13, requires_grad=True)
        target = torch.randint(0, 21, (9,))
        ops.linear_cross_entropy(hidden, weight, target).backward()
        own = weight.detach().double().requires_grad_()
        F.cross_entropy(hidden.double() @ own.T, target).backward()
        self.assert_close(weight.grad, own.grad, 1e-6)
        hidden = torch.randn(9, 13, requires_grad=True)
        ops.linear_cross_entropy(hidden, weight.detach(), target).backward()
        own = hidden.detach().double().requires_grad_()
        F.cross_entropy(own @ weight.detach().double().T, target).backward()
        self.assert_close(hidden.grad, own.grad, 1e-6)

    def test_nothing_counts(self):
        hidden, weight = torch.randn(3, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
        target = torch.full((3,), -100)
        loss = ops.linear_cross_entropy(hidden, weight, target, reduction="sum")
        loss.backward()
        self.assertEqual(loss.item(), 0)
        self.assertEqual(weight.grad.abs().sum().item() + hidden.grad.abs().sum().item(), 0)
        self.assertTrue(ops.linear_cross_entropy(hidden, weight, target).isnan())  # as torch's mean of nothing

    def test_infinities_and_nan_stay_in_their_rows(self):
        logits = torch.randn(4, 20)
        logits[0, 3] = -torch.inf
        logits[1, 5] = torch.nan
        target = torch.tensor([3, 5, 5, 5])
        logits.requires_grad_()
        loss = ops.cross_entropy(logits, target, reduction="none")
        self.assertEqual(loss[0].item(), torch.inf)
        self.assertTrue(loss[1].isnan())
        self.assert_close(loss[2:], F.cross_entropy(logits[2:].double(), target[2:], reduction="none"), 4e-6)

    def test_ignored_rows_may_hold_anything(self):
        for dtype in (torch.float32, torch.float16):
            hidden, weight = torch.randn(4, 8).to(dtype), torch.randn(9, 8).to(dtype).requires_grad_()
            target = torch.tensor([1, -100, 3, -100])
            own = F.cross_entropy(hidden[::2].double() @ weight.double().T, target[::2])
            hidden[1] = torch.nan
            hidden[3] = torch.inf
            hidden.requires_grad_()
            loss = ops.linear_cross_entropy(hidden, weight, target)
            loss.backward()
            self.assert_close(loss, own, 4e-6)
            self.assertEqual(hidden.grad[1::2].abs().sum().item(), 0)
            self.assertTrue(weight.grad.isfinite().all())
            with torch.no_grad():
                self.assert_close(ops.linear_cross_entropy(hidden, weight, target), own, 4e-6)

    def test_autocast_casts_as_linear_does(self):
        hidden, weight = torch.randn(6, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
        target = torch.randint(0, 40, (6,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ops.linear_cross_entropy(hidden, weight, target)
        loss.backward()
        own = F.cross_entropy(hidden.bfloat16().double() @ weight.bfloat16().double().T, target)
        self.assert_close(loss, own, 4e-6)
        self.assertEqual(weight.grad.dtype, torch.float32)

    def test_one_backward_of_a_reduced_loss(self):
        hidden = torch.randn(3, 8, requires_grad=True)
        loss = ops.linear_cross_entropy(hidden, torch.randn(9, 8), torch.tensor([1, 2, 3]))
        loss.backward(retain_graph=True)
        with self.assertRaisesRegex(FailedPrecondition, "backward: got a second pass"):
            loss.backward()

    def test_refusals(self):
        hidden, weight, target = torch.randn(4, 8), torch.randn(20, 8), torch.tensor([0, 1, 2, 3])
        for text, arguments, options in (
            (r"hidden: got list, allowed a torch tensor", ([1.0], weight, target), {}),
            (r"hidden dtype: got float64, allowed float32", (hidden.double(), weight.double(), target), {}),
            (r"weight: got shape \[8, 20\], allowed \[vocab, 8\]", (hidden, weight.T, target), {}),
            (r"weight dtype: got bfloat16, allowed float32", (hidden, weight.bfloat16(), target), {}),
            (r"target: got shape \[3\], allowed \[4\]", (hidden, weight, target[:3]), {}),
            (r"target dtype: got float32, allowed an integer", (hidden, weight, target.float()), {}),
            (r"target: got 20 at row 2, allowed tokens", (hidden, weight, torch.tensor([0, 1, 20, 3])), {}),
            (r"bias: got shape \[8\], allowed \[20\]", (hidden, weight, target), {"bias": torch.zeros(8)}),
            (r"reduction: got 'avg', allowed none, sum, mean", (hidden, weight, target), {"reduction": "avg"}),
            (r"smoothing: got 'x', allowed torch, megatron", (hidden, weight, target), {"smoothing": "x"}),
            (r"label_smoothing: got 1 at row 0, allowed", (hidden, weight, target), {"label_smoothing": 1.0}),
            (r"temperature: got 0 at row 0, allowed", (hidden, weight, target), {"temperature": 0.0}),
            (r"softcap: got -1, allowed finite and >= 0", (hidden, weight, target), {"softcap": -1.0}),
            (r"ignore_index: got 3, allowed below 0, or 20", (hidden, weight, target), {"ignore_index": 3}),
        ):
            with self.assertRaisesRegex(InvalidArgument, text):
                ops.linear_cross_entropy(*arguments, **options)


class TrainingTest(OpsTestCase):
    def test_a_tiny_transformer_has_the_loss_curve_of_torch(self):
        for device in DEVICES:
            curves = [self.curve(device, own) for own in (False, True)]
            apart = max(abs(mine - own) for mine, own in zip(*curves))
            self.assertLess(apart, 1e-5)
            self.assertLess(curves[0][-1], 0.9 * curves[0][0])

    def curve(self, device, own):
        torch.manual_seed(3)
        vocab, width = 61, 32
        embed = torch.nn.Embedding(vocab, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        head = torch.nn.Linear(width, vocab)
        model = torch.nn.ModuleList([embed, layer, head]).to(device)
        tokens = (torch.arange(8 * 17).view(8, 17) * 7 % vocab).to(device)
        causal = torch.nn.Transformer.generate_square_subsequent_mask(16, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(40):
            hidden = layer(embed(tokens[:, :-1]), src_mask=causal, is_causal=True)
            if own:
                loss = F.cross_entropy(head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
            else:
                loss = ops.linear_cross_entropy(hidden, head.weight, tokens[:, 1:], bias=head.bias)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses


class TorchTest(OpsTestCase):
    def test_compile_keeps_the_graph_whole(self):
        for reduction in ("mean", "none"):
            hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
            target = torch.randint(0, 20, (6,))

            def step(h, w):
                return ops.linear_cross_entropy(2 * h, w, target, reduction=reduction).sum()

            torch.compile(step, backend="aot_eager", fullgraph=True)(hidden, weight).backward()
            compiled = hidden.grad.clone(), weight.grad.clone()
            hidden.grad = weight.grad = None
            step(hidden, weight).backward()
            for mine, eager in zip(compiled, (hidden.grad, weight.grad)):
                self.assert_close(mine, eager, 1e-6)

    def test_opcheck(self):
        rows, weight = torch.randn(4, 8, requires_grad=True), torch.randn(12, 8, requires_grad=True)
        target, options = torch.tensor([1, 2, 3, 4]), (-100, 1.0, 0.0, 0.0, 0.0, 1.0, 0, 0, 0)
        which = ("test_schema", "test_faketensor", "test_autograd_registration")
        library.opcheck(torch.ops.logitd.loss_rows.default, (rows, weight, None, target, *options), test_utils=which)
        arguments = (rows, weight, None, target, *options, 2, True, True, False)
        library.opcheck(torch.ops.logitd.loss_reduced.default, arguments, test_utils=which)

    def test_other_peer(self):
        if not hasattr(F, "linear_cross_entropy"):
            self.skipTest("torch has no linear_cross_entropy")
        hidden, weight, target = torch.randn(6, 8), torch.randn(20, 8), torch.randint(0, 20, (6,))
        self.assert_close(
            ops.linear_cross_entropy(hidden, weight, target), F.linear_cross_entropy(hidden, weight, target), 2e-6
        )


if __name__ == "__main__":
    unittest.main()

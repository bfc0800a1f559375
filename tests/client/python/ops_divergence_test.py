"""logitd.ops.linear_divergence beside torch in double precision."""

import itertools
import unittest

from ops_harness import DEVICES, TOLERANCE, OpsTestCase, double, ops, torch

from logitd.errors import InvalidArgument


def expected(kind, x, y, beta):
    p, q = x.log_softmax(-1), y.log_softmax(-1)
    if kind == "forward_kl":
        return (p.exp() * (p - q)).sum(-1)
    if kind == "reverse_kl":
        return (q.exp() * (q - p)).sum(-1)
    m = ((1 - beta) * p.exp() + beta * q.exp()).log()
    return beta * (q.exp() * (q - m)).sum(-1) + (1 - beta) * (p.exp() * (p - m)).sum(-1)


class DivergenceTest(OpsTestCase):
    def test_kinds_reductions_and_options(self):
        for device, kind, reduction, masked, dtype in itertools.product(
            DEVICES,
            ("forward_kl", "reverse_kl", "jensen_shannon"),
            ("mean", "sum", "none"),
            (False, True),
            (torch.float32, torch.bfloat16, torch.float16),
        ):
            note = (device, kind, reduction, masked, dtype)
            hidden = torch.randn(2, 5, 16, device=device).to(dtype).requires_grad_()
            weight = (0.5 * torch.randn(70, 16, device=device)).to(dtype).requires_grad_()
            bias = torch.randn(70, device=device, requires_grad=True)
            reference, reference_weight = torch.randn(2, 5, 12, device=device), torch.randn(70, 12, device=device)
            mask = (torch.arange(10, device=device) % 3 > 0).view(2, 5) if masked else None
            loss = ops.linear_divergence(
                hidden, weight, reference, reference_weight, kind=kind, beta=0.3, bias=bias, temperature=1.3,
                reference_temperature=0.9, softcap=20.0, mask=mask, reduction=reduction,
            )  # fmt: skip
            h, w, b = double(hidden), double(weight), double(bias)
            x = 20 * torch.tanh((h @ w.T + b) / 20) / 1.3
            rows = expected(kind, x, reference.double() @ reference_weight.double().T / 0.9, 0.3)
            counts = 10 if mask is None else mask.sum()
            rows = rows if mask is None else rows * mask
            own = rows if reduction == "none" else rows.sum() / (counts if reduction == "mean" else 1)
            upstream = torch.randn(loss.shape, device=device)
            loss.backward(upstream)
            own.backward(upstream.double())
            self.assert_close(loss, own, 2e-5, note)
            for mine, other in ((hidden, h), (weight, w), (bias, b)):
                self.assert_close(mine.grad, other.grad, max(2e-5, TOLERANCE[mine.dtype]), note)

    def test_a_student_beside_itself_has_nothing_to_learn(self):
        hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
        loss = ops.linear_divergence(hidden, weight, hidden.detach(), weight.detach(), kind="jensen_shannon")
        loss.backward()
        self.assertEqual((loss.item(), hidden.grad.abs().sum().item()), (0.0, 0.0))

    def test_compile_keeps_the_graph_whole(self):
        hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(30, 8)
        reference, reference_weight = torch.randn(4, 6), torch.randn(30, 6)
        for reduction in ("mean", "none"):

            def step(h):
                return ops.linear_divergence(2 * h, weight, reference, reference_weight, reduction=reduction).sum()

            hidden.grad = None
            torch.compile(step, backend="aot_eager", fullgraph=True)(hidden).backward()
            compiled = hidden.grad.clone()
            hidden.grad = None
            step(hidden).backward()
            self.assert_close(compiled, hidden.grad, 1e-6)

    def test_refusals(self):
        hidden, weight, other = torch.randn(4, 8), torch.randn(30, 8), torch.randn(29, 8)
        for text, arguments, options in (
            (r"kind: got 'kl', allowed forward_kl", (hidden, weight, hidden, weight), {"kind": "kl"}),
            (r"reference_weight: got 29 tokens, allowed 30", (hidden, weight, hidden, other), {}),
            (r"reference_hidden: got shape \[3\], allowed \[4\]", (hidden, weight, hidden[:3], weight), {}),
            (
                r"beta: got 1, allowed above 0",
                (hidden, weight, hidden, weight),
                {"kind": "jensen_shannon", "beta": 1.0},
            ),
            (r"temperature: got 0 at row 0", (hidden, weight, hidden, weight), {"temperature": 0.0}),
        ):
            with self.assertRaisesRegex(InvalidArgument, text):
                ops.linear_divergence(*arguments, **options)


if __name__ == "__main__":
    unittest.main()

"""logitd.ops.scaled_masked_softmax and FusedScaleMaskSoftmax beside torch in double precision."""

import itertools
import unittest

from ops_harness import DEVICES, DTYPES, TOLERANCE, OpsTestCase, double, ops, torch

from logitd.errors import InvalidArgument


def expected(scores, mask=None, scale=1.0, causal=False, window=(-1, -1), sinks=None):
    queries, keys = scores.shape[2:]
    own = torch.arange(queries, device=scores.device)[:, None] + keys - queries
    key = torch.arange(keys, device=scores.device)[None]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
    if causal:
        seen &= key <= own
    if window[0] >= 0:
        seen &= key >= own - window[0]
    if window[1] >= 0:
        seen &= key <= own + window[1]
    x = (scores * scale).masked_fill(~seen, -torch.inf)
    if mask is not None:
        x = x.masked_fill(mask, -torch.inf) if mask.dtype is torch.bool else x + mask
    if sinks is None:
        return torch.softmax(x, -1)
    x = torch.cat([x, sinks.view(1, -1, 1, 1).expand(*x.shape[:3], 1)], -1)
    return torch.softmax(x, -1)[..., :-1]


class AttentionTest(OpsTestCase):
    def test_masks_windows_and_sinks(self):
        bool_mask = torch.rand(2, 1, 5, 9) > 0.7
        bool_mask[..., 4:] = False  # each query sees a key
        masks = {"none": None, "bool": bool_mask, "added": torch.randn(1, 3, 1, 9), "keys": torch.randn(9)}
        for device, dtype, causal, window, kind, with_sinks in itertools.product(
            DEVICES, DTYPES, (False, True), ((-1, -1), (3, 1)), masks, (False, True)
        ):
            note = (device, dtype, causal, window, kind, with_sinks)
            scores = torch.randn(2, 3, 5, 9, device=device).to(dtype).requires_grad_()
            sinks = torch.randn(3, device=device).requires_grad_() if with_sinks else None
            mask = None if masks[kind] is None else masks[kind].to(device)
            options = {"scale": 0.7, "causal": causal, "window": window}
            probs = ops.scaled_masked_softmax(scores, mask, sinks=sinks, **options)
            own, own_sinks = double(scores), double(sinks)
            if mask is not None and mask.dtype is not torch.bool:
                mask = mask.double()
            reference = expected(own, mask, sinks=own_sinks, **options)
            upstream = torch.randn_like(probs)
            probs.backward(upstream)
            reference.backward(upstream.double())
            self.assert_close(probs, reference, TOLERANCE[dtype], note)
            self.assert_close(scores.grad, own.grad, TOLERANCE[dtype], note)
            if with_sinks:
                self.assert_close(sinks.grad, own_sinks.grad, 3 * TOLERANCE[dtype], note)

    def test_a_query_without_keys_has_zeros(self):
        scores = torch.randn(1, 1, 2, 4, requires_grad=True)
        mask = torch.tensor([[True] * 4, [False] * 4])
        probs = ops.scaled_masked_softmax(scores, mask)
        probs.sum().backward()
        self.assertEqual(probs[0, 0, 0].tolist(), [0.0] * 4)
        self.assertEqual(scores.grad[0, 0, 0].tolist(), [0.0] * 4)

    def test_wide_results_of_narrow_scores(self):
        scores = torch.randn(1, 2, 3, 8).bfloat16().requires_grad_()
        probs = ops.scaled_masked_softmax(scores, out_dtype=torch.float32)
        self.assert_close(probs, expected(scores.double()), 1e-6)
        probs.square().sum().backward()
        self.assertEqual(scores.grad.dtype, torch.bfloat16)

    def test_the_class_of_megatron(self):
        scores = torch.randn(2, 2, 4, 4).bfloat16()
        layer = ops.FusedScaleMaskSoftmax(False, True, "AttnMaskType.causal", True, None, True, 0.5)
        self.assert_close(layer(scores, None), expected(scores.double(), scale=0.5, causal=True), 1e-2)
        padding = torch.zeros(2, 1, 1, 4, dtype=torch.bool)
        padding[1, ..., 3] = True
        layer = ops.FusedScaleMaskSoftmax(True, False, "padding", True, None, True, None)
        half = scores.half()
        self.assert_close(layer(half, padding), expected(half.double(), padding), 2e-3)
        offset = torch.zeros(2)
        self.assert_close(layer(half, None, offset), expected(half.double(), sinks=offset.double()), 2e-3)
        with self.assertRaisesRegex(InvalidArgument, "input_in_fp16: got True beside input_in_bf16"):
            ops.FusedScaleMaskSoftmax(True, True, "causal")
        with self.assertRaisesRegex(InvalidArgument, "softmax_in_fp32: got False beside a scale"):
            ops.FusedScaleMaskSoftmax(True, False, "causal", True, None, False, 0.5)

    def test_compile_keeps_the_graph_whole(self):
        scores, sinks = torch.randn(1, 2, 4, 4, requires_grad=True), torch.randn(2, requires_grad=True)

        def step(s, k):
            return ops.scaled_masked_softmax(2 * s, causal=True, sinks=k).square().sum()

        torch.compile(step, backend="aot_eager", fullgraph=True)(scores, sinks).backward()
        compiled = scores.grad.clone(), sinks.grad.clone()
        scores.grad = sinks.grad = None
        step(scores, sinks).backward()
        for mine, eager in zip(compiled, (scores.grad, sinks.grad)):
            self.assert_close(mine, eager, 1e-7)

    def test_refusals(self):
        scores = torch.randn(1, 2, 3, 4)
        for text, arguments, options in (
            (r"scores: got shape \[2, 3, 4\]", (scores[0],), {}),
            (r"scores dtype: got float64", (scores.double(),), {}),
            (
                r"mask: got shape \[1, 1, 3, 5\], allowed what broadcasts to \[1, 2, 3, 4\]",
                (scores, torch.ones(3, 5)),
                {},
            ),
            (r"mask dtype: got int64", (scores, torch.ones(3, 4, dtype=torch.int64)), {}),
            (r"sinks: got shape \[3\], allowed \[2\]", (scores,), {"sinks": torch.zeros(3)}),
            (r"window: got -2, allowed -1..", (scores,), {"window": (-2, 0)}),
            (r"out_dtype: got torch.bfloat16", (scores,), {"out_dtype": torch.bfloat16}),
        ):
            with self.assertRaisesRegex(InvalidArgument, text):
                ops.scaled_masked_softmax(*arguments, **options)


if __name__ == "__main__":
    unittest.main()

"""logitd.ops.sample, softmax_topk and linear_cross_entropy give what the server gives on its CPU."""

import unittest

import logitd
import numpy as np
from harness import RunningServer
from ops_harness import OpsTestCase, ops, torch

VOCAB, ROWS = 300, 24
# Every filter and edit, one by one and together.
SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.05},
    {"typical_p": 0.7},
    {"top_n_sigma": 1.0},
    {"xtc_threshold": 0.05, "xtc_probability": 0.8},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3, "prompt_tokens": 1},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "position": 12},
    {"watermark_key": 2**64 - 5, "watermark_width": 2, "draws": 0},
)


class ServerTest(OpsTestCase):
    def setUp(self):
        super().setUp()
        server = RunningServer()
        self.addCleanup(server.close)
        self.client = logitd.Client(server.unix)
        self.addCleanup(self.client.close)
        self.logits = 3 * torch.randn(ROWS, VOCAB)

    def test_the_tokens_of_each_seed(self):
        seeds = torch.arange(ROWS) * 977
        history = [[(7 * row + i) % VOCAB for i in range(2 + row % 3)] for row in range(ROWS)]
        bias = [{row: 2.0, 299: -float("inf")} for row in range(ROWS)]
        mask = torch.rand(ROWS, VOCAB) > 0.3
        extra = torch.arange(ROWS * 2).view(ROWS, 2)
        asked = {"top_logprobs": 3, "want_rank": True, "want_entropy": True, "draws": 2, "want_support": 4}
        for mode in ("raw", "processed", "tempered"):
            for params in SAMPLING:
                if mode == "tempered" and params.get("temperature") == 0.0:
                    continue
                got = ops.sample(
                    self.logits, seed=seeds, history=history, bias=bias, mask=mask, extra_ids=extra, logprob_mode=mode,
                    **{**asked, **params},
                )  # fmt: skip
                own = self.client.sample(
                    self.logits.numpy(), seed=seeds.numpy(), history=history, logit_bias=bias, logprob_mode=mode,
                    allowed_tokens=mask.numpy(), extra_ids=[row.tolist() for row in extra], **{**asked, **params},
                )  # fmt: skip
                note = (mode, params)
                for name in ("tokens", "logprobs", "ranks", "logsumexp", "support_size", "entropies", "raw_entropies"):
                    mine = getattr(got, name).numpy()
                    np.testing.assert_array_equal(mine, getattr(own, name), err_msg=f"{name} {note}")
                drawn = ("draw_tokens", "draw_logprobs") if got.draw_tokens is not None else ()
                for name in ("top_ids", "top_logprobs", "extra_logprobs", *drawn):
                    np.testing.assert_array_equal(
                        getattr(got, name).numpy(), getattr(own, name).dense(), err_msg=f"{name} {note}"
                    )
                for row, size in enumerate(own.support_size.clip(max=4)):
                    self.assertEqual(got.support_ids[row, :size].tolist(), own.support_ids[row].tolist(), note)

    def test_parameters_of_each_row(self):
        generator = torch.Generator().manual_seed(11)

        def each(low, high):
            return low + (high - low) * torch.rand(ROWS, generator=generator)

        params = {
            "temperature": each(0.2, 2.0),
            "top_p": each(0.3, 1.0),
            "min_p": each(0.0, 0.1),
            "typical_p": each(0.5, 1.0),
            "top_n_sigma": each(1.0, 4.0),
            "xtc_probability": each(0.0, 1.0),
            "top_k": torch.randint(-1, 60, (ROWS,), generator=generator),
            "position": torch.randint(0, 2**62, (ROWS,), generator=generator),
        }
        got = ops.sample(self.logits, seed=3, **params)
        own = self.client.sample(self.logits.numpy(), seed=3, **{name: of.numpy() for name, of in params.items()})
        np.testing.assert_array_equal(got.tokens.numpy(), own.tokens)
        np.testing.assert_array_equal(got.logprobs.numpy(), own.logprobs)

    def test_the_most_probable_tokens(self):
        got = ops.softmax_topk(self.logits, 7, temperature=0.6)
        own = self.client.top_k(self.logits.numpy(), k=7, temperature=0.6)
        np.testing.assert_array_equal(got.indices.numpy(), own.indices.dense())
        np.testing.assert_array_equal(got.probs.numpy(), own.probs.dense())
        np.testing.assert_array_equal(got.logsumexp.numpy(), own.logsumexp)

    def test_losses(self):
        target = torch.arange(ROWS)
        target[3] = -100
        options = {"label_smoothing": 0.1, "z_loss": 1e-3, "temperature": 0.9, "softcap": 8.0, "smoothing": "megatron"}
        got = ops.cross_entropy(self.logits, target, stats=True, reduction="none", **options)
        own = self.client.score(self.logits.numpy(), targets=target.numpy(), **options)
        np.testing.assert_array_equal(got.losses.numpy(), own.losses)
        np.testing.assert_array_equal(got.logsumexp.numpy(), own.logsumexp)


if __name__ == "__main__":
    unittest.main()

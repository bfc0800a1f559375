"""logitd.ops.softmax_topk and sample beside torch in double precision and beside the server's rules."""

import itertools
import unittest

from ops_harness import DEVICES, DTYPES, OpsTestCase, ops, torch

from logitd.errors import InvalidArgument


class TopKTest(OpsTestCase):
    def test_probabilities_are_of_the_whole_row(self):
        for device, dtype in itertools.product(DEVICES, DTYPES):
            logits = torch.randperm(3 * 700, device=device).view(3, 700).to(dtype)
            logits = (logits - logits.mean()) / 64
            temperature = torch.tensor([0.5, 1.0, 2.0], device=device)
            got = ops.softmax_topk(logits, 5, temperature=temperature)
            x = logits.double() / temperature[:, None]
            order = torch.sort(logits.double(), dim=-1, descending=True, stable=True).indices[:, :5]
            self.assertTrue(torch.equal(got.indices, order))
            self.assert_close(got.probs, x.softmax(-1).gather(1, order), 1e-6)
            self.assert_close(got.logsumexp, x.logsumexp(-1), 4e-6)

    def test_hidden_states(self):
        hidden, weight, bias = torch.randn(2, 3, 16), torch.randn(90, 16), torch.randn(90)
        got = ops.softmax_topk(hidden, 4, weight=weight, head_bias=bias, softcap=6.0, scale=0.5)
        x = 6 * torch.tanh((0.5 * hidden.double() @ weight.double().T + bias) / 6)
        values, indices = x.softmax(-1).topk(4)
        self.assertTrue(torch.equal(got.indices, indices))
        self.assert_close(got.probs, values, 2e-6)

    def test_refusals(self):
        logits = torch.randn(2, 8)
        for text, options in (
            (r"k: got 9, allowed 1..8", {"k": 9}),
            (r"k: got float", {"k": 1.5}),
            (r"temperature: got 0 at row 0", {"k": 1, "temperature": 0.0}),
            (r"temperature: got -1.0 at row 1", {"k": 1, "temperature": torch.tensor([1.0, -1.0])}),
            (r"temperature: got shape \[3\], allowed \[2\]", {"k": 1, "temperature": torch.ones(3)}),
        ):
            with self.assertRaisesRegex(InvalidArgument, text):
                ops.softmax_topk(logits, **options)


class SampleTest(OpsTestCase):
    def test_greedy_takes_the_edits(self):
        for device in DEVICES:
            logits = torch.tensor([[0.0, 3, 2, 1], [5, 1, 4, 0], [1, 1, 1, 1]], device=device)

            def greedy(**options):
                return ops.sample(logits, seed=0, temperature=0.0, **options).tokens.tolist()

            self.assertEqual(greedy(), [1, 0, 0])
            self.assertEqual(greedy(bias={2: 9.0}), [2, 2, 2])
            self.assertEqual(greedy(bias=[{3: 9.0}, {}, {1: 0.5}]), [3, 0, 1])
            self.assertEqual(greedy(history=[[1], [0, 0], []], presence_penalty=6.0), [2, 2, 0])
            mask = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]], dtype=torch.bool, device=device)
            self.assertEqual(greedy(mask=mask), [2, 2, 3])
            history = torch.tensor([[1, 1], [0, 0], [0, 1]], device=device)
            self.assertEqual(greedy(history=history, frequency_penalty=2.0), [2, 2, 2])

    def test_tokens_follow_the_distribution(self):
        for device in DEVICES:
            logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0], device=device).expand(40000, 5)
            seeds = torch.arange(40000, device=device)
            got = ops.sample(logits, seed=seeds, temperature=1.5, top_k=3, logprob_mode="processed")
            kept = torch.tensor([2.0, 1.0, -torch.inf, -torch.inf, 3.0], dtype=torch.float64) / 1.5
            share = torch.bincount(got.tokens.cpu(), minlength=5) / 40000
            self.assert_close(share, kept.softmax(-1), 0.012)
            self.assert_close(got.logprobs, kept.log_softmax(-1)[got.tokens.cpu()], 4e-6)
            again = ops.sample(logits, seed=seeds, temperature=1.5, top_k=3)
            self.assertTrue(torch.equal(got.tokens, again.tokens))

    def test_everything_that_can_be_asked_for(self):
        logits = 2 * torch.randn(2, 3, 40)
        flat = logits.reshape(6, 40)
        extra = torch.arange(12).view(6, 2)
        got = ops.sample(
            logits, seed=torch.arange(6), top_k=torch.tensor([1, 2, 3, 4, 5, 40]), want_rank=True, top_logprobs=3,
            want_support=4, draws=2, want_entropy=True, extra_ids=extra, position=7,
        )  # fmt: skip
        logprobs = flat.double().log_softmax(-1)
        tokens = got.tokens.view(6)
        self.assert_close(got.logprobs.view(6), logprobs.gather(1, tokens[:, None])[:, 0], 4e-6)
        values, ids = logprobs.topk(3)
        self.assertTrue(torch.equal(got.top_ids.view(6, 3), ids))
        self.assert_close(got.top_logprobs.view(6, 3), values, 4e-6)
        self.assert_close(got.extra_logprobs.view(6, 2), logprobs.gather(1, extra), 4e-6)
        ranks = (flat > flat.gather(1, tokens[:, None])).sum(-1) + 1
        self.assertTrue(torch.equal(got.ranks.view(6), ranks))
        self.assertEqual(got.support_size.view(6).tolist(), [1, 2, 3, 4, 5, 40])
        self.assert_close(got.raw_entropies.view(6), -(logprobs.exp() * logprobs).sum(-1), 4e-6)
        self.assertTrue(torch.equal(got.draw_tokens[..., 0], got.tokens))
        self.assertEqual(got.support_ids.view(6, 4)[0].tolist(), [flat[0].argmax().item(), -1, -1, -1])

    def test_hidden_states_draw_the_tokens_of_their_logits(self):
        hidden, weight = torch.randn(50, 16), torch.randn(90, 16)
        seeds = torch.arange(50)
        got = ops.sample(hidden, weight=weight, seed=seeds, top_p=0.9)
        own = ops.sample(hidden @ weight.T, seed=seeds, top_p=0.9)
        self.assertGreaterEqual((got.tokens == own.tokens).sum().item(), 49)  # a border may round

    def test_rows_with_nan_and_without_tokens(self):
        logits = torch.randn(3, 8)
        logits[0, 2], logits[1, :] = torch.nan, -torch.inf
        got = ops.sample(logits, seed=1)
        self.assertEqual(got.tokens[:2].tolist(), [-1, -1])
        self.assertEqual(got.logprobs[:2].tolist(), [-torch.inf, -torch.inf])
        self.assertGreaterEqual(got.tokens[2].item(), 0)

    def test_compile_keeps_the_graph_whole(self):
        logits = torch.randn(5, 30)

        def step(x):
            top = ops.softmax_topk(2 * x, 3)
            return ops.sample(2 * x, seed=3, top_k=4).tokens, top.probs

        for mine, eager in zip(torch.compile(step, backend="aot_eager", fullgraph=True)(logits), step(logits)):
            self.assertTrue(torch.equal(mine, eager))

    def test_refusals(self):
        logits = torch.randn(4, 8)
        for text, options in (
            (r"top_p: got 2 at row 0, allowed", {"top_p": 2.0}),
            (r"top_p: got 2.0 at row 3, allowed > 0 and <= 1", {"top_p": torch.tensor([0.5, 0.5, 0.5, 2.0])}),
            (r"topp: got a parameter of that name, allowed temperature", {"topp": 0.9}),
            (r"history: got a value or a list at row 2, allowed tokens", {"history": [[1], [2], [8], [3]]}),
            (r"history: got 3 lists, allowed 4", {"history": [[1], [2], [3]]}),
            (r"bias: got a value or a list at row 0", {"bias": {8: 1.0}}),
            (r"top_k: got str, allowed a whole number", {"top_k": "x"}),
            (r"seed: got float", {"seed": 1.5}),
            (r"mask: got shape \[4\], allowed \[4, 8\]", {"mask": torch.ones(4, dtype=torch.bool)}),
            (r"mask dtype: got float32, allowed bool", {"mask": torch.ones(4, 8)}),
            (r"extra_ids: got a value or a list at row 0", {"extra_ids": torch.full((4, 1), 8)}),
            (r"logprob_mode: got 'x'", {"logprob_mode": "x"}),
            (r"top_logprobs: got 9, allowed 0..8", {"top_logprobs": 9}),
            (r"prompt_tokens: got a value or a list at row 0", {"prompt_tokens": 2, "history": [[1]] * 4}),
        ):
            with self.assertRaisesRegex(InvalidArgument, text):
                ops.sample(logits, **{"seed": 1, **options})


if __name__ == "__main__":
    unittest.main()

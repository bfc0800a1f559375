"""A loop of reinforcement learning in the shape of GRPO: tokens sampled with their supports from hidden states, a step
of training in torch, the head updated from an arena, the old tokens scored under both versions. Skipped without torch.
"""

import os
import tempfile
import unittest

import logitd
from harness import RunningServer, ServerTestCase
from rows_test import write_head

try:
    import torch
except ImportError:
    raise unittest.SkipTest("torch is not installed") from None

VOCAB, HIDDEN = 500, 64
PROMPTS, GROUP, LENGTH = 6, 8, 5  # a group: completions of one prompt
FILTERS = {"temperature": 0.9, "top_k": 60, "top_p": 0.95}


class Trunk(torch.nn.Module):
    """What stands before the head: a hidden state for the token before."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN)
        self.mix = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, tokens):
        return torch.tanh(self.mix(self.embedding(tokens)))


def logprobs_within(hidden, weight, tokens, supports, temperature):
    """torch's own log-probabilities of the tokens in a softmax over their rows' supports."""
    logits = hidden @ weight.T / temperature
    mask = torch.full_like(logits, -torch.inf)
    for row, ids in enumerate(supports):
        mask[row, ids.long()] = 0
    return torch.log_softmax(logits + mask, dim=-1).gather(1, tokens[:, None])[:, 0]


class GrpoTest(ServerTestCase):
    @classmethod
    def setUpClass(cls):
        torch.manual_seed(7)
        cls.trunk = Trunk().requires_grad_(False)
        cls.weight = torch.randn(VOCAB, HIDDEN) * 0.4
        cls.root = tempfile.TemporaryDirectory()
        write_head(os.path.join(cls.root.name, "policy"), cls.weight.numpy())
        cls.server = RunningServer(f"--head-root={cls.root.name}", "--max-arena-bytes=64MiB", arenas=True)

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        cls.root.cleanup()

    def rollouts(self, client):
        """One row for each token: hidden states, and what sample answered."""
        before = torch.arange(PROMPTS).repeat_interleave(GROUP)
        steps = []
        for place in range(LENGTH):
            hidden = self.trunk(before)
            drawn = client.sample(
                hidden=hidden,
                head="policy",
                seeds=11,
                position=place,
                want_support=VOCAB,
                logprob_mode="processed",
                head_version=self.version,
                **FILTERS,
            )
            self.assertTrue(drawn.ok.all())
            steps.append((hidden, drawn))
            before = drawn.tokens.long()
        return steps

    def test_a_policy_that_did_not_change_has_the_ratio_1_and_one_that_did_has_torchs(self):
        client = logitd.Client(self.server.unix)
        arena = logitd.Arena.lease(self.server.arena, 8 << 20)
        self.addCleanup(arena.close)
        self.version = client.load_head("policy", "policy").head_version
        client.load_head("reference", "policy")
        steps = self.rollouts(client)

        def score(head, hidden, drawn, **more):
            return client.score(
                hidden=hidden,
                head=head,
                targets=drawn.tokens,
                support_ids=drawn.support_ids,
                temperature=FILTERS["temperature"],
                **more,
            ).target_logprobs

        for hidden, drawn in steps:
            self.assertGreater(int(drawn.support_size.min()), 1)
            same = score("policy", hidden, drawn, head_version=self.version)
            self.assertTrue(torch.equal(torch.exp(same - drawn.logprobs), torch.ones_like(same)))
            self.assertTrue(torch.equal(same, drawn.logprobs))

        # Even tokens are rewarded; an advantage is relative to the completion's group.
        rewards = sum((drawn.tokens % 2 == 0).float() for _, drawn in steps).view(PROMPTS, GROUP)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).view(-1)
        weight = self.weight.clone().requires_grad_()
        optimizer = torch.optim.SGD([weight], lr=2.0)
        loss = 0
        for hidden, drawn in steps:
            new = logprobs_within(hidden, weight, drawn.tokens.long(), drawn.support_ids, FILTERS["temperature"])
            loss = loss - (torch.exp(new - drawn.logprobs) * advantages).mean()
        loss.backward()
        optimizer.step()

        place = arena.empty((VOCAB, HIDDEN))
        place[:] = weight.detach().numpy()
        updated = client.update_head("policy", weight=place, arena=arena)
        self.assertGreater(updated.head_version, self.version)
        gain = 0.0
        for hidden, drawn in steps:
            with self.refused(logitd.FailedPrecondition, "head_version"):
                score("policy", hidden, drawn, head_version=self.version)
            old = score("reference", hidden, drawn)
            self.assertTrue(torch.equal(old, drawn.logprobs))
            new = score("policy", hidden, drawn, head_version=updated.head_version)
            want = logprobs_within(
                hidden, weight.detach(), drawn.tokens.long(), drawn.support_ids, FILTERS["temperature"]
            )
            torch.testing.assert_close(new, want, rtol=0, atol=2e-5)
            gain += float(((new - old) * advantages).mean())
        self.assertGreater(gain, 0)  # what did better has become more probable

"""generate of transformers with logitd's sampling, on a small model with random weights. Skipped where it is
missing."""

import tempfile
import unittest

import logitd
import numpy as np
from harness import RunningServer, ServerTestCase

try:
    import torch
    import transformers
    from logitd.transformers import Sampler, generate
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from None

SAMPLING = dict(temperature=0.9, top_k=40, top_p=0.95)


def tiny(kind=transformers.LlamaConfig, **more):
    torch.manual_seed(3)
    config = kind(
        vocab_size=311,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.4,
        **more,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


class GenerateTest(ServerTestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.model = tiny()
        cls.model.save_pretrained(cls.folder.name)
        cls.server = RunningServer(f"--head=tiny={cls.folder.name}")
        cls.client = logitd.Client(cls.server.unix)
        cls.prompt = dict(
            input_ids=torch.tensor([[0, 0, 5, 9], [7, 7, 8, 2], [3, 1, 4, 1]]),
            attention_mask=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]),
        )

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        super().tearDownClass()
        cls.folder.cleanup()

    def drawn(self, seeds, sampling):
        """The tokens by a loop of forward passes without a cache, each row by its own calls."""
        rows = []
        for ids, mask, seed in zip(self.prompt["input_ids"], self.prompt["attention_mask"], seeds):
            tokens = ids[mask.bool()]
            for position in range(8):
                with torch.no_grad():
                    logits = self.model(tokens[None]).logits[0, -1]
                token = self.client.sample(logits, seed=seed, position=position, **sampling).tokens
                tokens = torch.cat([tokens, token.long()])
            rows.append(tokens[-8:].tolist())
        return rows

    def test_greedy_is_that_of_transformers(self):
        want = self.model.generate(**self.prompt, do_sample=False, max_new_tokens=12)
        for head in (None, "tiny"):
            got = generate(
                self.model,
                self.client,
                **self.prompt,
                seed=0,
                head=head,
                sampling=dict(temperature=0),
                max_new_tokens=12,
            )
            self.assertTrue(torch.equal(got, want), head)

    def test_tokens_are_those_of_the_rows_seeds_with_logits_and_with_a_head(self):
        want = self.drawn([20, 21, 22], SAMPLING)
        for head in (None, "tiny"):
            got = generate(
                self.model, self.client, **self.prompt, seed=20, head=head, sampling=SAMPLING, max_new_tokens=8
            )
            self.assertEqual(got[:, -8:].tolist(), want, head)
        own = generate(self.model, self.client, **self.prompt, seed=[22, 21, 20], sampling=SAMPLING, max_new_tokens=8)
        self.assertEqual(own[:, -8:].tolist()[1], want[1])
        self.assertNotEqual(own[:, -8:].tolist()[0], want[0])

    def test_a_seed_may_be_of_any_whole_number_type(self):
        want = self.drawn([20, 21, 22], SAMPLING)
        more = dict(sampling=SAMPLING, max_new_tokens=8)
        for seed in (
            np.int64(20),
            np.uint8(20),
            np.array(20),
            torch.tensor(20),
            np.array([20, 21, 22]),
            torch.tensor([20, 21, 22]),
        ):
            got = generate(self.model, self.client, **self.prompt, seed=seed, **more)
            self.assertEqual(got[:, -8:].tolist(), want, repr(seed))

    def test_what_leaves_the_choice_to_logitd_may_be_said(self):
        want = generate(self.model, self.client, **self.prompt, seed=5, sampling=SAMPLING, max_new_tokens=8)
        said = dict(do_sample=False, num_beams=1, temperature=1.0, top_p=None, logits_processor=None)
        got = generate(self.model, self.client, **self.prompt, seed=5, sampling=SAMPLING, max_new_tokens=8, **said)
        self.assertTrue(torch.equal(got, want))
        config = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, temperature=1.0, pad_token_id=0)
        got = generate(self.model, self.client, **self.prompt, seed=5, sampling=SAMPLING, generation_config=config)
        self.assertTrue(torch.equal(got, want))

    def test_how_the_model_itself_would_draw_does_not_count(self):
        want = generate(self.model, self.client, **self.prompt, seed=5, sampling=SAMPLING, max_new_tokens=8)
        own = self.model.generation_config
        self.addCleanup(setattr, self.model, "generation_config", own)
        self.model.generation_config = transformers.GenerationConfig(
            do_sample=True, temperature=0.3, top_k=4, penalty_alpha=0.6, num_beams=2, pad_token_id=0
        )
        got = generate(self.model, self.client, **self.prompt, seed=5, sampling=SAMPLING, max_new_tokens=8)
        self.assertTrue(torch.equal(got, want))

    def test_penalties_see_the_tokens_so_far(self):
        sampling = dict(temperature=0, frequency_penalty=1e4)
        got = generate(
            self.model, self.client, **self.prompt, seed=0, head="tiny", sampling=sampling, max_new_tokens=40
        )
        for row in got:
            drawn = row[4:].tolist()
            self.assertEqual(len(set(drawn)), 40)
            self.assertEqual(set(drawn) & set(row[:4].tolist()), set())

    def test_processors_of_transformers_have_their_effect_on_logits_and_are_refused_with_a_head(self):
        first = self.model.generate(**self.prompt, do_sample=False, max_new_tokens=1)[:, -1].tolist()
        banned = dict(suppress_tokens=first, max_new_tokens=1)
        got = generate(self.model, self.client, **self.prompt, seed=0, sampling=dict(temperature=0), **banned)
        self.assertEqual(set(got[:, -1].tolist()) & set(first), set())
        with self.refused(logitd.InvalidArgument, "logits_processor: got one that changes logits"):
            generate(self.model, self.client, **self.prompt, seed=0, head="tiny", **banned)

    def test_the_model_has_its_head_again_also_after_an_error(self):
        own = self.model.get_output_embeddings()
        with self.refused(logitd.InvalidArgument, "top_p: got 7"):
            generate(
                self.model, self.client, **self.prompt, seed=0, head="tiny", sampling=dict(top_p=7.0), max_new_tokens=2
            )
        self.assertIs(self.model.get_output_embeddings(), own)

    def test_what_cannot_work_is_refused(self):
        for params, text in (
            (dict(do_sample=True), "do_sample: got True, allowed False"),
            (dict(num_beams=4), "num_beams: got 4, allowed 1"),
            (dict(temperature=0.7), "temperature: got 0.7"),
            (dict(sampling=dict(history=[1])), "sampling: got history"),
            (dict(top_k=50), "top_k: got 50, allowed 0"),
            (dict(typical_p=0.5), "typical_p: got 0.5, allowed 1.0"),
            (dict(penalty_alpha=0.6), "penalty_alpha: got 0.6, allowed 0.0"),
            (dict(num_return_sequences=2), "num_return_sequences: got 2, allowed 1"),
            (dict(assistant_model=self.model), "assistant_model: got LlamaForCausalLM"),
            (dict(generation_config="greedy"), "generation_config: got 'greedy', allowed a transformers.GenerationConfig"),
            (dict(seed=[1, 2]), "seed: got 2 seeds, allowed one, or 3 (rows)"),
            (dict(seed=[1]), "seed: got 1 seeds, allowed one, or 3 (rows)"),
            (dict(seed=[[1, 2, 3]]), "seed: got 2 dimensions"),
            (dict(seed=1.5), "seed: got 1.5, allowed whole numbers"),
        ):
            params = {"seed": 0, **params}
            with self.refused(logitd.InvalidArgument, text):
                generate(self.model, self.client, **self.prompt, max_new_tokens=2, **params)
        for name, value in (
            ("do_sample", True),
            ("temperature", 0.3),
            ("num_beams", 3),
            ("typical_p", 0.5),
            ("penalty_alpha", 0.6),
            ("num_return_sequences", 2),
        ):
            config = transformers.GenerationConfig(max_new_tokens=2)
            setattr(config, name, value)
            with self.refused(logitd.InvalidArgument, f"generation_config.{name}: got {value}, allowed"):
                generate(self.model, self.client, **self.prompt, seed=0, generation_config=config)
        async_client = logitd.AsyncClient  # the class, or an object of it
        with self.refused(logitd.InvalidArgument, "client: got <class", "allowed a logitd.Client"):
            generate(self.model, async_client, **self.prompt, seed=0, max_new_tokens=2)
        with self.refused(logitd.NotFound, "tiny"):
            generate(self.model, self.client, **self.prompt, seed=0, head="large", max_new_tokens=2)
        with self.assertRaisesRegex(RuntimeError, "attached"):
            self.model.generate(
                **self.prompt,
                do_sample=False,
                max_new_tokens=2,
                logits_processor=[Sampler(self.client, seed=0, head="tiny")],
            )
        torch.manual_seed(4)
        wide = tiny()
        wide.config.hidden_size = 52
        with self.refused(logitd.InvalidArgument, "of hidden size 48, allowed is the model's: 52"):
            generate(wide, self.client, **self.prompt, seed=0, head="tiny", max_new_tokens=2)

    def test_a_row_without_a_token_to_draw_is_an_error(self):
        with self.assertRaisesRegex(ValueError, "row 0: EMPTY_SUPPORT"):
            generate(
                self.model,
                self.client,
                **self.prompt,
                seed=0,
                max_new_tokens=2,
                sampling=dict(logit_bias={token: float("-inf") for token in range(311)}),
            )

    def test_a_models_own_softcap_is_the_heads(self):
        model = tiny(transformers.Gemma2Config, final_logit_softcapping=2.0, head_dim=12)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            server = RunningServer(f"--head=gemma={folder}")
            self.addCleanup(server.close)
            with logitd.Client(server.unix) as client:
                want, got = (
                    generate(model, client, **self.prompt, seed=5, head=head, sampling=SAMPLING, max_new_tokens=8)
                    for head in (None, "gemma")
                )
        self.assertTrue(torch.equal(want, got))

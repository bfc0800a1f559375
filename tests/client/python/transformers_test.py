"""generate of transformers with logitd's sampling, on a small model with random weights. Skipped where it is
missing."""

import copy
import inspect
import re
import tempfile
import unittest
from concurrent import futures

import logitd
import numpy as np
from harness import RunningServer, ServerTestCase

try:
    import torch
    import transformers
    from logitd._generation import BY_PROCESSOR, FIELDS
    from logitd.transformers import Sampler, generate
    from tiny_models import tiny
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from None

SAMPLING = dict(temperature=0.9, top_k=40, top_p=0.95)


def config_of(**fields):
    """A GenerationConfig for the prompts."""
    return transformers.GenerationConfig(max_new_tokens=12, pad_token_id=0, **fields)


class TableTest(unittest.TestCase):
    def test_every_field_of_generation_config_has_its_place(self):
        fields = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
        self.assertEqual(fields - set(FIELDS), set())

    def test_every_argument_of_generate_has_its_place(self):
        arguments = set(inspect.signature(transformers.GenerationMixin.generate).parameters)
        plain = {"self", "inputs", "generation_config", "logits_processor", "stopping_criteria", "synced_gpus", "kwargs"}
        plain |= {"streamer", "negative_prompt_ids", "negative_prompt_attention_mask", "use_model_defaults"}
        self.assertEqual(arguments - set(FIELDS) - plain, set())

    def test_every_processor_of_generate_has_its_field(self):
        text = inspect.getsource(transformers.GenerationMixin._get_logits_processor)
        made = set(re.findall(r"(\w+(?:Processor|Warper|Penalty|Normalization))\(", text)) - {"_get_logits_processor"}
        self.assertGreater(len(made), 15)
        self.assertEqual(made - {name for name in BY_PROCESSOR}, set())


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
        with self.refused(logitd.InvalidArgument, f"suppress_tokens: got {first}, allowed None with a head"):
            generate(self.model, self.client, **self.prompt, seed=0, head="tiny", **banned)

    def greedy(self, head=None, sampling=None, own=None, model=None, **more):
        """The tokens drawn at temperature 0; own: the model's generation_config, besides its own."""
        model = model or self.model
        kept = model.generation_config
        try:
            model.generation_config = copy.deepcopy(kept)
            for name, value in (own or {}).items():
                setattr(model.generation_config, name, value)
            more = {"max_new_tokens": 12, **self.prompt, **more}
            sampling = dict(temperature=0, **(sampling or {}))
            return generate(model, self.client, seed=0, head=head, sampling=sampling, **more).tolist()
        finally:
            model.generation_config = kept

    def test_a_repetition_penalty_is_applied_once_wherever_it_comes_from(self):
        ours = dict(repetition_penalty=1.15)
        plain, want, twice = (
            self.model.generate(**self.prompt, do_sample=False, max_new_tokens=40, repetition_penalty=penalty).tolist()
            for penalty in (1.0, 1.15, 1.15**2)
        )
        for row in range(3):
            self.assertNotIn(want[row], (plain[row], twice[row]))
        config = transformers.GenerationConfig(max_new_tokens=40, pad_token_id=0, **ours)
        sources = (
            dict(sampling=ours),
            ours,
            dict(own=ours),
            dict(generation_config=config),
            dict(sampling=ours, own=ours),
            dict(sampling=ours, own=dict(repetition_penalty=1.3)),
            dict(own=dict(repetition_penalty=1.3), **ours),
            dict(sampling=ours, **ours),
            dict(sampling=dict(repetition_penalty=[1.15] * 3), **ours),
            dict(sampling=ours, generation_config=config),
            dict(renormalize_logits=True, **ours),
        )
        for head in (None, "tiny"):
            for source in sources:
                with self.subTest(head=head, source=source):
                    self.assertEqual(self.greedy(head, max_new_tokens=40, **source), want)
            for source in (dict(repetition_penalty=1.0, own=ours), dict(own=dict(repetition_penalty=None))):
                self.assertEqual(self.greedy(head, max_new_tokens=40, **source), plain)
        # A processor of the caller's sees what it is told to see: here all tokens, with the padding.
        processors = [transformers.RepetitionPenaltyLogitsProcessor(1.15)]
        want = self.greedy(max_new_tokens=40, logits_processor=processors)
        for source in (dict(), dict(own=ours), dict(sampling=ours)):
            for head in (None, "tiny"):
                with self.subTest(head=head, source=source):
                    self.assertEqual(self.greedy(head, max_new_tokens=40, logits_processor=processors, **source), want)

    def test_the_other_penalties_of_sampling_stay_beside_a_penalty_of_transformers(self):
        ours = dict(repetition_penalty=1.1)
        sampling = dict(frequency_penalty=0.7, presence_penalty=0.9)
        want = self.greedy("tiny", sampling={**ours, **sampling})
        self.assertNotEqual(want, self.greedy("tiny", ours))
        self.assertNotEqual(want, self.greedy("tiny", sampling))
        for source in (ours, dict(own=ours)):
            for head in (None, "tiny"):
                self.assertEqual(self.greedy(head, sampling, **source), want)

    def test_two_penalties_that_differ_are_refused(self):
        config = transformers.GenerationConfig(max_new_tokens=2, repetition_penalty=1.5)
        processor = transformers.RepetitionPenaltyLogitsProcessor(1.5)
        for head in (None, "tiny"):
            for where, source in (
                ("repetition_penalty: got a repetition_penalty of 1.5 beside 1.3", dict(repetition_penalty=1.5)),
                ("generation_config.repetition_penalty: got a repetition_penalty of 1.5", dict(generation_config=config)),
                ("logits_processor: got a repetition_penalty of 1.5 beside 1.3", dict(logits_processor=[processor])),
            ):
                with self.refused(logitd.InvalidArgument, where, "allowed in one of them"):
                    self.greedy(head, dict(repetition_penalty=1.3), **source)
        two = [transformers.RepetitionPenaltyLogitsProcessor(1.5), transformers.RepetitionPenaltyLogitsProcessor(1.2)]
        with self.refused(logitd.InvalidArgument, "logits_processor: got RepetitionPenaltyLogitsProcessor", "only penalty"):
            self.greedy("tiny", logits_processor=two)

    def test_a_penalty_for_the_prompt_is_logitds_where_it_is_the_only_one(self):
        for penalty in (0.4, 3.0):
            want = self.model.generate(
                **self.prompt, do_sample=False, max_new_tokens=12, encoder_repetition_penalty=penalty
            ).tolist()
            ours = dict(encoder_repetition_penalty=penalty)
            processor = transformers.EncoderRepetitionPenaltyLogitsProcessor(penalty, self.prompt["input_ids"])
            for source in (ours, dict(own=ours), dict(logits_processor=[processor])):
                for head in (None, "tiny"):
                    self.assertEqual(self.greedy(head, **source), want)
        both = dict(encoder_repetition_penalty=3.0, repetition_penalty=1.2)
        self.assertEqual(
            self.greedy(**both), self.model.generate(**self.prompt, do_sample=False, max_new_tokens=12, **both).tolist()
        )
        for source, name in (
            (both, "repetition_penalty: got 1.2"),
            (dict(sampling=dict(presence_penalty=1.0), own=ours), "encoder_repetition_penalty: got 3.0"),
        ):
            with self.refused(logitd.InvalidArgument, name, "or as the only penalty with a head"):
                self.greedy("tiny", **source)

    def test_what_works_on_logits_is_refused_by_name_with_a_head(self):
        class Warm(transformers.LogitsProcessor):
            def __call__(self, input_ids, scores):
                return scores / 2

        bias = {(5,): -4.0}
        mark = transformers.WatermarkingConfig()
        for name, value in (
            ("sequence_bias", bias),
            ("bad_words_ids", [[5], [6, 7]]),
            ("suppress_tokens", [5]),
            ("begin_suppress_tokens", [5]),
            ("forced_bos_token_id", 5),
            ("forced_eos_token_id", 5),
            ("no_repeat_ngram_size", 2),
            ("encoder_no_repeat_ngram_size", 2),
            ("exponential_decay_length_penalty", (3, 1.1)),
            ("guidance_scale", 1.5),
            ("watermarking_config", mark),
            ("remove_invalid_values", True),
            ("min_length", 9),
            ("min_new_tokens", 9),
            ("output_logits", True),
            ("output_scores", True),
        ):
            own = {name: value, "eos_token_id": 300}
            for source in ({name: value, "eos_token_id": 300}, dict(own=own), dict(generation_config=config_of(**own))):
                with self.subTest(source=source), self.refused(
                    logitd.InvalidArgument, f"{name}: got {value!r:.60}", "allowed", "with a head"
                ):
                    self.greedy("tiny", **source)
        for source, text in (
            (dict(prefix_allowed_tokens_fn=lambda row, ids: [5]), "prefix_allowed_tokens_fn: got PrefixConstrained"),
            (dict(logits_processor=[Warm()]), "logits_processor: got Warm, allowed None with a head"),
            (
                dict(logits_processor=[transformers.NoRepeatNGramLogitsProcessor(2)]),
                "logits_processor: got NoRepeatNGramLogitsProcessor",
            ),
        ):
            with self.refused(logitd.InvalidArgument, text):
                self.greedy("tiny", **source)
        own = self.model.get_output_embeddings()
        self.assertIsInstance(own, torch.nn.Linear)
        self.assertNotIn("_get_logits_processor", vars(self.model))

    def test_without_a_head_logits_and_processors_are_transformers_own(self):
        for name, value in (
            ("sequence_bias", {(5,): 400.0}),
            ("bad_words_ids", [[5], [6, 7]]),
            ("no_repeat_ngram_size", 2),
            ("suppress_tokens", list(range(100))),
            ("watermarking_config", transformers.WatermarkingConfig(bias=30.0)),
        ):
            want = self.model.generate(**self.prompt, do_sample=False, max_new_tokens=12, **{name: value})
            self.assertEqual(self.greedy(**{name: value}), want.tolist(), name)
        more = dict(max_new_tokens=3, output_logits=True, return_dict_in_generate=True)
        want = self.model.generate(**self.prompt, do_sample=False, **more)
        got = generate(self.model, self.client, **self.prompt, seed=0, sampling=dict(temperature=0), **more)
        for ours, theirs in zip(got.logits, want.logits):
            self.assertTrue(torch.equal(ours, theirs))

    def test_a_top_k_of_minus_1_asks_for_nothing(self):
        for head in (None, "tiny"):
            self.assertEqual(self.greedy(head, top_k=-1), self.greedy(head))

    def test_modes_of_the_models_own_configuration_are_off(self):
        want = self.greedy()
        default = transformers.GenerationConfig()
        for own in (
            dict(prompt_lookup_num_tokens=2),
            dict(num_beams=4, num_beam_groups=2, diversity_penalty=0.5),
            dict(use_mtp=True),
            dict(assistant_early_exit=1),
            dict(dola_layers="low"),
            dict(force_words_ids=[[5]]),
            dict(token_healing=True),
        ):
            if all(hasattr(default, name) for name in own):
                for head in (None, "tiny"):
                    with self.subTest(own=own, head=head):
                        self.assertEqual(self.greedy(head, own=own), want)

    def test_tokens_outside_the_vocabulary_are_ignored_and_counted(self):
        embeddings = torch.nn.Embedding(400, 48)  # of a model that also embeds placeholders of pictures
        with torch.no_grad():
            embeddings.weight[:311] = self.model.get_input_embeddings().weight
        own = self.model.get_input_embeddings()
        self.model.set_input_embeddings(embeddings)
        self.addCleanup(self.model.set_input_embeddings, own)
        odd = dict(input_ids=torch.tensor([[5, 311, 399, 9], [7, 7, 350, 2]]), attention_mask=torch.ones(2, 4))
        for sampling, source in (
            (dict(presence_penalty=3.0), dict()),
            (dict(frequency_penalty=3.0), dict()),
            (dict(repetition_penalty=3.0), dict()),
            (dict(), dict(repetition_penalty=3.0)),
            (dict(), dict(encoder_repetition_penalty=3.0)),
        ):
            with self.subTest(sampling=sampling, source=source):
                with self.assertLogs("logitd.transformers", "WARNING") as logs:
                    got = self.greedy("tiny", sampling, **source, **odd)
                self.assertEqual(len(logs.output), 1)
                self.assertIn("history: ignored 3 tokens of the prompts, which are outside 0 to 310", logs.output[0])
                self.assertEqual([row[:4] for row in got], odd["input_ids"].tolist())
        drawn = self.greedy("tiny", dict(presence_penalty=1e4), **odd)
        for row in drawn:
            self.assertEqual(len(set(row[4:])), 12)
            self.assertEqual(set(row[4:]) & set(row[:4]), set())
        self.assertEqual(self.greedy(None, dict(presence_penalty=1e4), **odd), drawn)
        with self.assertNoLogs("logitd.transformers"):
            self.greedy("tiny", dict(presence_penalty=1.0))

    def test_a_call_without_the_sampler_is_refused_while_the_head_is_out(self):
        with Sampler(self.client, seed=0, head="tiny").attached(self.model):
            with self.refused(logitd.InvalidArgument, "logits_processor: got no Sampler"):
                self.model.generate(**self.prompt, do_sample=False, max_new_tokens=2)

    def test_calls_in_threads_share_a_model(self):
        ours = dict(repetition_penalty=3.0)
        want = self.greedy(sampling=ours)

        def draw(i):
            return generate(
                self.model,
                self.client,
                **self.prompt,
                seed=i,
                sampling=dict(temperature=0, **ours),
                max_new_tokens=12,
                repetition_penalty=3.0,
            ).tolist()

        with futures.ThreadPoolExecutor(4) as pool:
            self.assertEqual(list(pool.map(draw, range(12))), [want] * 12)
        self.assertNotIn("_get_logits_processor", vars(self.model))

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

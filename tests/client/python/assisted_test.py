"""A GenerationConfig as parameters of sample, and generate with an assistant model, on small models with random
weights. Skipped where transformers is missing."""

import copy
import tempfile
import unittest
import unittest.mock

import logitd
import numpy as np
from harness import RunningServer, ServerTestCase

try:
    import torch
    import transformers
    from logitd._generation import sampling_of
    from logitd.transformers import generate
    from tiny_models import tiny
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from None
torch.set_num_threads(1)  # the server's threads need the other cores

SAMPLING = (
    dict(temperature=0),
    dict(temperature=0.9, top_k=40, top_p=0.95),
    dict(temperature=1.3, repetition_penalty=1.4, frequency_penalty=0.3),
    dict(temperature=0.7, logit_bias={7: 2.0, 11: float("-inf")}),
)


def noisy(model, scale):
    """A draft model: the same weights with noise, so that it agrees on some tokens."""
    draft = copy.deepcopy(model)
    torch.manual_seed(8)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn_like(weight) * scale)
    return draft


def config_of(**fields):
    return transformers.GenerationConfig(max_new_tokens=12, pad_token_id=0, **fields)


class TwoModelsTest(ServerTestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.model = tiny()
        cls.model.save_pretrained(folder.name)
        cls.server = RunningServer(f"--head=tiny={folder.name}")
        cls.client = logitd.Client(cls.server.unix)
        cls.addClassCleanup(cls.client.close)
        cls.prompt = torch.tensor([[7, 7, 8, 2]])

    def drawn(self, **more):
        return generate(self.model, self.client, self.prompt, **{"max_new_tokens": 24, **more}).tolist()


class AssistedTest(TwoModelsTest):
    def test_tokens_are_those_without_an_assistant(self):
        for scale in (0.0, 0.02, 0.5):
            draft = noisy(self.model, scale)
            for sampling in SAMPLING:
                for head in (None, "tiny"):
                    with self.subTest(scale=scale, sampling=sampling, head=head):
                        params = dict(seed=5, head=head, sampling=sampling)
                        self.assertEqual(self.drawn(assistant_model=draft, **params), self.drawn(**params))

    def test_greedy_is_that_of_transformers(self):
        want = self.model.generate(self.prompt, do_sample=False, max_new_tokens=24).tolist()
        got = self.drawn(seed=0, sampling=dict(temperature=0), assistant_model=noisy(self.model, 0.02))
        self.assertEqual(got, want)

    def calls(self, draft, sampling):
        """The tokens of each call of verify, which are its accepted drafts and the bonus token."""
        found, verify = [], logitd.Client.verify

        def counted(client, *args, **kwargs):
            result = verify(client, *args, **kwargs)
            found.append((int(result.accepted[0]), len(kwargs["drafts"])))
            return result

        with unittest.mock.patch.object(logitd.Client, "verify", counted):
            self.drawn(seed=3, sampling=sampling, assistant_model=draft)
        return found

    def test_a_draft_model_that_is_equal_has_every_draft_accepted(self):
        for sampling in SAMPLING:
            draft = noisy(self.model, 0.0)
            draft.generation_config.assistant_confidence_threshold = 0.0  # else unsure drafts end early
            calls = self.calls(draft, sampling)
            self.assertTrue(all(accepted == drafts for accepted, drafts in calls), calls)
            self.assertLess(len(calls), 12)

    def test_drafts_stop_where_those_of_transformers_do(self):
        counts = []
        for threshold in (0.0, 0.4, 0.9):
            draft, runs = noisy(self.model, 0.02), []
            draft.generation_config.assistant_confidence_threshold = threshold
            draft.register_forward_hook(lambda *_, runs=runs: runs.append(1))
            self.model.generate(self.prompt, do_sample=False, max_new_tokens=24, assistant_model=draft)
            want = len(runs)
            self.drawn(seed=0, sampling=dict(temperature=0), assistant_model=draft)
            self.assertEqual(len(runs) - want, want, threshold)
            counts.append(want)
        self.assertGreater(counts[0], counts[1])
        self.assertGreater(counts[1], counts[2])

    def test_another_draft_model_has_some_drafts_refused(self):
        calls = self.calls(noisy(self.model, 0.5), SAMPLING[1])
        self.assertTrue(any(accepted < drafts for accepted, drafts in calls), calls)

    def test_tokens_follow_the_models_distribution(self):
        # 3rd token, over seeds, against the distribution in double precision given the first two. 1 of 10^6 tests of a
        # correct sampler fails; the seeds are fixed.
        sampling, draft, counts = dict(temperature=0.6, top_k=4), noisy(self.model, 0.3), {}
        for seed in range(160):
            *_, first, second = self.drawn(seed=seed, sampling=sampling, assistant_model=draft, max_new_tokens=2)[0]
            counts.setdefault(first, {}).setdefault(second, 0)
            counts[first][second] += 1
        first, seen = max(counts.items(), key=lambda item: sum(item[1].values()))
        with torch.no_grad():
            logits = self.model(torch.cat([self.prompt, torch.tensor([[first]])], 1)).logits[0, -1].double() / 0.6
        top = logits.topk(4)
        probs = dict(zip(top.indices.tolist(), top.values.softmax(-1).tolist()))
        self.assertLessEqual(set(seen), set(probs))
        total = sum(seen.values())
        self.assertGreater(total, 50)
        chi2 = sum((seen.get(token, 0) - total * p) ** 2 / (total * p) for token, p in probs.items())
        self.assertLess(chi2, 30.7)  # 3 degrees of freedom, 1e-6

    def test_processors_and_stops_have_their_effect(self):
        draft = noisy(self.model, 0.02)
        plain = self.drawn(seed=5, sampling=SAMPLING[1])
        for more in (dict(no_repeat_ngram_size=1), dict(bad_words_ids=[[plain[0][6]]]), dict(eos_token_id=plain[0][9])):
            params = dict(seed=5, sampling=SAMPLING[1], **more)
            got = self.drawn(assistant_model=draft, **params)
            self.assertEqual(got, self.drawn(**params), more)
            self.assertNotEqual(got, plain, more)

    def test_the_model_is_as_before(self):
        before = set(vars(self.model))
        self.drawn(seed=5, assistant_model=noisy(self.model, 0.1))
        self.assertEqual(set(vars(self.model)), before)
        self.assertEqual(len(self.model._forward_hooks), 0)
        self.assertEqual(self.drawn(seed=1, sampling=SAMPLING[1]), self.drawn(seed=1, sampling=SAMPLING[1]))

    def test_what_cannot_work_is_refused(self):
        draft = noisy(self.model, 0.1)
        with self.refused(logitd.InvalidArgument, "seed: got 2 seeds, allowed one, or 1"):
            self.drawn(seed=[1, 2], assistant_model=draft)
        with self.refused(logitd.InvalidArgument, "assistant_model: got Llama", "allowed another"):
            self.drawn(seed=1, assistant_model=self.model)
        with self.refused(logitd.InvalidArgument, "assistant_tokenizer: got 'x', allowed None"):
            self.drawn(seed=1, assistant_model=draft, assistant_tokenizer="x")
        with self.refused(logitd.InvalidArgument, "generation_config.assistant_ensemble_weight: got 0.5"):
            config = transformers.GenerationConfig(max_new_tokens=4)
            config.assistant_ensemble_weight = 0.5
            generate(self.model, self.client, self.prompt, seed=1, generation_config=config, assistant_model=draft)
        with self.assertRaisesRegex(ValueError, "row 0: EMPTY_SUPPORT"):
            banned = {token: float("-inf") for token in range(311)}
            self.drawn(seed=1, sampling=dict(logit_bias=banned), assistant_model=draft)


class ConfigTest(TwoModelsTest):
    def test_fields_become_parameters(self):
        for fields, want in (
            (dict(), dict(temperature=0.0)),
            (dict(temperature=0.5, top_p=0.9), dict(temperature=0.0)),
            (dict(repetition_penalty=1.2), dict(temperature=0.0, repetition_penalty=1.2)),
            (dict(do_sample=True), dict(top_k=50)),
            (dict(do_sample=True, top_k=0), dict()),
            (dict(do_sample=True, top_k=7, temperature=0.5), dict(top_k=7, temperature=0.5)),
            (dict(do_sample=True, top_k=0, min_p=0.1, typical_p=0.9), dict(min_p=0.1, typical_p=0.9)),
            (dict(do_sample=True, top_k=0, top_p=0.8, no_repeat_ngram_size=2), dict(top_p=0.8)),
        ):
            self.assertEqual(sampling_of(config_of(**fields)), want, fields)
        own = transformers.GenerationConfig(do_sample=True, temperature=0.3, top_k=9)
        self.assertEqual(sampling_of(config_of(top_k=4, do_sample=True), own), dict(temperature=0.3, top_k=4))

    def test_fields_without_a_parameter_are_refused(self):
        for name, value in (("eta_cutoff", 0.1), ("epsilon_cutoff", 0.1), ("num_beams", 3), ("penalty_alpha", 0.6)):
            config = config_of(do_sample=True)
            setattr(config, name, value)
            with self.refused(logitd.InvalidArgument, f"{name}: got {value}, allowed"):
                sampling_of(config)
        with self.refused(logitd.InvalidArgument, "min_p: got 0.1 beside a top_p of 0.9, allowed one of them"):
            sampling_of(config_of(do_sample=True, min_p=0.1, top_p=0.9))

    def support(self, logits, config):
        """The tokens that transformers would draw from, and their probabilities."""
        prepared, _ = self.model._prepare_generation_config(config)
        warpers = self.model._get_logits_processor(
            prepared, input_ids_seq_length=self.prompt.shape[1], encoder_input_ids=self.prompt, device="cpu"
        )
        return warpers(self.prompt, logits.clone()).double().softmax(-1)

    def test_the_draw_is_from_the_distribution_of_transformers(self):
        with torch.no_grad():
            logits = self.model(self.prompt).logits[:, -1].float()
        for fields in (
            dict(temperature=0.7),
            dict(top_k=5, temperature=1.5),
            dict(top_k=0, top_p=0.7),
            dict(top_k=20, min_p=0.1, temperature=0.8),
            dict(top_k=0, typical_p=0.8),
            dict(top_k=30, top_p=0.9, typical_p=0.9, repetition_penalty=1.3, temperature=0.9),
        ):
            config = config_of(do_sample=True, **fields)
            want = self.support(logits, config)[0].numpy()
            got = self.client.sample(
                logits, seed=0, want_support=311, history=self.prompt.tolist(), **sampling_of(config)
            )
            ids = np.asarray(got.support_ids.values)
            self.assertEqual(sorted(ids.tolist()), np.flatnonzero(want).tolist(), fields)
            error = np.abs(np.exp(np.asarray(got.support_logprobs.values)) - want[ids]).max()
            self.assertLess(error, 1e-6, fields)

    def test_a_config_in_place_of_sampling(self):
        config = config_of(do_sample=True, temperature=0.8, top_k=12, repetition_penalty=1.2)
        same = dict(temperature=0.8, top_k=12, repetition_penalty=1.2)
        for head in (None, "tiny"):
            got = generate(self.model, self.client, self.prompt, seed=4, head=head, sampling=config)
            self.assertEqual(got.tolist(), self.drawn(seed=4, sampling=same, max_new_tokens=12), head)
        greedy = config_of(repetition_penalty=1.2)
        got = generate(self.model, self.client, self.prompt, seed=4, sampling=greedy)
        self.assertEqual(got.tolist(), self.model.generate(self.prompt, generation_config=greedy).tolist())
        with self.refused(logitd.InvalidArgument, "generation_config: got one beside that of sampling"):
            generate(self.model, self.client, self.prompt, seed=4, sampling=config, generation_config=config)

"""lm-evaluation-harness with logitd, beside its own `hf` model, on a small model with random weights and tasks made
here. Skipped where lm_eval is missing."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import logitd
from harness import RunningServer, ServerTestCase

os.environ.setdefault("HF_HUB_OFFLINE", "1")
try:
    import lm_eval
    import torch
    import transformers
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from logitd.lm_eval import LogitdLM
    from tiny_models import tiny
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from None
torch.set_num_threads(1)  # the server's threads need the other cores

WORDS = "the small grey cat sat on a warm stone wall and saw birds fly over green fields to find some seeds".split()
TEXTS = [" ".join(WORDS[(i * step) % len(WORDS)] for i in range(40)) for step in (1, 2, 3, 5, 7, 8, 9)]
MAX_LENGTH = 48
NATS = 2e-4  # of a sum over up to 100 tokens
CHOICE = """
task: choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
"""
TEXT = """
task: text
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: ""
generation_kwargs: {until: [" wall", "cat"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
"""
ROLLING = """
task: rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
SPLIT = """
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
"""


def tokenizer():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet)
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def requests(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]


class LmEvalTest(ServerTestCase):
    @classmethod
    def setUpClass(cls):
        root = tempfile.TemporaryDirectory()
        cls.addClassCleanup(root.cleanup)
        cls.root = pathlib.Path(root.name)
        cls.tokenizer = tokenizer()
        cls.model = tiny(vocab_size=len(cls.tokenizer), max_position_embeddings=MAX_LENGTH, eos_token_id=2)
        cls.folder = str(cls.root / "model")
        cls.model.save_pretrained(cls.folder)
        cls.tokenizer.save_pretrained(cls.folder)
        docs = [
            dict(question=text, choices=[" " + " ".join(WORDS[i : i + 1 + i % 3]) for i in range(j, j + 4)], answer=j % 4)
            for j, text in enumerate([*TEXTS, *(text[:30] for text in TEXTS), ""])
        ]
        (cls.root / "tasks").mkdir()
        for name, head, kept in (("choice", CHOICE, docs), ("text", TEXT, docs[:-1]), ("rolling", ROLLING, docs[:-1])):
            data = cls.root / f"{name}.jsonl"
            data.write_text("".join(json.dumps(doc) + "\n" for doc in kept))
            (cls.root / f"tasks/{name}.yaml").write_text(head + SPLIT % data)
        cls.server = RunningServer(f"--head=tiny={cls.folder}")
        cls.client = logitd.Client(cls.server.unix)
        cls.addClassCleanup(cls.client.close)
        cls.hf = HFLM(pretrained=cls.model, tokenizer=cls.tokenizer, batch_size=3)

    def ours(self, **options):
        given = dict(pretrained=self.model, tokenizer=self.tokenizer, client=self.client, batch_size=3)
        return LogitdLM(**{**given, **options})

    def greedy_texts(self):
        """Contexts with what the model says after them, of one token and of several."""
        ids = [self.tokenizer.encode(text)[:20] for text in TEXTS]
        after = [self.model.generate(torch.tensor([one]), do_sample=False, max_new_tokens=3)[0, 20:] for one in ids]
        decode = self.tokenizer.decode
        return [(decode(one), decode(more[:n])) for one, more in zip(ids, after) for n in (1, 3)]

    def assert_close(self, got, want):
        self.assertEqual([greedy for _, greedy in got], [greedy for _, greedy in want])
        for (ours, _), (theirs, _) in zip(got, want):
            self.assertLess(abs(ours - theirs), NATS)

    def test_loglikelihoods_are_those_of_hf(self):
        pairs = [(text, f" {word} {WORDS[0]}"[: 4 + 3 * i]) for i, text in enumerate(TEXTS) for word in WORDS[:3]]
        pairs += [(TEXTS[0], " cat"), (TEXTS[0], " seeds"), ("", "cat"), ("", " the small grey cat"), ("a b ", "cat")]
        pairs += self.greedy_texts()
        asked = requests("loglikelihood", *pairs)
        want = self.hf.loglikelihood(asked, disable_tqdm=True)
        self.assertEqual({greedy for _, greedy in want}, {True, False})
        for options in (dict(head="tiny"), dict(), dict(head="tiny", batch_size=1), dict(head="tiny", batch_size=50)):
            self.assert_close(self.ours(**options).loglikelihood(asked, disable_tqdm=True), want)

    def test_loglikelihoods_follow_double_precision(self):
        context, continuation = self.tokenizer.encode(TEXTS[1])[:30], self.tokenizer.encode(TEXTS[2])[:40]
        ids = (context + continuation)[-(MAX_LENGTH + 1) :]  # the context loses its first tokens
        with torch.no_grad():
            logits = self.model(torch.tensor([ids[:-1]])).logits[0, -40:].double()
        want = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).sum().item()
        ((got, greedy),) = self.ours(head="tiny")._loglikelihood_tokens([(None, context, continuation)], True)
        self.assertLess(abs(got - want), NATS)
        self.assertFalse(greedy)

    def test_rolling_loglikelihoods_are_those_of_hf(self):
        asked = requests("loglikelihood_rolling", *((text * n,) for n, text in enumerate(TEXTS, start=1)))
        # The cache of `hf` gathers from the wrong places where two windows differ only in their cut.
        hf = HFLM(pretrained=self.model, tokenizer=self.tokenizer, batch_size=3, logits_cache=False)
        want = hf.loglikelihood_rolling(asked, disable_tqdm=True)
        got = self.ours(head="tiny").loglikelihood_rolling(asked, disable_tqdm=True)
        for ours, theirs in zip(got, want):
            self.assertLess(abs(ours / theirs - 1), 1e-6)

    def test_texts_are_those_of_hf(self):
        for more in (dict(), dict(until=[" cat", "a"]), dict(do_sample=False, temperature=0.0), dict(temperature=0.0)):
            kwargs = dict(max_gen_toks=10, **more)
            asked = requests("generate_until", *((text, kwargs) for text in [*TEXTS, "cat", *TEXTS[0].split()[:4]]))
            want = self.hf.generate_until(asked, disable_tqdm=True)
            for head in (None, "tiny"):
                self.assertEqual(self.ours(head=head).generate_until(asked, disable_tqdm=True), want, more)
            self.assertGreater(len(set(want)), 5)

    def test_texts_are_sampled_with_the_seeds(self):
        kwargs = dict(max_gen_toks=10, do_sample=True, temperature=0.7, top_p=0.9)
        asked = requests("generate_until", *((text, kwargs) for text in TEXTS[:3]))

        def drawn(**options):
            return self.ours(**options).generate_until(asked, disable_tqdm=True)

        first = drawn(seed=4)
        self.assertEqual(drawn(seed=4, head="tiny"), first)
        self.assertNotEqual(drawn(seed=5), first)
        # The longest text comes first, of equals the first by its letters: it has the lowest seed.
        text = min(TEXTS[:3], key=lambda text: (-len(self.tokenizer.encode(text)), text))
        ids, tokens = self.tokenizer.encode(text)[-(MAX_LENGTH - 10) :], []
        for position in range(10):
            with torch.no_grad():
                logits = self.model(torch.tensor([ids + tokens])).logits[0, -1]
            drawn_token = self.client.sample(
                logits, seed=4, position=position, temperature=0.7, top_k=50, top_p=0.9
            ).tokens
            tokens.append(int(drawn_token[0]))
        want = self.tokenizer.decode(tokens, skip_special_tokens=True)
        self.assertEqual(first[TEXTS.index(text)], want)

    def evaluated(self, model):
        manager = TaskManager(include_path=str(self.root / "tasks"), include_defaults=False)
        found = lm_eval.simple_evaluate(
            model=model, tasks=["choice", "text", "rolling"], task_manager=manager, bootstrap_iters=0, log_samples=True
        )
        return found["results"], {
            task: [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
            for task, samples in found["samples"].items()
        }

    def test_samples_of_tasks_are_those_of_hf(self):
        want, theirs = self.evaluated(self.hf)
        got, ours = self.evaluated(self.ours(head="tiny"))
        self.assertEqual(ours["text"], theirs["text"])
        self.assertEqual(len(ours["choice"]), 2 * len(TEXTS) + 1)
        for one, other in zip(ours["choice"], theirs["choice"]):
            self.assert_close([answer for (answer,) in one], [answer for (answer,) in other])
        for ((one,),), ((other,),) in zip(ours["rolling"], theirs["rolling"]):
            self.assertLess(abs(one - other), NATS)
        self.assertEqual(got["choice"]["acc,none"], want["choice"]["acc,none"])
        self.assertAlmostEqual(got["rolling"]["bits_per_byte,none"], want["rolling"]["bits_per_byte,none"], places=5)

    def test_from_the_command_line(self):
        out = self.root / "out"
        model_args = f"pretrained={self.folder},address={self.server.tcp},head=tiny,dtype=float32"
        done = subprocess.run(
            [sys.executable, "-m", "logitd.lm_eval", "run", "--model", "logitd", "--model_args", model_args]
            + ["--tasks", "choice", "--device", "cpu", "--include_path", self.root / "tasks", "--output_path", out],
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        (file,) = out.rglob("results*.json")
        want, _ = self.evaluated(self.hf)
        self.assertEqual(json.loads(file.read_text())["results"]["choice"]["acc,none"], want["choice"]["acc,none"])

    def test_what_cannot_work_is_refused(self):
        for options, text in (
            (dict(address=self.server.unix), "allowed one of them"),
            (dict(client=None), "allowed one of them"),
            (dict(peft="x"), "peft: got 'x', allowed None"),
            (dict(softmax_dtype="float32"), "softmax_dtype: got 'float32', allowed None"),
            (dict(seed=-1), "seed: got -1, allowed whole numbers, 0 or more"),
        ):
            with self.refused(logitd.InvalidArgument, text):
                self.ours(**options)
        with self.refused(logitd.NotFound, "tiny"):
            self.ours(head="large")
        asked = requests("generate_until", (TEXTS[0], dict(max_gen_toks=2, num_beams=3)))
        with self.refused(logitd.InvalidArgument, "num_beams: got 3, allowed 1"):
            self.ours().generate_until(asked, disable_tqdm=True)
        with self.refused(logitd.InvalidArgument, "continuation: got 0 tokens after 3, allowed 1 to 48"):
            self.ours()._loglikelihood_tokens([(None, [1, 2, 3], [])], True)

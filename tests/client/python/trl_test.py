"""The teacher of TRL's distillation trainers, on small models with random weights. Skipped where trl is missing."""

import os
import tempfile
import unittest
from unittest import mock

import logitd
import numpy as np
from harness import RunningServer, ServerTestCase
from rows_test import write_head

try:
    import torch
    import transformers
    from datasets import Dataset
    from logitd.trl import Teacher
    from tiny_models import tiny
    from tokenizers import Tokenizer, models, pre_tokenizers
    from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from None

VOCAB = 211


def expected(model, tokens, temperature):
    """Log-probabilities of all tokens at each place after the first, in double precision."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0].double()
    return torch.log_softmax(logits / temperature, dim=-1)[:-1].numpy()


class InTorch:
    """A teacher of torch's own log-probabilities."""

    def __init__(self, model):
        self.model = model

    def get_sequence_logprobs(self, sequences, prompt_lengths, top_logprobs, temperature):
        out = {name: [] for name in ("logprobs", "logprob_token_ids", "actual_logprobs", "actual_token_ids")}
        for tokens, length in zip(sequences, prompt_lengths):
            rows = torch.tensor(expected(self.model, tokens, temperature)[length - 1 :])
            top = rows.topk(top_logprobs)
            actual = torch.tensor(tokens[length:])[:, None]
            values = (top.values, top.indices, rows.gather(1, actual), actual)
            for into, of in zip(out.values(), values):
                into.append(of.tolist())
        return out


class TeacherTest(ServerTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.root = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.root.cleanup)
        cls.model = tiny(seed=5, vocab_size=VOCAB, eos_token_id=2)
        write_head(os.path.join(cls.root.name, "head"), cls.model.lm_head.weight.detach().numpy())
        cls.heads = RunningServer(f"--head=teacher={cls.root.name}/head")
        cls.addClassCleanup(cls.heads.stop)

    def teachers(self, client):
        return Teacher(self.model, client), Teacher(self.model, client, head="teacher", batch_tokens=30)

    def test_log_probabilities_are_those_of_the_model(self):
        random = np.random.default_rng(3)
        sequences = [random.integers(3, VOCAB, n).tolist() for n in (9, 4, 17, 1, 6)]
        lengths = [3, 4, 1, 0, 0]
        with logitd.Client(self.heads.unix) as client:
            for teacher in self.teachers(client):
                for temperature in (1.0, 0.7):
                    got = teacher.get_sequence_logprobs(sequences, lengths, top_logprobs=5, temperature=temperature)
                    for i, (tokens, length) in enumerate(zip(sequences, lengths)):
                        want = expected(self.model, tokens, temperature)
                        places = range(length, len(tokens))
                        self.assertEqual([len(values[i]) for values in got.values()], [len(places)] * 4)
                        for at, place in enumerate(places):
                            self.assertEqual(got["actual_token_ids"][i][at], [tokens[place]])
                            if place == 0:
                                self.assertEqual(got["actual_logprobs"][i][0], [-np.inf])
                                self.assertEqual(got["logprobs"][i][0], [-np.inf] * 5)
                                continue
                            row = want[place - 1]
                            top = np.argsort(-row, kind="stable")[:5]
                            self.assertEqual(got["logprob_token_ids"][i][at], top.tolist())
                            np.testing.assert_allclose(got["logprobs"][i][at], row[top], rtol=2e-5, atol=2e-5)
                            # Exact, also where the token is not among the top ones.
                            np.testing.assert_allclose(
                                got["actual_logprobs"][i][at], row[[tokens[place]]], rtol=2e-5, atol=2e-5
                            )

    def test_what_does_not_fit_is_refused(self):
        with logitd.Client(self.heads.unix) as client:
            for teacher in self.teachers(client):
                for arguments, text in (
                    (([[3, 4]], [1, 1]), "prompt_lengths: got 2, allowed 1"),
                    (([[3, 4]], [3]), "prompt_lengths: got 3 at sequence 0, allowed 0..2"),
                    (([[]], [0]), "prompt_lengths: got 0 at sequence 0"),
                    (([[3, 4]], [1], 129), "top_logprobs: got 129, allowed whole numbers, 1 to 128"),
                    (([[3, 4]], [1], 1, 0.0), "temperature: got 0"),
                ):
                    with self.refused(logitd.InvalidArgument, text):
                        teacher.get_sequence_logprobs(*arguments)
            with self.refused(logitd.NotFound, "no head"):
                Teacher(self.model, client, head="other").get_sequence_logprobs([[3, 4]], [1])
            with self.refused(logitd.InvalidArgument, "model: got one in training mode"):
                Teacher(tiny(seed=5, vocab_size=VOCAB, eos_token_id=2).train(), client)

    def losses_of(self, teacher):
        """Of some steps of TRL's trainer, from the same student and the same prompts."""
        plain = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
        plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=plain, pad_token="w0", eos_token="w2", bos_token="w1"
        )
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w3 {% endif %}"
        )
        random = np.random.default_rng(4)
        prompts = [" ".join(f"w{i}" for i in random.integers(4, VOCAB, 4)) for _ in range(8)]
        config = ServerDistillationConfig(
            output_dir=self.root.name,
            teacher_model_server_url="http://127.0.0.1:1",  # of the client that Teacher replaces
            max_steps=4,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            beta=0.0,
            loss_top_k=20,
            max_completion_length=8,
            logging_steps=1,
            seed=9,
            report_to=[],
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            disable_tqdm=True,
        )
        with mock.patch("trl.generation.vllm_client.VLLMClient", lambda **_: teacher):
            trainer = ServerDistillationTrainer(
                model=tiny(seed=6, vocab_size=VOCAB, eos_token_id=2).train(),
                args=config,
                train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in prompts]),
                processing_class=tokenizer,
            )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    def test_trl_distils_from_it_as_from_the_model(self):
        with logitd.Client(self.heads.unix) as client:
            got = self.losses_of(Teacher(self.model, client, head="teacher"))
        want = self.losses_of(InTorch(self.model))
        self.assertEqual(len(got), 4)
        np.testing.assert_allclose(got, want, rtol=1e-4)


if __name__ == "__main__":
    unittest.main()

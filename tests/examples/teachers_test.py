"""examples/teachers: verl's and slime's requests, answered in their shapes with the numbers of torch in double."""

import asyncio
import json
import os
import sys
import tempfile
import unittest

import logitd
import numpy as np
from harness import REPOSITORY, RunningServer, TestCase

try:
    import torch
    from tiny_models import tiny
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from None

from logitd.trl import Teacher

sys.path.insert(0, str(REPOSITORY / "examples/teachers"))
import slime_teacher
import verl_teacher

VOCAB = 97


def recorded(name):
    return json.loads((REPOSITORY / f"tests/examples/teachers/{name}.json").read_text())


def shape(value):
    """A message with the type of each value in its place; a None is a type of its own."""
    if isinstance(value, dict):
        return {key: shape(of) for key, of in value.items()}
    return [shape(of) for of in value] if isinstance(value, list) else type(value).__name__


class TeachersTest(TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = tiny(seed=8, vocab_size=VOCAB)
        root = tempfile.TemporaryDirectory()
        cls.addClassCleanup(root.cleanup)
        cls.model.save_pretrained(os.path.join(root.name, "teacher"))
        cls.server = RunningServer(f"--head=teacher={root.name}/teacher")
        cls.addClassCleanup(cls.server.close)
        cls.client = logitd.Client(cls.server.unix)
        cls.addClassCleanup(cls.client.close)

    def teachers(self):
        """With the head in the server, and with logits that torch makes."""
        return Teacher(self.model, self.client, head="teacher"), Teacher(self.model, self.client)

    def logprobs(self, tokens):
        """[S - 1, V] in double precision: row i is of the token after place i."""
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([tokens])).logits[0].double()
        return torch.log_softmax(logits, dim=-1)[:-1].numpy()

    def test_slimes_request_gets_sglangs_answer(self):
        message = recorded("slime")
        tokens = message["request"]["input_ids"]
        want = self.logprobs(tokens)[np.arange(len(tokens) - 1), tokens[1:]]
        for teacher in self.teachers():
            got = slime_teacher.generate(teacher, message["request"])
            self.assertEqual(shape(json.loads(json.dumps(got))), shape(message["response"]))
            entries = got["meta_info"]["input_token_logprobs"]
            self.assertEqual([entry[1] for entry in entries], tokens)
            np.testing.assert_allclose([entry[0] for entry in entries[1:]], want, rtol=2e-5, atol=2e-5)

    def test_slimes_other_requests_are_refused(self):
        teacher = self.teachers()[0]
        request = recorded("slime")["request"]
        for change, text in (
            ({"return_logprob": False}, "return_logprob: got False, allowed True"),
            ({"logprob_start_len": 2}, "logprob_start_len: got 2, allowed 0"),
            ({"sampling_params": {"max_new_tokens": 4}}, "sampling_params.max_new_tokens: got 4, allowed 0"),
            ({"image_data": ["x"]}, "image_data: got 1 pictures, allowed none"),
            ({"input_ids": []}, "prompt_lengths: got 0 at sequence 0"),
        ):
            with self.refused(logitd.InvalidArgument, text):
                slime_teacher.generate(teacher, {**request, **change})

    def test_verls_request_gets_the_answer_of_its_servers(self):
        message = recorded("verl")
        request = message["request"]
        tokens = request["prompt_ids"]
        want = self.logprobs(tokens)
        for teacher in self.teachers():
            answer = asyncio.run(verl_teacher.generate(teacher, **request)).extra_fields
            self.assertEqual(shape(answer), shape(message["extra_fields"]))
            top = np.argsort(-want, axis=1, kind="stable")[:, :3]
            # Tensors as verl makes them, one row per token of the sequence.
            ids = torch.tensor(answer["prompt_ids"], dtype=torch.int32)
            values = torch.tensor(answer["prompt_logprobs"])
            self.assertEqual((ids.shape, values.shape), ((len(tokens), 3), (len(tokens), 3)))
            self.assertEqual(ids[:-1].tolist(), top.tolist())
            np.testing.assert_allclose(values[:-1], np.take_along_axis(want, top, 1), rtol=2e-5, atol=2e-5)
            self.assertEqual((ids[-1].tolist(), values[-1].tolist()), ([0] * 3, [0] * 3))

            own = {**request, "sampling_params": {**request["sampling_params"], "prompt_logprobs": 0}}
            answer = asyncio.run(verl_teacher.generate(teacher, **own)).extra_fields
            self.assertEqual(answer["prompt_ids"], [[token] for token in tokens[1:]] + [[0]])
            np.testing.assert_allclose(
                np.array(answer["prompt_logprobs"])[:-1, 0],
                want[np.arange(len(tokens) - 1), tokens[1:]],
                rtol=2e-5,
                atol=2e-5,
            )

    def test_verls_other_requests_are_refused(self):
        teacher = self.teachers()[0]
        request = recorded("verl")["request"]
        for change, text in (
            ({"sampling_params": {"prompt_logprobs": 129}}, "prompt_logprobs: got 129, allowed 0..128"),
            ({"sampling_params": {"max_tokens": 1}}, "prompt_logprobs: got None, allowed 0..128"),
            ({"sampling_params": {"prompt_logprobs": 1, "temperature": 0.5}}, "temperature: got 0.5, allowed 1"),
            ({"sampling_params": {"prompt_logprobs": 1, "temperature": None}}, "temperature: got None, allowed 1"),
            ({"image_data": [b"x"]}, "image_data: got list, allowed None"),
        ):
            with self.refused(logitd.InvalidArgument, text):
                asyncio.run(verl_teacher.generate(teacher, **{**request, **change}))


if __name__ == "__main__":
    unittest.main()

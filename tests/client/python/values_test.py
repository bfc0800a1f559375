"""A parameter is sent as the numbers that the caller's array holds, or refused: whatever library and type it is of."""

import unittest

import grpc
import logitd
import numpy as np
from harness import CLIENTS, FakeServer, TestCase
from logitd import params

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None
try:
    import torch
except ImportError:
    torch = None

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
SCORES = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
EXACT = [0.5, 0.375, 3.0]  # in float16 and bfloat16 too; as bits of bfloat16 they would be 16128 and so on
TOKENS = [1, 2, 3]


def floats_of(kinds):
    """The names of the parameters of fractions."""
    return [name for name, kind in kinds.__annotations__.items() if kind.__forward_arg__ == "Floats"]


def float_holders(values):
    """The values as everything that can hold them, by name."""
    wide = np.repeat(np.asarray(values, np.float32), 2)
    yield "list", list(values)
    for name in ("float16", "float32", "float64", ">f4", ">f8"):
        yield name, np.asarray(values, name)
    yield "strided", wide[::2]
    yield "list of scalars", [np.float16(x) for x in values]
    if ml_dtypes is not None:
        yield "bfloat16", np.asarray(values, ml_dtypes.bfloat16)
        yield "strided bfloat16", wide.astype(ml_dtypes.bfloat16)[::2]
        yield "list of bfloat16", [ml_dtypes.bfloat16(x) for x in values]
    if torch is not None:
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            tensor = torch.tensor(values, dtype=dtype)
            yield f"{dtype}", tensor
            yield f"parameter of {dtype}", torch.nn.Parameter(tensor)
            yield f"strided {dtype}", torch.from_numpy(wide).to(dtype)[::2]
            yield f"list of {dtype}", list(tensor)


def integer_holders(values):
    yield "list", list(values)
    for name in ("int8", "uint8", "uint16", "int32", "uint32", "int64", "uint64", ">i4"):
        yield name, np.asarray(values, name)
    yield "strided", np.repeat(values, 2)[::2]
    if torch is not None:
        for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
            yield f"{dtype}", torch.tensor(values, dtype=dtype)
            yield f"list of {dtype}", list(torch.tensor(values, dtype=dtype))


def no_integers(values):
    """What has other numbers, or no numbers."""
    for name, holder in float_holders([float(x) for x in values]):
        yield name, holder
    yield "bools", np.ones(len(values), bool)
    yield "words", list(map(str, values))
    yield "complex", np.asarray(values, complex)
    if torch is not None:
        yield "bool tensor", torch.ones(len(values), dtype=torch.bool)


class ValuesTest(TestCase):
    def setUp(self):
        self.messages = []

        def seen(message, context):
            self.messages.append(message)
            context.abort(grpc.StatusCode.DATA_LOSS, "seen")

        methods = ("TopK", "Sample", "Verify", "Score", "Divergence", "Softmax", "SoftmaxBackward")
        server = FakeServer({method: seen for method in methods})
        self.addCleanup(server.__exit__)
        self.clients = [kind(server.address) for kind in CLIENTS]
        for client in self.clients:
            self.addCleanup(client.close)

    def sent(self, method, *args, **params):
        """The message of the call, the same of both clients."""
        self.messages.clear()
        for client in self.clients:
            with self.assertRaises(logitd.DataLoss):
                getattr(client, method)(*args, **params)
        self.assertEqual(self.messages[0], self.messages[1])
        return self.messages[0]

    def check(self, holders, call):
        want = call(next(holders)[1])
        for name, holder in holders:
            with self.subTest(holder=name):
                self.assertEqual(call(holder), want)

    def check_refused(self, holders, name, method, *args, **params):
        for kind, holder in holders:
            with self.subTest(parameter=name, holder=kind):
                for client in self.clients:
                    with self.refused(logitd.InvalidArgument, f"{name}: got ", "allowed "):
                        getattr(client, method)(*args, **{**params, name: holder})

    FLOATS = {
        "top_k": (dict(k=1), floats_of(params.TopKParams)),
        "sample": (dict(seed=1), floats_of(params.SampleParams)),
        "score": (dict(targets=TOKENS), floats_of(params.ScoreParams)),
        "divergence": (dict(reference_logits=ROWS), floats_of(params.DivergenceParams)),
    }

    def test_every_parameter_of_fractions_is_sent_as_it_is(self):
        for method, (others, names) in self.FLOATS.items():
            self.assertIn("temperature", names)
            for name in names:
                with self.subTest(method=method, parameter=name):
                    self.check(
                        float_holders(EXACT), lambda holder: self.sent(method, ROWS, **{**others, name: holder})
                    )
                    self.check(
                        float_holders([0.5]), lambda holder: self.sent(method, ROWS, **{**others, name: holder})
                    )

    def test_one_fraction_without_dimensions_is_sent_as_it_is(self):
        holders = [0.375, np.float16(0.375), np.float32(0.375), np.float64(0.375), np.array(0.375)]
        if ml_dtypes is not None:
            holders += [ml_dtypes.bfloat16(0.375), np.array(0.375, ml_dtypes.bfloat16)]
        if torch is not None:
            holders += [torch.tensor(0.375, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)]
            holders += [torch.nn.Parameter(torch.tensor(0.375).bfloat16())]
        named = [(repr(holder), holder) for holder in holders]
        self.check(iter(named), lambda x: self.sent("sample", ROWS, seed=1, temperature=x))
        self.check(iter(named), lambda x: self.sent("attention_softmax", SCORES, scale=x))
        self.check(iter(named), lambda x: self.sent("sample", ROWS, seed=1, logit_bias={2: x}))

    def test_biases_and_probabilities_of_drafts_are_sent_as_they_are(self):
        self.check(
            float_holders(EXACT),
            lambda x: self.sent("sample", ROWS, seed=1, logit_bias=[{i: b} for i, b in enumerate(x)]),
        )
        verify = dict(sequence_rows=[3], drafts=[1, 2], seed=1)
        listed = dict(verify, draft_kind="list", draft_ids=[[1], [0, 2]])
        self.check(float_holders(EXACT), lambda x: self.sent("verify", ROWS, draft_probs=x, **listed))
        self.check(float_holders(EXACT), lambda x: self.sent("verify", ROWS, draft_probs=[x[:1], x[1:]], **listed))
        dense = dict(verify, draft_kind="dense")
        self.check(float_holders([0.25] * 8), lambda x: self.sent("verify", ROWS, draft_probs=x, **dense))
        self.check(float_holders([0.25] * 4), lambda x: self.sent("verify", ROWS, draft_probs=[x, x], **dense))

    def test_sinks_and_logsumexp_are_sent_as_they_are(self):
        self.check(float_holders(EXACT[:2]), lambda x: self.sent("attention_softmax", SCORES, sinks=x))
        back = dict(sinks=[0.5, 0.375], logsumexp=EXACT * 2)
        for name in ("sinks", "logsumexp"):
            self.check(
                float_holders(back[name]),
                lambda x: self.sent("attention_softmax_backward", SCORES, SCORES, **{**back, name: x}),
            )

    def test_every_parameter_of_whole_numbers_is_sent_as_it_is_and_others_are_refused(self):
        verify = dict(sequence_rows=[3], drafts=[1, 2], seed=1)
        cases = (
            ("top_k", dict(), "k", TOKENS),
            *(
                ("sample", dict(seed=1), name, TOKENS)
                for name in ("seed", "position", "top_k", "top_logprobs", "history", "extra_ids")
            ),
            ("sample", dict(seed=1, allowed_tokens=np.ones((4, 4), bool)), "allowed_tokens_mask", TOKENS),
            *(("score", dict(targets=TOKENS), name, TOKENS) for name in ("targets", "top_logprobs", "extra_ids")),
            ("score", dict(targets=TOKENS), "ignore_index", [3]),
            *(
                ("divergence", dict(reference_logits=ROWS), name, TOKENS)
                for name in ("targets", "top_logprobs", "reference_top_logprobs")
            ),
            ("divergence", dict(reference_logits=ROWS), "ignore_index", [3]),
            ("verify", verify, "sequence_rows", [3]),
            ("verify", verify, "drafts", [1, 2]),
            ("verify", dict(verify, draft_kind=["list", "greedy"], draft_probs=EXACT), "draft_ids", TOKENS),
        )
        for method, others, name, values in cases:
            with self.subTest(method=method, parameter=name):
                self.check(
                    integer_holders(values), lambda holder: self.sent(method, ROWS, **{**others, name: holder})
                )
                self.check_refused(no_integers(values), name, method, ROWS, **others)

    def test_lists_of_token_ids_are_sent_as_they_are(self):
        for method, others in (("sample", dict(seed=1)), ("score", dict(targets=TOKENS))):
            want = self.sent(method, ROWS, extra_ids=[[1, 2], [], [3]], **others)
            lists = [[np.array([1, 2], np.int16), np.array([], np.int64), (3,)]]
            if torch is not None:
                lists += [[torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([3])]]
            for value in lists:
                self.assertEqual(self.sent(method, ROWS, extra_ids=value, **others), want)
            square = self.sent(method, ROWS, extra_ids=[[1], [2], [3]], **others)
            for name, holder in integer_holders(TOKENS):
                if hasattr(holder, "dtype"):
                    self.assertEqual(self.sent(method, ROWS, extra_ids=holder.reshape(3, 1), **others), square, name)

    def test_what_would_be_taken_for_other_numbers_is_refused(self):
        bits = np.array([0x3F00] * 3, np.uint16)
        strange = [("bits", bits), ("bools", np.ones(3, bool)), ("complex", np.ones(3, complex))]
        strange += [("masked", np.ma.masked_array([0.5, 0.5, 0.5], [0, 1, 0])), ("too large", [1e39, 1, 1])]
        if torch is not None:
            strange += [("bool tensor", torch.ones(3, dtype=torch.bool))]
        for method, (others, names) in self.FLOATS.items():
            for name in names:
                self.check_refused(strange, name, method, ROWS, **others)
        self.check_refused(strange, "sinks", "attention_softmax", SCORES)
        self.check_refused([("bits", bits)], "temperature", "top_k", bits.reshape(3, 1), k=1, dtype="bf16")

    def test_masks_are_bools_or_words_of_32_tokens(self):
        allowed = np.array([True, False, True, True])
        want = self.sent("sample", ROWS, seed=1, allowed_tokens=allowed)
        same = [allowed[None], [True, False, True, True]]
        for kind in (np.uint32, np.int32):
            same += [np.array([0b1101], kind), np.array([[0b1101]], kind)]
        if torch is not None:
            same += [torch.from_numpy(allowed), torch.tensor([[0b1101]], dtype=torch.int32)]
        for mask in same:
            self.assertEqual(self.sent("sample", ROWS, seed=1, allowed_tokens=mask), want)
        ones = allowed.astype(np.int32)
        wrong = [(str(dtype), ones.astype(dtype)) for dtype in ("int32", "uint32", "int8", "uint8", "int64", "float32")]
        wrong += [("narrow", allowed[:3]), ("deep", allowed[None, None]), ("number", 1)]
        if torch is not None:
            wrong += [(str(d), torch.from_numpy(ones).to(d)) for d in (torch.int32, torch.int64, torch.bfloat16)]
        self.check_refused(wrong, "allowed_tokens", "sample", ROWS, seed=1)


if __name__ == "__main__":
    unittest.main()

"""What the client writes and reads itself, against protobuf."""

import ast
import pathlib
import typing
import unittest

import logitd
import numpy as np
from harness import REPOSITORY
from logitd import _arrays, _messages, _params, _wire, params

RANDOM = np.random.default_rng(11)


def protobuf_of(codec, values):
    """The same message, put together by protobuf only."""
    message = _messages._message_class(f"logitd.v1.{codec.name}")()
    for name, value in values.items():
        if codec.is_repeated(name):
            getattr(message, name).extend(np.asarray(value).tolist())
        else:
            setattr(message, name, bytes(value) if isinstance(value, np.ndarray) else value)
    return message


def random_values(codec):
    """Values of all kinds for every array field."""
    values = {}
    for name, field in codec.fields.items():
        if not codec._is_array(field) or (name == "hidden" and "logits" in codec.fields):  # only one of the two
            continue
        if not codec.is_repeated(name):
            values[name] = RANDOM.integers(0, 256, 300).astype(np.uint8)
            continue
        dtype = codec.dtype(name)
        if dtype.kind == "f":
            values[name] = RANDOM.standard_normal(50).astype(dtype)
        elif dtype.kind == "b":
            values[name] = RANDOM.random(50) < 0.5
        elif codec.enum(name):
            values[name] = np.array([0, 1, 0], np.int32)
        else:
            limits = np.iinfo(dtype)
            edges = np.array([0, 1, 127, 128, 16383, 16384, limits.max, limits.min], dtype)
            values[name] = np.concatenate([edges, RANDOM.integers(limits.min, limits.max, 40, dtype)])
    return values


class WireTest(unittest.TestCase):
    NAMES = (
        "TopKRequest",
        "TopKResponse",
        "SampleRequest",
        "SampleResponse",
        "VerifyRequest",
        "VerifyResponse",
        "ScoreRequest",
        "ScoreResponse",
        "AttentionSoftmaxRequest",
        "AttentionSoftmaxResponse",
        "AttentionSoftmaxBackwardRequest",
        "AttentionSoftmaxBackwardResponse",
    )

    def test_protobuf_reads_what_we_write_and_we_read_what_it_writes(self):
        for name in self.NAMES:
            codec = _messages.Codec(name)
            values = random_values(codec)
            for value in (values, {key: v[:1] for key, v in values.items()}, {}):
                want = protobuf_of(codec, value)
                got = type(want).FromString(codec.encode(value))
                self.assertEqual(got, want, name)
                arrays, _ = codec.decode(want.SerializeToString())
                for key, array in arrays.items():
                    np.testing.assert_array_equal(array, value.get(key, []), f"{name}.{key}")

    def test_the_payload_comes_last_and_is_read_without_a_copy(self):
        codec = _messages.Codec("TopKRequest")
        payload = np.arange(1000, dtype=np.uint8)
        data = codec.encode(dict(rows=1, vocab=250, k=[3], logits=payload))
        self.assertTrue(data.endswith(payload.tobytes()))
        arrays, message = codec.decode(data)
        self.assertEqual((message.rows, message.vocab), (1, 250))
        self.assertTrue(np.shares_memory(arrays["logits"], np.frombuffer(data, np.uint8)))
        self.assertFalse(arrays["logits"].flags.writeable)

    def test_numbers_that_are_not_packed_or_come_in_parts_are_read(self):
        number = _messages.Codec("TopKResponse").fields["k"].number
        tag = _wire.varint(number << 3)
        arrays, _ = _messages.Codec("TopKResponse").decode(
            tag + b"\x07" + _wire.head(number, 3) + b"\x01\xac\x02" + tag + b"\xac\x02"
        )
        self.assertEqual(arrays["k"].tolist(), [7, 1, 300, 300])

    def test_bytes_that_are_no_message_are_refused(self):
        codec = _messages.Codec("TopKResponse")
        good = codec.encode(dict(k=[300], indices=[1, 2], probs=[0.5]))
        for end in range(1, len(good)):
            try:
                arrays, _ = codec.decode(good[:end])
                self.assertLess(sum(a.size for a in arrays.values()), 4)  # cut between two fields
            except _wire.WireError:
                pass
        k, indices = (codec.fields[name].number for name in ("k", "indices"))
        for bad in (
            b"\xff" * 11,
            _wire.head(k, 1) + b"\x80",
            _wire.head(k, 11) + b"\x80" * 10 + b"\x01",
            _wire.head(indices, 3) + b"abc",
            b"\x0b",
            _wire.head(k, 99),
            _wire.head(15, 2) + b"\xff\xff",
        ):
            with self.assertRaises(_wire.WireError, msg=bad):
                codec.decode(bad)

    def test_a_request_over_two_gib_is_refused(self):
        _messages.check_size(2**31 - 17)
        with self.assertRaisesRegex(logitd.InvalidArgument, "allowed 0 to 2147483631; send fewer rows"):
            _messages.check_size(2**31 - 16)


class ParamsTest(unittest.TestCase):
    def test_the_typed_parameters_are_those_of_the_protos(self):
        inputs = {"hidden", "head", "head_version", "dtype", "arena"}
        given = {"deadline", *inputs, *(f"reference_{name}" for name in inputs)}
        for kind, message, arguments in (
            (params.TopKParams, "TopKRequest", {"k"}),
            (params.SampleParams, "SampleRequest", set()),
            (params.ScoreParams, "ScoreRequest", {"targets"}),
            (params.DivergenceParams, "DivergenceRequest", {"targets"}),
            (params.VerifyParams, "VerifyRequest", set()),
        ):
            names = set(_params.names(_messages.Codec(message)))
            self.assertEqual((set(kind.__annotations__) | arguments) - given, names, message)

    def test_enums_have_the_names_of_the_protos(self):
        self.assertEqual(_messages.enum_values("LogprobMode"), {"raw": 0, "processed": 1, "tempered": 2})
        self.assertEqual(_messages.enum_values("SmoothingConvention"), {"torch": 0, "megatron": 1})
        self.assertEqual(_messages.enum_values("DraftKind"), {"greedy": 0, "list": 1, "dense": 2})
        types = _messages.enum_values("DType")
        self.assertEqual({name: types[name] for name in _arrays.DTYPES}, _arrays.DTYPES)
        status = {name.upper(): value for name, value in _messages.enum_values("RowStatus").items()}
        self.assertEqual(status, {s.name: s.value for s in logitd.RowStatus})

    def test_literals_of_the_types_are_the_enums(self):
        for literal, name in (
            (params.LogprobMode, "LogprobMode"),
            (params.DraftKind, "DraftKind"),
            (params.Smoothing, "SmoothingConvention"),
        ):
            self.assertEqual(list(typing.get_args(literal)), list(_messages.enum_values(name)))


class SourceTest(unittest.TestCase):
    def test_every_file_is_python_3_9(self):
        for path in sorted((REPOSITORY / "client/python/logitd").glob("*.py")):
            ast.parse(path.read_text(), str(path), feature_version=(3, 9))

    def test_public_methods_are_alike_and_documented(self):
        def public(kind):
            return {n: m for n, m in vars(kind).items() if not n.startswith("_") and callable(m)}

        sync, aio = public(logitd.Client), public(logitd.AsyncClient)
        self.assertEqual(set(sync), set(aio))
        for name, method in {**sync, **{f"aio.{n}": m for n, m in aio.items()}}.items():
            self.assertTrue(method.__doc__, name)
        for name in set(sync) - {"close"}:
            here, there = sync[name].__annotations__, aio[name].__annotations__
            self.assertEqual(
                {k: v for k, v in here.items() if k != "return"},
                {k: v for k, v in there.items() if k != "return"},
                name,
            )

    def test_the_version_is_that_of_the_build(self):
        text = pathlib.Path(REPOSITORY, "CMakeLists.txt").read_text()
        self.assertIn(f"VERSION {logitd.__version__}", text)

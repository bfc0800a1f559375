"""What callers get wrong is refused at once, in the caller's own words: what, got, allowed."""

import inspect
import unittest

import grpc
import logitd
import numpy as np
from harness import CLIENTS, FakeServer, RunningServer, ServerTestCase, TestCase
from logitd.params import SamplingParams

try:
    import torch
except ImportError:
    torch = None

ROWS = np.zeros((3, 100), np.float32)
SCORES = np.zeros((1, 2, 3, 4), np.float32)
HERE = "127.0.0.1:1"


class OptionsTest(TestCase):
    def test_options_of_a_wrong_kind_are_refused(self):
        for options, text in (
            (dict(deadline="5"), "deadline: got '5', allowed a number of seconds"),
            (dict(deadline=None), "deadline: got None, allowed a number of seconds"),
            (dict(deadline=float("nan")), "deadline: got nan s, allowed above 0"),
            (dict(retry=3), "retry: got 3, allowed a logitd.Retry"),
            (dict(retry=logitd.Retry(initial_backoff=-1)), "retry.initial_backoff: got -1, allowed 0.001 s"),
            (dict(retry=logitd.Retry(initial_backoff="a")), "retry.initial_backoff: got 'a', allowed 0.001 s"),
            (dict(retry=logitd.Retry(max_backoff=0)), "retry.max_backoff: got 0, allowed 0.001 s"),
            (dict(retry=logitd.Retry(max_attempts=2.5)), "retry.max_attempts: got 2.5, allowed 1 or more"),
            (dict(tls=True), "tls: got True, allowed a logitd.TLS"),
            (dict(tls=logitd.TLS(ca=5)), "tls.ca: got 5, allowed a string"),
            (dict(token=5), "token: got type int, allowed a string, or a function"),
            (dict(max_message_bytes=-1), "max_message_bytes: got -1, allowed whole numbers, 0 or more"),
            (dict(attention_message_bytes=-5), "attention_message_bytes: got -5, allowed whole numbers, 1 or more"),
            (dict(score_message_bytes=1.5), "score_message_bytes: got 1.5, allowed whole numbers, 1 or more"),
            (dict(round_robin="yes"), "round_robin: got 'yes', allowed True or False"),
            (dict(priority=["batch"]), "priority: got ['batch'], allowed 'interactive', 'batch'"),
        ):
            for kind in (logitd.Client, logitd.AsyncClient):
                with self.refused(logitd.InvalidArgument, text):
                    kind(HERE, **options)

    def test_addresses_that_gRPC_would_not_connect_to_are_refused(self):
        for address in (
            None,
            5,
            "",
            "http://host:7450",
            "host:7450/",
            "::1:7450",
            "[::g]:7450",
            "a b:1",
            "a,b:1",
            "host: 5",
            "host:+5",
            "-host:5",
            "dns:///a b:1",
            "ipv4:host:1",
            "ipv4:[::1]:1",
            "ipv6:1.2.3.4:1",
            "unix:" + "a" * 108,
        ):
            for kind in (logitd.Client, logitd.AsyncClient):
                with self.refused(logitd.InvalidArgument, f"address: got {address!r}, allowed HOST:PORT, unix:PATH"):
                    kind(address)
        for address in (
            "a-b_c.d:1",
            "1.2.3.4:65535",
            "[::1]:1",
            "[fe80::1%eth0]:1",
            "ipv4:1.2.3.4:1,5.6.7.8:2",
            "ipv6:[::1]:1,[::2]:1",
            "dns:///a.b:1",
            "unix:/run/x",
            "unix:x",
        ):
            logitd.Client(address).close()

    def test_a_function_that_gives_no_token_is_told(self):
        for client in self.both(HERE, token=lambda: None):
            with self.refused(logitd.InvalidArgument, "token: got type NoneType from the function, allowed a string"):
                client.info()


class UnsentTest(TestCase):
    """Nothing is sent: nobody listens, and yet the error is another."""

    def check(self, cases, call):
        for params, *texts in cases:
            for client in self.both(HERE):
                with self.subTest(params=params), self.refused(logitd.InvalidArgument, *texts) as caught:
                    call(client, params)
                self.assertEqual(caught.exception.attempts, 0)

    def test_parameters_of_sample(self):
        lists = "allowed a list of token ids, or a list of them per row"
        cases = (
            (dict(history=5), f"history: got 5, {lists}"),
            (dict(history="abc"), f"history: got 'abc', {lists}"),
            (dict(history={1: 2}), f"history: got {{1: 2}}, {lists}"),
            (dict(history=[1.5]), "history: got 1.5, allowed whole numbers"),
            (dict(history=["a"]), "history: got 'a', allowed whole numbers"),
            (dict(history=[1, [2], [3]]), "history: got one number for a row"),
            (dict(history=[[1], [2]]), "history: got 2 lists, allowed one, or 3 (rows)"),
            (dict(extra_ids=[[1], [2]]), "extra_ids: got 2 lists, allowed one, or 3 (rows)"),
            (dict(logit_bias=[{1: 2.0}, {}]), "logit_bias: got 2 lists, allowed one, or 3 (rows)"),
            (dict(logit_bias=5), "logit_bias: got 5, allowed a dict of token id to bias, or one per row"),
            (dict(logit_bias=[5]), "logit_bias: got 5, allowed a dict"),
            (dict(logit_bias={1: "a"}), "logit_bias: got 'a', allowed numbers"),
            (dict(logit_bias={1: [1, 2]}), "logit_bias: got a bias of 1 dimensions, allowed one number"),
            (dict(logprob_mode=1), "logprob_mode: got 1, allowed 'raw', 'processed', 'tempered'"),
            (dict(logprob_mode=["raw", None, "raw"]), "logprob_mode: got None, allowed 'raw', 'processed', 'tempered'"),
            (dict(head=5), "head: got 5 with logits, allowed the name of a loaded head"),
            (dict(arena=object()), "arena: got <object object", "allowed an Arena or a CudaArena"),
            (dict(deadline="5"), "deadline: got '5', allowed a number of seconds"),
            (dict(dtype=[1]), "dtype: got [1], allowed f32, f16, bf16"),
            (dict(temperature="x"), "temperature: got 'x', allowed numbers"),
            (dict(temperature=[[1], [2, 3]]), "temperature: got a list, allowed an array with one length"),
            (dict(temperature=[1, 2]), "temperature: got 2 values, allowed none, 1 or 3 (rows)"),
            (dict(want_rank=5), "want_rank: got 5, allowed True and False"),
        )
        self.check(cases, lambda client, params: client.sample(ROWS, **{"seed": 1, **params}))

    def test_parameters_of_score(self):
        cases = (
            (dict(ignore_index=[1, 2]), "ignore_index: got 2 values, allowed one"),
            (dict(want_rank=[True, True]), "want_rank: got 2 values, allowed one"),
            (dict(targets=None), "targets: got none, allowed 3 (rows)"),
            (dict(smoothing=5), "smoothing: got 5, allowed 'torch', 'megatron'"),
        )
        self.check(cases, lambda client, params: client.score(ROWS, **{"targets": [1, 2, 3], **params}))
        cases = (
            (dict(offset="a"), "offset: got 'a', allowed whole numbers, 0 or more"),
            (dict(totals=5), "totals: got 5, allowed a ScoreTotals"),
            (dict(progress=5), "progress: got 5, allowed a function"),
        )
        self.check(cases, lambda client, params: client.score_stream(ROWS, targets=[1, 2, 3], **params))

    def test_parameters_of_verify(self):
        cases = (
            (dict(draft_kind=5), "draft_kind: got 5, allowed 'greedy', 'list', 'dense'"),
            (dict(draft_ids=5), "draft_ids: got 5, allowed a list of token ids"),
            (dict(draft_probs="x"), "draft_probs: got 'x', allowed numbers"),
            (dict(sequence_rows=None), "sequence_rows: got None, allowed whole numbers"),
            (dict(block_verification="x"), "block_verification: got 'x', allowed"),
        )
        usual = dict(sequence_rows=[3], drafts=[1, 2], seed=1)
        self.check(cases, lambda client, params: client.verify(ROWS, **{**usual, **params}))

    def test_arrays_that_are_none(self):
        arrays = [
            ([[1.0, 2.0], [3.0]], "got a list, allowed an array with one length in each dimension"),
            ("abc", "got an array of str"),
            (np.zeros((0, 5), np.float32), "rows: got 0 of 5 values (logits of shape [0, 5]), allowed 1 or more of each"),
            (np.zeros((5, 0), np.float32), "rows: got 5 of 0 values", "allowed 1 or more of each"),
            (np.float32(1), "got shape [], allowed [rows, width]"),
            (np.ma.masked_array(ROWS, ROWS == 0), "got a masked array, allowed one without a mask"),
        ]
        if torch is not None:
            plain = torch.zeros(2, 3)
            arrays += [
                (plain.to_sparse(), "got a tensor of float32 (torch.sparse_coo, cpu), allowed", "dense"),
                (plain.to("meta"), "got a tensor of float32 (torch.strided, meta), allowed", "dense"),
                (torch.quantize_per_tensor(plain, 0.1, 0, torch.quint8), "got a tensor of quint8", "allowed", "dense"),
                (plain.to(torch.complex64), "got an array of complex64, allowed float32"),
            ]
        self.check(arrays, lambda client, array: client.top_k(array, k=1))

    def test_words_for_health_and_heads(self):
        for call, text in (
            (lambda client: client.health(5), "service: got 5, allowed a string"),
            (lambda client: client.get_head(5), "name: got 5, allowed a string"),
            (lambda client: client.load_head("x", None), "path: got None, allowed a string"),
            (lambda client: client.load_head("x", "y", vocab="a"), "vocab: got 'a', allowed a whole number"),
        ):
            for client in self.both(HERE):
                with self.refused(logitd.InvalidArgument, text):
                    call(client)

    def test_a_closed_client_says_what_to_do(self):
        for kind in CLIENTS:
            client = kind(HERE)
            client.close()
            for call in (
                client.info,
                lambda: client.top_k(ROWS, k=1),
                lambda: client.score_stream(ROWS, targets=[1, 2, 3]),
                lambda: client.attention_softmax(SCORES),
            ):
                with self.refused(logitd.FailedPrecondition, "client: got a call after close(), allowed before it"):
                    call()
            client.close()
        with self.refused(logitd.FailedPrecondition, "make a new client"):
            next(client_of_watch().watch_health())


def client_of_watch():
    with logitd.Client(HERE) as client:
        return client


class AttentionTest(ServerTestCase):
    def test_parameters_of_attention(self):
        pair = "allowed (left, right), each None or a number of keys"
        for params, *texts in (
            (dict(window=3), f"window: got 3, {pair}"),
            (dict(window=(1, 2, 3)), f"window: got (1, 2, 3), {pair}"),
            (dict(window=(1.5, None)), "window: got 1.5, allowed whole numbers"),
            (dict(window=(-5, None)), "window: got -5 keys, allowed 0 or more"),
            (dict(causal="x"), "causal: got 'x', allowed True and False"),
            (dict(scale="x"), "scale: got 'x', allowed numbers"),
            (dict(scale=[1, 2]), "scale: got 2 values, allowed one"),
            (dict(sinks=object()), "sinks: got <object object", "allowed numbers"),
            (dict(mask="x"), "mask: got shape []"),
            (dict(mask=np.zeros((1, 1), np.int64)), "mask: got an array of int64, allowed bool, float32, float16"),
            (dict(out=[[1.0]]), "out: got an array of float64"),
            (dict(out_dtype=[]), "out_dtype: got [], allowed f32, f16, bf16"),
            (dict(arena=object()), "arena: got <object object", "allowed an Arena"),
            (dict(want_logsumexp=3), "want_logsumexp: got 3, allowed True and False"),
            (dict(deadline="5"), "deadline: got '5', allowed a number of seconds"),
        ):
            for client in self.both(self.server.unix):
                with self.subTest(params=params), self.refused(logitd.InvalidArgument, *texts) as caught:
                    client.attention_softmax(SCORES, **params)
                self.assertEqual(caught.exception.attempts, 0)


class WordsOfTheServerTest(TestCase):
    def test_a_request_too_large_says_rows_bytes_and_what_to_do(self):
        server = RunningServer("--max-request-bytes=1MiB", "--slab-bytes=1MiB", "--max-held-bytes=64MiB")
        self.addCleanup(server.close)
        for client in self.both(server.tcp):
            for rows in (3, 40):  # a little more than the limit, and more than the transport takes
                with self.assertRaises((logitd.InvalidArgument, logitd.ResourceExhausted)) as caught:
                    client.top_k(np.zeros((rows, 100000), np.float32), k=1)
                self.assertIn(
                    f"logits: got {rows} rows, {rows * 400000} bytes, allowed 1048576 bytes a call, the server's "
                    "max_request_bytes",
                    str(caught.exception),
                )
                self.assertIn("send fewer rows", str(caught.exception))
            with self.refused(logitd.InvalidArgument, "k: got 9 at row 0") as caught:
                client.top_k(np.zeros((1, 3), np.float32), k=9)
            self.assertNotIn("max_request_bytes", str(caught.exception))

    def test_fields_have_the_names_of_the_callers_parameters(self):
        for theirs, ours in (
            ("extra_count: got -1 at row 0, allowed 0..64", "extra_ids: got -1 at row 0, allowed 0..64"),
            ("history_count: got 2 values", "history: got 2 values"),
            ("logit_bias_ids: got 2 values", "logit_bias: got 2 values"),
            ("window_left: got -5, allowed 0 or more", "window (left): got -5, allowed 0 or more"),
            ("payload and lists: got 9 bytes, allowed 1..8", "request: got 9 bytes, allowed 1..8"),
            ("draft_ids: got 1, the sum of draft_count", "draft_ids: got 1, the sum of lengths of draft_ids"),
            ("shared: got rows in a lease", "T: arena: shared: got rows in a lease"),
            ("shared.lease: got one that is unknown here", "T: arena: shared.lease: got one that is unknown here"),
            ("shared_output.offset: got 3, allowed a multiple", "T: arena: shared_output.offset: got 3, allowed a multiple"),
            ("vocab: got 1048577, allowed 1..1048576", "logits (vocab): got 1048577, allowed 1..1048576"),
            ("rows: got 9, allowed 1..8", "logits or hidden (rows): got 9, allowed 1..8"),
            ("keys: got 9, allowed 1..8", "scores (keys): got 9, allowed 1..8"),
            ("vocab: got 9, allowed 1 to 8, or 0 for", "ARGUMENT: vocab: got 9, allowed 1 to 8, or 0 for"),  # load_head's
        ):

            def refuse(message, context, text=theirs):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)

            with FakeServer({"TopK": refuse}) as server:
                for client in self.both(server.address):
                    with self.refused(logitd.InvalidArgument, ours):
                        client.top_k(ROWS, k=1)


class NamesTest(ServerTestCase):
    ARENAS = True

    def test_errors_of_verify_begin_with_its_parameters(self):
        parameters = set(inspect.signature(logitd.Client.verify).parameters) | set(SamplingParams.__annotations__)
        listed = dict(draft_kind="list", draft_ids=[[1], [2]], draft_probs=[[1.0], [1.0]])
        for params in (
            dict(drafts=[1, 100]),
            dict(drafts=[-1, 1]),
            dict(drafts=[1]),
            dict(drafts=[1, 3], draft_kind="list", draft_ids=[[1], [2]], draft_probs=[[1.0], [1.0]]),
            dict(listed, draft_ids=[[1], [3, 2]], draft_probs=[[1.0], [0.5, 0.5]]),
            dict(listed, draft_probs=[1.0]),
            dict(draft_kind=["greedy"] * 3),
            dict(block_verification=True),
            dict(sequence_rows=[4]),
            dict(history=[100]),
            dict(extra_ids=[100]),
            dict(logit_bias={100: 1.0}),
            dict(allowed_tokens_mask=5),
            dict(top_p=2.0),
        ):
            for client in self.both(self.server.unix):
                with self.assertRaises(logitd.InvalidArgument) as caught:
                    client.verify(ROWS, **{**dict(sequence_rows=[3], drafts=[1, 2], seed=1), **params})
                self.assertIn(caught.exception.message.split(":")[0], parameters, str(caught.exception))

    def test_errors_of_arrays_and_arenas_begin_with_the_callers_parameter(self):
        with logitd.Arena.lease(self.server.arena, 4096) as arena, logitd.Client(self.server.unix) as client:
            rows = arena.empty((1, 10))
            other = RunningServer()
            self.addCleanup(other.close)
            with logitd.Client(other.unix) as stranger, self.refused(logitd.NotFound, "NOT_FOUND: arena: shared: got rows in a"):
                stranger.top_k(rows, k=1, arena=arena)
            with self.refused(logitd.InvalidArgument, "logits (vocab): got 1048577, allowed 1..1048576"):
                client.top_k(np.zeros(2**20 + 1, np.float16), k=1)


class RaggedTest(TestCase):
    def test_slices_are_ragged_and_other_places_are_refused(self):
        lists = logitd.Ragged(np.arange(6), np.array([1, 2, 0, 3]))
        self.assertEqual([row.tolist() for row in lists[1:3]], [[1, 2], []])
        self.assertEqual([row.tolist() for row in lists[-1:]], [[3, 4, 5]])
        self.assertEqual((len(lists[:]), len(lists[3:1]), len(lists[9:])), (4, 0, 0))
        self.assertEqual(lists[0:1].dense().tolist(), [[0]])
        self.assertEqual(lists[np.int64(-1)].tolist(), [3, 4, 5])
        for place in ("a", 1.5, slice(None, None, 2), 4, -5):
            with self.assertRaisesRegex(IndexError, "row: got .*, allowed "):
                lists[place]


if __name__ == "__main__":
    unittest.main()

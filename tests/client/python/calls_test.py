"""Attempts, deadlines, metadata, TLS, streams of samples and health: how calls go, whatever they compute."""

import asyncio
import contextlib
import hashlib
import json
import os
import pathlib
import subprocess
import tempfile
import threading
import time
import unittest

import grpc
import logitd
import numpy as np
from harness import CLIENTS, Clock, FakeServer, RunningServer, ServerTestCase, TestCase, later, run, until
from logitd import _messages

ROW = np.array([[1.0, 3.0, 2.0]], np.float32)
ANSWER = _messages.Codec("TopKResponse").encode(
    dict(k=[1], indices=[1], probs=[0.5], logsumexp=[3.5], status=[0], status_position=[-1])
)


def failing(code, text, times, delay=None):
    """Fails so often, then answers."""
    calls = []

    def call(message, context):
        calls.append(message)
        if len(calls) > times:
            return ANSWER
        if delay is not None:
            context.set_trailing_metadata((("grpc-retry-pushback-ms", delay),))
        context.abort(code, text)

    call.calls = calls
    return call


UNAVAILABLE, EXHAUSTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED


class RetryTest(TestCase):
    def served(self, top_k, **options):
        """A client of each kind, and a fake server for each."""
        for kind in CLIENTS:
            handler = top_k()
            with FakeServer({"TopK": handler}) as server, kind(server.address, **options) as client:
                yield client, handler

    def test_tries_again_until_it_succeeds(self):
        for code in (UNAVAILABLE, EXHAUSTED):
            for client, handler in self.served(lambda: failing(code, "busy", 3)):
                result = client.top_k(ROW, k=1)
                self.assertEqual((result.attempts, len(handler.calls)), (4, 4))
                self.assertEqual(result.indices[0].tolist(), [1])

    def test_a_stream_that_a_proxy_cut_is_tried_again(self):
        cut = "Received RST_STREAM with error code 8"
        for client, handler in self.served(lambda: failing(grpc.StatusCode.CANCELLED, cut, 1)):
            self.assertEqual(client.top_k(ROW, k=1).attempts, 2)
        once = logitd.Retry(max_attempts=2)
        for client, handler in self.served(lambda: failing(grpc.StatusCode.CANCELLED, cut, 99), retry=once):
            with self.refused(logitd.Unavailable, cut):
                client.top_k(ROW, k=1)

    def test_waits_as_long_as_the_server_says(self):
        for client, handler in self.served(lambda: failing(EXHAUSTED, "full", 1, "300")):
            with Clock() as clock:
                client.top_k(ROW, k=1)
            self.assertEqual([round(seconds, 6) for seconds in clock.waits], [0.3])

    def test_a_negative_delay_means_no_retry(self):
        for delay in ("-1", "soon"):
            for client, handler in self.served(lambda: failing(EXHAUSTED, "full", 9, delay)):
                with self.refused(logitd.ResourceExhausted, "full (the server asks not to retry)"):
                    client.top_k(ROW, k=1)
                self.assertEqual(len(handler.calls), 1)

    def test_attempts_are_bounded(self):
        for client, handler in self.served(
            lambda: failing(UNAVAILABLE, "gone", 99), retry=logitd.Retry(max_attempts=3)
        ):
            with self.refused(logitd.Unavailable, "UNAVAILABLE: gone (gave up after 3 attempts)") as caught:
                client.top_k(ROW, k=1)
            self.assertEqual((caught.exception.attempts, len(handler.calls)), (3, 3))

    def test_does_not_wait_past_the_deadline(self):
        for client, handler in self.served(lambda: failing(EXHAUSTED, "full", 99, "5000")):
            late = "the next, in 5 s, would pass the deadline"
            with Clock() as clock, self.refused(logitd.ResourceExhausted, late) as caught:
                client.top_k(ROW, k=1, deadline=2.0)
            self.assertEqual(clock.waits, [])
            self.assertEqual(caught.exception.retry_delay, 5.0)
            self.assertEqual(len(handler.calls), 1)

    def test_other_errors_are_final(self):
        for code, kind in (
            (grpc.StatusCode.INVALID_ARGUMENT, logitd.InvalidArgument),
            (grpc.StatusCode.NOT_FOUND, logitd.NotFound),
            (grpc.StatusCode.INTERNAL, logitd.Internal),
            (grpc.StatusCode.PERMISSION_DENIED, logitd.PermissionDenied),
            (grpc.StatusCode.UNAUTHENTICATED, logitd.Unauthenticated),
            (grpc.StatusCode.CANCELLED, logitd.Cancelled),
        ):
            for client, handler in self.served(lambda: failing(code, "k: got 7, allowed 1 to 3", 99)):
                with self.refused(kind, f"{code.name}: k: got 7, allowed 1 to 3") as caught:
                    client.top_k(ROW, k=1)
                self.assertIs(caught.exception.code, code)
                self.assertEqual(len(handler.calls), 1)

    def test_a_message_too_large_for_the_transport_is_final(self):
        for client, handler in self.served(
            lambda: failing(EXHAUSTED, "SERVER: Received message larger than max (9 vs. 4)", 99)
        ):
            with self.refused(logitd.ResourceExhausted, "larger than max"):
                client.top_k(ROW, k=1)
            self.assertEqual(len(handler.calls), 1)

    def test_nobody_listening_is_unavailable(self):
        for client in self.both("127.0.0.1:1", retry=logitd.Retry(max_attempts=4)):
            with self.refused(logitd.Unavailable, "gave up after 4 attempts"):
                client.info()

    def test_by_default_a_server_that_is_away_is_tried_until_the_deadline(self):
        for client in self.both("127.0.0.1:1", deadline=1.5):
            with self.refused(logitd.Unavailable, "would pass the deadline") as caught, Clock() as clock:
                client.info()
            self.assertLess(sum(clock.waits), 1.5)
            self.assertGreater(caught.exception.attempts, 4)

    def test_by_default_a_call_that_is_refused_is_tried_four_times(self):
        for client, handler in self.served(lambda: failing(EXHAUSTED, "full", 99, "1")):
            with self.refused(logitd.ResourceExhausted, "full (gave up after 4 attempts)"):
                client.top_k(ROW, k=1)
            self.assertEqual(len(handler.calls), 4)

    def test_a_deadline_that_passes_while_the_server_comes_back_says_what_was_before(self):
        calls, clock = [], Clock()

        def call(message, context):
            calls.append(1)
            if len(calls) % 2:
                clock.now += 19.5
                context.abort(UNAVAILABLE, "drains")
            over = threading.Event()
            if context.add_callback(over.set):  # else the call is over
                over.wait()
            return ANSWER

        for client, _ in self.served(lambda: call):
            with self.refused(logitd.DeadlineExceeded, "attempt 2; the one before: UNAVAILABLE: drains"), clock:
                client.top_k(ROW, k=1, deadline=20)

    def test_an_answer_that_disagrees_with_itself_is_internal(self):
        codec = _messages.Codec("TopKResponse")
        good = dict(k=[1], indices=[1], probs=[0.5], logsumexp=[3.5], status=[0], status_position=[-1])
        for message in (
            b"\xff",
            codec.encode({**good, "indices": [1, 2]}),
            codec.encode({**good, "k": [-1]}),
            codec.encode({**good, "status": [0, 0]}),
            b"",
        ):
            for client, _ in self.served(lambda: lambda request, context: message):
                with self.refused(logitd.Internal, "the server's answer"):
                    client.top_k(ROW, k=1)


class MetadataTest(TestCase):
    def calls(self, **options):
        for kind in CLIENTS:
            with (
                FakeServer({"TopK": lambda message, context: ANSWER}) as server,
                kind(server.address, **options) as client,
            ):
                client.top_k(ROW, k=1)
                yield server

    def test_a_call_states_the_size_of_its_message(self):
        for server in self.calls():
            self.assertEqual(server.metadata[0]["logitd-payload-bytes"], str(server.sizes[0]))
            self.assertGreater(server.sizes[0], ROW.nbytes)
            self.assertNotIn("logitd-priority", server.metadata[0])
            self.assertNotIn("authorization", server.metadata[0])

    def test_what_is_said_can_be_chosen(self):
        for server in self.calls(priority="batch", state_sizes=False, token="secret-7"):
            self.assertEqual(server.metadata[0]["logitd-priority"], "batch")
            self.assertEqual(server.metadata[0]["authorization"], "Bearer secret-7")
            self.assertNotIn("logitd-payload-bytes", server.metadata[0])

    def test_probes_send_no_token(self):
        for kind in CLIENTS:
            with FakeServer({"Check": lambda message, context: b"\x08\x01"}) as server:
                with kind(server.address, token="secret-7") as client:
                    self.assertEqual(client.health(), "SERVING")
                self.assertNotIn("authorization", server.metadata[0])

    def test_a_token_may_change_between_attempts(self):
        tokens = iter(["old", "new"])
        with FakeServer({"TopK": failing(UNAVAILABLE, "", 1)}) as server:
            with logitd.Client(server.address, token=lambda: next(tokens)) as client:
                client.top_k(ROW, k=1)
            self.assertEqual([m["authorization"] for m in server.metadata], ["Bearer old", "Bearer new"])

    def test_options_that_cannot_work_are_refused(self):
        for kind in (logitd.Client, logitd.AsyncClient):
            for options, text in (
                (dict(address="nowhere"), "address: got 'nowhere', allowed HOST:PORT, unix:PATH, ipv4:A:PORT,B:PORT"),
                (dict(address="host:99999"), "address"),
                (dict(deadline=0), "deadline: got 0 s, allowed above 0"),
                (dict(retry=logitd.Retry(max_attempts=0)), "retry.max_attempts: got 0, allowed 1 or more"),
                (dict(priority="high"), "priority: got 'high', allowed 'interactive', 'batch'"),
                (dict(tls=logitd.TLS(cert="x.pem")), "tls: got only one of cert and key"),
                (dict(tls=logitd.TLS(ca="no/such/file")), "tls.ca: cannot read 'no/such/file'"),
                (dict(tls=logitd.TLS(ca=__file__)), "which is not PEM"),
            ):
                with self.refused(logitd.InvalidArgument, text):
                    kind(**options)

    def test_a_token_is_not_sent_in_plaintext_to_another_machine(self):
        for address in ("example.com:7450", "192.0.2.1:7450", "[2001:db8::1]:7450", "localhost.example.com:1"):
            with self.refused(logitd.InvalidArgument, "token: got one without tls", "token_over_plaintext") as caught:
                logitd.Client(address, token="secret-7")
            self.assertNotIn("secret-7", str(caught.exception))
            logitd.Client(address, token="secret-7", token_over_plaintext=True).close()
        for address in ("localhost:1", "127.8.0.1:1", "[::1]:1", "unix:/run/x"):
            logitd.Client(address, token="secret-7").close()

    def test_a_token_that_would_break_the_header_is_refused_and_not_repeated(self):
        for token in ("", "two words", "line\nbreak", "ü"):
            with logitd.Client("127.0.0.1:1", token=token) as client:
                with self.refused(logitd.InvalidArgument, f"token: got {len(token)} characters") as caught:
                    client.info()
                self.assertFalse(token and token in str(caught.exception))


class CertificatesTestCase(TestCase):
    """With certificates of an authority of its own, in a folder."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        new = "req -newkey rsa:2048 -nodes"
        for name in ("ca", "other"):
            cls.openssl(f"{new} -x509 -days 2 -subj /CN={name} -keyout {name}.key -out {name}.pem")
        for name, host in (("server", "logitd.test"), ("client", "caller.test")):
            cls.path("ext").write_text(f"subjectAltName=DNS:{host}\n")
            cls.openssl(f"{new} -subj /CN={name} -keyout {name}.key -out {name}.csr")
            signing = "-CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile ext"
            cls.openssl(f"x509 -req -in {name}.csr {signing} -out {name}.pem")

    @classmethod
    def path(cls, name):
        return pathlib.Path(cls.folder.name, name)

    @classmethod
    def openssl(cls, command):
        subprocess.run(["openssl", *command.split()], cwd=cls.folder.name, check=True, capture_output=True)

    def tls(self, **changed):
        names = {"ca": "ca.pem", **changed}
        server_name = names.pop("server_name", "logitd.test")
        return logitd.TLS(**{key: self.path(name) for key, name in names.items()}, server_name=server_name)


class TlsTest(CertificatesTestCase):
    def server(self, demand):
        read = lambda name: self.path(name).read_bytes()  # noqa: E731
        return FakeServer(
            {"TopK": lambda message, context: ANSWER},
            credentials=grpc.ssl_server_credentials(
                [(read("server.key"), read("server.pem"))], read("ca.pem") if demand else None, demand
            ),
        )

    def test_calls_go_through_with_the_right_certificates(self):
        with self.server(demand=False) as server:
            for client in self.both(server.address, tls=self.tls(), token="secret-7"):
                self.assertEqual(client.top_k(ROW, k=1).indices[0].tolist(), [1])
            self.assertEqual(server.metadata[0]["authorization"], "Bearer secret-7")
        with self.server(demand=True) as server:
            for client in self.both(server.address, tls=self.tls(cert="client.pem", key="client.key")):
                self.assertEqual(client.top_k(ROW, k=1).indices[0].tolist(), [1])

    def test_wrong_certificates_and_plaintext_are_unavailable(self):
        with self.server(demand=True) as server:
            own = dict(cert="client.pem", key="client.key")
            for tls in (self.tls(), self.tls(ca="other.pem", **own), self.tls(server_name="else.test", **own), None):
                for client in self.both(server.address, tls=tls, retry=logitd.Retry(max_attempts=1)):
                    with self.assertRaises(logitd.Unavailable):
                        client.top_k(ROW, k=1, deadline=5)
            self.assertEqual(server.metadata, [])


class DoorTest(CertificatesTestCase):
    """The real server with TLS and tokens."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        options = subprocess.run([os.environ["LOGITD_BINARY"], "--help"], capture_output=True, text=True).stdout
        if "--tls-cert" not in options or "--tokens" not in options:
            raise unittest.SkipTest("this logitd has no TLS")
        identities = [
            {"name": role, "roles": [role], "token_sha256": [hashlib.sha256(cls.token(role).encode()).hexdigest()]}
            for role in ("infer", "score")
        ]
        cls.path("tokens.json").write_text(json.dumps({"identities": identities}))
        files = {"tls-cert": "server.pem", "tls-key": "server.key", "tls-client-ca": "ca.pem", "tokens": "tokens.json"}
        cls.server = RunningServer(*(f"--{flag}={cls.path(file)}" for flag, file in files.items()))
        cls.addClassCleanup(cls.server.close)

    @staticmethod
    def token(role):
        return f"{role}-0123456789abcdef0123456789abcdef"

    def test_a_caller_with_certificate_and_token_may_do_what_its_role_says(self):
        tls = self.tls(cert="client.pem", key="client.key")
        for client in self.both(self.server.tcp, tls=tls, token=self.token("infer")):
            self.assertEqual(client.top_k(ROW, k=1).indices[0].tolist(), [1])
            self.assertEqual(client.info().backend, "cpu")
            for score in (client.score, client.score_stream):
                with self.refused(logitd.PermissionDenied, "infer", "score"):
                    score(ROW, targets=[1])
        for client in self.both(self.server.tcp, tls=tls, token=self.token("score")):
            self.assertEqual(client.score_stream(ROW, targets=[1]).totals.counted, 1)

    def test_others_are_unauthenticated_and_probes_are_not(self):
        tls = self.tls(cert="client.pem", key="client.key")
        for token in (None, "wrong-0123456789abcdef0123456789abcdef"):
            for client in self.both(self.server.tcp, tls=tls, token=token):
                with self.assertRaises(logitd.Unauthenticated) as caught:
                    client.top_k(ROW, k=1)
                self.assertNotIn("wrong-", str(caught.exception))
                self.assertEqual(caught.exception.attempts, 1)
                self.assertEqual(client.health(), "SERVING")

    def test_without_the_right_certificate_there_is_no_connection(self):
        for tls in (self.tls(), self.tls(ca="other.pem", cert="client.pem", key="client.key"), None):
            once = dict(tls=tls, token=self.token("infer"), retry=logitd.Retry(max_attempts=1))
            for client in self.both(self.server.tcp, **once):
                with self.assertRaises(logitd.Unavailable):
                    client.top_k(ROW, k=1, deadline=5)

    def test_large_messages_pass_both_ways(self):
        logits = np.random.default_rng(1).standard_normal((4, 1 << 20)).astype(np.float32)
        tls = self.tls(cert="client.pem", key="client.key")
        for client in self.both(self.server.tcp, tls=tls, token=self.token("infer")):
            result = client.top_k(logits, k=1 << 18)
            self.assertTrue((result.indices.dense()[:, 0] == logits.argmax(axis=1)).all())


class DeadlineTest(TestCase):
    def test_a_call_ends_at_its_deadline(self):
        released = threading.Event()
        with FakeServer({"TopK": lambda message, context: released.wait(10) and ANSWER}) as server:
            for of_client, of_call in ((0.3, None), (30.0, 0.3)):
                for client in self.both(server.address, deadline=of_client):
                    start = time.monotonic()
                    with self.assertRaises(logitd.DeadlineExceeded) as caught:
                        client.top_k(ROW, k=1, deadline=of_call)
                    self.assertGreaterEqual(time.monotonic() - start, 0.28)  # of gRPC's own clock
                    self.assertIsInstance(caught.exception, TimeoutError)
            for client in self.both(server.address):
                with self.refused(logitd.InvalidArgument, "deadline: got -1 s"):
                    client.top_k(ROW, k=1, deadline=-1)
            released.set()

    def test_all_attempts_share_one_deadline(self):
        with FakeServer({"TopK": failing(UNAVAILABLE, "", 999)}) as server:
            retry = logitd.Retry(max_attempts=1000, initial_backoff=5, max_backoff=5)
            for client in self.both(server.address, deadline=40, retry=retry):
                with self.assertRaises(logitd.LogitdError), Clock() as clock:
                    client.top_k(ROW, k=1)
                self.assertLess(sum(clock.waits), 40)


class ServerTest(ServerTestCase):
    def test_info_and_health(self):
        for client in self.both(self.server.tcp):
            info = client.info()
            self.assertEqual((info.backend, info.version), ("cpu", logitd.__version__))
            self.assertEqual(info.ops[0].name, "softmax_topk")
            self.assertEqual(info.ops[0].dtypes, ("f32", "f16", "bf16"))
            self.assertGreater(info.limits.max_request_bytes, 0)
            self.assertEqual(client.health(), "SERVING")
            self.assertEqual(client.health("logitd.v1.Sampler"), "SERVING")
            with self.assertRaises(logitd.NotFound):
                client.health("logitd.v1.Nothing")

    def test_errors_of_the_server_keep_their_text(self):
        for client in self.both(self.server.unix):
            with self.refused(logitd.InvalidArgument, "k: got 7 at row 0, allowed 1..3") as caught:
                client.top_k(ROW, k=7)
            self.assertEqual((caught.exception.attempts, caught.exception.retry_delay), (1, None))
            self.assertIsInstance(caught.exception, ValueError)

    def test_max_message_bytes_refuses_unsent(self):
        for client in self.both(self.server.unix, max_message_bytes=1000):
            with self.refused(logitd.InvalidArgument, "allowed 1 to 1000 (max_message_bytes)") as caught:
                client.top_k(np.zeros((1, 1000), np.float32), k=1)
            self.assertEqual(caught.exception.attempts, 0)
            self.assertEqual(len(client.score_stream(np.zeros((20, 50), np.float32), targets=[0] * 20).losses), 20)

    def test_large_messages_pass_both_ways(self):
        logits = np.random.default_rng(1).standard_normal((8, 1 << 20)).astype(np.float32)  # 32 MiB
        for client in self.both(self.server.unix):
            result = client.top_k(logits, k=1 << 17)
            self.assertEqual(result.indices.dense().shape, (8, 1 << 17))
            self.assertTrue((result.indices.dense()[:, 0] == logits.argmax(axis=1)).all())

    def test_one_client_serves_many_threads(self):
        logits = np.random.default_rng(2).standard_normal((64, 200)).astype(np.float32)
        wrong = []
        with logitd.Client(self.server.unix) as client:

            def work(first):
                for row in range(first, 64, 8):
                    if client.top_k(logits[row], k=1).indices[0][0] != logits[row].argmax():
                        wrong.append(row)

            threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual(wrong, [])

    def test_tasks_call_at_the_same_time(self):
        logits = np.random.default_rng(3).standard_normal((100, 200)).astype(np.float32)

        async def main():
            async with logitd.AsyncClient(self.server.unix) as client:
                results = await asyncio.gather(*(client.top_k(row, k=1) for row in logits))
                self.assertEqual([int(r.indices[0][0]) for r in results], logits.argmax(axis=1).tolist())

        run(main())

    def test_a_cancelled_task_cancels_its_call_and_the_client_goes_on(self):
        called, go_on = threading.Event(), threading.Event()

        def call(message, context):
            called.set()
            go_on.wait()
            return ANSWER

        async def main():
            with FakeServer({"TopK": call}) as server:
                async with logitd.AsyncClient(server.address) as client:
                    task = asyncio.ensure_future(client.top_k(ROW, k=1))
                    await asyncio.get_running_loop().run_in_executor(None, called.wait)
                    task.cancel()
                    with self.assertRaises(asyncio.CancelledError):
                        await task
                    go_on.set()
                    self.assertEqual((await client.top_k(ROW, k=1)).indices[0].tolist(), [1])

        run(main())


class SampleStreamTest(ServerTestCase):
    LOGITS = np.random.default_rng(4).standard_normal((5, 90)).astype(np.float32)

    def want(self):
        with logitd.Client(self.server.unix) as client:
            return [client.sample(self.LOGITS, seed=step).tokens.tolist() for step in range(20)]

    def test_answers_come_in_the_order_of_the_requests(self):
        with logitd.Client(self.server.unix) as client, client.sample_stream() as stream:
            writer = threading.Thread(
                target=lambda: [stream.write(self.LOGITS, seed=s) for s in range(20)] + [stream.done()]
            )
            writer.start()
            got = list(stream)
            writer.join()
            self.assertEqual([r.tokens.tolist() for r in got], self.want())
            self.assertGreater(got[0].round_trip, 0)
            self.assertIsNone(stream.read())

    def test_answers_come_in_order_with_asyncio(self):
        async def main():
            async with logitd.AsyncClient(self.server.unix) as client, client.sample_stream() as stream:

                async def write():
                    for step in range(20):
                        await stream.write(self.LOGITS, seed=step)
                    await stream.done()

                writer = asyncio.ensure_future(write())
                got = [result.tokens.tolist() async for result in stream]
                await writer
                self.assertEqual(got, self.want())

        run(main())

    def test_a_write_after_done_is_refused(self):
        with logitd.Client(self.server.unix) as client, client.sample_stream() as stream:
            stream.write(self.LOGITS, seed=1)
            for _ in range(3):
                stream.done()
            with self.refused(logitd.FailedPrecondition, "stream: got a write after done(), allowed before it"):
                stream.write(self.LOGITS, seed=2)
            self.assertEqual(len(list(stream)), 1)

        async def main():
            async with logitd.AsyncClient(self.server.unix) as client, client.sample_stream() as stream:
                await stream.write(self.LOGITS, seed=1)
                for _ in range(3):
                    await stream.done()
                with self.refused(logitd.FailedPrecondition, "stream: got a write after done(), allowed before it"):
                    await stream.write(self.LOGITS, seed=2)
                self.assertEqual(len([result async for result in stream]), 1)

        run(main())

    def test_a_refused_request_ends_the_stream_with_its_error(self):
        with logitd.Client(self.server.unix) as client, client.sample_stream() as stream:
            stream.write(self.LOGITS, seed=1)
            stream.write(self.LOGITS, seed=1, top_p=7.0)
            self.assertEqual(stream.read().tokens.shape, (5,))
            for _ in range(2):
                with self.refused(logitd.InvalidArgument, "top_p: got 7"):
                    stream.read()
            with self.refused(logitd.Unavailable, "read has the reason"):
                stream.write(self.LOGITS, seed=1)

        async def main():
            async with logitd.AsyncClient(self.server.unix) as client, client.sample_stream() as stream:
                await stream.write(self.LOGITS, seed=1, top_p=7.0)
                for _ in range(2):
                    with self.refused(logitd.InvalidArgument, "top_p: got 7"):
                        await stream.read()
                with self.refused(logitd.Unavailable, "read has the reason"):
                    await stream.write(self.LOGITS, seed=1)

        run(main())

    def test_a_first_use_connects_with_the_retries_of_other_calls(self):
        server = RunningServer()
        self.addCleanup(server.close)
        server.stop()
        options = {"retry": logitd.Retry(max_attempts=1000)}

        def once():
            with logitd.Client(server.tcp, **options) as client, client.sample_stream() as stream:
                stream.write(self.LOGITS, seed=1)
                return stream.read().tokens.tolist()

        async def once_with_asyncio():
            async with logitd.AsyncClient(server.tcp, **options) as client, client.sample_stream() as stream:
                await stream.write(self.LOGITS, seed=1)
                return (await stream.read()).tokens.tolist()

        for use in (once, lambda: run(once_with_asyncio())):
            start = server.start_when_called()
            self.assertEqual(use(), self.want()[1])
            start.join()
            server.stop()

        async def leave():  # before there is a connection
            async with logitd.AsyncClient(server.tcp, **options) as client:
                async with client.sample_stream():
                    await asyncio.sleep(0.2)

        run(leave())

    def test_a_stream_can_be_left_before_its_end(self):
        with logitd.Client(self.server.unix) as client:
            with client.sample_stream() as stream:
                stream.write(self.LOGITS, seed=1)
            self.assertEqual(client.health(), "SERVING")


class LateServerTest(CertificatesTestCase):
    def test_a_server_that_starts_after_its_client_is_found(self):
        server = RunningServer(f"--tls-cert={self.path('server.pem')}", f"--tls-key={self.path('server.key')}")
        self.addCleanup(server.close)
        for kind in CLIENTS:
            self.assertEqual(server.stop(), 0)
            with kind(server.tcp, tls=self.tls(), retry=logitd.Retry(max_attempts=4)) as client:
                with self.refused(logitd.Unavailable, "UNAVAILABLE"):
                    client.health()
                server.start()

                def found():  # by short calls
                    with contextlib.suppress(logitd.Unavailable):
                        return client.health() == "SERVING"

                until(found)


class LifeTest(TestCase):
    def setUp(self):
        self.server = RunningServer()
        self.addCleanup(self.server.close)

    def test_a_server_that_comes_back_is_found(self):
        retry = logitd.Retry(max_attempts=200, initial_backoff=0.1, max_backoff=0.1)
        for client in self.both(self.server.tcp, retry=retry):
            self.assertEqual(client.health(), "SERVING")
            self.assertEqual(self.server.stop(), 0)
            starter = self.server.start_when_called()
            result = client.top_k(ROW, k=1)
            starter.join()
            self.assertGreater(result.attempts, 1)
            self.assertEqual(result.indices[0].tolist(), [1])

    def test_by_default_calls_survive_a_restart(self):
        logits = np.zeros((2, 40), np.float32)
        for client in self.both(self.server.tcp):
            for call in (
                lambda: client.top_k(ROW, k=1),
                lambda: client.score_stream(logits, targets=[1, 2]),
                lambda: client.attention_softmax(logits),
            ):
                call()  # asks for the server's limits, where it needs them
                self.assertEqual(self.server.stop(), 0)
                starter = later(1.5, self.server.start)
                self.assertGreaterEqual(call().attempts, 5)
                starter.join()

    def test_a_watch_sees_the_drain_and_the_end(self):
        with logitd.Client(self.server.tcp) as client:
            watch = client.watch_health()
            self.assertEqual(next(watch), "SERVING")
            stopper = later(0.1, self.server.stop)
            with self.assertRaises((logitd.Unavailable, logitd.Cancelled)):
                while True:
                    self.assertEqual(next(watch), "NOT_SERVING")
            stopper.join()

    def test_a_watch_can_be_left(self):
        async def main():
            async with logitd.AsyncClient(self.server.tcp) as client:
                async for status in client.watch_health():
                    self.assertEqual(status, "SERVING")
                    break
                self.assertEqual(await client.health(), "SERVING")

        run(main())
        with logitd.Client(self.server.tcp) as client:
            for status in client.watch_health():
                self.assertEqual(status, "SERVING")
                break
            self.assertEqual(client.health(), "SERVING")

"""A Python client generated from the proto files, against the real server.

usage: python_client_test.py SERVER [unittest arguments]. Exits with 77 (skipped) if grpcio or protobuf is missing.
"""

import hashlib
import json
import math
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

try:
    import grpc
    import google.protobuf  # noqa: F401
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

SERVER = sys.argv.pop(1)
PROTOS = pathlib.Path(__file__).resolve().parents[2] / "proto"


def generate(directory):
    subprocess.run(
        ["protoc", f"-I{PROTOS}", f"--python_out={directory}", f"--grpc_python_out={directory}",
         f"--plugin=protoc-gen-grpc_python={shutil.which('grpc_python_plugin')}",
         *map(str, sorted(PROTOS.glob("logitd/v1/*.proto")))],
        check=True)
    sys.path.insert(0, directory)


def top_k(row, k, temperature=1.0):
    """The definition, in double precision."""
    scaled = [x / temperature for x in row]
    high = max(scaled)
    total = sum(math.exp(x - high) for x in scaled)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    return order, [math.exp(scaled[i] - high) / total for i in order], high + math.log(total)


def causal_softmax(scores, queries, keys, scale):
    """Probabilities and logsumexp of each row. The last query sees every key, and each earlier query one key less."""
    probs, logsumexp = [], []
    for row in range(len(scores) // keys):
        seen = row % queries + 1 + keys - queries
        x = [scale * score for score in scores[row * keys:row * keys + seen]]
        high = max(x)
        total = sum(math.exp(v - high) for v in x)
        probs += [math.exp(v - high) / total for v in x] + [0.0] * (keys - seen)
        logsumexp.append(high + math.log(total))
    return probs, logsumexp


class ServerTest(unittest.TestCase):
    """A server with the flags that more_flags() gives."""

    @classmethod
    def more_flags(cls):
        return []

    @classmethod
    def setUpClass(cls):
        if cls is ServerTest:
            raise unittest.SkipTest("has no tests of its own")
        cls.directory = tempfile.mkdtemp()
        generate(cls.directory)
        flags = cls.more_flags()
        cls.log_path = os.path.join(cls.directory, "log")
        cls.socket = f"unix:{cls.directory}/socket"
        with open(cls.log_path, "wb") as log:
            cls.server = subprocess.Popen(
                [SERVER, "--backend=cpu", "--listen=127.0.0.1:0", f"--listen={cls.socket}",
                 "--metrics-listen=off", *flags], stderr=log)
        listening = None
        end = time.monotonic() + 30
        while listening is None:
            if time.monotonic() > end or cls.server.poll() is not None:
                raise RuntimeError(pathlib.Path(cls.log_path).read_text())
            listening = re.search(r"listening on (\S+) .*\n", pathlib.Path(cls.log_path).read_text())
            time.sleep(0.01)
        cls.tcp = listening.group(1)

    @classmethod
    def tearDownClass(cls):
        cls.server.send_signal(signal.SIGTERM)
        try:
            code = cls.server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            cls.server.kill()
            code = cls.server.wait()
        shutil.rmtree(cls.directory)
        assert code == 0, code


class PythonClientTest(ServerTest):
    def stub(self, address):
        from logitd.v1 import sampler_pb2_grpc
        channel = grpc.insecure_channel(address)
        self.addCleanup(channel.close)
        return sampler_pb2_grpc.SamplerStub(channel)

    def test_answers_are_right(self):
        from logitd.v1 import sampler_pb2
        rows = [[math.sin(7 * i * (r + 1)) * 5 for i in range(500)] for r in range(3)]
        payload = struct.pack("<1500f", *(x for row in rows for x in row))
        rows = [struct.unpack_from("<500f", payload, 2000 * r) for r in range(3)]
        ks, temperatures = [1, 10, 500], [1.0, 0.5, 2.0]
        for address in (self.tcp, self.socket):
            response = self.stub(address).TopK(
                sampler_pb2.TopKRequest(dtype="DTYPE_F32", rows=3, vocab=500, logits=payload, k=ks,
                                        temperature=temperatures), timeout=30)
            self.assertEqual(list(response.k), ks)
            entry = 0
            for r, (row, k, temperature) in enumerate(zip(rows, ks, temperatures)):
                order, probs, logsumexp = top_k(row, k, temperature)
                self.assertEqual(list(response.indices[entry:entry + k]), order)
                for got, want in zip(response.probs[entry:entry + k], probs):
                    self.assertAlmostEqual(got / want, 1, delta=1e-5)
                self.assertAlmostEqual(response.logsumexp[r], logsumexp, delta=1e-5 * abs(logsumexp))
                entry += k
            self.assertGreater(response.timings.total_ns, 0)

    def test_sampled_tokens_match_the_definition(self):
        from logitd.v1 import sampler_pb2
        # Seed 0: 0.8805 at position 0, 0.3621 at position 1, 0.6937 at position 4, as fractions of the total weight.
        probs = [0.5, 0.25, 0.25]
        payload = struct.pack("<9f", *(math.log(p) for _ in range(3) for p in probs))
        for address in (self.tcp, self.socket):
            response = self.stub(address).Sample(
                sampler_pb2.SampleRequest(dtype="DTYPE_F32", rows=3, vocab=3, logits=payload, seed=[0],
                                          position=[0, 1, 4], top_p=[1, 1, 0.6], top_logprobs=[3],
                                          want_rank=[True]), timeout=30)
            self.assertEqual(list(response.tokens), [2, 0, 1])
            self.assertEqual(list(response.ranks), [3, 1, 2])
            self.assertEqual(list(response.top_ids), [0, 1, 2] * 3)
            for got, token in zip(response.logprobs, response.tokens):
                self.assertAlmostEqual(got, math.log(probs[token]), delta=1e-5)

    def test_losses_match_the_definition(self):
        from logitd.v1 import scorer_pb2, scorer_pb2_grpc
        probs = [0.5, 0.25, 0.25]
        payload = struct.pack("<9f", *(math.log(p) for _ in range(3) for p in probs))
        with grpc.insecure_channel(self.tcp) as channel:
            response = scorer_pb2_grpc.ScorerStub(channel).Score(
                scorer_pb2.ScoreRequest(dtype="DTYPE_F32", rows=3, vocab=3, logits=payload, targets=[0, -100, 2],
                                        want_rank=True), timeout=30)
        for got, want in zip(response.losses, [math.log(2), 0, math.log(4)]):
            self.assertAlmostEqual(got, want, delta=1e-5)
        self.assertEqual(list(response.ranks), [1, 0, 3])
        self.assertEqual(response.totals.counted, 2)
        self.assertAlmostEqual(response.totals.perplexity, math.sqrt(8), delta=1e-4)

    def test_attention_matches_the_definition(self):
        from logitd.v1 import attention_pb2, attention_pb2_grpc
        batch, heads, queries, keys = 2, 3, 4, 6
        rows = batch * heads * queries
        payload = struct.pack(f"<{rows * keys}f", *(math.sin(11 * i) * 8 for i in range(rows * keys)))
        scores = struct.unpack(f"<{rows * keys}f", payload)
        want, want_logsumexp = causal_softmax(scores, queries, keys, scale=0.25)
        request = attention_pb2.AttentionSoftmaxRequest(
            dtype="DTYPE_F32", batch=batch, heads=heads, queries=queries, keys=keys, scores=payload, scale=0.25,
            window_right=0, want_logsumexp=True)
        for address in (self.tcp, self.socket):
            with grpc.insecure_channel(address) as channel:
                response = attention_pb2_grpc.AttentionStub(channel).Softmax(request, timeout=30)
            self.assertEqual((response.first_row, response.rows), (0, rows))
            self.assertEqual(list(response.fault_rows), [])
            for got, prob in zip(struct.unpack(f"<{rows * keys}f", response.probs), want):
                self.assertAlmostEqual(got, prob, delta=1e-5 * prob)  # exactly 0 where a key is not seen
            for got, value in zip(struct.unpack(f"<{rows}f", response.logsumexp), want_logsumexp):
                self.assertAlmostEqual(got, value, delta=1e-5)

    def test_errors_have_code_and_text(self):
        from logitd.v1 import sampler_pb2
        with self.assertRaises(grpc.RpcError) as caught:
            self.stub(self.tcp).TopK(
                sampler_pb2.TopKRequest(dtype="DTYPE_F32", rows=1, vocab=3, logits=b"1234", k=[1]),
                timeout=30)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
        self.assertIn("logits", caught.exception.details())

    def test_compression_is_refused(self):
        from logitd.v1 import sampler_pb2
        with self.assertRaises(grpc.RpcError) as caught:
            self.stub(self.tcp).TopK(
                sampler_pb2.TopKRequest(dtype="DTYPE_F32", rows=1, vocab=1000, logits=bytes(4000), k=[1]),
                timeout=30, compression=grpc.Compression.Gzip)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.UNIMPLEMENTED)

    def test_info(self):
        from logitd.v1 import server_pb2, server_pb2_grpc
        with grpc.insecure_channel(self.tcp) as channel:
            info = server_pb2_grpc.ServerStub(channel).GetInfo(server_pb2.GetInfoRequest(), timeout=30)
        self.assertEqual(info.backend, "cpu")
        self.assertEqual(info.ops[0].name, "softmax_topk")


class PythonTlsTest(ServerTest):
    """Mutual TLS and tokens."""

    token = "a-token-of-a-python-client"

    @classmethod
    def openssl(cls, *words):
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=cls.directory)

    @classmethod
    def issue(cls, name, days):
        """A key and a certificate of the test's authority."""
        cls.openssl("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                    "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        path = pathlib.Path(cls.directory, f"{name}.ext")
        path.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        cls.openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-days", str(days),
                    "-extfile", path.name, "-out", f"{name}.pem")

    @classmethod
    def more_flags(cls):
        cls.openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=ca",
                    "-keyout", "ca.key", "-out", "ca.pem", "-days", "1")
        cls.issue("server", 1)
        cls.issue("client", 1)
        cls.issue("late", -1)
        tokens = {"identities": [{"name": "python", "roles": ["infer"], "max_calls": 1,
                                  "token_sha256": [hashlib.sha256(cls.token.encode()).hexdigest()]}]}
        pathlib.Path(cls.directory, "tokens.json").write_text(json.dumps(tokens))
        return [f"--tls-cert={cls.directory}/server.pem", f"--tls-key={cls.directory}/server.key",
                f"--tls-client-ca={cls.directory}/ca.pem", f"--tokens={cls.directory}/tokens.json"]

    def channel(self, own="client"):
        read = lambda name: pathlib.Path(self.directory, name).read_bytes()  # noqa: E731
        own = {"private_key": read(f"{own}.key"), "certificate_chain": read(f"{own}.pem")} if own else {}
        channel = grpc.secure_channel(self.tcp, grpc.ssl_channel_credentials(root_certificates=read("ca.pem"), **own))
        self.addCleanup(channel.close)
        return channel

    def top(self, channel, token=None):
        from logitd.v1 import sampler_pb2, sampler_pb2_grpc
        request = sampler_pb2.TopKRequest(dtype="DTYPE_F32", rows=1, vocab=3, logits=struct.pack("<3f", 1, 3, 2), k=[2])
        metadata = [("authorization", f"Bearer {token}")] if token else []
        return sampler_pb2_grpc.SamplerStub(channel).TopK(request, timeout=20, metadata=metadata)

    def code(self, *arguments):
        with self.assertRaises(grpc.RpcError) as caught:
            self.top(*arguments)
        return caught.exception.code()

    def test_certificate_and_token_may_call(self):
        self.assertEqual(list(self.top(self.channel(), self.token).indices), [1, 2])

    def test_a_wrong_or_missing_token_may_not(self):
        channel = self.channel()
        self.assertEqual(self.code(channel, "a-token-that-is-wrong"), grpc.StatusCode.UNAUTHENTICATED)
        self.assertEqual(self.code(channel), grpc.StatusCode.UNAUTHENTICATED)

    def test_an_expired_or_missing_certificate_may_not(self):
        for own in ("late", None):
            self.assertEqual(self.code(self.channel(own), self.token), grpc.StatusCode.UNAVAILABLE)

    def test_a_role_that_is_not_allowed(self):
        from logitd.v1 import scorer_pb2, scorer_pb2_grpc
        request = scorer_pb2.ScoreRequest(dtype="DTYPE_F32", rows=1, vocab=1, logits=bytes(4), targets=[0])
        with self.assertRaises(grpc.RpcError) as caught:
            scorer_pb2_grpc.ScorerStub(self.channel()).Score(
                request, timeout=20, metadata=[("authorization", f"Bearer {self.token}")])
        self.assertEqual(caught.exception.code(), grpc.StatusCode.PERMISSION_DENIED)
        self.assertIn("python may not call Score", caught.exception.details())

    def test_a_quota_in_use(self):
        from logitd.v1 import sampler_pb2, sampler_pb2_grpc
        channel = self.channel()
        done = threading.Event()
        request = sampler_pb2.SampleRequest(dtype="DTYPE_F32", rows=1, vocab=1, logits=bytes(4), seed=[0], position=[0])

        def messages():
            yield request
            done.wait(20)

        stream = sampler_pb2_grpc.SamplerStub(channel).SampleStream(
            messages(), timeout=20, metadata=[("authorization", f"Bearer {self.token}")])
        next(stream)
        self.assertEqual(self.code(channel, self.token), grpc.StatusCode.RESOURCE_EXHAUSTED)
        done.set()
        self.assertEqual(list(stream), [])
        self.top(channel, self.token)


if __name__ == "__main__":
    unittest.main()

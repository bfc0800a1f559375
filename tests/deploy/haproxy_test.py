"""Two replicas behind HAProxy with deploy/haproxy/haproxy.cfg: one drains under load, and no call is lost."""

import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import tempfile
import threading
import unittest

import numpy as np
from processes import Logitd, Process, program, python_client
from tools import ROOT, certificate, free_ports, http, wait_for

CONFIG = ROOT / "deploy/haproxy/haproxy.cfg"
TOKEN = "a-token-of-this-test-only"
CALLS = 60  # of each replica, in each of the phases


class DrainTest(unittest.TestCase):
    def setUp(self):
        self.haproxy = program("haproxy")
        self.place = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.place)
        self.logitd = python_client(self.place / "package")
        certificate(self.place, "localhost", "127.0.0.1")
        both = (self.place / "tls.crt").read_text() + (self.place / "tls.key").read_text()
        (self.place / "both.pem").write_text(both)
        digest = hashlib.sha256(TOKEN.encode()).hexdigest()
        identity = {"name": "test", "roles": ["infer", "score"], "token_sha256": [digest]}
        (self.place / "tokens.json").write_text(json.dumps({"identities": [identity]}))
        self.replicas = {name: self.replica(name) for name in "ab"}
        (self.port,) = free_ports(1)
        environment = {
            "PATH": os.environ["PATH"],
            "LOGITD_BIND": f"127.0.0.1:{self.port}",
            "LOGITD_CERTIFICATE": f"{self.place}/both.pem",
            "LOGITD_CA": f"{self.place}/tls.crt",
            **{f"LOGITD_{name.upper()}": replica.address for name, replica in self.replicas.items()},
        }
        self.proxy = Process(self.place, "haproxy", self.haproxy, "-f", CONFIG, environment=environment)
        self.addCleanup(self.proxy.stop)
        self.proxy.wait_for("listening", self.listens)

    def replica(self, name, listen="127.0.0.1:0"):
        replica = Logitd(
            self.place,
            name,
            f"--tls-cert={self.place}/tls.crt",
            f"--tls-key={self.place}/tls.key",
            f"--tokens={self.place}/tokens.json",
            listen=listen,
        )
        self.addCleanup(replica.stop)
        return replica

    def client(self):
        # Attempts for some seconds: longer than HAProxy needs to see a drain.
        return self.logitd.Client(
            f"127.0.0.1:{self.port}",
            tls=self.logitd.TLS(ca=self.place / "tls.crt"),
            token=TOKEN,
            retry=self.logitd.Retry(max_attempts=10),
        )

    def listens(self):
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def served(self, name):
        """Calls of ops that a replica has answered with OK; 0 while it does not run."""
        page = http(f"http://{self.replicas[name].metrics}/metrics") or ""
        return sum(map(int, re.findall(r'^logitd_requests_total\{code="OK",op="\w+"\} (\d+)', page, re.MULTILINE)))

    def test_one_lost_check_takes_no_replica_out(self):
        lost = "Health check for server replicas/a failed"
        self.proxy.wait_for("a check that succeeds", lambda: "replicas/a succeeded" in self.proxy.log)
        process = self.replicas["a"].process
        process.send_signal(signal.SIGSTOP)  # for longer than `timeout check`
        try:
            self.proxy.wait_for("a lost check", lambda: lost in self.proxy.log)
        finally:
            process.send_signal(signal.SIGCONT)
        succeeded = self.proxy.log.count("replicas/a succeeded")
        self.proxy.wait_for("a good check after it", lambda: self.proxy.log.count("replicas/a succeeded") > succeeded)
        self.assertNotIn("replicas/a is DOWN", self.proxy.log)

    def test_a_replica_drains_and_returns_under_load(self):
        random = np.random.default_rng(7)
        small = random.standard_normal((4, 1000), np.float32)
        large = random.standard_normal((64, 32000), np.float32)  # 8 MiB
        long = random.standard_normal((4096, 200), np.float32)
        targets = random.integers(0, 200, 4096).astype(np.int32)
        position = 3
        with self.client() as client:  # nothing drains yet
            expected = {
                "sample": client.sample(small, seed=[1, 2, 3, 4], position=position, temperature=0.9).tokens.tolist(),
                "top_k": client.top_k(large, k=3).indices.dense().tolist(),
                "score": client.score(long, targets=targets).totals.perplexity,
            }
        by_hand = np.argsort(-large, axis=1, kind="stable")[:, :3]
        self.assertEqual(expected["top_k"], by_hand.tolist())

        answered = {kind: 0 for kind in expected}
        faults, lock, over = [], threading.Lock(), threading.Event()

        def call(client, kind):
            if kind == "sample":
                return client.sample(small, seed=[1, 2, 3, 4], position=position, temperature=0.9).tokens.tolist()
            if kind == "top_k":
                return client.top_k(large, k=3).indices.dense().tolist()
            return client.score_stream(long, targets=targets).totals.perplexity  # goes on after its last answer

        def caller(kind):
            try:
                with self.client() as client:
                    while not over.is_set():
                        got = call(client, kind)
                        with lock:
                            answered[kind] += 1
                        if kind == "score":
                            self.assertAlmostEqual(got, expected[kind], places=4)
                        else:
                            self.assertEqual(got, expected[kind])
            except BaseException as fault:  # a thread's fault is the test's
                faults.append((kind, fault))
                over.set()

        threads = [threading.Thread(target=caller, args=(k,)) for k in ("sample", "sample", "top_k", "score")]
        for thread in threads:
            thread.start()
        try:

            def more(names, calls=CALLS):
                """Waits until each of these replicas has answered so many more calls."""
                before = {name: self.served(name) for name in names}
                wait_for(
                    f"{calls} more calls by {names}: {faults}",
                    lambda: over.is_set() or all(self.served(n) >= before[n] + calls for n in names),
                )
                self.assertEqual(faults, [])

            more("ab")
            drained = self.replicas["a"]
            self.assertEqual(drained.stop(), 0)
            self.assertIn("drained: 0 calls cut short", drained.log)
            more("b")
            self.assertIn("Server replicas/a is DOWN", self.proxy.log)
            self.replicas["a"] = self.replica("a", drained.address)  # an upgrade: the same place, a new process
            more("ab")
        finally:
            over.set()
            for thread in threads:
                thread.join()
        self.assertEqual(faults, [])
        self.assertTrue(all(answered.values()), answered)
        for name, replica in self.replicas.items():
            page = http(f"http://{replica.metrics}/metrics")
            self.assertNotRegex(page, r'(?m)^logitd_connections_cut_total\{.*\} [1-9]', name)  # a proxy is no attacker
            self.assertEqual(replica.stop(), 0)
        print(f"answered: {answered}", flush=True)


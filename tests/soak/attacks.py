"""Peers that do harm, each for a given time. They return what they saw as text; the soak checks the server."""

import os
import random
import signal
import socket
import struct
import subprocess
import time

import http2

TOPK = "/logitd.v1.Sampler/TopK"
SAMPLE_STREAM = "/logitd.v1.Sampler/SampleStream"
MIB = 1 << 20


class Target:
    def __init__(self, port, metrics_port, load_bench):
        self.port = port
        self.metrics_port = metrics_port
        self.load_bench = load_bench

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def load(self, *flags):
        return subprocess.Popen([self.load_bench, "--addr", self.address, *map(str, flags)],
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip


def repeat(seconds, once):
    """Runs `once` until the time is over; a cut or refused connection counts and ends only that round."""
    rounds = cuts = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            once(end)
        except OSError:
            cuts += 1
            time.sleep(0.01)
        rounds += 1
    return f"{rounds} rounds, {cuts} cut by the server"


def with_peer(target, seconds, attack):
    def once(end):
        peer = http2.Peer(target.port)
        try:
            attack(peer, end)
        finally:
            peer.close()

    return repeat(seconds, once)


def continuation_flood(target, seconds):
    """HEADERS that never end, then CONTINUATION frames."""

    def attack(peer, end):
        stream = peer.call(TOPK, end_headers=False)
        block = b"".join(http2.literal(f"x-{i}", b"a" * 1000) for i in range(15))
        while time.monotonic() < end:
            peer.send(http2.frame(http2.CONTINUATION, 0, stream, block))

    return with_peer(target, seconds, attack)


def large_headers(target, seconds):
    """Calls with more than a mebibyte of headers each."""

    def attack(peer, end):
        while time.monotonic() < end:
            stream = peer.call(TOPK, end_headers=False)
            for i in range(70):
                block = b"".join(http2.literal(f"y-{i}-{j}", b"b" * 2000) for j in range(8))
                last = http2.END_HEADERS if i == 69 else 0
                peer.send(http2.frame(http2.CONTINUATION, last, stream, block))
            peer.read_frames(0)

    return with_peer(target, seconds, attack)


def tiny_frames(target, seconds):
    """Messages of 64 MiB in DATA frames of one byte."""

    def attack(peer, end):
        stream = peer.call(TOPK)
        peer.send_data(stream, http2.message(bytes(64 * MIB))[: 4 * MIB], chunk=1, seconds=end - time.monotonic())

    return with_peer(target, seconds, attack)


def many_connections(target, seconds):
    """More connections than the server has descriptors for."""

    def once(end):
        held = []
        try:
            while len(held) < 3000 and time.monotonic() < end:
                held.append(socket.create_connection(("127.0.0.1", target.port), timeout=1))
            time.sleep(max(0, min(2, end - time.monotonic())))
        finally:
            for one in held:
                one.close()

    return repeat(seconds, once)


def slow_senders(target, seconds):
    """14 connections that declare 64 MiB and send a byte a second."""

    def once(end):
        peers = []
        try:
            for _ in range(14):
                peer = http2.Peer(target.port)
                peers.append((peer, peer.call(TOPK)))
                peer.send_data(peers[-1][1], struct.pack(">BI", 0, 64 * MIB))
            while time.monotonic() < end:
                for peer, stream in peers:
                    peer.send_data(stream, b"\x00")
                    if any(kind in (http2.RST_STREAM, http2.HEADERS) for kind, *_ in peer.read_frames(0)):
                        return  # refused: come back with new calls
                time.sleep(1)
        finally:
            for peer, _ in peers:
                peer.close()

    return repeat(seconds, once)


def headers_alone(target, seconds):
    """1100 calls on one connection of which nothing but the headers comes."""

    def attack(peer, end):
        for _ in range(1100):
            peer.call(TOPK)
            peer.read_frames(0)
        while time.monotonic() < end:
            peer.read_frames(0.2)

    return with_peer(target, seconds, attack)


def idle_streams(target, seconds):
    """16 streams that send one message of 63 MiB each and then nothing."""

    def once(end):
        peers = []
        try:
            body = http2.message(http2.sample_request(126, 131072))
            for _ in range(16):
                peer = http2.Peer(target.port)
                peers.append(peer)
                peer.send_data(peer.call(SAMPLE_STREAM), body, seconds=max(0.0, end - time.monotonic()))
            while time.monotonic() < end:
                for peer in peers:
                    peer.read_frames(0.01)
                time.sleep(0.2)
        finally:
            for peer in peers:
                peer.close()

    return repeat(seconds, once)


def rapid_resets(target, seconds):
    """Calls that are reset at once."""

    def attack(peer, end):
        while time.monotonic() < end:
            for _ in range(50):
                stream = peer.call(TOPK)
                peer.send(http2.frame(http2.RST_STREAM, 0, stream, struct.pack(">I", 8)))
            peer.read_frames(0)

    return with_peer(target, seconds, attack)


def garbage(target, seconds):
    """Bytes that are not HTTP/2, and frames that are not gRPC."""
    chance = random.Random(7)

    def once(end):
        with socket.create_connection(("127.0.0.1", target.port), timeout=1) as raw:
            if chance.random() < 0.5:
                raw.sendall(http2.PREFACE)
            raw.sendall(chance.randbytes(chance.randrange(1, 5000)))
            raw.settimeout(0.05)
            try:
                raw.recv(4096)
            except (TimeoutError, socket.timeout):
                pass

    return repeat(seconds, once)


def forged_log_lines(target, seconds):
    """Header values that would forge lines of the log."""

    def attack(peer, end):
        while time.monotonic() < end:
            for _ in range(20):
                peer.call(TOPK, [("grpc-timeout", b"x\n2026-01-01 00:00:00.000 error forged \xff\xfe")])
            peer.read_frames(0)

    return with_peer(target, seconds, attack)


def unfinished_scrapes(target, seconds):
    """500 requests for the metrics that never end."""

    def once(end):
        held = []
        try:
            for _ in range(500):
                held.append(socket.create_connection(("127.0.0.1", target.metrics_port), timeout=1))
                held[-1].sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
            time.sleep(max(0.0, min(5.0, end - time.monotonic())))
        finally:
            for one in held:
                one.close()

    return repeat(seconds, once)


def killed_clients(target, seconds):
    """Clients that are killed while they send and receive."""

    def once(end):
        clients = [target.load("--rows", 64, "--connections", 2, "--in-flight", 2, "--duration", 60) for _ in range(3)]
        time.sleep(max(0.0, min(random.uniform(0.3, 1.5), end - time.monotonic())))
        for client in clients:
            os.kill(client.pid, signal.SIGKILL)
            client.communicate()

    return repeat(seconds, once)


def heavy_load(target, seconds):
    """8 connections with 4 calls of 64 MiB each, which come back when they are refused."""
    load = target.load("--rows", 128, "--connections", 8, "--in-flight", 4, "--retry", "--warmup", 0,
                       "--duration", seconds, "--deadline", 120)  # fmt: skip
    return load.communicate()[0].strip().splitlines()[-1]


def overload(target, seconds):
    """Five times the load that the server can answer, with a deadline of 200 ms."""
    load = target.load("--rows", 8, "--vocab", 50257, "--k", 10, "--connections", 4, "--rate", 4000, "--warmup", 0,
                       "--duration", seconds, "--deadline", 0.2)  # fmt: skip
    return load.communicate()[0].strip().splitlines()[-1]


ALL = [continuation_flood, large_headers, tiny_frames, many_connections, slow_senders, headers_alone, idle_streams,
       rapid_resets, garbage, forged_log_lines, unfinished_scrapes, killed_clients, heavy_load, overload]  # fmt: skip

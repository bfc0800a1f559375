#!/usr/bin/env python3
"""Times one call of the Python client through a ring, beside gRPC over a Unix socket.

    bench/python/ring.py SERVER [--seconds 6] [--json FILE]

SERVER is a logitd, which this starts on the CPU backend. One row of f32, TopK with k = 10, one call at a time: by
Client with the row in the message, by Client with the row in an arena, by Ring, and by a Ring that sleeps at once
instead of looking for its answer. The ways take turns of 50 calls, so that all of them see the same machine. Prints
medians and 99th percentiles of the round trip, from the call of the method to its result, in microseconds. Needs what
tests/client/python/run.py needs.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/client/python"))

import run  # noqa: E402

MEMORY = 4 << 20  # bytes of an arena
TURN = 50  # calls of one way before the next has its turn


def measure(server, width, seconds):
    """Times of each way, in seconds."""
    import logitd
    import numpy as np

    data = np.random.default_rng(1).standard_normal((1, width), np.float32)
    lease = logitd.Arena.lease
    with logitd.Client(server.unix) as client, lease(server.arena, MEMORY) as arena, lease(server.arena, MEMORY) as two:
        with arena.ring() as ring, two.ring(spin=0) as sleeper:
            row = arena.empty((1, width))
            row[:] = data
            ways = {
                "grpc": lambda: client.top_k(data, k=10),
                "grpc_arena": lambda: client.top_k(row, k=10, arena=arena),
                "ring": lambda: ring.top_k(row, k=10, arena=arena),
                "ring_spin_0": lambda: sleeper.top_k(row, k=10, arena=arena),
            }
            times = {name: [] for name in ways}
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                for name, call in ways.items():
                    for warm in range(TURN + 5):
                        begin = time.perf_counter()
                        call()
                        if warm >= 5:
                            times[name].append(time.perf_counter() - begin)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server")
    parser.add_argument("--seconds", type=float, default=6, help="for each width")
    parser.add_argument("--json", help="also write the figures there")
    flags = parser.parse_args()
    os.environ["LOGITD_BINARY"] = os.path.abspath(flags.server)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    figures = {"commit": commit.strip()}
    figures |= {"cores": os.cpu_count(), "python": sys.version.split()[0], "call": "top_k, k 10, 1 row of f32"}
    with tempfile.TemporaryDirectory() as folder:
        run.stage(folder)
        from harness import RunningServer

        server = RunningServer(arenas=True)
        try:
            for width in (1024, 131072):
                row = figures[f"row_{width}"] = {}
                for name, times in measure(server, width, flags.seconds).items():
                    times.sort()
                    p50, p99 = (times[int(len(times) * share)] * 1e6 for share in (0.5, 0.99))
                    row[name] = {"calls": len(times), "p50_us": round(p50, 1), "p99_us": round(p99, 1)}
                    print(f"{width:7} {name:11} p50 {p50:8.1f} us   p99 {p99:8.1f} us   {len(times)} calls")
        finally:
            server.close()
    if flags.json:
        pathlib.Path(flags.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Times sampling in NumPy, as the CPU backend's peer: top-k, top-p and a draw for every row, in one call.

    bench/peers/sample_numpy.py [--rows 64] [--vocab 131072] [--json FILE]

Needs NumPy (Debian: python3-numpy). Does what kernel_bench's entry "top-k 50, top-p 0.9" does, the way NumPy does it
fastest: a partition finds the top 50, and only those are sorted, exponentiated and summed. Log-probabilities, ranks
and the check for NaN, which the op also gives, are left out; `full` adds the log-sum-exp of the whole row. Prints
medians of 15 runs in microseconds.
"""

import argparse
import json
import time

import numpy as np


def sample(logits, top_k, top_p, uniform):
    """Tokens [rows] of logits [rows, vocab] f32, at uniform [rows] in [0, 1)."""
    rows = np.arange(len(logits))[:, None]
    top = np.argpartition(logits, -top_k, axis=1)[:, -top_k:]
    top = top[rows, np.argsort(-logits[rows, top], axis=1, kind="stable")]
    kept = logits[rows, top].astype(np.float64)
    weights = np.exp(kept - kept[:, :1])
    through = np.cumsum(weights, axis=1)
    weights[through - weights >= top_p * through[:, -1:]] = 0
    through = np.cumsum(weights, axis=1)
    return top[rows[:, 0], (through <= uniform[:, None] * through[:, -1:]).sum(axis=1)]


def logsumexp(logits):
    peak = logits.max(axis=1, keepdims=True)
    return peak[:, 0] + np.log(np.exp(logits - peak).sum(axis=1, dtype=np.float64))


def median_us(call, runs=15):
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return sorted(times)[runs // 2] * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--json", help="also write the figures there")
    flags = parser.parse_args()
    random = np.random.default_rng(1)
    logits = random.standard_normal((flags.rows, flags.vocab), dtype=np.float32)
    uniform = random.random(flags.rows)
    figures = {
        "numpy": np.__version__,
        "rows": flags.rows,
        "vocab": flags.vocab,
        "sample_us": median_us(lambda: sample(logits, 50, 0.9, uniform)),
        "full_us": median_us(lambda: (sample(logits, 50, 0.9, uniform), logsumexp(logits))),
    }
    print(json.dumps(figures, indent=2))
    if flags.json:
        with open(flags.json, "w") as out:
            json.dump(figures, out, indent=2)
            out.write("\n")


if __name__ == "__main__":
    main()

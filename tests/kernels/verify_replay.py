#!/usr/bin/env python3
"""Decides about the drafts of `verify` again, with only the text of docs/semantics.md and Python's standard library.

    tests/kernels/verify_replay.py PATH_OF_KERNELS_TEST

Runs that test's dump of sequences, and replays each. Where a border lies within what f32 rounding may move, both
answers are right; that may be so for one sequence in a hundred, and the others must agree.
"""

import json
import math
import os
import subprocess
import sys
import tempfile

from sample_replay import SHIFT, fixed, of_bits, random_bits, sample, weight

GREEDY, LIST, DENSE = 0, 1, 2
NOT_REACHED = 3
OFF = {"top_p": 1, "top_n_sigma": 0, "min_p": 0, "typical_p": 1, "xtc_probability": 0, "xtc_threshold": 0.1,
       "draws": 0, "watermark_width": 0}  # fmt: skip
LISTS = {"history": [], "bias_ids": [], "bias_values": [], "mask": [], "prompt_tokens": 0}
PENALTIES = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}


class Row:
    """A row's integers: w of the tokens that can be drawn, s their sum, q of the draft; and its random bits."""

    def __init__(self, row):
        self.code, self.draft, self.kind, self.given = row["code"], row["draft"], row["kind"], row
        (self.status, _), (self.tokens,), self.shaky, x, supports = sample({**row, **OFF, **LISTS, **PENALTIES})
        self.bits, self.coin = random_bits(row["seed"], row["position"])
        if self.status:
            return
        kept, _ = supports[0]
        if row["temperature"] == 0:
            self.w = {kept[0]: 2**43}
        else:
            top, temperature = max(x), max(row["temperature"], 2.0**-118)
            self.w = {i: fixed(weight(x[i], top, temperature)) for i in sorted(kept)}
        self.s = sum(self.w.values())
        ids = row["ids"] if self.kind == LIST else range(len(row["probs"]))
        self.q = {i: self.mass(of_bits(bits)) for i, bits in zip(ids, row["probs"])}

    def mass(self, q):
        return round(min(q, 1.0) * float(self.s)) if q > 0 else 0

    def left(self, share):
        return {i: max(round(share * w) - self.q.get(i, 0), 0) for i, w in self.w.items()}

    def drawn(self, share):
        """The tokens that the bits may draw from what q leaves."""
        left = self.left(share)
        total = sum(left.values())
        if total <= 2 * SHIFT * self.s:  # rounding may have left it
            return set(self.w)
        mass, goal, slack, found = 0, self.bits * total >> 64, 2 * SHIFT * self.s, set()
        for i, r in left.items():
            if mass - slack <= goal < mass + r + slack:
                found.add(i)
            mass += r
        return found


def token_by_token(rows):
    """The answers that rounding allows: how many drafts are accepted, and the bonus token, -1 where there is none."""
    for i, row in enumerate(rows):
        if row.status:
            return {(i, -1)}
        if i + 1 == len(rows):
            return {(i, token) for token in row.tokens}
        if row.kind == GREEDY:
            if row.tokens == {row.draft}:
                continue
            others = {(i, token) for token in row.tokens if token != row.draft}
            return others | (token_by_token_from(rows, i + 1) if row.draft in row.tokens else set())
        reach, own = row.coin * row.q.get(row.draft, 0) >> 64, row.w.get(row.draft, 0)
        refused = {(i, token) for token in row.drawn(1.0)}
        if abs(reach - own) <= SHIFT * row.s and own:
            return refused | token_by_token_from(rows, i + 1)
        if reach >= own:
            return refused
    return set()


def token_by_token_from(rows, first):
    return {(first + n, token) for n, token in token_by_token(rows[first:])}


def together(rows):
    """The outcome with block verification."""
    shares, chosen, close = [1.0], 0, set()
    for i, row in enumerate(rows):
        share, last = shares[i], row.status or i + 1 == len(rows)
        if i > 0:
            coin = rows[i - 1].coin
            left = 0 if last else sum(row.left(share).values())
            whole = 2**64 if last else left + round((1 - share) * float(row.s))
            border = math.floor(share * 2.0**64) if last else left
            reach = coin if last else coin * whole >> 64
            slack = i * 1e-5 * (2**64 if last else row.s)
            if share < 1 and abs(reach - border) <= slack:
                close.add(i)
            elif share == 1 or reach < border:
                chosen, close = i, set()
        if last:
            break
        t, q = share * row.w.get(row.draft, 0), float(row.q.get(row.draft, 0))
        shares.append(0.0 if t == 0 else t / q if t < q else 1.0)
    found = set()
    for i in close | {chosen}:
        row = rows[i]
        tokens = {-1} if row.status else row.tokens if i + 1 == len(rows) else row.drawn(shares[i])
        found |= {(i, token) for token in tokens}
    return found


def faults(sequence):
    rows = [Row(row) for row in sequence["rows"]]
    allowed = (together if sequence["block"] else token_by_token)(rows)
    accepted = sequence["accepted"]
    got = (accepted, rows[accepted].given["token"])
    found = [] if got in allowed else [f"accepted {got[0]} and token {got[1]}, want {sorted(allowed)[:5]}"]
    for i, row in enumerate(rows):
        want = row.draft if i < accepted else got[1] if i == accepted else -1
        code = NOT_REACHED if i > accepted else row.status
        if (row.given["token"], row.code) != (want, code):
            found.append(f"row {i}: token {row.given['token']}, status {row.code}, want {want}, {code}")
    return found, len(allowed) > 1


def main():
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "sequences.json")
        command = [sys.argv[1], "--gtest_filter=VerifyDumpTest.*", "--gtest_brief=1"]
        subprocess.run(command, env={**os.environ, "LOGITD_VERIFY_DUMP": path}, check=True)
        with open(path) as file:
            sequences = [json.loads(line) for line in file]
    shaky = wrong = 0
    for number, sequence in enumerate(sequences):
        found, unsure = faults(sequence)
        shaky += unsure
        wrong += bool(found)
        for fault in found:
            print(f"sequence {number} of {len(sequence['rows'])} rows, block {sequence['block']}: {fault}")
    print(f"{len(sequences)} sequences replayed: {wrong} wrong, {shaky} where rounding decides")
    return 1 if wrong or len(sequences) < 400 or shaky * 100 > len(sequences) else 0


if __name__ == "__main__":
    sys.exit(main())

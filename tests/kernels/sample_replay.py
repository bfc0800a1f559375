#!/usr/bin/env python3
"""Draws the tokens of `sample` again, with only the text of docs/semantics.md and Python's standard library.

    tests/kernels/sample_replay.py PATH_OF_KERNELS_TEST

Runs that test's dump of rows, parameters and tokens, and replays every row. Python's exp is in double precision, so
where a border lies within 4e-6 of a row's mass the tokens on both sides of it are right; that may be so for one row
in a hundred, and the others must agree.
"""

import bisect
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
from fractions import Fraction
from itertools import accumulate

INF = math.inf
NAN_LOGIT, EMPTY_SUPPORT = 1, 2
SHIFT = 4e-6  # what f32 rounding may move a border by, as a share of the mass


def f32(x):
    """x rounded to f32: a result of one operation on f32 values, rounded once more, is that operation in f32."""
    if math.isnan(x) or math.isinf(x):
        return x
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(INF, x)


def of_bits(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def philox4x32(key, counter):
    """Ten rounds over four 32-bit words of counter with two of key."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def random_bits(seed, position, draw=0):
    """r of a draw and, of draw 0, the coin."""
    out = philox4x32((seed & 0xFFFFFFFF, seed >> 32), (position & 0xFFFFFFFF, position >> 32, draw, 0))
    return out[0] | out[1] << 32, out[2] | out[3] << 32


def marked_token(row, support, x, temperature):
    """The token of the support with the largest score of the row's watermark, and those that a rounding cannot tell."""
    context = row["history"][-row["watermark_width"] :]
    state = row["watermark_key"]
    for token in context:
        out = philox4x32((state & 0xFFFFFFFF, state >> 32), (token, len(context), 0, 1))
        state = out[0] | out[1] << 32
    scores, top = {}, max(x)
    for i in support:
        out = philox4x32((state & 0xFFFFFFFF, state >> 32), (i, 0, 0, 2))
        u = (2 * ((out[0] | out[1] << 32) >> 12) + 1) / 2**53
        scores[i] = ((x[i] - top) / temperature if top < INF else 0.0) - math.log(-math.log(u))
    best = max(scores.values())
    return {i for i, score in scores.items() if score >= best - 1e-13 * max(1, abs(x[i] - top) / temperature if top < INF else 1)}


def edited(x, row):
    """Bias, penalties, mask; f32 after every step; a ban where infinities of both signs meet."""
    x = list(x)

    def settled(v):
        return -INF if math.isnan(v) else v

    for token, bits in zip(row["bias_ids"], row["bias_values"]):
        x[token] = settled(f32(x[token] + of_bits(bits)))
    repetition, presence, frequency = (row[name + "_penalty"] for name in ("repetition", "presence", "frequency"))
    counts = {}
    for place, token in enumerate(row["history"]):
        counts[token] = counts.get(token, 0) + (place >= row["prompt_tokens"])
    for token, count in counts.items():
        v = x[token]
        x[token] = v = f32(v / repetition) if v > 0 else f32(v * repetition)
        if count > 0:
            v = settled(f32(v - f32(frequency * count)))
            x[token] = f32(v - presence)
    if row["mask"]:
        x = [v if row["mask"][i // 32] >> (i % 32) & 1 else -INF for i, v in enumerate(x)]
    return x


def weight(x, top, temperature):
    if top == INF:
        return 1.0 if x == INF else 0.0
    return math.exp((x - top) / temperature) if x > -INF else 0.0


def fixed(w):
    return round(w * 2.0**43)  # to nearest, ties to even


def first_above(weights, through, target):
    """The lowest i whose prefix sum `through` exceeds the target, and the tokens a shift of the border reaches."""
    slack = SHIFT * through[-1]
    token = bisect.bisect_right(through, target)
    close, i = set(), bisect.bisect_left(through, target - slack)
    while i < len(weights) and (through[i - 1] if i else 0) - slack <= target:
        if weights[i] and target < through[i] + slack:
            close.add(i)
        i += 1
    return token, close


def prefix_masses(cells, top, temperature):
    """P_0 = 0, then P_c for every cell."""
    prefix = [0.0]
    for cell in cells:
        m = max(cell)
        mass = sum(weight(v, m, temperature) for v in cell) * weight(m, top, temperature) if m > -INF else 0.0
        prefix.append(prefix[-1] + mass)
    return prefix


def sum32(numbers):
    """The sum by 32 sums."""
    sums = [0.0] * 32
    for i, number in enumerate(numbers):
        sums[i % 32] += number
    half = 16
    while half:
        for j in range(half):
            sums[j] += sums[j + half]
        half //= 2
    return sums[0]


def sigma_border(n, x):
    """The lowest logit that top_n_sigma keeps. A Fraction is exact, and rounds where it becomes a float."""
    top, count = max(x), sum(v > -INF for v in x)
    below = [top - v if v > -INF else 0.0 for v in x]
    cells = [below[c : c + 1024] for c in range(0, len(x), 1024)]
    mean = sum32([sum32(cell) for cell in cells]) / count
    square = sum32([sum32([d * d for d in cell]) for cell in cells]) / count
    sigma = math.sqrt(max(0.0, float(Fraction(square) - Fraction(mean) ** 2)))
    return float(Fraction(top) - Fraction(n) * Fraction(sigma))


def least_kept(row, x, temperature):
    """The lowest difference to the largest logit, and the lowest logit, that a filtered row keeps; whether a filter says it."""
    n = row["top_n_sigma"]
    border = sigma_border(n, x) if n > 0 and max(x) < INF else -INF
    return temperature * math.log(max(row["min_p"], 2.0**-44)), border, row["min_p"] > 0 or n > 0


def entropy(x, temperature):
    """Of a distribution of the logits x, in nats."""
    top = max(x)
    w = [weight(v, top, temperature) for v in x]
    below = [(top - v) / temperature if v > -INF and top < INF else 0.0 for v in x]
    return math.log(sum(w)) + sum(a * b for a, b in zip(w, below) if a > 0) / sum(w)


def mass_needed(share, total):
    """The share's mass, rounded up, at least 1."""
    return max(1, -(-math.floor(share * 2.0**64) * total >> 64))


def typical(left, w, surprises, typical_p):
    """What typical_p keeps of tokens in the order, and what it keeps where rounding moves a border or the mean."""
    total = sum(w[i] for i in left)
    mean = sum(round(w[i] * surprises[i]) for i in left) / total
    found = []
    for shift in (0.0, -1e-6, 1e-6):
        distance = {i: f32(abs(surprises[i] - (mean + shift))) for i in left}
        nearest = sorted((i for i in left if w[i]), key=lambda i: (distance[i], i))
        need, mass, slack = mass_needed(typical_p, total), 0, SHIFT * total
        for n, i in enumerate(nearest, start=1):
            before, mass = mass, mass + w[i]
            if (before < need + slack or n == 1) and mass >= need - slack:
                near = set(nearest[:n])
                found.append([i for i in left if i in near])
    return found


def after_xtc(left, w, threshold):
    """What xtc keeps of tokens in the order, and what it keeps where rounding moves a weight."""
    need = mass_needed(threshold, sum(w[i] for i in left))
    found = []
    for share in (1.0, 1 - 1e-5, 1 + 1e-5):
        reach = [n for n, i in enumerate(left) if w[i] >= need * share]
        found.append(left[reach[-1] :] if reach else left)
    return found


def sample(row):
    """(code, position of a NaN), for each draw the tokens that may come (a row without draws has one), whether rounding
    decides the first, the row as edited, and the supports that rounding allows, each in order, with their entropies."""
    draws = max(1, row["draws"])
    sent = [of_bits(bits) for bits in row["logits"]]
    for i, v in enumerate(sent):
        if math.isnan(v):
            return (NAN_LOGIT, i), [{-1}] * draws, False, None, [([], math.nan)]
    x = edited(sent, row)
    top = max(x)
    if top == -INF:
        return (EMPTY_SUPPORT, -1), [{-1}] * draws, False, x, [([], math.nan)]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    temperature, top_p = row["temperature"], row["top_p"]
    if temperature == 0:
        return (0, -1), [{order[0]}] * draws, False, x, [(order[:1], 0.0)]
    temperature = max(temperature, 2.0**-118)
    bits = [random_bits(row["seed"], row["position"], draw)[0] for draw in range(draws)]
    coin = random_bits(row["seed"], row["position"])[1]
    k = row["top_k"] if 0 < row["top_k"] < len(x) else None
    least, border, cuts_by_distance = least_kept(row, x, temperature)

    kept = [i for i in order if x[i] > -INF and (top < INF or x[i] == INF)]
    cells = [x[c : c + 1024] for c in range(0, len(x), 1024)]
    prefix = prefix_masses(cells, top, temperature)
    chooses = row["typical_p"] < 1 or row["xtc_probability"] > 0
    if k is None and top_p == 1 and not cuts_by_distance and not chooses:
        if row["watermark_width"] > 0:
            tokens = [marked_token(row, kept, x, temperature)] * draws
            return (0, -1), tokens, len(tokens[0]) > 1, x, [(kept, entropy(x, temperature))]
        of_row = [weight(v, top, temperature) for v in x]
        of_cells = [[fixed(weight(v, max(cell), temperature)) for v in cell] for cell in cells]
        through_row, through_cells = list(accumulate(of_row)), [list(accumulate(w)) for w in of_cells]
        tokens = []
        for r in bits:
            reach = (r >> 11) * 2.0**-53 * prefix[-1]
            c = next(c for c in range(len(cells)) if prefix[c + 1] > reach)
            part, total = (reach - prefix[c]) / (prefix[c + 1] - prefix[c]), through_cells[c][-1]
            token, _ = first_above(of_cells[c], through_cells[c], min(int(part * total), total - 1))
            # Which tokens are close is a question to the row as a whole.
            tokens.append(first_above(of_row, through_row, reach)[1] | {c * 1024 + token})
        return (0, -1), tokens, len(tokens[0]) > 1, x, [(kept, entropy(x, temperature))]

    kept = [i for i in kept if x[i] == top or (x[i] - top >= least and x[i] >= border)][:k]
    w = {i: fixed(weight(x[i], top, temperature)) for i in kept}
    tokens = [set() for _ in bits]
    ends = [len(kept)]
    if top_p < 1:
        total, mass, ends = sum(w.values()), 0, []
        if k is None and not cuts_by_distance:
            total = math.floor(prefix[-1] * 2.0**43)
        for n, i in enumerate(kept, start=1):
            before, mass = mass, mass + w[i]
            if before < (top_p + SHIFT) * total and mass >= (top_p - SHIFT) * total:
                ends.append(n)
        ends = ends or [len(kept)]
    supports = [kept[:end] for end in ends]
    if row["typical_p"] < 1:
        surprises = {i: (top - x[i]) / temperature if top < INF else 0.0 for i in kept}
        supports = [s for left in supports for s in typical(left, w, surprises, row["typical_p"])]
    if row["xtc_threshold"] <= 0.5 and coin < math.floor(row["xtc_probability"] * 2.0**64):
        supports = [s for left in supports for s in after_xtc(left, w, row["xtc_threshold"])]
    for support in map(sorted, supports):
        if row["watermark_width"] > 0:
            for found in tokens:
                found |= marked_token(row, support, x, temperature)
            continue
        masses = [w[i] for i in support]
        through = list(accumulate(masses))
        for r, found in zip(bits, tokens):
            token, close = first_above(masses, through, r * through[-1] >> 64)
            found |= {support[i] for i in close | {token}}
    return (0, -1), tokens, len(tokens[0]) > 1, x, [(s, entropy([x[i] for i in s], temperature)) for s in supports]


def entropy_faults(row, entropies):
    sent = [of_bits(bits) for bits in row["logits"]]
    raw = math.nan if row["code"] == NAN_LOGIT or max(sent) == -INF else entropy(sent, 1)
    found = []
    for name, wanted in (("entropy", entropies), ("raw_entropy", [raw])):
        got = of_bits(row[name])
        if not row["want_entropy"]:
            wanted = [0.0]
        if not any(math.isnan(got) and math.isnan(w) or abs(got - w) <= 4e-6 * max(1, w) for w in wanted):
            found.append(f"{name} {got}, want {wanted}")
    return found


def faults(row):
    status, tokens, shaky, x, supports = sample(row)
    got = (row["code"], row["status_position"])
    if got != status:
        return [f"status {got}, want {status}"], shaky
    found = entropy_faults(row, [e for _, e in supports])
    cap, support = row["want_support"], (row["support_size"], row["support_ids"])
    wanted = [(len(s) if cap else 0, (s + [-1] * cap)[:cap]) for s, _ in supports]
    if support not in wanted:
        found.append(f"support {support}, want {wanted}")
    token, drawn = row["token"], row["draw_tokens"]
    if token not in tokens[0]:
        return [f"token {token}, want {sorted(tokens[0])}"], shaky
    if len(drawn) != row["draws"] or drawn[:1] not in ([], [token]):
        found.append(f"{len(drawn)} draws beginning with {drawn[:1]}, want {row['draws']} and {token}")
    found += [f"draw {j} {got}, want {sorted(want)}" for j, (got, want) in enumerate(zip(drawn, tokens)) if got not in want]
    if status[0] != 0:
        return found, shaky
    processed = row["logprob_mode"] == 1
    of = x if processed else [of_bits(bits) for bits in row["logits"]]
    before = sum(v > of[token] or (v == of[token] and i < token) for i, v in enumerate(of))
    rank = 1 + before if row["want_rank"] else 0
    found += [] if row["rank"] == rank else [f"rank {row['rank']}, want {rank}"]
    if not processed:
        top = max(of)
        tempered = row["logprob_mode"] == 2 and row["temperature"] > 0
        temperature = max(row["temperature"], 2.0**-118) if tempered else 1
        total = sum(weight(v, top, temperature) for v in of)
        if top == INF:
            want = -math.log(total) if of[token] == INF else -INF
        else:
            want = (of[token] - top) / temperature - math.log(total)
        got = of_bits(row["logprob"])
        if not (got == f32(want) or abs(got - want) <= 4e-6 * max(1, abs(want))):
            found.append(f"logprob {got}, want {want}")
    return found, shaky


def main():
    # Random123's known answer: the generator is the published one.
    assert philox4x32((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)) == [
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "rows.json")
        command = [sys.argv[1], "--gtest_filter=SampleDumpTest.*", "--gtest_brief=1"]
        subprocess.run(command, env={**os.environ, "LOGITD_SAMPLE_DUMP": path}, check=True)
        with open(path) as file:
            rows = [json.loads(line) for line in file]
    shaky = wrong = 0
    for number, row in enumerate(rows):
        found, unsure = faults(row)
        shaky += unsure
        wrong += bool(found)
        for fault in found:
            print(f"row {number}, {len(row['logits'])} tokens: {fault}")
    print(f"{len(rows)} rows replayed: {wrong} wrong, {shaky} where rounding decides")
    return 1 if wrong or len(rows) < 1000 or shaky * 100 > len(rows) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Tells whether tokens carry the watermark of `sample`: whether they were drawn with its watermark_key.

    from logitd.watermark import detect
    print(detect(tokens, key=7, width=4).p_value)

No server is asked. docs/semantics.md says what is computed; `logitctl watermark detect` gives the same numbers, up to the last bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Tuple

import numpy as np

from logitd import _arrays
from logitd.errors import InvalidArgument

_MAX_WIDTH = 16
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_CONTEXT, _MARK = np.uint64(1), np.uint64(2)  # the last word of Philox's counter


@dataclass(frozen=True)
class Detection:
    """The result of detect."""

    score: float
    """The sum of -ln(1 - u) over the tokens that count; about their number where there is no watermark."""
    tokens: int
    """Tokens that count."""
    p_value: float
    """The chance of such a score, or a larger one, without the watermark."""


def detect(tokens: Any, key: int, width: int, prompt_tokens: int = 0) -> Detection:
    """How much a text says for the watermark of `key` and `width`.

    tokens: token ids in their order, with those that `sample` had in its history before the first one drawn, as far as
        they are known.
    prompt_tokens: how many of the first were not drawn. They only are context.

    Each pair of a context, which is the last `width` tokens or all where there are fewer, and the token after it counts
    once: a repeated one says nothing new.
    """
    ids = _arrays.integers("tokens", tokens, np.dtype(np.int32))
    if ids.ndim != 1 and ids.size > 0:
        raise InvalidArgument(f"tokens: got {ids.ndim} dimensions, allowed 1")
    if ids.size > 0 and int(ids.min()) < 0:
        raise InvalidArgument(f"tokens: got {int(ids.min())}, allowed token ids from 0")
    key = _arrays.whole("key", key, 0, 2**64 - 1)
    width = _arrays.whole("width", width, 1, _MAX_WIDTH)
    prompt_tokens = _arrays.whole("prompt_tokens", prompt_tokens, 0)
    if ids.size <= prompt_tokens:
        return Detection(0.0, 0, 1.0)
    pairs, counts = _distinct(ids, width, prompt_tokens)
    score = math.fsum(-np.log(_units_left(pairs, counts, key)))
    return Detection(score, len(pairs), _gamma_tail(len(pairs), score))


def _distinct(ids: np.ndarray, width: int, first: int) -> Tuple[np.ndarray, np.ndarray]:
    """[pairs, width + 1] of distinct contexts, at the right of their places, and tokens; [pairs] lengths of contexts."""
    padded = np.concatenate([np.full(width, -1, np.int32), ids])
    windows = np.lib.stride_tricks.sliding_window_view(padded, width + 1)[: ids.size][first:]
    pairs = np.unique(windows, axis=0)
    return pairs, (pairs[:, :-1] >= 0).sum(axis=1)


def _units_left(pairs: np.ndarray, counts: np.ndarray, key: int) -> np.ndarray:
    """1 - u of each pair."""
    state = np.full(len(pairs), key, np.uint64)
    width = pairs.shape[1] - 1
    for place in range(width):
        inside = place >= width - counts
        words = pairs[inside, place].astype(np.uint64), counts[inside].astype(np.uint64)
        state[inside] = _philox(state[inside], *words, _CONTEXT)
    bits = _philox(state, pairs[:, -1].astype(np.uint64), np.zeros(len(pairs), np.uint64), _MARK) >> np.uint64(12)
    left = np.uint64(2**53) - (np.uint64(2) * bits + np.uint64(1))
    return left.astype(np.float64) * 2.0**-53


def _philox(key: np.ndarray, word0: np.ndarray, word1: np.ndarray, word3: np.uint64) -> np.ndarray:
    """The first 64 bits of Philox4x32-10 with counters (word0, word1, 0, word3)."""
    k0, k1 = key & _LOW, key >> _32
    c0, c1, c2, c3 = word0, word1, np.zeros_like(word0), np.full_like(word0, word3)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (b >> _32) ^ c1 ^ k0, b & _LOW, (a >> _32) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _LOW, (k1 + np.uint64(0xBB67AE85)) & _LOW
    words: np.ndarray = c0 | c1 << _32
    return words


def _gamma_tail(count: int, score: float) -> float:
    """The chance that the sum of `count` exponential variables of mean 1 is at least `score`: the regularised upper
    incomplete gamma function, which is the chance that a Poisson variable of mean `score` is below `count`."""
    if score <= 0:
        return 1.0
    below = score > count  # then the sum of fewer than `count`, else 1 less that of `count` or more
    n = count - 1 if below else count
    term = math.exp(n * math.log(score) - score - math.lgamma(n + 1))
    total = 0.0
    while term > total * 1e-17:
        total += term
        term *= n / score if below else score / (n + 1)
        n += -1 if below else 1
    return total if below else 1.0 - total

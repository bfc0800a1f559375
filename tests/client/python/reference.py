"""The definitions, in double precision."""

import numpy as np


def log_softmax(logits, temperature=1.0):
    x = np.asarray(logits, np.float64) / np.reshape(temperature, (-1, 1))
    high = x.max(axis=-1, keepdims=True)
    logsumexp = high + np.log(np.exp(x - high).sum(axis=-1, keepdims=True))
    return x - logsumexp, logsumexp[..., 0]


def order(row):
    """Token ids by descending logit, equal ones by ascending id."""
    return np.lexsort((np.arange(len(row)), -np.asarray(row, np.float64)))


def attention(scores, scale, seen, additive=None, sinks=None):
    """Probabilities and logsumexp of [B, H, Sq, Sk]; `seen` is bool of the same shape."""
    x = np.asarray(scores, np.float64) * scale
    if additive is not None:
        x = x + np.asarray(additive, np.float64)
    x = np.where(seen, x, -np.inf)
    high = x.max(axis=-1, keepdims=True)
    if sinks is not None:
        sink = np.reshape(np.asarray(sinks, np.float64), (1, -1, 1, 1))
        high = np.maximum(high, sink)
    total = np.exp(x - high).sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sink - high)
    return np.exp(x - high) / total, (high + np.log(total))[..., 0]


def attention_backward(probs, d_probs, scale):
    y, dy = np.asarray(probs, np.float64), np.asarray(d_probs, np.float64)
    return scale * y * (dy - (y * dy).sum(axis=-1, keepdims=True)), (y * dy).sum(axis=-1)


def window(queries, keys, left=None, right=None):
    """bool [Sq, Sk]: the keys that each query sees."""
    place = np.arange(queries)[:, None] + keys - queries
    key = np.arange(keys)[None, :]
    return ((left is None) | (key >= place - (left or 0))) & ((right is None) | (key <= place + (right or 0)))

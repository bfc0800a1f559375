"""The demo's text as tokens: reading, normalising, splitting and tokenising. Standard library only.

A paragraph is one line here: hard line breaks inside it become spaces and `_emphasis_` loses its marks, so that a
prompt typed on one line looks like the text the model was trained on.
"""

import math
import pathlib
import re

BOS = 0  # token id 0, the empty string: starts every paragraph and every prompt, and is never matched in text
HELD_OUT = 0.05  # the last 5% of every novel, by bytes


def paragraphs(path):
    """Returns the novel's paragraphs, each one line of UTF-8 bytes ending in a newline."""
    text = pathlib.Path(path).read_text(encoding="utf-8").replace("_", "")
    lines = (" ".join(p.split()) for p in re.split(r"\n\s*\n", text))
    return [(line + "\n").encode() for line in lines if line]


def split(directory):
    """Returns (train, held_out): for every novel, in name order, its list of paragraphs."""
    train, held_out = [], []
    for path in sorted(pathlib.Path(directory).glob("*.txt")):
        novel = paragraphs(path)
        budget = HELD_OUT * sum(map(len, novel))
        cut = len(novel)
        while budget > 0:
            cut -= 1
            budget -= len(novel[cut])
        train.append(novel[:cut])
        held_out.append(novel[cut:])
    return train, held_out


class Tokenizer:
    """Greedy longest match over bytes. `vocab` holds one bytes object per id; all 256 single bytes must be in it."""

    def __init__(self, vocab):
        self._ids = {token: i for i, token in enumerate(vocab) if token}
        self._longest = max(map(len, self._ids))

    def encode(self, data):
        ids, at = [], 0
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                token = self._ids.get(data[at : at + size])
                if token is not None:
                    ids.append(token)
                    at += size
                    break
        return ids

    def encode_paragraphs(self, novel):
        """Token ids of a novel: BOS before every paragraph."""
        return [i for paragraph in novel for i in [BOS, *self.encode(paragraph)]]


def perplexity(loss):
    """exp(loss); infinity for a loss above 709.78, where exp has no double."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def to_json_string(token):
    """vocab.json holds a token's bytes as the code points 0..255."""
    return token.decode("latin-1")


def from_json_string(text):
    return text.encode("latin-1")

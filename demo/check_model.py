#!/usr/bin/env python3
"""Scores the held-out text with only the exported files, in numpy, to show that they are the model that was trained.

    demo/check_model.py [--model demo/model] [--expect LOSS]

Shares the tokenizer and the split with train.py, and none of its model code. Prints the loss in nats per token; with
--expect, exits 1 when it is further than 1e-3 from LOSS. Needs numpy.
"""

import argparse
import json
import pathlib
import struct
import sys

import numpy as np

import corpus

HERE = pathlib.Path(__file__).resolve().parent


def read_safetensors(path):
    """Tensors by name, bf16 widened to f32."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        if entry["dtype"] != "BF16":
            raise SystemExit(f"{path}: {name} is {entry['dtype']}, expected BF16")
        bits = np.frombuffer(data[begin:end], "<u2").astype(np.uint32) << 16
        tensors[name] = bits.view(np.float32).reshape(entry["shape"])
    return tensors


def hidden_states(t, ids):
    """[tokens, embed_dim]: what the head multiplies, reading `ids` from a zero state. PyTorch's GRU, gates r, z, n."""
    w_hh, b_hh = t["model.layers.0.weight_hh"], t["model.layers.0.bias_hh"]
    inputs = t["model.embed_tokens.weight"][ids] @ t["model.layers.0.weight_ih"].T + t["model.layers.0.bias_ih"]
    h = np.zeros(w_hh.shape[1], np.float32)
    states = []
    for x in inputs:
        xr, xz, xn = np.split(x, 3)
        hr, hz, hn = np.split(w_hh @ h + b_hh, 3)
        r = 1 / (1 + np.exp(-(xr + hr)))
        z = 1 / (1 + np.exp(-(xz + hz)))
        h = (1 - z) * np.tanh(xn + r * hn) + z * h
        states.append(h)
    return np.stack(states) @ t["model.proj.weight"].T + t["model.proj.bias"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=HERE / "model")
    parser.add_argument("--expect", type=float)
    args = parser.parse_args()

    tensors = read_safetensors(args.model / "model.safetensors")
    config = json.loads((args.model / "config.json").read_text())
    vocab = [corpus.from_json_string(t) for t in json.loads((args.model / "vocab.json").read_text())]
    head = tensors["model.embed_tokens.weight"]
    assert config["tie_embeddings"] and config["num_layers"] == 1
    assert head.shape == (config["vocab_size"], config["embed_dim"]) and len(vocab) == config["vocab_size"]

    tokenizer = corpus.Tokenizer(vocab)
    total, count = 0.0, 0
    for novel in corpus.split(HERE / "text")[1]:
        ids = np.array(tokenizer.encode_paragraphs(novel))
        states = hidden_states(tensors, ids[:-1])
        for at in range(0, len(states), 1024):
            logits = (states[at : at + 1024] @ head.T + tensors["lm_head.bias"]).astype(np.float64)
            target = ids[1:][at : at + 1024]
            top = logits.max(axis=1)
            lse = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
            scored = target != corpus.BOS
            total += (lse - logits[np.arange(len(target)), target])[scored].sum()
            count += int(scored.sum())
    loss = total / count
    print(f"held-out loss {loss:.4f} over {count} tokens, perplexity {corpus.perplexity(loss):.2f}")
    if args.expect is not None and abs(loss - args.expect) > 1e-3:
        sys.exit(f"expected {args.expect}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Trains the demo's language model from demo/text and writes model.safetensors, config.json and vocab.json.

    demo/train.py --out demo/model

Needs PyTorch; uses the GPU when there is one. A run with the same arguments, device and PyTorch gives the same files.
The model: token embedding -> one GRU layer -> linear projection to the embedding width -> head tied to the embedding.
The projection's output is the hidden state that the head multiplies.
"""

import argparse
import collections
import json
import math
import os
import pathlib
import re
import struct
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuDNN's GRU is reproducible only with this
import torch
from torch import nn
from torch.nn import functional as F

import corpus

HERE = pathlib.Path(__file__).resolve().parent


def build_vocab(novels, size):
    """BOS, the 256 bytes, then byte-pair merges inside words; a word carries the space before it."""
    counts = collections.Counter()
    for novel in novels:
        for paragraph in novel:
            counts.update(re.findall(rb" ?[A-Za-z]+(?:'[a-z]+)?| ?[0-9]+| ?[^A-Za-z0-9\s]+|\s", paragraph))
    words = [[bytes([b]) for b in word] for word in counts]
    weight = list(counts.values())
    pairs, where = collections.Counter(), collections.defaultdict(set)
    for w, word in enumerate(words):
        for pair in zip(word, word[1:]):
            pairs[pair] += weight[w]
            where[pair].add(w)
    vocab = [b""] + [bytes([b]) for b in range(256)]
    known = set(vocab)
    while len(vocab) < size:
        best = max(pairs, key=lambda p: (pairs[p], p))
        if pairs[best] < 1:
            raise SystemExit(f"the text yields only {len(vocab)} tokens, {size} asked")
        merged = best[0] + best[1]
        if merged not in known:  # two merge orders can spell one token
            known.add(merged)
            vocab.append(merged)
        for w in list(where[best]):
            word = words[w]
            for pair in zip(word, word[1:]):
                pairs[pair] -= weight[w]
                where[pair].discard(w)
            joined, i = [], 0
            while i < len(word):
                if i + 1 < len(word) and (word[i], word[i + 1]) == best:
                    joined.append(merged)
                    i += 2
                else:
                    joined.append(word[i])
                    i += 1
            words[w] = joined
            for pair in zip(joined, joined[1:]):
                pairs[pair] += weight[w]
                where[pair].add(w)
        del pairs[best]
    return vocab


class Model(nn.Module):
    def __init__(self, vocab, embed, hidden, dropout):
        super().__init__()
        self.embed = nn.Embedding(vocab, embed)
        self.gru = nn.GRU(embed, hidden, batch_first=True)
        self.proj = nn.Linear(hidden, embed)
        self.head_bias = nn.Parameter(torch.zeros(vocab))
        self.dropout = dropout
        nn.init.normal_(self.embed.weight, std=embed**-0.5)

    def forward(self, ids, state=None):
        x = self.embed(ids)
        x = F.dropout(x, self.dropout, self.training)
        y, state = self.gru(x, state)
        y = self.proj(F.dropout(y, self.dropout, self.training))
        y = F.dropout(y, self.dropout / 2, self.training)
        return F.linear(y, self.embed.weight, self.head_bias), state

    def export(self):
        """Tensors by their names in model.safetensors."""
        return {
            "model.embed_tokens.weight": self.embed.weight,
            "model.layers.0.weight_ih": self.gru.weight_ih_l0,
            "model.layers.0.weight_hh": self.gru.weight_hh_l0,
            "model.layers.0.bias_ih": self.gru.bias_ih_l0,
            "model.layers.0.bias_hh": self.gru.bias_hh_l0,
            "model.proj.weight": self.proj.weight,
            "model.proj.bias": self.proj.bias,
            "lm_head.bias": self.head_bias,
        }


@torch.no_grad()
def evaluate(model, novels):
    """Mean loss in nats per token over the novels, each read once from its start, state carried; BOS is not scored."""
    model.eval()
    total, count = 0.0, 0
    for ids in novels:
        state = None
        for at in range(0, len(ids) - 1, 512):
            piece = ids[at : at + 513]
            logits, state = model(piece[None, :-1], state)
            target = piece[1:]
            total += F.cross_entropy(logits[0], target, ignore_index=corpus.BOS, reduction="sum").item()
            count += int((target != corpus.BOS).sum())
    model.train()
    return total / count, count


def batches(ids, starts, args, device):
    """Endless batches of inputs and targets. Half of the rows begin at a paragraph, as a prompt does; half anywhere."""
    generator = torch.Generator().manual_seed(args.seed)
    span = torch.arange(args.length + 1)
    while True:
        anywhere = torch.randint(len(ids) - args.length, (args.batch,), generator=generator)
        begin = starts[torch.randint(len(starts), (args.batch,), generator=generator)]
        pick = torch.where(torch.rand(args.batch, generator=generator) < 0.5, begin, anywhere)
        rows = ids[(pick[:, None] + span).to(device)]
        yield rows[:, :-1], rows[:, 1:]


def write_safetensors(path, tensors):
    """bf16, in name order; the header is padded with spaces to a multiple of 8 bytes."""
    header, data, at = {"__metadata__": {"format": "pt"}}, [], 0
    for name in sorted(tensors):
        raw = tensors[name].detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": "BF16",
            "shape": list(tensors[name].shape),
            "data_offsets": [at, at + len(raw)],
        }
        at += len(raw)
        data.append(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "model", help="output directory")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--embed", type=int, default=144)
    parser.add_argument("--hidden", type=int, default=272)
    parser.add_argument("--dropout", type=float, default=0.4)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--batch", type=int, default=64, help="rows in a batch")
    parser.add_argument("--length", type=int, default=96, help="tokens in a row")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--average", type=float, default=0.998, help="decay of the averaged weights that are kept")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: PyTorch's choice")
    args = parser.parse_args()

    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)

    train, held_out = corpus.split(HERE / "text")
    vocab = build_vocab(train, args.vocab)
    tokenizer = corpus.Tokenizer(vocab)
    ids = [i for novel in train for i in tokenizer.encode_paragraphs(novel)]
    starts = torch.tensor([i for i, t in enumerate(ids[: -args.length - 1]) if t == corpus.BOS])
    ids = torch.tensor(ids, device=device)
    tests = [torch.tensor(tokenizer.encode_paragraphs(novel), device=device) for novel in held_out]
    held_out_bytes = sum(len(p) for novel in held_out for p in novel)

    model = Model(args.vocab, args.embed, args.hidden, args.dropout).to(device)
    averaged = Model(args.vocab, args.embed, args.hidden, args.dropout).to(device)
    averaged.load_state_dict(model.state_dict())
    averaged.requires_grad_(False)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.rate,
        betas=(0.9, 0.98),
    )
    warmup = min(100, args.steps // 10 + 1)

    def rate(step):
        return min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / args.steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    print(f"{device.type}: {len(ids)} training tokens, {sum(p.numel() for p in model.parameters())} parameters")

    began = time.monotonic()
    for step, (inputs, targets) in enumerate(batches(ids, starts, args, device), start=1):
        logits, _ = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=corpus.BOS)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        decay = min(args.average, step / (step + 10))
        with torch.no_grad():
            for kept, now in zip(averaged.parameters(), model.parameters()):
                kept.lerp_(now, 1 - decay)
        if step % 200 == 0 or step == args.steps:
            held, _ = evaluate(averaged, tests)
            print(
                f"step {step}: train loss {loss.item():.4f}, held-out loss {held:.4f}, "
                f"perplexity {corpus.perplexity(held):.2f}, {time.monotonic() - began:.0f} s",
                flush=True,
            )
        if step == args.steps:
            break

    with torch.no_grad():  # what is measured below is what is written: the weights rounded to bf16
        for parameter in averaged.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
    held, tokens = evaluate(averaged, tests)
    args.out.mkdir(parents=True, exist_ok=True)
    write_safetensors(args.out / "model.safetensors", averaged.export())
    config = {
        "architecture": "gru_lm",
        "vocab_size": args.vocab,
        "embed_dim": args.embed,
        "hidden_size": args.hidden,
        "num_layers": 1,
        "bos_token_id": corpus.BOS,
        "tie_embeddings": True,
        "tie_word_embeddings": True,  # the server's name for it
    }
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    text = json.dumps([corpus.to_json_string(t) for t in vocab], ensure_ascii=True, indent=0)
    (args.out / "vocab.json").write_text(text + "\n")
    print(
        f"exported (bf16): held-out loss {held:.4f} over {tokens} tokens, "
        f"perplexity {corpus.perplexity(held):.2f}, "
        f"{held * tokens / math.log(2) / held_out_bytes:.3f} bits per byte"
    )


if __name__ == "__main__":
    main()

"""Trains a tiny transformer twice, with torch's loss and with logitd.ops.linear_cross_entropy: one loss curve.

usage: tiny_transformer.py [STEPS]. On the GPU where torch sees one, else on the CPU.
"""

import sys

import torch
import torch.nn.functional as F

from logitd import ops

VOCAB, WIDTH, LENGTH = 997, 64, 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train(steps, with_logitd):
    """The loss of every step, in nats a token."""
    torch.manual_seed(0)
    embed, head = torch.nn.Embedding(VOCAB, WIDTH), torch.nn.Linear(WIDTH, VOCAB)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=128, dropout=0.0, batch_first=True)
    model = torch.nn.ModuleList([embed, layer, head]).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH, device=DEVICE)
    tokens = (torch.arange(16 * (LENGTH + 1)).view(16, -1) * 31 % VOCAB).to(DEVICE)
    losses = []
    for _ in range(steps):
        hidden = layer(embed(tokens[:, :-1]), src_mask=causal, is_causal=True)
        targets = tokens[:, 1:]
        if with_logitd:  # the logits are never in memory
            loss = ops.linear_cross_entropy(hidden, head.weight, targets, bias=head.bias)
        else:
            loss = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    mine, own = train(steps, True), train(steps, False)
    apart = max(abs(a - b) for a, b in zip(mine, own))
    print(f"{DEVICE}, {steps} steps: the loss fell from {mine[0]:.3f} to {mine[-1]:.3f}")
    print(f"largest distance from torch's own loss: {apart:.1e}, allowed 1e-5")
    sys.exit(apart > 1e-5 or mine[-1] >= mine[0])


if __name__ == "__main__":
    main()

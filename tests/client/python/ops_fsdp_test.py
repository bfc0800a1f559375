"""logitd.ops.linear_cross_entropy in a model that FSDP shards over two ranks, beside double precision in one process."""

import os
import tempfile
import unittest

from ops_harness import OpsTestCase, ops, torch

import torch.distributed as dist
import torch.multiprocessing as multiprocessing

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:
    raise unittest.SkipTest("torch has no fully_shard") from None

VOCAB, HIDDEN, TOKENS, STEPS = 101, 24, 16, 4  # an uneven vocabulary: the ranks have shards of different sizes


class Model(torch.nn.Module):
    """Its forward is the loss, so FSDP gathers the head's weight around the op."""

    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(3)
        self.loss = loss
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN)
        self.mix = torch.nn.Linear(HIDDEN, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens, target):
        return self.loss(torch.tanh(self.mix(self.embedding(tokens))), self.head.weight, target, self.head.bias)


def fused(hidden, weight, target, bias):
    return ops.linear_cross_entropy(hidden, weight, target, bias=bias)


def of_torch(hidden, weight, target, bias):
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, weight, bias), target)


def batch(step, rank):
    """Tokens and targets; each rank has its own."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, VOCAB, (2, TOKENS), generator=generator).unbind()


def train(mesh, rank, compiled):
    """The losses of this rank, and the whole weight of the head after the last step."""
    model = Model(fused)
    fully_shard(model.mix, mesh=mesh)
    fully_shard(model, mesh=mesh)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(STEPS):
        losses.append(run(*batch(step, rank)))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).detach(), model.head.weight.full_tensor().detach()


def rank_main(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    torch.save([train(mesh, rank, compiled) for compiled in (False, True)], f"{folder}/{rank}")
    dist.destroy_process_group()


class FsdpTest(OpsTestCase):
    def test_two_sharded_ranks_train_as_torch_does_in_one_process(self):
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(rank_main, (folder,), nprocs=2)
            ranks = [torch.load(f"{folder}/{rank}") for rank in range(2)]
        reference = Model(of_torch).double()
        begin = reference.head.weight.detach().clone()
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
        wanted = []
        for step in range(STEPS):
            losses = torch.stack([reference(*batch(step, rank)) for rank in range(2)])
            losses.mean().backward()  # FSDP averages the gradients of its ranks
            optimizer.step()
            optimizer.zero_grad()
            wanted.append(losses.detach())
        moved = (reference.head.weight - begin).abs().max().item()
        self.assertGreater(moved, 1e-2)
        for rank, runs in enumerate(ranks):
            for compiled, (losses, weight) in zip((False, True), runs):
                self.assert_close(losses, torch.stack(wanted)[:, rank], 4e-6, (rank, compiled))
                self.assert_close(weight, reference.head.weight, 4e-6, (rank, compiled))


if __name__ == "__main__":
    unittest.main()

"""logitd.ops.linear_cross_entropy over two ranks of a process group, beside torch in one process and double precision."""

import os
import tempfile
import unittest

from ops_harness import OpsTestCase, ops, torch

import torch.distributed as dist
import torch.multiprocessing as multiprocessing

ROWS, HIDDEN, SIZES = 11, 24, (37, 64)  # uneven shards, of no whole cells
OPTIONS = (
    {},
    {"label_smoothing": 0.1, "z_loss": 1e-2, "reduction": "sum"},
    {"label_smoothing": 0.2, "smoothing": "megatron", "softcap": 8.0, "temperature": 0.8, "reduction": "none"},
)


def inputs():
    torch.manual_seed(5)
    hidden, weight, bias = torch.randn(ROWS, HIDDEN), torch.randn(sum(SIZES), HIDDEN), torch.randn(sum(SIZES))
    target = torch.randint(0, sum(SIZES), (ROWS,))
    target[2], target[3], target[4], target[5] = -100, 0, SIZES[0] - 1, SIZES[0]
    return hidden, weight, bias, target


def rank_main(rank, folder, backend):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
        ops.check(True)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    hidden, weight, bias, target = (of.to(device) for of in inputs())
    begin = rank * SIZES[0]
    answers = []
    for chosen in OPTIONS:
        own = [
            of.clone().requires_grad_() for of in (hidden, weight[begin:][: SIZES[rank]], bias[begin:][: SIZES[rank]])
        ]
        result = ops.linear_cross_entropy(
            own[0], own[1], target, bias=own[2], group=dist.group.WORLD, stats=True, **chosen
        )
        result.loss.sum().backward()
        answers.append([of.detach().cpu() for of in (*result, *(of.grad for of in own))])
    try:
        ops.linear_cross_entropy(hidden, own[1], target + 1000, group=dist.group.WORLD)
        refused = "nothing"
    except ValueError as error:
        refused = str(error)
    try:  # the second rank has no tokens: both say so
        ops.linear_cross_entropy(hidden, weight[: 5 * (1 - rank)], target, group=dist.group.WORLD)
    except ValueError as error:
        refused += str(error)
    torch.save((answers, refused), f"{folder}/{rank}")
    dist.destroy_process_group()


class ParallelTest(OpsTestCase):
    def test_two_ranks_have_the_losses_and_gradients_of_one_head(self):
        for backend in ("gloo", "nccl") if torch.cuda.device_count() >= 2 else ("gloo",):
            with self.subTest(backend):
                self.compare(backend)

    def compare(self, backend):
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(rank_main, (folder, backend), nprocs=2)
            ranks = [torch.load(f"{folder}/{rank}") for rank in range(2)]
        hidden, weight, bias, target = inputs()
        for i, chosen in enumerate(OPTIONS):
            own = [of.double().requires_grad_() for of in (hidden, weight, bias)]
            loss, lse = self.reference(*own, target, **chosen)
            loss.sum().backward()
            first = 0
            for answers, size in zip((of[0][i] for of in ranks), SIZES):
                got, _, logsumexp, _, d_hidden, d_weight, d_bias = answers
                self.assert_close(got, loss, 4e-6, chosen)
                self.assert_close(logsumexp, lse, 4e-6, chosen)
                self.assert_close(d_hidden, own[0].grad, 4e-6, chosen)
                self.assert_close(d_weight, own[1].grad[first : first + size], 4e-6, chosen)
                self.assert_close(d_bias, own[2].grad[first : first + size], 4e-6, chosen)
                first += size
            for mine, other in zip(ranks[0][0][i][:5], ranks[1][0][i][:5]):
                self.assertTrue(torch.equal(mine, other))
        self.assertIn("target: got", ranks[0][1])
        self.assertIn(f"allowed 0..{sum(SIZES) - 1}", ranks[0][1])
        for _, refused in ranks:
            self.assertIn("weight: got 0 rows on rank 1", refused)

    def reference(self, hidden, weight, bias, target, reduction="mean", smoothing="torch", **rest):
        logits = hidden @ weight.T + bias
        if rest.get("softcap"):
            logits = rest["softcap"] * torch.tanh(logits / rest["softcap"])
        logits = logits / rest.get("temperature", 1.0)
        vocab = logits.shape[1]
        e = rest.get("label_smoothing", 0.0) * (vocab / (vocab - 1) if smoothing == "megatron" else 1)
        lse = logits.logsumexp(-1)
        at = logits.gather(1, target.clamp(min=0)[:, None])[:, 0]
        loss = (1 - e) * (lse - at) + e * (lse - logits.mean(-1)) + rest.get("z_loss", 0.0) * lse**2
        loss = torch.where(target == -100, 0.0, loss)
        if reduction != "none":
            loss = loss.sum() / ((target != -100).sum() if reduction == "mean" else 1)
        return loss, lse


if __name__ == "__main__":
    unittest.main()

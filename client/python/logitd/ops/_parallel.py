"""linear_cross_entropy under a head whose vocabulary is cut over the ranks of a process group.

Each rank answers for its own rows of the weight. One all-gather brings what the loss of a row needs of each shard: the
logsumexp of its logits, the target's logit where it has it, and their sum where there is label smoothing. The backward
needs no more than the whole row's logsumexp; one all-reduce adds the parts of the hidden states' gradient. Source of the
scheme: Shoeybi et al., Megatron-LM, arXiv:1909.08053.
"""

from __future__ import annotations

import weakref
from typing import Any, Dict, MutableMapping, Tuple

import torch
import torch.distributed as dist

from logitd.errors import InvalidArgument
from logitd.ops import _library, _losses
from logitd.ops._loss_autograd import only_once
from logitd.ops._losses import REDUCTIONS, Options, reduced

_places: MutableMapping[Any, Dict[int, Tuple[int, int]]] = weakref.WeakKeyDictionary()


def _place_of(group: Any, tokens: int, like: torch.Tensor) -> Tuple[int, int]:
    """The first token of this rank's shard, and the tokens of all. Asked once for each group and size."""
    places = _places.setdefault(group, {})
    if tokens not in places:
        mine = torch.tensor([tokens], device=like.device)
        sizes = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sizes, mine, group=group)
        counts = [int(size) for size in sizes]
        if min(counts) < 1:  # all ranks know, and raise: else those with tokens would wait for the others
            raise InvalidArgument(
                f"weight: got 0 rows on rank {counts.index(0)} of the group, allowed 1 or more on each"
            )
        places[tokens] = sum(counts[: dist.get_rank(group)]), sum(counts)
    return places[tokens]


def _partials(rows: Any, weight: Any, bias: Any, target: torch.Tensor, options: Options) -> torch.Tensor:
    """float64 [3, rows] of this shard: logsumexp, the target's logit or 0, and the sum of the logits or 0."""
    tokens, smoothed = weight.shape[0], options.label_smoothing > 0
    at = target - options.first_token
    held = (at >= 0) & (at < tokens) & (target != options.ignore_index)
    own = options._replace(ignore_index=-1, z_loss=0.0, smoothing=0, first_token=0, vocab=0)
    loss, logsumexp, logprob = _losses.forward(rows, weight, bias, torch.where(held, at, 0), own)[0].double()
    logit = logprob + logsumexp  # of the target, or of token 0
    total = torch.zeros_like(loss)
    if smoothed:  # loss = logsumexp - (1 - e) logit - e mean
        e = options.label_smoothing
        total = (logsumexp - (1 - e) * logit - loss) * (tokens / e)
    return torch.stack((logsumexp, torch.where(held, logit, 0.0), total))


def _merged(parts: torch.Tensor, target: torch.Tensor, options: Options) -> torch.Tensor:
    """float32 [3, rows] of partials [shards, 3, rows]: loss, logsumexp, target_logprob."""
    logsumexp, logit = parts[:, 0].logsumexp(dim=0), parts[:, 1].sum(dim=0)
    e = options.label_smoothing * (
        options.vocab / (options.vocab - 1) if options.smoothing and options.vocab > 1 else 1
    )
    loss = logsumexp - (1 - e) * logit + options.z_loss * logsumexp.square()
    if options.label_smoothing > 0:
        loss = loss - e * (parts[:, 2].sum(dim=0) / options.vocab)
    outside = (target < 0) | (target >= options.vocab)
    loss = torch.where(outside, float("nan"), loss)
    answers = torch.stack((loss, logsumexp, logit - logsumexp))
    ignored = target == options.ignore_index
    answers[0::2] = torch.where(ignored, 0.0, answers[0::2])
    return answers.float()


class _Sharded(torch.autograd.Function):
    """Answers for every row; the first, the loss, has gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any, bias: Any, target: Any, options: Options, group: Any) -> torch.Tensor:
        mine = _partials(rows, weight, bias, target, options)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        answers = _merged(torch.stack(parts), target, options)
        ctx.save_for_backward(rows, weight, bias, target, answers[1].contiguous())
        ctx.options, ctx.group = options, group
        return answers

    @staticmethod
    @only_once
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        rows, weight, bias, target, logsumexp = ctx.saved_tensors
        wants = (True, *ctx.needs_input_grad[1:3])
        d_rows, d_weight, d_bias = _losses.backward(
            rows, weight, bias, target, logsumexp, upstream[0].contiguous(), ctx.options, wants
        )
        if ctx.needs_input_grad[0]:
            d_rows = d_rows.contiguous()
            dist.all_reduce(d_rows, group=ctx.group)
            d_rows = d_rows.to(rows.dtype)
        else:
            d_rows = None
        return d_rows, d_weight, d_bias, None, None, None


@torch.compiler.disable
def sharded(
    rows: Any, weight: Any, bias: Any, target: Any, shape: Any, reduction: str, options: Options, group: Any
) -> Tuple[torch.Tensor, torch.Tensor]:
    """linear_cross_entropy of a shard: the loss, and float32 [3, rows] of every row's answers."""
    first, vocab = _place_of(group, weight.shape[0], rows)
    options = options._replace(first_token=first, vocab=vocab)
    if 0 <= options.ignore_index < vocab:
        raise InvalidArgument(f"ignore_index: got {options.ignore_index}, allowed below 0, or {vocab} or more")
    if _library.wants_status(rows):
        refused = ((target < 0) | (target >= vocab)) & (target != options.ignore_index)
        if refused.any():
            row = int(refused.nonzero()[0])
            raise InvalidArgument(
                f"target: got {int(target[row])} at row {row}, allowed 0..{vocab - 1}, or ignore_index"
            )
    answers = _Sharded.apply(rows, weight, bias, target, options, group)
    if reduction == "none":
        return answers[0].view(shape), answers
    return reduced(answers[0], target, options.ignore_index, REDUCTIONS.index(reduction)), answers

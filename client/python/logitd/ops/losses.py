"""Cross-entropy of logits, and of hidden states under an output head, with gradients.

The library's ops are kernels/cross_entropy.h and kernels/linear.h of the source: their accuracy, NaN rules and sources.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

import torch

from logitd.errors import InvalidArgument
from logitd.ops._loss_autograd import loss_reduced, loss_rows
from logitd.ops._losses import REDUCTIONS, SMOOTHINGS, Losses, Options, reduced
from logitd.ops._tensors import (
    check_device,
    check_shape,
    check_tensor,
    count_of,
    dtype_of,
    rows_of,
    scalar,
)


def _one_of(name: str, value: Any, allowed: Any) -> int:
    if value not in allowed:
        raise InvalidArgument(f"{name}: got {value!r}, allowed {', '.join(allowed)}")
    return allowed.index(value)  # type: ignore[no-any-return]


def _options(
    ignore_index: Any,
    temperature: Any,
    label_smoothing: Any,
    z_loss: Any,
    softcap: Any,
    scale: Any,
    smoothing: Any,
) -> Options:
    return Options(
        count_of("ignore_index", ignore_index, -(2**63), 2**63 - 1),
        scalar("temperature", temperature),
        scalar("label_smoothing", label_smoothing),
        scalar("z_loss", z_loss),
        scalar("softcap", softcap),
        scalar("scale", scale),
        _one_of("smoothing", smoothing, SMOOTHINGS),
    )


def _target_of(target: Any, like: torch.Tensor, shape: Any) -> torch.Tensor:
    """int64 [rows]."""
    check_tensor("target", target)
    check_shape("target", target, shape, "the leading dimensions of the input")
    check_device("target", target, like, "the input")
    if target.is_floating_point() or target.is_complex() or target.dtype is torch.bool:
        raise InvalidArgument(f"target dtype: got {str(target.dtype)[6:]}, allowed an integer type")
    if target.dim() != 1:
        target = target.reshape(-1)
    return target.to(torch.int64).contiguous()


def _reduced(
    rows: torch.Tensor, weight: Any, bias: Any, target: torch.Tensor, shape: Any, reduction: str, options: Options
) -> Tuple[torch.Tensor, torch.Tensor]:
    """The loss, and float32 [3, rows] of every row's answers."""
    place = REDUCTIONS.index(reduction)
    if reduction == "none":
        answers = loss_rows(rows, weight, bias, target, options)
        return answers[0].view(shape), answers
    # Under f16 weights the factor of the loss must be in the gradients before they are rounded.
    if rows.dtype is torch.float16 and torch.is_grad_enabled():
        answers = loss_rows(rows, weight, bias, target, options)
        return reduced(answers[0], target, options.ignore_index, place), answers
    return loss_reduced(rows, weight, bias, target, options, place)


def losses_of(loss: torch.Tensor, answers: torch.Tensor, shape: Any, stats: bool) -> Union[torch.Tensor, Losses]:
    """The result of a function on losses."""
    if not stats:
        return loss
    return Losses(loss, *(of.view(shape) for of in answers.detach().unbind()))


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    temperature: float = 1.0,
    smoothing: str = "torch",
    stats: bool = False,
) -> Union[torch.Tensor, Losses]:
    """The cross-entropy of logits [..., vocab] against tokens [...], in nats, with a gradient for the logits.

    One read of the logits gives losses and gradient where the loss is reduced; sums are float32 whatever the dtype
    (float32, float16, bfloat16). The parameters are those of linear_cross_entropy.
    """
    dtype_of("logits", check_tensor("logits", logits))
    if logits.dim() < 1:
        raise InvalidArgument("logits: got shape [], allowed [..., vocab]")
    shape = logits.shape[:-1]
    options = _options(ignore_index, temperature, label_smoothing, z_loss, softcap, 1.0, smoothing)
    _one_of("reduction", reduction, REDUCTIONS)
    targets = _target_of(target, logits, shape)
    loss, answers = _reduced(rows_of(logits), None, None, targets, shape, reduction, options)
    return losses_of(loss, answers, shape, stats)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: Optional[torch.Tensor] = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    scale: float = 1.0,
    temperature: float = 1.0,
    smoothing: str = "torch",
    stats: bool = False,
    group: Any = None,
) -> Union[torch.Tensor, Losses]:
    """The cross-entropy of hidden states under an output head, in nats, without the logits in memory.

    logits = scale * hidden @ weight.T + bias, then softcap * tanh(logits / softcap) where softcap > 0, then
    logits / temperature. Gradients for hidden, weight and bias, in their dtypes; sums are float32.

    hidden: [..., hidden], float32, float16 or bfloat16. weight: [vocab, hidden], the same dtype. bias: [vocab].
    target: [...], tokens of the vocabulary, or `ignore_index`: then the row has loss 0 and adds no gradient.
    reduction: "mean" over the rows that are not ignored, "sum", or "none": float32 [...].
    label_smoothing: 0 <= e < 1, spread by `smoothing`: "torch" on all tokens, "megatron" on all but the target.
    z_loss: adds z_loss * logsumexp^2 to a row's loss.
    stats: return Losses, which has every row's loss, logsumexp and target_logprob too, without gradients.
    group: a torch.distributed process group, each of whose ranks has the whole `hidden` and `target`, and its own
        rows of weight and bias, in the order of the ranks. Each gets the whole loss, and the gradients of its own rows.

    Where the loss is reduced, the forward also makes the gradients, and the backward only scales them: it can run once.
    float16 makes them in the backward, for the sake of loss scaling. There is no class weight and no second derivative.

    InvalidArgument: shapes, dtypes, devices or options. Rows with a target outside the vocabulary: see ops.check.
    """
    dtype_of("hidden", check_tensor("hidden", hidden))
    dtype_of("weight", check_tensor("weight", weight))
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise InvalidArgument(
            f"weight: got shape {list(weight.shape)}, allowed [vocab, {hidden.shape[-1] if hidden.dim() else 'hidden'}]"
            " (hidden's last dimension)"
        )
    check_device("weight", weight, hidden, "hidden")
    if hidden.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    if weight.dtype != hidden.dtype:
        raise InvalidArgument(f"weight dtype: got {str(weight.dtype)[6:]}, allowed {str(hidden.dtype)[6:]} (hidden's)")
    if bias is not None:
        check_shape("bias", check_tensor("bias", bias), (weight.shape[0],), "one for each row of weight")
        check_device("bias", bias, hidden, "hidden")
        bias = bias.float().contiguous()
    shape = hidden.shape[:-1]
    options = _options(ignore_index, temperature, label_smoothing, z_loss, softcap, scale, smoothing)
    _one_of("reduction", reduction, REDUCTIONS)
    targets = _target_of(target, hidden, shape)
    rows = rows_of(hidden)
    if group is not None:
        from logitd.ops._parallel import sharded

        loss, answers = sharded(rows, weight, bias, targets, shape, reduction, options, group)
    else:
        loss, answers = _reduced(rows, weight, bias, targets, shape, reduction, options)
    return losses_of(loss, answers, shape, stats)

"""How far a student is from its reference, both as hidden states under output heads, with the student's gradients.

The library's op is kernels/divergence_training.h of the source: definitions, accuracy, NaN rules and sources.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import library

from logitd.errors import InvalidArgument
from logitd.ops import _library, _structs
from logitd.ops._loss_autograd import LIBRARY, is_plain, keep_gradients, only_once, scaled, scaled_once
from logitd.ops._tensors import (
    Parameter,
    aligned,
    as_f32,
    check_device,
    check_shape,
    check_tensor,
    dtype_of,
    gradients_of,
    head_of,
    number,
    or_empty,
    pointer,
    rows_of,
    scalar,
    view,
)

KINDS = ("forward_kl", "reverse_kl", "jensen_shannon")
_REDUCTIONS = ("none", "mean", "sum")
_ALLOWED = {"temperature": "finite and > 0", "reference_temperature": "finite and > 0"}
_INPUT = (
    "Tensor rows, Tensor weight, Tensor? bias, Tensor reference, Tensor reference_weight, Tensor? reference_bias, "
    "Tensor upstream, Tensor? temperatures, Tensor? reference_temperatures, float[] numbers, int kind"
)

LIBRARY.define(f"divergence_reduced({_INPUT}, bool[] wants) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
LIBRARY.define(f"divergence_rows({_INPUT}) -> Tensor")
LIBRARY.define(f"divergence_gradients({_INPUT}, bool[] wants) -> (Tensor, Tensor, Tensor)")


class _Numbers(NamedTuple):
    temperature: float
    reference_temperature: float
    scale: float
    softcap: float
    reference_scale: float
    reference_softcap: float
    beta: float


def _run(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: Any,
    reference: torch.Tensor,
    reference_weight: torch.Tensor,
    reference_bias: Any,
    upstream: torch.Tensor,
    temperatures: Any,
    reference_temperatures: Any,
    numbers: Any,
    kind: int,
    wants: Any,
) -> Any:
    """float32 [rows] of losses, and the gradients of sum(upstream * loss) that are wanted, or None."""
    of = _Numbers(*numbers)
    op = _structs.DivergenceTraining()
    rows, weight, reference, reference_weight = map(aligned, (rows, weight, reference, reference_weight))
    op.hidden, op.head = view(rows), head_of(weight, bias, of.scale, of.softcap)
    op.reference_hidden = view(reference)
    op.reference_head = head_of(reference_weight, reference_bias, of.reference_scale, of.reference_softcap)
    op.temperature = _structs.Number(pointer(temperatures), of.temperature, 0)
    op.reference_temperature = _structs.Number(pointer(reference_temperatures), of.reference_temperature, 0)
    op.kind, op.beta = kind, of.beta
    op.upstream = upstream.data_ptr()
    loss = torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
    op.loss = loss.data_ptr()
    d_rows, d_weight, d_bias = gradients = gradients_of(rows, weight, wants)
    if d_rows is not None:
        op.d_hidden = view(d_rows)
    if d_weight is not None:
        op.d_weight = view(d_weight)
    op.d_bias = pointer(d_bias)
    status = None
    if _library.wants_status(rows):
        status = torch.zeros((rows.shape[0], 2), dtype=torch.int32, device=rows.device)
        op.status = status.data_ptr()
    _library.run("divergence_training", op, rows, rows.shape[0], gradients)
    if status is not None:
        values = {"temperature": temperatures, "reference_temperature": reference_temperatures}
        _library.raise_refused(status, ("temperature", "reference_temperature"), values, _ALLOWED)
    return loss, gradients


def _sum(loss: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum(weights * loss). A row of weight 0 does not count, also where its loss is not finite."""
    return torch.dot(loss.masked_fill(weights == 0, 0.0), weights)


def _divergence_reduced(*inputs: Any) -> Any:
    loss, gradients = _run(*inputs)
    return (_sum(loss, inputs[6]), loss, *or_empty(inputs[0], gradients))


def _divergence_rows(*inputs: Any) -> torch.Tensor:
    return _run(*(*inputs, (False, False, False)))[0]


def _divergence_gradients(*inputs: Any) -> Any:
    return or_empty(inputs[0], _run(*inputs)[1])


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("divergence_reduced", _divergence_reduced, _device)
    LIBRARY.impl("divergence_rows", _divergence_rows, _device)
    LIBRARY.impl("divergence_gradients", _divergence_gradients, _device)


@library.register_fake("logitd::divergence_reduced", lib=LIBRARY)
def _(rows: Any, weight: Any, *rest: Any) -> Any:
    loss = rows.new_empty(rows.shape[0], dtype=torch.float32)
    return (loss.new_empty(()), loss, *or_empty(rows, gradients_of(rows, weight, rest[-1])))


@library.register_fake("logitd::divergence_rows", lib=LIBRARY)
def _(rows: Any, *rest: Any) -> Any:
    return rows.new_empty(rows.shape[0], dtype=torch.float32)


@library.register_fake("logitd::divergence_gradients", lib=LIBRARY)
def _(rows: Any, weight: Any, *rest: Any) -> Any:
    return or_empty(rows, gradients_of(rows, weight, rest[-1]))


def _reduced_backward(ctx: Any, upstream: Any, *_: Any) -> Any:
    return (*scaled(ctx, upstream), *[None] * 9)


def _keep_rows(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, numbers, kind = inputs
    ctx.save_for_backward(*tensors)
    ctx.numbers, ctx.kind = numbers, kind


def _rows_backward(ctx: Any, upstream: torch.Tensor) -> Any:
    tensors = list(ctx.saved_tensors)
    tensors[6] = upstream.contiguous()
    wants = list(ctx.needs_input_grad[:3])
    run = _divergence_gradients if is_plain(tensors[0], upstream) else torch.ops.logitd.divergence_gradients
    gradients = run(*tensors, ctx.numbers, ctx.kind, wants)
    return (*(gradient if wanted else None for gradient, wanted in zip(gradients, wants)), *[None] * 8)


library.register_autograd("logitd::divergence_reduced", _reduced_backward, setup_context=keep_gradients, lib=LIBRARY)
library.register_autograd("logitd::divergence_rows", _rows_backward, setup_context=_keep_rows, lib=LIBRARY)


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        loss, ctx.gradients = _run(*(*inputs, ctx.needs_input_grad[:3]))
        return _sum(loss, inputs[6])

    @staticmethod
    @only_once
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        return (*scaled_once(ctx, upstream), *[None] * 8)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        _keep_rows(ctx, inputs, None)
        return _divergence_rows(*inputs)

    backward = staticmethod(only_once(_rows_backward))


def _check_pair(name: str, rows: Any, weight: Any, bias: Any, like: Any) -> Any:
    dtype_of(f"{name}hidden", check_tensor(f"{name}hidden", rows))
    check_tensor(f"{name}weight", weight)
    if rows.dim() < 1 or weight.dim() != 2 or rows.shape[-1] != weight.shape[1] or rows.dtype != weight.dtype:
        raise InvalidArgument(
            f"{name}weight: got {str(weight.dtype)[6:]} {list(weight.shape)}, allowed {str(rows.dtype)[6:]} [vocab, "
            f"{rows.shape[-1] if rows.dim() else 'hidden'}] ({name}hidden's)"
        )
    for part, tensor in (("hidden", rows), ("weight", weight)):
        check_device(f"{name}{part}", tensor, like, "hidden")
    if bias is not None:
        as_f32(f"{name}bias", bias, weight.shape[0], rows, "one for each row of weight")
        bias = bias.float().contiguous()
    return bias


def linear_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    reference_hidden: torch.Tensor,
    reference_weight: torch.Tensor,
    *,
    kind: str = "reverse_kl",
    beta: float = 0.5,
    bias: Optional[torch.Tensor] = None,
    reference_bias: Optional[torch.Tensor] = None,
    temperature: Parameter = 1.0,
    reference_temperature: Optional[Parameter] = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    reference_scale: float = 1.0,
    reference_softcap: float = 0.0,
    mask: Optional[torch.Tensor] = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """The divergence of a student p from its reference q, in nats, without the logits of either in memory.

    kind: "forward_kl" is KL(p || q), "reverse_kl" is KL(q || p), as in Client.divergence; "jensen_shannon" is
    beta KL(q || m) + (1 - beta) KL(p || m), with m = (1 - beta) p + beta q and 0 < beta < 1. Distillation on a teacher's
    text is "reverse_kl" here: the student is p.

    hidden: the student's, [..., hidden], with weight [vocab, hidden] and bias [vocab]. reference_*: the reference's, of
    the same leading dimensions and vocabulary, with a hidden size, dtype and options of its own; it has no gradient.
    temperature: above 0; a number, or a tensor with one for each row. reference_temperature: the same, unless given.
    scale, softcap: as in linear_cross_entropy. mask: bool [...], rows that count; None: all.
    reduction: "mean" over the rows that count, "sum", or "none": float32 [...].

    The backward runs once, as that of linear_cross_entropy. A row whose loss is not finite has gradients of 0.
    """
    bias = _check_pair("", hidden, weight, bias, hidden)
    reference_bias = _check_pair("reference_", reference_hidden, reference_weight, reference_bias, hidden)
    shape = hidden.shape[:-1]
    check_shape("reference_hidden", reference_hidden[..., 0], shape, "hidden's leading dimensions")
    if reference_weight.shape[0] != weight.shape[0]:
        raise InvalidArgument(
            f"reference_weight: got {reference_weight.shape[0]} tokens, allowed {weight.shape[0]} (weight's)"
        )
    for name, value, allowed in (("kind", kind, KINDS), ("reduction", reduction, _REDUCTIONS)):
        if value not in allowed:
            raise InvalidArgument(f"{name}: got {value!r}, allowed {', '.join(allowed)}")
    rows = rows_of(hidden)
    count = rows.shape[0]
    of, each = number("temperature", temperature, count, rows)
    of_reference, reference_each = (
        (of, each)
        if reference_temperature is None
        else number("reference_temperature", reference_temperature, count, rows)
    )
    options = {
        "scale": scale,
        "softcap": softcap,
        "reference_scale": reference_scale,
        "reference_softcap": reference_softcap,
        "beta": beta,
    }
    numbers = [of, of_reference, *(scalar(name, value) for name, value in options.items())]
    if mask is None:  # none is kept: it would belong to the first call's stream, graph or inference mode
        weights = torch.ones(count, dtype=torch.float32, device=rows.device)
    else:
        check_shape("mask", check_tensor("mask", mask), shape, "hidden's leading dimensions")
        weights = mask.reshape(-1).to(device=rows.device, dtype=torch.float32).contiguous()
    if reduction == "mean":
        weights = weights / weights.sum()
    tensors = (
        rows, weight, bias, rows_of(reference_hidden.detach()), reference_weight.detach(),
        None if reference_bias is None else reference_bias.detach(), weights, each, reference_each,
    )  # fmt: skip
    plain = is_plain(*tensors[:6])
    wants = [x is not None and x.requires_grad for x in tensors[:3]]
    if reduction != "none" and torch.is_grad_enabled() and any(wants) and rows.dtype is not torch.float16:
        if plain:
            return _Reduced.apply(*tensors, numbers, KINDS.index(kind))
        recorded = torch.ops.logitd.divergence_reduced(*tensors, numbers, KINDS.index(kind), wants)
        return recorded[0]
    losses = (_Rows.apply if plain else torch.ops.logitd.divergence_rows)(*tensors, numbers, KINDS.index(kind))
    if reduction != "none":
        return _sum(losses, weights)
    return (losses if mask is None else torch.where(weights > 0, losses, 0.0)).view(shape)

"""Scale, mask and softmax of attention scores in one pass, with gradients for the scores and the sinks.

The library's op is kernels/attention_softmax.h of the source: its accuracy, NaN rules and sources.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import library

from logitd.errors import InvalidArgument
from logitd.ops import _library, _structs
from logitd.ops._loss_autograd import LIBRARY, is_plain, only_once
from logitd.ops._tensors import (
    DTYPES,
    as_f32,
    check_device,
    check_tensor,
    count_of,
    dtype_of,
    pointer,
    rows_of,
    scalar,
    view,
)

_LIMITS = "float scale, int left, int right"

LIBRARY.define(
    f"attention_softmax(Tensor scores, Tensor? mask, Tensor? sinks, {_LIMITS}, bool wide) -> (Tensor, Tensor)"
)
LIBRARY.define(
    f"attention_softmax_gradients(Tensor probs, Tensor d_probs, Tensor? sinks, Tensor logsumexp, {_LIMITS}, "
    "ScalarType dtype) -> (Tensor, Tensor)"
)


def _shape(scores: torch.Tensor, scale: float, left: int, right: int) -> _structs.AttentionShape:
    return _structs.AttentionShape(*scores.shape, left, right, scale, 0)


def _mask_of(mask: torch.Tensor) -> _structs.Mask:
    strides = (0 if size == 1 else stride for size, stride in zip(mask.shape[:3], mask.stride()))
    kind = 1 if mask.dtype is torch.bool else 2
    return _structs.Mask(mask.data_ptr(), kind, DTYPES.get(mask.dtype, 0), *strides)


def _attention_softmax(
    scores: torch.Tensor, mask: Any, sinks: Any, scale: float, left: int, right: int, wide: bool
) -> Tuple[torch.Tensor, torch.Tensor]:
    rows = rows_of(scores)
    op = _structs.AttentionSoftmax()
    op.shape = _shape(scores, scale, left, right)
    op.scores = view(rows)
    if mask is not None:
        if mask.stride(3) != 1:
            mask = mask.contiguous()
        op.mask = _mask_of(mask)
    op.sinks = pointer(sinks)
    probs = torch.empty(scores.shape, dtype=torch.float32 if wide else scores.dtype, device=scores.device)
    op.probs = view(rows_of(probs))
    count = rows.shape[0]
    logsumexp = torch.empty(count if sinks is not None else 0, dtype=torch.float32, device=scores.device)
    op.logsumexp = pointer(logsumexp) if sinks is not None else None
    status = torch.empty((count, 2), dtype=torch.int32, device=scores.device)
    op.status = status.data_ptr()
    _library.run("attention_softmax", op, scores, min(count, 1))  # it needs no workspace for rows
    return probs, logsumexp


def _attention_softmax_gradients(
    probs: torch.Tensor,
    d_probs: torch.Tensor,
    sinks: Any,
    logsumexp: Any,
    scale: float,
    left: int,
    right: int,
    dtype: Any,
) -> Tuple[torch.Tensor, torch.Tensor]:
    op = _structs.AttentionSoftmaxBackward()
    op.shape = _shape(probs, scale, left, right)
    d_probs = d_probs.contiguous()
    d_scores = torch.empty(probs.shape, dtype=dtype, device=probs.device)
    op.probs, op.d_probs, op.d_scores = (view(rows_of(of)) for of in (probs, d_probs, d_scores))
    d_sinks = torch.empty(0 if sinks is None else sinks.shape[0], dtype=torch.float64, device=probs.device)
    if sinks is not None:
        op.sinks, op.logsumexp, op.d_sinks = pointer(sinks), pointer(logsumexp), pointer(d_sinks)
    status = torch.empty((op.probs.rows, 2), dtype=torch.int32, device=probs.device)
    op.status = status.data_ptr()
    _library.run("attention_softmax_backward", op, probs, min(op.probs.rows, 1), (d_sinks,))
    return d_scores, d_sinks.float()


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("attention_softmax", _attention_softmax, _device)
    LIBRARY.impl("attention_softmax_gradients", _attention_softmax_gradients, _device)


@library.register_fake("logitd::attention_softmax", lib=LIBRARY)
def _(scores: Any, mask: Any, sinks: Any, scale: float, left: int, right: int, wide: bool) -> Any:
    count = scores.shape[0] * scores.shape[1] * scores.shape[2] if sinks is not None else 0
    probs = scores.new_empty(scores.shape, dtype=torch.float32 if wide else scores.dtype)
    return probs, scores.new_empty(count, dtype=torch.float32)


@library.register_fake("logitd::attention_softmax_gradients", lib=LIBRARY)
def _(probs: Any, d_probs: Any, sinks: Any, logsumexp: Any, scale: float, left: int, right: int, dtype: Any) -> Any:
    d_sinks = probs.new_empty(0 if sinks is None else sinks.shape[0], dtype=torch.float32)
    return probs.new_empty(probs.shape, dtype=dtype), d_sinks


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    scores, _, sinks, *limits, _ = inputs
    ctx.save_for_backward(output[0], sinks, output[1])
    ctx.limits, ctx.dtype = limits, scores.dtype


def _backward(ctx: Any, d_probs: torch.Tensor, _: Any) -> Any:
    probs, sinks, logsumexp = ctx.saved_tensors
    run = _attention_softmax_gradients if is_plain(probs, d_probs) else torch.ops.logitd.attention_softmax_gradients
    d_scores, d_sinks = run(probs, d_probs, sinks, logsumexp, *(*ctx.limits, ctx.dtype))
    return (
        d_scores if ctx.needs_input_grad[0] else None,
        None,
        d_sinks if ctx.needs_input_grad[2] else None,
        None,
        None,
        None,
        None,
    )


library.register_autograd("logitd::attention_softmax", _backward, setup_context=_keep, lib=LIBRARY)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tuple[torch.Tensor, torch.Tensor]:
        output = _attention_softmax(*inputs)
        _keep(ctx, inputs, output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        return output

    backward = staticmethod(only_once(_backward))


def _check_mask(mask: Any, scores: torch.Tensor) -> torch.Tensor:
    check_device("mask", check_tensor("mask", mask), scores, "scores")
    if mask.dtype is not torch.bool and mask.dtype not in DTYPES:
        raise InvalidArgument(f"mask dtype: got {str(mask.dtype)[6:]}, allowed bool, float32, float16, bfloat16")
    if mask.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument("mask: got a tensor that requires a gradient, allowed one without (it would get none)")
    if mask.dim() < 4:
        mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    allowed = all(size in (1, full) for size, full in zip(mask.shape[:3], scores.shape))
    if mask.dim() != 4 or not allowed or mask.shape[3] not in (1, scores.shape[3]):
        raise InvalidArgument(f"mask: got shape {list(mask.shape)}, allowed what broadcasts to {list(scores.shape)}")
    return mask if mask.shape[3] == scores.shape[3] else mask.expand(*mask.shape[:3], scores.shape[3]).contiguous()


def scaled_masked_softmax(
    scores: torch.Tensor,
    mask: Optional[torch.Tensor] = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    window: Tuple[int, int] = (-1, -1),
    sinks: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    """softmax(scale * scores + mask) over the keys that each query sees.

    scores: [batch, heads, queries, keys], float32, float16 or bfloat16. mask: broadcasts to scores; bool, True where a
    key is masked, or floating-point, added after the scale; it has no gradient.
    causal: a query sees the keys up to its own; the last query is at the last key. window: keys before and after a
    query's own that it sees too, -1 for all.
    sinks: [heads], in nats: exp(sink) is added to each denominator. out_dtype: of the result, scores' or float32.

    A query that sees no key has zeros in its row, where torch.softmax has NaN. InvalidArgument: shapes and dtypes.
    """
    dtype_of("scores", check_tensor("scores", scores))
    if scores.dim() != 4:
        raise InvalidArgument(f"scores: got shape {list(scores.shape)}, allowed [batch, heads, queries, keys]")
    if mask is not None:
        mask = _check_mask(mask, scores)
    if out_dtype not in (None, torch.float32, scores.dtype):
        raise InvalidArgument(f"out_dtype: got {out_dtype}, allowed {scores.dtype}, torch.float32")
    if sinks is not None:
        as_f32("sinks", sinks, scores.shape[1], scores, "one for each head")
        sinks = sinks.float().contiguous()
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise InvalidArgument(f"window: got {window!r}, allowed two whole numbers")
    left, right = (count_of("window", side, -1, 2**40) for side in window)
    wide = out_dtype is torch.float32
    run = torch.ops.logitd.attention_softmax
    if is_plain(scores, mask, sinks):
        wanted = torch.is_grad_enabled() and (scores.requires_grad or (sinks is not None and sinks.requires_grad))
        run = _Softmax.apply if wanted else _attention_softmax
    probs, _ = run(scores, mask, sinks, scalar("scale", scale), left, 0 if causal else right, wide)
    return probs


class FusedScaleMaskSoftmax(torch.nn.Module):
    """scaled_masked_softmax with the constructor and the call of Megatron-LM's class of that name.

    Every combination is fused here. Differences: a query that sees no key has zeros in its row, where Megatron's has
    equal probabilities; mask_func is not called, because True in a bool mask always means masked.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: Any,
        scaled_masked_softmax_fusion: bool = True,
        mask_func: Any = None,
        softmax_in_fp32: bool = True,
        scale: Optional[float] = None,
        window_size: Optional[Tuple[int, int]] = None,
    ) -> None:
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise InvalidArgument("input_in_fp16: got True beside input_in_bf16, allowed one of both")
        if scale is not None and not softmax_in_fp32:
            raise InvalidArgument("softmax_in_fp32: got False beside a scale, allowed True: it is computed in float32")
        name = str(getattr(attn_mask_type, "name", attn_mask_type)).rsplit(".")[-1]
        self.causal = name in ("causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")
        self.scale = 1.0 if scale is None else scale
        self.window = (-1, -1) if window_size is None else tuple(window_size)

    def forward(self, input: torch.Tensor, mask: Optional[torch.Tensor], softmax_offset: Any = None) -> torch.Tensor:
        """input: scores. mask: as in scaled_masked_softmax. softmax_offset: sinks."""
        left, right = self.window
        return scaled_masked_softmax(
            input, mask, scale=self.scale, causal=self.causal, window=(left, right), sinks=softmax_offset
        )

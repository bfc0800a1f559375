"""The gradients of losses: torch's ops in the namespace `logitd`, and what eager calls use in their place.

Two ops have gradients. loss_rows answers for every row, and its backward makes the logits again. loss_reduced gives one
loss, and makes its gradients in the same call: its backward only scales them. Eager calls skip torch's dispatcher;
torch.compile, fake tensors and tensor subclasses go through it.
"""

from __future__ import annotations

from typing import Any, Tuple

import torch
from torch import library

from logitd.errors import FailedPrecondition
from logitd.ops import _losses
from logitd.ops._losses import Options
from logitd.ops._tensors import gradients_of, or_empty

_INPUT = "Tensor rows, Tensor? weight, Tensor? bias, Tensor target"
_OPTIONS = (
    "int ignore_index, float temperature, float label_smoothing, float z_loss, float softcap, float scale, "
    "int smoothing, int first_token, int vocab"
)
_WANTS = "bool want_rows, bool want_weight, bool want_bias"
_N_OPTIONS = len(Options._fields)

LIBRARY = library.Library("logitd", "FRAGMENT")
LIBRARY.define(f"loss_rows({_INPUT}, {_OPTIONS}) -> Tensor")
LIBRARY.define(
    f"loss_gradients({_INPUT}, Tensor logsumexp, Tensor upstream, {_OPTIONS}, {_WANTS}) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    f"loss_reduced({_INPUT}, {_OPTIONS}, int reduction, {_WANTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _loss_rows(rows: torch.Tensor, weight: Any, bias: Any, target: torch.Tensor, *options: Any) -> torch.Tensor:
    return _losses.forward(rows, weight, bias, target, Options(*options))[0]


def _loss_gradients(
    rows: torch.Tensor, weight: Any, bias: Any, target: torch.Tensor, logsumexp: Any, upstream: Any, *rest: Any
) -> Tuple[torch.Tensor, ...]:
    options, wants = Options(*rest[:_N_OPTIONS]), rest[_N_OPTIONS:]
    return or_empty(rows, _losses.backward(rows, weight, bias, target, logsumexp, upstream, options, wants))


def _loss_reduced(
    rows: torch.Tensor, weight: Any, bias: Any, target: torch.Tensor, *rest: Any
) -> Tuple[torch.Tensor, ...]:
    options, reduction, wants = Options(*rest[:_N_OPTIONS]), rest[_N_OPTIONS], rest[_N_OPTIONS + 1 :]
    answers, total, gradients = _losses.training(rows, weight, bias, target, options, reduction, (True, *wants[1:]))
    return (total, answers, *or_empty(rows, gradients))


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("loss_rows", _loss_rows, _device)
    LIBRARY.impl("loss_gradients", _loss_gradients, _device)
    LIBRARY.impl("loss_reduced", _loss_reduced, _device)


@library.register_fake("logitd::loss_rows", lib=LIBRARY)
def _(rows: Any, weight: Any, bias: Any, target: Any, *options: Any) -> Any:
    return rows.new_empty((3, rows.shape[0]), dtype=torch.float32)


@library.register_fake("logitd::loss_gradients", lib=LIBRARY)
def _(rows: Any, weight: Any, bias: Any, target: Any, logsumexp: Any, upstream: Any, *rest: Any) -> Any:
    options, wants = Options(*rest[:_N_OPTIONS]), rest[_N_OPTIONS:]
    return or_empty(rows, gradients_of(rows, weight, wants, options.dtype_of_part))


@library.register_fake("logitd::loss_reduced", lib=LIBRARY)
def _(rows: Any, weight: Any, bias: Any, target: Any, *rest: Any) -> Any:
    answers = rows.new_empty((3, rows.shape[0]), dtype=torch.float32)
    gradients = gradients_of(rows, weight, (True, *rest[_N_OPTIONS + 2 :]))
    return (answers.new_empty(()), answers, *or_empty(rows, gradients))


def _keep_rows(ctx: Any, inputs: Any, output: Any) -> None:
    rows, weight, bias, target, *options = inputs
    ctx.save_for_backward(rows, weight, bias, target, output)
    ctx.options = options


def _rows_backward(ctx: Any, upstream: torch.Tensor) -> Any:
    rows, weight, bias, target, answers = ctx.saved_tensors
    wants = ctx.needs_input_grad[:3]
    run = _loss_gradients if is_plain(rows, upstream) else torch.ops.logitd.loss_gradients
    gradients = run(rows, weight, bias, target, answers[1].contiguous(), upstream[0].contiguous(), *ctx.options, *wants)
    given = (gradient if wanted else None for gradient, wanted in zip(gradients, wants))
    return (*given, *[None] * (1 + _N_OPTIONS))


def keep_gradients(ctx: Any, inputs: Any, output: Any) -> None:
    """Keeps the gradients of an op that returns a loss, an answer for every row, and gradients."""
    ctx.save_for_backward(*output[2:])
    ctx.set_materialize_grads(False)


def scaled(ctx: Any, upstream: Any) -> Any:
    """The kept gradients times the loss's own: out of place, because who records the op may run it again."""
    return [
        gradient * upstream if wanted and upstream is not None else None
        for gradient, wanted in zip(ctx.saved_tensors, ctx.needs_input_grad)
    ]


def _reduced_backward(ctx: Any, upstream: Any, *_: Any) -> Any:
    return (*scaled(ctx, upstream), *[None] * (1 + _N_OPTIONS + 4))


def scaled_once(ctx: Any, upstream: torch.Tensor) -> Any:
    """The gradients of ctx times the loss's own, in place: there is no room for a second weight."""
    if ctx.gradients is None:
        raise FailedPrecondition(
            "backward: got a second pass through one loss, allowed one: its gradients were made with it"
        )
    gradients, ctx.gradients = ctx.gradients, None
    if upstream.is_cuda or upstream.item() != 1:
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(upstream)
    return gradients


library.register_autograd("logitd::loss_rows", _rows_backward, setup_context=_keep_rows, lib=LIBRARY)
library.register_autograd("logitd::loss_reduced", _reduced_backward, setup_context=keep_gradients, lib=LIBRARY)


def only_once(backward: Any) -> Any:
    """A backward whose gradients refuse to be differentiated: with create_graph, torch raises this text if they are."""

    def run(ctx: Any, *upstream: Any) -> Any:
        recorded = torch.is_grad_enabled()
        with torch.no_grad():
            gradients = backward(ctx, *upstream)
        if not recorded:
            return gradients
        refuse = torch._C._functions.DelayedError(
            b"backward: got a second derivative of an op of logitd, allowed the first", len(gradients)
        )
        return refuse(*(None if of is None else of.detach().requires_grad_() for of in gradients))

    return run


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        answers = _loss_rows(*inputs)
        _keep_rows(ctx, inputs, answers)
        return answers

    backward = staticmethod(only_once(_rows_backward))


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any, bias: Any, target: Any, options: Any, reduction: int) -> Any:
        wants = (True, *ctx.needs_input_grad[1:3])
        answers, total, ctx.gradients = _losses.training(rows, weight, bias, target, options, reduction, wants)
        ctx.mark_non_differentiable(answers)
        ctx.set_materialize_grads(False)
        return total, answers

    @staticmethod
    @only_once
    def backward(ctx: Any, upstream: Any, _: Any) -> Any:
        return (*scaled_once(ctx, upstream), None, None, None)


def is_plain(*tensors: Any) -> bool:
    """True where nothing but memory is behind the tensors, and nobody records what is done with them."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(type(of) in (torch.Tensor, torch.nn.Parameter) for of in tensors if of is not None)


def loss_rows(rows: torch.Tensor, weight: Any, bias: Any, target: torch.Tensor, options: Options) -> torch.Tensor:
    """float32 [3, rows]: loss, logsumexp, target_logprob; the first has gradients."""
    if not is_plain(rows, weight, bias):
        return torch.ops.logitd.loss_rows(rows, weight, bias, target, *options)
    if torch.is_grad_enabled() and any(of is not None and of.requires_grad for of in (rows, weight, bias)):
        return _Rows.apply(rows, weight, bias, target, *options)
    return _losses.forward(rows, weight, bias, target, options)[0]


def loss_reduced(
    rows: torch.Tensor, weight: Any, bias: Any, target: torch.Tensor, options: Options, reduction: int
) -> Tuple[torch.Tensor, torch.Tensor]:
    """The loss by the reduction of this place in REDUCTIONS, which has gradients, and the answers of loss_rows."""
    wants = tuple(of is not None and of.requires_grad for of in (rows, weight, bias))
    wanted = torch.is_grad_enabled() and any(wants)
    if not is_plain(rows, weight, bias):
        if not wanted:
            answers = torch.ops.logitd.loss_rows(rows, weight, bias, target, *options)
            return _losses.reduced(answers[0], target, options.ignore_index, reduction), answers
        total, answers, *_ = torch.ops.logitd.loss_reduced(rows, weight, bias, target, *options, reduction, *wants)
        return total, answers.detach()
    if wanted:
        total, answers = _Reduced.apply(rows, weight, bias, target, options, reduction)
        return total, answers
    answers, total = _losses.forward(rows, weight, bias, target, options, reduction)
    return total, answers

"""cross_entropy and linear_cross_entropy, with gradients."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Tuple

import torch

from logitd.ops import _library, _structs
from logitd.ops._tensors import aligned, gradients_of, head_of, pointer, view

REDUCTIONS = ("none", "sum", "mean")  # as the library numbers them
SMOOTHINGS = ("torch", "megatron")  # likewise
_PARAMETERS = ("target", "temperature", "label_smoothing", "z_loss")
_ALLOWED = {
    "target": "tokens of the vocabulary, or ignore_index",
    "temperature": "finite and > 0",
    "label_smoothing": "finite and >= 0 and < 1",
    "z_loss": "finite and >= 0",
}


class Losses(NamedTuple):
    """The result of linear_cross_entropy and cross_entropy with `stats=True`. Only `loss` has gradients."""

    loss: torch.Tensor  # as without stats
    losses: torch.Tensor  # float32, of each row, in nats; the target's shape
    logsumexp: torch.Tensor  # float32, of each row, of logits / temperature
    target_logprob: torch.Tensor  # float32, of each row; 0 where it is ignored


class Options(NamedTuple):
    """Options that all rows of a call share. Scalars only, as torch's schemas have them."""

    ignore_index: int
    temperature: float
    label_smoothing: float
    z_loss: float
    softcap: float
    scale: float
    smoothing: int
    first_token: int = 0  # of a shard
    vocab: int = 0  # of all shards; 0: the weight is whole

    @property
    def dtype_of_part(self) -> Optional[torch.dtype]:
        """Of the rows' gradient, which is a part of a sum where the weight is a shard; None: the rows' own."""
        return torch.float32 if self.vocab > 0 else None


def _input(op: Any, rows: torch.Tensor, weight: Any, bias: Any, target: torch.Tensor, options: Options) -> Any:
    """Sets the fields that the ops on losses share. Returns memory to keep until the op is enqueued."""
    of = op.rows
    kept = None
    if weight is not None:
        kept = rows, weight = aligned(rows), aligned(weight)
        op.head = head_of(weight, bias, options.scale, options.softcap)
    else:
        of.softcap = options.softcap
    op.input = view(rows)
    of.targets = target.data_ptr()
    of.ignore_index = options.ignore_index
    of.temperature.all = options.temperature
    of.label_smoothing.all = options.label_smoothing
    of.z_loss.all = options.z_loss
    of.smoothing = options.smoothing
    of.first_token = options.first_token
    of.vocab = options.vocab
    return kept


def _status(op: Any, like: torch.Tensor, rows: int) -> Optional[torch.Tensor]:
    """Memory for the statuses of rows, if anyone asks for them."""
    if not _library.wants_status(like):
        return None
    status = torch.zeros((rows, 2), dtype=torch.int32, device=like.device)
    op.status = status.data_ptr()
    return status


def _raise_refused(status: Optional[torch.Tensor], target: torch.Tensor) -> None:
    if status is not None:
        _library.raise_refused(status, _PARAMETERS, {"target": target}, _ALLOWED)


def _answers(op: Any, rows: torch.Tensor, reduction: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """float32 [3, rows]: loss, logsumexp, target_logprob; and the reduced loss, or nothing."""
    count = rows.shape[0]
    answers = torch.empty((3, count), dtype=torch.float32, device=rows.device)
    at = answers.data_ptr()
    op.loss, op.logsumexp, op.target_logprob = at, at + 4 * count, at + 8 * count
    total = torch.empty((), dtype=torch.float32, device=rows.device)
    if count == 0:  # nothing runs
        total.fill_(float("nan") if REDUCTIONS[reduction] == "mean" else 0.0)
    op.reduction, op.total = reduction, total.data_ptr()
    return answers, total


def forward(
    rows: torch.Tensor, weight: Any, bias: Any, target: torch.Tensor, options: Options, reduction: int = 0
) -> Tuple[torch.Tensor, torch.Tensor]:
    """float32 [3, rows]: loss, logsumexp, target_logprob; and the loss by the reduction of this place in REDUCTIONS."""
    op = _structs.CrossEntropy()
    kept = _input(op, rows, weight, bias, target, options)  # noqa: F841
    answers, total = _answers(op, rows, reduction)
    status = _status(op, rows, rows.shape[0])
    _library.run("cross_entropy", op, rows, rows.shape[0])
    _raise_refused(status, target)
    return answers, total


def _gradients(op: Any, rows: torch.Tensor, weight: Any, wants: Any, dtype: Optional[torch.dtype] = None) -> Any:
    """Memory for the gradients that are wanted, which the op gets."""
    d_input, d_weight, d_bias = gradients = gradients_of(rows, weight, wants, dtype)
    if d_input is not None:
        op.d_input = view(d_input)
    if d_weight is not None:
        op.d_weight = view(d_weight)
    op.d_bias = pointer(d_bias)
    return gradients


def training(
    rows: torch.Tensor, weight: Any, bias: Any, target: torch.Tensor, options: Options, reduction: int, wants: Any
) -> Tuple[torch.Tensor, torch.Tensor, Any]:
    """The results of forward with a reduction, and the gradients of the reduced loss."""
    op = _structs.CrossEntropyTraining()
    kept = _input(op, rows, weight, bias, target, options)  # noqa: F841
    answers, total = _answers(op, rows, reduction)
    gradients = _gradients(op, rows, weight, wants)
    status = _status(op, rows, rows.shape[0])
    _library.run("cross_entropy_training", op, rows, rows.shape[0], gradients)
    _raise_refused(status, target)
    return answers, total, gradients


def backward(
    rows: torch.Tensor,
    weight: Any,
    bias: Any,
    target: torch.Tensor,
    logsumexp: torch.Tensor,
    upstream: torch.Tensor,
    options: Options,
    wants: Any,
) -> Any:
    """The gradients of sum(upstream * loss). Of a shard, that of the input is a part, in float32."""
    op = _structs.CrossEntropyBackward()
    kept = _input(op, rows, weight, bias, target, options)  # noqa: F841
    op.logsumexp = logsumexp.data_ptr()
    op.upstream = upstream.data_ptr()
    gradients = _gradients(op, rows, weight, wants, options.dtype_of_part)
    _library.run("cross_entropy_backward", op, rows, rows.shape[0], gradients)
    return gradients


def reduced(losses: torch.Tensor, target: torch.Tensor, ignore_index: int, reduction: int) -> torch.Tensor:
    """Losses of rows by the reduction of this place in REDUCTIONS, with gradients. Ignored rows count as 0, also NaN."""
    counted = target.ne(ignore_index)
    total = torch.where(counted, losses, 0.0).sum()
    return total / counted.sum() if REDUCTIONS[reduction] == "mean" else total

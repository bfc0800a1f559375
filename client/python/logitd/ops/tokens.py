"""softmax_topk and sample, of logits or of hidden states under an output head. Nothing here has gradients.

The library's ops are kernels/softmax_topk.h, kernels/sample.h and kernels/sampling_rules.h of the source; docs/semantics.md
has the order of the sampling steps, ties, random numbers and NaN rules.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import library

from logitd.errors import InvalidArgument
from logitd.ops import _library, _structs
from logitd.ops._loss_autograd import LIBRARY, is_plain
from logitd.ops._tensors import (
    Parameter,
    aligned,
    as_f32,
    check_device,
    check_shape,
    check_tensor,
    count_of,
    dtype_of,
    head_of,
    integer,
    number,
    rows_of,
    view,
)

_MOST = 1024  # top tokens, tokens of a support, draws, extra ids
_WIDEST = 16  # watermark
_MODES = ("raw", "processed", "tempered")
_HEAD = "Tensor rows, Tensor? weight, Tensor? head_bias, float scale, float softcap"

LIBRARY.define(f"softmax_topk({_HEAD}, Tensor? temperatures, float temperature, int k) -> (Tensor, Tensor, Tensor)")
LIBRARY.define(
    f"sample({_HEAD}, Tensor?[] each, float[] numbers, int[] integers, int[] counts, Tensor? history, "
    "Tensor? history_offsets, Tensor? bias, Tensor? bias_offsets, Tensor? mask, Tensor? extra_ids) -> Tensor[]"
)

_NUMBERS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_n_sigma": 0.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "xtc_threshold": 0.1,
    "xtc_probability": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_INTEGERS = {"seed": 0, "position": 0, "top_k": 0, "prompt_tokens": 0}
_COUNTS = (
    "top_logprobs", "logprob_mode", "want_support", "draws", "want_rank", "want_entropy", "watermark_width"
)  # fmt: skip
# The library's parameters, from number 1.
_PARAMETERS = (
    "seed", "position", "temperature", "top_k", "top_p", "top_n_sigma", "min_p", "typical_p", "xtc_threshold",
    "xtc_probability", "repetition_penalty", "presence_penalty", "frequency_penalty", "prompt_tokens", "history", "bias",
    "extra_ids",
)  # fmt: skip
_ALLOWED = {
    "temperature": "finite and >= 0",
    "top_k": "-1 or more",
    "top_p": "> 0 and <= 1",
    "top_n_sigma": "finite and >= 0",
    "min_p": "0 to 1",
    "typical_p": "> 0 and <= 1",
    "xtc_threshold": "0 to 1",
    "xtc_probability": "0 to 1",
    "repetition_penalty": "finite and > 0",
    "presence_penalty": "finite",
    "frequency_penalty": "finite",
    "prompt_tokens": "0 to the row's history",
    "history": "tokens of the vocabulary",
    "bias": "tokens of the vocabulary, and values that are not NaN",
    "extra_ids": "tokens of the vocabulary",
}


class TopK(NamedTuple):
    """The k most probable tokens of each row, by (logit descending, token ascending)."""

    probs: torch.Tensor  # float32 [..., k], of the softmax over the whole row
    indices: torch.Tensor  # int64 [..., k]
    logsumexp: torch.Tensor  # float32 [...], of logits / temperature


class Sampled(NamedTuple):
    """The answers of `sample`. Log-probabilities are natural; fields that were not asked for are None.

    A row with NaN, or with nothing left to draw, has token -1 and log-probability -inf.
    """

    tokens: torch.Tensor  # int64 [...]
    logprobs: torch.Tensor  # float32 [...], of the token, in the row's logprob_mode
    logsumexp: torch.Tensor  # float32 [...], of the row as given
    ranks: Optional[torch.Tensor]  # int64 [...], of the token, from 1
    top_ids: Optional[torch.Tensor]  # int64 [..., top_logprobs]
    top_logprobs: Optional[torch.Tensor]  # float32
    extra_logprobs: Optional[torch.Tensor]  # float32 [..., extra ids]
    support_size: Optional[torch.Tensor]  # int64 [...], tokens that could be drawn
    support_ids: Optional[torch.Tensor]  # int64 [..., want_support], -1 beyond the support
    support_logprobs: Optional[torch.Tensor]  # float32, of the distribution drawn from
    entropies: Optional[torch.Tensor]  # float32 [...], of the distribution drawn from, in nats
    raw_entropies: Optional[torch.Tensor]  # float32 [...], of the row as given
    draw_tokens: Optional[torch.Tensor]  # int64 [..., draws]
    draw_logprobs: Optional[torch.Tensor]  # float32


class _Input(NamedTuple):
    """Rows of an op: logits, or hidden states with a head."""

    rows: torch.Tensor
    weight: Optional[torch.Tensor]
    bias: Optional[torch.Tensor]
    scale: float
    softcap: float
    shape: torch.Size

    @property
    def vocab(self) -> int:
        return self.rows.shape[1] if self.weight is None else self.weight.shape[0]  # type: ignore[no-any-return]


def _input_of(value: Any, weight: Any, head_bias: Any, scale: float, softcap: float) -> _Input:
    name = "logits" if weight is None else "hidden"
    value = check_tensor(name, value).detach()
    dtype_of(name, value)
    if value.dim() < 1:
        raise InvalidArgument(f"{name}: got shape [], allowed [..., {'vocab' if weight is None else 'hidden'}]")
    if weight is None:
        if head_bias is not None or scale != 1.0 or softcap != 0.0:
            raise InvalidArgument("head_bias, scale, softcap: got a value without weight, allowed with weight")
    else:
        weight = check_tensor("weight", weight).detach()
        check_device("weight", weight, value, "hidden")
        if weight.dim() != 2 or weight.shape[1] != value.shape[-1] or weight.dtype != value.dtype:
            raise InvalidArgument(
                f"weight: got {str(weight.dtype)[6:]} {list(weight.shape)}, allowed {str(value.dtype)[6:]} "
                f"[vocab, {value.shape[-1]}] (hidden's)"
            )
        head_bias = as_f32("head_bias", head_bias, weight.shape[0], value, "one for each row of weight")
    return _Input(rows_of(value), weight, head_bias, float(scale), float(softcap), value.shape[:-1])


def _set_input(op: Any, rows: torch.Tensor, weight: Any, bias: Any, scale: float, softcap: float) -> Any:
    """Returns memory to keep until the op is enqueued."""
    kept = None
    if weight is not None:
        kept = rows, weight = aligned(rows), aligned(weight)
        op.head = head_of(weight, bias, scale, softcap)
    op.input = view(rows)
    return kept


def _softmax_topk(
    rows: torch.Tensor, weight: Any, bias: Any, scale: float, softcap: float, each: Any, temperature: float, k: int
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    op = _structs.SoftmaxTopK()
    kept = _set_input(op, rows, weight, bias, scale, softcap)  # noqa: F841
    op.temperature.each = None if each is None else each.data_ptr()
    op.temperature.all, op.k = temperature, k
    count = rows.shape[0]
    probs = torch.empty((count, k), dtype=torch.float32, device=rows.device)
    indices = torch.empty((count, k), dtype=torch.int32, device=rows.device)
    logsumexp = torch.empty(count, dtype=torch.float32, device=rows.device)
    op.probs, op.indices, op.logsumexp = probs.data_ptr(), indices.data_ptr(), logsumexp.data_ptr()
    status = _status_of(op, rows)
    _library.run("softmax_topk", op, rows, count)
    if status is not None:
        _library.raise_refused(status, ("temperature",), {"temperature": each}, {"temperature": "finite and > 0"})
    return probs, indices.long(), logsumexp


def _status_of(op: Any, rows: torch.Tensor) -> Optional[torch.Tensor]:
    if not _library.wants_status(rows):
        return None
    status = torch.zeros((rows.shape[0], 2), dtype=torch.int32, device=rows.device)
    op.status = status.data_ptr()
    return status


def softmax_topk(
    logits: torch.Tensor,
    k: int,
    *,
    temperature: Parameter = 1.0,
    weight: Optional[torch.Tensor] = None,
    head_bias: Optional[torch.Tensor] = None,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> TopK:
    """The k most probable tokens of softmax(logits / temperature), over the last dimension.

    logits: [..., vocab], float32, float16 or bfloat16; with weight, hidden states [..., hidden] of its dtype.
    k: 1..vocab. temperature: above 0; a number, or a tensor with one for each row.
    weight: [vocab, hidden]; head_bias, scale, softcap: as in linear_cross_entropy.
    """
    of = _input_of(logits, weight, head_bias, scale, softcap)
    value, each = number("temperature", temperature, of.rows.shape[0], of.rows)
    whole = count_of("k", k, 1, of.vocab)
    run = _softmax_topk if is_plain(of.rows, of.weight) else torch.ops.logitd.softmax_topk
    probs, indices, logsumexp = run(*of[:5], each, value, whole)
    return TopK(probs.view(*of.shape, k), indices.view(*of.shape, k), logsumexp.view(of.shape))


def _sample(
    rows: torch.Tensor,
    weight: Any,
    bias: Any,
    scale: float,
    softcap: float,
    each: Sequence[Any],
    numbers: Sequence[float],
    integers: Sequence[int],
    counts: Sequence[int],
    history: Any,
    history_offsets: Any,
    biases: Any,
    bias_offsets: Any,
    mask: Any,
    extra_ids: Any,
) -> List[torch.Tensor]:
    op = _structs.Sample()
    kept = _set_input(op, rows, weight, bias, scale, softcap)  # noqa: F841
    values = (*numbers, *integers[:-1])
    for name, one, many in zip((*_NUMBERS, *_INTEGERS), values, each):
        field = getattr(op, name)
        field.all = one
        field.each = None if many is None else many.data_ptr()
    op.watermark_key = integers[-1] % 2**64
    for name, count in zip(_COUNTS, counts):
        setattr(op, name, count)
    if history is not None:
        op.history = _structs.Lists(history.data_ptr(), history_offsets.data_ptr(), history.shape[0])
    if biases is not None:
        op.bias = _structs.Lists(biases.data_ptr(), bias_offsets.data_ptr(), biases.shape[0])
    if mask is not None:
        op.mask = mask.data_ptr()
    if extra_ids is not None:
        op.extra_ids, op.extra_count = extra_ids.data_ptr(), extra_ids.shape[1]
    answers = []
    for name, dtype, width in _answers_of(op.extra_count, dict(zip(_COUNTS, counts))):
        shape = (rows.shape[0],) if width is None else (rows.shape[0], width)
        answer = torch.empty(shape, dtype=dtype, device=rows.device)
        setattr(op, name, answer.data_ptr())
        answers.append(answer)
    status = _status_of(op, rows)
    _library.run("sample", op, rows, rows.shape[0])
    if status is not None:
        arrays: Dict[str, Any] = dict(zip((*_NUMBERS, *_INTEGERS), each))
        _library.raise_refused(status, _PARAMETERS, arrays, _ALLOWED)
    return [answer.long() if answer.dtype is torch.int32 else answer for answer in answers]


def _answers_of(extra: int, counts: Dict[str, int]) -> List[Tuple[str, torch.dtype, Optional[int]]]:
    """The library's name, the dtype and the width of each answer that is asked for, in the order of Sampled."""
    f32, i32 = torch.float32, torch.int32
    top, support, draws = counts["top_logprobs"], counts["want_support"], counts["draws"]
    asked: List[Tuple[bool, str, torch.dtype, Optional[int]]] = [
        (True, "tokens", i32, None),
        (True, "logprobs", f32, None),
        (True, "logsumexp", f32, None),
        (counts["want_rank"] > 0, "ranks", i32, None),
        (top > 0, "top_ids", i32, top),
        (top > 0, "top_values", f32, top),
        (extra > 0, "extra_logprobs", f32, extra),
        (support > 0, "support_size", i32, None),
        (support > 0, "support_ids", i32, support),
        (support > 0, "support_logprobs", f32, support),
        (counts["want_entropy"] > 0, "entropies", f32, None),
        (counts["want_entropy"] > 0, "raw_entropies", f32, None),
        (draws > 0, "draw_tokens", i32, draws),
        (draws > 0, "draw_logprobs", f32, draws),
    ]
    return [(name, dtype, width) for wanted, name, dtype, width in asked if wanted]


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("softmax_topk", _softmax_topk, _device)
    LIBRARY.impl("sample", _sample, _device)


@library.register_fake("logitd::softmax_topk", lib=LIBRARY)
def _(rows: Any, weight: Any, bias: Any, scale: Any, softcap: Any, each: Any, temperature: Any, k: int) -> Any:
    shape = (rows.shape[0], k)
    return (
        rows.new_empty(shape, dtype=torch.float32),
        rows.new_empty(shape, dtype=torch.int64),
        rows.new_empty(rows.shape[0], dtype=torch.float32),
    )


@library.register_fake("logitd::sample", lib=LIBRARY)
def _(rows: Any, *rest: Any) -> Any:
    counts, extra = rest[7], rest[-1]
    width = 0 if extra is None else extra.shape[1]
    return [
        rows.new_empty(
            (rows.shape[0],) if cols is None else (rows.shape[0], cols),
            dtype=torch.int64 if dtype is torch.int32 else dtype,
        )
        for _, dtype, cols in _answers_of(width, dict(zip(_COUNTS, counts)))
    ]


def _lists(name: str, value: Any, rows: int, device: torch.device) -> Tuple[Any, Any]:
    """int32 tokens of all rows and int64 [rows + 1] offsets, from lists, or from a [rows, length] tensor."""
    if value is None:
        return None, None
    if isinstance(value, torch.Tensor):
        if value.dim() != 2 or value.shape[0] != rows or value.is_floating_point():
            raise InvalidArgument(f"{name}: got shape {list(value.shape)}, allowed integers [{rows}, length], or lists")
        offsets = torch.arange(rows + 1, device=device) * value.shape[1]
        return _tokens(value.reshape(-1).to(device)), offsets
    if len(value) != rows:
        raise InvalidArgument(f"{name}: got {len(value)} lists, allowed {rows} (one for each row)")
    lists = [torch.as_tensor(of).reshape(-1) for of in value]
    if any(of.is_floating_point() and of.numel() > 0 for of in lists):
        raise InvalidArgument(f"{name}: got numbers with fractions, allowed tokens of the vocabulary")
    lists = [of.to(torch.int64) for of in lists]
    lengths = torch.tensor([0] + [len(of) for of in lists])
    return _tokens(torch.cat([lengths[:0], *lists]).to(device)), lengths.cumsum(0).to(device)


def _tokens(ids: torch.Tensor) -> torch.Tensor:
    """int32; an id beyond it becomes -1, which the library refuses."""
    return torch.where((ids >= 0) & (ids < 2**31), ids, -1).to(torch.int32).contiguous()


def _bias_lists(bias: Any, rows: int, device: torch.device) -> Tuple[Any, Any]:
    """float32-sized pairs [entries, 2] of id and value, and offsets, from one mapping for each row."""
    if bias is None:
        return None, None
    if isinstance(bias, dict):
        bias = [bias] * rows
    if len(bias) != rows:
        raise InvalidArgument(f"bias: got {len(bias)} mappings, allowed {rows} (one for each row), or one for all")
    ids = torch.tensor([int(key) for row in bias for key in row], dtype=torch.int64)
    values = torch.tensor([float(value) for row in bias for value in row.values()], dtype=torch.float32)
    offsets = torch.tensor([0] + [len(row) for row in bias]).cumsum(0)
    pairs = torch.stack((_tokens(ids), values.view(torch.int32)), dim=1)
    return pairs.to(device), offsets.to(device)


def _mask_words(mask: Any, rows: int, vocab: int, device: torch.device) -> Any:
    """int32 [rows, words] of a bool [rows, vocab], True where a token is allowed."""
    if mask is None:
        return None
    check_shape("mask", check_tensor("mask", mask), (rows, vocab), "a value for each token of each row")
    if mask.is_meta:
        raise InvalidArgument("mask: got device meta, allowed one with memory")
    if mask.dtype is not torch.bool:
        raise InvalidArgument(f"mask dtype: got {str(mask.dtype)[6:]}, allowed bool")
    padded = torch.nn.functional.pad(mask.to(device), (0, -vocab % 32)).view(rows, -1, 8)
    bits = 1 << torch.arange(8, device=device, dtype=torch.uint8)
    return (padded * bits).sum(-1, dtype=torch.uint8).view(torch.int32)  # little-endian, as the library's devices are


def sample(
    logits: torch.Tensor,
    *,
    seed: Union[int, torch.Tensor],
    position: Union[int, torch.Tensor] = 0,
    history: Any = None,
    bias: Any = None,
    mask: Optional[torch.Tensor] = None,
    extra_ids: Optional[torch.Tensor] = None,
    logprob_mode: str = "raw",
    top_logprobs: int = 0,
    want_support: int = 0,
    draws: int = 0,
    want_rank: bool = False,
    want_entropy: bool = False,
    watermark_key: int = 0,
    watermark_width: int = 0,
    weight: Optional[torch.Tensor] = None,
    head_bias: Optional[torch.Tensor] = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    **params: Any,
) -> Sampled:
    """Draws one token for each row, with the server's Sample: its steps, in its order, with its tokens for a seed.

    logits: [..., vocab]; with weight, hidden states, as in softmax_topk.
    seed, position: the random numbers of a row; a decode loop counts position up.
    params: temperature, top_k, top_p, top_n_sigma, min_p, typical_p, xtc_threshold, xtc_probability,
        repetition_penalty, presence_penalty, frequency_penalty, prompt_tokens: each a number, or a tensor with one for
        each row, with the meaning and the default that Client.sample gives it.
    history: tokens that penalties and watermarks look at: a list for each row, or a tensor [rows, length].
    bias: {token: value}, for all rows or one for each. mask: bool [rows, vocab], True where a token is allowed.
    extra_ids: [rows, n], tokens whose log-probability is wanted.
    logprob_mode: "raw", "processed" or "tempered". top_logprobs, want_support, draws: 0..1024.
    """
    of = _input_of(logits, weight, head_bias, scale, softcap)
    count, device = of.rows.shape[0], of.rows.device
    unknown = set(params) - set(_NUMBERS) - set(_INTEGERS)
    if unknown:
        raise InvalidArgument(f"{min(unknown)}: got a parameter of that name, allowed {', '.join(_NUMBERS)}, top_k, "
                              "prompt_tokens")  # fmt: skip
    if logprob_mode not in _MODES:
        raise InvalidArgument(f"logprob_mode: got {logprob_mode!r}, allowed {', '.join(_MODES)}")
    params.update(seed=seed, position=position)
    numbers, integers, each = [], [], []
    for name, default in _NUMBERS.items():
        value, memory = number(name, params.get(name, default), count, of.rows)
        numbers.append(value)
        each.append(memory)
    for name, whole in _INTEGERS.items():
        chosen, memory = integer(name, params.get(name, whole), count, of.rows)
        integers.append(chosen)
        each.append(memory)
    integers.append(integer("watermark_key", watermark_key, count, of.rows)[0])
    most = min(_MOST, of.vocab)
    counts = [
        count_of("top_logprobs", top_logprobs, 0, most),
        _MODES.index(logprob_mode),
        count_of("want_support", want_support, 0, most),
        count_of("draws", draws, 0, _MOST),
        int(want_rank),
        int(want_entropy),
        count_of("watermark_width", watermark_width, 0, _WIDEST),
    ]
    if extra_ids is not None:
        if extra_ids.dim() != 2 or extra_ids.shape[0] != count:
            raise InvalidArgument(f"extra_ids: got shape {list(extra_ids.shape)}, allowed [{count}, n]")
        extra_ids = _tokens(extra_ids.to(device))
    run = _sample if is_plain(of.rows, of.weight) else torch.ops.logitd.sample
    answers = iter(
        run(
            *of[:5],
            each,
            numbers,
            integers,
            counts,
            *_lists("history", history, count, device),
            *_bias_lists(bias, count, device),
            _mask_words(mask, count, of.vocab, device),
            extra_ids,
        )  # fmt: skip
    )
    extra = 0 if extra_ids is None else extra_ids.shape[1]
    found = {name: next(answers) for name, _, _ in _answers_of(extra, dict(zip(_COUNTS, counts)))}
    found["top_logprobs"] = found.pop("top_values", None)
    shaped = {name: None if of_ is None else of_.view(*of.shape, *of_.shape[1:]) for name, of_ in found.items()}
    return Sampled(*(shaped.get(name) for name in Sampled._fields))

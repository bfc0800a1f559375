"""The structs of kernels/c_api.h, field by field. A test compares their sizes and offsets with the header's."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_uint64, c_void_p
from typing import Any, Dict, List, Tuple, Type

ABI_VERSION = 1


class Call(Structure):
    _fields_ = [("stream", c_void_p), ("workspace", c_void_p), ("workspace_bytes", c_uint64)]


class Tensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("rows", c_int64),
        ("cols", c_int64),
        ("row_stride", c_int64),
        ("dtype", c_int32),
        ("reserved", c_int32),
    ]


class Head(Structure):
    _fields_ = [
        ("weight", Tensor),
        ("bias", c_void_p),
        ("norm", c_void_p),
        ("norm_epsilon", c_float),
        ("scale", c_float),
        ("softcap", c_float),
        ("reserved", c_int32),
    ]


class Number(Structure):
    _fields_ = [("each", c_void_p), ("all", c_float), ("reserved", c_int32)]


class Integer(Structure):
    _fields_ = [("each", c_void_p), ("all", c_int64)]


class Lists(Structure):
    _fields_ = [("values", c_void_p), ("offsets", c_void_p), ("size", c_int64)]


class Bias(Structure):
    _fields_ = [("id", c_int32), ("value", c_float)]


class SoftmaxTopK(Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("input", Tensor),
        ("head", POINTER(Head)),
        ("temperature", Number),
        ("k", c_int64),
        ("indices", c_void_p),
        ("probs", c_void_p),
        ("logsumexp", c_void_p),
        ("status", c_void_p),
    ]


class Sample(Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("input", Tensor),
        ("head", POINTER(Head)),
        ("seed", Integer),
        ("position", Integer),
        ("temperature", Number),
        ("top_k", Integer),
        ("top_p", Number),
        ("top_n_sigma", Number),
        ("min_p", Number),
        ("typical_p", Number),
        ("xtc_threshold", Number),
        ("xtc_probability", Number),
        ("repetition_penalty", Number),
        ("presence_penalty", Number),
        ("frequency_penalty", Number),
        ("prompt_tokens", Integer),
        ("history", Lists),
        ("bias", Lists),
        ("mask", c_void_p),
        ("extra_ids", c_void_p),
        ("extra_count", c_int32),
        ("top_logprobs", c_int32),
        ("logprob_mode", c_int32),
        ("want_support", c_int32),
        ("draws", c_int32),
        ("want_rank", c_int32),
        ("want_entropy", c_int32),
        ("watermark_width", c_int32),
        ("watermark_key", c_uint64),
        ("tokens", c_void_p),
        ("logprobs", c_void_p),
        ("ranks", c_void_p),
        ("logsumexp", c_void_p),
        ("top_ids", c_void_p),
        ("top_values", c_void_p),
        ("extra_logprobs", c_void_p),
        ("support_size", c_void_p),
        ("support_ids", c_void_p),
        ("support_logprobs", c_void_p),
        ("entropies", c_void_p),
        ("raw_entropies", c_void_p),
        ("draw_tokens", c_void_p),
        ("draw_logprobs", c_void_p),
        ("status", c_void_p),
    ]


class LossRows(Structure):
    _fields_ = [
        ("targets", c_void_p),
        ("ignore_index", c_int64),
        ("temperature", Number),
        ("label_smoothing", Number),
        ("z_loss", Number),
        ("softcap", c_float),
        ("smoothing", c_int32),
        ("first_token", c_int64),
        ("vocab", c_int64),
        ("counted_rows", c_int64),
    ]


class CrossEntropy(Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("input", Tensor),
        ("head", POINTER(Head)),
        ("rows", LossRows),
        ("top_logprobs", c_int32),
        ("reduction", c_int32),
        ("loss", c_void_p),
        ("logsumexp", c_void_p),
        ("target_logprob", c_void_p),
        ("rank", c_void_p),
        ("entropy", c_void_p),
        ("top_ids", c_void_p),
        ("top_values", c_void_p),
        ("status", c_void_p),
        ("total", c_void_p),
    ]


class CrossEntropyBackward(Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("input", Tensor),
        ("head", POINTER(Head)),
        ("rows", LossRows),
        ("logsumexp", c_void_p),
        ("upstream", c_void_p),
        ("d_input", Tensor),
        ("d_weight", Tensor),
        ("d_bias", c_void_p),
    ]


class CrossEntropyTraining(Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("input", Tensor),
        ("head", POINTER(Head)),
        ("rows", LossRows),
        ("upstream", c_void_p),
        ("loss", c_void_p),
        ("logsumexp", c_void_p),
        ("target_logprob", c_void_p),
        ("status", c_void_p),
        ("d_input", Tensor),
        ("d_weight", Tensor),
        ("d_bias", c_void_p),
        ("reduction", c_int32),
        ("reserved", c_int32),
        ("total", c_void_p),
    ]


class DivergenceTraining(Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("hidden", Tensor),
        ("head", POINTER(Head)),
        ("reference_hidden", Tensor),
        ("reference_head", POINTER(Head)),
        ("temperature", Number),
        ("reference_temperature", Number),
        ("kind", c_int32),
        ("beta", c_float),
        ("upstream", c_void_p),
        ("loss", c_void_p),
        ("status", c_void_p),
        ("d_hidden", Tensor),
        ("d_weight", Tensor),
        ("d_bias", c_void_p),
    ]


class AttentionShape(Structure):
    _fields_ = [
        ("batch", c_int64),
        ("heads", c_int64),
        ("queries", c_int64),
        ("keys", c_int64),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("scale", c_float),
        ("reserved", c_int32),
    ]


class Mask(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("kind", c_int32),
        ("dtype", c_int32),
        ("batch_stride", c_int64),
        ("head_stride", c_int64),
        ("query_stride", c_int64),
    ]


class AttentionSoftmax(Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("shape", AttentionShape),
        ("scores", Tensor),
        ("mask", Mask),
        ("sinks", c_void_p),
        ("probs", Tensor),
        ("logsumexp", c_void_p),
        ("status", c_void_p),
    ]


class AttentionSoftmaxBackward(Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("shape", AttentionShape),
        ("probs", Tensor),
        ("d_probs", Tensor),
        ("d_scores", Tensor),
        ("sinks", c_void_p),
        ("logsumexp", c_void_p),
        ("d_sinks", c_void_p),
        ("status", c_void_p),
    ]


# The name of each op's struct in the header, and the struct here. Its function is logitd_run_<name>.
OPS: Dict[str, Type[Structure]] = {
    "softmax_topk": SoftmaxTopK,
    "sample": Sample,
    "cross_entropy": CrossEntropy,
    "cross_entropy_backward": CrossEntropyBackward,
    "cross_entropy_training": CrossEntropyTraining,
    "divergence_training": DivergenceTraining,
    "attention_softmax": AttentionSoftmax,
    "attention_softmax_backward": AttentionSoftmaxBackward,
}
# The structs that the ops share.
PARTS: Dict[str, Type[Structure]] = {
    "call": Call,
    "tensor": Tensor,
    "head": Head,
    "number": Number,
    "integer": Integer,
    "lists": Lists,
    "bias": Bias,
    "loss_rows": LossRows,
    "attention_shape": AttentionShape,
    "mask": Mask,
}


def declare(library: ctypes.CDLL) -> Dict[str, Any]:
    """The library's functions by name, with the types of their arguments."""
    context = c_void_p
    functions: List[Tuple[str, Any, List[Any]]] = [
        ("abi_version", c_int32, []),
        ("error", ctypes.c_char_p, []),
        ("open", c_int32, [ctypes.c_char_p, c_int32, c_int32, c_uint64, POINTER(c_void_p)]),
        ("workspace_bytes", c_uint64, [context, c_int64]),
        ("prepare_workspace", c_int32, [context, POINTER(Call)]),
        *((f"run_{name}", c_int32, [context, POINTER(Call), POINTER(op)]) for name, op in OPS.items()),
    ]
    found = {}
    for name, result, arguments in functions:
        function = getattr(library, f"logitd_{name}")
        function.restype, function.argtypes = result, arguments
        found[name] = function
    return found

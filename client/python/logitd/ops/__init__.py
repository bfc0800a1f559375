"""The server's ops on torch tensors, in the trainer's own process: on the current CUDA stream, or on the CPU.

    from logitd import ops
    loss = ops.linear_cross_entropy(hidden, head.weight, targets)  # in place of F.cross_entropy(head(hidden), targets)
    loss.backward()

They need liblogitd.so, which `pip install logitd[torch]` brings, and no server. CUDA graphs may capture an op after one
call of it with tensors of these shapes; the graph holds its own workspace.
"""

from logitd.ops._library import check, set_scratch_bytes
from logitd.ops._losses import Losses
from logitd.ops.attention import FusedScaleMaskSoftmax, scaled_masked_softmax
from logitd.ops.divergence import linear_divergence
from logitd.ops.losses import cross_entropy, linear_cross_entropy
from logitd.ops.tokens import Sampled, TopK, sample, softmax_topk

__all__ = [
    "FusedScaleMaskSoftmax",
    "Losses",
    "Sampled",
    "TopK",
    "check",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_divergence",
    "sample",
    "scaled_masked_softmax",
    "set_scratch_bytes",
    "softmax_topk",
]

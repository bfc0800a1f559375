"""logitd turns logits, or the hidden states before them, into tokens, probabilities and losses, on a GPU.

    import logitd
    with logitd.Client("127.0.0.1:7450") as client:
        print(client.sample(logits, seed=7, top_p=0.9).tokens)

Client blocks; AsyncClient is for asyncio. Arena is memory that a server on the same machine reads rows from, Ring a
decode loop through it. params has the parameters, results what comes back, errors what is raised. logitd.transformers,
logitd.trl, logitd.lm_eval and logitd.ray put it into the loops of others; logitd.ops needs no server. They are imported
on their own.
"""

__version__ = "0.1.0"

from logitd.aio import AsyncClient, AsyncSampleStream
from logitd.arena import Arena, CudaArena
from logitd.client import Client, SampleStream
from logitd.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    LogitdError,
    NotFound,
    OutOfRange,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    Unknown,
)
from logitd.options import TLS, Retry
from logitd.results import (
    AttentionBackwardResult,
    AttentionFault,
    AttentionResult,
    DivergenceProgress,
    DivergenceResult,
    DivergenceTotals,
    Head,
    HeadShard,
    Ragged,
    RowStatus,
    SampleResult,
    ScoreProgress,
    ScoreResult,
    ScoreTotals,
    ServerInfo,
    Timings,
    TopKResult,
    VerifyResult,
)
from logitd.ring import Ring

__all__ = [
    "Aborted",
    "AlreadyExists",
    "Arena",
    "CudaArena",
    "AsyncClient",
    "AsyncSampleStream",
    "AttentionBackwardResult",
    "AttentionFault",
    "AttentionResult",
    "Cancelled",
    "Client",
    "DataLoss",
    "DeadlineExceeded",
    "DivergenceProgress",
    "DivergenceResult",
    "DivergenceTotals",
    "FailedPrecondition",
    "Head",
    "HeadShard",
    "Internal",
    "InvalidArgument",
    "LogitdError",
    "NotFound",
    "OutOfRange",
    "PermissionDenied",
    "Ragged",
    "ResourceExhausted",
    "Retry",
    "Ring",
    "RowStatus",
    "SampleResult",
    "SampleStream",
    "ScoreProgress",
    "ScoreResult",
    "ScoreTotals",
    "ServerInfo",
    "TLS",
    "Timings",
    "TopKResult",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Unknown",
    "VerifyResult",
]

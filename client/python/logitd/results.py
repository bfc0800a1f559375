"""What calls return: arrays with names.

Arrays are NumPy's, or torch tensors on the host where the request's were tensors; type checkers see NumPy's, so cast
tensors (`typing.cast`). NumPy arrays are read-only views of the received message: no copy was made. Copy one (`numpy.array(x)`) to change it, or to let go of the rest of the
message. N is the number of rows of the request.
"""

from __future__ import annotations

import enum
import operator
from dataclasses import dataclass, field
from typing import Any, Generic, Iterator, List, Optional, Tuple, TypeVar, Union, overload

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", bound=np.generic)
Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]


class RowStatus(enum.IntEnum):
    """How one row went. The call is fine whatever its rows say."""

    OK = 0
    NAN_LOGIT = 1
    """A logit (a score) is NaN; the row's other outputs mean nothing."""
    EMPTY_SUPPORT = 2
    """Every logit is -inf: there is no distribution."""
    NOT_REACHED = 3
    """verify: an earlier draft of the sequence was rejected; nothing was drawn here."""


class Ragged(Generic[Number]):
    """Lists of different lengths, one per row: `ragged[i]` is the list of row i.

    values: all lists, one after another.
    offsets: [N + 1], where they begin; row i is values[offsets[i]:offsets[i + 1]].
    """

    def __init__(self, values: NDArray[Number], counts: NDArray[Any]) -> None:
        self.values = values
        self.offsets: NDArray[np.int64] = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))

    @property
    def counts(self) -> NDArray[np.int64]:
        """[N], the length of every list."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, row: "Union[int, np.integer[Any]]") -> NDArray[Number]: ...

    @overload
    def __getitem__(self, row: slice) -> "Ragged[Number]": ...

    def __getitem__(self, row: Any) -> Any:
        """The list of a row; or the Ragged of a slice of rows, which must be in their order and without gaps."""
        if isinstance(row, slice):
            first, end, step = row.indices(len(self))
            if step != 1:
                raise IndexError(f"row: got a slice in steps of {step}, allowed steps of 1")
            end = max(first, end)
            return Ragged(self.values[int(self.offsets[first]) : int(self.offsets[end])], self.counts[first:end])
        try:
            row = operator.index(row)
        except TypeError as error:
            raise IndexError(f"row: got {row!r:.80}, allowed a whole number or a slice") from error
        if not -len(self) <= row < len(self):
            raise IndexError(f"row: got {row}, allowed {-len(self)} to {len(self) - 1}")
        row %= len(self)
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]

    def __iter__(self) -> Iterator[NDArray[Number]]:
        return (self[row] for row in range(len(self)))

    def dense(self) -> NDArray[Number]:
        """[N, length], shares memory. ValueError: the lists differ in length."""
        counts = self.counts
        width = int(counts[0]) if len(counts) else 0
        if (counts != width).any():
            raise ValueError(f"lists: got lengths from {counts.min()} to {counts.max()}, allowed one length for all")
        return self.values.reshape(len(self), width)

    def __repr__(self) -> str:
        return f"Ragged({[row.tolist() for row in self]})"


@dataclass(frozen=True)
class Timings:
    """Where the server's time went, in nanoseconds. A request of several messages has the sums, and its largest
    batch."""

    receive_ns: int = 0
    copy_ns: int = 0
    queue_ns: int = 0
    h2d_ns: int = 0
    kernel_ns: int = 0
    d2h_ns: int = 0
    batch_rows: int = 0
    total_ns: int = 0


@dataclass(frozen=True)
class _Call:
    timings: Timings
    round_trip: float
    """Seconds on this machine's clock, of the last attempt; of a stream, of the whole call."""
    attempts: int
    """How often the call was tried; of a stream, how many it took."""


@dataclass(frozen=True)
class _Rows(_Call):
    status: Int32s
    """[N] int32, see RowStatus."""
    status_position: Int32s
    """[N] int32, NAN_LOGIT: the lowest token id whose logit is NaN; otherwise -1."""
    head_version: int
    """Of the head that served; 0 with logits."""

    @property
    def ok(self) -> NDArray[np.bool_]:
        """[N] bool, the rows whose status is OK."""
        good: NDArray[np.bool_] = self.status == 0
        return good


@dataclass(frozen=True)
class TopKResult(_Rows):
    """What top_k returns."""

    indices: Ragged[np.int32]
    """Token ids, int32, k per row, most probable first; equal logits by ascending id."""
    probs: Ragged[np.float32]
    """Their probabilities, float32, under the full softmax: not renormalised over the k."""
    logsumexp: Float32s
    """[N] float32, natural log, of logits / temperature."""


@dataclass(frozen=True)
class SampleResult(_Rows):
    """What sample returns. Log-probabilities are natural logs; `logprob_mode` says of which distribution."""

    tokens: Int32s
    """[N] int32, the tokens drawn; -1 where the status is not OK."""
    logprobs: Float32s
    """[N] float32, of the tokens."""
    ranks: Int32s
    """[N] int32, the token's place in the order of top_ids, from 1; 0 where not wanted, or without a token."""
    logsumexp: Float32s
    """[N] float32, natural log, of the row as sent, at temperature 1."""
    top_ids: Ragged[np.int32]
    """int32, the most probable tokens, as many as `top_logprobs` asked for; equal logits by ascending id."""
    top_logprobs: Ragged[np.float32]
    """float32, of top_ids; -inf for tokens that cannot be drawn."""
    extra_logprobs: Ragged[np.float32]
    """float32, of the request's extra_ids, in their order."""
    support_size: Optional[Int32s]
    """[N] int32, how many tokens could be drawn; this and the next two are None where no row wants its support."""
    support_ids: Optional[Ragged[np.int32]]
    """int32, the first of them, as many as `want_support` asked for, highest logit first."""
    support_logprobs: Optional[Ragged[np.float32]]
    """float32, of support_ids, of the distribution that the token was drawn from."""
    entropies: Optional[Float32s]
    """[N] float32, nats, of the distribution that the token was drawn from; None where not wanted."""
    raw_entropies: Optional[Float32s]
    """[N] float32, nats, of the row as sent; None where not wanted."""
    draw_tokens: Optional[Ragged[np.int32]]
    """int32, the tokens of each row's `draws`, the first of which is in `tokens`; None where no row has any."""
    draw_logprobs: Optional[Ragged[np.float32]]
    """float32, of draw_tokens."""


@dataclass(frozen=True)
class VerifyResult(SampleResult):
    """What verify returns: a row has the token emitted there. Rows after the bonus token are NOT_REACHED."""

    accepted: Int32s
    """[S] int32, drafts accepted in each sequence; the bonus token is at this row of it."""


@dataclass(frozen=True)
class _Totals:
    rows: int = 0
    counted: int = 0
    """Rows whose target is not ignored, and with status OK."""
    ignored: int = 0
    faulty: int = 0
    """Rows with another status; the sums leave them out."""


@dataclass(frozen=True)
class _Progress:
    rows: int
    """Rows with an answer so far."""
    total_rows: int


@dataclass(frozen=True)
class ScoreTotals(_Totals):
    """Totals over the rows of a sequence so far."""

    loss_sum: float = 0.0
    """Nats, over counted rows."""
    target_logprob_sum: float = 0.0
    loss_mean: float = float("nan")
    """NaN where no row is counted; so is perplexity."""
    perplexity: float = float("nan")
    """exp(-target_logprob_sum / counted)."""


@dataclass(frozen=True)
class ScoreResult(_Rows):
    """What score and score_stream return."""

    losses: Float32s
    """[N] float32, nats; 0 where ignored, NaN where NAN_LOGIT."""
    target_logprobs: Float32s
    """[N] float32, natural log; 0 where ignored, NaN where NAN_LOGIT."""
    logsumexp: Float32s
    """[N] float32, natural log, of the logits after softcap and temperature."""
    ranks: Optional[Int32s]
    """[N] int32, the target's place in the order of top_ids, from 1; None where not wanted."""
    entropies: Optional[Float32s]
    """[N] float32, nats; None where not wanted."""
    top_ids: Ragged[np.int32]
    """int32, the most probable tokens; equal logits by ascending id."""
    top_logprobs: Ragged[np.float32]
    """float32, of top_ids."""
    extra_logprobs: Ragged[np.float32]
    """float32, of the request's extra_ids, in their order."""
    totals: ScoreTotals
    offset: int
    """The row of the sequence that the request began with."""


@dataclass(frozen=True)
class ScoreProgress(_Progress):
    """How far a score_stream is."""

    totals: ScoreTotals


@dataclass(frozen=True)
class DivergenceTotals(_Totals):
    """Totals over the rows of a sequence so far; without targets none is ignored."""

    forward_kl_sum: float = 0.0
    """Nats, over counted rows."""
    reverse_kl_sum: float = 0.0
    forward_kl_mean: float = float("nan")
    """NaN where no row is counted; so is reverse_kl_mean."""
    reverse_kl_mean: float = float("nan")


@dataclass(frozen=True)
class DivergenceResult(_Rows):
    """The answer of divergence and divergence_stream: of p = softmax(logits / temperature), and q of the reference."""

    forward_kl: Float32s
    """[N] float32, KL(p || q), nats; NaN where the status is not OK."""
    reverse_kl: Float32s
    """[N] float32, KL(q || p), nats; NaN where the status is not OK."""
    entropies: Float32s
    """[N] float32, of p, nats."""
    reference_entropies: Float32s
    """[N] float32, of q, nats."""
    logsumexp: Float32s
    """[N] float32, natural log, of logits / temperature."""
    reference_logsumexp: Float32s
    """[N] float32, natural log, of the reference's logits / reference_temperature."""
    target_logprobs: Optional[Float32s]
    """[N] float32, natural log, of p; 0 where ignored; None without targets."""
    reference_target_logprobs: Optional[Float32s]
    """[N] float32, natural log, of q; 0 where ignored; None without targets."""
    top_ids: Ragged[np.int32]
    """int32, the most probable tokens of p, as many as `top_logprobs` asked for; equal logits by ascending id."""
    top_logprobs: Ragged[np.float32]
    """float32, natural log, of p."""
    reference_top_ids: Ragged[np.int32]
    """int32, the most probable tokens of q, as many as `reference_top_logprobs` asked for."""
    reference_top_logprobs: Ragged[np.float32]
    """float32, natural log, of q."""
    reference_head_version: int
    """Version of the reference's head that served; 0 with logits."""
    totals: DivergenceTotals
    offset: int
    """The row of the sequence that the request began with."""


@dataclass(frozen=True)
class DivergenceProgress(_Progress):
    """How far a divergence_stream is."""

    totals: DivergenceTotals


@dataclass(frozen=True)
class AttentionFault:
    """A row whose status is not OK."""

    row: int
    """Its number, rows counted over [B, H, Sq]."""
    status: RowStatus
    position: int
    """NAN_LOGIT: the lowest key with NaN; otherwise -1."""


@dataclass(frozen=True)
class AttentionResult(_Call):
    """What attention_softmax returns."""

    probs: NDArray[Any]
    """In the shape of the scores; exactly 0 for keys that are not seen."""
    logsumexp: Optional[Float32s]
    """float32, in the shape of the scores without keys, sinks included; None where not wanted."""
    faults: Tuple[AttentionFault, ...]
    """By ascending row."""
    messages: int
    """Messages that the tensor took."""


@dataclass(frozen=True)
class AttentionBackwardResult(_Call):
    """What attention_softmax_backward returns."""

    d_scores: NDArray[Any]
    """In the shape of the scores."""
    d_sinks: Optional[NDArray[np.float64]]
    """[H] float64, where the request has sinks."""
    faults: Tuple[AttentionFault, ...]
    messages: int


@dataclass(frozen=True)
class HeadShard:
    """The tokens that one device holds of a head."""

    device: int
    """As in the flag --device."""
    first_token: int
    tokens: int
    device_bytes: int


@dataclass(frozen=True)
class Head:
    """An output head that the server holds."""

    name: str
    path: str
    tensor: str
    """Name of the weight in its file."""
    dtype: str
    """"f32", "f16" or "bf16"; hidden states are sent in the same type."""
    vocab: int
    hidden: int
    """Values of a hidden state."""
    stored_vocab: int
    bias: bool
    final_norm: bool
    """The head applies the model's final norm: send hidden states from before it."""
    norm_epsilon: float
    scale: float
    softcap: float
    device_bytes: int
    """Memory on each device; of a head that is cut over the devices the most on any."""
    loaded_unix_ms: int
    load_ms: int
    head_version: int
    """1 when it was loaded. After an update no other weights have this version, also after a restart of the server."""
    shards: List[HeadShard] = field(default_factory=list)
    """Its parts where it is cut over the devices; empty: each device has all of it."""
    warnings: List[str] = field(default_factory=list)
    """What the load found that may not be meant, for example a head of its own in a model that ties its embeddings."""


@dataclass(frozen=True)
class Device:
    """What computes."""

    name: str
    memory_bytes: int
    number: int = 0
    """As in the flag --device."""
    lost: bool = False
    """It failed for good, and the other devices do its work."""
    pci_bus_id: str = ""
    numa_node: int = -1
    head_bytes: int = 0
    """Memory of heads on it."""


@dataclass(frozen=True)
class Limits:
    """What the server takes in one request; see server.proto."""

    max_request_bytes: int
    max_held_bytes: int
    max_batch_rows: int
    max_vocab: int
    max_answer_bytes: int
    streams: int
    max_keys: int


@dataclass(frozen=True)
class Op:
    """An op that the server has."""

    name: str
    method: str
    dtypes: Tuple[str, ...]


@dataclass(frozen=True)
class ServerInfo:
    """What info returns."""

    version: str
    backend: str
    """"cuda" or "cpu"."""
    device: Device
    limits: Limits
    ops: List[Op] = field(default_factory=list)
    draining: bool = False
    grpc_version: str = ""
    devices: List[Device] = field(default_factory=list)
    """All that the server began with; `device` is the first."""

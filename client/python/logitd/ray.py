"""Scoring of a dataset of Ray Data over several logitd replicas.

from logitd.ray import score, totals
scored = score(dataset, ["gpu-1:7450", "gpu-2:7450"], head="llama")
print(totals(scored).perplexity)
"""

from __future__ import annotations

import math
import os
import time
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import ray.data

from logitd.client import Client
from logitd.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, Unavailable
from logitd.options import Retry
from logitd.results import ScoreTotals

_PASS_OVER = 30.0  # seconds for which a replica that failed comes last
_ROUND = 1.0  # seconds between two rounds over all replicas
_COUNTS = ("rows", "counted", "ignored", "faulty")
_SUMS = (*_COUNTS, "loss_sum", "target_logprob_sum")


class Score:
    """A class for Dataset.map_batches: scores the sequences of a batch on one of the replicas.

    A sequence is one row of the dataset: logits [T, V], or hidden states [T, D] for `head`, and its targets [T]. A
    batch goes to one replica as one score_stream; batches take turns over the replicas. Where a replica is away, hangs
    (no answer within the deadline) or has no room, the batch goes to the next one; later batches come to one that was
    away or hung last, for half a minute. A batch that none took goes round again, until a deadline has passed since
    its first failure: then the last error is raised. With one replica there is no next one: the client's own retries are
    all, of which a full server gets 4.

    A sequence without rows (T is 0) gets empty arrays and sums of 0.

    addresses: of the replicas, which hold the same head.
    inputs, targets: names of the columns.
    params: parameters of Client.score_stream, except head and targets.
    options: of Client, e.g. deadline, tls and token. Without `retry`, a replica of several has 4 attempts before the
        batch goes to the next one.

    The batch comes back without its inputs, and with these columns:
        losses, target_logprobs: [T] float32, as ScoreResult has them.
        rows, counted, ignored, faulty: numbers of rows; loss_sum, target_logprob_sum: float64, over counted rows.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        head: Optional[str] = None,
        inputs: str = "hidden",
        targets: str = "targets",
        params: Optional[Mapping[str, Any]] = None,
        options: Optional[Mapping[str, Any]] = None,
    ) -> None:
        if not addresses or isinstance(addresses, str):
            raise InvalidArgument(f"addresses: got {addresses!r}, allowed a list of one or more")
        defaults: Dict[str, Any] = {"priority": "batch"}
        if len(addresses) > 1:
            defaults["retry"] = Retry(max_attempts=4)
        self._clients = [Client(address, **{**defaults, **(options or {})}) for address in addresses]
        self._passed_over = [0.0] * len(addresses)  # until when, on time.monotonic()
        self._next = os.getpid()  # workers begin with different replicas
        self._head, self._inputs, self._targets = head, inputs, targets
        self._params = dict(params or {})

    def __call__(self, batch: Dict[str, np.ndarray]) -> Dict[str, Any]:
        for name, column in (("inputs", self._inputs), ("targets", self._targets)):
            if column not in batch:
                raise InvalidArgument(f"{name}: got {column!r}, allowed one of the columns {', '.join(sorted(batch))}")
        targets = [np.asarray(sequence) for sequence in batch[self._targets]]
        sequences = [np.asarray(sequence) for sequence in batch[self._inputs]]
        for sequence, expected in zip(sequences, targets):
            empty = sequence.size == expected.size == 0  # whatever its type and width, which Arrow may not keep
            if not empty and (sequence.ndim != 2 or expected.shape != sequence.shape[:1]):
                raise InvalidArgument(
                    f"{self._inputs}: got a sequence of shape {list(sequence.shape)} with targets of shape "
                    f"{list(expected.shape)}, allowed [T, width] with [T]"
                )
        rows = self._rows(sequences, targets)
        ends = np.cumsum([expected.size for expected in targets])[:-1]
        parts = list(zip(*(np.split(values, ends) for values in rows))) if targets else []
        columns: Dict[str, Any] = {name: values for name, values in batch.items() if name != self._inputs}
        columns["losses"] = _column([part[2] for part in parts])
        columns["target_logprobs"] = _column([part[3] for part in parts])
        sums = [_sums(*part) for part in parts]
        for name in _SUMS:
            columns[name] = np.array([part[name] for part in sums], np.int64 if name in _COUNTS else np.float64)
        return columns

    def _rows(
        self, sequences: List[np.ndarray], targets: List[np.ndarray]
    ) -> Tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of all rows, one sequence after another: whether they count and are ok, their losses and log-probabilities."""
        filled = [i for i, expected in enumerate(targets) if expected.size]
        if not filled:
            none = np.zeros(0, np.float32)
            return none.astype(bool), none.astype(bool), none, none
        expected = np.concatenate([targets[i] for i in filled])
        result = self._score(np.concatenate([sequences[i] for i in filled]), expected)
        return expected != self._params.get("ignore_index", -100), result.ok, result.losses, result.target_logprobs

    def _score(self, inputs: np.ndarray, targets: np.ndarray) -> Any:
        payload = {"logits": inputs} if self._head is None else {"hidden": inputs, "head": self._head}
        end: Optional[float] = None
        while True:
            for i in self._order():
                client = self._clients[i]
                try:
                    return client.score_stream(targets=targets, **payload, **self._params)
                except (Unavailable, DeadlineExceeded, ResourceExhausted) as error:
                    if isinstance(error, ResourceExhausted) and error.retry_delay is None:
                        raise  # too large, for the next one too
                    last, now = error, time.monotonic()
                    if not isinstance(error, ResourceExhausted):
                        self._passed_over[i] = now + _PASS_OVER
                    end = now + client.options.deadline if end is None else end
            if end is None or len(self._clients) == 1 or time.monotonic() + _ROUND >= end:
                raise last
            time.sleep(_ROUND)

    def _order(self) -> List[int]:
        """The replicas, the next one in turn first; those that failed lately come last."""
        self._next += 1
        count, now = len(self._clients), time.monotonic()
        turns = [(self._next + i) % count for i in range(count)]
        return sorted(turns, key=lambda i: max(0.0, self._passed_over[i] - now))


def _column(parts: List[np.ndarray]) -> np.ndarray:
    """Arrays of different lengths as a column."""
    column = np.empty(len(parts), object)
    column[:] = parts
    return column


def _sums(counted: np.ndarray, ok: np.ndarray, losses: np.ndarray, logprobs: np.ndarray) -> Dict[str, float]:
    of = counted & ok
    return {
        "rows": len(ok),
        "counted": int(of.sum()),
        "ignored": int((~counted & ok).sum()),
        "faulty": int((~ok).sum()),
        "loss_sum": float(losses[of].sum(dtype=np.float64)),
        "target_logprob_sum": float(logprobs[of].sum(dtype=np.float64)),
    }


def score(
    dataset: Any, addresses: Sequence[str], *, batch_size: int = 32, concurrency: Optional[int] = None, **kwargs: Any
) -> Any:
    """The dataset with the columns that Score adds; lazy, as all of Ray Data.

    batch_size: sequences of a batch. concurrency: workers; None: two for each replica. kwargs: as of Score.
    """
    workers = 2 * len(addresses) if concurrency is None else concurrency
    return dataset.map_batches(
        Score,
        fn_constructor_args=(list(addresses),),
        fn_constructor_kwargs=kwargs,
        batch_size=batch_size,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_cpus=0.1,  # a worker waits for its replica
    )


def totals(scored: Any) -> ScoreTotals:
    """Totals over all sequences of a dataset that was scored, perplexity included."""
    found = scored.sum(list(_SUMS)) or {}
    sums = {name: found.get(f"sum({name})") or 0 for name in _SUMS}
    counts = {name: int(sums[name]) for name in _COUNTS}
    if counts["counted"] == 0:
        return ScoreTotals(**counts)
    return ScoreTotals(
        **counts,
        loss_sum=sums["loss_sum"],
        target_logprob_sum=sums["target_logprob_sum"],
        loss_mean=sums["loss_sum"] / counts["counted"],
        perplexity=_exp(-sums["target_logprob_sum"] / counts["counted"]),
    )


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:  # above 709.78
        return math.inf

"""A sequence to score, or to compare, as the messages of a stream, and its answers."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, Iterator, List, Optional

from logitd import _wire, results
from logitd._params import RowParams
from logitd._rows import ANSWERS, REQUESTS, RowInput, result_of
from logitd.errors import Cancelled, Internal, InvalidArgument
from logitd.options import Options

_ANSWER_ROW_BYTES = 40  # a row of an answer without its lists, at most
# Rows of a message at most: an answer is a step of progress, and what a lost stream costs.
_MAX_MESSAGE_ROWS = 4096
_MAX_PAYLOAD = 2**31 - 1 - (64 << 20)  # protobuf carries 2 GiB; the small fields fit next to this


PROGRESS: Dict[str, Any] = {"score": results.ScoreProgress, "divergence": results.DivergenceProgress}
TOTALS: Dict[str, Any] = {"score": results.ScoreTotals, "divergence": results.DivergenceTotals}


class SequenceMessages:
    """Cuts a sequence into messages of whole rows and collects the answers.

    Each stream begins after the last answer so far. The sizes that are cut are checked here; the server checks the
    rest.
    """

    def __init__(
        self,
        kind: str,
        rows: RowInput,
        params: RowParams,
        options: Options,
        offset: int,
        totals: Any,
        progress: Optional[Callable[[Any], Any]],
    ) -> None:
        self._kind = kind
        self._rows = rows
        self._params = params
        self._options = options
        self._offset = offset
        self._totals = totals
        self._progress = progress
        self._message_rows = 0
        self._first_row = 0  # of the stream
        self.taken_rows = 0  # with an answer
        self.parts: List[Any] = []

    def plan(self, limits: results.Limits) -> None:
        """Cuts the rows without an answer by these limits. InvalidArgument: not even one row fits."""
        extra = self._params.longest("extra_count")[0]
        lists = [self._params.longest(count) for count in ("extra_count", "support_count")]
        row_bytes = self._rows.counted_row_bytes + 4 * sum(size for size, per_row in lists if per_row)
        tops = self._params.largest("top_logprobs") + self._params.largest("reference_top_logprobs")
        answer_row = _ANSWER_ROW_BYTES + 8 * tops + 4 * extra
        room = min(_MAX_PAYLOAD, limits.max_request_bytes or _MAX_PAYLOAD) - 4 * sum(
            size for size, per_row in lists if not per_row
        )
        rows = room // row_bytes
        if limits.max_answer_bytes > 0:
            rows = min(rows, limits.max_answer_bytes // answer_row)
        if self._options.max_message_bytes > 0:
            left = self._options.max_message_bytes - self._field_bytes()
            sent = row_bytes - self._rows.counted_row_bytes + self._rows.sent_row_bytes + self._params.row_bytes()
            rows = min(rows, left // max(1, sent))
        if rows < 1:
            raise InvalidArgument(
                f"one row of {row_bytes} bytes, and {answer_row} of its answer, is more than a message takes: "
                f"max_request_bytes {limits.max_request_bytes}, max_answer_bytes {limits.max_answer_bytes}, "
                f"max_message_bytes {self._options.max_message_bytes}"
            )
        if limits.max_batch_rows > 0:
            rows = min(rows, limits.max_batch_rows)
        self._message_rows = min(
            rows, _MAX_MESSAGE_ROWS, max(1, self._options.score_message_bytes // self._rows.counted_row_bytes)
        )

    def _field_bytes(self) -> int:
        """Encoded size of a message, at most, without its payload and the parameters of its rows."""
        shared = self._params.cut(0, 1)
        message = REQUESTS[self._kind][1].encode({**self._rows.fields(), **shared, "offset": -1})
        return len(message) + 128  # the totals, and the longer lengths of lists

    def begin(self) -> None:
        """Before each stream."""
        self._first_row = self.taken_rows

    @property
    def count(self) -> int:
        """Messages of the stream that has begun."""
        return -(-(self._rows.rows - self._first_row) // self._message_rows)

    def _cut(self, i: int) -> "tuple[int, int]":
        first = self._first_row + i * self._message_rows
        return first, min(self._message_rows, self._rows.rows - first)

    def encode(self) -> Iterator[bytes]:
        """The first message of a stream has everything that later ones inherit."""
        # All at once: of a stream that was lost, gRPC's thread may ask for messages when the next one has begun.
        return self._encode(
            [self._cut(i) for i in range(self.count)],
            self.parts[-1].totals if self.parts else self._totals,
            # The weights that the answers so far are of.
            self._rows.of_versions(self.parts[-1]) if self.parts else self._rows,
        )

    def _encode(
        self, cuts: "list[tuple[int, int]]", before: Any, source: RowInput
    ) -> Iterator[bytes]:
        for i, (first, rows) in enumerate(cuts):
            totals = before if i == 0 else None
            yield REQUESTS[self._kind][1].encode(
                {
                    **source.fields(rows),
                    **self._params.cut(first, rows),
                    "offset": self._offset + first,
                    "totals": None if totals is None else totals_fields(totals),
                    **self._rows.payload(first, rows),
                }
            )

    def take(self, i: int, data: bytes) -> None:
        """Internal: the answer does not fit the message. Cancelled: `progress` returned False."""
        first, rows = self._cut(i)
        try:
            arrays, message = ANSWERS[self._kind].decode(data)
        except _wire.WireError as error:
            raise Internal(f"the server's answer is not a {ANSWERS[self._kind].name}: {error}", attempts=1) from error
        if message.offset != self._offset + first:
            raise Internal(
                f"the server's answer does not fit the message: got rows at {message.offset}, asked for "
                f"{rows} at {self._offset + first}",
                attempts=1,
            )
        part = result_of(self._kind, arrays, message, 0.0, 1, dataclasses.replace(self._rows, rows=rows))
        self.parts.append(part)
        self.taken_rows = first + rows
        now = PROGRESS[self._kind](self.taken_rows, self._rows.rows, part.totals)
        if self._progress is not None and self._progress(now) is False:
            raise Cancelled(f"stopped after {self.taken_rows} of {self._rows.rows} rows")


def totals_fields(totals: Any) -> "dict[str, Any]":
    """The totals that a request carries; the server derives means and the perplexity."""
    derived = ("loss_mean", "perplexity", "forward_kl_mean", "reverse_kl_mean")
    return {name: value for name, value in dataclasses.asdict(totals).items() if name not in derived}

"""Every call, without input and output.

A call is a generator. It yields what to do next (Unary, Stream, Receive, Sleep), is sent how that went (Reply), and
returns the result or raises. Client and AsyncClient only carry the steps out, so both do the same.
"""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, Generator, Iterator, List, Mapping, Optional, Sequence, Tuple, TypeVar, Union

import grpc
import numpy as np

from logitd import _arrays, _wire, results
from logitd._attention import AttentionMessages
from logitd._messages import Codec
from logitd._params import RowParams, lists, words
from logitd._rows import ANSWERS, REQUESTS, RowInput, joined, result_of
from logitd._sequence_messages import TOTALS, SequenceMessages
from logitd._throttle import Throttle
from logitd.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    LogitdError,
    NotFound,
    ResourceExhausted,
    Unavailable,
    error_of,
)
from logitd.options import MAX_REFUSED, Options, check_deadline

T = TypeVar("T")

_INFO = Codec("GetInfoRequest"), Codec("GetInfoResponse")
_LIST = Codec("ListHeadsRequest"), Codec("ListHeadsResponse")
_GET = Codec("GetHeadRequest"), Codec("GetHeadResponse")
_UNLOAD = Codec("UnloadHeadRequest"), Codec("UnloadHeadResponse")
_LOAD = Codec("LoadHeadRequest"), Codec("LoadHeadResponse")
_UPDATE = Codec("UpdateHeadRequest"), Codec("UpdateHeadResponse")
_ROWS_A_MESSAGE = 256  # of an update: each takes less than 128 bytes, and a message has at most 64 KiB
HEALTH, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
SAMPLE_STREAM = "/logitd.v1.Sampler/SampleStream"
SERVING = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")  # grpc.health.v1.HealthCheckResponse.ServingStatus


@dataclass(frozen=True)
class Reply:
    """How a step went."""

    error: Optional[LogitdError] = None
    data: bytes = b""
    seconds: float = 0.0
    pushback_ms: Optional[int] = None  # when the server allows the next attempt; negative: never
    progressed: bool = False  # the next attempt continues where this one stopped
    attempts: int = 1


@dataclass(frozen=True)
class Unary:
    method: str
    message: bytes
    end: float  # time.monotonic()


@dataclass(frozen=True)
class Stream:
    """All messages, written as the server takes them, while `take` gets the answers in order.

    With the last answer the step has gone well, however the stream ends.
    """

    method: str
    messages: Callable[[], Iterator[bytes]]
    count: int
    take: Callable[[int, bytes], None]
    end: Optional[float]  # time.monotonic(), of the stream
    patience: Optional[float]  # seconds that one answer may take


@dataclass(frozen=True)
class Receive:
    """Any number of messages, which do not wait for answers, and of answers. `take` returns False to cancel."""

    method: str
    messages: Sequence[bytes]
    take: Callable[[bytes], bool]


@dataclass(frozen=True)
class Sleep:
    seconds: float
    away: bool  # there may be no connection


Step = Union[Unary, Stream, Receive, Sleep]
Call = Generator[Step, Reply, T]


# Fields of messages whose values come with a parameter of another name.
_NAMES = {
    "history_count": "history",
    "logit_bias_count": "logit_bias",
    "logit_bias_ids": "logit_bias",
    "extra_count": "extra_ids",
    "support_count": "support_ids",
    "draft_count": "lengths of draft_ids",
    "window_left": "window (left)",
    "window_right": "window (right)",
    "payload and lists": "request",
}
_FIELDS = re.compile(rf"\b({'|'.join(_NAMES)})\b")
# Fields whose errors name a caller's array instead: its sizes, and where it lies.
_SIZES = {"vocab": "logits (vocab)", "rows": "logits or hidden (rows)", "keys": "scores (keys)"}
_SIZE = re.compile(r"^(vocab|rows|keys)(?=: got \d+, allowed 1\.\.)")
_SHARED = re.compile(r"^(reference_)?shared(_\w+)?(\.\w+)?(?=: )")


def _in_the_callers_words(text: str) -> str:
    """An error of the server with the names of the caller's parameters."""
    text = _SHARED.sub(r"\g<1>arena: \g<0>", _SIZE.sub(lambda size: _SIZES[size.group()], text))
    return _FIELDS.sub(lambda field: _NAMES[field.group()], text)


def reply_of(code: grpc.StatusCode, details: Optional[str], trailers: Any, seconds: float = 0.0) -> Reply:
    """A failed attempt, from gRPC's status and trailing metadata."""
    pushback = None
    for key, value in trailers or ():
        if key == "grpc-retry-pushback-ms":
            try:
                pushback = int(value)
            except ValueError:
                pushback = -1  # no retry, as in gRPC's own retries
    # A proxy that gets a refusal while it still sends the message cuts the stream. logitd itself never does.
    if code is grpc.StatusCode.CANCELLED and "Received RST_STREAM" in (details or ""):
        code = grpc.StatusCode.UNAVAILABLE
    delay = pushback / 1000 if pushback is not None and pushback >= 0 else None
    return Reply(error_of(code, _in_the_callers_words(details or ""), retry_delay=delay, attempts=1), seconds=seconds, pushback_ms=pushback)


def _retryable(error: LogitdError) -> bool:
    # A message that is too large for a transport stays too large. gRPC has the same code for it as for a full server,
    # which does not reset the stream.
    return isinstance(error, Unavailable) or (
        isinstance(error, ResourceExhausted)
        and "message larger than max (" not in error.message
        and "RST_STREAM" not in error.message
    )


class Session:
    """What the calls of one client share: options and the server's limits. Thread-safe."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._limits: Optional[results.Limits] = None
        self._throttles: Dict[str, Throttle] = {}  # by method

    def end(self, deadline: Optional[float]) -> float:
        if deadline is not None:
            check_deadline(deadline)
        return time.monotonic() + (self.options.deadline if deadline is None else deadline)

    # Attempts.

    def retry(self, end: float, once: Callable[[], Call[Reply]], patience: Optional[float] = None) -> Call[Reply]:
        """Attempts until one succeeds, none may follow, or time is up. options.Retry has the rules.

        patience: after an attempt that made progress, `end` is in so many seconds.
        """
        rules = self.options.retry
        backoff, attempts, refused = rules.initial_backoff, 0, 0
        away: Optional[LogitdError] = None  # how the attempt before ended, where no server did it
        while True:
            reply = yield from once()
            attempts += 1
            error = reply.error
            if error is None:
                return replace(reply, attempts=attempts)
            if not _retryable(error):
                late = isinstance(error, DeadlineExceeded) and away is not None
                raise _with_attempts(error, attempts, f"attempt {attempts}; the one before: {away}" if late else "")
            if reply.progressed:
                attempts, refused, backoff = 1, 0, rules.initial_backoff
                end = end if patience is None else time.monotonic() + patience
            refused += isinstance(error, ResourceExhausted)
            away = error if isinstance(error, Unavailable) else None
            if attempts >= rules.max_attempts if rules.max_attempts is not None else refused >= MAX_REFUSED:
                why = f"gave up after {attempts} attempts" if attempts > 1 else ""
                raise _with_attempts(error, attempts, why)
            if reply.pushback_ms is not None and reply.pushback_ms < 0:
                raise _with_attempts(error, attempts, "the server asks not to retry")
            delay = backoff * random.uniform(0.5, 1.0) if reply.pushback_ms is None else reply.pushback_ms / 1000
            if time.monotonic() + delay >= end:
                raise _with_attempts(
                    error, attempts, f"attempt {attempts}; the next, in {delay:.3g} s, would pass the deadline"
                )
            yield Sleep(delay, away is not None and reply.pushback_ms is None)
            backoff = min(2 * backoff, rules.max_backoff)

    def unary(self, method: str, message: bytes, end: float) -> Call[Reply]:
        throttle = self._throttles.setdefault(method, Throttle()) if self.options.throttle else None

        def once() -> Call[Reply]:
            error = throttle.ask() if throttle is not None else None
            if error is not None:
                delay = error.retry_delay
                return Reply(error, pushback_ms=None if delay is None else round(1000 * delay))
            reply = yield Unary(method, message, end)
            if throttle is not None:
                throttle.ended(reply.error)
            return reply

        limit = self.options.max_message_bytes
        if 0 < limit < len(message):
            raise InvalidArgument(f"request: got {len(message)} bytes, allowed 1 to {limit} (max_message_bytes)")
        return (yield from self.retry(end, once))

    def small(
        self, method: str, codecs: Tuple[Codec, Codec], fields: Mapping[str, Any], end: float
    ) -> Call[Tuple[Any, Reply]]:
        reply = yield from self.unary(method, codecs[0].encode(fields), end)
        return decode(codecs[1], reply.data)[1], reply

    # Rows.

    def rows(
        self,
        kind: str,
        rows: RowInput,
        params: RowParams,
        deadline: Optional[float],
        more: Optional[Mapping[str, Any]] = None,
    ) -> Call[Any]:
        """TopK, Sample, Verify, Score or Divergence in one message."""
        method, _ = REQUESTS[kind]
        message = encoded(kind, rows, params, more)
        end = self.end(deadline)
        try:
            reply = yield from self.unary(method, message, end)
        except (InvalidArgument, ResourceExhausted) as error:
            raise (yield from self._explained(error, rows, len(message), end)) from None
        return decoded(kind, reply, rows)

    def _explained(self, error: LogitdError, rows: RowInput, size: int, end: float) -> Call[LogitdError]:
        """A refusal, with the limit and what to do where the request was too large for the server."""
        if error.retry_delay is not None or error.attempts == 0 or "bytes" not in error.message:
            return error
        try:
            most = (yield from self.limits(end)).max_request_bytes
        except LogitdError:
            return error
        if not 0 < most < size:
            return error
        name, total = "logits" if rows.head is None else "hidden", rows.rows * rows.counted_row_bytes
        return _with_attempts(
            error,
            error.attempts,
            f"{name}: got {rows.rows} rows, {total} bytes, allowed {most} bytes a call, the server's max_request_bytes, "
            "with lists of tokens; send fewer rows a call",
        )

    def sequence(
        self,
        kind: str,
        rows: RowInput,
        params: RowParams,
        deadline: Optional[float],
        offset: int,
        totals: Any,
        progress: Optional[Callable[[Any], Any]],
    ) -> Call[Any]:
        """ScoreStream or DivergenceStream of a sequence of any length."""
        start = time.monotonic()
        _arrays.whole("offset", offset, 0)
        _arrays.instance("totals", totals, (TOTALS[kind], type(None)), f"a {TOTALS[kind].__name__}, or None")
        if progress is not None and not callable(progress):
            raise InvalidArgument(f"progress: got {progress!r:.80}, allowed a function, or None")
        self.end(deadline)  # checks it
        patience = self.options.deadline if deadline is None else deadline
        limits = yield from self.limits(self.end(deadline))
        messages = SequenceMessages(kind, rows, params, self.options, offset, totals, progress)
        try:
            messages.plan(limits)
        except InvalidArgument as error:
            changed = yield from self._changed(error, limits, self.end(deadline))
            if changed is None:
                raise
            limits = changed
            messages.plan(limits)
        streams = 0

        def once() -> Call[Reply]:
            nonlocal streams
            streams += 1
            messages.begin()
            before = messages.taken_rows
            reply = yield Stream(
                f"{REQUESTS[kind][0]}Stream", messages.encode, messages.count, messages.take, None, patience
            )
            error = reply.error
            if isinstance(error, Cancelled) and error.attempts:
                # This is how a server ends a stream whose answers were not read in time, because `progress` took long.
                error = Unavailable(f"the server gave the stream up: {error.message}")
            return replace(reply, error=error, progressed=messages.taken_rows > before)

        replanned_at = -1  # not twice at one row
        while True:
            try:
                yield from self.retry(self.end(deadline), once, patience)
                break
            except LogitdError as error:
                changed = None
                if messages.taken_rows > replanned_at:
                    changed = yield from self._changed(error, limits, self.end(deadline))
                if changed is None:
                    raise
                limits, replanned_at = changed, messages.taken_rows
                messages.plan(limits)
        return replace(joined(messages.parts), round_trip=time.monotonic() - start, attempts=streams)

    # Attention.

    def attention(
        self, make: Callable[[results.Limits, Options], AttentionMessages], deadline: Optional[float]
    ) -> Call[Any]:
        end = self.end(deadline)
        limits = yield from self.limits(end)
        try:
            return (yield from self._attention(make(limits, self.options), end))
        except LogitdError as error:
            changed = yield from self._changed(error, limits, end)
            if changed is None:
                raise
            return (yield from self._attention(make(changed, self.options), end))

    def _attention(self, messages: AttentionMessages, end: float) -> Call[Any]:
        name = "SoftmaxBackward" if messages.backward else "Softmax"
        first = next(messages.encode()) if messages.count == 1 else b""  # the same in every attempt

        def once() -> Call[Reply]:
            messages.begin()
            if messages.count > 1:
                return (
                    yield Stream(
                        f"/logitd.v1.Attention/{name}Stream", messages.encode, messages.count, messages.take, end, None
                    )
                )
            reply = yield Unary(f"/logitd.v1.Attention/{name}", first, end)
            if reply.error is None:
                messages.take(0, reply.data)
            return replace(reply, data=b"")

        reply = yield from self.retry(end, once)
        return messages.finish(reply.seconds, reply.attempts)

    # The server.

    def info(self, deadline: Optional[float]) -> Call[results.ServerInfo]:
        return (yield from self._info(self.end(deadline)))

    def _info(self, end: float) -> Call[results.ServerInfo]:
        message, _ = yield from self.small("/logitd.v1.Server/GetInfo", _INFO, {}, end)
        names = {number: name for name, number in _arrays.DTYPES.items()}
        return results.ServerInfo(
            version=message.version,
            backend=message.backend,
            device=_plain(results.Device, message.device),
            devices=[_plain(results.Device, device) for device in message.devices],
            limits=_plain(results.Limits, message.limits),
            draining=message.draining,
            grpc_version=message.grpc_version,
            ops=[results.Op(op.name, op.method, tuple(names.get(d, str(d)) for d in op.dtypes)) for op in message.ops],
        )

    def limits(self, end: float) -> Call[results.Limits]:
        if self._limits is not None:
            return self._limits
        return (yield from self._ask_limits(end))

    def _ask_limits(self, end: float) -> Call[results.Limits]:
        self._limits = (yield from self._info(end)).limits
        return self._limits

    def _changed(self, error: LogitdError, used: results.Limits, end: float) -> Call[Optional[results.Limits]]:
        """After a refusal under the limits `used`: others that the server has now, e.g. because it was restarted."""
        if not isinstance(error, (InvalidArgument, ResourceExhausted)):
            return None
        try:
            now = yield from self._ask_limits(end)
        except LogitdError:
            return None
        return None if now == used else now

    def health(self, service: str, deadline: Optional[float]) -> Call[str]:
        reply = yield from self.unary(HEALTH, health_request(service), self.end(deadline))
        return serving_status(reply.data)

    # Heads.

    def list_heads(self, deadline: Optional[float]) -> Call[List[results.Head]]:
        message, _ = yield from self.small("/logitd.v1.Heads/List", _LIST, {}, self.end(deadline))
        return [_head(head) for head in message.heads]

    def get_head(self, name: str, deadline: Optional[float]) -> Call[results.Head]:
        message, _ = yield from self.small("/logitd.v1.Heads/Get", _GET, {"name": name}, self.end(deadline))
        return _head(message.head)

    def unload_head(self, name: str, deadline: Optional[float]) -> Call[None]:
        try:
            yield from self.small("/logitd.v1.Heads/Unload", _UNLOAD, {"name": name}, self.end(deadline))
        except NotFound as error:
            if error.attempts <= 1:  # else the first attempt may have unloaded it, although its answer was lost
                raise

    def load_head(
        self,
        name: str,
        path: str,
        final_norm: bool,
        vocab: int,
        shard: bool,
        progress: Optional[Callable[[int, int], Any]],
    ) -> Call[results.Head]:
        for field, value in (("name", name), ("path", path)):
            _arrays.instance(field, value, (str,), "a string")
        request = {"name": name, "path": path, "final_norm": final_norm, "vocab": vocab, "shard": shard}
        return (yield from self._change_head("Load", _LOAD, [request], progress))

    def update_head(
        self,
        name: str,
        path: Optional[str],
        rows: List[Dict[str, Any]],
        progress: Optional[Callable[[int, int], Any]],
    ) -> Call[results.Head]:
        _arrays.instance("name", name, (str,), "a string")
        _arrays.instance("path", path, (str, type(None)), "a string")
        if (path is None) != bool(rows):
            raise InvalidArgument(
                f"path: got {path!r} and {len(rows)} pieces of weight, bias and norm, allowed a path, or pieces"
            )
        if path is not None:
            requests: List[Dict[str, Any]] = [{"name": name, "path": path}]
        else:
            starts = range(0, len(rows), _ROWS_A_MESSAGE)
            requests = [{"name": name, "rows": rows[at : at + _ROWS_A_MESSAGE]} for at in starts]
        return (yield from self._change_head("Update", _UPDATE, requests, progress))

    def _change_head(
        self,
        method: str,
        codecs: Tuple[Codec, Codec],
        requests: Sequence[Mapping[str, Any]],
        progress: Optional[Callable[[int, int], Any]],
    ) -> Call[results.Head]:
        changed: List[results.Head] = []
        stopped = False

        def take(data: bytes) -> bool:
            nonlocal stopped
            _, message = decode(codecs[1], data)
            if message.HasField("head"):
                changed.append(_head(message.head))
            stopped = progress is not None and progress(message.done_bytes, message.total_bytes) is False
            return not stopped

        messages = [codecs[0].encode(request) for request in requests]
        reply = yield Receive(f"/logitd.v1.Heads/{method}", messages, take)
        if stopped:
            done = {"Load": "load ended: the head is loaded", "Update": "update ended: the head is updated"}[method]
            raise Cancelled("stopped by progress" + (f" as the {done}" if changed else ""), attempts=1)
        if reply.error is not None:
            raise reply.error
        if not changed:
            raise Internal("the server's last answer has no head", attempts=1)
        return changed[-1]


def _with_attempts(error: LogitdError, attempts: int, why: str = "") -> LogitdError:
    text = f"{error.message} ({why})" if why else error.message
    return type(error)(text, retry_delay=error.retry_delay, attempts=attempts)


def decode(codec: Codec, data: bytes) -> Tuple[Dict[str, np.ndarray], Any]:
    """A server's answer. Internal: it is not such a message."""
    try:
        return codec.decode(data)
    except _wire.WireError as error:
        raise Internal(f"the server's answer is not a {codec.name}: {error}", attempts=1) from error


def encoded(kind: str, rows: RowInput, params: RowParams, more: Optional[Mapping[str, Any]] = None) -> bytes:
    """The one message of a request of rows."""
    return REQUESTS[kind][1].encode({**rows.fields(), **params.all(), **(more or {}), **rows.payload()})


def decoded(kind: str, reply: Reply, rows: RowInput) -> Any:
    """The result of an answer to rows."""
    arrays, message = decode(ANSWERS[kind], reply.data)
    return result_of(kind, arrays, message, reply.seconds, reply.attempts, rows)


def _plain(kind: Callable[..., T], message: Any) -> T:
    """A dataclass from the fields of the same names."""
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return kind(**{name: getattr(message, name) for name in names})


def _head(message: Any) -> results.Head:
    names = {number: name for name, number in _arrays.DTYPES.items()}
    return replace(
        _plain(results.Head, message),
        dtype=names.get(message.dtype, str(message.dtype)),
        shards=[_plain(results.HeadShard, shard) for shard in message.shards],
        warnings=list(message.warnings),
    )


def health_request(service: str) -> bytes:
    """grpc.health.v1.HealthCheckRequest: one string."""
    _arrays.instance("service", service, (str,), "a string")
    name = service.encode()
    return _wire.head(1, len(name)) + name if name else b""


def serving_status(data: bytes) -> str:
    """grpc.health.v1.HealthCheckResponse: one enum, not on the wire where it is 0."""
    try:
        found = {number: value for number, value, _ in _wire.fields(data)}
        return SERVING[int(_wire.unpack_varints(found[1])[0])] if found else SERVING[0]
    except (_wire.WireError, KeyError, IndexError) as error:
        raise Internal("the health answer is not a grpc.health.v1.HealthCheckResponse", attempts=1) from error


def no_answer(patience: float, taken: int, count: int) -> DeadlineExceeded:
    return DeadlineExceeded(f"no answer for {patience:g} s, after {taken} of {count} messages", attempts=1)


def write_after_done() -> FailedPrecondition:
    return FailedPrecondition("stream: got a write after done(), allowed before it")


def verify_fields(
    sequence_rows: Any,
    drafts: Any,
    draft_kind: Union[str, Sequence[str], None],
    draft_ids: Any,
    draft_probs: Any,
    block_verification: Any,
) -> Dict[str, Any]:
    """The fields of Verify that are about the drafts."""
    codec = REQUESTS["verify"][1]
    fields: Dict[str, Any] = {
        name: _arrays.integers(name, value, codec.dtype(name)).reshape(-1)
        for name, value in (("sequence_rows", sequence_rows), ("drafts", drafts))
    }
    if draft_kind is not None:
        fields["draft_kind"] = words("draft_kind", draft_kind, codec.enum("draft_kind"))
    if draft_ids is not None:
        counts, flat = lists("draft_ids", draft_ids)
        fields["draft_ids"] = flat
        fields["draft_count"] = np.array([flat.size]) if counts is None else counts
    if draft_probs is not None:
        values = draft_probs.values if isinstance(draft_probs, results.Ragged) else draft_probs
        parts = [values]
        if isinstance(values, (list, tuple)) and values and (isinstance(values[0], (list, tuple)) or np.ndim(values[0])):
            parts = list(values)  # a list per draft
        numbers = [_arrays.numbers("draft_probs", part, np.dtype("<f4")).reshape(-1) for part in parts]
        fields["draft_probs"] = np.concatenate(numbers).view(np.uint8)
    fields["block_verification"] = bool(_arrays.one("block_verification", block_verification, np.dtype(np.bool_)))
    return fields

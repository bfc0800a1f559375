"""The client for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import replace
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    AsyncIterator,
    Callable,
    Deque,
    Iterable,
    List,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
    Union,
)

import grpc
import grpc.aio

from logitd import _calls
from logitd._base import Base
from logitd._calls import Call, Reply
from logitd._rows import HeadPieces, RowInput
from logitd.arena import Arena, CudaArena
from logitd.errors import FailedPrecondition, Internal, LogitdError, Unavailable
from logitd.params import Array, DraftKind, DType, Float, Floats, Ints, Probabilities, TokenLists
from logitd.results import (
    AttentionBackwardResult,
    AttentionResult,
    DivergenceProgress,
    DivergenceResult,
    DivergenceTotals,
    Head,
    SampleResult,
    ScoreProgress,
    ScoreResult,
    ScoreTotals,
    ServerInfo,
    TopKResult,
    VerifyResult,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from logitd.params import DivergenceParams, SampleParams, ScoreParams, TopKParams, VerifyParams

T = TypeVar("T")
Window = Tuple[Optional[int], Optional[int]]


class AsyncClient(Base):
    """Client for asyncio: the same options, methods, results and errors, with `await`.

    It belongs to the event loop of its first call: calls in another one raise FailedPrecondition. Tasks of the loop may
    call at the same time. A task that is cancelled cancels its call. Messages are built, and answers taken apart, in
    the event loop.
    """

    _grpc = grpc.aio
    _loop: Optional[asyncio.AbstractEventLoop] = None

    def _check_place(self) -> None:
        super()._check_place()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop, self._channel = loop, self._make_channel()
        elif self._loop is not loop:
            raise FailedPrecondition(
                "client: got a call in a second event loop, allowed in the loop of its first call; make an AsyncClient in "
                "each loop (every asyncio.run has a new one), or use logitd.Client"
            )

    async def close(self) -> None:
        """Ends the connection and the calls on it."""
        self._closed = True
        if self._loop is not None:
            self._check_place()
            await self._channel.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        await self.close()

    async def top_k(self, logits: Optional[Array] = None, *, k: Ints, **params: Unpack[TopKParams]) -> TopKResult:
        """As Client.top_k."""
        return await self._run(self._top_k(logits, k, params))

    async def sample(self, logits: Optional[Array] = None, **params: Unpack[SampleParams]) -> SampleResult:
        """As Client.sample."""
        return await self._run(self._sample(logits, params))

    def sample_stream(self) -> "AsyncSampleStream":
        """As Client.sample_stream; see AsyncSampleStream."""
        return AsyncSampleStream(self)

    async def verify(
        self,
        logits: Optional[Array] = None,
        *,
        sequence_rows: Union[int, Sequence[int], Array],
        drafts: Union[Sequence[int], Array],
        draft_kind: Union[DraftKind, Sequence[DraftKind], None] = None,
        draft_ids: Optional[TokenLists] = None,
        draft_probs: Optional[Probabilities] = None,
        block_verification: bool = False,
        **params: Unpack[VerifyParams],
    ) -> VerifyResult:
        """As Client.verify."""
        return await self._run(
            self._verify(
                logits, sequence_rows, drafts, draft_kind, draft_ids, draft_probs, block_verification, params
            )
        )

    async def score(
        self, logits: Optional[Array] = None, *, targets: Ints, **params: Unpack[ScoreParams]
    ) -> ScoreResult:
        """As Client.score."""
        return await self._run(self._score(logits, targets, params))

    async def score_stream(
        self,
        logits: Optional[Array] = None,
        *,
        targets: Ints,
        offset: int = 0,
        totals: Optional[ScoreTotals] = None,
        progress: Optional[Callable[[ScoreProgress], Any]] = None,
        **params: Unpack[ScoreParams],
    ) -> ScoreResult:
        """As Client.score_stream; `progress` is an ordinary function."""
        return await self._run(self._score_stream(logits, targets, offset, totals, progress, params))

    async def divergence(
        self,
        logits: Optional[Array] = None,
        reference_logits: Optional[Array] = None,
        *,
        targets: Optional[Ints] = None,
        **params: Unpack[DivergenceParams],
    ) -> DivergenceResult:
        """As Client.divergence."""
        return await self._run(self._divergence(logits, reference_logits, targets, params))

    async def divergence_stream(
        self,
        logits: Optional[Array] = None,
        reference_logits: Optional[Array] = None,
        *,
        targets: Optional[Ints] = None,
        offset: int = 0,
        totals: Optional[DivergenceTotals] = None,
        progress: Optional[Callable[[DivergenceProgress], Any]] = None,
        **params: Unpack[DivergenceParams],
    ) -> DivergenceResult:
        """As Client.divergence_stream; `progress` is an ordinary function."""
        return await self._run(
            self._divergence_stream(logits, reference_logits, targets, offset, totals, progress, params)
        )

    async def attention_softmax(
        self,
        scores: Array,
        *,
        scale: Float = 1.0,
        causal: bool = False,
        window: Optional[Window] = None,
        mask: Optional[Array] = None,
        sinks: Optional[Floats] = None,
        out_dtype: Optional[DType] = None,
        want_logsumexp: bool = False,
        out: Optional[Array] = None,
        dtype: Optional[DType] = None,
        arena: Optional[Arena] = None,
        deadline: Optional[float] = None,
    ) -> AttentionResult:
        """As Client.attention_softmax."""
        return await self._run(
            self._softmax(
                scores, scale, causal, window, mask, sinks, out_dtype, want_logsumexp, out, dtype, arena, deadline
            )
        )

    async def attention_softmax_backward(
        self,
        probs: Array,
        d_probs: Array,
        *,
        scale: Float = 1.0,
        causal: bool = False,
        window: Optional[Window] = None,
        sinks: Optional[Floats] = None,
        logsumexp: Optional[Array] = None,
        out_dtype: Optional[DType] = None,
        out: Optional[Array] = None,
        dtype: Optional[DType] = None,
        arena: Optional[Arena] = None,
        deadline: Optional[float] = None,
    ) -> AttentionBackwardResult:
        """As Client.attention_softmax_backward."""
        return await self._run(
            self._softmax_backward(
                probs, d_probs, scale, causal, window, sinks, logsumexp, out_dtype, out, dtype, arena, deadline
            )
        )

    async def info(self, *, deadline: Optional[float] = None) -> ServerInfo:
        """As Client.info."""
        return await self._run(self._session.info(deadline))

    async def health(self, service: str = "", *, deadline: Optional[float] = None) -> str:
        """As Client.health."""
        return await self._run(self._session.health(service, deadline))

    async def watch_health(self, service: str = "") -> AsyncIterator[str]:
        """As Client.watch_health."""
        call = self._method("unary_stream", _calls.WATCH)(
            _calls.health_request(service), metadata=self.options.metadata(_calls.WATCH)
        )
        try:
            async for data in call:
                yield _calls.serving_status(data)
        except grpc.RpcError as error:
            raise _reply_of(error, 0.0).error or error from None
        finally:
            call.cancel()

    async def load_head(
        self,
        name: str,
        path: str,
        *,
        final_norm: bool = False,
        vocab: int = 0,
        shard: bool = False,
        progress: Optional[Callable[[int, int], Any]] = None,
    ) -> Head:
        """As Client.load_head; `progress` is an ordinary function."""
        return await self._run(self._session.load_head(name, path, final_norm, vocab, shard, progress))

    async def update_head(
        self,
        name: str,
        path: Optional[str] = None,
        *,
        weight: Optional[HeadPieces] = None,
        bias: Optional[HeadPieces] = None,
        norm: Optional[HeadPieces] = None,
        dtype: Optional[DType] = None,
        arena: Union[Arena, CudaArena, None] = None,
        progress: Optional[Callable[[int, int], Any]] = None,
    ) -> Head:
        """As Client.update_head; `progress` is an ordinary function."""
        return await self._run(self._update_head(name, path, weight, bias, norm, dtype, arena, progress))

    async def unload_head(self, name: str, *, deadline: Optional[float] = None) -> None:
        """As Client.unload_head."""
        return await self._run(self._session.unload_head(name, deadline))

    async def list_heads(self, *, deadline: Optional[float] = None) -> List[Head]:
        """As Client.list_heads."""
        return await self._run(self._session.list_heads(deadline))

    async def get_head(self, name: str, *, deadline: Optional[float] = None) -> Head:
        """As Client.get_head."""
        return await self._run(self._session.get_head(name, deadline))

    # Steps.

    async def _run(self, call: Call[T]) -> T:
        try:
            step = next(call)
            while True:
                if isinstance(step, _calls.Unary):
                    reply = await self._unary(step)
                elif isinstance(step, _calls.Stream):
                    reply = await self._stream(step)
                elif isinstance(step, _calls.Receive):
                    reply = await self._receive(step)
                else:
                    await asyncio.sleep(step.seconds)
                    reply = Reply()
                step = call.send(reply)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    async def _unary(self, step: _calls.Unary) -> Reply:
        method, metadata = (
            self._method("unary_unary", step.method),
            self.options.metadata(step.method, len(step.message)),
        )
        start = time.monotonic()
        try:
            data = await method(step.message, timeout=max(0.0, step.end - start), metadata=metadata)
        except grpc.RpcError as error:
            return _reply_of(error, time.monotonic() - start)
        return Reply(data=data, seconds=time.monotonic() - start)

    async def _receive(self, step: _calls.Receive) -> Reply:
        call = self._method("stream_stream", step.method)(metadata=self.options.metadata(step.method))
        writer = asyncio.ensure_future(_write_all(call, step.messages))
        try:
            async for data in call:
                if not step.take(data):
                    break
        except grpc.RpcError as error:
            return _reply_of(error, 0.0)
        finally:
            call.cancel()
            writer.cancel()
        return Reply()

    async def _stream(self, step: _calls.Stream) -> Reply:
        start = time.monotonic()
        timeout = None if step.end is None else max(0.0, step.end - start)
        call = self._method("stream_stream", step.method)(timeout=timeout, metadata=self.options.metadata(step.method))

        writer = asyncio.ensure_future(_write_all(call, step.messages()))
        writer.add_done_callback(lambda done: done.cancelled() or done.exception() is None or call.cancel())
        taken = 0
        reply = Reply()
        try:
            while True:
                data = await asyncio.wait_for(call.read(), step.patience)
                if data is grpc.aio.EOF:
                    break
                if taken == step.count:
                    return Reply(Internal("the server sent more answers than there were messages", attempts=1))
                step.take(taken, data)
                taken += 1
            if taken < step.count:
                reply = Reply(Internal(f"the server sent {taken} answers to {step.count} messages", attempts=1))
        except grpc.RpcError as error:
            if taken < step.count:
                reply = _reply_of(error, 0.0)
        except asyncio.TimeoutError:
            if taken < step.count:
                reply = Reply(_calls.no_answer(step.patience or 0.0, taken, step.count))
        except LogitdError as error:  # of take
            reply = Reply(error)
        except asyncio.CancelledError:
            if writer.done() and not writer.cancelled() and writer.exception() is not None:
                raise writer.exception() from None  # type: ignore[misc]
            raise
        finally:
            call.cancel()
            writer.cancel()
        return replace(reply, seconds=time.monotonic() - start)


def _reply_of(error: Any, seconds: float) -> Reply:
    return _calls.reply_of(error.code(), error.details(), error.trailing_metadata(), seconds)


_ENDED = (grpc.RpcError, grpc.aio.InternalError, asyncio.InvalidStateError)  # a write met the end of the stream


async def _write_all(call: Any, messages: Iterable[bytes]) -> None:
    try:
        for message in messages:
            await _write(call, message)
        await call.done_writing()
    except _ENDED:
        pass  # the stream has ended; reading tells why


async def _write(call: Any, message: bytes) -> None:
    """call.write(message). Where that meets the end of the stream, it sets a status of its own (INTERNAL, "Internal
    error from Core"), and the server's status and last answers are lost. What it calls inside does not."""
    inner = getattr(call, "_cython_call", None)
    if inner is None or not hasattr(inner, "send_serialized_message"):
        await call.write(message)
        return
    await call.wait_for_connection()
    if call.done():
        raise asyncio.InvalidStateError("the stream has ended")
    await inner.send_serialized_message(message)


class AsyncSampleStream:
    """SampleStream for asyncio: one task may write while another reads."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._written: Deque[Tuple[float, RowInput]] = deque()
        self._opening = asyncio.ensure_future(self._open())
        self._done = False

    async def _open(self) -> Any:
        await self._client._run(self._client._connected())
        return self._client._method("stream_stream", _calls.SAMPLE_STREAM)(
            metadata=self._client.options.metadata(_calls.SAMPLE_STREAM)
        )

    async def _call(self) -> Any:
        # A task that is cancelled while it waits here leaves the opening to the others.
        return await asyncio.shield(self._opening)

    async def write(self, logits: Optional[Array] = None, **params: Unpack[SampleParams]) -> None:
        """One request, as in Client.sample, without a deadline. Unavailable: the stream has ended; read has the
        reason. FailedPrecondition: after done()."""
        self._client._check_place()
        if self._done:
            raise _calls.write_after_done()
        message, rows = self._client._stream_message(logits, params)
        call = await self._call()
        self._written.append((time.monotonic(), rows))
        try:
            await _write(call, message)
        except _ENDED as error:
            raise Unavailable("the stream has ended; read has the reason") from error

    async def done(self) -> None:
        """There are no more requests. The answers to those before can still be read."""
        self._done = True
        await (await self._call()).done_writing()

    async def read(self) -> Optional[SampleResult]:
        """The next answer; its round_trip counts from its write. None after the last one. Raises what ended the
        stream."""
        self._client._check_place()
        call = await self._call()
        try:
            data = await call.read()
        except grpc.RpcError as error:
            raise _reply_of(error, 0.0).error or error from None
        if data is grpc.aio.EOF:
            return None
        start, rows = self._written.popleft()
        result: SampleResult = _calls.decoded("sample", Reply(data=data, seconds=time.monotonic() - start), rows)
        return result

    async def __aiter__(self) -> AsyncIterator[SampleResult]:
        """The answers up to the last one."""
        while True:
            result = await self.read()
            if result is None:
                return
            yield result

    async def close(self) -> None:
        """Cancels what is in flight."""
        if not self._opening.done():
            self._opening.cancel()
        elif not self._opening.cancelled() and self._opening.exception() is None:
            self._opening.result().cancel()

    async def __aenter__(self) -> "AsyncSampleStream":
        return self

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        await self.close()

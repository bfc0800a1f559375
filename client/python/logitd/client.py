"""The blocking client."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections import deque
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Deque, Iterator, List, Optional, Sequence, Tuple, Type, TypeVar, Union

import grpc

from logitd import _calls
from logitd._base import Base
from logitd._calls import Call, Reply
from logitd._rows import HeadPieces, RowInput
from logitd.arena import Arena, CudaArena
from logitd.errors import Internal, LogitdError, Unavailable
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


class Client(Base):
    """One connection to one server, or one to each of several. Connects at the first call. Thread-safe.

    address: HOST:PORT or unix:PATH; for several servers ipv4:A:PORT,B:PORT, ipv6:[A]:PORT,[B]:PORT or dns:///HOST:PORT, a
        name with several addresses.
    round_robin: with several servers, calls go to them in turn; a server that is away, or whose health is not SERVING
        because it drains, is left out. A stream stays with one. The servers must have the same limits and heads.
        Without, all calls go to the first that answers. With TLS and an ipv4: or ipv6: address, `tls` must state the
        server's name.
    deadline: seconds for a whole call, all attempts and waits included; a call's own `deadline` overrides it.
    retry: how UNAVAILABLE and RESOURCE_EXHAUSTED are tried again.
    priority: "interactive", or "batch" for work that may wait until no interactive work does.
    tls: TLS to the server; None: plaintext.
    token: sent as `authorization: Bearer TOKEN`; or a function that returns it, called for every attempt.
    token_over_plaintext: send the token without TLS also to another machine, where others on the network can read it.
    state_sizes: tell the server the size of each message in the call's headers: it decides before the message comes.
    throttle: where the server refuses most calls of a method for its load, do not send all of them: about three for
        every two that it takes. The others end with ResourceExhausted, "not sent: ...".
    max_message_bytes: larger requests are refused here, unsent; 0: no limit of the client's.
    attention_message_bytes, score_message_bytes: payload of one message of a stream, about. Attention tensors that are
        larger go as a stream.

    Arrays: f32, f16 or bf16, of NumPy or torch. bf16 is a torch tensor, an array of ml_dtypes.bfloat16, or the bits in
        a uint16 array with dtype="bf16". Answers are of the same library. Arrays that are contiguous and on the host
        are copied once here, into the message; gRPC copies the message once more on its way out, and an answer's twice
        on its way in. docs/python.md has the whole account. With `arena=` they are not sent at all; see Arena.

    Errors: every method raises LogitdError, a class of it for each code; see logitd.errors. A parameter that does not
    exist is a TypeError. A NaN in a row, or a row without a token left to draw, is no error: look at the result's
    status.

    Close it after use, or use it in a `with` statement. Calls after that raise FailedPrecondition, and so do calls in
    a process that was forked from the client's. A pickled client, or a copy, is a new one with the same options.
    """

    _grpc = grpc

    def _made(self) -> None:
        self._channel = self._make_channel()
        # At exit, gRPC waits for streams that its threads no longer carry. So the channel is closed before, while they do.
        self._finalizer = weakref.finalize(self, _close, self._channel, self._process)

    def close(self) -> None:
        """Ends the connection and the calls on it."""
        self._closed = True
        self._finalizer()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    # Rows.

    def top_k(self, logits: Optional[Array] = None, *, k: Ints, **params: Unpack[TopKParams]) -> TopKResult:
        """The k most probable tokens of every row under softmax(logits / temperature).

        logits: [N, V] or [V]; or `hidden` [N, D] with `head`.
        k: per row, 1 to V. Other parameters: params.TopKParams.
        """
        return self._run(self._top_k(logits, k, params))

    def sample(self, logits: Optional[Array] = None, **params: Unpack[SampleParams]) -> SampleResult:
        """Draws one token from every row with that row's parameters.

        The steps: logit bias, penalties, mask of allowed tokens, temperature, filters, draw.
        docs/semantics.md#sample names the filters in their order, and has every step to the bit.

        logits: [N, V] or [V]; or `hidden` [N, D] with `head`. Parameters: params.SampleParams; `seed`, or `seeds`, is required
            unless every temperature is 0.
        """
        return self._run(self._sample(logits, params))

    def sample_stream(self) -> "SampleStream":
        """A stream of sample requests for a decode loop; see SampleStream."""
        return SampleStream(self)

    def verify(
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
        """Speculative decoding: which draft tokens the target model accepts, and the bonus token after them.

        logits: [N, V], sequence after sequence: the target's at each draft, and after the last draft; or `hidden`
            [N, D] with `head`.
        sequence_rows: [S], rows of each sequence: its drafts + 1.
        drafts: [N - S], token ids, row after row.
        draft_kind: for all drafts, or one per draft. "greedy": drawn with certainty, or unknown. "list": from draft_ids
            with draft_probs. "dense": from the whole vocabulary, with V of draft_probs. Default "greedy".
        draft_ids: for each draft of kind "list", its token ids in ascending order, the draft among them; or one list.
        draft_probs: f32, draft after draft: the probabilities that the draft was drawn with, as many as its draft_ids,
            or V. Parameters: params.VerifyParams, each with a value per row of logits.
        block_verification: decide about all drafts of a sequence together, which accepts as many or more on average;
            then every draft has probabilities.
        """
        return self._run(
            self._verify(
                logits, sequence_rows, drafts, draft_kind, draft_ids, draft_probs, block_verification, params
            )
        )

    def score(self, logits: Optional[Array] = None, *, targets: Ints, **params: Unpack[ScoreParams]) -> ScoreResult:
        """The loss of every row's target under softmax(logits / temperature), in nats, and totals over the rows.

        logits: [N, V] or [V]; or `hidden` [N, D] with `head`.
        targets: [N], token ids, or ignore_index for rows that are not counted.
        Parameters: params.ScoreParams.
        """
        return self._run(self._score(logits, targets, params))

    def score_stream(
        self,
        logits: Optional[Array] = None,
        *,
        targets: Ints,
        offset: int = 0,
        totals: Optional[ScoreTotals] = None,
        progress: Optional[Callable[[ScoreProgress], Any]] = None,
        **params: Unpack[ScoreParams],
    ) -> ScoreResult:
        """score() of a sequence of any length: cut into messages of whole rows, which go as a stream.

        When a stream is lost, a new one continues after the last answer. Attempts are counted since then, and the
        deadline is how long one answer may take. `progress` is called after every answer; where it returns False the
        call ends with Cancelled. Nothing is read meanwhile, so it should be quick.

        offset, totals: to continue after an error where `progress` last stood: the rows scored before, and their
        totals; `logits` and `targets` then begin with the row at `offset`.

        A new stream looks its head up again: until the call ends, the name must mean the same weights.
        """
        return self._run(self._score_stream(logits, targets, offset, totals, progress, params))

    def divergence(
        self,
        logits: Optional[Array] = None,
        reference_logits: Optional[Array] = None,
        *,
        targets: Optional[Ints] = None,
        **params: Unpack[DivergenceParams],
    ) -> DivergenceResult:
        """How far two distributions are from each other, row by row: p = softmax(logits / temperature), and q of the
        reference. KL(p || q), KL(q || p), both entropies, and totals over the rows.

        logits: [N, V] or [V]; or `hidden` [N, D] with `head`.
        reference_logits: as many rows of the same vocabulary and type; or `reference_hidden` with `reference_head`,
            whose size and type may be others. Logits beside hidden states are f32.
        targets: [N], token ids whose log-probabilities to report, or ignore_index for rows that are not counted.
        Parameters: params.DivergenceParams.
        """
        return self._run(self._divergence(logits, reference_logits, targets, params))

    def divergence_stream(
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
        """divergence() of a sequence of any length, as score_stream() is score(): the same parts, totals, progress and
        continuation. A new stream demands the versions of the heads that the answers so far are of.
        """
        return self._run(
            self._divergence_stream(logits, reference_logits, targets, offset, totals, progress, params)
        )

    # Attention.

    def attention_softmax(
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
        """softmax(scale * scores + mask) of every row over the keys that its query sees.

        scores: [B, H, Sq, Sk], of any size; leading dimensions may be missing. The last query is aligned with the last
            key. causal: no query sees keys after its own. window: (left, right), how many keys before and after its own
            a query sees; None: no bound. mask: [B or 1, H or 1, Sq or 1, Sk]; bool: True masks a key; floats: added
            after the scale, -inf masks a key. sinks: [H], a logit per head that takes part in the denominator.
            out_dtype: of the probabilities: the type of the scores (default) or "f32". out: an array for the
            probabilities, of their shape and type; undefined after an error. None: a new one. arena: where the scores
            lie, contiguous; they are not sent, and if `out` lies there too, the server writes the answer there.
        """
        return self._run(
            self._softmax(
                scores, scale, causal, window, mask, sinks, out_dtype, want_logsumexp, out, dtype, arena, deadline
            )
        )

    def attention_softmax_backward(
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
        """The gradient of attention_softmax with respect to its scores and sinks.

        probs: as attention_softmax answered. d_probs: the gradient with respect to them, of their shape and type.
        scale, causal, window, sinks: as in attention_softmax. logsumexp: its answer; required with sinks, else none.
        out_dtype: of the gradient: the type of probs (default) or, where that is f32, any.
        out: an array for the gradient. None: a new one. arena: as in attention_softmax, of probs and d_probs.
        """
        return self._run(
            self._softmax_backward(
                probs, d_probs, scale, causal, window, sinks, logsumexp, out_dtype, out, dtype, arena, deadline
            )
        )

    # The server and its heads.

    def info(self, *, deadline: Optional[float] = None) -> ServerInfo:
        """Version, backend, device, limits and ops of the server. Answers also while the server drains."""
        return self._run(self._session.info(deadline))

    def health(self, service: str = "", *, deadline: Optional[float] = None) -> str:
        """ "SERVING" or "NOT_SERVING"; "" is the server as a whole. NotFound: the server has no such service."""
        return self._run(self._session.health(service, deadline))

    def watch_health(self, service: str = "") -> Iterator[str]:
        """The present health and every later one, until the iterator is closed or the server ends. No deadline."""
        call = self._method("unary_stream", _calls.WATCH)(
            _calls.health_request(service), metadata=self.options.metadata(_calls.WATCH)
        )
        try:
            for data in call:
                yield _calls.serving_status(data)
        except grpc.RpcError as error:
            raise _reply_of(error, 0.0).error or error from None
        finally:
            call.cancel()

    def load_head(
        self,
        name: str,
        path: str,
        *,
        final_norm: bool = False,
        vocab: int = 0,
        shard: bool = False,
        progress: Optional[Callable[[int, int], Any]] = None,
    ) -> Head:
        """Loads an output head from below the server's --head-root: a Hugging Face model's folder, or a safetensors
        file.

        final_norm: load the model's final norm too; hidden states are then sent from before it.
        vocab: rows to keep of a padded weight; 0: what the model's configuration says, or all.
        shard: cut the vocabulary over all devices, each of which holds a part; answers have the same bits.
        progress: called with the bytes read and the bytes in all (0 while an earlier load runs); False ends the load.

        No deadline, because it may take minutes, and one attempt. Errors: AlreadyExists, FailedPrecondition (no
        --head-root, or the server cannot shard), PermissionDenied, NotFound (no such file), InvalidArgument, ResourceExhausted.
        """
        return self._run(self._session.load_head(name, path, final_norm, vocab, shard, progress))

    def update_head(
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
        """Gives a loaded head new numbers: those of a file, or of arrays in an arena. Calls in flight keep the old
        version; from the return on, calls get the new one, `head_version` of the result.

        path: as in load_head; the head's shape, dtype, bias and norm stay as they are.
        weight, bias, norm: arrays [rows, hidden] in the head's type, [vocab] float32 and [hidden] float32 in the
            arena; or a list of pairs, a first row and an array of rows from there on. Rows that come twice: the last
            ones win. Rows that do not come stay. bias: as the head adds it to its scaled logits. norm: as the head
            multiplies by it.
        dtype: of a weight of bf16 bits in a uint16 array: "bf16".
        arena: where the arrays lie; write there again after the return.
        progress: called with the bytes read or copied, and those of the file (of an arena 0); False ends the update.

        Errors leave the head as it was: AlreadyExists (it is being updated), Aborted (it was unloaded), and those of
        load_head. No deadline, and one attempt.
        """
        return self._run(self._update_head(name, path, weight, bias, norm, dtype, arena, progress))

    def unload_head(self, name: str, *, deadline: Optional[float] = None) -> None:
        """New calls no longer find the head. NotFound: the text lists the loaded heads."""
        return self._run(self._session.unload_head(name, deadline))

    def list_heads(self, *, deadline: Optional[float] = None) -> List[Head]:
        """The heads that are loaded, by ascending name."""
        return self._run(self._session.list_heads(deadline))

    def get_head(self, name: str, *, deadline: Optional[float] = None) -> Head:
        """One head. NotFound: the text lists the loaded heads."""
        return self._run(self._session.get_head(name, deadline))

    # Steps.

    def _run(self, call: Call[T]) -> T:
        try:
            step = next(call)
            while True:
                if isinstance(step, _calls.Unary):
                    reply = self._unary(step)
                elif isinstance(step, _calls.Stream):
                    reply = self._stream(step)
                elif isinstance(step, _calls.Receive):
                    reply = self._receive(step)
                else:
                    self._sleep(step)
                    reply = Reply()
                step = call.send(reply)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    def _sleep(self, step: _calls.Sleep) -> None:
        end = time.monotonic() + step.seconds
        if step.away:
            # A connection moves on only while a thread is inside gRPC. An attempt on a lost connection ends at once, so
            # without this the handshake of the next connection would stand still until it times out, again and again. A
            # probe waits inside gRPC for a connection. (So does who subscribes to the channel's state, but by a thread
            # of gRPC that stays: the process would not end without close().)
            try:
                self._method("unary_unary", _calls.HEALTH)(
                    _calls.health_request(""), timeout=step.seconds, wait_for_ready=True
                )
            except grpc.RpcError:
                pass  # the next attempt tells
        time.sleep(max(0.0, end - time.monotonic()))

    def _unary(self, step: _calls.Unary) -> Reply:
        method, metadata = (
            self._method("unary_unary", step.method),
            self.options.metadata(step.method, len(step.message)),
        )
        start = time.monotonic()
        try:
            data = method(step.message, timeout=max(0.0, step.end - start), metadata=metadata)
        except grpc.RpcError as error:
            return _reply_of(error, time.monotonic() - start)
        return Reply(data=data, seconds=time.monotonic() - start)

    def _receive(self, step: _calls.Receive) -> Reply:
        call = self._method("stream_stream", step.method)(
            iter(step.messages), metadata=self.options.metadata(step.method)
        )
        try:
            for data in call:
                if not step.take(data):
                    break
        except grpc.RpcError as error:
            return _reply_of(error, 0.0)
        finally:
            call.cancel()
        return Reply()

    def _stream(self, step: _calls.Stream) -> Reply:
        start = time.monotonic()
        faults: List[Exception] = []

        def messages() -> Iterator[bytes]:
            try:
                yield from step.messages()
            except Exception as error:  # gRPC would only log it
                faults.append(error)
                raise

        timeout = None if step.end is None else max(0.0, step.end - start)
        call = self._method("stream_stream", step.method)(
            messages(), timeout=timeout, metadata=self.options.metadata(step.method)
        )
        late = threading.Event()

        def give_up() -> None:
            late.set()
            call.cancel()

        taken = 0
        reply = Reply()
        try:
            while True:
                watch = _after(step.patience, give_up)
                try:
                    data = next(call)
                finally:
                    if watch is not None:
                        watch.cancel()
                if taken == step.count:
                    return Reply(Internal("the server sent more answers than there were messages", attempts=1))
                step.take(taken, data)
                taken += 1
        except StopIteration:
            if taken < step.count:
                reply = Reply(Internal(f"the server sent {taken} answers to {step.count} messages", attempts=1))
        except grpc.RpcError as error:
            if faults:
                raise faults[0] from None
            if taken < step.count:
                reply = _reply_of(error, 0.0)
                if late.is_set() and step.patience is not None:
                    reply = Reply(_calls.no_answer(step.patience, taken, step.count))
        except LogitdError as error:  # of take
            reply = Reply(error)
        finally:
            call.cancel()
        return replace(reply, seconds=time.monotonic() - start)


def _close(channel: Any, process: int) -> None:
    if os.getpid() == process:  # gRPC may hang in a process that was forked
        channel.close()


def _after(seconds: Optional[float], run: Callable[[], Any]) -> Optional[threading.Timer]:
    if seconds is None:
        return None
    timer = threading.Timer(seconds, run)
    timer.daemon = True
    timer.start()
    return timer


def _reply_of(error: Any, seconds: float) -> Reply:
    return _calls.reply_of(error.code(), error.details(), error.trailing_metadata(), seconds)


class SampleStream:
    """Requests go out with write, their answers come back with read, in order.

    The server takes a few requests at once and leaves further ones unread; write then blocks until read has taken
    answers. So a decode loop writes and reads in turn, or keeps a few requests in flight. No deadline and no retries,
    except while a client that has called nothing yet connects. One thread may write while another reads.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        client._run(client._connected())
        self._outbox: "queue.Queue[Optional[bytes]]" = queue.Queue(maxsize=1)
        self._written: Deque[Tuple[float, RowInput]] = deque()
        self._call = client._method("stream_stream", _calls.SAMPLE_STREAM)(
            iter(self._outbox.get, None), metadata=client.options.metadata(_calls.SAMPLE_STREAM)
        )
        self._error: Optional[LogitdError] = None
        self._done = False

    def write(self, logits: Optional[Array] = None, **params: Unpack[SampleParams]) -> None:
        """One request, as in Client.sample, without a deadline. Unavailable: the stream has ended; read has the
        reason. FailedPrecondition: after done()."""
        self._client._check_place()
        if self._done:
            raise _calls.write_after_done()
        message, rows = self._client._stream_message(logits, params)
        self._written.append((time.monotonic(), rows))
        self._put(message)

    def done(self) -> None:
        """There are no more requests. The answers to those before can still be read."""
        if not self._done:
            self._done = True
            self._put(None)

    def _put(self, message: Optional[bytes]) -> None:
        while self._call.is_active():
            try:
                return self._outbox.put(message, timeout=0.1)
            except queue.Full:
                pass
        if message is not None:
            raise Unavailable("the stream has ended; read has the reason")

    def read(self) -> Optional[SampleResult]:
        """The next answer; its round_trip counts from its write. None after the last one. Raises what ended the
        stream."""
        self._client._check_place()
        if self._error is not None:
            raise self._error
        try:
            data = next(self._call)
        except StopIteration:
            return None
        except grpc.RpcError as error:
            self._error = _reply_of(error, 0.0).error
            raise self._error or error from None
        start, rows = self._written.popleft()
        result: SampleResult = _calls.decoded("sample", Reply(data=data, seconds=time.monotonic() - start), rows)
        return result

    def __iter__(self) -> Iterator[SampleResult]:
        """The answers up to the last one."""
        return iter(self.read, None)

    def close(self) -> None:
        """Cancels what is in flight."""
        self._call.cancel()
        try:
            self._outbox.put_nowait(None)  # lets gRPC's thread go that waits for a message
        except queue.Full:
            pass

    def __enter__(self) -> "SampleStream":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

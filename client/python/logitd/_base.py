"""What Client and AsyncClient have in common: options, and the steps of every call."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any, Callable, Dict, Mapping, Optional, Tuple, Type, Union

from logitd import _arrays, _attention, results
from logitd._calls import Call, Session, encoded, verify_fields
from logitd._params import RowParams
from logitd._rows import REQUESTS, PairInput, RowInput, head_rows, row_input
from logitd.arena import Arena
from logitd.errors import FailedPrecondition, InvalidArgument
from logitd.options import TLS, Options, Retry
from logitd.params import Float, split


def row_request(kind: str, logits: Any, params: Mapping[str, Any]) -> "tuple[RowInput, RowParams, Optional[float]]":
    """The input, the parameters and the deadline of a call that takes logits, or hidden states with a head."""
    (hidden, head, version, dtype, arena, deadline), rest = split(
        params, "hidden", "head", "head_version", "dtype", "arena", "deadline"
    )
    rows = row_input(logits, hidden, head, dtype, arena, version)
    vocab = rows.width if head is None else None
    return rows, RowParams(REQUESTS[kind][1], kind, rest, rows.rows, vocab), deadline


def pair_request(
    logits: Any, reference_logits: Any, targets: Any, params: Mapping[str, Any]
) -> "tuple[PairInput, RowParams, Optional[float]]":
    """As row_request, with the reference beside the input."""
    (hidden, head, version, dtype, arena), rest = split(
        params, *(f"reference_{name}" for name in ("hidden", "head", "head_version", "dtype", "arena"))
    )
    if targets is not None:
        rest["targets"] = targets
    rows, row_params, deadline = row_request("divergence", logits, rest)
    try:
        reference = row_input(reference_logits, hidden, head, dtype, arena, version)
    except InvalidArgument as error:
        if not error.message.startswith("input: "):
            raise InvalidArgument(f"reference_{error.message}") from None
        got = error.message.removeprefix("input: ").split(",")[0]
        raise InvalidArgument(
            f"reference: {got}, allowed reference_logits, or reference_hidden with reference_head"
        ) from None
    if reference.rows != rows.rows:
        raise InvalidArgument(f"reference: got {reference.rows} rows, allowed {rows.rows}, as the other input has")
    if rows.head is None and reference.head is None and reference.width != rows.width:
        raise InvalidArgument(f"reference_logits: got a vocabulary of {reference.width}, allowed {rows.width}")
    first = {field.name: getattr(rows, field.name) for field in fields(rows)}
    return PairInput(**first, reference=reference), row_params, deadline


_NO = ("0", "n", "no", "f", "false", "off")
_first_process: Optional[int] = None  # of this one and those that it was forked from: the first with a client


def _check_fork() -> None:
    """FailedPrecondition: gRPC would hang in this process."""
    global _first_process
    _first_process = os.getpid() if _first_process is None else _first_process
    if _first_process != os.getpid() and os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "1").lower() in _NO:
        raise FailedPrecondition(
            "client: got made in a process that was forked after gRPC was in use, with GRPC_ENABLE_FORK_SUPPORT="
            f"{os.environ['GRPC_ENABLE_FORK_SUPPORT']}, allowed without this setting, or in a process that "
            'multiprocessing starts with "spawn"'
        )


class Base:
    """What Client and AsyncClient share. Callers do not make one."""

    _grpc: Any  # the module that makes channels

    def __init__(
        self,
        address: str = "127.0.0.1:7450",
        *,
        round_robin: bool = False,
        deadline: float = 30.0,
        retry: Retry = Retry(),
        priority: str = "interactive",
        tls: Optional[TLS] = None,
        token: Union[str, Callable[[], str], None] = None,
        token_over_plaintext: bool = False,
        state_sizes: bool = True,
        throttle: bool = True,
        max_message_bytes: int = 0,
        attention_message_bytes: int = 8 << 20,
        score_message_bytes: int = 4 << 20,
    ) -> None:
        _check_fork()
        self.options = Options(
            address,
            round_robin=round_robin,
            deadline=deadline,
            retry=retry,
            priority=priority,
            tls=tls,
            token=token,
            token_over_plaintext=token_over_plaintext,
            state_sizes=state_sizes,
            throttle=throttle,
            max_message_bytes=max_message_bytes,
            attention_message_bytes=attention_message_bytes,
            score_message_bytes=score_message_bytes,
        )
        self._session = Session(self.options)
        self._methods: Dict[str, Any] = {}
        self._closed = False
        self._process = os.getpid()
        self._credentials = self.options.credentials()
        self._channel: Any = None
        self._made()

    def _made(self) -> None:
        """What a client does when it has its options."""

    def __reduce__(self) -> Tuple[Any, ...]:
        """A copy, or what pickle makes, is a new client with the same options, and connects by itself."""
        return _remade, (type(self), {f.name: getattr(self.options, f.name) for f in fields(self.options)})

    def _make_channel(self) -> Any:
        address, arguments = self.options.address, self.options.channel_arguments()
        if self._credentials is None:
            return self._grpc.insecure_channel(address, options=arguments)
        return self._grpc.secure_channel(address, self._credentials, options=arguments)

    def _check_place(self) -> None:
        """FailedPrecondition: gRPC cannot be used here with this client's connection."""
        if os.getpid() != self._process:
            raise FailedPrecondition(
                "client: got a call in a process that was forked from the client's, allowed in the client's own; make a "
                "client in each process"
            )

    def _connected(self) -> Any:
        """Asks the server something small, if nothing was asked yet: what has no retries of its own finds a connection."""
        return self._session.limits(self._session.end(None))

    def _method(self, kind: str, name: str) -> Any:
        """A method of raw messages: with no serializer, bytes go through as they are."""
        if self._closed:
            raise FailedPrecondition("client: got a call after close(), allowed before it; make a new client")
        self._check_place()
        if name not in self._methods:
            self._methods[name] = getattr(self._channel, kind)(name)
        return self._methods[name]

    def _top_k(self, logits: Any, k: Any, params: Mapping[str, Any]) -> Call[results.TopKResult]:
        rows, row_params, deadline = row_request("top_k", logits, {**params, "k": k})
        return self._session.rows("top_k", rows, row_params, deadline)

    def _sample(self, logits: Any, params: Mapping[str, Any]) -> Call[results.SampleResult]:
        rows, row_params, deadline = row_request("sample", logits, params)
        return self._session.rows("sample", rows, row_params, deadline)

    def _update_head(
        self, name: Any, path: Any, weight: Any, bias: Any, norm: Any, dtype: Any, arena: Any, progress: Any
    ) -> Call[results.Head]:
        parts = {"weight": weight, "bias": bias, "norm": norm}
        given = ((part, pieces) for part, pieces in parts.items() if pieces is not None)
        rows = [row for part, pieces in given for row in head_rows(part, pieces, dtype, arena)]
        return self._session.update_head(name, path, rows, progress)

    def _verify(
        self,
        logits: Any,
        sequence_rows: Any,
        drafts: Any,
        draft_kind: Any,
        draft_ids: Any,
        draft_probs: Any,
        block_verification: Any,
        params: Mapping[str, Any],
    ) -> Call[results.VerifyResult]:
        rows, row_params, deadline = row_request("verify", logits, params)
        fields = verify_fields(sequence_rows, drafts, draft_kind, draft_ids, draft_probs, block_verification)
        return self._session.rows("verify", rows, row_params, deadline, fields)

    def _score(self, logits: Any, targets: Any, params: Mapping[str, Any]) -> Call[results.ScoreResult]:
        rows, row_params, deadline = row_request("score", logits, {**params, "targets": targets})
        return self._session.rows("score", rows, row_params, deadline)

    def _score_stream(
        self,
        logits: Any,
        targets: Any,
        offset: int,
        totals: Optional[results.ScoreTotals],
        progress: Optional[Callable[[results.ScoreProgress], Any]],
        params: Mapping[str, Any],
    ) -> Call[results.ScoreResult]:
        rows, row_params, deadline = row_request("score", logits, {**params, "targets": targets})
        return self._session.sequence("score", rows, row_params, deadline, offset, totals, progress)

    def _divergence(
        self, logits: Any, reference_logits: Any, targets: Any, params: Mapping[str, Any]
    ) -> Call[results.DivergenceResult]:
        rows, row_params, deadline = pair_request(logits, reference_logits, targets, params)
        return self._session.rows("divergence", rows, row_params, deadline)

    def _divergence_stream(
        self,
        logits: Any,
        reference_logits: Any,
        targets: Any,
        offset: int,
        totals: Optional[results.DivergenceTotals],
        progress: Optional[Callable[[results.DivergenceProgress], Any]],
        params: Mapping[str, Any],
    ) -> Call[results.DivergenceResult]:
        rows, row_params, deadline = pair_request(logits, reference_logits, targets, params)
        return self._session.sequence("divergence", rows, row_params, deadline, offset, totals, progress)

    def _softmax(
        self,
        scores: Any,
        scale: Float,
        causal: bool,
        window: Any,
        mask: Any,
        sinks: Any,
        out_dtype: Optional[str],
        want_logsumexp: bool,
        out: Any,
        dtype: Optional[str],
        arena: Optional[Arena],
        deadline: Optional[float],
    ) -> Call[results.AttentionResult]:
        payload = _arrays.tensor("scores", scores, dtype)
        full = _attention.shape_of("scores", payload.shape)
        held_mask = None if mask is None else _attention.mask_of(mask, full, dtype)
        span = _attention.window_of(window, causal)

        def make(limits: results.Limits, options: Options) -> _attention.AttentionMessages:
            return _attention.AttentionMessages(
                limits,
                options,
                payload=payload,
                scale=scale,
                window=span,
                sinks=sinks,
                out_dtype=out_dtype,
                out=out,
                mask=held_mask,
                want_logsumexp=want_logsumexp,
                arena=arena,
            )

        return self._session.attention(make, deadline)

    def _softmax_backward(
        self,
        probs: Any,
        d_probs: Any,
        scale: Float,
        causal: bool,
        window: Any,
        sinks: Any,
        logsumexp: Any,
        out_dtype: Optional[str],
        out: Any,
        dtype: Optional[str],
        arena: Optional[Arena],
        deadline: Optional[float],
    ) -> Call[results.AttentionBackwardResult]:
        payload, gradient = _arrays.tensor("probs", probs, dtype), _arrays.tensor("d_probs", d_probs, dtype)
        span = _attention.window_of(window, causal)

        def make(limits: results.Limits, options: Options) -> _attention.AttentionMessages:
            return _attention.AttentionMessages(
                limits,
                options,
                payload=payload,
                scale=scale,
                window=span,
                sinks=sinks,
                out_dtype=out_dtype,
                out=out,
                d_probs=gradient,
                logsumexp=logsumexp,
                arena=arena,
            )

        return self._session.attention(make, deadline)

    def _stream_message(self, logits: Any, params: Mapping[str, Any]) -> "tuple[bytes, RowInput]":
        (deadline,), rest = split(params, "deadline")
        if deadline is not None:
            raise TypeError("write: got a deadline, allowed none: a stream has no deadline")
        rows, row_params, _ = row_request("sample", logits, rest)
        return encoded("sample", rows, row_params), rows


def _remade(kind: Type[Base], options: Dict[str, Any]) -> Base:
    return kind(options.pop("address"), **options)

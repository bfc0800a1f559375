"""What the clients raise. The text says what was wrong, what the server or client got, and what is allowed."""

from __future__ import annotations

from typing import Dict, Optional, Type

import grpc


class LogitdError(Exception):
    """A call that failed.

    code: the gRPC status.
    message: its text, without the code.
    retry_delay: seconds after which the server allows another attempt, where it said so.
    attempts: how often the call was tried; 0 where nothing was sent.
    """

    code = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, *, retry_delay: Optional[float] = None, attempts: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_delay = retry_delay
        self.attempts = attempts

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


class Cancelled(LogitdError):
    """The call was cancelled."""

    code = grpc.StatusCode.CANCELLED


class Unknown(LogitdError):
    """The server's fault has no better code."""

    code = grpc.StatusCode.UNKNOWN


class InvalidArgument(LogitdError, ValueError):
    """The request is wrong, by the server or by the client before it sent anything. Change the request."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class DeadlineExceeded(LogitdError, TimeoutError):
    """The deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class NotFound(LogitdError):
    """No head, file or service has this name."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(LogitdError):
    """A head of this name is loaded already."""

    code = grpc.StatusCode.ALREADY_EXISTS


class PermissionDenied(LogitdError):
    """The caller may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Unauthenticated(LogitdError):
    """The server does not know the caller: a token or a certificate is missing or wrong."""

    code = grpc.StatusCode.UNAUTHENTICATED


class ResourceExhausted(LogitdError):
    """No room now (retry after `retry_delay`), or, without a delay, more than a message may have."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class FailedPrecondition(LogitdError):
    """The server is not set up for this."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Aborted(LogitdError):
    """The call was aborted."""

    code = grpc.StatusCode.ABORTED


class OutOfRange(LogitdError):
    """A value is out of range."""

    code = grpc.StatusCode.OUT_OF_RANGE


class Unimplemented(LogitdError):
    """The server does not know this method, or does not take this kind of message."""

    code = grpc.StatusCode.UNIMPLEMENTED


class Internal(LogitdError):
    """The server's device is lost, or an answer does not fit its request."""

    code = grpc.StatusCode.INTERNAL


class Unavailable(LogitdError):
    """The server cannot be reached, drains, or its device failed. Another server may do."""

    code = grpc.StatusCode.UNAVAILABLE


class DataLoss(LogitdError):
    """Data was lost."""

    code = grpc.StatusCode.DATA_LOSS


_BY_CODE: Dict[grpc.StatusCode, Type[LogitdError]] = {kind.code: kind for kind in LogitdError.__subclasses__()}


def error_of(
    code: grpc.StatusCode, message: str, *, retry_delay: Optional[float] = None, attempts: int = 0
) -> LogitdError:
    """The exception of a gRPC status."""
    return _BY_CODE.get(code, LogitdError)(message, retry_delay=retry_delay, attempts=attempts)

"""A ring: top_k and sample through leased memory, for decode loops that must not wait for a socket."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import select
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Dict, Mapping, Optional, Tuple, Type, Union

import grpc

from logitd import _arrays
from logitd._base import row_request
from logitd._calls import Reply, decoded, encoded, reply_of
from logitd._rows import RowInput
from logitd.arena import Arena
from logitd.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    LogitdError,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
    error_of,
)
from logitd.options import check_deadline
from logitd.params import Array, Ints
from logitd.results import SampleResult, TopKResult

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from logitd.params import SampleParams, TopKParams

# The protocol, see formats/ring_protocol.h.
_MAGIC, _VERSION = b"LDRG", 1
_ASK = struct.Struct("<4sIIIIIQ")  # magic, version, slots, entry bytes, answer bytes, unused, offset
_ANSWER = struct.Struct("<4sIII")  # magic, version, code, text bytes
_MAX_TEXT = 1024
_CLIENT_ASLEEP, _SUBMISSIONS = 64, 128
_ENTRY_BYTES = 32  # of the head of a submission: its phase, and
_ENTRY = struct.Struct("<BBxIQQ8x")  # method, priority, message bytes, tag, timeout_us
_COMPLETION = struct.Struct("<BxxxIIIQQ")  # phase, code, bytes, retry_ms, tag, unused
_METHODS = {"top_k": 1, "sample": 2}
_PRIORITIES = ("interactive", "batch")
_MAX_SLOTS, _SLOT_BYTES, _ALIGNMENT = 256, (128, 65536), 64

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_LOOKS = 32  # at a phase, between two looks at the clock
_FIRST_NAP, _LONGEST_NAP = 0.001, 0.25  # seconds in poll()
_GRACE = 0.1  # seconds that the server's own DEADLINE_EXCEEDED may be late

Answer = Union[TopKResult, SampleResult, LogitdError]


# The order of loads and stores.
#
# A phase says that the rest of its slot is written. So the rest must be visible before the phase, and must be read
# after it. Compilers change nothing there: each step here is a call of its own in the interpreter, through pointers
# that no compiler sees through. A phase is one byte, so it is never half-written. What is left is the processor:
#
# - x86-64 makes stores visible in the order of the program, and does loads in that order. No fence is needed. (A string
#   instruction of memcpy may write its own bytes in any order, but later stores wait for it.)
# - 64-bit Arm keeps neither order, and Python has no fence. A lock of Python is none: what follows its acquire() and
#   what precedes its release() may both move in between, and pass each other there. sys_membarrier is one: the kernel
#   runs a full memory barrier (smp_mb) on the caller's processor when MEMBARRIER_CMD_GLOBAL_EXPEDITED begins and when
#   it ends (kernel/sched/membarrier.c, Linux 4.16 and newer). It leaves them out only where one processor is online,
#   which needs none. Its manual promises the same order to the threads of processes that have registered, as this one
#   does. The barrier pairs with the fences of the server.
#
# One order neither processor keeps by itself: client_asleep = 1, and then the look at the next phase. Where the look is
# too early, the server may not see the sleeper, and send no doorbell. That costs one short nap: the first poll ends
# after _FIRST_NAP, and the next look is good, because by then the store is visible: the kernel's scheduler, which put
# the thread to sleep, has a full barrier. Later naps are bounded all the same. In the other direction this client never
# looks at server_asleep. It always rings, and the locks that the kernel takes for the packet order the phase before it.
_MEMBARRIER = {"x86_64": 324, "aarch64": 283, "arm64": 283}  # number of the system call
_GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 2, 4


def _no_fence() -> None:
    """x86-64 needs none."""


def _fence_of(machine: str, always: bool = False) -> Callable[[], None]:
    """What stands between a slot's bytes and its phase. always: the system call, also where nothing is needed.

    Unimplemented: this machine has no fence that Python can use.
    """
    if machine.lower() in ("x86_64", "amd64") and not always:
        return _no_fence
    number = _MEMBARRIER.get(machine)
    if number is None or sys.maxsize < 2**32:
        raise Unimplemented(f"ring: got a machine of type {machine!r}, allowed x86-64 and 64-bit Arm")
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    arguments = ctypes.c_long(number), ctypes.c_long(_GLOBAL_EXPEDITED), ctypes.c_long(0), ctypes.c_long(0)
    if call(arguments[0], ctypes.c_long(_REGISTER_GLOBAL_EXPEDITED), *arguments[2:]) != 0:
        raise Unimplemented(f"ring: this machine needs the system call membarrier: {os.strerror(ctypes.get_errno())}")

    def fence() -> None:
        if call(*arguments) != 0:
            raise Internal(f"ring: membarrier: {os.strerror(ctypes.get_errno())}")

    return fence


@dataclass
class _Flight:
    """A call without an answer."""

    kind: str
    rows: RowInput
    begun: float  # time.monotonic()
    dropped: bool = True  # nobody waits for its answer


class Ring:
    """The ring of an arena: calls and answers in its memory, without a message. Made by Arena.ring, or Ring.open.

    Calls have the parameters, answers and errors of Client.top_k and Client.sample; no call is tried again. Their rows
    should lie in an arena, this one or another, also of a GPU (`arena=`): what a request holds itself must fit into a
    slot.

    An arena has one ring at most, for as long as its lease. The ring ends with the lease, with the server, or where the
    server cuts it off; then all calls in flight end with Unavailable, which has the server's text.

    Used by one thread at a time, in the process that opened it; else FailedPrecondition. Close it after use, or use it
    in a `with` statement.
    """

    def __init__(
        self,
        arena: Arena,
        memory: memoryview,
        shape: Tuple[int, int, int],
        options: Tuple[str, float, float],
        fence: Callable[[], None],
    ) -> None:
        """Not for callers: use Arena.ring."""
        self._arena = arena
        self._socket = arena._connection
        self._process = os.getpid()
        self._slots, self._entry_bytes, self._answer_bytes = shape
        priority, self._spin, self._deadline = options
        self._priority = _PRIORITIES.index(priority)
        self._fence = fence
        self._memory = memory  # keeps the mapping, so that it can be read whatever happens to the arena
        self._completions = _SUBMISSIONS + self._slots * self._entry_bytes
        self._submitted = 0
        self._completed = 0
        self._flights: Dict[int, _Flight] = {}  # by tag, which is the number of the submission
        self._ended: Optional[str] = None  # why
        self._rings_again = False  # after the first nap of a wait
        self._closed = False
        self._use = threading.RLock()  # what an interrupt leaves locked stays open to its thread

    @classmethod
    def open(
        cls,
        arena: Arena,
        *,
        slots: int = 64,
        entry_bytes: int = 4096,
        answer_bytes: int = 16384,
        priority: str = "interactive",
        spin: float = 100e-6,
        deadline: float = 30.0,
        timeout: float = 10.0,
    ) -> "Ring":
        """Opens the arena's ring, in bytes of it that empty() has not handed out: Ring.nbytes(...) of them.

        slots: calls in flight, 1 to 256.
        entry_bytes: room for a request with a head of 32 bytes, without rows that lie in an arena; a multiple of 64
            from 128 to 65536.
        answer_bytes: room for an answer with a head of 32 bytes, in the same way.
        priority: "interactive", or "batch" for work that may wait until no interactive work does.
        spin: seconds that a wait looks for an answer before it sleeps, 0 to 1. A thread that sleeps takes 5 to 50 us to
            wake; one that looks uses a core, and holds Python's lock.
        deadline: seconds until the server gives a call up; a call's own `deadline` overrides it.
        timeout: seconds until the server's answer to this.

        InvalidArgument: an arena of a GPU or a closed one, no such sizes, or they do not fit into the arena.
        FailedPrecondition: the arena has a ring. Unavailable: the lease has ended, the server knows no rings, or there
        was no answer in time. Unimplemented: a machine other than x86-64 and 64-bit Arm. Otherwise the server's error.
        """
        if not isinstance(arena, Arena):
            raise InvalidArgument(
                f"ring: got {type(arena).__name__}, allowed an Arena, of the host; rows may lie in a CudaArena too"
            )
        shape = _checked_shape(slots, entry_bytes, answer_bytes)
        _arrays.choice("priority", priority, _PRIORITIES)
        _arrays.number("spin", spin, Real, 0, 1, "seconds, 0 to 1")
        check_deadline(deadline)
        if _seconds("timeout", timeout) == 0:
            raise InvalidArgument("timeout: got 0 s, allowed above 0")
        if arena._process != os.getpid():
            raise _is_forked()
        fence = _fence_of(platform.machine())
        every = arena._open()
        with arena._lock:
            if arena._has_ring:
                raise FailedPrecondition("ring: got an arena that has one, allowed one ring for each lease")
            arena._has_ring = True
        nbytes = cls.nbytes(*shape)
        try:
            offset = arena._reserve(nbytes, f"ring: got {slots} slots in {nbytes} bytes")
        except InvalidArgument:
            arena._has_ring = False
            raise
        memory = every[offset : offset + nbytes].data
        ring = cls(arena, memory, shape, (priority, float(spin), float(deadline)), fence)
        refusal = ring._ask(offset, timeout)
        if refusal is not None:  # after any other error the server may have the ring
            arena._return(offset, nbytes)
            arena._has_ring = False
            raise refusal
        return ring

    @staticmethod
    def nbytes(slots: int = 64, entry_bytes: int = 4096, answer_bytes: int = 16384) -> int:
        """Bytes that a ring takes in its arena."""
        slots, entry_bytes, answer_bytes = _checked_shape(slots, entry_bytes, answer_bytes)
        return _SUBMISSIONS + slots * (entry_bytes + answer_bytes)

    @property
    def in_flight(self) -> int:
        """Calls that were submitted and whose answers wait() has not given."""
        return sum(not flight.dropped for flight in list(self._flights.values()))

    # Calls.

    def submit_top_k(self, logits: Optional[Array] = None, *, k: Ints, **params: Unpack[TopKParams]) -> int:
        """Begins Client.top_k, and returns its tag: 0, 1, 2 and so on for each call.

        `deadline`: seconds until the server gives the call up; None: the ring's. Unless submit raises, wait() gives the
        answer or the call's error. InvalidArgument: a parameter is wrong, or the request does not fit into a slot.
        ResourceExhausted: as many calls as slots are in flight; wait() makes room. Unavailable: the ring has ended.
        """
        return self._begin("top_k", logits, {**params, "k": k})

    def submit_sample(self, logits: Optional[Array] = None, **params: Unpack[SampleParams]) -> int:
        """Begins Client.sample; otherwise as submit_top_k."""
        return self._begin("sample", logits, params)

    def wait(self, timeout: Optional[float] = None) -> Tuple[int, Answer]:
        """The next answer that comes, of any call in flight: its tag, and the result or the error.

        An error of the call, a LogitdError, is returned. timeout: seconds; 0 only looks; None: no bound. Raised are:
        DeadlineExceeded: no answer came in time, and the calls stay in flight. Unavailable: the ring has ended, and all
        calls in flight with it. FailedPrecondition: no call is in flight.
        """
        end = None if timeout is None else time.monotonic() + _seconds("timeout", timeout)
        self._take_hold()
        try:
            return self._next(end)
        finally:
            self._use.release()

    def top_k(self, logits: Optional[Array] = None, *, k: Ints, **params: Unpack[TopKParams]) -> TopKResult:
        """Client.top_k, from submit to its answer. FailedPrecondition: other calls are in flight."""
        return self._call("top_k", logits, {**params, "k": k})  # type: ignore[no-any-return]

    def sample(self, logits: Optional[Array] = None, **params: Unpack[SampleParams]) -> SampleResult:
        """Client.sample, from submit to its answer. FailedPrecondition: other calls are in flight."""
        return self._call("sample", logits, params)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Ends the use of the ring from here. Answers of calls in flight are lost; the server may read their rows for a
        moment. The arena stays, and so do the ring's bytes in it. Safe to call again."""
        self._closed = True

    def __enter__(self) -> "Ring":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def _begin(self, kind: str, logits: Any, params: Mapping[str, Any]) -> int:
        tag, flight, _ = self._submit(kind, logits, params)
        flight.dropped = False
        return tag

    def _call(self, kind: str, logits: Any, params: Mapping[str, Any]) -> Any:
        self._check_ours()
        if self.in_flight > 0:
            raise FailedPrecondition("ring: got a call while others are in flight, allowed after wait() gave them all")
        _, flight, end = self._submit(kind, logits, params)
        try:
            flight.dropped = False
            self._take_hold()
            try:
                _, answer = self._next(end + _GRACE)
            finally:
                self._use.release()
        except BaseException as error:  # also KeyboardInterrupt: the next call does not get this one's answer
            flight.dropped = True
            if isinstance(error, DeadlineExceeded):
                raise DeadlineExceeded("ring: no answer came within the deadline", attempts=1) from None
            raise
        if isinstance(answer, LogitdError):
            raise answer
        return answer

    def _submit(self, kind: str, logits: Any, params: Mapping[str, Any]) -> Tuple[int, _Flight, float]:
        """The call's tag, itself, and its end as of time.monotonic(). It is dropped until its caller waits for it."""
        rows, row_params, deadline = row_request(kind, logits, params)
        if deadline is None:
            deadline = self._deadline
        check_deadline(deadline)
        message = encoded(kind, rows, row_params)
        room = self._entry_bytes - _ENTRY_BYTES
        if len(message) > room:
            raise InvalidArgument(
                f"ring: got a request of {len(message)} bytes, allowed {room} (entry_bytes); rows belong into an arena"
            )
        self._take_hold()
        try:
            self._check_open()
            flight = _Flight(kind, rows, time.monotonic())
            tag = self._publish(flight, message, max(1, int(deadline * 1e6)))
            return tag, flight, flight.begun + deadline
        finally:
            self._use.release()

    # The protocol.

    def _take_hold(self) -> None:
        """Only this thread uses the ring until _use is released."""
        self._check_ours()
        if not self._use.acquire(blocking=False):
            raise FailedPrecondition("ring: got a call while another thread uses it, allowed one thread at a time")

    def _check_ours(self) -> None:
        if self._process != os.getpid():
            raise _is_forked()
        if self._closed:
            raise _is_closed()

    def _check_open(self) -> None:
        if self._closed:
            raise _is_closed()
        if self._arena._bytes is None:
            self._end("its arena was closed")
        if self._ended is not None:
            raise self._over()

    def _end(self, why: str) -> None:
        """The ring has ended. Answers that are there can still be read."""
        if self._ended is None:
            self._ended = why

    def _over(self) -> Unavailable:
        return Unavailable(f"ring: it has ended: {self._ended}", attempts=1)

    def _publish(self, flight: _Flight, message: bytes, timeout_us: int) -> int:
        """Writes a submission. An exception of a signal's handler may end this anywhere: what counts is the phase."""
        at = self._submission_at(self._submitted)
        if self._memory[at] == self._phase(self._submitted):  # one that was interrupted after its phase
            self._submitted += 1
            at = self._submission_at(self._submitted)
        if self._submitted - self._completed >= self._slots:
            self._skip_dropped()
        if self._submitted - self._completed >= self._slots:
            raise ResourceExhausted(
                f"ring: got one call more than the {self._slots} in flight, allowed {self._slots} (slots); "
                "wait() makes room"
            )
        tag, memory = self._submitted, self._memory
        # The phase stays as it is until all else is written.
        _ENTRY.pack_into(memory, at + 1, _METHODS[flight.kind], self._priority, len(message), tag, timeout_us)
        memory[at + _ENTRY_BYTES : at + _ENTRY_BYTES + len(message)] = message
        self._flights[tag] = flight
        self._fence()
        memory[at] = self._phase(tag)
        self._submitted = tag + 1
        self._ring_doorbell()
        return tag

    def _submission_at(self, number: int) -> int:
        return _SUBMISSIONS + number % self._slots * self._entry_bytes

    def _phase(self, number: int) -> int:
        return 1 + number // self._slots % 2

    def _ring_doorbell(self) -> None:
        try:
            self._socket.send(b"\0", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            # The socket is full of doorbells, so the server will not sleep before it has read one. But this look at the
            # socket may have been ahead of the phase, as no lock stands between: who waits rings once more.
            self._rings_again = True
        except OSError:
            self._hear()
            self._end("the connection is broken")
            raise self._over() from None

    def _next(self, end: Optional[float]) -> Tuple[int, Answer]:
        """The next answer that somebody waits for. end: time.monotonic()."""
        if self.in_flight == 0:
            self._check_open()
            raise FailedPrecondition("ring: got a wait while no call is in flight, allowed after a submit")
        try:
            while True:
                if not self._ready():
                    self._wait_ready(end)
                tag, wanted, answer = self._read()
                if wanted:
                    return tag, answer
        except Unavailable:  # the end of all calls in flight; those that were answered before it came first
            self._flights.clear()
            raise

    def _skip_dropped(self) -> None:
        """Reads answers that nobody waits for, as far as they are next."""
        while self._submitted > self._completed and self._ready():
            tag = _COMPLETION.unpack_from(self._memory, self._completion_at())[4]
            if tag in self._flights and not self._flights[tag].dropped:
                return
            self._read()

    def _completion_at(self) -> int:
        return self._completions + self._completed % self._slots * self._answer_bytes

    def _ready(self) -> bool:
        """Whether the next completion is there, and may be read."""
        if self._memory[self._completion_at()] != self._phase(self._completed):
            return False
        self._fence()
        return True

    def _read(self) -> Tuple[int, bool, Answer]:
        """The next completion, which is there, and whether somebody waits for it. The slot is the server's again."""
        at = self._completion_at()
        _, code, size, retry_ms, tag, _ = _COMPLETION.unpack_from(self._memory, at)
        flight = self._flights.get(tag)
        if flight is None or size > self._answer_bytes - _COMPLETION.size:
            self._end("got a completion that is not of this protocol")
            raise self._over()
        # A copy, which the answer's arrays are views of.
        data = bytes(self._memory[at + _COMPLETION.size : at + _COMPLETION.size + size])
        seconds = time.monotonic() - flight.begun
        answer: Answer
        if code != 0:
            trailers = (("grpc-retry-pushback-ms", str(retry_ms)),) if retry_ms else ()
            known = _CODES.get(code, grpc.StatusCode.UNKNOWN)
            text = data.decode(errors="replace")
            answer = reply_of(known, text, trailers, seconds).error or Internal(text, attempts=1)
        else:
            try:
                answer = decoded(flight.kind, Reply(data=data, seconds=seconds), flight.rows)
            except LogitdError as strange:
                answer = strange
        # In this order, an interrupt between two of them loses this answer, and nothing else.
        wanted, flight.dropped = not flight.dropped, True
        self._completed += 1
        del self._flights[tag]
        return tag, wanted, answer

    def _wait_ready(self, end: Optional[float]) -> None:
        """Until the next completion is there. Raises the end of the ring, or DeadlineExceeded."""
        self._check_open()
        begun = time.monotonic()
        spin_end = begun + self._spin if end is None else min(end, begun + self._spin)
        memory, at, phase = self._memory, self._completion_at(), self._phase(self._completed)
        while time.monotonic() < spin_end:
            for _ in range(_LOOKS):
                if memory[at] == phase:
                    return self._fence()
            os.sched_yield()
        nap = _FIRST_NAP
        memory[_CLIENT_ASLEEP] = 1
        try:
            while True:
                self._fence()
                if self._ready():
                    return
                self._check_open()
                left = nap if end is None else min(nap, end - time.monotonic())
                if left <= 0:
                    raise DeadlineExceeded("ring: no answer came in time; the calls stay in flight", attempts=1)
                if self._heard(left):
                    self._hear()
                    if self._ready():  # the last answers may be there although the ring has ended
                        return
                if self._rings_again:
                    self._rings_again = False
                    self._ring_doorbell()
                nap = min(2 * nap, _LONGEST_NAP)
        finally:
            memory[_CLIENT_ASLEEP] = 0

    def _heard(self, seconds: float) -> bool:
        """Whether the connection has something to read within the time."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except ValueError:
            return True  # it was closed here, as a read finds out
        return bool(poll.poll(math.ceil(seconds * 1000)))

    def _hear(self) -> None:
        """Reads doorbells, and how the ring ended."""
        reset = False
        while self._ended is None:
            data = b""
            try:
                data = self._socket.recv(_ANSWER.size + _MAX_TEXT, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:
                if not reset:  # said once, before what the server sent, where it left a doorbell unread
                    reset = True
                    continue
            except OSError:
                pass  # closed
            if len(data) == 1:
                continue
            answer = _parsed(data)
            if self._arena._bytes is None:
                self._end("its arena was closed")
            elif answer is not None:
                self._end(answer[1])
            else:
                self._end("the server closed the connection")

    def _ask(self, offset: int, timeout: float) -> Optional[LogitdError]:
        """Asks the server for the ring at `offset` of the lease. The server's refusal; None: the ring is open."""
        self._memory[:] = bytes(len(self._memory))
        ask = _ASK.pack(_MAGIC, _VERSION, self._slots, self._entry_bytes, self._answer_bytes, 0, offset)
        try:
            self._socket.send(ask, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            if not self._heard(timeout):
                raise Unavailable(f"ring: no answer in {timeout:g} s", attempts=1)
            data = self._socket.recv(_ANSWER.size + _MAX_TEXT, socket.MSG_DONTWAIT)
        except OSError as error:
            raise Unavailable(f"ring: cannot ask: {error.strerror}", attempts=1) from error
        if not data:
            raise Unavailable("ring: the lease has ended, or the server knows no rings", attempts=1)
        answer = _parsed(data)
        if answer is None:
            raise Internal(f"ring: got an answer of {len(data)} bytes that is not of this protocol", attempts=1)
        code, text = answer
        return None if code == 0 else error_of(_CODES.get(code, grpc.StatusCode.UNKNOWN), text, attempts=1)


def _parsed(packet: bytes) -> Optional[Tuple[int, str]]:
    """Code and text of a packet from the server; None: it is not of this protocol."""
    if len(packet) < _ANSWER.size:
        return None
    magic, _, code, text_bytes = _ANSWER.unpack_from(packet)
    text = packet[_ANSWER.size :]
    return (code, text.decode(errors="replace")) if magic == _MAGIC and text_bytes == len(text) else None


def _checked_shape(slots: int, entry_bytes: int, answer_bytes: int) -> Tuple[int, int, int]:
    _arrays.whole("slots", slots, 1, _MAX_SLOTS)
    for name, size in (("entry_bytes", entry_bytes), ("answer_bytes", answer_bytes)):
        low, high = _SLOT_BYTES
        if _arrays.whole(name, size, low, high) % _ALIGNMENT:
            raise InvalidArgument(f"{name}: got {size}, allowed a multiple of {_ALIGNMENT} from {low} to {high}")
    return int(slots), int(entry_bytes), int(answer_bytes)


def _seconds(name: str, value: float) -> float:
    return float(_arrays.number(name, value, Real, 0, 365 * 24 * 3600, "seconds, 0 to a year"))


def _is_closed() -> FailedPrecondition:
    return FailedPrecondition("ring: got a call after close(), allowed before it")


def _is_forked() -> FailedPrecondition:
    return FailedPrecondition("ring: got a call in a forked child, allowed in the process that has the lease")

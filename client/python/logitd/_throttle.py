"""Keeps back calls that the server would refuse.

Source: Beyer, Jones, Petoff, Murphy (editors), "Site Reliability Engineering" (2016), chapter 21, client-side throttling.
"""

from __future__ import annotations

import math
import random
import threading
import time
from typing import Optional

from logitd.errors import Cancelled, DeadlineExceeded, LogitdError, ResourceExhausted, Unavailable

SENT = 1.5
"""About this many calls are sent for each one that the server takes."""
MEMORY = 1.0
"""A call counts for about this many seconds."""
FREE = 8
"""Up to this many refused calls, all calls are sent."""


class Throttle:
    """The calls of one method. Thread-safe.

    A refused call costs both sides time that is lost for the calls that are done. So where the server refuses most
    calls, some are refused here. Those that are sent show when it takes more again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = 0.0  # calls, older ones count less
        self._refused = 0.0  # by the server or here
        self._counted = 0.0  # when they were right
        self._retry_delay: Optional[float] = None  # the server's last

    def ask(self, now: Optional[float] = None) -> Optional[ResourceExhausted]:
        """None: send the call. Else what it ends with instead."""
        with self._lock:
            self._forget(time.monotonic() if now is None else now)
            total = self._taken + self._refused
            if random.uniform(0, total + 1) >= total - SENT * self._taken - FREE:
                return None
            self._refused += 1
            return ResourceExhausted(
                f"not sent: of the last {round(total)} calls the server took {round(self._taken)}, and about {SENT} are "
                "sent for each that it takes",
                retry_delay=self._retry_delay,
            )

    def ended(self, error: Optional[LogitdError], now: Optional[float] = None) -> None:
        """A sent call has ended. ResourceExhausted with a delay: it was refused, and may be sent again later. Where
        perhaps the server never saw the call, it counts as nothing. All else was taken."""
        if isinstance(error, (Cancelled, DeadlineExceeded, Unavailable)):
            return
        refused = isinstance(error, ResourceExhausted) and error.retry_delay is not None
        with self._lock:
            self._forget(time.monotonic() if now is None else now)
            if refused and error is not None:
                self._refused += 1
                self._retry_delay = error.retry_delay
            else:
                self._taken += 1

    def _forget(self, now: float) -> None:
        if now > self._counted:
            left = math.exp((self._counted - now) / MEMORY)
            self._taken *= left
            self._refused *= left
            self._counted = now

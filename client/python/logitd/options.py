"""How a client connects, waits, tries again and cuts."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Callable, List, Optional, Tuple, Union

import grpc

from logitd import _arrays
from logitd.errors import InvalidArgument

Path = Union[str, "os.PathLike[str]"]
Metadata = Tuple[Tuple[str, str], ...]


_MAX_PATH = 107  # bytes, of a Unix socket
MAX_REFUSED = 4  # attempts that the server refuses for its load, where Retry does not say


@dataclass(frozen=True)
class Retry:
    """UNAVAILABLE and RESOURCE_EXHAUSTED are tried again: after the delay that the server asks for, else after a
    backoff that doubles, with jitter; never past the deadline. Seconds."""

    max_attempts: Optional[int] = None
    """Attempts of one call, the first included; 1 or more. None: a server that is away (UNAVAILABLE) is tried until the deadline
    allows no more, so that a call survives a restart; a call that is refused (RESOURCE_EXHAUSTED) is tried 4 times."""
    initial_backoff: float = 0.02
    max_backoff: float = 1.0


@dataclass(frozen=True)
class TLS:
    """TLS to the server. PEM files, read when the client is made."""

    ca: Optional[Path] = None
    """Certificates that the server's must come from; None: the roots that gRPC ships."""
    cert: Optional[Path] = None
    """The client's own certificate chain, where the server asks for one; with `key`."""
    key: Optional[Path] = None
    server_name: Optional[str] = None
    """The name that the server's certificate must have; None: the host of the address."""


@dataclass(frozen=True)
class Options:
    """What Client and AsyncClient take; Client has the meaning."""

    address: str
    round_robin: bool = False
    deadline: float = 30.0
    retry: Retry = field(default_factory=Retry)
    priority: str = "interactive"
    tls: Optional[TLS] = None
    token: Union[str, Callable[[], str], None] = None
    token_over_plaintext: bool = False
    state_sizes: bool = True
    throttle: bool = True
    max_message_bytes: int = 0
    attention_message_bytes: int = 8 << 20
    score_message_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        if not _is_address(self.address):
            raise InvalidArgument(
                f"address: got {self.address!r}, allowed HOST:PORT, unix:PATH, ipv4:A:PORT,B:PORT, "
                "ipv6:[A]:PORT,[B]:PORT or dns:///HOST:PORT"
            )
        check_deadline(self.deadline)
        self._check_kinds()
        if self.tls is not None and (self.tls.cert is None) != (self.tls.key is None):
            raise InvalidArgument("tls: got only one of cert and key, allowed both or none")
        if (
            self.token is not None
            and self.tls is None
            and not self.token_over_plaintext
            and not _is_local(self.address)
        ):
            raise InvalidArgument(
                f"token: got one without tls for {self.address!r}, where others on the network could "
                "read it; allowed with tls, on this machine, or with token_over_plaintext=True"
            )

    def _check_kinds(self) -> None:
        for name in ("round_robin", "token_over_plaintext", "state_sizes", "throttle"):
            _arrays.instance(name, getattr(self, name), (bool,), "True or False")
        _arrays.whole("max_message_bytes", self.max_message_bytes, 0)
        for name in ("attention_message_bytes", "score_message_bytes"):
            _arrays.whole(name, getattr(self, name), 1)
        _arrays.choice("priority", self.priority, ("interactive", "batch"))
        _arrays.instance("retry", self.retry, (Retry,), "a logitd.Retry")
        if self.retry.max_attempts is not None:
            _arrays.number("retry.max_attempts", self.retry.max_attempts, Integral, 1, 2**31, "1 or more")
        for name in ("initial_backoff", "max_backoff"):
            seconds = getattr(self.retry, name)
            _arrays.number(f"retry.{name}", seconds, Real, 0.001, 24 * 3600, "0.001 s to a day")
        _arrays.instance("tls", self.tls, (TLS, type(None)), "a logitd.TLS, or None for plaintext")
        for name in ("ca", "cert", "key", "server_name"):
            path = (str, type(None)) if name == "server_name" else (str, os.PathLike, type(None))
            _arrays.instance(f"tls.{name}", getattr(self.tls, name, None), path, "a string, or None")
        if self.token is not None and not isinstance(self.token, str) and not callable(self.token):
            raise InvalidArgument(f"token: got type {type(self.token).__name__}, allowed a string, or a function of one")

    def credentials(self) -> Optional[Any]:
        """The channel's credentials; None: plaintext. InvalidArgument: a file that cannot be read."""
        if self.tls is None:
            return None
        return grpc.ssl_channel_credentials(
            _read("tls.ca", self.tls.ca), _read("tls.key", self.tls.key), _read("tls.cert", self.tls.cert)
        )

    def channel_arguments(self) -> List[Tuple[str, Any]]:
        """gRPC's channel arguments. They are those of the C++ client."""
        arguments: List[Tuple[str, Any]] = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.enable_retries", 0),  # the client's own retries know the server's delay and the deadline
            ("grpc.use_local_subchannel_pool", 1),  # a client is a connection
            ("grpc.enable_http_proxy", 0),  # tensors do not go through a web proxy
            # Between two tries to connect, calls fail at once. These bound how long a server that has come back stays
            # unnoticed. The "minimum" is how long one try may take.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 1000),
            ("grpc.max_reconnect_backoff_ms", 250),
            # Keepalive also bounds how long a peer that stopped reading holds a call.
            ("grpc.keepalive_time_ms", 60000),
            ("grpc.keepalive_timeout_ms", 20000),
        ]
        if self.round_robin:
            # The empty name asks for the health of the whole server.
            config = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
            arguments.append(("grpc.service_config", json.dumps(config)))
        if self.tls is not None and self.tls.server_name is not None:
            arguments.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return arguments

    def metadata(self, method: str, message_bytes: Optional[int] = None) -> Metadata:
        """What the server is told about a call besides its message."""
        pairs: List[Tuple[str, str]] = []
        if self.priority == "batch":
            pairs.append(("logitd-priority", "batch"))
        if self.state_sizes and message_bytes is not None:
            pairs.append(("logitd-payload-bytes", str(message_bytes)))
        if self.token is not None and not method.startswith("/grpc.health."):  # probes need none
            token = self.token() if callable(self.token) else self.token
            if not isinstance(token, str):
                raise InvalidArgument(f"token: got type {type(token).__name__} from the function, allowed a string")
            if not re.fullmatch(r"[!-~]+", token):  # the text must not repeat it
                raise InvalidArgument(
                    f"token: got {len(token)} characters, allowed 1 or more, printable, without spaces"
                )
            pairs.append(("authorization", f"Bearer {token}"))
        return tuple(pairs)


def check_deadline(seconds: float) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise InvalidArgument(f"deadline: got {seconds!r:.80}, allowed a number of seconds, above 0 and up to a year")
    if not 0 < seconds <= 365 * 24 * 3600:
        raise InvalidArgument(f"deadline: got {seconds} s, allowed above 0 and up to a year")


def _read(name: str, path: Optional[Path]) -> Optional[bytes]:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise InvalidArgument(f"{name}: cannot read {os.fspath(path)!r}: {error.strerror}") from error
    if b"-----BEGIN " not in data:
        raise InvalidArgument(f"{name}: got {os.fspath(path)!r}, which is not PEM, allowed a PEM file")
    return data


def _servers(address: str) -> List[str]:
    """HOST:PORT of every server."""
    for scheme in ("ipv4:", "ipv6:"):
        if address.startswith(scheme):
            return address[len(scheme) :].split(",")
    return [address[len("dns:///") :] if address.startswith("dns:///") else address]


def _is_address(address: Any) -> bool:
    if not isinstance(address, str):
        return False
    if address.startswith("unix:"):
        path = address[len("unix:") :]
        return 0 < len(os.fsencode(path)) <= _MAX_PATH and "\0" not in path
    version = {"ipv4:": 4, "ipv6:": 6}.get(address[:5])
    return all(_is_server(server, version) for server in _servers(address))


def _is_server(server: str, version: Optional[int]) -> bool:
    """HOST:PORT, or [IPV6]:PORT; with a version, of the IP that HOST must be."""
    host, _, port = server.rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= 65535):
        return False
    bracketed = host.startswith("[") and host.endswith("]")
    if version is None and not bracketed:
        return re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?", host) is not None
    try:
        found = ipaddress.ip_address(host[1:-1] if bracketed else host).version
    except ValueError:
        return False
    return found == (6 if bracketed else 4) and version in (None, found)


def _is_local(address: str) -> bool:
    if address.startswith("unix:"):
        return True
    hosts = [server.rpartition(":")[0].strip("[]") for server in _servers(address)]
    try:
        return all(host == "localhost" or ipaddress.ip_address(host).is_loopback for host in hosts)
    except ValueError:
        return False

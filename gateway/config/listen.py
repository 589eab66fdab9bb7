"""Addresses to listen on: for clients, for operators, for Prometheus. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from gateway.config.addresses import AddressError, host_and_port, is_host, is_loopback, is_wildcard, parse_port, shown
from gateway.config.parse import Key, Problem

AUTO, OFF, UNIX = "auto", "off", "unix:"
# The configuration keys of listeners, and their keywords beside host:port. "auto" is resolved later, to a free address.
KEYWORDS: Final[Mapping[str, Collection[str]]] = {"listen": (), "admin_listen": (OFF, AUTO), "metrics_listen": (OFF,)}
_MAX_SOCKET_PATH = 100  # bytes; the kernel takes 107


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """An address to listen on: host and port, or the path of a Unix socket."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"{UNIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def overlaps(self, other: ListenAddress) -> bool:
        """True if only one of the two can be bound."""
        if self.path or other.path:
            return self.path == other.path
        same = _same_host(self.host, other.host) or is_wildcard(self.host) or is_wildcard(other.host)
        return same and self.port == other.port != 0

    def is_at(self, base_url: str) -> bool:
        """True if the URL certainly leads here."""
        host, port = host_and_port(base_url)
        if self.path or port != self.port:
            return False
        if is_wildcard(self.host) or is_wildcard(host):  # a connection to 0.0.0.0 goes to 127.0.0.1
            return (is_loopback(self.host) or is_wildcard(self.host)) and (is_loopback(host) or is_wildcard(host))
        return _same_host(self.host, host)


def _same_host(one: str, two: str) -> bool:
    names = {one.lower(), two.lower()}
    return len(names) == 1 or (names > {"localhost"} and all(map(is_loopback, names)))


def parse_listen(name: str, text: str) -> ListenAddress | None:
    """The value of a listener's key: `host:port` (an IPv6 host in brackets), for operators also `unix:/path`; None: a keyword.

    Raises AddressError.
    """
    if text in KEYWORDS[name]:
        return None
    path, unix = text.removeprefix(UNIX), name == "admin_listen"
    if unix and path != text:
        if path.startswith("/") and len(path.encode()) <= _MAX_SOCKET_PATH and "\0" not in path:
            return ListenAddress("", 0, path)
        raise AddressError(f"{shown(text)} is not {UNIX} and an absolute path of at most {_MAX_SOCKET_PATH} bytes")
    host, _, digits = text.rpartition(":")
    port = parse_port(digits)
    if port is None or not is_host(host):
        others = "".join(f", nor {word!r}" for word in (*((f"{UNIX}/path",) if unix else ()), *KEYWORDS[name]))
        raise AddressError(f"{shown(text)} is not host:port, for example 0.0.0.0:8000{others}")
    return ListenAddress(host.strip("[]"), port)


def listener_problems(texts: Mapping[str, str], *, has_admin_key: bool, replicas: Mapping[Key, str]) -> Iterator[Problem]:
    """Problems of listeners' values: of each value, between them, and with replicas (URLs by key)."""
    endpoints: dict[str, ListenAddress] = {}
    for name, text in texts.items():
        try:
            endpoint = parse_listen(name, text)
        except AddressError as error:
            yield Problem((name,), str(error))
            continue
        for other in (other for other, taken in endpoints.items() if endpoint and endpoint.overlaps(taken)):
            yield Problem((name,), f"{shown(text)} is the address of {other} already; give each its own port")
        if endpoint:
            endpoints[name] = endpoint
    admin = endpoints.get("admin_listen")
    if admin and not (has_admin_key or admin.path or is_loopback(admin.host)):
        wanted = "set WARMROUTE_ADMIN_KEY, or listen on a loopback address or a Unix socket"
        yield Problem(("admin_listen",), f"{shown(str(admin))} can be reached from other hosts: {wanted}")
    for key, url in replicas.items():
        for name in (name for name, endpoint in endpoints.items() if endpoint.is_at(url)):
            yield Problem(key, f"{shown(url)} is this gateway itself ({name}: {endpoints[name]})")

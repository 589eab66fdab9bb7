"""Options of connections to a replica, from the configuration and the table of engines."""

from __future__ import annotations

from typing import Final

from gateway.config.schema import KeyConfig, TlsConfig

Endpoints = frozenset[tuple[str, str]]
"""(method, path) of each endpoint."""


class ConnectionOptions:
    """key: the gateway's key for the replica; None: clients' keys are sent. tls: for https URLs. server_name: in its
    certificate, "" for the URL's host. fragile: the only endpoints of a server that crashes at anything but a complete,
    well-formed request to one of them, and that serves one at a time (`fragile.py`); None for other servers. addresses: of the
    URL's host; (): they are looked up.
    """

    __slots__ = ("addresses", "fragile", "key", "tls")

    def __init__(
        self,
        key: KeyConfig | None = None,
        tls: TlsConfig | None = None,
        fragile: Endpoints | None = None,
        addresses: tuple[str, ...] = (),
    ) -> None:
        self.key = key
        self.tls = tls
        self.fragile = fragile
        self.addresses = addresses

    @property
    def server_name(self) -> str:
        return self.tls.server_name if self.tls else ""

    @property
    def _all(self) -> tuple[object, ...]:
        return self.key, self.tls, self.fragile, self.addresses

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConnectionOptions) and self._all == other._all

    def __hash__(self) -> int:
        return hash(self._all)

    def __repr__(self) -> str:
        return f"ConnectionOptions{self._all!r}"


DEFAULT_OPTIONS: Final = ConnectionOptions()

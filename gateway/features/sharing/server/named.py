"""redis-py's connections, with host names resolved by our own resolver.

redis-py has them resolved by the event loop, whose threads a look-up blocks while no name server answers: it cannot be
cancelled, and the process cannot end before it. And it has one limit for all addresses of a name: if the first one drops
packets, the others are never tried. Here each has a limit of its own, the one that failed last comes last, and a new look-up
is made when all have failed. One that is connected to and then does not do what it should, such as a replica that takes no
writes, has failed as well.

`_connect` and `_connection_arguments` are not part of redis-py's interface (8.1): `resolving` looks whether they are there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from gateway.upstream.dialer import is_ip_address
from gateway.upstream.resolver import AddressSource

OURS: Final = "_connect", "_connection_arguments"
RENEWAL_S: Final = 0.5  # for a new look-up after connecting has failed
MAX_FAILED: Final = 64


class Names:
    """The addresses of a server's names, and which of them have failed."""

    def __init__(self, resolver: AddressSource) -> None:
        self._resolver = resolver
        self._failed: dict[str, int] = {}  # and the number of its last failure
        self._failures = 0
        self._connected: set[str] = set()

    async def addresses(self, host: str) -> list[str]:
        """Those that failed come last, the latest one at the end. Raises OSError."""
        if is_ip_address(host):
            return [host]
        return sorted(await self._resolver.addresses(host), key=lambda address: self._failed.get(address, 0))

    async def new(self, host: str, known: list[str]) -> list[str]:
        """Those that a new look-up finds; none if it fails."""
        if is_ip_address(host):
            return []
        with contextlib.suppress(OSError):
            return [each for each in await self._resolver.renewed(host) if each not in known]
        return []

    def connected(self, address: str) -> None:
        if len(self._connected) < MAX_FAILED:
            self._connected.add(address)

    def failed(self, address: str) -> None:
        """It cannot be connected to, or does not do what it should."""
        self._failed.pop(address, None)
        self._failures += 1
        self._failed[address] = self._failures
        if len(self._failed) > MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    def all_failed(self) -> None:
        """Those that were connected to since the last time do not do what they should."""
        connected, self._connected = self._connected, set()
        for address in connected:
            self.failed(address)

    def __repr__(self) -> str:
        return f"<Names, {len(self._failed)} addresses failed>"


class Resolving:
    """Goes before one of redis-py's kinds of TCP connections, and takes `names` beside its arguments."""

    host: str
    socket_connect_timeout: float

    def __init__(self, *, names: Names, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._names = names
        self._address = ""

    def _connection_arguments(self) -> Mapping[str, Any]:
        arguments: dict[str, Any] = dict(super()._connection_arguments())  # type: ignore[misc]
        if arguments.get("ssl"):
            arguments["server_hostname"] = self.host
        return {**arguments, "host": self._address or self.host}

    async def _connect(self) -> None:
        known: list[str] = []
        try:
            async with asyncio.timeout(self.socket_connect_timeout):
                known = await self._names.addresses(self.host)
            await self._connect_to(known)
        except (OSError, TimeoutError):
            if not (new := await self._new(known)):
                raise
            await self._connect_to(new)

    async def _new(self, known: list[str]) -> list[str]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RENEWAL_S):
                return await self._names.new(self.host, known)
        return []

    async def _connect_to(self, addresses: list[str]) -> None:
        """To the first one that takes it."""
        limit_s = self.socket_connect_timeout / min(2, len(addresses))
        for left, self._address in enumerate(addresses, 1 - len(addresses)):
            try:
                async with asyncio.timeout(limit_s):
                    await super()._connect()  # type: ignore[misc]
            except (OSError, TimeoutError):
                self._names.failed(self._address)
                if not left:
                    raise
            else:
                self._names.connected(self._address)
                return


@cache
def resolving(kind: type[Any]) -> type[Any]:
    """A subclass of one of redis-py's kinds of TCP connections."""
    if missing := [name for name in OURS if not callable(getattr(kind, name, None))]:
        raise RuntimeError(f"this release of redis-py has no {kind.__name__}.{missing[0]}: pip install 'redis>=8.1,<9'")
    return type(f"Resolving{kind.__name__}", (Resolving, kind), {})

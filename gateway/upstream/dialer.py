"""New connections to one replica.

A name may stand for several addresses. They are tried in their order, but those that failed last time come last; each gets a
head start of STAGGER_S before the next is tried beside it, and the first that is connected wins (as RFC 8305 has it). Last in
that row is a new look-up: the replica may have moved, so that what the resolver knows is out of date.

A dialer may be guarded: then it connects to no link-local address and no metadata service of a cloud. The name is resolved
for each connection, so a name that was harmless when it was checked may stand for such an address later (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import re
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from gateway.config.addresses import is_link_local
from gateway.errors import OUT_OF_RESOURCES, REFUSED, UNREACHABLE, GatewayError, ReplicaFailure, out_of_resources
from gateway.upstream.connection import Connection
from gateway.upstream.resolver import Resolver

STAGGER_S: Final = 0.25
RENEWAL_S: Final = 0.5  # for a new look-up, after connecting has failed: the request may want to go to another replica

_OUR_OWN: Final = OUT_OF_RESOURCES | {errno.EADDRNOTAVAIL}  # no local port is left
_ERRNO: Final = re.compile(r"\[Errno (\d+)\]")

Dial = Callable[[], Awaitable[Connection]]


class _NothingNew(Exception):
    """The new look-up found the addresses that were known before."""


class Dialer:
    """See the top of this file. An IP address is never looked up."""

    def __init__(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        resolver: Resolver,
        guarded: Callable[[], bool] = lambda: False,
    ) -> None:
        """guarded: whether it is, at the moment."""
        self._guarded = guarded
        self.host = host
        self.port = port
        self._tls = tls
        self._resolver = resolver
        self._literal = _is_ip_address(host)
        self._bad: frozenset[str] = frozenset()  # addresses that could not be connected to when they were last tried

    async def connect(self, timeout_s: float) -> Connection:
        """Raises ReplicaFailure, or GatewayError where the gateway itself is out of resources."""
        try:
            async with asyncio.timeout(timeout_s):
                return await (self._dial(self.host) if self._literal else self._dial_name())
        except TimeoutError as late:
            if self._literal or self._resolver.knows(self.host):
                raise ReplicaFailure(UNREACHABLE, f"no connection within {timeout_s:g} s") from late
            text = f"name does not resolve: {self.host}: no answer within {timeout_s:g} s"
            raise ReplicaFailure(UNREACHABLE, text) from late
        except (OSError, UnicodeError) as error:
            raise failure_of(error) from error

    async def _dial(self, address: str) -> Connection:
        """To one IP address. Raises OSError."""
        if self._guarded() and is_link_local(address):
            raise PermissionError(f"{address} is link-local or a cloud's metadata service (allow_link_local)")
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            _, connection = await loop.create_connection(lambda: Connection(loop), address, self.port)
            if self._tls:
                await connection.secure(self._tls, self.host)
        except (OSError, asyncio.CancelledError) as error:
            if isinstance(error, OSError) or loop.time() - begun >= STAGGER_S:  # it was given up: another was faster
                self._bad |= {address}
            raise
        self._bad -= {address}
        return connection

    async def _dial_name(self) -> Connection:
        known = await self._resolver.addresses(self.host)
        self._bad &= frozenset(known)
        dials: list[Dial] = [self._dialing(address) for address in sorted(known, key=self._bad.__contains__)]

        async def dial_new_address() -> Connection:
            return await self._dial_new_address(known)

        return await race([*dials, dial_new_address])

    def _dialing(self, address: str) -> Dial:
        async def dial() -> Connection:
            return await self._dial(address)

        return dial

    async def _dial_new_address(self, known: Sequence[str]) -> Connection:
        """To what the name stands for now, if that was not known. Raises OSError or _NothingNew."""
        try:
            async with asyncio.timeout(RENEWAL_S):
                now = await self._resolver.renewed(self.host)
        except TimeoutError as late:
            raise _NothingNew from late
        if not (new := [self._dialing(address) for address in now if address not in known]):
            raise _NothingNew
        return await race(new)

    def __repr__(self) -> str:
        return f"<Dialer of {self.host}:{self.port}>"


async def race(dials: Sequence[Dial]) -> Connection:
    """The connection of the first that succeeds. Each starts when all before it have failed, or after STAGGER_S; all others
    are given up in the end. Raises OSError: what all of them raised.
    """
    waiting, running = list(dials), set[asyncio.Future[Connection]]()
    errors: list[BaseException] = []
    try:
        while waiting or running:
            if waiting:
                running.add(asyncio.ensure_future(waiting.pop(0)()))
            timeout_s = STAGGER_S if waiting else None
            done, running = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for dial in done:
                if (error := dial.exception()) is None:
                    running |= done - {dial}
                    return dial.result()
                errors.append(error)
    finally:
        for dial in running:
            dial.add_done_callback(_give_up)
            dial.cancel()
    raise _joined(errors)


def _give_up(dial: asyncio.Future[Connection]) -> None:
    """Nobody waits for this connection any more."""
    if not dial.cancelled() and dial.exception() is None:
        dial.result().abort()


def _joined(errors: Sequence[BaseException]) -> BaseException:
    """One error that says what all of them say, but for those that say nothing."""
    telling = [error for error in errors if not isinstance(error, _NothingNew)]
    if len(telling) == 1:
        return telling[0]
    return OSError("; ".join(str(error) or type(error).__name__ for error in telling))


def _is_ip_address(host: str) -> bool:
    """One with a zone (fe80::1%eth0) is left to the resolver, which knows the zones' numbers."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return "%" not in host


def failure_of(error: OSError | UnicodeError) -> ReplicaFailure | GatewayError:
    """Why there is no connection. Where several addresses were tried, the error has the text of all their errors."""
    text = str(error) or type(error).__name__
    number = getattr(error, "errno", None)
    numbers = {number} if number else {int(found) for found in _ERRNO.findall(text)}
    if numbers & _OUR_OWN:
        return out_of_resources(text)
    return ReplicaFailure(REFUSED if numbers == {errno.ECONNREFUSED} else UNREACHABLE, text)

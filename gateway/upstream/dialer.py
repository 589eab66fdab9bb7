"""Makes new connections to one replica.

A name may have several addresses. They are tried in order, with recently failed ones at the end; each gets a head start of
STAGGER_S before the next is tried in parallel, and the first connection wins (RFC 8305). The last step is a new look-up: the
replica may have moved, so that the resolver's addresses are stale.

A guarded dialer connects to no link-local address and no cloud metadata service. The name is resolved for each connection,
because a name that was harmless when it was checked may resolve to such an address later (DNS rebinding).
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
from gateway.sockets import end_with_peer
from gateway.upstream.connection import Connection
from gateway.upstream.resolver import AddressSource

STAGGER_S: Final = 0.25
REPLICA_LOST_S: Final = 60  # a replica whose system has confirmed nothing for this long is gone: another one may answer
RENEWAL_S: Final = 0.5  # for a new look-up after connecting has failed: the request may be retried on another replica

_LOCAL_ERRORS: Final = OUT_OF_RESOURCES | {errno.EADDRNOTAVAIL}  # no free local port
_ERRNO: Final = re.compile(r"\[Errno (\d+)\]")

Dial = Callable[[], Awaitable[Connection]]


class _NoNewAddress(Exception):
    """The new look-up found no additional address."""


class Dialer:
    """Makes connections to one replica (see the module). IP addresses are not looked up."""

    def __init__(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        resolver: AddressSource,
        guarded: Callable[[], bool] = lambda: False,
        server_name: str = "",
        *,
        one_by_one: bool = False,
    ) -> None:
        """guarded: returns True if the dialer is guarded at present. server_name: in the server's certificate, "" for the host.
        one_by_one: an address is tried only after all earlier ones failed.
        """
        self._guarded = guarded
        self._server_name = server_name or host
        self._stagger_s = None if one_by_one else STAGGER_S
        self.host = host
        self.port = port
        self._tls = tls
        self._resolver = resolver
        self._literal = is_ip_address(host)
        self._failed: frozenset[str] = frozenset()  # addresses whose last connection attempt failed

    async def connect(self, timeout_s: float) -> Connection:
        """Connect. Raises ReplicaFailure, or GatewayError if the gateway itself is out of resources."""
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
        """Connect to one IP address. Raises OSError."""
        if self._guarded() and is_link_local(address):
            raise PermissionError(f"{address} is link-local or a cloud's metadata service: only the configuration may name it")
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            transport, connection = await loop.create_connection(lambda: Connection(loop), address, self.port)
            sock = transport.get_extra_info("socket")
            if sock is not None:  # of uvloop: closed already
                end_with_peer(sock, REPLICA_LOST_S)
            if self._tls:
                await connection.secure(self._tls, self._server_name)
        except (OSError, asyncio.CancelledError) as error:
            if isinstance(error, OSError) or loop.time() - begun >= STAGGER_S:  # cancelled because another address was faster
                self._failed |= {address}
            raise
        self._failed -= {address}
        return connection

    async def _dial_name(self) -> Connection:
        known = await self._resolver.addresses(self.host)
        self._failed &= frozenset(known)
        dials: list[Dial] = [self._dialing(address) for address in sorted(known, key=self._failed.__contains__)]

        async def dial_new_address() -> Connection:
            return await self._dial_new_address(known)

        return await race([*dials, dial_new_address], self._stagger_s)

    def _dialing(self, address: str) -> Dial:
        async def dial() -> Connection:
            return await self._dial(address)

        return dial

    async def _dial_new_address(self, known: Sequence[str]) -> Connection:
        """Connect to addresses that a new look-up added to the known ones. Raises OSError or _NoNewAddress."""
        try:
            async with asyncio.timeout(RENEWAL_S):
                now = await self._resolver.renewed(self.host)
        except TimeoutError as late:
            raise _NoNewAddress from late
        if not (new := [self._dialing(address) for address in now if address not in known]):
            raise _NoNewAddress
        return await race(new, self._stagger_s)

    def __repr__(self) -> str:
        return f"<Dialer of {self.host}:{self.port}>"


async def race(dials: Sequence[Dial], stagger_s: float | None = STAGGER_S) -> Connection:
    """The connection of the first dial that succeeds. Each starts when all earlier ones failed, or after stagger_s (None: not
    before); the others are cancelled. Raises OSError with all errors.
    """
    waiting, running = list(dials), set[asyncio.Future[Connection]]()
    errors: list[BaseException] = []
    try:
        while waiting or running:
            if waiting:
                running.add(asyncio.ensure_future(waiting.pop(0)()))
            timeout_s = stagger_s if waiting else None
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
    """Close the connection of an unused dial."""
    if not dial.cancelled() and dial.exception() is None:
        dial.result().abort()


def _joined(errors: Sequence[BaseException]) -> BaseException:
    """One error with the text of all, without `_NoNewAddress`."""
    real = [error for error in errors if not isinstance(error, _NoNewAddress)]
    if len(real) == 1:
        return real[0]
    return OSError("; ".join(str(error) or type(error).__name__ for error in real))


def is_ip_address(host: str) -> bool:
    """False with a zone (fe80::1%eth0): the resolver maps zones to numbers."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return "%" not in host


def failure_of(error: OSError | UnicodeError) -> ReplicaFailure | GatewayError:
    """The failure for an error of connecting; its message has the errors of all tried addresses."""
    text = str(error) or type(error).__name__
    number = getattr(error, "errno", None)
    numbers = {number} if number else {int(found) for found in _ERRNO.findall(text)}
    if numbers & _LOCAL_ERRORS:
        return out_of_resources(text)
    return ReplicaFailure(REFUSED if numbers == {errno.ECONNREFUSED} else UNREACHABLE, text)

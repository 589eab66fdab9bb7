"""Resolves host names to IP addresses, with a cache.

The system's look-up (getaddrinfo) is used, so that /etc/hosts, nsswitch.conf and search domains apply. It blocks while name
servers do not answer, for a minute or more, and cannot be cancelled. So it runs in separate daemon threads: not in a pool that
other work needs or that is joined at exit.

    unknown ── look-up ──► known ── used after REFRESH_S ──► known, and looked up again in the background
       │
       └── look-up fails: an error; the next look-up not before RETRY_S

Rules:
- A known address is used at once. If a later look-up fails or takes long, the last good answer stays in use.
- There is at most one look-up per name at a time. Names beyond the number of threads are queued. Names whose last look-up
  failed have a few threads of their own, so that they never delay the others.
- MAX_NAMES names with MAX_ADDRESSES addresses each are kept; a name is dropped with the last replica that uses it.

All methods run in the event loop's thread, except `_run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from gateway.errors import OUT_OF_RESOURCES

log = logging.getLogger("warmroute.resolver")

REFRESH_S: Final = 30.0
RETRY_S: Final = 1.0
THREADS: Final = 32  # for new names and names whose last look-up succeeded
FAILING_THREADS: Final = 8
MAX_ADDRESSES: Final = 8
MAX_NAMES: Final = 4096
_MAX_TEXT: Final = 200  # of an error

LookUp = Callable[[str], Iterable[str]]
"""A host name -> its IP addresses as text, the best first. It may block. Raises OSError or UnicodeError."""


def system_look_up(host: str) -> list[str]:
    """The addresses of getaddrinfo. A link-local IPv6 address has its zone appended (fe80::1%2)."""
    addresses = []
    for family, _, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
        zone = address[3] if family == socket.AF_INET6 and len(address) == 4 else 0
        addresses.append(f"{address[0]}%{zone}" if zone else str(address[0]))
    return addresses


class AddressSource(Protocol):
    """Provides the addresses for a `Dialer`."""

    async def addresses(self, host: str) -> Sequence[str]:
        """The addresses of a host, the best first. Raises OSError if there are none."""

    async def renewed(self, host: str) -> Sequence[str]:
        """The addresses of a new look-up, after connecting to the known ones has failed."""

    def knows(self, host: str) -> bool:
        """True if an address of this name is known."""


class KnownAddresses:
    """An AddressSource with given addresses for one name."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    async def addresses(self, host: str) -> Sequence[str]:
        return self._addresses

    async def renewed(self, host: str) -> Sequence[str]:
        return self._addresses

    def knows(self, host: str) -> bool:
        return True


class Name:
    """Cache entry of one host name."""

    __slots__ = ("addresses", "done", "error", "error_number", "host", "looked_up")

    def __init__(self, host: str) -> None:
        self.host = host
        self.addresses: tuple[str, ...] = ()  # the last good answer
        self.error = ""  # of the last look-up; "": it succeeded
        self.error_number = 0  # its errno, if it is in OUT_OF_RESOURCES
        self.looked_up = -math.inf  # end of the last look-up
        self.done: asyncio.Event | None = None  # set at the end of the running or queued look-up


class _Lane:
    """Queue of look-ups that share a number of threads."""

    __slots__ = ("running", "threads", "waiting")

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.running = 0
        self.waiting: deque[Name] = deque()


class Resolver:
    """Resolves host names (see the module)."""

    def __init__(
        self,
        look_up: LookUp = system_look_up,
        clock: Callable[[], float] = time.monotonic,
        *,
        threads: int = THREADS,
        failing_threads: int = FAILING_THREADS,
    ) -> None:
        self._look_up = look_up
        self._clock = clock
        self._names: dict[str, Name] = {}  # most recently used last
        self._sound = _Lane(threads)
        self._failing = _Lane(failing_threads)

    async def addresses(self, host: str) -> Sequence[str]:
        """The last good answer at once; an unknown name is looked up. Raises OSError if that fails."""
        name = self._name(host)
        if name.addresses:
            if self._clock() - name.looked_up >= REFRESH_S:
                self._request(name)
            return name.addresses
        return await self._recent(name)

    async def renewed(self, host: str) -> Sequence[str]:
        """For use after connecting to the known addresses has failed: the answer of a look-up at most RETRY_S old, or the
        last good one if that look-up fails. Raises OSError if there is none.
        """
        return await self._recent(self._name(host))

    def knows(self, host: str) -> bool:
        """True if an address of this name is known."""
        name = self._names.get(host)
        return name is not None and bool(name.addresses)

    def forget(self, host: str) -> None:
        """Drop a name that no replica uses. A queued look-up is cancelled, a running one continues."""
        if name := self._names.pop(host, None):
            for lane in (self._sound, self._failing):
                if name in lane.waiting:
                    lane.waiting.remove(name)
                    self._conclude(name, (), OSError("the name is no longer in use"))

    async def _recent(self, name: Name) -> Sequence[str]:
        if self._clock() - name.looked_up >= RETRY_S or name.done:
            await self._request(name).wait()
        if not name.addresses:
            raise OSError(name.error_number, name.error) if name.error_number else OSError(name.error)
        return name.addresses

    def _name(self, host: str) -> Name:
        """The entry of a name. O(1), except when it evicts another name."""
        name = self._names.pop(host, None) or Name(host)
        self._names[host] = name
        if len(self._names) > MAX_NAMES:
            self.forget(next(iter(self._names)))
        return name

    # -- look-ups

    def _request(self, name: Name) -> asyncio.Event:
        """Start a look-up unless one is running. Returns the event of its end."""
        if name.done is None:
            done = name.done = asyncio.Event()
            lane = self._failing if name.error else self._sound
            lane.waiting.append(name)
            self._start(lane)
            return done
        return name.done

    def _start(self, lane: _Lane) -> None:
        """Start queued look-ups while there are threads."""
        loop = asyncio.get_running_loop()
        while lane.waiting and lane.running < lane.threads:
            name = lane.waiting.popleft()
            try:
                threading.Thread(target=self._run, args=(name, lane, loop), name="look-up", daemon=True).start()
                lane.running += 1
            except RuntimeError as error:  # the process may be unable to start more threads
                self._conclude(name, (), OSError(errno.ENOMEM, str(error)))

    def _run(self, name: Name, lane: _Lane, loop: asyncio.AbstractEventLoop) -> None:
        """Runs in a separate thread."""
        found: tuple[str, ...] = ()
        error: Exception | None = None
        try:
            found = tuple(dict.fromkeys(self._look_up(name.host)))[:MAX_ADDRESSES]
        except Exception as failure:  # noqa: BLE001  (every waiter must get the error)
            error = failure
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(self._ended, name, lane, found, error)

    def _ended(self, name: Name, lane: _Lane, found: tuple[str, ...], error: Exception | None) -> None:
        lane.running -= 1
        self._conclude(name, found, error)
        self._start(lane)

    def _conclude(self, name: Name, found: tuple[str, ...], error: Exception | None) -> None:
        """Store the result of a look-up, and wake its waiters."""
        name.looked_up = self._clock()
        before, name.error, name.error_number = name.error, "", 0
        if found:
            name.addresses = found
        else:
            self._failed(name, error)
        if name.error and not before:
            kept = {"host": name.host[:_MAX_TEXT], "error": name.error, "last_known_addresses": name.addresses}
            log.warning("name does not resolve", extra=kept)
        elif before and not name.error:
            log.info("name resolves again", extra={"host": name.host[:_MAX_TEXT], "addresses": name.addresses})
        if name.done:
            name.done.set()
            name.done = None

    def _failed(self, name: Name, error: Exception | None) -> None:
        text = "it has no address" if error is None else str(error) or type(error).__name__
        if isinstance(error, OSError):
            text = error.strerror or text
            name.error_number = error.errno if error.errno in OUT_OF_RESOURCES else 0
        name.error = f"name does not resolve: {name.host[:_MAX_TEXT]}: {text[:_MAX_TEXT]}"

    def __repr__(self) -> str:
        running = self._sound.running + self._failing.running
        waiting = len(self._sound.waiting) + len(self._failing.waiting)
        return f"<Resolver of {len(self._names)} names, {running} look-ups running, {waiting} waiting>"

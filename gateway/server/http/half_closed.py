"""Detects whether clients that have closed their sending side are still there.

A FIN is ambiguous: the client has closed its socket and is gone, or it has closed its sending side and waits for the answer
(`shutdown(SHUT_WR)`; `nc -N` does so). A client that is gone must free its replica at once; a waiting one must get its answer.
Only bytes sent to the client distinguish them: the kernel of a client that has closed its socket answers with a reset. So the
connection writes bytes without meaning (`connection.py`: an interim response, or a leading zero of the next chunk's size), and
waits here for the reset.

Such a connection is no longer read, so the event loop does not notice a reset. A separate epoll does: registered for no event,
a socket still reports errors and hang-ups. Without epoll, a FIN ends the connection.

A connection that is paused because of pipelined requests notices neither: it is registered for the FIN as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable
from typing import Final

from aiohttp import HttpVersion11, web

LINGER_S: Final = 10.0


class HalfClosed:
    """See the top of this file. Linux only; elsewhere nothing can be watched."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._poll: select.epoll | None = None
        self._watched: dict[int, tuple[Callable[[], None], Callable[[], None] | None]] = {}

    def watch(self, fd: int, gone: Callable[[], None], ended: Callable[[], None] | None = None) -> bool:
        """Call `gone` once, when the socket is reset. False if that cannot be detected.

        ended: called once, when the client closes its sending side; for a paused connection.
        """
        if not hasattr(select, "epoll"):
            return False
        if self._poll is None:
            self._poll = select.epoll()
            self._loop.add_reader(self._poll.fileno(), self._look)
        events = select.EPOLLRDHUP if ended else 0
        if fd in self._watched:
            self._poll.modify(fd, events)
        else:
            self._poll.register(fd, events)
        self._watched[fd] = gone, ended
        return True

    def forget(self, fd: int) -> None:
        """Stop watching. To be called before the socket is closed."""
        if self._poll is not None and fd in self._watched:
            del self._watched[fd]
            with contextlib.suppress(OSError):  # closed after all
                self._poll.unregister(fd)

    def close(self) -> None:
        if self._poll is not None:
            self._loop.remove_reader(self._poll.fileno())
            self._poll.close()
            self._poll = None
            self._watched.clear()

    def _look(self) -> None:
        assert self._poll is not None
        for fd, events in self._poll.poll(0):
            gone, ended = self._watched.get(fd, (None, None))
            if gone and ended and not events & (select.EPOLLERR | select.EPOLLHUP):
                self.watch(fd, gone)
                ended()
            else:
                self.forget(fd)
                if gone:
                    gone()

    def __repr__(self) -> str:
        return f"<HalfClosed {len(self._watched)} connections>"


def speaks_1_1(request: web.BaseRequest | None) -> bool:
    """Whether there is a request, and its client accepts interim responses."""
    return request is not None and request.version >= HttpVersion11


async def until_gone(transport: asyncio.Transport, gone: asyncio.Future[None]) -> None:
    """Close the sending side, and wait up to LINGER_S for the client to close its own."""
    with contextlib.suppress(TimeoutError, OSError):  # OSError: the client has just left
        transport.write_eof()
        async with asyncio.timeout(LINGER_S):
            await gone

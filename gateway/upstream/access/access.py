"""The credentials for one replica, read in a thread and renewed while calls are sent there."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from gateway.errors import NO_ACCESS, ReplicaFailure
from gateway.upstream.access.credentials import RECHECK_S, Credentials, TlsContexts, load
from gateway.upstream.access.options import ConnectionOptions
from gateway.upstream.connection import Connection

log = logging.getLogger("warmroute.replicas")


class NotReady:
    """A Connector for an https URL whose TLS options were not read yet: it refuses every connection."""

    async def connect(self, timeout_s: float) -> Connection:
        raise ReplicaFailure(NO_ACCESS, "its TLS options were not read yet", reached=0)

    def __repr__(self) -> str:
        return "<NotReady>"


class UpstreamAccess:
    """The credentials of one replica; call `ready` before each call. credentials: None until they were read. renewed: called
    with new credentials.

    url: for logs. contexts: shared by all replicas. secure: it is an https URL with TLS options.
    """

    def __init__(
        self,
        options: ConnectionOptions,
        url: str,
        contexts: TlsContexts,
        *,
        secure: bool,
        renewed: Callable[[Credentials], None],
    ) -> None:
        self.credentials: Credentials | None = None
        self._options = options
        self._url = url
        self._contexts = contexts if secure else None
        self._renewed = renewed
        self._checked_at = -math.inf
        self._loading: asyncio.Future[None] | None = None
        self._problem = ""

    async def ready(self, within_s: float) -> None:
        """Read the key and the TLS files, if that was never done, or they have changed. Raises ReplicaFailure.

        They are checked every RECHECK_S. If they cannot be read again, the former credentials stay.
        """
        now = asyncio.get_running_loop().time()
        if self.credentials is not None and now - self._checked_at < RECHECK_S:
            return
        if self._loading is None:
            self._checked_at = now
            if self.credentials is not None and not self.credentials.is_stale():
                return
            self._loading = asyncio.ensure_future(self._load())
        try:
            async with asyncio.timeout(within_s):
                await asyncio.shield(self._loading)
        except TimeoutError as late:
            text = f"its key or its TLS files were not read within {within_s:g} s"
            raise ReplicaFailure(NO_ACCESS, text, reached=0) from late
        if self.credentials is None:
            raise ReplicaFailure(NO_ACCESS, self._problem, reached=0)

    async def _load(self) -> None:
        try:
            read = await asyncio.to_thread(load, self._options.key, self._options.tls, self._contexts)
        except ReplicaFailure as failure:
            if self.credentials is not None and failure.message != self._problem:
                about = {"url": self._url, "error": failure.message}
                log.warning("key or certificate of a replica not read again: the former one stays", extra=about)
            self._problem = failure.message
        else:
            self.credentials, self._problem = read, ""
            self._renewed(read)
        finally:
            self._loading = None

    def __repr__(self) -> str:
        return f"<Access to {self._url}, {self.credentials!r}>"

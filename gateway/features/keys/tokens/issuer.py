"""One OIDC issuer: its public keys, and when they are read.

    start ──► read ── every REFRESH_S ──► read            a token names an unknown key ──► read, at most every AGAIN_S
                └─ failed: the last good keys stay; retry after RETRY_S, twice that, ... MAX_RETRY_S

Only one read runs at a time. A request that needs an unknown key waits for it, at most LOOK_UP_S; other requests do not wait.
So an issuer that is down or slow delays only tokens with unknown keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from gateway.features.keys.record import limits_of
from gateway.features.keys.section import OidcConfig
from gateway.features.keys.tokens.fetching import FetchFailed
from gateway.features.keys.tokens.jwks import PublicKey

log = logging.getLogger("warmroute.keys")

REFRESH_S: Final = 300.0
AGAIN_S: Final = 10.0
RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 60.0
LOOK_UP_S: Final = 5.0

Fetch = Callable[[OidcConfig], Awaitable[list[PublicKey]]]


class Issuer:
    """The public keys of one issuer (see the module).

    failed: called at each failed read. removed: called with the issuer's name when a known key has disappeared. clock:
    monotonic seconds.
    """

    def __init__(
        self,
        config: OidcConfig,
        fetch: Fetch,
        clock: Callable[[], float],
        failed: Callable[[], None],
        removed: Callable[[str], None],
    ) -> None:
        self.config = config
        self.limits = limits_of(config)
        self._fetch = fetch
        self._clock = clock
        self._failed = failed
        self._removed = removed
        self._keys: dict[str, list[PublicKey]] = {}
        self._reading: asyncio.Task[None] | None = None
        self.next_at = 0.0  # time of the next permitted read
        self._wait_s = RETRY_S
        self._trouble = asyncio.Event()
        self.failing = False

    def key(self, kid: str, algorithm: str) -> PublicKey | None:
        """The key with this id for this algorithm. kid: "": the only key for the algorithm. O(keys with this id)."""
        named = self._keys.get(kid)
        if named is None and not kid:
            named = [key for keys in self._keys.values() for key in keys]
            named = [key for key in named if algorithm in key.algorithms]
            return named[0] if len(named) == 1 else None
        return next((key for key in named or () if algorithm in key.algorithms), None)

    @property
    def uncertain(self) -> bool:
        """True if an unknown key may exist at the issuer, because its keys have not been read successfully."""
        return self.failing or not self._keys or self._reading is not None

    @property
    def retry_s(self) -> float:
        """Seconds until the next read, at most."""
        return max(0.0, self.next_at - self._clock())

    async def look_up(self) -> None:
        """Reads the keys because one is unknown, unless they were read within AGAIN_S."""
        if self._reading is None:
            if self._clock() < self.next_at:
                return
            self._reading = asyncio.create_task(self._read())
        await asyncio.wait([self._reading], timeout=LOOK_UP_S)

    async def run(self) -> None:
        """Reads the keys until cancelled."""
        while True:
            await self.look_up()
            if self.failing:
                await asyncio.sleep(self._wait_s)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._trouble.wait()  # a read for a token has failed in the meantime

    async def _read(self) -> None:
        """Raises nothing."""
        self.next_at = self._clock() + AGAIN_S
        try:
            keys = await self._fetch(self.config)
        except FetchFailed as failure:
            self._has_failed(str(failure))
        except Exception as error:  # a bug must not stop the reads
            log.exception("keys of an issuer were not read")
            self._has_failed(repr(error))
        else:
            self._take(keys)
        finally:
            self._reading = None

    def _take(self, keys: list[PublicKey]) -> None:
        before = {key.fingerprint for named in self._keys.values() for key in named}
        self._keys = {}
        for key in keys:
            self._keys.setdefault(key.kid, []).append(key)
        self._wait_s = RETRY_S
        if before - {key.fingerprint for key in keys}:
            self._removed(self.config.name)
        if self.failing:
            self.failing = False
            self._trouble.clear()
            log.warning("keys of an issuer are read again", extra={"issuer": self.config.name})

    def _has_failed(self, reason: str) -> None:
        self._failed()
        if not self.failing:
            state = "known keys stay valid" if self._keys else "no key is known"
            extra = {"issuer": self.config.name, "reason": reason[:1000]}
            log.error(f"keys of an issuer are not read: {state}", extra=extra)
            self.failing = True
            self._trouble.set()
            self._wait_s = RETRY_S
        else:
            self._wait_s = min(2 * self._wait_s, MAX_RETRY_S)
        self.next_at = self._clock() + self._wait_s

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    def __repr__(self) -> str:
        return f"<Issuer {self.config.name}, {len(self._keys)} keys{', failing' if self.failing else ''}>"

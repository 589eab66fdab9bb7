"""Another configuration for a running gateway: the file has changed, a signal asks for it, an operator adds a replica.

    SIGHUP ──────────────────────────┐
    the file differs, and is quiet ──┴─► read it ──► valid? ──► ask who joins ──► all changes in one step
                                                       └─ no: say why, change nothing

The file is looked at by its path, so that a symbolic link that is pointed elsewhere (as Kubernetes updates a ConfigMap) counts
as a change; it is read when two looks in a row see the same, for it may be half written. Flags and environment win over it as
they did at the start. Reading is done in a thread, and the only other thing that takes time, asking the replicas that join,
comes before any change; the change itself is a row of synchronous steps, which cannot fail: what is invalid was refused before.
So every request sees either the old configuration or the new one.

What cannot change while the process runs stays as it was, and the log names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from gateway.config import Config, ReplicaConfig
from gateway.logs import first_of
from gateway.metrics import Metrics
from gateway.relay import Relay
from gateway.replicas import FIRST_PROBES_S, LOGGED, Fleet
from gateway.typed import ConfigError, NotReadable

log = logging.getLogger("warmroute.reload")

GOOD, INVALID, UNCHANGED = "good", "invalid", "unchanged"
RESULTS = (GOOD, INVALID, UNCHANGED)

LOOK_S = 1.0

Step = Callable[[Config], None]
Look = tuple[int, int, int, int] | None
_NEVER_READ: Look = (-1, -1, -1, -1)  # differs from every state of a file


class Source:
    """Where the configuration comes from. path: its file, if there is one; read: all of it anew, raises ConfigError.

    asked: set it to have it read again. Made before the first reading, so that no change falls between the two.
    """

    def __init__(self, path: Path | None, read: Callable[[], Config], *, look_s: float = LOOK_S) -> None:
        self.read = read
        self.asked = asyncio.Event()
        self.look_s = look_s
        self._path = path
        self._seen = self._read = self._look()

    async def next(self) -> Config:
        """Wait until it should be read again, and read it. Raises ConfigError if it is invalid.

        While there are no file descriptors or memory to read it, it is tried again at each look.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.look_s):
                    await self.asked.wait()
            if self.asked.is_set() or self.differs():
                self.asked.clear()
                self.taken()
                try:
                    return await asyncio.to_thread(self._read_uncollected)
                except NotReadable as error:
                    log.warning("configuration not read, to be tried again", extra={"error": str(error)})
                    self._read = _NEVER_READ

    def _read_uncollected(self) -> Config:
        """Parsing makes many objects, and a garbage collection that goes through them holds all threads for 0.1 s and more."""
        gc.disable()
        try:
            return self.read()
        finally:
            gc.enable()

    def differs(self) -> bool:
        """Whether the file is another one than at the last `taken`, and the same as at the last call of this."""
        seen, self._seen = self._seen, self._look()
        return self._seen == seen != self._read

    def taken(self) -> None:
        """It is about to be read."""
        self._read = self._seen = self._look()

    def _look(self) -> Look:
        """What tells one state of the file from another; None: it cannot be seen."""
        if self._path is None:
            return None
        try:
            seen = os.stat(self._path)
        except OSError:
            return None
        return seen.st_mtime_ns, seen.st_size, seen.st_ino, seen.st_dev


class Reload:
    """See the top of this file. config: the one in force. `run` watches the source until it is cancelled."""

    def __init__(
        self,
        *,
        config: Config,
        source: Source | None,
        fleet: Fleet,
        relay: Relay,
        metrics: Metrics,
        steps: Sequence[Step],
        now: Callable[[], float] = time.time,
    ) -> None:
        """steps: what has to be told of another configuration, besides the fleet. now: Unix time."""
        self.config = config
        self._source = source
        self._fleet = fleet
        self._relay = relay
        self._metrics = metrics
        self._steps = list(steps)
        self._now = now
        self._one_at_a_time = asyncio.Lock()
        for result in RESULTS:
            metrics.reloads.add((result,), 0)
        metrics.config_loaded.set((), now())

    def tell(self, step: Step) -> None:
        """This has to be told, too."""
        self._steps.append(step)

    async def run(self) -> None:
        """Take what the source brings. Returns at once if there is none."""
        while self._source is not None:
            try:
                await self.take(await self._source.next())
            except ConfigError as error:
                self.refuse(str(error))
            except Exception:  # a bug in one reload must not end the watching
                log.exception("reload failed")

    def refuse(self, why: str) -> None:
        """There is another configuration, but it is invalid: nothing changes."""
        self._metrics.reloads.add((INVALID,))
        log.warning("configuration not reloaded: it is invalid", extra={"error": why})

    async def add(self, number: int, replica: ReplicaConfig) -> None:
        """A replica joins a pool until the next reload. Raises ConfigError if it cannot (its name is taken, no such pool)."""
        async with self._one_at_a_time:
            config = _with_replica(self.config, number, replica)
            self._guard(replica)
            try:
                await self._change(config)
            except BaseException:  # the operator's connection ended meanwhile
                if not self._fleet.uses(replica.url):
                    self._relay.forget(replica.url)
                raise

    async def readd(self, replicas: Iterable[tuple[int, ReplicaConfig]]) -> None:
        """Replicas, with the numbers of their pools, that operators had added before this process started.

        They are asked side by side. One that does not answer within FIRST_PROBES_S is down at first, and is probed later.
        """
        async with self._one_at_a_time:
            config = self.config
            for number, replica in replicas:
                try:
                    config = _with_replica(config, number, replica)
                    self._guard(replica)
                except ConfigError as error:  # it must not keep the others out
                    log.warning("replica not added", extra={"replica": replica.name, "error": str(error)})
            if config is not self.config:
                await self._change(config, within_s=FIRST_PROBES_S)

    def _guard(self, replica: ReplicaConfig) -> None:
        """An operator's replica must not lead to a metadata service; one that the configuration has, too, is on trust."""
        if not self.config.allow_link_local and replica.url not in _urls(self.config):
            self._relay.guard(replica.url)

    async def take(self, config: Config) -> None:
        """This is the configuration from now on, but for what cannot change."""
        async with self._one_at_a_time:
            config = possible(self.config, config)
            if config == self.config:
                self._metrics.reloads.add((UNCHANGED,))
                log.info("configuration unchanged")
                return
            self._relay.trust(_urls(config))
            await self._change(config)
            self._metrics.reloads.add((GOOD,))
            self._metrics.config_loaded.set((), self._now())
            names = [state.name for state in self._fleet.replicas]
            log.info("configuration reloaded", extra=first_of("replicas", names, LOGGED))

    async def _change(self, config: Config, within_s: float | None = None) -> None:
        met = await self._fleet.meet(config, self._relay, within_s)
        # From here on no await: nobody sees half of it.
        self.config = config
        for step in self._steps:
            step(config)
        self._fleet.apply(config, met)


def _urls(config: Config) -> set[str]:
    """Of all replicas."""
    return {replica.url for pool in config.pools for replica in pool.replicas}


def _with_replica(config: Config, number: int, replica: ReplicaConfig) -> Config:
    """The configuration with one more replica in the pool of this number. Raises ConfigError."""
    pools = list(config.pools)
    if not 0 <= number < len(pools):
        raise ConfigError(f"pool: there is no pool {number}; the first of {len(pools)} is 0")
    pools[number] = replace(pools[number], replicas=(*pools[number].replicas, replica))
    return replace(config, pools=tuple(pools))


def possible(old: Config, new: Config) -> Config:
    """The new configuration with what cannot change left as it is; the log names it."""
    pairs: list[tuple[str, object, object]] = [
        ("listen", old.listen, new.listen),
        ("admin_listen", old.admin_listen, new.admin_listen),
        ("metrics_listen", old.metrics_listen, new.metrics_listen),
        ("workers", old.workers, new.workers),
        ("log_level", old.log_level, new.log_level),
        ("routing.block_bytes", old.routing.block_bytes, new.routing.block_bytes),
        ("routing.block_tokens", old.routing.block_tokens, new.routing.block_tokens),
        ("WARMROUTE_ADMIN_KEY", old.admin_key, new.admin_key),
    ]
    if fixed := [key for key, before, after in pairs if before != after]:
        log.warning("configuration: what differs here needs a restart", extra={"keys": fixed})
    routing = replace(new.routing, block_bytes=old.routing.block_bytes, block_tokens=old.routing.block_tokens)
    return replace(
        new,
        listen=old.listen,
        admin_listen=old.admin_listen,
        metrics_listen=old.metrics_listen,
        workers=old.workers,
        log_level=old.log_level,
        routing=routing,
        admin_key=old.admin_key,
    )

"""Reloads the configuration of a running gateway, after a change of the file or a signal.

    SIGHUP ──────────────────────────┐
    the file differs, and is quiet ──┴─► read it ──► valid? ──► probe new replicas ──► all changes in one step
                                                       └─ no: log why, change nothing

`config/source.py` watches and reads the file. The slow part, asking the joining replicas, comes before any change. The change
itself is a series of synchronous steps, which cannot fail, because invalid configurations were refused before. So every request
sees either the old configuration or the new one.

Settings that cannot change while the process runs keep their values, and the log names them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace

from gateway.admission.connection_limit import ConnectionLimit
from gateway.admission.memory import Budget
from gateway.cluster.membership import Membership
from gateway.cluster.process import budget_bytes, connection_limit
from gateway.config.changes import changed_keys
from gateway.config.hints import FIXED
from gateway.config.live import Live
from gateway.config.parse import ConfigError
from gateway.config.schema import Config
from gateway.config.sections import marked
from gateway.config.source import SECRETS, ConfigSource
from gateway.fleet.directory import LOGGED, Fleet
from gateway.telemetry.logs import first_of
from gateway.telemetry.metrics import Metrics
from gateway.upstream.client import UpstreamClient
from router import Router

log = logging.getLogger("warmroute.reload")

GOOD, INVALID, UNCHANGED = "good", "invalid", "unchanged"
RESULTS = (GOOD, INVALID, UNCHANGED)


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts that do not read the live configuration by themselves, so a reload sets their values."""

    fleet: Fleet
    upstream: UpstreamClient
    router: Router
    memory: Budget
    connections: ConnectionLimit

    def apply(self, config: Config) -> None:
        """Apply the configuration to all parts except the fleet."""
        routing = config.routing
        self.router.retune(
            policy=routing.policy,
            ttl_s=routing.ttl_s,
            memory_bytes=routing.memory_mb << 20,
        )
        self.memory.limit = budget_bytes(config)
        self.connections.limit = connection_limit(config)


class Reload:
    """Reloads the configuration (see the module). `run` watches the source until it is cancelled."""

    def __init__(
        self,
        *,
        live: Live,
        source: ConfigSource[Config] | None,
        membership: Membership,
        parts: Parts,
        metrics: Metrics,
        now: Callable[[], float] = time.time,
        further: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        """membership, parts: get the new configuration. now: Unix time. further: reads other files, after each reading of the
        configuration that succeeded.
        """
        self._live = live
        self._membership = membership
        self._source = source
        self._parts = parts
        self._metrics = metrics
        self._now = now
        self._further = further
        self._one_at_a_time = asyncio.Lock()
        for result in RESULTS:
            metrics.reloads.add((result,), 0)
        metrics.config_loaded.set((), now())

    @property
    def config(self) -> Config:
        """The present configuration."""
        return self._live.config

    async def run(self) -> None:
        """Apply each configuration of the source. Returns at once if there is no source."""
        while self._source is not None:
            try:
                await self.take(await self._source.next())
            except ConfigError as error:
                self.refuse(str(error))
            except Exception:  # a bug in one reload must not stop the watching
                log.exception("reload failed")

    def refuse(self, why: str) -> None:
        """Report an invalid configuration; nothing changes."""
        self._metrics.reloads.add((INVALID,))
        log.warning("configuration not reloaded: it is invalid", extra={"error": why})

    async def take(self, config: Config) -> None:
        """Apply the configuration, except for settings that cannot change, and what else is read with it."""
        async with self._one_at_a_time:
            await self._change_to(possible(self._live.config, config))
            for read in self._further:
                await read()

    async def _change_to(self, config: Config) -> None:
        if config == self._live.config:
            self._metrics.reloads.add((UNCHANGED,))
            log.info("configuration unchanged")
            return
        changed = list(changed_keys(self._live.config, config))
        await self._membership.reconfigure(config, partial(self._apply, config))
        self._metrics.reloads.add((GOOD,))
        self._metrics.config_loaded.set((), self._now())
        names = [state.name for state in self._parts.fleet.replicas]
        about = first_of("changed", changed, LOGGED) | first_of("replicas", names, LOGGED)
        log.info("configuration reloaded", extra=about)

    def _apply(self, config: Config) -> None:
        """Called in the step that changes the members."""
        self._live.take(config)
        self._parts.apply(config)


def possible(old: Config, new: Config) -> Config:
    """The new configuration with the old values of settings that cannot change; the log names them."""
    fixed, differ = dict[str, Any](), list[str]()
    for key, parts in marked(type(old), FIXED):
        before, after = getattr(old, key), getattr(new, key)
        if parts is True:
            fixed[key] = before
            differ += [key] if after != before else []
        else:
            fixed[key] = replace(after, **{part: getattr(before, part) for part in parts})
            differ += [f"{key}.{part}" for part in parts if getattr(after, part) != getattr(before, part)]
    if differ:
        keys = [SECRETS.get(key, key) for key in differ]
        log.warning("configuration: these changes need a restart", extra={"keys": keys})
    return replace(new, **fixed)

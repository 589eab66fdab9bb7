"""API keys: who sends a request, what callers may do, and how much they may use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gateway.cluster.commands import ControlPlane, LocalControl
from gateway.config.changes import changed_keys
from gateway.core import Core
from gateway.features.keys.callers import KeyHolders
from gateway.features.keys.endpoints import KeyEndpoints
from gateway.features.keys.keys import Keys
from gateway.features.keys.limit_phases import LimitPhases, LimitSettlement
from gateway.features.keys.metrics import KeyMetrics
from gateway.features.keys.section import KEYS
from gateway.features.keys.tokens.fetching import Fetcher
from gateway.features.keys.tokens.tokens import Tokens
from gateway.features.keys.usage import OwnUsage
from gateway.server.operator import Operator
from gateway.server.routing import Route


def install(core: Core) -> None:
    keys = _keys_of(core) if KEYS.of(core.config).on else None

    def endpoints(operator: Operator, _local: LocalControl, control: ControlPlane) -> list[Route]:
        own = OwnUsage(keys, core.callers).routes() if keys is not None else []
        return [*KeyEndpoints(keys, operator, control).routes(), *own]

    core.endpoints.append(endpoints)
    if keys is None:
        return
    phases = LimitPhases(keys, core.meter, core.metrics.of(KeyMetrics))
    core.callers = KeyHolders(keys, phases, core.metrics.of(KeyMetrics), required=KEYS.of(core.config).required)
    core.extensions.entering.append(phases.enter)
    core.extensions.waited.append(phases.waited)
    core.extensions.chosen.append(phases.reserve)
    core.extensions.answered.append(phases.answered)
    core.observers.append(LimitSettlement(keys))
    core.upstream.strips_keys = True
    core.work.starts.append(keys.begin)
    keys.join(core.topics)
    core.work.tasks += [keys.run, keys.watch_budgets]
    if (exchange := keys.totals_exchange) is not None:
        core.work.tasks.append(lambda: exchange.run(core.control))
    if keys.tokens is not None:
        core.work.tasks += [issuer.run for issuer in keys.tokens.issuers]
    core.work.closes.append(keys.close)
    core.work.reloads.append(_noted_reloads(core, keys))
    core.keepers.append(keys.keep_action)
    core.put(keys)


def _noted_reloads(core: Core, keys: Keys) -> Callable[[], Awaitable[None]]:
    before = core.config

    async def note() -> None:
        nonlocal before
        changed, before = list(changed_keys(before, core.config)), core.config
        keys.note_reload(changed)

    return note


def _keys_of(core: Core) -> Keys:
    config = core.config
    keys = Keys(config, core.metrics.of(KeyMetrics), core.wall_clock, core.clock)
    if KEYS.of(config).oidc:
        fetch = Fetcher(core.live, core.around.resolver).fetch
        keys.tokens = Tokens(KEYS.of(config).oidc, fetch, core.clock, core.metrics.of(KeyMetrics).failures.add)
    return keys

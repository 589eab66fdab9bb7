"""The token ids of requests' prompts, before a replica is chosen; and what became of the predictions by them.

Only prompts of chat and completions whose model has a replica with events are looked at. Others, and prompts whose ids are
late, are routed by the gateway's own history.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Final

from gateway.core import Core
from gateway.dialects.salts import tenant_salt
from gateway.errors import GatewayError
from gateway.features.kv_events.metrics import KvEventMetrics
from gateway.features.kv_events.prompt_tokens import KnownTokens
from gateway.features.kv_events.residency import EngineResidency
from gateway.features.kv_events.section import KV_EVENTS
from gateway.features.kv_events.tokenizing import MAX_BODY, EngineTokenizer, KeptTokens, digest_of
from gateway.fleet.directory import Target
from gateway.fleet.state import ReplicaState
from gateway.request.exchange import Exchange
from gateway.request.phases.scopes import prompt_of
from gateway.request.slots import Slot
from router import token_bytes
from router.residency import ID_BYTES
from router.types import BlockKeys

log = logging.getLogger("warmroute.kv_events")

PATHS: Final = frozenset(["/v1/chat/completions", "/v1/completions"])
SENT, ENGINE, CACHE, PREFIX, LATE, FAILED = "sent", "engine", "cache", "prefix", "late", "failed"
TEMPLATE_TAIL: Final = 32  # tokens that a template adds to the end of a prompt
_PROMISED: Final = Slot[tuple[str, int]]("kv_events")


class PromptReader:
    """See the module."""

    def __init__(self, core: Core, residency: EngineResidency) -> None:
        self._core, self._fleet, self._residency = core, core.fleet, residency
        self._metrics = core.metrics.of(KvEventMetrics)
        self._kept, self.engines = KeptTokens(), EngineTokenizer(core.upstream)

    def concerns(self, exchange: Exchange) -> bool:
        """True if the prompt's ids may be of use."""
        api = exchange.api
        wanted = bool(self._residency.replicas) and api.metered and api.countable and not api.images and api.has_prompt
        return wanted and exchange.record.subject.endpoint in PATHS and len(api.body) <= MAX_BODY

    async def prepare(self, exchange: Exchange) -> None:
        """Find the ids of the prompt. Never raises for an error of a replica."""
        api = exchange.api
        try:
            target = self._fleet.target(api.model, api.alias)
        except GatewayError:
            return  # the phase admit says why
        able = (*target.replicas.values(), *target.prefillers.values())
        known = [state for state in able if state.name in self._residency.replicas]
        if not known:
            return
        sent = token_bytes(api.prompt) if isinstance(api.prompt, list) else None
        prompt = prompt_of(self._core.live, api, exchange.caller, target.label, exchange.request.lease.account.client)
        if not prompt.keys or api.made is None:
            return
        found: KnownTokens | None
        if sent is not None:
            source, found = SENT, self._tokens(exchange, target, sent, whole=True)
        elif not api.textual:
            return
        else:
            source, found = await self._ids(exchange, target, known, prompt.keys)
        self._metrics.prompts.add((source,))
        api.made.tokens = found

    async def _ids(
        self, exchange: Exchange, target: Target, known: list[ReplicaState], keys: BlockKeys
    ) -> tuple[str, KnownTokens | None]:
        """(where the ids come from, the ids)."""
        api, now = exchange.api, self._core.clock()
        digest, size = digest_of(api.model, api.body), len(api.body)
        if (data := self._kept.get(digest)) is not None:
            return CACHE, self._tokens(exchange, target, data, whole=True)
        able = [state for state in known if state.live and self.engines.able(state.url, now)]
        if able:
            loads = self._core.router.ledger.loads
            state = min(able, key=lambda each: load.inflight if (load := loads.get(each.name)) else 0)
            task = self.engines.ask(digest, state.url, api.body, now, listed=api.model in state.models)
            task.add_done_callback(lambda done: self._answered(done, digest, keys, size, now))
            wait_s = KV_EVENTS.of(self._core.config).wait_ms / 1000
            if self.engines.seconds_per_byte * size <= wait_s:
                await asyncio.wait([task], timeout=wait_s)
            if task.done() and not task.cancelled() and (data := task.result()) is not None:
                return ENGINE, self._tokens(exchange, target, data, whole=True)
        if (data := self._kept.prefix(keys)) is not None:
            # Its last blocks may differ: of its text, less than a block of the index, and what the template adds.
            less = (self._core.config.routing.block_bytes + TEMPLATE_TAIL) * ID_BYTES
            if len(data) > less:
                return PREFIX, self._tokens(exchange, target, data[:-less], whole=False)
        return (LATE if able else FAILED), None

    def _answered(self, task: asyncio.Task[bytes | None], digest: int, keys: BlockKeys, size: int, since: float) -> None:
        if task.cancelled() or (data := task.result()) is None:
            return
        took_s = self._core.clock() - since
        self.engines.took(size, took_s)
        self._metrics.tokenize.observe((), took_s)
        self._kept.put(digest, data, keys)

    def _tokens(self, exchange: Exchange, target: Target, data: bytes, *, whole: bool) -> KnownTokens:
        api = exchange.api
        salt = tenant_salt(exchange.caller.tenant, api.salt).decode() if self._core.live.isolates_tenants else api.salt
        return KnownTokens(data, target.pool, api.model, salt, whole=whole, adapter=target.adapter_of(api))

    # -- what became of it

    def chosen(self, exchange: Exchange, _live: Collection[str], _now: float) -> None:
        """A replica was chosen: note what its events promise."""
        booking = exchange.booking
        if booking.prompt.tokens is None:
            return
        best = booking.decision.best
        told = self._residency.told.get(best.replica)
        if told is not None and told.certain and told.cached == best.matched_tokens:
            _PROMISED.set(exchange.record, (best.replica, told.cached))

    def delivered(self, exchange: Exchange) -> None:
        """An answer was sent: compare its cached tokens with the promise."""
        promised = _PROMISED.get(exchange.record)
        usage = exchange.delivered.usage
        if promised is None or usage is None or usage.cached is None or exchange.booking.lease.replica != promised[0]:
            return
        if exchange.prefilled is not None:  # another replica's cache counts; some engines report all of the prompt as cached
            return
        name, tokens = promised
        streams = self._residency.replicas.get(name)
        block = streams[0].holdings.block_tokens if streams else 0
        if not block:
            return
        off = usage.cached - tokens
        result = "exact" if abs(off) < block else "below" if off > 0 else "above"
        self._metrics.predictions.add((name, result))
        if self._residency.answered(name, exchange.booking.prompt.origin, tokens, usage.cached):
            log.warning(
                "a replica's answers contradict its cache events: they are not used for a while", extra={"replica": name}
            )

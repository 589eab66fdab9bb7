"""The rows of replicas for operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gateway.cluster.commands import LocalControl
from gateway.fleet.places import MOST
from gateway.fleet.state import ReplicaState


class ReplicaRows:
    """Makes the rows from the state of this process; bookings include the ones of all other processes."""

    def __init__(self, local: LocalControl) -> None:
        self._fleet = local.fleet
        self._membership = local.membership
        self._router = local.router
        self._clock = local.clock

    def all(self) -> Iterator[dict[str, Any]]:
        """All rows, by pool; leaving replicas at the end."""
        held = self._router.trie.held()
        for pool in self._fleet.pools:
            for state in pool.replicas:
                yield self.row(state, pool.name, held)
        for state in self._fleet.leaving:
            yield self.row(state, None, held)

    def row(self, state: ReplicaState, pool: str | None, held: Mapping[str, int]) -> dict[str, Any]:
        """One row. held: blocks by replica."""
        load = self._router.ledger.of(state.name)
        return {
            "name": state.name,
            "url": state.url,
            "pool": pool,
            "role": state.role,
            "source": self._membership.source_of(state.member.listed_as) if pool is not None else None,
            "up": state.up,
            "draining": state.draining,
            "leaving": state.leaving,
            "asleep": state.facts.asleep,
            "weight": state.member.weight,
            "error": state.error,
            "hung": state.hung,
            "circuit": state.breaker.state(self._clock()),
            "models": list(state.models),
            "inflight": load.inflight,
            "decoding": load.decoding,
            "booked_tokens": load.booked_tokens,
            "prefill_tokens_per_second": round(load.rate.value, 1),
            "engine": state.engine.name,
            "engine_running": state.facts.running,
            "engine_waiting": state.facts.waiting,
            "places": state.places.value if state.places.value < MOST else None,
            "engine_kv_tokens": state.facts.kv_tokens,
            "capacity_tokens": state.capacity_tokens,
            "learned_capacity_tokens": self._router.learned_capacity(state.name),
            "findings": sorted(state.findings),
            "held_blocks": held.get(state.name, 0),
            "held_tokens": self._router.held_tokens(state.name),
        }

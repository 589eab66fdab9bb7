"""The models shown to clients: the union of the replicas' model lists. The models of a pool that is down stay listed while a
fallback takes its requests.

If several replicas of a pool list the same id, the first one's entry is shown. Each model is shown by the pool that serves it
(within the bounds of _MAX_LISTED).

The list is built in one step, and replicas choose the length of theirs, so all of it is bounded. The pools take turns, so that
a long list of one pool leaves at least half of the room to the others. Models beyond the bounds are served although they are
not shown.

A replica whose models all belong to other pools is most likely misconfigured: `warn_of_misfits`. If the replicas of two pools
without prefixes list one model, the first pool serves it, and so may get requests that were meant for the other one:
`warn_of_rivals`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Final

from gateway.fleet.pools import Pool, listed_by
from gateway.fleet.state import ReplicaState
from gateway.telemetry.logs import first_of

log = logging.getLogger("warmroute.replicas")

MAX_SHOWN: Final = 8192  # models
MAX_SHOWN_BYTES: Final = 8 << 20  # of all entries together
_MAX_LOOKUPS: Final = 2 * MAX_SHOWN  # models whose serving pool is looked up
_MAX_LOGGED: Final = 20  # models that a log line names
_MAX_COMPARED: Final = 2_000  # models, of all replicas together: some 6 ms, with long prefixes 20
_MAX_WARNINGS: Final = 100  # at once
_MAX_LISTED: Final = 100_000  # entries of replicas' lists that are read: most replicas list the same models


class Catalog:
    """The models shown to clients (see the module). entries: JSON by id. names: sorted. answer: to GET /v1/models."""

    __slots__ = ("answer", "entries", "names")

    def __init__(self, pools: Sequence[Pool], by_prefix: Callable[[str], Pool | None]) -> None:
        """by_prefix: the pool whose configuration has a prefix of this model's name."""
        self.entries = _union(pools, by_prefix)
        self.names = sorted(self.entries)
        self.answer = b'{"object":"list","data":[%b]}' % b",".join(self.entries.values())

    def __repr__(self) -> str:
        return f"<Catalog of {len(self.names)} models>"


def _union(pools: Sequence[Pool], by_prefix: Callable[[str], Pool | None]) -> dict[str, bytes]:
    """The entries by id. Pools take turns; each turn adds a part of one replica's list, at most an equal share of the
    maximum.
    """
    union: dict[str, bytes] = {}
    first = _first_to_list([pool for pool in pools if not pool.models])
    share = max(1, MAX_SHOWN // max(1, len(pools)))
    named = {pool.name: pool for pool in pools}
    turns = deque((pool, _turns(listed_by(pool, named), share)) for pool in pools)
    bytes_left, lookups_left, listed_left = MAX_SHOWN_BYTES, _MAX_LOOKUPS, _MAX_LISTED
    while turns and lookups_left > 0 and len(union) < MAX_SHOWN:
        pool, more = turns.popleft()
        if (turn := next(more, None)) is None or turn[0] > listed_left:
            continue
        turns.append((pool, more))
        looked_at, entries = turn
        listed_left -= looked_at
        lookups_left -= len(entries)
        for name, shown in entries:
            # A pool with prefixes serves only models with them, and no other pool serves these.
            home = by_prefix(name) or (None if pool.models else first.get(name, pool))
            if home is pool and name not in union and len(shown) <= bytes_left and len(union) < MAX_SHOWN:
                bytes_left -= len(shown)
                union[name] = shown
    return union


def _turns(replicas: Sequence[ReplicaState], share: int) -> Iterator[tuple[int, list[tuple[str, bytes]]]]:
    """Yields a pool's models once each, in steps: (number of entries to be read next, [] or at most `share` new entries)."""
    seen: set[str] = set()
    for state in replicas:
        yield len(state.models), []
        entries = [(name, entry.shown) for name, entry in state.models.items() if name not in seen]
        seen.update(state.models)
        for at in range(0, len(entries), share):
            yield 0, entries[at : at + share]


def _first_to_list(pools: Sequence[Pool]) -> dict[str, Pool]:
    """The first of these pools with a replica, up or down, that lists the model. Empty for one pool, which has all models."""
    first: dict[str, Pool] = {}
    left = _MAX_LISTED if len(pools) > 1 else 0
    for pool in pools:
        for state in pool.replicas:
            if (left := left - len(state.models)) < 0:
                return first
            first.update({name: pool for name in state.models if name not in first})
    return first


def warn_of_misfits(states: Container[ReplicaState], pools: Sequence[Pool], by_prefix: Callable[[str], Pool | None]) -> None:
    """Logs each of these replicas that is up and lists models, none of which its pool serves. O(all replicas).

    At most _MAX_WARNINGS are logged, and at most _MAX_COMPARED models compared.
    """
    comparisons, warnings = _MAX_COMPARED, _MAX_WARNINGS
    for pool in pools:
        for state in pool.replicas:
            if state not in states or not state.up or not state.models:
                continue
            for model in state.models:
                comparisons -= 1
                if comparisons < 0:
                    return
                if _fits(pool, by_prefix(model)):
                    break
            else:
                wanted = ", ".join(pool.models) or "any that no other pool names"
                about = {"replica": state.name, **first_of("models", state.models, _MAX_LOGGED), "pool_models": wanted}
                log.warning("the replica's pool serves none of its models (pools[].models)", extra=about)
                warnings -= 1
                if warnings == 0:
                    return


def warn_of_rivals(state: ReplicaState, pools: Sequence[Pool], by_prefix: Callable[[str], Pool | None]) -> None:
    """Logs the models of a replica that another pool lists, too, if no prefix decides between them. O(all replicas)."""
    own = next((pool for pool in pools if state in pool.replicas), None)
    others = [pool for pool in pools if pool is not own and not pool.models]
    if own is None or own.models or not others:
        return
    comparisons = _MAX_COMPARED
    for other in others:
        models = list[str]()
        for rival in other.replicas:
            comparisons -= len(state.models)
            if comparisons < 0:
                return
            models += [model for model in state.models if model in rival.models and by_prefix(model) is None]
        if models:
            first = min(own, other, key=pools.index)
            about = {"replica": state.name, **first_of("models", list(dict.fromkeys(models)), _MAX_LOGGED)}
            text = "the replica lists models of another pool, and the first pool serves them: name the models in pools[].models"
            log.warning(text, extra={**about, "other_pool": other.name, "first_pool": first.name})


def _fits(pool: Pool, named: Pool | None) -> bool:
    """True if the pool serves a model. named: the pool whose configuration names the model."""
    return named is pool or (named is None and not pool.models)

"""A pool: replicas that serve the same models, and the queue of requests in front of them.

Under a new configuration a pool goes on from the old one of the same name: it takes over its queue and its count of running
requests. A pool with a new name begins anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gateway.admission.pool_queue import Admission
from gateway.config.schema import FallbackConfig, PoolConfig
from gateway.fleet.state import ReplicaState


@dataclass(frozen=True, slots=True)
class Pool:
    """name: unique. models: the prefixes that the configuration gives it ("*" for any). resume_streams: what a replica of it
    breaks off is finished by others. strip_billing_header: what clients write for their provider's bill does not go to them.
    fallback: where the requests go that it cannot serve.
    """

    name: str
    models: tuple[str, ...]
    replicas: tuple[ReplicaState, ...]
    admission: Admission
    resume_streams: bool = False
    strip_billing_header: bool = True
    fallback: FallbackConfig | None = None

    @property
    def live(self) -> bool:
        return any(replica.live for replica in self.replicas)

    @property
    def serving(self) -> Sequence[ReplicaState]:
        """Those that may get requests: who is up; if nobody is, those that are down by their probes alone."""
        return [state for state in self.replicas if state.live] or [state for state in self.replicas if state.doubtful]

    @property
    def ready(self) -> bool:
        """Whether requests can be expected to be answered: also by a replica that was up until its probes failed."""
        return any(replica.live or (replica.doubtful and replica.warm) for replica in self.replicas)


def succeed(
    configs: Sequence[PoolConfig], members: Sequence[tuple[ReplicaState, ...]], old: Sequence[Pool]
) -> tuple[Pool, ...]:
    """The pools of these configurations, with these replicas each, after the old ones. O(pools)."""
    former = {pool.name: pool for pool in old}
    return tuple(
        Pool(
            config.name,
            config.models,
            replicas,
            _admission(config, former.get(config.name), replicas),
            config.resume_streams,
            config.strip_billing_header,
            config.fallback,
        )
        for config, replicas in zip(configs, members, strict=True)
    )


def listed_by(pool: Pool, named: Mapping[str, Pool]) -> Sequence[ReplicaState]:
    """The replicas whose models clients are shown: those that may get requests. If nobody does, all of them, as they were last
    seen, where a fallback can take what they are asked for. named: all pools, by name. O(replicas of the chain of fallbacks).
    """
    if serving := pool.serving:
        return serving
    return pool.replicas if any(each.serving for each in _fallbacks(pool, named)) else ()


def unserved(pools: Sequence[Pool]) -> Sequence[str]:
    """The names of the pools whose requests nobody can be expected to answer: neither their replicas nor any fallback's.

    A pool without replicas, whose sources have found none, does not count beside others that have some.
    """
    named = {pool.name: pool for pool in pools}
    filled = [pool for pool in pools if pool.replicas] or pools
    return [pool.name for pool in filled if not (pool.ready or any(each.ready for each in _fallbacks(pool, named)))]


def _fallbacks(pool: Pool, named: Mapping[str, Pool]) -> Iterator[Pool]:
    """The pools after it, each once."""
    passed = {pool.name}
    while pool.fallback is not None and (name := pool.fallback.pool) in named and name not in passed:
        pool = named[name]
        passed.add(name)
        yield pool


def _admission(config: PoolConfig, former: Pool | None, replicas: Sequence[ReplicaState]) -> Admission:
    """The queue of the pool that it goes on from, within its new bounds, or a new one. Where each replica serves one at a time,
    no more requests than these are sent to them.
    """
    max_inflight, max_queue, queue_s = config.max_inflight, config.max_queue, config.queue_s
    if replicas and all(state.engine.fragile is not None for state in replicas):
        max_inflight = min(max_inflight, len(replicas))
    if former is None:
        return Admission(max_inflight=max_inflight, max_queue=max_queue, queue_s=queue_s)
    former.admission.resize(max_inflight=max_inflight, max_queue=max_queue, queue_s=queue_s)
    return former.admission

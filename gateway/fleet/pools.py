"""A pool: replicas that serve the same models, and the queue of requests in front of them.

A reload keeps the queue and the count of running requests of a pool with the same name. A pool with a new name begins empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gateway.admission.pool_queue import QUEUE_S, STREAM_QUEUE_S, Admission
from gateway.config.schema import FallbackConfig, PoolConfig
from gateway.fleet.state import ReplicaState


@dataclass(frozen=True, slots=True)
class Pool:
    """name: unique. models: the prefixes in the configuration ("*" for any). resume_streams: broken streams are continued at
    other replicas. strip_billing_header: the client's billing line is removed from requests. fallback: target of requests that
    the pool cannot serve. translate: dialects that are translated to chat; None: by the engine (`partial`). delta: the replicas
    are gateways that keep logs.
    """

    name: str
    models: tuple[str, ...]
    replicas: tuple[ReplicaState, ...]
    admission: Admission
    resume_streams: bool = False
    strip_billing_header: bool = True
    fallback: FallbackConfig | None = None
    translate: tuple[str, ...] | None = None
    delta: bool = False

    @property
    def live(self) -> bool:
        return any(replica.live and replica.answers for replica in self.replicas)

    @property
    def serving(self) -> Sequence[ReplicaState]:
        """Replicas that may get requests: the live ones, or else replicas that are down only by failed probes."""
        answering = [state for state in self.replicas if state.answers]
        return [state for state in answering if state.live] or [state for state in answering if state.doubtful]

    @property
    def ready(self) -> bool:
        """True if requests will probably be answered, perhaps by a replica that was up until its probes failed, or once they
        have woken one.
        """
        return any(each.answers and (each.live or each.wakeable or (each.doubtful and each.warm)) for each in self.replicas)


def succeed(
    configs: Sequence[PoolConfig], members: Sequence[tuple[ReplicaState, ...]], old: Sequence[Pool]
) -> tuple[Pool, ...]:
    """The pools of these configurations, with these replicas each; queues come from the old pools. O(pools)."""
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
            config.translate,
            config.delta,
        )
        for config, replicas in zip(configs, members, strict=True)
    )


def listed_by(pool: Pool, named: Mapping[str, Pool]) -> Sequence[ReplicaState]:
    """The replicas whose models are shown to clients: the replicas that may get requests, else sleepers that are woken.
    If there are none, but a fallback can serve requests, all replicas with their last known models. named: all pools, by name.
    O(replicas of the chain of fallbacks).
    """
    if serving := pool.serving or [state for state in pool.replicas if state.answers and state.wakeable]:
        return serving
    return pool.replicas if any(each.serving for each in _fallbacks(pool, named)) else ()


def unserved(pools: Sequence[Pool]) -> Sequence[str]:
    """The names of the pools whose requests will probably fail: neither their replicas nor any fallback can answer.

    A pool without replicas, whose sources have found none, does not count beside others that have some.
    """
    named = {pool.name: pool for pool in pools}
    filled = [pool for pool in pools if pool.replicas] or pools
    return [pool.name for pool in filled if not (pool.ready or any(each.ready for each in _fallbacks(pool, named)))]


def _fallbacks(pool: Pool, named: Mapping[str, Pool]) -> Iterator[Pool]:
    """The pools in the chain of fallbacks, each once."""
    passed = {pool.name}
    while pool.fallback is not None and (name := pool.fallback.pool) in named and name not in passed:
        pool = named[name]
        passed.add(name)
        yield pool


def _admission(config: PoolConfig, former: Pool | None, replicas: Sequence[ReplicaState]) -> Admission:
    """The queue of the pool of the same name with new bounds, or a new queue. If each replica serves one request at a time, the
    bound is the number of replicas.
    """
    max_inflight, max_queue, queue_s, stream_s = config.max_inflight, config.max_queue, config.queue_s, config.queue_s
    if queue_s is None:
        queue_s, stream_s = QUEUE_S, STREAM_QUEUE_S if config.fallback is None else QUEUE_S
    if replicas and all(state.engine.fragile is not None for state in replicas):
        max_inflight = min(max_inflight, len(replicas))
    if former is None:
        return Admission(max_inflight=max_inflight, max_queue=max_queue, queue_s=queue_s, stream_queue_s=stream_s)
    former.admission.resize(max_inflight=max_inflight, max_queue=max_queue, queue_s=queue_s, stream_queue_s=stream_s)
    return former.admission

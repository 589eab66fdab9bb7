"""A pool: replicas that serve the same models, and the line of requests in front of them.

Pools have no names. Under a new configuration each goes on from an old one, whose line and whose count of running requests it
takes over: the one with the most of its replicas, else one for the same models. What goes on from none begins anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.admission import Admission
from gateway.config import PoolConfig
from gateway.replica_state import ReplicaState


@dataclass(frozen=True, slots=True)
class Pool:
    """models: the prefixes that the configuration gives it ("*" for any). resume_streams: what a replica of it breaks off is
    finished by others.
    """

    models: tuple[str, ...]
    replicas: tuple[ReplicaState, ...]
    admission: Admission
    resume_streams: bool = False

    @property
    def live(self) -> bool:
        return any(replica.live for replica in self.replicas)

    @property
    def ready(self) -> bool:
        """Whether requests can be expected to be answered: also by a replica that was up until its probes failed."""
        return any(replica.live or (replica.doubtful and replica.warm) for replica in self.replicas)


def succeed(
    configs: Sequence[PoolConfig], members: Sequence[tuple[ReplicaState, ...]], old: Sequence[Pool]
) -> tuple[Pool, ...]:
    """The pools of these configurations, with these replicas each, after the old ones."""
    left, former = list(old), dict[int, Pool]()

    def shared(number: int, other: Pool) -> int:
        return len(set(members[number]) & set(other.replicas))

    def same_models(number: int, other: Pool) -> int:
        return other.models == configs[number].models

    for likeness in (shared, same_models):
        for number in range(len(configs)):
            best = max(left, key=lambda other: likeness(number, other), default=None)
            if best is not None and number not in former and likeness(number, best):
                former[number] = best
                left.remove(best)
    return tuple(
        Pool(config.models, replicas, _admission(config, former.get(number)), config.resume_streams)
        for number, (config, replicas) in enumerate(zip(configs, members, strict=True))
    )


def _admission(config: PoolConfig, former: Pool | None) -> Admission:
    """The line of the pool that it goes on from, within its new bounds, or a new one."""
    max_inflight, max_queue, queue_s = config.max_inflight, config.max_queue, config.queue_s
    if former is None:
        return Admission(max_inflight=max_inflight, max_queue=max_queue, queue_s=queue_s)
    former.admission.resize(max_inflight=max_inflight, max_queue=max_queue, queue_s=queue_s)
    return former.admission

"""A pool: replicas that serve the same models, and the line of requests in front of them.

Pools have no names. Under a new configuration each goes on from an old one, whose line and whose count of running requests it
takes over: the one with the most of its replicas, else one for the same models. What goes on from none begins anew.
"""

from __future__ import annotations

from collections import Counter, deque
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
    """The pools of these configurations, with these replicas each, after the old ones. O(pools + replicas)."""
    home = {replica: other for other, pool in enumerate(old) for replica in pool.replicas}
    by_models: dict[tuple[str, ...], deque[int]] = {}
    for other, pool in enumerate(old):
        by_models.setdefault(pool.models, deque()).append(other)
    left, former = set(range(len(old))), dict[int, Pool]()

    def take(number: int, other: int) -> None:
        left.discard(other)
        former[number] = old[other]

    for number, replicas in enumerate(members):
        shared = Counter(home[replica] for replica in replicas if home.get(replica) in left)
        if shared:
            take(number, max(sorted(shared), key=shared.__getitem__))
    for number, config in enumerate(configs):
        like = by_models.get(config.models, deque())
        while like and number not in former:
            if (other := like.popleft()) in left:
                take(number, other)
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

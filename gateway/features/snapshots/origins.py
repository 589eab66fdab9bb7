"""Is a replica the process that a snapshot was made of?

Its name may be another one's by now, its pod may be another one, its process may have been started anew. Where an engine shows
no start time, and no pod is known, it is believed to be the same; if it is not, the first misses show it (`evidence.py`).
"""

from __future__ import annotations

import logging

from gateway.errors import REFUSED
from gateway.features.snapshots.snapshot import Origin
from gateway.fleet.prober import START_TOLERANCE_S
from gateway.fleet.state import ReplicaState

log = logging.getLogger("warmroute.snapshots")


def origin_of(state: ReplicaState) -> Origin:
    return Origin(state.url, state.member.instance, state.started)


def has_restarted(state: ReplicaState, origin: Origin | None) -> bool:
    """True: it is another process than the snapshot's, which therefore says nothing about it: a later one, another one of its
    name, or one that the snapshot's gateway did not know. If that cannot be known yet, its start time is compared at its next
    probe. Of a process older than the snapshot's the prober is about to learn that it is gone.
    """
    if origin is None:
        return True
    why = _difference(state, origin)
    if why:
        log.info("replica is not what it was in the snapshot", extra={"replica": state.name, "reason": why})
    elif state.started is None:
        state.started = origin.started
    return bool(why)


def _difference(state: ReplicaState, origin: Origin) -> str:
    if state.url != origin.url:
        return "another URL"
    if state.member.instance and origin.instance and state.member.instance != origin.instance:
        return "another pod"
    if not state.up and state.down_by == REFUSED:
        return "it refuses connections"
    if state.started is not None and origin.started is not None and state.started > origin.started + START_TOLERANCE_S:
        return "its process started later"
    return ""

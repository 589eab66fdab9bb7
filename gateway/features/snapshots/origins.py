"""Compares a replica with the process in a snapshot.

The replica's name may belong to another server now, its pod may be another one, or its process may have been restarted. If an
engine reports no start time, no pod is known, and it was not seen to start, it is assumed to be the same. Its first report
shows whether it is (`evidence.py`).
"""

from __future__ import annotations

import logging

from gateway.features.snapshots.snapshot import Origin
from gateway.fleet.prober import START_TOLERANCE_S
from gateway.fleet.state import ReplicaState

log = logging.getLogger("warmroute.snapshots")


def origin_of(state: ReplicaState) -> Origin:
    return Origin(state.url, state.member.instance, state.started)


def has_restarted(state: ReplicaState, origin: Origin | None, at: float) -> bool:
    """True if the replica is another process than in the snapshot, so that the snapshot does not apply: a later process,
    another server of its name, or a replica unknown to the snapshot's gateway. If this cannot be known yet, its start time is
    compared at its next probe. If the process is older than the snapshot, the prober will find that it has ended.

    at: the moment of the snapshot.
    """
    if origin is None:
        return True
    reason = _difference(state, origin, at)
    if reason:
        log.info("replica has changed since the snapshot", extra={"replica": state.name, "reason": reason})
    elif state.started is None:
        state.started = origin.started
    return bool(reason)


def _difference(state: ReplicaState, origin: Origin, at: float) -> str:
    if state.url != origin.url:
        return "another URL"
    if state.member.instance and origin.instance and state.member.instance != origin.instance:
        return "another pod"
    if state.began_after(at):
        return "it has started since" if state.up else state.error
    if state.started is not None and origin.started is not None and state.started > origin.started + START_TOLERANCE_S:
        return "its process started later"
    return ""

"""Log of the operators' commands that a new worker has to execute first.

    sent to all workers ──► pending ── all have answered, none refused ──► in force, until the configuration changes
                               └────── one refused ──► forgotten

All workers execute all commands in one order, so that all accept or refuse the same ones. A new worker executes those in force,
then the pending ones. A worker that ended without an answer is not waited for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

PENDING_MOST: Final = 1000
REPLICA: Final = "replica "
DRAIN: Final = "drain "


@dataclass(slots=True, eq=False)
class _Pending:
    """payload: the encoded message. waiting_for: the workers that have not answered yet."""

    key: str
    payload: bytes
    waiting_for: set[int]


class Commands:
    """See the top of this file. A key is what a command is about: REPLICA or DRAIN and the replica's name."""

    def __init__(self) -> None:
        self._pending: dict[tuple[int, int], _Pending] = {}  # by asker and its number for the command
        self._in_force: dict[str, bytes] = {}

    def send(self, asker: int, number: int, key: str, payload: bytes, workers: Iterable[int]) -> None:
        """The command goes to these workers."""
        self._pending[asker, number] = _Pending(key, payload, set(workers))
        self._settle()

    @property
    def full(self) -> bool:
        return len(self._pending) >= PENDING_MOST

    def is_pending(self, asker: int, number: int) -> bool:
        return (asker, number) in self._pending

    def answered(self, worker: int, asker: int, number: int, *, accepted: bool) -> None:
        """A worker has executed or refused a pending command."""
        if accepted:
            self._pending[asker, number].waiting_for.discard(worker)
            self._settle()
        else:
            del self._pending[asker, number]

    def ended(self, worker: int) -> None:
        """O(pending)."""
        for pending in self._pending.values():
            pending.waiting_for.discard(worker)
        self._settle()

    def reconfigured(self, names: Collection[str]) -> None:
        """There is another configuration, with replicas of these names: those that were added are gone, and so is each drain of
        a replica that it does not have.
        """
        self._in_force = {key: payload for key, payload in self._in_force.items() if _survives(key, names)}
        self._pending = {which: pending for which, pending in self._pending.items() if _survives(pending.key, names)}

    def replay(self) -> Iterator[bytes]:
        """The messages for a new worker, in order."""
        yield from self._in_force.values()
        yield from (pending.payload for pending in self._pending.values())

    def _settle(self) -> None:
        for which in [which for which, pending in self._pending.items() if not pending.waiting_for]:
            pending = self._pending.pop(which)
            if not pending.key.startswith(REPLICA):
                self._in_force.pop(pending.key, None)  # the later drain replaces the earlier one
            self._in_force.setdefault(pending.key, pending.payload)  # of two replicas with one name the first one stays

    def __repr__(self) -> str:
        return f"<Commands: {len(self._in_force)} in force, {len(self._pending)} pending>"


def _survives(key: str, names: Collection[str]) -> bool:
    return not key.startswith(REPLICA) and (not key.startswith(DRAIN) or key.removeprefix(DRAIN) in names)

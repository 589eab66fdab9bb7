"""Log of the operators' commands that a new worker must execute first.

    sent to all workers ──► pending ── all have answered, none refused ──► in force, until a later one undoes it
                               └────── one refused ──► dropped

All workers execute all commands in one order, so all accept or refuse the same ones. Commands come into force in that order,
independent of the order of the answers. A new worker executes the commands in force, then the pending ones, which it answers,
too. A worker that ended without an answer is not waited for.

The commands in force are bounded: additions by the replicas of a gateway, because workers refuse more, and drains by
MAX_DRAINS, of which the oldest is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, assert_never

from gateway.cluster.membership import addition_problem, remaining
from gateway.cluster.messages import Drain, Join, Leave
from gateway.config.schema import MAX_REPLICAS, Config
from gateway.features.workers.channel import HUB
from gateway.fleet.membership import CONFIGURATION, OPERATORS, member_of

MAX_PENDING: Final = 1000
MAX_DRAINS: Final = MAX_REPLICAS

ReplicaCommand = Drain | Join | Leave
"""A command that a new worker must execute."""


@dataclass(slots=True, eq=False)
class _PendingCommand:
    """payload: the encoded message. waiting_for: workers that have not answered yet. accepted: a worker has executed it."""

    command: ReplicaCommand
    payload: bytes
    waiting_for: set[int]
    accepted: bool = False


_CommandId = tuple[int, int]
"""The asker, and its number for the command."""


@dataclass(slots=True, eq=False)
class _FoldedCommands:
    """Additions and drains by name. joining, draining: the pending ones; a joining replica has no other drain."""

    added: dict[str, tuple[Join, bytes]]
    drained: dict[str, bytes]
    joining: dict[str, tuple[_CommandId, _PendingCommand]] = field(default_factory=dict)
    draining: dict[str, tuple[_CommandId, _PendingCommand]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of all additions, the oldest first."""
        return [*self.added, *self.joining]

    def has(self, name: str) -> bool:
        return name in self.added or name in self.joining

    def join(self, name: str) -> Join:
        if name in self.added:
            return self.added[name][0]
        command = self.joining[name][1].command
        assert isinstance(command, Join)
        return command

    def remove(self, name: str) -> None:
        """Removes the addition of this name, and its drain."""
        for each in (self.added, self.drained, self.joining, self.draining):
            each.pop(name, None)


class CommandLog:
    """The commands in force, and the pending ones."""

    def __init__(self) -> None:
        self._pending: dict[_CommandId, _PendingCommand] = {}
        self._added: dict[str, tuple[Join, bytes]] = {}
        self._drained: dict[str, bytes] = {}

    def send(self, asker: int, number: int, command: ReplicaCommand, payload: bytes, workers: Iterable[int]) -> None:
        """Registers a command that is sent to these workers."""
        self._pending[asker, number] = _PendingCommand(command, payload, set(workers))

    @property
    def full(self) -> bool:
        return len(self._pending) >= MAX_PENDING

    def is_pending(self, asker: int, number: int) -> bool:
        return (asker, number) in self._pending

    def note_answer(self, worker: int, asker: int, number: int, *, accepted: bool) -> None:
        """A worker has executed or refused a pending command."""
        if accepted:
            pending = self._pending[asker, number]
            pending.accepted = True
            pending.waiting_for.discard(worker)
        else:
            del self._pending[asker, number]
        self._bring_into_force()

    def note_end(self, worker: int) -> None:
        """A worker has ended. O(pending)."""
        for pending in self._pending.values():
            pending.waiting_for.discard(worker)
        self._bring_into_force()

    def apply_config(self, before: Config, after: Config) -> None:
        """Applies another configuration: it ends some additions (`remaining`), and drains of replicas that it removes or adds.

        As in the workers, a replica with another URL is another replica. A drain of a name in neither configuration stays,
        because it may concern a replica of a source. The workers execute all pending commands before the configuration. A new
        worker starts with `after`, so it must learn only their result.
        """
        done = self._fold(before)
        known = _urls(before) | {name: done.join(name).replica.url for name in done.names}
        left = _remaining_additions([done.join(name) for name in done.names], after)
        now = _urls(after) | {name: join.replica.url for name, join in left.items()}
        stays = {name for name in done.drained.keys() | done.draining.keys() if known.get(name) == now.get(name)}
        # A drain of a configured replica is in force now; a drain of a joining replica stays behind its addition.
        moved = {name: done.draining[name][1].payload for name in done.draining.keys() & stays if name not in left}
        self._added = {name: joined for name, joined in done.added.items() if name in left}
        self._drained = {name: payload for name, payload in (done.drained | moved).items() if name in stays}
        remaining_ids = {which for one in (done.joining, done.draining) for name, (which, _) in one.items() if name in left}
        self._pending = {which: pending for which, pending in self._pending.items() if which in remaining_ids}
        self._bring_into_force()

    def _fold(self, config: Config) -> _FoldedCommands:
        """Additions and drains after the execution of all pending commands with this configuration."""
        done = _FoldedCommands(dict(self._added), dict(self._drained))
        configured = _urls(config)
        for which, pending in self._pending.items():
            match pending.command:
                case Join(pool, replica):
                    source = CONFIGURATION if replica.name in configured else OPERATORS if done.has(replica.name) else None
                    members = len(configured) + len(done.added) + len(done.joining)
                    if not addition_problem(config, member_of(replica, pool), source, members):
                        done.remove(replica.name)
                        done.joining[replica.name] = which, pending
                case Leave(name):
                    if done.has(name):
                        done.remove(name)
                case Drain(name, on):
                    done.drained.pop(name, None)
                    done.draining.pop(name, None)
                    if on and name in done.joining:
                        done.draining[name] = which, pending
                    elif on:
                        done.drained[name] = pending.payload
                case _:
                    assert_never(pending.command)
        return done

    def replay(self, worker: int) -> Iterator[tuple[int, bytes]]:
        """The messages for a new worker, in order, each with its asker (HUB: in force). The pending commands wait for its
        answer, too.
        """
        for _, payload in self._added.values():
            yield HUB, payload
        for payload in self._drained.values():
            yield HUB, payload
        for (asker, _), pending in self._pending.items():
            pending.waiting_for.add(worker)
            yield asker, pending.payload

    def _bring_into_force(self) -> None:
        """Brings the oldest pending commands into force, up to one without an answer of some worker."""
        while self._pending:
            which, pending = next(iter(self._pending.items()))
            if pending.waiting_for or not pending.accepted:
                return
            del self._pending[which]
            match pending.command:
                case Join(_, replica):  # of two replicas with one name the first stays
                    if replica.name not in self._added:
                        self._added[replica.name] = (pending.command, pending.payload)
                        self._drained.pop(replica.name, None)  # the drain of an earlier replica
                case Leave(name):
                    self._added.pop(name, None)
                    self._drained.pop(name, None)
                case Drain(name, on):
                    self._drained.pop(name, None)
                    if on:
                        self._drained[name] = pending.payload
                case _:
                    assert_never(pending.command)
            while len(self._drained) > MAX_DRAINS:
                del self._drained[next(iter(self._drained))]

    def __repr__(self) -> str:
        return f"<CommandLog: {len(self._added) + len(self._drained)} in force, {len(self._pending)} pending>"


def _urls(config: Config) -> dict[str, str]:
    """URLs of the configured replicas, by name."""
    return {replica.name: replica.url for pool in config.pools for replica in pool.replicas}


def _remaining_additions(joins: Sequence[Join], config: Config) -> dict[str, Join]:
    """The additions that stay in force with this configuration, by name. joins: the oldest first."""
    members = [member_of(join.replica, join.pool) for join in joins]
    outlive = set(remaining(members, _urls(config).keys(), {pool.name for pool in config.pools}))
    return {member.name: join for join, member in zip(joins, members, strict=True) if member in outlive}

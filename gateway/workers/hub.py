"""The middle of the star: what one worker says goes to the others from here, in one order for all.

What the routers booked is passed on unread, and kept for a while, so that a worker that replaces another begins with what the
others know: the commands of operators (`commands.py`), then the recent past (HISTORY_BYTES, and no longer than the prefix index
would remember it), then what is still open, which the others tell it themselves. What a worker had counted when it ended stays
counted.
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gateway.config import Config
from gateway.everywhere import Command, Refuse, Take
from gateway.exposition import packed, unpacked_slices
from gateway.metrics import Metrics
from gateway.workers.channel import (
    ANSWER,
    ASKED,
    COMMAND,
    CURRENT,
    EVENTS,
    GONE,
    HUB,
    JOINED,
    RESYNC,
    SCRAPE,
    SERVING,
    TOLD,
    WELCOME,
    Channel,
)
from gateway.workers.commands import Commands

HISTORY_BYTES = 16 << 20


@dataclass(slots=True, eq=False)
class Member:
    """One worker.

    told: its counters, as it told them last. heard_at: time of its last frame. well_at: likewise, while it takes requests;
    until then the time when it was started.
    """

    channel: Channel
    heard_at: float
    well_at: float
    serving: bool = False
    told: bytes = b""


class Hub:
    """See the top of this file. on_serving: is told of each worker that takes requests."""

    def __init__(self, config: Config, clock: Callable[[], float], on_serving: Callable[[int], None]) -> None:
        self.config = config
        self.members: dict[int, Member] = {}
        self.ended = Metrics()  # what those have counted who are no more
        self._ended_packed = b""  # the same for the workers' pages; empty: to be packed again
        self._clock = clock
        self._on_serving = on_serving
        self._joined = 0
        self._history: deque[tuple[float, int, int, bytes]] = deque()  # when, kind, who, payload
        self._history_bytes = 0
        self._commands = Commands()
        self._commanded = 0  # commands of its own

    def join(self, channel: Channel) -> int:
        """A new worker. Returns its number, which no other has or had."""
        self._joined += 1
        who = self._joined
        member = Member(channel, heard_at=self._clock(), well_at=self._clock())
        channel.send(WELCOME, who, 0, pickle.dumps(self.config))
        for payload in self._commands.replay():
            channel.send(COMMAND, HUB, 0, payload)
        self._forget_history()
        for _, kind, source, payload in self._history:
            channel.send(kind, source, 0, payload)
        channel.send(CURRENT)
        for other in self.members.values():
            other.channel.send(JOINED, who)
        self.members[who] = member
        channel.receive(lambda *frame: self._receive(who, *frame), lambda: None)
        return who

    def leave(self, who: int) -> None:
        """That worker is no more."""
        member = self.members.pop(who)
        member.channel.close()
        self._commands.ended(who)
        if member.told:
            for told in unpacked_slices(member.told):
                self.ended.page.take_in(told, ended=True)
            self._ended_packed = b""
        self._remember(GONE, who, b"")
        self._broadcast(GONE, who, 0, b"")

    def command(self, key: str, command: Command) -> None:
        """From here to all workers. key: what it is about (`Commands`)."""
        self._commanded += 1
        self._command(HUB, self._commanded, pickle.dumps((key, command, math.inf)))

    def _receive(self, who: int, kind: int, to: int, number: int, payload: bytes) -> None:
        member = self.members.get(who)
        if member is None:  # it was given up, and says its last words
            return
        member.heard_at = self._clock()
        if member.serving:
            member.well_at = member.heard_at
        if kind in (EVENTS, RESYNC):
            self._remember(kind, who, payload)
            self._broadcast(kind, who, 0, payload, but=who)
        elif kind == TOLD:
            member.told = payload
        elif kind == SERVING:
            member.serving = True
            self._on_serving(who)
        elif kind == ANSWER:
            self._answer(who, to, number, payload)
        elif kind == SCRAPE:
            self._asked(member, number)
            member.channel.send(ANSWER, HUB, number, self._packed_ended())
            self._broadcast(SCRAPE, who, number, payload)
        elif kind == COMMAND:
            self._command(who, number, payload)

    def restarted(self) -> None:
        """A worker has ended that should not have."""
        self.ended.worker_restarts.add()
        self._ended_packed = b""

    def _packed_ended(self) -> bytes:
        """The counters of workers that have ended; packed once after each end."""
        self._ended_packed = self._ended_packed or packed(self.ended.page)
        return self._ended_packed

    def _asked(self, asker: Member, number: int) -> None:
        asker.channel.send(ASKED, HUB, number, pickle.dumps({who: member.told for who, member in self.members.items()}))

    def _answer(self, who: int, asker: int, number: int, payload: bytes) -> None:
        if self._commands.is_pending(asker, number):
            self._commands.answered(who, asker, number, accepted=pickle.loads(payload) is None)
        if asker in self.members:
            self.members[asker].channel.send(ANSWER, who, number, payload)

    def _command(self, who: int, number: int, payload: bytes) -> None:
        key, command, until = pickle.loads(payload)
        replayed = not isinstance(command, Take | Refuse)
        if self._clock() > until or (replayed and self._commands.full):
            return  # the asker hears nothing, and gives up
        if who in self.members:
            self._asked(self.members[who], number)
        if isinstance(command, Take):
            self.config = command.config
            self._commands.reconfigured({replica.name for pool in self.config.pools for replica in pool.replicas})
        elif replayed:
            self._commands.send(who, number, key, payload, self.members)
        self._broadcast(COMMAND, who, number, payload)

    def _broadcast(self, kind: int, who: int, number: int, payload: bytes, but: int = HUB) -> None:
        for name, member in self.members.items():
            if name != but:
                member.channel.send(kind, who, number, payload)

    def _remember(self, kind: int, who: int, payload: bytes) -> None:
        self._history.append((self._clock(), kind, who, payload))
        self._history_bytes += len(payload)
        if self._history_bytes > HISTORY_BYTES:
            self._forget_history()

    def _forget_history(self) -> None:
        since = self._clock() - self.config.routing.ttl_s
        while self._history and (self._history_bytes > HISTORY_BYTES or self._history[0][0] < since):
            self._history_bytes -= len(self._history.popleft()[3])

    def silent(self, for_s: float) -> Iterator[int]:
        """Who has said nothing for so long."""
        since = self._clock() - for_s
        return (who for who, member in self.members.items() if member.heard_at < since)

    def unwell(self, for_s: float) -> Iterator[int]:
        """The workers that have taken no requests for `for_s`, as far as one can tell from here."""
        since = self._clock() - for_s
        return (who for who, member in self.members.items() if member.well_at < since)

    def well(self, within_s: float) -> Iterator[int]:
        """The workers that take requests and were heard within that time."""
        since = self._clock() - within_s
        return (who for who, member in self.members.items() if member.serving and member.well_at >= since)

    def excuse(self, for_s: float) -> None:
        """The supervisor itself did not run for `for_s`: nobody could be heard."""
        now = self._clock()
        for member in self.members.values():
            member.heard_at = min(now, member.heard_at + for_s)
            member.well_at = min(now, member.well_at + for_s)

    def __repr__(self) -> str:
        return f"<Hub of {', '.join(map(str, self.members)) or 'nobody'}, {self._history_bytes} bytes of history>"

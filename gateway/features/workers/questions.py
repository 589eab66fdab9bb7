"""A worker's questions: to all workers, through the hub, and to the hub itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from gateway.cluster.messages import SharingState
from gateway.cluster.replication import UNSENT_BYTES
from gateway.errors import supervisor_silent
from gateway.features.workers.channel import HUB, Channel
from gateway.features.workers.messages import (
    AskSharing,
    Examine,
    Examined,
    Execute,
    Executed,
    Forwarded,
    Look,
    Looked,
    Record,
    Recorded,
    Scrape,
    Scraped,
    Sharing,
)

log = logging.getLogger("warmroute.workers")


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """Limits on waiting for the other workers and the hub.

    forwarded_s: the hub forwards a question within this time, or not at all. scrape_s: of a worker that does not answer by
    then, the last snapshot is used. command_s: until all have executed a command, and probed a replica that it adds.
    unsent_bytes: of routing events that the hub has not taken, then further ones are dropped.
    """

    forwarded_s: float = 3.0
    scrape_s: float = 2.0
    command_s: float = 30.0
    unsent_bytes: int = UNSENT_BYTES


PEER_LIMITS = PeerLimits()


class Question:
    """A question to all workers.

    snapshots: each asked worker's last counters, used if it does not answer in time; None until the hub has forwarded the
    question. answers: by worker. gone: the workers that have ended since.
    """

    def __init__(self) -> None:
        self.forwarded = asyncio.Event()
        self.snapshots: dict[int, bytes] | None = None
        self.answers: dict[int, Scraped | Recorded | Examined | Looked | Executed] = {}
        self.gone: set[int] = set()
        self.all_answered = asyncio.Event()

    @property
    def silent(self) -> list[int]:
        """The workers that have not answered."""
        return sorted((self.snapshots or {}).keys() - self.answers.keys() - self.gone)

    def receive(self, worker: int, message: Forwarded | Scraped | Recorded | Examined | Looked | Executed) -> None:
        if isinstance(message, Forwarded):
            self.snapshots = dict(message.snapshots)
            self.forwarded.set()
        else:
            self.answers[worker] = message
        self._look()

    def leave(self, worker: int) -> None:
        """It will not answer any more."""
        self.gone.add(worker)
        self._look()

    def _look(self) -> None:
        if self.snapshots is not None and not self.silent:
            self.all_answered.set()


class Questions:
    """See the top of this file. The reader of the channel calls `receive` and `leave`."""

    def __init__(self, channel: Channel, limits: PeerLimits) -> None:
        self._channel = channel
        self._limits = limits
        self._number = 0  # of the last one
        self._open: dict[int, Question] = {}
        self._sharing: dict[int, asyncio.Future[SharingState | None]] = {}  # likewise, for the hub itself

    async def ask(self, make: Callable[[int], Scrape | Record | Examine | Look | Execute], timeout_s: float) -> Question:
        """Ask all workers, this one too, and wait for their answers, `timeout_s` at most. Raises GatewayError 503."""
        number, question = self._next(), Question()
        self._open[number] = question
        self._channel.send(make(number), HUB)
        try:
            async with asyncio.timeout(self._limits.forwarded_s + 1.0):  # it may be forwarded in the last moment
                await question.forwarded.wait()
            async with asyncio.timeout(timeout_s):
                await question.all_answered.wait()
        except TimeoutError:
            if question.snapshots is None:
                log.warning("the supervisor does not answer")
                raise supervisor_silent() from None
            log.warning("not all workers answer", extra={"silent": question.silent})
        finally:
            del self._open[number]
        return question

    async def sharing(self) -> SharingState | None:
        """How the exchange with other gateways goes, from the hub. Raises GatewayError 503: it does not answer."""
        number = self._next()
        answer: asyncio.Future[SharingState | None] = asyncio.get_running_loop().create_future()
        self._sharing[number] = answer
        self._channel.send(AskSharing(number), HUB)
        try:
            async with asyncio.timeout(self._limits.forwarded_s):
                return await answer
        except TimeoutError:
            log.warning("the supervisor does not answer")
            raise supervisor_silent() from None
        finally:
            del self._sharing[number]

    def _next(self) -> int:
        """The number of a new one. Raises GatewayError 503: the hub takes nothing now."""
        if self._channel.unsent > UNSENT_BYTES:
            raise supervisor_silent()
        self._number += 1
        return self._number

    def receive(self, worker: int, message: Forwarded | Scraped | Recorded | Examined | Looked | Executed | Sharing) -> None:
        """An answer. One that nobody waits for any more is ignored."""
        number = message.number
        if isinstance(message, Sharing):
            if (answer := self._sharing.get(number)) and not answer.done():
                answer.set_result(message.state)
        elif question := self._open.get(number):
            question.receive(worker, message)

    def leave(self, worker: int) -> None:
        """A worker has ended."""
        for question in self._open.values():
            question.leave(worker)

    def __repr__(self) -> str:
        return f"<Questions: {len(self._open) + len(self._sharing)} open>"

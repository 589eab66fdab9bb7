"""A worker's questions and commands, sent through the hub to all workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from gateway.cluster.replication import UNSENT_BYTES
from gateway.errors import supervisor_silent
from gateway.features.workers.channel import HUB, Channel
from gateway.features.workers.messages import Ask, Execute, TopicAnswer, decode_answers

log = logging.getLogger("warmroute.workers")


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """Limits on waiting for the other workers and the hub.

    forwarded_s: the hub forwards a question within this time, or not at all. scrape_s: after this time the last snapshot of a
    worker is used. command_s: until all have executed a command, and probed a replica that it adds. unsent_bytes: limit of
    routing events that the hub has not read; further ones are dropped.
    """

    forwarded_s: float = 3.0
    scrape_s: float = 2.0
    command_s: float = 30.0
    unsent_bytes: int = UNSENT_BYTES


PEER_LIMITS = PeerLimits()


class Question:
    """A question to all workers.

    last: default answers by worker, for workers that send none; under HUB the hub's own answer; None until the hub has
    forwarded the question. answers: by worker. ended: workers that have ended since.
    """

    def __init__(self) -> None:
        self.forwarded = asyncio.Event()
        self.last: dict[int, bytes] | None = None
        self.answers: dict[int, TopicAnswer] = {}
        self.ended: set[int] = set()
        self.all_answered = asyncio.Event()

    def all(self) -> dict[int, bytes]:
        """The nonempty answers by worker."""
        given = {worker: answer.answer for worker, answer in self.answers.items()}
        return {worker: answer for worker, answer in {**(self.last or {}), **given}.items() if answer}

    @property
    def silent(self) -> list[int]:
        """The workers that have not answered."""
        return sorted((self.last or {}).keys() - self.answers.keys() - self.ended - {HUB})

    def receive(self, worker: int, answer: TopicAnswer) -> None:
        """Raises MessageError."""
        if worker == HUB:
            self.last = decode_answers(answer.answer)
            self.forwarded.set()
        else:
            self.answers[worker] = answer
        self._check_complete()

    def leave(self, worker: int) -> None:
        """The worker has ended without an answer."""
        self.ended.add(worker)
        self._check_complete()

    def _check_complete(self) -> None:
        if self.last is not None and not self.silent:
            self.all_answered.set()


class Questions:
    """The open questions of one worker. The reader of the channel is to call `receive` and `leave`."""

    def __init__(self, channel: Channel, limits: PeerLimits) -> None:
        self._channel = channel
        self._limits = limits
        self._number = 0  # of the last question
        self._open: dict[int, Question] = {}

    async def ask(self, make: Callable[[int], Ask | Execute], timeout_s: float) -> Question:
        """Asks all workers, including this one, and waits for their answers, at most `timeout_s`. Raises GatewayError 503."""
        number, question = self._next(), Question()
        self._open[number] = question
        self._channel.send(make(number), HUB)
        try:
            async with asyncio.timeout(self._limits.forwarded_s + 1.0):  # the hub may forward it at the last moment
                await question.forwarded.wait()
            async with asyncio.timeout(timeout_s):
                await question.all_answered.wait()
        except TimeoutError:
            if question.last is None:
                log.warning("the supervisor does not answer")
                raise supervisor_silent() from None
            log.warning("not all workers answer", extra={"silent": question.silent})
        finally:
            del self._open[number]
        return question

    def _next(self) -> int:
        """The number of the next question. Raises GatewayError 503 while the hub does not read."""
        if self._channel.unsent > UNSENT_BYTES:
            raise supervisor_silent()
        self._number += 1
        return self._number

    def receive(self, worker: int, answer: TopicAnswer) -> None:
        """Ignores late answers. Raises MessageError."""
        if question := self._open.get(answer.number):
            question.receive(worker, answer)

    def leave(self, worker: int) -> None:
        """A worker has ended."""
        for question in self._open.values():
            question.leave(worker)

    def __repr__(self) -> str:
        return f"<Questions: {len(self._open)} open>"

"""The clients of a soak: well-behaved ones under constant load, and hostile ones; and the counts of their outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.soak.attacks import Attack, Target, attacks
from tests.chaos.load import ANSWERED, Client, questions

MAX_ERROR_TEXTS = 30  # different texts that are kept


@dataclass(slots=True)
class Tally:
    """Outcomes of one group's requests. seconds: of those that were answered."""

    fates: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    seconds: array[float] = field(default_factory=lambda: array("d"))
    open: int = 0

    @property
    def sent(self) -> int:
        return self.fates.total()

    def count(self, fate: str, why: str, seconds: float) -> None:
        self.fates[fate] += 1
        if why and (why in self.reasons or len(self.reasons) < MAX_ERROR_TEXTS):
            self.reasons[why] += 1
        if fate == ANSWERED:
            self.seconds.append(seconds)

    def percentile(self, share: float) -> float:
        """Seconds; 0 of nothing."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


class Crowd:
    """Well-behaved clients of one model, each with one request at a time; every other keeps its connection.

    `stop` lets what runs end.
    """

    def __init__(self, url: str, model: str, count: int, seed: int) -> None:
        self.model, self.tally = model, Tally()
        self._questions = questions(seed, model=model)
        self._over = False
        self._clients = [Client(url, keeps=number % 2 == 0) for number in range(count)]
        self._tasks = [asyncio.create_task(self._ask(client)) for client in self._clients]

    async def _ask(self, client: Client) -> None:
        with contextlib.closing(client):
            while not self._over:
                question, begun = next(self._questions), time.monotonic()
                self.tally.open += 1
                fate = await client.ask(question)
                self.tally.open -= 1
                self.tally.count(fate.kind, fate.why[:160], time.monotonic() - begun)
                if fate.kind != ANSWERED:
                    await asyncio.sleep(0.05)  # as a client that is refused waits before its next request

    async def stop(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)


class Attackers:
    """Hostile clients, each with one attack at a time; all take the kinds in turn, in random order.

    outcomes: counts by kind and outcome.
    """

    def __init__(self, target: Target, count: int, seed: int, only: Sequence[str] = ()) -> None:
        self.outcomes: dict[str, Counter[str]] = {}
        self._kinds = [(name, attack) for name, attack in attacks() if not only or name in only]
        self._over = False
        self._target = target
        self._tasks = [asyncio.create_task(self._attack(random.Random(f"{seed} {at}"))) for at in range(count)]

    async def _attack(self, chance: random.Random) -> None:
        while not self._over:
            for name, attack in chance.sample(self._kinds, len(self._kinds)):
                if self._over:
                    break
                self.outcomes.setdefault(name, Counter())[await self._one(attack, chance)] += 1

    async def _one(self, attack: Attack, chance: random.Random) -> str:
        try:
            return await attack(self._target, chance)
        except OSError as error:
            await asyncio.sleep(0.05)  # the port is closed for a moment
            return type(error).__name__

    async def stop(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)

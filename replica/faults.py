"""What goes wrong at a simulated replica, on purpose: late requests, failed ones, broken ones, a sudden death.

Nothing here happens by itself: `fates` says for each request, in the order of their coming, what is to befall it, and the
engine sees to it. The source of chance is an argument. Every fate takes the same number of draws, so with the same seed the
requests that fail are the same whatever else is asked for.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

ERROR = "an error was injected (--fault-errors)"
BREAK = "a break was injected (--fault-breaks)"


@dataclass(frozen=True, slots=True)
class FaultConfig:
    """Times in seconds, on average; shares of requests, 0 to 1."""

    latency_s: float = 0.0
    errors: float = 0.0
    breaks: float = 0.0
    death_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fate:
    """What befalls one request: it is held back for `delay_s`; it fails in the place of its first token; its answer breaks
    behind this share of its tokens."""

    delay_s: float = 0.0
    fails: bool = False
    breaks: float | None = None

    def last_token(self, answer: int) -> int | None:
        """How many tokens of an answer come before it fails, if it fails. One of a single token cannot break."""
        if self.fails:
            return 0
        return None if self.breaks is None or answer < 2 else 1 + int(self.breaks * (answer - 1))


def fates(config: FaultConfig, chance: Random) -> Iterator[Fate]:
    """One for each request, without end."""
    while True:
        late, fails, breaks, where = (chance.random() for _ in range(4))
        yield Fate(_about(config.latency_s, late), fails < config.errors, where if breaks < config.breaks else None)


def no_fates() -> Iterator[Fate]:
    """Nothing goes wrong."""
    return itertools.repeat(Fate())


def lifetime(config: FaultConfig, chance: Random) -> float | None:
    """After how many seconds the replica dies; None if it lives."""
    return _about(config.death_s, chance.random()) if config.death_s else None


def _about(mean: float, chance: float) -> float:
    """Evenly between half the mean and one and a half of it."""
    return mean * (0.5 + chance)

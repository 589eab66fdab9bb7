"""Fault injection for a simulated replica: delayed requests, failed ones, broken streams, a sudden death.

`fault_sequence` draws one fault per request, in order of arrival; the engine applies it. The random generator is an argument.
Every fault takes the same number of draws, so with one seed the same requests fail, independently of other enabled faults.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

ERROR = "an error was injected (--fault-errors)"
BREAK = "a break was injected (--fault-breaks)"


@dataclass(frozen=True, slots=True)
class FaultConfig:
    """Mean times in seconds; shares of requests, 0 to 1."""

    latency_s: float = 0.0
    errors: float = 0.0
    breaks: float = 0.0
    death_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One request's fault: a delay before it is queued; a failure instead of its first token; a break after this share of its
    answer's tokens (None: no break).
    """

    delay_s: float = 0.0
    fails: bool = False
    breaks: float | None = None

    def fails_after(self, answer: int) -> int | None:
        """The number of tokens after which an answer of this length fails, None if it does not. A single token cannot break."""
        if self.fails:
            return 0
        return None if self.breaks is None or answer < 2 else 1 + int(self.breaks * (answer - 1))


def fault_sequence(config: FaultConfig, random: Random) -> Iterator[Fault]:
    """An endless sequence of faults, one per request."""
    while True:
        delay, fails, breaks, where = (random.random() for _ in range(4))
        yield Fault(_about(config.latency_s, delay), fails < config.errors, where if breaks < config.breaks else None)


def no_faults() -> Iterator[Fault]:
    """An endless sequence without faults."""
    return itertools.repeat(Fault())


def lifetime(config: FaultConfig, random: Random) -> float | None:
    """Seconds until the replica dies; None: it does not."""
    return _about(config.death_s, random.random()) if config.death_s else None


def _about(mean: float, draw: float) -> float:
    """Uniform between 0.5 and 1.5 times the mean; `draw` is uniform between 0 and 1."""
    return mean * (0.5 + draw)

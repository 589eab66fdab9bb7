"""The state of one replica. `prober.py` writes most of it, `directory.py` decides by it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gateway.errors import NO_ACCESS, REFUSED, UNREACHABLE
from gateway.fleet.breaker import CLOSED, Breaker
from gateway.fleet.cache_reports import Overlap
from gateway.fleet.engine_client import Models
from gateway.fleet.engines import EngineProfile, Facts, named
from gateway.fleet.membership import MAX_WEIGHT, Member
from gateway.fleet.refusals import Refusals

NOT_PROBED = "not probed yet"
DRAINING = "draining"
SLOW_START_S = 10.0  # a replica that came back gets less than its share for that long
FIRST_SHARE = 0.1
LACKS_S = 600.0  # then it is asked again whether it speaks a dialect: it may have been upgraded
LACKED_S = 10.0  # the same where no replica is known to speak it
EXTRA_PROBES = 3  # beside the regular ones, at once


class ProbeBudget:
    """Probes of one replica beside the regular ones: EXTRA_PROBES at once, then one per probe interval. O(1)."""

    __slots__ = ("_left", "_since")

    def __init__(self) -> None:
        self._left = float(EXTRA_PROBES)
        self._since = float("-inf")

    def take(self, now: float, interval_s: float) -> bool:
        """Whether one more is within the budget; if so, it is spent."""
        self._left = min(EXTRA_PROBES, self._left + max(0.0, now - self._since) / interval_s)
        self._since = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def __repr__(self) -> str:
        return f"<ProbeBudget {self._left:.3g} of {EXTRA_PROBES}>"


def share(up_since: float, now: float, window_s: float) -> float:
    """The part of its share of requests that a replica gets after it came up: a tenth at first, all of it after window_s."""
    age_s = max(0.0, now - up_since)
    return 1.0 if age_s >= window_s else FIRST_SHARE + (1 - FIRST_SHARE) * age_s / window_s


@dataclass(slots=True, eq=False)
class ReplicaState:
    """Kept while the replica is down. models: the entries of its model list, by id.

    down_by: the reason of the last failure that took it down. rests_until: the end of its Retry-After. started: the latest
    start of its process that was seen. warm: it was up since its cache was last taken for lost. engine_capacity_tokens: the
    size of its KV cache, as its engine reports it. probes: good ones since it came up. has_metrics: it has a page of metrics.
    drained: an operator wants no new requests there. leaving: no source names it any more; it is here until what runs there is
    over. probed: its first probe is over, or it has left. closed_after_s: an extra probe is under way, because it closed a
    connection that had been idle for that time. idle_limit_s: the shortest such time that was no sign of a restart.
    lacks: names of dialects whose path it did not know, and when that was.
    """

    member: Member
    breaker: Breaker
    up: bool = False
    drained: bool = False
    leaving: bool = False
    up_since: float = float("-inf")
    rests_until: float = float("-inf")
    refusals: Refusals = field(default_factory=Refusals)
    needs_key: bool = False  # its model list needs a key, so its models are unknown
    models: Models = field(default_factory=dict)
    failed_probes: int = 0
    error: str = NOT_PROBED
    down_by: str = ""
    facts: Facts = field(default_factory=Facts)
    engine_capacity_tokens: int | None = None
    started: float | None = None
    warm: bool = False
    probes: int = 0
    has_metrics: bool = False
    overlap: Overlap = field(default_factory=Overlap)
    probe_now: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    probed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    probe_budget: ProbeBudget = field(default_factory=ProbeBudget)
    closed_after_s: float | None = None
    idle_limit_s: float = float("inf")
    lacks: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def url(self) -> str:
        return self.member.url

    @property
    def engine(self) -> EngineProfile:
        """As its source names it, else as it was recognised."""
        return named(self.member.engine) or self.facts.engine

    @property
    def draining(self) -> bool:
        """Whether an operator or its source wants no new requests there."""
        return self.drained or self.member.draining

    @property
    def live(self) -> bool:
        """Whether it may be sent new requests."""
        return self.up and not self.draining and not self.leaving

    @property
    def doubtful(self) -> bool:
        """Whether nothing but failed probes keeps it from being live. It is used when no replica is live: a busy engine may
        answer requests while its model list times out. A replica that refuses connections, or the gateway's key, answers no
        request either.
        """
        down_by_probes = self.down_by not in ("", REFUSED, UNREACHABLE, NO_ACCESS)
        return down_by_probes and not (self.up or self.draining or self.leaving)

    @property
    def down_reason(self) -> str:
        """Why it is not live."""
        return self.error if not self.up else DRAINING

    def speaks(self, dialect: str, now: float) -> bool:
        """Whether requests of this dialect go to it as they are; else they are translated, or go to others."""
        at = self.lacks.get(dialect)
        return (at is None or now - at > LACKS_S) and dialect not in self.engine.lacks

    def lacked(self, dialect: str, now: float) -> bool:
        """Whether it has just said so: to ask again would be in vain, also if no other one is left to be asked."""
        at = self.lacks.get(dialect)
        return dialect in self.engine.lacks or (at is not None and now - at <= LACKED_S)

    def share(self, now: float) -> float:
        """The part of its share of requests that it gets now: its weight, and less in the first seconds after it came up."""
        return share(self.up_since, now, SLOW_START_S) * self.member.weight / MAX_WEIGHT

    def restricted(self, now: float) -> bool:
        """Whether it gets less than others: its breaker is not closed, it rests, it has less weight, or it has just come up."""
        return self.breaker.state(now) != CLOSED or now < self.rests_until or self.share(now) < 1

    @property
    def capacity_tokens(self) -> int | None:
        """The size of its KV cache: its source's value, else its engine's. None: unknown."""
        return self.member.capacity_tokens or self.engine_capacity_tokens

    @property
    def context_tokens(self) -> int | None:
        """The longest prompt that any of its models takes, where its model list has it (vLLM, SGLang)."""
        lengths = [entry.context_tokens for entry in self.models.values()]
        return max((length for length in lengths if length is not None), default=None)

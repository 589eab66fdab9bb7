"""The state of one replica. `prober.py` writes most of it, `directory.py` reads it for its decisions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gateway.config.kinds import BOOTSTRAP_PORT, MAX_WEIGHT
from gateway.config.schema import AUTO_ENGINE
from gateway.errors import LOADING, NO_ACCESS, REFUSED, UNREACHABLE
from gateway.fleet.breaker import CLOSED, Breaker
from gateway.fleet.cache_reports import Overlap
from gateway.fleet.engine_client import Models
from gateway.fleet.engines import EngineProfile, Facts, named
from gateway.fleet.membership import PREFILL, Member
from gateway.fleet.places import Places
from gateway.fleet.refusals import Refusals

NOT_PROBED = "not probed yet"
DRAINING = "draining"
ASLEEP = "asleep"
NO_ANSWERS = "it only computes prompts"
BETWEEN_PROCESSES = frozenset([REFUSED, LOADING])  # reasons of a failure that show that a process has ended, or just begun
LACKS_S = 600.0  # after which a replica is asked again for a dialect that it lacked: it may have been upgraded
LACKED_S = 10.0  # likewise, if no replica is known to speak the dialect
USAGE_WISH = "stream_options"  # in `lacks`: the server refuses the gateway's wish for the usage of streams
PRIORITY_FIELD = "priority"  # in `lacks`: the engine does not schedule by it, and refuses it
EXTRA_PROBES = 3  # at once, beside the regular ones


class ProbeBudget:
    """Probes of one replica beside the regular ones: EXTRA_PROBES at once, then one per probe interval. O(1)."""

    __slots__ = ("_left", "_since")

    def __init__(self) -> None:
        self._left = float(EXTRA_PROBES)
        self._since = float("-inf")

    def take(self, now: float, interval_s: float) -> bool:
        """Spend one extra probe. False: the budget is used up."""
        self._left = min(EXTRA_PROBES, self._left + max(0.0, now - self._since) / interval_s)
        self._since = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def __repr__(self) -> str:
        return f"<ProbeBudget {self._left:.3g} of {EXTRA_PROBES}>"


@dataclass(slots=True, eq=False)
class ReplicaState:
    """The state of one replica, kept while it is down. models: the entries of its model list, by id.

    down_by: the reason of the last failure that took it down. rests_until: the end of its Retry-After. started: the latest
    known start of its process. warm: it was up since its cache last counted as lost. engine_capacity_tokens: the size of its KV
    cache, as its engine reports it. probes: successful ones since it came up. has_metrics: it has a page of metrics. drained:
    an operator wants no new requests there. leaving: no source names it, but some of its requests are still running. probed:
    set once its first probe is over, or it has left. closed_after_s: an extra probe is running because it closed a connection
    after this idle time. idle_limit_s: the shortest idle time after which it closed a connection without a restart. lacks: time
    at which it did not know the path of a dialect, by the dialect's name, or refused USAGE_WISH or PRIORITY_FIELD. findings: of
    the audit (docs/audit.md). miscounts_cached, miscounts_prompts: by these its cached tokens are not used, nor prompt tokens
    far above the estimate. places: how many requests its engine runs at once. hung: it answers probes, and generates nothing:
    it gets new requests only if no other replica is left. wakes: it is woken when a request needs it.
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
    findings: frozenset[str] = frozenset()
    miscounts_cached: bool = False
    miscounts_prompts: bool = False
    places: Places = field(default_factory=Places)
    hung: bool = False
    wakes: bool = False

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def url(self) -> str:
        return self.member.url

    @property
    def answers(self) -> bool:
        """True if requests may be answered there: it does more than compute prompts for others."""
        return self.role != PREFILL

    @property
    def role(self) -> str:
        """Its role: as its source says, else as its engine does."""
        return self.member.role or self.facts.role

    @property
    def bootstrap_port(self) -> int:
        """SGLang's port at which decoders find it, of a prefiller."""
        return self.member.bootstrap_port or self.facts.bootstrap_port or BOOTSTRAP_PORT

    @property
    def engine(self) -> EngineProfile:
        """The engine: as its source names it, else as recognised."""
        profile = None if self.member.engine == AUTO_ENGINE else named(self.member.engine)
        return profile or self.facts.engine

    @property
    def draining(self) -> bool:
        """True if an operator or its source wants no new requests there."""
        return self.drained or self.member.draining

    @property
    def live(self) -> bool:
        """True if it may get new requests."""
        return self.up and not self.draining and not self.leaving and not self.facts.asleep

    @property
    def wakeable(self) -> bool:
        """True if it sleeps, and a request would wake it."""
        sleeps = self.up and self.facts.asleep and self.facts.restorable
        return sleeps and self.wakes and not self.draining and not self.leaving

    @property
    def doubtful(self) -> bool:
        """True if only failed probes keep it from being live. It is used when no replica is live: a busy engine may answer
        requests while its model list times out. A replica that refuses connections or the gateway's key, or loads its
        model, does not answer requests either.
        """
        down_by_probes = self.down_by not in ("", REFUSED, LOADING, UNREACHABLE, NO_ACCESS)
        return down_by_probes and not (self.up or self.draining or self.leaving)

    def began_after(self, at: float) -> bool:
        """True if its process was seen to begin after that time, or has not begun yet."""
        return self.down_by in BETWEEN_PROCESSES and (not self.up or self.up_since > at)

    @property
    def down_reason(self) -> str:
        """The reason why it gets no requests of clients: it is not live, or does not answer."""
        if not self.up:
            return self.error
        if self.live:
            return NO_ANSWERS
        return ASLEEP if self.facts.asleep and not self.draining else DRAINING

    def speaks(self, dialect: str, now: float) -> bool:
        """True if requests of this dialect, or with USAGE_WISH or PRIORITY_FIELD, are sent to it unchanged; else they are
        translated, or sent to others.
        """
        at = self.lacks.get(dialect)
        return (at is None or now - at > LACKS_S) and dialect not in self.engine.lacks

    def lacked(self, dialect: str, now: float) -> bool:
        """True if it has lacked the dialect only just now: asking again would be useless, even if no other replica is left."""
        at = self.lacks.get(dialect)
        return dialect in self.engine.lacks or (at is not None and now - at <= LACKED_S)

    @property
    def share(self) -> float:
        """The part of the requests for which it is a candidate, by its weight."""
        return self.member.weight / MAX_WEIGHT

    def restricted(self, now: float) -> bool:
        """True if it gets less than others: its breaker is not closed, it rests, it hangs, or it has less weight."""
        return self.hung or self.breaker.state(now) != CLOSED or now < self.rests_until or self.share < 1

    @property
    def capacity_tokens(self) -> int | None:
        """The size of its KV cache: from its source, else from its engine. None: unknown."""
        return self.member.capacity_tokens or self.engine_capacity_tokens

    @property
    def context_tokens(self) -> int | None:
        """The longest prompt that any of its models accepts, if its model list has it (vLLM, SGLang)."""
        lengths = [entry.context_tokens for entry in self.models.values()]
        return max((length for length in lengths if length is not None), default=None)

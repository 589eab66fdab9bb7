"""Examines a stream of requests, one after the other in the order of time. Findings and sums are available at any time.

A request is examined once. Its longest common beginning with any earlier prompt is `reusable`: an ideal cache would have it.
For the next request of a conversation, nothing more could be reused. Otherwise, if it is related to an earlier prompt
(`window.py`), and there is evidence that it should have continued that prompt (`kinship.py`), the prefix is broken:

    lost = tokens reusable from the earlier prompt without the difference  -  actually reusable tokens

Lost tokens are tokens of the prompt, by the engine's count if available, otherwise estimated. Reusable tokens that the engine
reports as not cached are also lost, for other reasons (`delivery.py`). Their price is the difference between uncached and
cached tokens. Less than MIN_LOST tokens are not a finding. A request has at most one finding of each of the two kinds.

Bounds: the window's; FINDINGS, EXCERPT, SESSIONS. Synchronous, pure.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.dialects.prompt.batch import common_length
from gateway.features.doctor.delivery import MIN_LOST, undelivered
from gateway.features.doctor.differences import Difference
from gateway.features.doctor.kinship import Break, compare, continues
from gateway.features.doctor.observed import ObservedRequest
from gateway.features.doctor.window import MAX_BYTES, MAX_PROMPTS, Window

FINDINGS: Final = 1000  # stored findings; all are counted
SESSIONS: Final = 100_000  # counted sessions, at most
BEFORE, BEHIND = 40, 60  # bytes of text shown around the first difference


class Finding(NamedTuple):
    """A request that lost tokens. before: the number and place of the earlier request. at: offset of the first difference in
    the prompt, in bytes or tokens; -1: none. old, new: the differing parts, as digests, or as texts if these may be shown.
    entry: the first difference in the prompt log, as an index; -1: unknown.
    """

    cause: str
    number: int
    place: str
    session: str
    model: str
    before: int
    before_place: str
    where: str
    at: int
    old: str
    new: str
    shown: bool
    tokens: int
    usd: float | None
    entry: int = -1


class TokenSum:
    """The sum for one cause. usd: as far as prices are known. first: its first finding."""

    __slots__ = ("count", "first", "tokens", "usd")

    def __init__(self, first: Finding) -> None:
        self.first = first
        self.count = 0
        self.tokens = 0
        self.usd = 0.0

    def add(self, finding: Finding) -> None:
        self.count += 1
        self.tokens += finding.tokens
        self.usd += finding.usd or 0.0


class Examination:
    """tokens: of all prompts. reusable: their reusable tokens. reported: tokens of prompts with reported cached tokens. cached:
    these cached tokens. priced: a request has a price.
    """

    def __init__(self, max_prompts: int = MAX_PROMPTS, max_bytes: int = MAX_BYTES) -> None:
        """max_prompts, max_bytes: of the remembered prompts."""
        self._window = Window(max_prompts, max_bytes)
        self._sessions = set[tuple[str, str]]()
        self.requests = 0
        self.tokens = 0
        self.reusable = 0
        self.reported = 0
        self.cached = 0
        self.by_keys = 0
        self.by_keys_alone = 0
        self.priced = False
        self.first_time = self.last_time = 0.0
        self.sums = dict[str, TokenSum]()
        self.findings = list[Finding]()

    @property
    def sessions(self) -> int:
        """Number of named sessions, at most SESSIONS."""
        return len(self._sessions)

    @property
    def lost(self) -> int:
        return sum([each.tokens for each in self.sums.values()])

    @property
    def lost_usd(self) -> float | None:
        """None: no prices are known."""
        return sum([each.usd for each in self.sums.values()]) if self.priced else None

    def add(self, prompt: ObservedRequest) -> None:
        """Examines the next request of the stream. O(its segments and blocks)."""
        self.requests += 1
        prompt.number = self.requests
        self._count(prompt)
        blocks, holder = self._window.longest(prompt)
        reusable = min(prompt.units, blocks * prompt.block)
        self.reusable += prompt.tokens(reusable)
        related = self._window.related(prompt)
        before = next((each for each in related if continues(prompt, each)), None)
        if before is None and (broken := self._worst_break(prompt, related)):
            lost = prompt.tokens(broken.reusable - reusable)
            if lost >= MIN_LOST:
                self._add_finding(_finding(prompt, broken.before, broken.difference, lost))
        if source := before or holder:
            failed = undelivered(prompt, prompt.tokens(reusable), source)
            if failed:
                cause, lost = failed
                self._add_finding(_delivery_finding(prompt, source, cause, lost))
        self._window.add(prompt)

    def _count(self, prompt: ObservedRequest) -> None:
        self.first_time = prompt.time if self.requests == 1 else self.first_time
        self.last_time = prompt.time
        self.tokens += prompt.tokens(prompt.units)
        self.by_keys += not prompt.outline
        self.by_keys_alone += not prompt.outline and not prompt.session
        self.priced = self.priced or prompt.price is not None
        if prompt.session and len(self._sessions) < SESSIONS:
            self._sessions.add((prompt.tenant, prompt.session))
        if prompt.outcome and prompt.outcome.cached_tokens is not None:
            total = prompt.tokens(prompt.units)
            self.reported += total
            self.cached += min(prompt.outcome.cached_tokens, total)  # an engine may report an absurd count

    def _worst_break(self, prompt: ObservedRequest, related: list[ObservedRequest]) -> Break | None:
        """The break with the greatest cost."""
        found: Break | None = None
        for each in related:
            one = compare(prompt, each)
            if one is not None and (found is None or one.reusable > found.reusable):
                found = one
        return found

    def _add_finding(self, finding: Finding) -> None:
        if finding.cause not in self.sums:
            self.sums[finding.cause] = TokenSum(finding)
        self.sums[finding.cause].add(finding)
        if len(self.findings) < FINDINGS:
            self.findings.append(finding)

    def check(self) -> None:
        """For tests. Raises AssertionError if an invariant is broken."""
        self._window.check()
        assert len(self.findings) == min(FINDINGS, sum(each.count for each in self.sums.values()))

    def __repr__(self) -> str:
        return f"<Examination of {self.requests} requests, {sum(each.count for each in self.sums.values())} findings>"


def _finding(now: ObservedRequest, before: ObservedRequest, found: Difference, lost: int) -> Finding:
    old, new, at, shown = found.before, found.now, found.at, False
    if now.text and before.text and now.model == before.model and now.salt == before.salt:
        at = common_length(now.text, before.text)
        old, new, shown = _excerpt(before.text, at), _excerpt(now.text, at), True
    names = now.number, now.place, now.session, now.model, before.number, before.place
    return Finding(found.cause, *names, found.where, at, old, new, shown, lost, _usd(now, lost), found.entry)


def _delivery_finding(now: ObservedRequest, before: ObservedRequest, cause: str, lost: int) -> Finding:
    one, other = now.outcome, before.outcome
    old, new = (other.replica if other else ""), (one.replica if one else "")
    names = now.number, now.place, now.session, now.model, before.number, before.place
    return Finding(cause, *names, "the whole prefix", -1, old, new, False, lost, _usd(now, lost))


def _usd(prompt: ObservedRequest, tokens: int) -> float | None:
    return tokens * max(0.0, prompt.price[0] - prompt.price[1]) / 1e6 if prompt.price else None


def _excerpt(text: bytes, at: int) -> str:
    """The text around an offset."""
    return text[max(0, at - BEFORE) : at + BEHIND].decode("utf-8", "replace")

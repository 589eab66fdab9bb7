"""A request's way through the router, as its caller sees it: the decision, the first token, the end."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from router.holds import Hold
from router.load import Lease
from router.types import Candidate, Decision, Outcome, Prompt

if TYPE_CHECKING:
    from router.router import Router


class Booking:
    """One request's way through the router: its decision and its open lease. `Router.choose` makes it, `close` ends it.

    matched_blocks: those of the prompt that the lease's replica was believed to hold. number: in the journal. idle_s: for how
    long the match had not been used there. pending: the credit was neither confirmed nor taken back; tail: where it ends in the
    index; reserved: bytes of the index that it keeps from being used for others.
    """

    __slots__ = ("_decision", "_router", "idle_s", "lease", "matched_blocks", "number", "pending", "prompt", "reserved", "tail")

    def __init__(self, router: Router, prompt: Prompt, lease: Lease, matched_blocks: int) -> None:
        self._router = router
        self._decision: Decision | None = None  # of one that was decided in another process, which has it
        self.number = 0
        self.prompt = prompt
        self.lease = lease
        self.matched_blocks = matched_blocks
        self.idle_s: float | None = None
        self.pending = False
        self.tail: Hold | None = None
        self.reserved = 0

    @property
    def decision(self) -> Decision:
        assert self._decision is not None, "it was decided elsewhere"
        return self._decision

    @decision.setter
    def decision(self, decision: Decision) -> None:
        self._decision = decision

    @property
    def chosen(self) -> Candidate:
        return self.decision.best

    def first_token(self, now: float) -> None:
        """The answer's first byte came: the replica has computed the prompt."""
        if self.lease.decoding or self.lease.closed:
            return
        if journal := self._router.journal:
            journal.first_token(self, now)
        self.lease.first_token(now)
        self._router.confirm(self, now)

    def move(self, replicas: Collection[str], now: float) -> None:
        """The replica failed before its first byte: decide anew between `replicas` (not empty), and book there instead."""
        if not self.lease.closed:
            self._router.move(self, replicas, now)

    def close(self, outcome: Outcome, now: float) -> bool:
        """The request is over. Only the first call counts. True if it showed that the replica had lost its cache."""
        if (journal := self._router.journal) and not self.lease.closed:
            journal.closed(self, outcome, now)
        return self._router.observe(self, outcome, now)

    def __repr__(self) -> str:
        why = self._decision.reason if self._decision else "decided elsewhere"
        return f"<Booking, {why}, {self.lease!r}>"

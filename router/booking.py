"""One request's handle: the decision, the first token, a move to another replica, the end.

The router makes it; what is called here is done there (`Owner`).
"""

from __future__ import annotations

from collections.abc import Collection

from router.index.holds import Hold
from router.load import Lease
from router.types import Candidate, Decision, Outcome, Prompt


class Owner:
    """The router that has made a booking. A base class, and no Protocol, because compiled code calls its methods directly."""

    def first_token(self, booking: Booking, now: float) -> None:
        raise NotImplementedError

    def move(self, booking: Booking, replicas: Collection[str], now: float) -> None:
        raise NotImplementedError

    def close(self, booking: Booking, outcome: Outcome, now: float) -> bool:
        raise NotImplementedError


class Booking:
    """A decision and its open lease. `Router.choose` makes it, `close` ends it.

    matched_blocks: those of the prompt that the lease's replica was believed to hold. weight: of a block of the prompt, in the
    index. number: in the journal. idle_s: for how long the match had not been used there. pending: the credit was neither
    confirmed nor taken back; tail: where it ends in the index; reserved: bytes of the index that are kept for it.
    """

    __slots__ = (
        "_decision",
        "_owner",
        "idle_s",
        "lease",
        "matched_blocks",
        "number",
        "pending",
        "prompt",
        "reserved",
        "tail",
        "weight",
    )

    def __init__(self, owner: Owner, prompt: Prompt, lease: Lease, matched_blocks: int, weight: int) -> None:
        self._owner = owner
        self._decision: Decision | None = None  # None if another router has decided
        self.number = 0
        self.prompt = prompt
        self.lease = lease
        self.matched_blocks = matched_blocks
        self.weight = weight
        self.idle_s: float | None = None
        self.pending = False
        self.tail: Hold | None = None
        self.reserved = 0

    @property
    def decision(self) -> Decision:
        assert self._decision is not None, "another router has decided"
        return self._decision

    @decision.setter
    def decision(self, decision: Decision) -> None:
        self._decision = decision

    @property
    def chosen(self) -> Candidate:
        return self.decision.best

    def first_token(self, now: float) -> None:
        """The answer's first byte came: the replica has computed the prompt. Only the first call counts."""
        if not (self.lease.decoding or self.lease.closed):
            self._owner.first_token(self, now)

    def move(self, replicas: Collection[str], now: float) -> None:
        """The replica failed before its first byte: decide anew between `replicas` (not empty), and book there instead."""
        if not self.lease.closed:
            self._owner.move(self, replicas, now)

    def close(self, outcome: Outcome, now: float) -> bool:
        """The request is over. Only the first call counts. True if it showed that the replica had lost its cache."""
        return self._owner.close(self, outcome, now)

    def __repr__(self) -> str:
        why = self._decision.reason if self._decision else "decided by another router"
        return f"<Booking, {why}, {self.lease!r}>"

"""A routed request's handle: its decision, first token, move to another replica, and end.

The router creates it and implements its methods (`Owner`).
"""

from __future__ import annotations

from collections.abc import Collection

from router.index.holds import Hold
from router.leading import Lead
from router.learning.allowances import Allowances
from router.load import Lease
from router.types import Candidate, Decision, Outcome, Prompt


class Owner:
    """The router that made a booking. A base class and not a Protocol, because compiled code calls its methods directly."""

    def first_token(self, booking: Booking, now: float) -> None:
        raise NotImplementedError

    def move(self, booking: Booking, replicas: Collection[str], now: float) -> None:
        raise NotImplementedError

    def release(self, booking: Booking, now: float) -> bool:
        raise NotImplementedError

    def close(self, booking: Booking, outcome: Outcome, now: float) -> bool:
        raise NotImplementedError

    def paid_tokens(self, booking: Booking) -> int:
        raise NotImplementedError

    def reservable_tokens(self, booking: Booking) -> int:
        raise NotImplementedError


class Booking:
    """A decision and its open lease. `Router.choose` makes it, `close` ends it.

    matched_blocks: blocks of the prompt that the lease's replica is believed to hold. sent_blocks: its sent blocks of the
    prompt (`Quotes.sent`). weight: of a block of the prompt, as estimated at booking; blocks that are in the index already keep
    their weight. number: in the journal. idle_s: time since the last use of the match there. pending: the credit is neither
    settled nor removed. backed: weight of the credit that its client's allowance covers (`learning/allowances.py`). tail: the
    end of the credit in the index. reserved: bytes of the index reserved for the credit. unseen: units of the prompt that the
    lease's replica may hold of the session beyond the match (`learning/sessions.py`). moves: number of moves by another router.
    lead: of the lease for which the request is to wait before it is sent, or None (`leading.py`). beside: of the lease that
    computes a part of its match while it is sent, or has computed it just before, or None. loads: its adapter is to be loaded.
    """

    __slots__ = (
        "_decision",
        "_owner",
        "allowances",
        "backed",
        "beside",
        "idle_s",
        "lead",
        "lease",
        "loads",
        "matched_blocks",
        "moves",
        "number",
        "pending",
        "prompt",
        "reserved",
        "sent_blocks",
        "tail",
        "unseen",
        "weight",
    )

    def __init__(self, owner: Owner, prompt: Prompt, lease: Lease, matched_blocks: int, weight: int) -> None:
        self._owner = owner
        self._decision: Decision | None = None  # None if another router has decided
        self.number = 0
        self.prompt = prompt
        self.lease = lease
        lease.keys = prompt.keys
        if prompt.sequences > 1:
            lease.widen(prompt.sequences)
        self.matched_blocks = matched_blocks
        self.weight = weight
        self.unseen = 0
        self.moves = 0
        self.loads = False
        self.lead: Lead | None = None
        self.beside: Lead | None = None
        self.idle_s: float | None = None
        self.pending = False
        self.allowances: Allowances | None = None  # of the replica where `backed` is reserved
        self.backed = 0
        self.sent_blocks = matched_blocks
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

    @property
    def paid_tokens(self) -> int:
        """The predicted cached tokens, as far as counted answers for this client have put them there. For replicas that do not
        report cached tokens.
        """
        return self._owner.paid_tokens(self)

    @property
    def reservable_tokens(self) -> int:
        """The predicted cached tokens, as far as the end of the answer will show them: all at a replica that reports cached
        tokens, else the paid ones.
        """
        return self._owner.reservable_tokens(self)

    def first_token(self, now: float) -> None:
        """The answer's first token arrived: the replica has computed a prompt. Only the first call counts."""
        if not (self.lease.decoding or self.lease.closed):
            self._owner.first_token(self, now)

    def release(self, now: float) -> bool:
        """The request waits for its lead no longer. True: its replica does not hold the prefix for which it was chosen, so
        `move` it; else it is sent.
        """
        return self.lead is not None and self._owner.release(self, now)

    def move(self, replicas: Collection[str], now: float) -> None:
        """The replica failed before its first byte, or does not hold what the request waited for (`release`): choose again
        among `replicas` (not empty), and move the booking there.
        """
        if not self.lease.closed:
            self._owner.move(self, replicas, now)

    def close(self, outcome: Outcome, now: float) -> bool:
        """End of the request. Only the first call counts. True if the answer showed that the replica had lost its cache."""
        return self._owner.close(self, outcome, now)

    def __repr__(self) -> str:
        why = self._decision.reason if self._decision else "decided by another router"
        return f"<Booking, {why}, {self.lease!r}>"

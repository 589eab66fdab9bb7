"""Learns if a replica's engine shares a prefix that it is still computing: the sharing in flight.

Two prompts with one cold head arrive together. Some engines compute the head once: they look a prompt up when its turn
comes, or store blocks as they are computed. Others look it up on arrival, and compute the head twice, unless the first one is
over. The engine's kind may say it; else the cached tokens that it reports for a prompt that was sent while another one computed
a part of its match show which it is.

That evidence comes only from requests that did not wait, so it ends once an engine is known to compute prefixes apart. From
then on requests wait for a first token, and their cached tokens show if it was worth it: an engine may store a prompt only when
its request has ended, as one with slots. A restart of the replica begins anew.
"""

from __future__ import annotations

from typing import Final

from router.learning.sessions import Share

PRIOR_TOKENS: Final = 16_384  # the weight of the assumption that an engine of an unknown kind shares
APART_SHARE: Final = 0.5  # an engine that shares less computes prefixes apart


class InflightSharing:
    """One replica's sharing in flight (see the module). kind: (it shares, it has slots) by its engine's kind; it shares: None:
    to be learned. Slots: a prefix is found when its request has ended, by one request at a time. O(1).
    """

    __slots__ = ("_after", "_share", "kind")

    def __init__(self, *, known: bool | None, slots: bool) -> None:
        self.kind = known, slots
        self._share = Share()
        self._after = Share()  # of tokens that were computed just before

    @property
    def shares(self) -> bool | None:
        """False: it computes a prefix again that is being computed; None: not known yet."""
        if self.kind[0] is not None:
            return self.kind[0]
        if self._share.value(1.0, PRIOR_TOKENS) < APART_SHARE:
            return False
        return True if self._share.unseen >= PRIOR_TOKENS else None

    @property
    def slots(self) -> bool:
        """True: a request waits for the end of its lead; False: for its first token."""
        return self.kind[1] or self._after.value(1.0, PRIOR_TOKENS) < APART_SHARE

    def learn(self, tokens: float, found: float, *, awaited: bool) -> None:
        """Add the report for a prompt. tokens: of it, that were being computed when it was sent, or (awaited) just before.
        found: of these, that were cached: 0 to tokens.
        """
        (self._after if awaited else self._share).learn(tokens, found)

    def forget(self) -> None:
        """The replica was restarted, maybe with other options."""
        self._share, self._after = Share(), Share()

    def __repr__(self) -> str:
        return f"<InflightSharing, {self.shares}, slots {self.slots}>"

"""Learns if a replica's engine shares a prefix that it is still computing: the sharing in flight.

Two prompts with one cold head arrive together. Some engines compute the head once: they look a prompt up when its turn
comes, or store blocks as they are computed. Others look it up on arrival, and compute the head twice, unless the first one is
over. The engine's kind may say it; else the cached tokens that it reports for a prompt that was sent while another one computed
a part of its match show which it is.

Evidence comes only from requests that did not wait, so it ends once an engine is known to compute prefixes apart. A restart of
the replica begins anew.
"""

from __future__ import annotations

from typing import Final

from router.learning.sessions import Share

PRIOR_TOKENS: Final = 16_384  # the weight of the assumption that an engine of an unknown kind shares
APART_SHARE: Final = 0.5  # an engine that shares less computes prefixes apart


class InflightSharing:
    """One replica's sharing in flight (see the module). known: by its kind; None: to be learned. slots: a prefix is found when
    its request has ended, by one request at a time. O(1).
    """

    __slots__ = ("_share", "known", "slots")

    def __init__(self, *, known: bool | None, slots: bool) -> None:
        self.known = known
        self.slots = slots
        self._share = Share()

    @property
    def shares(self) -> bool | None:
        """False: it computes a prefix again that is being computed; None: not known yet."""
        if self.known is not None:
            return self.known
        if self._share.value(1.0, PRIOR_TOKENS) < APART_SHARE:
            return False
        return True if self._share.unseen >= PRIOR_TOKENS else None

    def learn(self, tokens: float, found: float) -> None:
        """Add the report for a prompt. tokens: of it, that were being computed when it was sent. found: of these, that were
        cached: 0 to tokens.
        """
        self._share.learn(tokens, found)

    def forget(self) -> None:
        """The replica was restarted, maybe with other options."""
        self._share = Share()

    def __repr__(self) -> str:
        return f"<InflightSharing, {self.shares}>"

"""Learns if an engine computes one prompt at a time, in order of arrival.

The evidence are first tokens of requests that waited in the engine behind another one of ours. An engine that computes one
prompt at a time gives the next first token a whole prefill after the last one. An engine that computes several, in a batch or
by turns, gives them together: the second one early, or out of order. It counts against that, and much more.

Once requests wait in the gateway instead (`late.py`) there is no such evidence, so every EXPLORE-th is sent at once.
"""

from __future__ import annotations

from typing import Final

PROOF_TOKENS: Final = 40_000.0  # of prefills that were as long as alone
LEAST_TOKENS: Final = 1000.0  # a shorter prefill shows nothing
MOST_TOKENS: Final = 10_000.0  # a longer one counts no more
EARLY: Final = 0.6  # of the expected time: a shorter one was computed beside another
AGAINST: Final = 8.0  # one prefill against it outweighs so many for it
EXPLORE: Final = 64


class SerialPrefill:
    """The evidence about one replica. proven: it computes one prompt at a time. O(1)."""

    __slots__ = ("_held", "_tokens")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._held = 0

    @property
    def proven(self) -> bool:
        return self._tokens >= PROOF_TOKENS

    def learn(self, tokens: float, seconds: float, rate: float) -> None:
        """A prompt that waited behind another one got its first token `seconds` after that. tokens: of its prefill."""
        if tokens < LEAST_TOKENS:
            return
        counted = min(tokens, MOST_TOKENS)
        if seconds * rate < EARLY * tokens:
            self._tokens = max(-PROOF_TOKENS, min(self._tokens, PROOF_TOKENS) - AGAINST * counted)
        else:
            self._tokens = min(2 * PROOF_TOKENS, self._tokens + counted)

    def forget(self) -> None:
        """The replica was restarted, maybe with other options."""
        self._tokens = 0.0

    def explores(self) -> bool:
        """True if the next request is to be sent at once, for evidence."""
        self._held = (self._held + 1) % EXPLORE
        return self._held == 0

    def __repr__(self) -> str:
        return f"<SerialPrefill {self._tokens:.6g} of {PROOF_TOKENS:.6g}>"

"""Verdicts on tokens."""

from __future__ import annotations

from typing import Final

from gateway.features.keys.grant import Grant

# Reasons of refusals, as label values of metrics.
UNKNOWN: Final = "unknown"
EXPIRED: Final = "expired"
CLAIMS: Final = "claims"
ISSUER: Final = "issuer"


class Verdict:
    """grant: None: the token is refused. reason: for metrics. text: for the holder, who has proven to own a signed token; "":
    the signature is not proven, and the answer is the general refusal. retry_s: nonzero: undecided; the client should retry
    after this time.
    """

    __slots__ = ("grant", "reason", "retry_s", "text")

    def __init__(self, grant: Grant | None, reason: str = "", text: str = "", retry_s: int = 0) -> None:
        self.grant = grant
        self.reason = reason
        self.text = text
        self.retry_s = retry_s

    def __repr__(self) -> str:
        return f"<Verdict {self.grant!r} {self.reason}>"


FORGED: Final = Verdict(None, UNKNOWN)

"""What is found out about a token."""

from __future__ import annotations

from typing import Final

from gateway.features.keys.grant import Grant

# Reasons, as metrics have them.
UNKNOWN: Final = "unknown"
EXPIRED: Final = "expired"
UNFIT: Final = "claims"
UNDECIDED: Final = "issuer"


class Verdict:
    """grant: None: it is refused. reason: why, for metrics. text: why, for its holder, whom its signature proves; "": nothing
    is proven, and it is refused as any text that is no key. retry_s: it is not known yet; to be asked again then.
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

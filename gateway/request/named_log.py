"""The log of a request's conversation, for features that show or compare requests. Prompt logs set it; it has no text."""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.request.slots import Slot

DIGEST: Final = 32  # bytes of an entry's digest
WHOLE: Final = "whole"
BASE: Final = "base"
REPEATED: Final = "repeated"


class NamedLog(NamedTuple):
    """length: entries of the log, without the answer; of a repeated answer, with it. sent: WHOLE: the request has all entries;
    BASE: it goes on from a stored log; REPEATED: a stored answer was sent again. digests: of the entries in pieces, DIGEST
    bytes each; (): unknown. They are as confidential as the log's name.
    """

    length: int
    sent: str
    digests: tuple[bytes, ...] = ()


NAMED_LOG: Final = Slot[NamedLog]("named log")

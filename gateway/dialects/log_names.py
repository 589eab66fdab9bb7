"""Names of prompt logs in texts for logs, traces and pages. A name is a fingerprint of a conversation: it is left out. Pure."""

from __future__ import annotations

import re
from typing import Final

HEAD: Final = "pl1_"
A_HEAD: Final = "(a head)"
_NAME: Final = re.compile(r"p[lf]1_[A-Za-z0-9_-]+")


def without_names(text: str) -> str:
    """A text with A_HEAD in place of each head, and of each name of a frame. O(length)."""
    return _NAME.sub(A_HEAD, text)

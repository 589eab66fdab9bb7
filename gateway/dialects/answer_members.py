"""The members of a plain answer that show its usage, read without making objects of the others.

A module of its own, because compiled modules cannot have Structs.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec


class AnswerMembers(msgspec.Struct):
    """The members of an answer of any dialect; None: it has no such member."""

    error: Any = None
    object: Any = None
    type: Any = None
    usage: Any = None


read_members: Final = msgspec.json.Decoder(AnswerMembers).decode

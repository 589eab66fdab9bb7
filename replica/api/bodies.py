"""What is looked at in a body before its values are made: how many there are.

A JSON value costs some bytes to send and hundreds to hold: a body of 16 MiB could be four million texts, a gigabyte and many
seconds of this process. So values are counted in the bytes first.
"""

import ctypes
from typing import Final

from replica.api.validation import ApiError

MAX_VALUES: Final = 1 << 19  # of a body: the token ids of several long prompts
MAX_CONTAINERS: Final = 1 << 16  # lists and objects among them: the garbage collector stops everything to look at each


def check_size(raw: bytes) -> None:
    """Raises ApiError for a body with too many values. O(bytes), at the speed of memory but for the values that are short."""
    for limit, signs, what in ((MAX_VALUES, b",[{", "values"), (MAX_CONTAINERS, b"[{", "lists and objects")):
        if signs_within(raw, limit, signs) > limit:
            raise ApiError(400, f"The body has more than the {limit:,} {what} that a request may have.")


def signs_within(raw: bytes, limit: int, signs: bytes) -> int:
    """How many of these signs there are outside of strings: what separates and opens values. More than `limit`, however many,
    once that is certain; perhaps less than there are, if these signs are few anyway."""
    found = _count(raw, signs)
    if found <= limit:
        return found  # also if all were outside of strings
    plain = raw.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    if plain.count(b'"') // 2 > 2 * (MAX_VALUES + 1):  # a value has two strings at most, its name and itself
        return limit + 1
    return _count(b'"'.join(plain.split(b'"')[::2]), signs)


def _count(raw: bytes, signs: bytes) -> int:
    return sum(raw.count(signs[at : at + 1]) for at in range(len(signs)))


def give_back_memory() -> None:
    """What large bodies, and the tokens of their texts, have left free in this process goes back to the system, where the C
    library can do that (glibc). Other threads run meanwhile."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

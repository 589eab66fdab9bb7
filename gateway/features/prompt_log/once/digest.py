"""The digest of a request with a token: another request with the same token must ask for the same. Pure. O(length).

It counts the path, the base, the frame, the entries, and all members that shape an answer: unknown ones, too. The form of the
answer does not count, nor do members about the client. Results of calls in the base count with their ids, because the base is
not read.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final

from gateway.dialects.json_structure import exceeds, too_complex
from gateway.features.prompt_log.header import invalid
from gateway.features.prompt_log.naming.canonical import NoNameError, canonical
from gateway.features.prompt_log.naming.chain import extended, frame_name, head_name
from gateway.features.prompt_log.naming.entries import OpenCalls
from gateway.features.prompt_log.naming.forms import FORMS, object_of
from gateway.features.prompt_log.turns.own_turn import LISTS, frame_members

_UNCOUNTED: Final = frozenset(["stream", "stream_options", "metadata", "user", "store", "previous_response_id"])
_PREFIX: Final = b"prompt-log/1 once\n"


def digest_of_request(body: bytes, form: str, base: bytes, frame: str) -> str:
    """base: the chain of the base. frame: its name, if the header has it; else "". Raises NoNameError."""
    found = object_of(body)
    uncounted = _UNCOUNTED | {LISTS[form], *frame_members(form)}
    more = {name: value for name, value in found.items() if name not in uncounted}
    found.pop("previous_response_id", None)
    calls = _OwnCalls()
    log = FORMS[form](found, calls, named=bool(frame))
    counted = {"form": form, "head": head_name(extended(base, log.entries)), "frame": frame or frame_name(log.frame)}
    results = {"results": calls.foreign} if any(calls.foreign) else {}
    return sha256(_PREFIX + canonical({**counted, **results, "more": more})).hexdigest()


class _OwnCalls(OpenCalls):
    """The open calls of a body. foreign: of each result the id of its call, if that is not in the body; else ""."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign = list[str]()

    def answer(self, id_: Any) -> int:
        own = not isinstance(id_, str) or self.is_open(id_)
        self.foreign.append("" if own else id_)
        return super().answer(id_)


def request_digest(body: bytes, form: str, base: bytes, frame: str) -> tuple[str]:
    """`digest_of_request` as an operation of the parser process. Raises GatewayError 400 or 413."""
    if exceeds(body):
        raise too_complex()
    return (named_digest(body, form, base, frame),)


def named_digest(body: bytes, form: str, base: bytes, frame: str) -> str:
    """Raises GatewayError 400."""
    try:
        return digest_of_request(body, form, base, frame)
    except NoNameError as error:
        raise invalid(f"This conversation has no name: {error.reason}.", error.param) from None

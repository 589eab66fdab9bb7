"""The header `Prompt-Log`, a dictionary of structured fields (RFC 9651). Unknown members are ignored. Pure.

Prompt-Log: name, expect="pl1_..."         of a request
Prompt-Log: input="pl1_...", frame="pf1_...", head="pl1_...", length=42        of an answer
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gateway.errors import GatewayError
from gateway.features.prompt_log.naming.chain import chain_named, head_name
from gateway.features.prompt_log.naming.forms import LogNames
from gateway.features.prompt_log.structured_field import dictionary

HEADER: Final = "Prompt-Log"
MAX_BYTES: Final = 1024
_FALSE: Final = "?0"
INVALID: Final = "prompt_log_invalid"
_STORED: Final = ("base", "frame", "once")  # members that need the server's copy of a log
_REFUSALS: Final = {"keep": "kept", "ref": "ref"}  # members, and the members of the answer that say that nothing was kept


@dataclass(frozen=True, slots=True)
class Wishes:
    """A request's header. expect: the chain that the client has computed; None: it expects none. refused: members of the
    answer that are false, because this gateway keeps nothing.
    """

    expect: bytes | None
    refused: tuple[str, ...]


def wishes_of(value: str) -> Wishes | None:
    """The wishes in a header; None: it asks for nothing. Raises GatewayError 400. O(length)."""
    if len(value) > MAX_BYTES:
        raise invalid(f"The header has {len(value):,} bytes; its maximum is {MAX_BYTES:,}.", HEADER)
    members = dictionary(value)
    if members is None:
        raise invalid("The header is no dictionary of structured fields (RFC 9651).", HEADER)
    for name in _STORED:
        if name in members:
            text = f"This gateway computes names, and keeps no logs: {name!r} is not available. Send the whole conversation."
            raise GatewayError(400, "prompt_logs_off", text, param=name, members={})
    wished = [name for name in ("name", *_REFUSALS) if members.get(name, _FALSE) != _FALSE]
    expect = _expect(members["expect"]) if "expect" in members else None
    if not wished and expect is None:
        return None
    return Wishes(expect, tuple(_REFUSALS[name] for name in wished if name in _REFUSALS))


def answer_line(names: LogNames, refused: Iterable[str], head: str = "", length: int = 0) -> bytes:
    """The header of an answer, as a line. head, length: of the log with the answer; "": not known. refused: of Wishes."""
    told = f', head="{head}", length={length}' if head else f", length={names.length}"
    told += "".join(f", {name}=?0" for name in refused)
    return f'{HEADER}: input="{head_name(names.chain)}", frame="{names.frame}"{told}\r\n'.encode("ascii")


def invalid(text: str, param: str) -> GatewayError:
    """An error about the header, or about a body without a name."""
    return GatewayError(400, INVALID, f"Prompt-Log: {text}", param=param, members={})


def _expect(value: str) -> bytes:
    chain = chain_named(value[1:-1]) if value.startswith('"') else None
    if chain is None:
        raise invalid("'expect' must be a head in quotes, such as \"pl1_9fIC...\".", "expect")
    return chain

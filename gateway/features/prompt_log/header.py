"""The header `Prompt-Log`, a dictionary of structured fields (RFC 9651). Unknown members are ignored. Pure.

Prompt-Log: keep, base="pl1_...", expect="pl1_..."         of a request
Prompt-Log: input="pl1_...", frame="pf1_...", head="pl1_...", length=42, expires=1766892000, kept        of an answer
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gateway.errors import GatewayError
from gateway.features.prompt_log.naming.chain import chain_named, head_name
from gateway.features.prompt_log.structured_field import dictionary

HEADER: Final = "Prompt-Log"
MAX_BYTES: Final = 1024
_TRUE, _FALSE = "?1", "?0"
INVALID: Final = "prompt_log_invalid"
_FRAME: Final = re.compile(r"pf1_[A-Za-z0-9_-]{43}")
_REF: Final = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9._-]{1,64}")  # clients take . and .. out of a path
_SECONDS: Final = re.compile(r"[0-9]{1,15}")
ONCE_TOKEN: Final = re.compile(r"[!#-\[\]-~]{8,64}")


@dataclass(frozen=True, slots=True)
class Wishes:
    """A request's header. expect: the chain that the client has computed; None: it expects none. keep: its turn is to be kept.
    ttl_s: the wished lifetime of the turn; 0: the longest. base: the chain of the log that it goes on from, None: none. frame:
    the name of its frame, "": its own. ref: the ref to be moved to its head, "": none. once: the token of its generation,
    "": none. unbound: sealed parts may go to a pool that cannot read them.
    """

    expect: bytes | None = None
    keep: bool = False
    ttl_s: float = 0.0
    base: bytes | None = None
    frame: str = ""
    ref: str = ""
    once: str = ""
    unbound: bool = False

    @property
    def stores(self) -> bool:
        """True if the wishes need the store of turns."""
        return self.keep or self.base is not None or self.frame != ""

    @property
    def kind(self) -> str:
        """The label of the request in metrics."""
        if self.once:
            return "once"
        if self.base is not None:
            return "base"
        if self.keep:
            return "keep"
        return "expect" if self.expect is not None else "name"


def wishes_of(value: str) -> Wishes | None:
    """The wishes in a header; None: it asks for nothing. Raises GatewayError 400. O(length)."""
    if len(value) > MAX_BYTES:
        raise invalid(f"The header has {len(value):,} bytes; its maximum is {MAX_BYTES:,}.", HEADER)
    members = dictionary(value)
    if members is None:
        raise invalid("The header is no dictionary of structured fields (RFC 9651).", HEADER)
    once = _token(members)
    wishes = Wishes(
        _head(members, "expect"),
        keep=_wished(members, "keep") or bool(once),
        ttl_s=_ttl_s(members),
        base=_head(members, "base"),
        frame=_frame(members),
        ref=_ref(members),
        once=once,
        unbound=_wished(members, "unbound"),
    )
    named = _wished(members, "name")
    if not (named or wishes.stores or wishes.ref or wishes.expect is not None):
        return None
    return wishes


def answer_line(input_: bytes, frame: str, told: Mapping[str, str | int | bool]) -> bytes:
    """The header of an answer, as a line. input_: the chain of the request's log. told: further members."""
    members = {"input": head_name(input_), "frame": frame, **told}
    return f"{HEADER}: {', '.join(map(_member, members.items()))}\r\n".encode("ascii")


def is_ref(name: str) -> bool:
    """True if a ref may have this name."""
    return _REF.fullmatch(name) is not None


def invalid(text: str, param: str) -> GatewayError:
    """An error about the header, or about a body without a name. param: "": unknown."""
    return GatewayError(400, INVALID, f"Prompt-Log: {text}", param=param or None, members={})


def logs_off(text: str, param: str) -> GatewayError:
    """The error of a member that this gateway does not serve."""
    return GatewayError(
        400, "prompt_logs_off", f"Prompt-Log: {text} Send the whole conversation, without it.", param=param, members={}
    )


def _member(member: tuple[str, str | int | bool]) -> str:
    name, value = member
    if isinstance(value, bool):
        return name if value else f"{name}={_FALSE}"
    return f"{name}={value}" if isinstance(value, int) else f'{name}="{value}"'


def _wished(members: Mapping[str, str], name: str) -> bool:
    value = members.get(name, _FALSE)
    if value not in (_TRUE, _FALSE):
        raise invalid(f"{name!r} has no value: it is there, or not.", name)
    return value == _TRUE


def _ref(members: Mapping[str, str]) -> str:
    if "ref" not in members:
        return ""
    value = members["ref"]
    if not (value.startswith('"') and is_ref(value[1:-1])):
        raise invalid("'ref' must be a name in quotes, such as \"main\": 1 to 64 letters, digits, dots, _ or -.", "ref")
    return value[1:-1]


def _token(members: Mapping[str, str]) -> str:
    value = members.get("once")
    if value is None:
        return ""
    if not (value.startswith('"') and ONCE_TOKEN.fullmatch(value[1:-1])):
        text = "'once' must be a token in quotes: 8 to 64 printable characters without spaces, quotes and backslashes."
        raise invalid(text, "once")
    return value[1:-1]


def _ttl_s(members: Mapping[str, str]) -> float:
    value = members.get("ttl", "0")
    if not _SECONDS.fullmatch(value) or ("ttl" in members and not int(value)):
        raise invalid("'ttl' must be a number of seconds, 1 or more.", "ttl")
    return float(value)


def _head(members: Mapping[str, str], name: str) -> bytes | None:
    if name not in members:
        return None
    value = members[name]
    chain = chain_named(value[1:-1]) if value.startswith('"') else None
    if chain is None:
        raise invalid(f'{name!r} must be a head in quotes, such as "pl1_9fIC...".', name)
    return chain


def _frame(members: Mapping[str, str]) -> str:
    if "frame" not in members:
        return ""
    value = members["frame"]
    if not (value.startswith('"') and _FRAME.fullmatch(value[1:-1])):
        raise invalid("'frame' must be the name of a frame in quotes, such as \"pf1_0aQx...\".", "frame")
    return value[1:-1]

"""Errors of documents: each has the path of its value, up to 20 are collected."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.errors import GatewayError

INVALID: Final = "workflow_invalid"
PROGRAM_INVALID: Final = "program_invalid"
UNBOUNDED: Final = "each_unbounded"
INPUTS_INVALID: Final = "inputs_invalid"
OVER_LIMITS: Final = "workflow_over_limits"
TOO_LARGE: Final = "workflow_too_large"
MAX_FAULTS: Final = 20
_SHOWN: Final = 60


@dataclass(frozen=True, slots=True)
class DocumentFault:
    """One error. path: of the value, such as `steps.critic.chat.from`; "": the document. line: in its text; 0: unknown."""

    path: str
    text: str
    code: str = INVALID
    line: int = 0

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text


class DocumentError(Exception):
    """The document, the program or the inputs are refused. faults: at least one, in order."""

    def __init__(self, faults: Sequence[DocumentFault]) -> None:
        super().__init__("; ".join(map(str, faults)))
        self.faults = tuple(faults)

    def answer(self) -> GatewayError:
        """The error for a client: code and path of the first fault, the texts of all."""
        first = self.faults[0]
        located = (f"line {each.line}: {each}" if each.line else str(each) for each in self.faults)
        return GatewayError(413 if first.code == TOO_LARGE else 400, first.code, "; ".join(located), param=first.path or None)


class DocumentFaults:
    """Collects errors. Raises DocumentError when there are MAX_FAULTS of them: a hostile document costs no more."""

    def __init__(self) -> None:
        self.found: list[DocumentFault] = []

    def add(self, path: str, text: str, code: str = INVALID, line: int = 0) -> None:
        self.found.append(DocumentFault(path, text, code, line))
        if len(self.found) >= MAX_FAULTS:
            self.require_none()

    def require_none(self) -> None:
        if self.found:
            raise DocumentError(self.found)


def refused(path: str, text: str, code: str = INVALID, line: int = 0) -> DocumentError:
    """A single error, to be raised."""
    return DocumentError([DocumentFault(path, text, code, line)])


def located(error: DocumentError, lines: dict[str, int]) -> DocumentError:
    """The same errors with the lines of their values. lines: by path; a value without one is in the line around it."""
    return DocumentError([each if each.line else replace(each, line=line_of(each.path, lines)) for each in error.faults])


def line_of(path: str, lines: dict[str, int]) -> int:
    while path and path not in lines:
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return lines.get(path, 0)


def suggestion(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the closest known one, else all."""
    names = list(known)
    close = difflib.get_close_matches(name[:100], names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names[:_SHOWN])}" if names else "there are none"


def shown(value: object) -> str:
    """A value of a document in a message: short, on one line."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = repr(value) if isinstance(value, str) else str(value).lower()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

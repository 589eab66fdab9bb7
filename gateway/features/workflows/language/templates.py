"""Values of documents with `${...}` in their texts.

A text that is one expression keeps the type of its value; within a longer text, values are inserted as text. `$${` writes `${`.
Only texts of the document are parsed: an inserted value is data, also if it contains `${`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.features.workflows.language.expressions import Expression, parse_expression
from gateway.features.workflows.language.operations import ExpressionError, Reference, Scope, WorkBudget
from gateway.features.workflows.language.values import MAX_VALUE_BYTES, text_of

MAX_EXPRESSIONS: Final = 1000
_OPEN: Final = "${"
_ESCAPED: Final = "$${"


@dataclass(frozen=True, slots=True)
class TextTemplate:
    """A text with expressions: pieces in order."""

    pieces: tuple[str | Expression, ...]

    @property
    def expressions(self) -> Iterator[Expression]:
        return (each for each in self.pieces if isinstance(each, Expression))


@dataclass(frozen=True, slots=True)
class ValueTemplate:
    """A JSON value with templates in place of some texts. path: of the value in its document."""

    path: str
    value: Any
    references: frozenset[Reference] = field(default=frozenset(), compare=False)

    def fill(self, scope: Scope, budget: WorkBudget | None = None, most: int = MAX_VALUE_BYTES) -> Any:
        """The value for this scope. budget: of several values together; default: one of its own. most: bytes of all inserted
        values. Raises EvaluationError.
        """
        if not self.references and self.constant:
            return self.value
        return _BoundedFilling(scope, budget or WorkBudget(), most).of(self.value)

    @property
    def constant(self) -> bool:
        """True if there is no template in it."""
        return next(templates_in(self.value), None) is None

    @property
    def expression(self) -> Expression | None:
        """The expression, if the value is a single one."""
        pieces = self.value.pieces if isinstance(self.value, TextTemplate) else ()
        return pieces[0] if len(pieces) == 1 and isinstance(pieces[0], Expression) else None

    @property
    def all_references(self) -> frozenset[Reference]:
        """The references of its expressions, also of a template that was taken out of another one."""
        return frozenset().union(*(each.references for text in templates_in(self.value) for each in text.expressions))

    @property
    def items(self) -> list[ValueTemplate]:
        """The items of a list, each as a template."""
        return [ValueTemplate(f"{self.path}[{at}]", each) for at, each in enumerate(self.value)]


def templates_in(value: Any) -> Iterator[TextTemplate]:
    if isinstance(value, TextTemplate):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from templates_in(each)


class _BoundedFilling:
    """One value that is filled: all inserted values together, and the work on them, are bounded."""

    def __init__(self, scope: Scope, budget: WorkBudget, most: int) -> None:
        self._scope = scope
        self._budget = budget
        self._left = most

    def of(self, value: Any) -> Any:
        if isinstance(value, TextTemplate):
            pieces = [each if isinstance(each, str) else self._evaluated(each) for each in value.pieces]
            return pieces[0] if len(pieces) == 1 else "".join(map(text_of, pieces))
        if isinstance(value, dict):
            return {key: self.of(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.of(each) for each in value]
        return value

    def _evaluated(self, expression: Expression) -> Any:
        value, size = expression.sized(self._scope, self._budget, self._left)
        self._left -= size
        return value


def parse_text(text: str) -> str | TextTemplate:
    """The text, or its template if it has expressions. O(characters). Raises ExpressionError."""
    if _OPEN not in text:
        return text
    pieces: list[str | Expression] = []
    plain, at = "", 0
    while (found := text.find(_OPEN, at)) >= 0:
        if found > at and text.startswith(_ESCAPED, found - 1):
            plain += text[at : found - 1] + _OPEN
            at = found + len(_OPEN)
            continue
        plain += text[at:found]
        end = _end_of(text, found + len(_OPEN))
        if plain:
            pieces.append(plain)
        if len(pieces) >= MAX_EXPRESSIONS:
            raise ExpressionError(f"a text has at most {MAX_EXPRESSIONS:,} expressions and texts between them")
        pieces.append(parse_expression(text[found + len(_OPEN) : end]))
        plain, at = "", end + 1
    plain += text[at:]
    if plain:
        pieces.append(plain)
    return TextTemplate(tuple(pieces)) if any(isinstance(each, Expression) for each in pieces) else "".join(map(str, pieces))


def _end_of(text: str, start: int) -> int:
    """The place of the brace that closes an expression; braces in its texts do not count."""
    quote, at = "", start
    while at < len(text):
        char = text[at]
        if quote:
            if char == "\\":
                at += 1
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char == "}":
            return at
        elif char == "{":
            raise ExpressionError(f"a brace within ${{{text[start : start + 40]}: objects cannot be written in an expression")
        at += 1
    raise ExpressionError(f"${{ is not closed by a brace: {text[start - 2 : start + 40]!r} (a plain ${{ is written $${{)")


def canonical_text(value: Any) -> Any:
    """The value as a document writes it, with expressions in their canonical form."""
    if isinstance(value, TextTemplate):
        return "".join(escape(each) if isinstance(each, str) else f"${{{each.canonical}}}" for each in value.pieces)
    if isinstance(value, dict):
        return {key: canonical_text(each) for key, each in value.items()}
    if isinstance(value, list):
        return [canonical_text(each) for each in value]
    return escape(value) if isinstance(value, str) else value


def escape(text: str) -> str:
    """A literal text as a document writes it."""
    return text.replace(_OPEN, _ESCAPED)

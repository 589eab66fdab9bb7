"""Members of objects in a document, read one by one: each error has its path, and the rest is read on."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from gateway.features.workflows.language.faults import TOO_LARGE, DocumentFaults, refused, shown, suggestion
from gateway.features.workflows.language.keys import NumberBounds
from gateway.features.workflows.language.operations import ExpressionError
from gateway.features.workflows.language.reading import member
from gateway.features.workflows.language.templates import MAX_EXPRESSIONS, TextTemplate, ValueTemplate, parse_text, templates_in

MAX_EXPRESSION_NODES: Final = 8192
MAX_TEXT: Final = 1 << 16  # characters
STEP_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,62}")
WORKFLOW_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,62}")
OUTPUT_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,62}")
VARIABLE_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}")
_FORMS: Final[Mapping[re.Pattern[str], str]] = {
    STEP_NAME: "small letters, digits and _, with a letter first, at most 63",
    WORKFLOW_NAME: "small letters, digits, _ and -, with a letter first, at most 63",
    OUTPUT_NAME: "letters, digits, _ and -, with a letter first, at most 63",
    VARIABLE_NAME: "letters, digits and _, with a letter first, at most 63",
}


class FieldReader:
    """Reads values of one document; collects the errors, and counts expressions."""

    def __init__(self, faults: DocumentFaults) -> None:
        self.faults = faults
        self._expressions = 0
        self._nodes = 0

    def fields(self, value: object, path: str, known: Collection[str]) -> Fields:
        """The members of an object; none if it is not an object. known: keys that it may have."""
        members: dict[str, Any] = {}
        if isinstance(value, dict):
            members = {key: each for key, each in value.items() if key in known}
            for key in [key for key in value if key not in known]:
                self.faults.add(member(path, key), f"unknown key; {suggestion(key, known)}")
        else:
            self.faults.add(path, f"an object with the keys {', '.join(known)} is expected, got {shown(value)}")
        return Fields(members, path, self, given=isinstance(value, dict))

    def named(self, value: object, path: str, form: re.Pattern[str], most: int) -> dict[str, Any]:
        """An object whose keys are names that the document chooses."""
        if not isinstance(value, dict):
            self.faults.add(path, f"an object (name: value) is expected, got {shown(value)}")
            return {}
        if len(value) > most:
            self.faults.add(path, f"at most {most} are possible, got {len(value)}")
        return {key: each for key, each in value.items() if self.name(key, member(path, key), form)}

    def name(self, value: object, path: str, form: re.Pattern[str]) -> str:
        """A name; "" after an error."""
        if isinstance(value, str) and form in (STEP_NAME, VARIABLE_NAME) and keyword.iskeyword(value):
            self.faults.add(path, f"{value!r} is a word of Python, and cannot be a name in an expression; choose another one")
            return ""
        if isinstance(value, str) and form.fullmatch(value):
            return value
        self.faults.add(path, f"a name is expected ({_FORMS[form]}), got {shown(value)}")
        return ""

    def template(self, value: Any, path: str) -> ValueTemplate:
        """A JSON value whose texts may have expressions."""
        parsed = self._parsed(value, path)
        expressions = (each for text in templates_in(parsed) for each in text.expressions)
        return ValueTemplate(path, parsed, frozenset().union(*(each.references for each in expressions)))

    def _counted(self, text: str | TextTemplate, path: str) -> str | TextTemplate:
        for each in text.expressions if isinstance(text, TextTemplate) else ():
            self._expressions += 1
            self._nodes += each.nodes
        if self._expressions > MAX_EXPRESSIONS or self._nodes > MAX_EXPRESSION_NODES:
            bounds = f"{MAX_EXPRESSIONS:,} expressions with {MAX_EXPRESSION_NODES:,} parts in all"
            raise refused(path, f"a document has at most {bounds}", TOO_LARGE)
        return text

    def _parsed(self, value: Any, path: str) -> Any:
        if isinstance(value, str):
            try:
                return self._counted(parse_text(value), path)
            except ExpressionError as error:
                self.faults.add(path, str(error))
                return ""
        if isinstance(value, dict):
            return {key: self._parsed(each, member(path, key)) for key, each in value.items()}
        if isinstance(value, list):
            return [self._parsed(each, f"{path}[{at}]") for at, each in enumerate(value)]
        return value


class Fields:
    """The known members of one object. Each read names the place of an error; a missing member is None.

    given: False: the value is no object, which is an error already.
    """

    def __init__(self, members: Mapping[str, Any], path: str, reader: FieldReader, *, given: bool) -> None:
        self.members, self.path, self.reader, self.given = members, path, reader, given

    def __contains__(self, key: str) -> bool:
        return key in self.members

    def at(self, key: str) -> str:
        return member(self.path, key)

    def fault(self, key: str, text: str) -> None:
        self.reader.faults.add(self.at(key) if key else self.path, text)

    def expected(self, key: str, what: str) -> None:
        self.fault(key, f"{what} is expected, got {shown(self.members[key])}")

    def name(self, key: str, form: re.Pattern[str]) -> str | None:
        return self.reader.name(self.members[key], self.at(key), form) or None if key in self.members else None

    def names(self, key: str, form: re.Pattern[str] = STEP_NAME) -> tuple[str, ...]:
        """A list of names."""
        value = self.members.get(key, [])
        if not isinstance(value, list):
            self.expected(key, "a list of names")
            return ()
        found = [self.reader.name(each, f"{self.at(key)}[{at}]", form) for at, each in enumerate(value)]
        return tuple(dict.fromkeys(filter(None, found)))

    def text(self, key: str, most: int = MAX_TEXT) -> str | None:
        value = self.members.get(key)
        if key in self.members and not (isinstance(value, str) and 0 < len(value) <= most):
            self.expected(key, f"a text of 1 to {most:,} characters")
            return None
        return value

    def constant_text(self, key: str, most: int) -> str:
        """A text without expressions; "" if it is missing."""
        return self.without_expressions(key, self.text(key, most)) or ""

    def without_expressions(self, key: str, *texts: str | None) -> str | None:
        """The first of the texts. An expression in a constant would never be evaluated."""
        if any("${" in text for text in texts if text):
            self.fault(key, "this value is a constant, which a run cannot change: ${...} cannot be used in it")
        return texts[0]

    def number(self, key: str, bounds: NumberBounds) -> Any:
        value = self.members.get(key)
        kinds = int if bounds.whole else (int, float)
        fits = isinstance(value, kinds) and not isinstance(value, bool) and bounds.low <= value <= bounds.high
        if key in self.members and not fits:
            low, high = (f"{each:,}" if isinstance(each, int) else f"{each:g}" for each in (bounds.low, bounds.high))
            self.expected(key, f"a {'whole ' * bounds.whole}number from {low} to {high}")
            return None
        return value

    def template(self, key: str) -> ValueTemplate | None:
        return self.reader.template(self.members[key], self.at(key)) if key in self.members else None

    def text_template(self, key: str) -> ValueTemplate | None:
        """A text that may have expressions."""
        if key in self.members and not isinstance(self.members[key], str):
            self.expected(key, "a text")
            return None
        return self.template(key)

    def expression(self, key: str, expected: str = 'an expression such as "${...}"') -> ValueTemplate | None:
        """A text that is one expression."""
        made = self.template(key)
        if made is None or made.expression is not None:
            return made
        if made.value or not self.members[key]:  # else it could not be parsed, which is an error already
            self.expected(key, expected)
        return None

"""Reads a YAML file of the operator as plain values, with the line of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from gateway.config.addresses import shown
from gateway.config.parse import ConfigError, Key, NotReadable, Problem
from gateway.errors import OUT_OF_RESOURCES

MAX_BYTES: Final = 1 << 20  # of a file; a ConfigMap has no more


class _BadCharacter(yaml.YAMLError):
    """A character or byte that YAML does not allow. line: from 1."""

    def __init__(self, text: str, line: int) -> None:
        super().__init__(text)
        self.line = line


class _Loader(yaml.SafeLoader):
    """YAML loader that reports repeated keys (PyYAML takes the last), checked before merge keys (`<<`) are expanded."""

    def __init__(self, stream: str) -> None:
        """Raises _BadCharacter."""
        try:
            super().__init__(stream)
        except yaml.reader.ReaderError as error:
            line = stream.count("\n", 0, error.position) + 1
            raise _BadCharacter(f"the character {chr(error.character)!a} is not allowed", line) from None
        self.repeated: list[tuple[int, str]] = []  # (line, problem)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Add the line to errors of invalid values, such as the date 2026-99-99."""
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=node.start_mark) from None

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in lines:
                self.repeated.append((line, f"the key {shown(key.value)} is given twice, first in line {lines[name]}"))
            lines.setdefault(name, line)
        return node


def _text_of(path: Path) -> str:
    """The text of a file. Raises ConfigError if the file is too large, OSError, _BadCharacter if it is not UTF-8."""
    with path.open("rb") as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: the file is too large; at most {MAX_BYTES >> 20} MiB are possible")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _BadCharacter(f"the byte 0x{raw[error.start]:02x} is not UTF-8: {error.reason}", line) from None


def _problem_of(error: Exception, path: str) -> Problem:
    """The problem of invalid YAML, with its line if known."""
    text, line = str(error), 0
    if isinstance(error, yaml.MarkedYAMLError):
        text, line = error.problem or "", _line_at(error.problem_mark)
        if error.context:
            text = f"{error.context}{_beginning(error.context_mark, line)}: {text}"
        line = line or _line_at(error.context_mark)
        if error.context == "while scanning an alias":
            text += " (a text that begins with a star must be in quotes)"
    elif isinstance(error, _BadCharacter):
        line = error.line
    problem = f"not valid YAML: {' '.join(text.split())}"
    return Problem((), problem, path, line) if line else Problem((), f"{path}: {problem}")


def _line_at(mark: yaml.Mark | None) -> int:
    """The line from 1; 0: unknown."""
    return mark.line + 1 if mark else 0


def _beginning(mark: yaml.Mark | None, line: int) -> str:
    """The line in which an error's context begins, if it is another one."""
    begins = _line_at(mark)
    return f" that begins in line {begins}" if begins not in (0, line) else ""


class YamlFile:
    """values: the file's mapping. problems: repeated keys."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file is missing, not YAML or not a mapping; NotReadable for lack of resources."""
        self._path = path
        try:
            loader = _Loader(_text_of(path))
            try:
                self._root = loader.get_single_node()
                values = None if self._root is None else loader.construct_document(self._root)
            finally:
                loader.dispose()
        except OSError as error:
            kind = NotReadable if error.errno in OUT_OF_RESOURCES else ConfigError
            raise kind(f"{path}: {error.strerror}") from error
        except (yaml.YAMLError, RecursionError) as error:
            raise ConfigError(_problem_of(error, str(path))) from error
        if values is not None and not isinstance(values, dict):
            raise ConfigError(f"{path}: the file holds a {type(values).__name__}, a mapping of keys is expected")
        self.values: dict[str, Any] = values or {}
        self.problems = [Problem((), text, str(path), line) for line, text in loader.repeated]

    def located(self, problem: Problem) -> Problem:
        """The problem with its file and line."""
        return replace(problem, file=str(self._path), line=self._line_of(problem.key))

    def _line_of(self, key: Key) -> int:
        """The line of a value; of its container if it is missing."""
        line, node = 1, self._root
        for part in key:
            found = _child(node, part)
            if found is None:
                break
            line, node = found
        return line


def _child(node: yaml.Node | None, part: str | int) -> tuple[int, yaml.Node] | None:
    """(line, node) of a part of a node: a list's item by its index, a mapping's value by its key."""
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        item = node.value[part]
        return item.start_mark.line + 1, item
    if isinstance(node, yaml.MappingNode):
        for key, value in reversed(node.value):  # the last one wins; merged keys (`<<`) come first
            if isinstance(key, yaml.ScalarNode) and key.value == str(part):
                return key.start_mark.line + 1, value
    return None

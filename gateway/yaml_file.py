"""A YAML file as plain values, and the line on which each of them stands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from gateway.addresses import shown
from gateway.errors import OUT_OF_RESOURCES
from gateway.typed import ConfigError, Key, NotReadable, Problem


class _Loader(yaml.SafeLoader):
    """YAML in which a key is given once; PyYAML lets the last one win. It looks before merge keys (`<<`) are put in."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.repeated: list[tuple[int, str]] = []  # (line, what is wrong)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in lines:
                self.repeated.append((line, f"the key {shown(key.value)} is given twice, first in line {lines[name]}"))
            lines.setdefault(name, line)
        return node


class YamlFile:
    """values: the file's mapping. problems: keys that are given twice."""

    def __init__(self, path: Path) -> None:
        """Read it. Raises ConfigError if it is not there, no YAML, or no mapping; NotReadable for lack of resources."""
        self._path = path
        try:
            loader = _Loader(path.read_text("utf-8"))
            try:
                self._root = loader.get_single_node()
                values = None if self._root is None else loader.construct_document(self._root)
            finally:
                loader.dispose()
        except OSError as error:
            kind = NotReadable if error.errno in OUT_OF_RESOURCES else ConfigError
            raise kind(f"{path}: {error.strerror}") from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or a date such as 2026-99-99
            raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
        if values is not None and not isinstance(values, dict):
            raise ConfigError(f"{path}: the file holds a {type(values).__name__}, a mapping of keys is expected")
        self.values: dict[str, Any] = values or {}
        self.problems = [Problem((), text, str(path), line) for line, text in loader.repeated]

    def located(self, problem: Problem) -> Problem:
        """The problem with its file and line."""
        return replace(problem, file=str(self._path), line=self._line_of(problem.key))

    def _line_of(self, key: Key) -> int:
        """Of the value there; of what contains it, if there is none (a key that is missing)."""
        line, node = 1, self._root
        for part in key:
            found = _child(node, part)
            if found is None:
                break
            line, node = found
        return line


def _child(node: yaml.Node | None, part: str | int) -> tuple[int, yaml.Node] | None:
    """(line, node) of a part of a node: a list's item by its place, a mapping's value by its key."""
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        item = node.value[part]
        return item.start_mark.line + 1, item
    if isinstance(node, yaml.MappingNode):
        for key, value in reversed(node.value):  # the last one wins; what `<<` merges in stands first
            if isinstance(key, yaml.ScalarNode) and key.value == str(part):
                return key.start_mark.line + 1, value
    return None

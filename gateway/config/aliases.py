"""Model aliases: clients' names for models that have other names at the replicas.

    model_aliases: {claude-opus-4-5: big, claude-*: qwen3-coder}

An alias is a name, or the beginning of names with a star at its end (a star alone: any name). A name is looked up once:
unchanged, then by the longest beginning. The target of an alias is a model's name, which must not be another alias; an alias of
itself (`big: big`) excludes a name from a wider alias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

STAR: Final = "*"
MAX_ALIASES: Final = 1024
MAX_NAME_CHARS: Final = 256


class Aliases:
    """The aliases (see the module). names: from the configuration."""

    __slots__ = ("_exact", "_lengths", "_prefixes", "names")

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = dict(names)
        self._exact = {alias: model for alias, model in names.items() if not alias.endswith(STAR)}
        self._prefixes = {alias[:-1]: model for alias, model in names.items() if alias.endswith(STAR)}
        self._lengths = sorted({len(prefix) for prefix in self._prefixes}, reverse=True)

    def of(self, name: str) -> str:
        """The target of this name; "" if it is no alias. O(1), with beginnings O(their different lengths)."""
        model = self._exact.get(name, "")
        if model or not name:
            return model
        for length in self._lengths:
            model = self._prefixes.get(name[:length], "") if length <= len(name) else ""
            if model:
                return model
        return ""

    def __repr__(self) -> str:
        return f"<Aliases {self.names}>"


def alias_name(name: str) -> str:
    """Check an alias. Raises ValueError."""
    if STAR in name[:-1]:
        beginning = name.partition(STAR)[0] + STAR
        raise ValueError(f"a star is possible at the end only, for any rest of a name: write {beginning!r}, or each name")
    return _printable(name)


def model_name(name: str) -> str:
    """Check a model's name. Raises ValueError."""
    if STAR in name:
        raise ValueError("one model is meant: write its whole name, without a star")
    return _printable(name)


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("printable characters are expected")
    return name


def chains(names: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(alias, its model, the model's own target) of each alias of an alias."""
    aliases = Aliases(names)
    for alias, model in names.items():
        if (further := aliases.of(model)) and further != model:
            yield alias, model, further

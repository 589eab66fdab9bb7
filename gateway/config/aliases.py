"""Model aliases: names that clients use for models that have other names at the replicas.

    model_aliases: {claude-opus-4-5: big, claude-*: qwen3-coder}

An alias is a name, or the beginning of names with a star at its end (a star alone: any name). A name is looked up once: as it
is, then by the longest beginning. What an alias stands for is a model's name, which must not be an alias of yet another one; an
alias that stands for itself (`big: big`) takes a name out of a wider one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

STAR: Final = "*"
MAX_ALIASES: Final = 1024
MAX_NAME_CHARS: Final = 256


class Aliases:
    """See the top of this file. names: as they are configured."""

    __slots__ = ("_exact", "_lengths", "_prefixes", "names")

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = dict(names)
        self._exact = {alias: model for alias, model in names.items() if not alias.endswith(STAR)}
        self._prefixes = {alias[:-1]: model for alias, model in names.items() if alias.endswith(STAR)}
        self._lengths = sorted({len(prefix) for prefix in self._prefixes}, reverse=True)

    def of(self, name: str) -> str:
        """The model that this name stands for; "" if it is no alias. O(1), with beginnings O(their different lengths)."""
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
    """Raises ValueError."""
    if STAR in name[:-1]:
        beginning = name.partition(STAR)[0] + STAR
        raise ValueError(f"a star is possible at the end only, for any rest of a name: write {beginning!r}, or each name")
    return _printable(name)


def model_name(name: str) -> str:
    """Raises ValueError."""
    if STAR in name:
        raise ValueError("one model is meant: write its whole name, without a star")
    return _printable(name)


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("printable characters are expected")
    return name


def chains(names: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(alias, its model, what that stands for in its turn) of each alias of an alias."""
    aliases = Aliases(names)
    for alias, model in names.items():
        if (further := aliases.of(model)) and further != model:
            yield alias, model, further

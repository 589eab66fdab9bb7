"""Reads keys from a YAML file of the operator, which contains digests, never keys.

keys:
- {id: k3p8w2zd, sha256: 9f86d0..., tenant: acme, requests_per_minute: 600}
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from gateway.config.parse import ConfigError, Problem, parse
from gateway.config.yaml_file import YamlFile
from gateway.features.keys.record import FileKey, Key, KeySettings, KeysFile

MAX_PROBLEMS: Final = 20  # listed in the error


def read_keys(path: Path) -> list[Key]:
    """The keys in the file. Raises ConfigError, which lists the problems."""
    file = YamlFile(path)
    parsed = parse(KeysFile, file.values)
    problems = [*file.problems, *map(file.located, parsed.problems)]
    if problems or parsed.value is None:
        raise ConfigError(*problems[:MAX_PROBLEMS])
    written = parsed.value.keys
    repeated = [Problem(("keys", number, name), "another key has it already") for name, number in _repeated(written)]
    if repeated:
        raise ConfigError(*map(file.located, repeated[:MAX_PROBLEMS]))
    fields = KeySettings.__struct_fields__
    return [
        Key(each.id, KeySettings(**{name: getattr(each, name) for name in fields}), ((bytes.fromhex(each.sha256), 0.0),))
        for each in written
    ]


def _repeated(written: Sequence[FileKey]) -> Iterator[tuple[str, int]]:
    """The (field, entry number) of each value that an earlier entry has."""
    for name in ("id", "sha256"):
        seen = set[str]()
        for number, each in enumerate(written):
            value = getattr(each, name)
            if value in seen:
                yield name, number
            seen.add(value)

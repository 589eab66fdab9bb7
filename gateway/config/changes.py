"""The difference between two configurations, as keys without values: values may be secret, or long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec


def changed_keys(old: msgspec.Struct, new: msgspec.Struct, within: str = "") -> Iterator[str]:
    """The keys with different values, in the order of the fields: `limits.body_mb`, `prices.MODEL`, `pools.NAME.queue_s`.

    Keys of mappings and names of list items that only one of both has are followed by "(new)" or "(gone)". old, new: of one
    type.
    """
    for name in old.__struct_fields__:
        yield from _between(getattr(old, name), getattr(new, name), within + name)


def _between(before: Any, after: Any, key: str) -> Iterator[str]:
    if before == after:
        return
    if isinstance(before, msgspec.Struct) and type(before) is type(after):
        yield from changed_keys(before, after, f"{key}.")
        return
    earlier, later = _named(before), _named(after)
    if earlier is None or later is None or not (earlier or later):
        yield key
        return
    for name in dict.fromkeys([*earlier, *later]):
        if name not in later:
            yield f"{key}.{name} (gone)"
        elif name not in earlier:
            yield f"{key}.{name} (new)"
        else:
            yield from _between(earlier[name], later[name], f"{key}.{name}")
    if list(earlier) != list(later) and set(earlier) == set(later):
        yield key  # only their order


def _named(value: Any) -> Mapping[str, Any] | None:
    """A mapping, or a list whose items have different names, by name; None: neither."""
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, Sequence) or isinstance(value, str):
        return None
    names = [getattr(each, "name", None) for each in value]
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        return None
    return dict(zip(map(str, names), value, strict=True))

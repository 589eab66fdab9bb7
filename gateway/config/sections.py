"""Sections of the configuration that features declare, and the type of the whole file, which adds them to the core's keys.

    TRACING: Final = Section("tracing", Annotated[TracingConfig, Meta(...)], TracingConfig())     in the feature's package
    config_type([TRACING, ...])                                                    in the table of features
    TRACING.of(config)                                                             where the feature reads it

A section is read, checked, described for editors and reloaded like the core's own; its hint has the details (`hints.py`). The
section of an absent feature is an unknown key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Generic, TypeVar, cast

import msgspec
from msgspec.structs import FieldInfo

from gateway.config.hints import FIXED, PROCESSES, SOURCES, extra_of, fields_of, section_of
from gateway.config.schema import Config

MAX_SOURCES = 64  # of replicas: each process watches each source

T = TypeVar("T")


class Section(Generic[T]):
    """A key at the top of the file. hint: the type of its value, with `msgspec.Meta`. default: its value if the file has none.

    flag: text for the flag of `warmroute serve` with this name, which sets a number; "": there is no such flag. within: the
    section of the core to which it adds this key; "": it stands at the top.
    """

    def __init__(self, name: str, hint: Any, default: T, *, flag: str = "", within: str = "") -> None:
        self.name, self.hint, self.default, self.flag, self.within = name, hint, default, flag, within

    def of(self, config: Config) -> T:
        """The section's value in a configuration, whose type may lack the section."""
        place = getattr(config, self.within) if self.within else config
        value: T = getattr(place, self.name, self.default)
        return value

    def __repr__(self) -> str:
        return f"<Section {self.name}>"


def config_type(sections: Iterable[Section[Any]]) -> type[Config]:
    """The type of a whole file with these sections."""
    keys: dict[str, list[tuple[str, Any, Any]]] = {"": []}
    for section in sections:
        keys.setdefault(section.within, []).append((section.name, section.hint, section.default))
    for field in msgspec.structs.fields(Config):
        if field.name in keys:
            whole: Any = _with(section_of(field.type), keys[field.name])
            keys[""].append((field.name, Annotated[whole, _meta(field, keys[field.name])], whole()))
    return cast(type[Config], _with(Config, keys[""]))


def _with(base: type[msgspec.Struct], fields: Sequence[tuple[str, Any, Any]]) -> type[msgspec.Struct]:
    doc = {"__doc__": base.__doc__}
    return msgspec.defstruct(
        base.__name__, fields, bases=(base,), namespace=doc, frozen=True, forbid_unknown_fields=True, module=__name__
    )


def _meta(field: FieldInfo, keys: Iterable[tuple[str, Any, Any]]) -> msgspec.Meta:
    """The hint of a section to which features add these keys."""
    extra = extra_of(field.type)
    return msgspec.Meta(
        extra={**extra, FIXED: (*extra.get(FIXED, ()), *(name for name, hint, _ in keys if FIXED in extra_of(hint)))}
    )


def marked(kind: type[Config], mark: str) -> Iterator[tuple[str, Any]]:
    """(key, value of the mark in its hint) of the keys at the top of a file with this mark of `hints.py`."""
    for name, field in fields_of(kind).items():
        extra = extra_of(field.type)
        if mark in extra:
            yield name, extra[mark]


def processes_of(config: Config) -> int:
    """The number of processes that serve together, and share the bounds of this configuration."""
    return next((getattr(config, name) for name, _ in marked(type(config), PROCESSES)), 1)


def sources_of(config: Config) -> Sequence[str]:
    """Names of the sources of replicas that this configuration wants watched."""
    return [source for name, names in marked(type(config), SOURCES) for source in names(getattr(config, name))]

"""Declarations of features. A feature has a module `declaration.py` with one `FEATURE`, which imports nothing but its section
and its metrics, so that all features are known before any of them is imported.

A configuration has the sections of all features, /metrics their metrics, `warmroute --help` their commands, whether the
configuration wants the feature or not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from gateway.config.parse import Problem
from gateway.config.schema import Config
from gateway.config.sections import Section
from gateway.config.source import LoadedConfig


class Command(NamedTuple):
    """A subcommand of `warmroute`. text: a line about it.

    module: it has DESCRIPTION, `add_arguments(parser)`, and `run(options)`, which returns the exit status.
    """

    name: str
    text: str
    module: str


class Advice:
    """A feature's opinion on a configuration that is valid."""

    def require(self, config: Config) -> None:
        """Raises ConfigError if a library is not installed that the gateway does not start without."""

    def notes(self, loaded: LoadedConfig, env: Mapping[str, str] = os.environ) -> Iterator[Problem]:
        """What it needs beside the configuration, and does not find on this machine. Raises ConfigError."""
        return iter(())

    def warnings(self, config: Config) -> Iterator[Problem]:
        """What is probably a mistake."""
        return iter(())


@dataclass(frozen=True, slots=True)
class Feature:
    """wanted: whether a configuration asks for it, or its clients may. section: of the configuration. metrics: a class that is
    made with a `MetricFamily` (`telemetry/metrics.py`), and found again by `Metrics.of`.

    As "module:name", imported when they are called for: advice: a subclass of `Advice`. serving: the function that serves a
    gateway with this configuration, in the place of `commands/serving.py`; "": there is none.
    """

    wanted: Callable[[Config], bool] = lambda _config: True
    section: Section[Any] | None = None
    metrics: type[Any] | None = None
    commands: Sequence[Command] = ()
    advice: str = ""
    serving: Callable[[Config], str] = lambda _config: ""


def imported(place: str) -> Any:
    """place: "module:name"."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)

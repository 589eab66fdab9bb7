"""Declarations of features. A feature has a module `declaration.py` with one `FEATURE`. It imports only its section and its
metrics, so that all features are known before any of them is imported.

The configuration has the sections of all features, /metrics their metrics, `warmroute --help` their commands, independent of
the features that a configuration enables.
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
    """A subcommand of `warmroute`. text: a line of help.

    module: has DESCRIPTION, `add_arguments(parser)`, and `run(options)`, which returns the exit status.
    """

    name: str
    text: str
    module: str


class Advice:
    """Checks of a valid configuration by a feature."""

    def require(self, config: Config) -> None:
        """Raises ConfigError if a required library is not installed."""

    def notes(self, loaded: LoadedConfig, env: Mapping[str, str] = os.environ) -> Iterator[Problem]:
        """External files and the like that the feature needs and cannot use on this machine. Raises ConfigError."""
        return iter(())

    def warnings(self, config: Config) -> Iterator[Problem]:
        """Probable mistakes."""
        return iter(())


@dataclass(frozen=True, slots=True)
class Feature:
    """wanted: True if a configuration enables it, or its clients may use it. section: of the configuration. metrics: a class
    with a `MetricFamily` as argument (`telemetry/metrics.py`), whose instance `Metrics.of` returns. model_prefix: of the models
    that the feature serves itself; "": none.

    As "module:name", imported on use: advice: a subclass of `Advice`. serving: the function that serves a gateway with this
    configuration, instead of `commands/serving.py`; "": the default.
    """

    wanted: Callable[[Config], bool] = lambda _config: True
    section: Section[Any] | None = None
    metrics: type[Any] | None = None
    commands: Sequence[Command] = ()
    model_prefix: str = ""
    advice: str = ""
    serving: Callable[[Config], str] = lambda _config: ""


def imported(place: str) -> Any:
    """The object at "module:name"."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)

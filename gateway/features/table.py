"""The features of a gateway: one line each.

A feature is a folder here, with two modules: `declaration.py` (`declaring.py`), which is imported with this table, and
`feature.py`, which has `install(core)` (`gateway/core.py`) and is imported in a gateway that wants it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gateway.config import source
from gateway.config.sections import config_type
from gateway.config.source import LoadedConfig
from gateway.features.declaring import Feature
from gateway.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from gateway.core import Core

NAMES: Final = [
    "tracing",
    "keys",
    "ledger",
    "savings",
    "audit",
    "hangs",
    "waking",
    "deadlines",
    "snapshots",
    "sharing",
    "workers",
    "recording",
    "doctor",
    "live_page",
    "diagnostics",
    "disaggregation",
    "fallback_pools",
    "translation",
    "responses",
    "websocket",
    "discovery",
    "workflows",
    "prompt_log",
    "adoption",
    "kv_events",
    "retention",
]
"""In the order of installation."""


def _declared(name: str) -> Feature:
    feature: Feature = import_module(f"gateway.features.{name}.declaration").FEATURE
    return feature


FEATURES: Final[Mapping[str, Feature]] = {name: _declared(name) for name in NAMES}
SECTIONS: Final = [feature.section for feature in FEATURES.values() if feature.section is not None]
WholeConfig: Final = config_type(SECTIONS)


def read(path: Path | None, overrides: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> LoadedConfig:
    """A configuration with the sections of all features. Raises ConfigError."""
    return source.read(WholeConfig, path, overrides, env)


def new_metrics() -> Metrics:
    """The metrics of the core and of all features."""
    return Metrics([feature.metrics for feature in FEATURES.values() if feature.metrics is not None])


def install_all(core: Core) -> None:
    """Installs the features that the core's configuration enables."""
    for name, feature in FEATURES.items():
        if feature.wanted(core.config):
            import_module(f"gateway.features.{name}.feature").install(core)

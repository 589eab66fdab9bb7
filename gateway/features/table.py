"""The features of a gateway: one line each. The package of one is imported only in a gateway that wants it.

A feature is a folder here, with a module `feature.py` that has `install(core)` (`gateway/core.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Final, NamedTuple

from gateway.config.listen import OFF
from gateway.config.schema import Config
from gateway.core import Core


class Feature(NamedTuple):
    """name: of its folder. wanted: whether a configuration asks for it, or its clients may."""

    name: str
    wanted: Callable[[Config], bool]


def _always(_config: Config) -> bool:
    return True


FEATURES: Final = [
    Feature("tracing", lambda config: config.tracing.endpoint != OFF),
    Feature("keys", _always),
    Feature("ledger", lambda config: config.ledger.url != OFF),
    Feature("savings", lambda config: config.routing.compare),
    Feature("sharing", _always),
    Feature("recording", _always),
    Feature("doctor", _always),
    Feature("live_page", _always),
    Feature("diagnostics", _always),
    Feature("fallback_pools", _always),
    Feature("translation", _always),
    Feature("responses", _always),
    Feature("websocket", _always),
    Feature("discovery", _always),
]


def install_all(core: Core, features: list[Feature] = FEATURES) -> None:
    """Add those to the core that its configuration wants, in the order of the table."""
    for feature in features:
        if feature.wanted(core.config):
            import_module(f"gateway.features.{feature.name}.feature").install(core)

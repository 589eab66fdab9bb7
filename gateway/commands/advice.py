"""Warnings about a valid configuration that is probably a mistake."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gateway.admission.memory import PARSE_COPIES, largest_of, limit_for, peak_of
from gateway.config.addresses import host_and_port, is_loopback
from gateway.config.kinds import MATCH_ALL
from gateway.config.parse import Problem
from gateway.config.schema import Config, PoolConfig, ReplicaConfig
from gateway.config.sections import processes_of
from gateway.config.source import LoadedConfig
from gateway.features.declaring import Advice, imported
from gateway.features.table import FEATURES


def warnings_of(loaded: LoadedConfig) -> list[Problem]:
    """All warnings, with file and line."""
    config = loaded.config
    found = (
        *_patterns(config),
        *_repeated_urls(config),
        *_keys_in_clear(config),
        *_prices(config),
        *_aliases(config),
        *_limits(config),
        *(problem for feature in advisers() for problem in feature.warnings(config)),
    )
    empty = [Problem((), f"the variable {name} is set, but empty: it counts as not set") for name in loaded.empty]
    return empty + sorted(map(loaded.at, found), key=lambda problem: problem.line)


def advisers() -> Iterator[Advice]:
    """The features that give advice about configurations."""
    return (imported(feature.advice)() for feature in FEATURES.values() if feature.advice)


def _is_pattern(name: str) -> bool:
    return name != MATCH_ALL and any(sign in name for sign in "*?[")


def _patterns(config: Config) -> Iterator[Problem]:
    """Stars in model names, which are prefixes, so a star is literal."""
    keys = [
        ("pools", number, "models", index) for number, pool in enumerate(config.pools) for index, _ in enumerate(pool.models)
    ]
    names = [name for pool in config.pools for name in pool.models]
    for key, name in (*zip(keys, names, strict=True), *((("prices", name), name) for name in config.prices)):
        if _is_pattern(name):
            prefix = name.rstrip("*")
            better = f"; for all models that begin with {prefix!r} write {prefix!r}" if prefix != name and prefix else ""
            yield Problem(key, f"{name!r} is a prefix, not a pattern: it fits no model{better}")


def _placed(pool: PoolConfig) -> Iterator[tuple[tuple[str, int], ReplicaConfig]]:
    """The replicas of a pool, with their places in it."""
    return (((key, index), replica) for key, each in pool.by_role.items() for index, replica in enumerate(each))


def _repeated_urls(config: Config) -> Iterator[Problem]:
    first: dict[str, str] = {}
    for number, pool in enumerate(config.pools):
        for place, replica in _placed(pool):
            if replica.url in first:
                text = f"{replica.url} is the URL of the replica {first[replica.url]!r}, too: its load is counted per entry"
                yield Problem(("pools", number, *place, "url"), text)
            first.setdefault(replica.url, replica.name)


def _keys_in_clear(config: Config) -> Iterator[Problem]:
    """Keys of replicas that are sent over the network without TLS."""
    for number, pool in enumerate(config.pools):
        for place, replica in _placed(pool):
            host, encrypted = host_and_port(replica.url)[0], replica.url.lower().startswith("https:")
            if replica.key and not encrypted and not is_loopback(host):
                text = f"the replica's key goes to {replica.url} unencrypted, as all requests there do: use https"
                yield Problem(("pools", number, *place, "url"), text)


def _prices(config: Config) -> Iterator[Problem]:
    # A pool without prefixes serves all models that its replicas list, which are unknown at this point.
    served = [name for pool in config.pools for name in pool.models or (MATCH_ALL,)]
    for model, prices in config.prices.items():
        for place, price in enumerate(prices):
            if price.cached_input is not None and price.cached_input > price.input:
                text = (
                    f"{price.cached_input:g} is above the price of uncached input ({price.input:g}): each hit would cost money"
                )
                yield Problem(("prices", model, *((place,) if len(prices) > 1 else ()), "cached_input"), text)
        if MATCH_ALL in (model, *served) or _is_pattern(model):
            continue
        if not any(model.startswith(name) or name.startswith(model) for name in served):
            yield Problem(("prices", model), f"no pool serves a model whose name begins with {model!r}")


def _aliases(config: Config) -> Iterator[Problem]:
    """Aliases of models that no pool serves."""
    prefixes = [name for pool in config.pools for name in pool.models]
    if MATCH_ALL in prefixes or not all(pool.models for pool in config.pools):
        return  # any model may be served
    prefixes += [each.model_prefix for each in FEATURES.values() if each.model_prefix and each.wanted(config)]
    for alias, model in config.model_aliases.items():
        if not any(model.startswith(name) for name in prefixes):
            yield Problem(("model_aliases", alias), f"no pool serves a model with the name {model!r}")


def _limits(config: Config) -> Iterator[Problem]:
    """Bodies that `body_mb` allows but the configured memory budget refuses."""
    limits, workers = config.limits, processes_of(config)
    largest = largest_of((limits.inflight_mb << 20) // workers)
    if not limits.inflight_mb or peak_of(limits.body_mb << 20) <= largest:
        return
    copies = 1 + PARSE_COPIES
    enough = math.ceil(limit_for(peak_of(limits.body_mb << 20)) * workers / 2**20)
    text = (
        f"bodies of {limits.body_mb} MiB cannot be received: a body needs {copies} times its size while it is parsed, and a"
        f" client gets {largest / 2**20:.3g} MiB at most of inflight_mb ({limits.inflight_mb}) with workers: {workers}; bodies"
        f" above {largest / copies / 2**20:.3g} MiB are refused. Set inflight_mb to {enough} or more, or a smaller body_mb"
    )
    yield Problem(("limits", "inflight_mb"), text)

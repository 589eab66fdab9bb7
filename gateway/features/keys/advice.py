"""Problems of keys: missing libraries, databases or files, and budgets without prices."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from gateway.config.kinds import MATCH_ALL
from gateway.config.parse import ConfigError, Problem
from gateway.config.schema import Config
from gateway.config.source import LoadedConfig
from gateway.features.declaring import Advice
from gateway.features.keys.section import KEYS


class KeysAdvice(Advice):
    """Advice on the section `keys`."""

    def require(self, config: Config) -> None:
        """Raises ConfigError."""
        if KEYS.of(config).oidc:
            from gateway.features.keys.tokens import jwks

            if not jwks.is_installed():
                raise ConfigError(f"keys.oidc needs a library that is not installed here: pip install '{jwks.LIBRARY}'")

    def notes(self, loaded: LoadedConfig, env: Mapping[str, str] = os.environ) -> Iterator[Problem]:
        """Raises ConfigError for a readable but invalid keys file."""
        url = KEYS.of(loaded.config).url
        if url.startswith("/"):
            yield from _of_the_file(Path(url), has_prices=bool(loaded.config.prices))

    def warnings(self, config: Config) -> Iterator[Problem]:
        """Budgets of issuers' tenants without prices. The budgets of keys are in a database, and are not checked here."""
        for number, issuer in enumerate(KEYS.of(config).oidc):
            for name in ("budget_usd_day", "budget_usd_month"):
                if getattr(issuer, name) is not None and not config.prices:
                    text = "a tenant with a budget may use no model without a price, and there are no prices"
                    yield Problem(("keys", "oidc", number, name), text)
        yield from _without_prices(config)


def _without_prices(config: Config) -> Iterator[Problem]:
    """Models of pools that may have no price. A pool without prefixes serves the models that its replicas list, which are
    unknown at this point.
    """
    if not (KEYS.of(config).on and config.prices) or MATCH_ALL in config.prices:
        return
    for number, pool in enumerate(config.pools):
        for index, name in enumerate(pool.models):
            if not any(name.startswith(priced) for priced in config.prices):
                text = f"not all models {name!r} have a price: a key with a budget may not use the others (403)"
                yield Problem(("pools", number, "models", index), text)


def _of_the_file(path: Path, *, has_prices: bool) -> Iterator[Problem]:
    if path.exists() and not path.is_file():  # opening a pipe would block until it has a writer
        yield Problem(("keys", "url"), f"not on this machine: {path} is not a regular file")
        return
    from gateway.features.keys.file import read_keys

    try:
        keys = read_keys(path)
    except ConfigError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        yield Problem(("keys", "url"), f"not on this machine: {error}")
        return
    limited = [key for key in keys if key.settings.budget_usd_day is not None or key.settings.budget_usd_month is not None]
    if limited and not has_prices:
        text = f"{len(limited)} of its keys have a budget, and may use no model without a price; there are no prices"
        yield Problem(("keys", "url"), text)

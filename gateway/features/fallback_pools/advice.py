"""Problems of fallbacks: models that the fallback pool probably does not serve."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.config.kinds import MATCH_ALL
from gateway.config.parse import Problem
from gateway.config.schema import Config
from gateway.features.declaring import Advice


class FallbackAdvice(Advice):
    """Advice on `fallback` of pools."""

    def warnings(self, config: Config) -> Iterator[Problem]:
        """Models that a fallback pool probably does not serve: its replicas would answer 404."""
        by_name = {pool.name: pool for pool in config.pools}
        for number, pool in enumerate(config.pools):
            fallback = pool.fallback
            prefixes = by_name[fallback.pool].models if fallback else ()
            if fallback is None or not prefixes or MATCH_ALL in prefixes:
                continue
            for model in (fallback.model,) if fallback.model else pool.models:
                if not any(model.startswith(name) or name.startswith(model) for name in prefixes):
                    wrong = f"the pool {fallback.pool!r} serves no model with the name {model!r}"
                    yield Problem(("pools", number, "fallback"), f"{wrong}: set model to one that it serves")

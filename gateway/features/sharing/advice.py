"""Problems of sharing: a missing library, unusable certificates."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from gateway.config.listen import OFF
from gateway.config.parse import Problem
from gateway.config.schema import Config
from gateway.config.source import LoadedConfig
from gateway.errors import ReplicaFailure
from gateway.features.declaring import Advice
from gateway.features.sharing.section import SHARING


class SharingAdvice(Advice):
    """Advice on the section `sharing`."""

    def require(self, config: Config) -> None:
        """Raises ConfigError."""
        if SHARING.of(config).url != OFF:
            from gateway.features.sharing.server.client import require_library

            require_library()

    def notes(self, loaded: LoadedConfig, env: Mapping[str, str] = os.environ) -> Iterator[Problem]:
        from gateway.features.sharing.server.failures import tls_context

        try:
            tls_context(SHARING.of(loaded.config))
        except ReplicaFailure as failure:
            yield Problem(("sharing",), f"not on this machine: {failure.message}")

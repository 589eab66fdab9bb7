"""Problems of discovery: unreadable lists of replicas, and keys that would be sent unencrypted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from gateway.config.parse import ConfigError, Problem
from gateway.config.schema import Config
from gateway.config.source import LoadedConfig
from gateway.features.declaring import Advice
from gateway.features.discovery.section import DISCOVERY


class DiscoveryAdvice(Advice):
    """Advice on the section `discovery`."""

    def notes(self, loaded: LoadedConfig, env: Mapping[str, str] = os.environ) -> Iterator[Problem]:
        """Reports lists that are invalid on this machine."""
        from gateway.features.discovery.file import LOGGED, read_members

        for place, source in enumerate(DISCOVERY.of(loaded.config)):
            if source.file:
                try:
                    read_members(source)
                except ConfigError as error:
                    text = f"not read on this machine: {'; '.join(map(str, error.problems[:LOGGED]))}"
                    yield Problem(("discovery", place, "file"), text)

    def warnings(self, config: Config) -> Iterator[Problem]:
        for place, source in enumerate(DISCOVERY.of(config)):
            if source.key and not source.tls and not source.file:  # a file has complete URLs, which are unknown here
                text = "the replicas' key is sent unencrypted to discovered replicas, like all requests: set tls"
                yield Problem(("discovery", place, "key"), text)

"""The lists of replicas that discovery reads, and keys that it would have sent unencrypted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from gateway.config.parse import ConfigError, Problem
from gateway.config.schema import Config
from gateway.config.source import LoadedConfig
from gateway.features.declaring import Advice
from gateway.features.discovery.section import DISCOVERY


class DiscoveryAdvice(Advice):
    """See the top of this file."""

    def notes(self, loaded: LoadedConfig, env: Mapping[str, str] = os.environ) -> Iterator[Problem]:
        """A list that is here and invalid is named, too."""
        from gateway.features.discovery.file import LOGGED, listed

        for place, source in enumerate(DISCOVERY.of(loaded.config)):
            if source.file:
                try:
                    listed(source)
                except ConfigError as error:
                    text = f"not read on this machine: {'; '.join(map(str, error.problems[:LOGGED]))}"
                    yield Problem(("discovery", place, "file"), text)

    def warnings(self, config: Config) -> Iterator[Problem]:
        for place, source in enumerate(DISCOVERY.of(config)):
            if source.key and not source.tls and not source.file:  # a file has whole URLs, which are not known here
                text = "the replicas' key goes to what is found unencrypted, as all requests there do: set tls"
                yield Problem(("discovery", place, "key"), text)

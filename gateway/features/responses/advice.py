"""Problems of the database of stored responses."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from gateway.config.parse import Problem
from gateway.config.source import LoadedConfig
from gateway.database.places import unreadable
from gateway.features.declaring import Advice
from gateway.features.responses.section import STATE


class StateAdvice(Advice):
    """Advice on the section `state`."""

    def notes(self, loaded: LoadedConfig, env: Mapping[str, str] = os.environ) -> Iterator[Problem]:
        return unreadable(STATE.name, STATE.of(loaded.config).url)

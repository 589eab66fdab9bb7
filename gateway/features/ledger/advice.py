"""The database that it needs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from gateway.config.parse import Problem
from gateway.config.source import LoadedConfig
from gateway.database.places import unreadable
from gateway.features.declaring import Advice
from gateway.features.ledger.section import LEDGER


class LedgerAdvice(Advice):
    """See the top of this file."""

    def notes(self, loaded: LoadedConfig, env: Mapping[str, str] = os.environ) -> Iterator[Problem]:
        return unreadable(LEDGER.name, LEDGER.of(loaded.config).url)

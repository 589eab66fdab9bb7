"""Problems of the ledger's database."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from gateway.config.parse import Problem
from gateway.config.source import LoadedConfig
from gateway.database.places import unreadable
from gateway.features.declaring import Advice
from gateway.features.ledger.section import LEDGER


class LedgerAdvice(Advice):
    """Advice on the section `ledger`."""

    def notes(self, loaded: LoadedConfig, env: Mapping[str, str] = os.environ) -> Iterator[Problem]:
        return unreadable(LEDGER.name, LEDGER.of(loaded.config).url)

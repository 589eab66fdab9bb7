"""The ledger: the usage of every request in a database."""

from __future__ import annotations

from typing import Final

from gateway.config.listen import OFF
from gateway.features.declaring import Command, Feature
from gateway.features.ledger.metrics import LedgerMetrics
from gateway.features.ledger.section import LEDGER

FEATURE: Final = Feature(
    wanted=lambda config: LEDGER.of(config).url != OFF,
    section=LEDGER,
    metrics=LedgerMetrics,
    commands=[Command("usage", "show what was used and what it cost", "gateway.features.ledger.command.usage")],
)

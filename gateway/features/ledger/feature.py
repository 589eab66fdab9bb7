"""The ledger: the usage of every request in a database."""

from __future__ import annotations

from gateway.core import Core
from gateway.features.ledger.entries import LedgerEntries
from gateway.features.ledger.ledger import Ledger
from gateway.features.ledger.metrics import LedgerMetrics
from gateway.features.ledger.section import LEDGER


def install(core: Core) -> None:
    ledger = Ledger(LEDGER.of(core.config), core.metrics.of(LedgerMetrics), core.wall_clock)
    core.observers.append(LedgerEntries(ledger))
    core.work.tasks.append(ledger.run)
    core.work.begins.append(ledger.wait_for_database)
    core.work.closes.append(ledger.close)
    core.put(ledger)

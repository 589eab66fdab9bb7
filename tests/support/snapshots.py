"""The values of all instruments."""

from __future__ import annotations

from gateway.telemetry.counters import Instruments, Snapshot


def snapshot_of(instruments: Instruments) -> Snapshot:
    """All values. Copies the tables, not the histograms' rows."""
    return {instrument.name: dict(instrument.values) for instrument in instruments.all}

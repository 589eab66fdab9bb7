"""Slots: values of features on the record of a request, by typed keys. The core knows none of them.

    RESERVATION: Final = Slot[Reservation]("keys.reservation")
    RESERVATION.set(exchange.record, made)   ──►   RESERVATION.get(record)   in the observer of its end

A request without values of features has no storage for slots.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from gateway.request.record import SettledRequest

T = TypeVar("T")


class Slot(Generic[T]):
    """One key. name: for logs and tests."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get(self, record: SettledRequest) -> T | None:
        """The value; None if it was not set."""
        slots = record.slots
        return None if slots is None else slots.get(self)

    def set(self, record: SettledRequest, value: T) -> None:
        if record.slots is None:
            record.slots = {}
        record.slots[self] = value

    def __repr__(self) -> str:
        return f"<Slot {self.name}>"

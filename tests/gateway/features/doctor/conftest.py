"""Examinations of streams, as `warmroute doctor` makes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from gateway.features.doctor.command.reading import Reader
from gateway.features.doctor.examination import Examination
from gateway.features.doctor.prices import DoctorPrices
from tests.support.streams import Line, lines


class Doctor:
    """Examines requests by way of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, requests: Iterable[Line], *, text: bool = False) -> Examination:
        self._path.write_bytes(lines(list(requests)))
        reader, examination = Reader(DoctorPrices(), text=text), Examination()
        for prompt in reader.read(self._path):
            examination.add(prompt)
        assert not reader.problems
        examination.check()
        return examination


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    return Doctor(tmp_path / "requests.jsonl")

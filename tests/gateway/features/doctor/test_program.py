"""What the process of an examination does: records of several workers in the order of time, bounded; a report."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.prompt.outline import Outliner
from gateway.features.doctor.examiner import RECORD
from gateway.features.doctor.program import Timed, examine, latest
from gateway.features.doctor.watch import DoctorWatch, RecordsError
from tests.gateway.features.doctor.test_watch import seen


def job(*records: Timed, prices: object = None) -> bytes:
    head = msgspec.msgpack.encode(({"watched_s": 5.0}, prices or {}, 1.8e9))
    return b"".join(RECORD.pack(time, len(data)) + data for time, data in [(0.0, head), *records])


def test_the_report_begins_with_what_it_is_about() -> None:
    watch = DoctorWatch(Outliner())
    watch.begin(0.0)
    for time in (12.0, 11.0, 13.5):
        watch.record(seen(time, watch.outliner))
    found = json.loads(examine(io.BytesIO(job(*watch.watched().records))))
    assert list(found)[:2] == ["watched_s", "requests"]
    assert (found["watched_s"], found["requests"], found["seconds"]) == (5.0, 3, 2.5), "in the order of time"


@given(st.lists(st.tuples(st.floats(0, 100), st.binary(max_size=20))), st.integers(1, 10), st.integers(20, 100))
def test_the_last_records_are_kept(records: list[Timed], most: int, most_bytes: int) -> None:
    whole = sorted(records)
    while len(whole) > most or sum(len(record) for _, record in whole) > most_bytes:
        whole.pop(0)
    assert latest(iter(records), most, most_bytes) == [record for _, record in whole]


@pytest.mark.parametrize(
    "data", [b"", b"\x00", job((1.0, b"nonsense")), job((1.0, b"12"))[:-1], RECORD.pack(0.0, 9), RECORD.pack(0.0, 1) + b"\xc0"]
)
def test_a_broken_job_is_an_error(data: bytes) -> None:
    with pytest.raises(RecordsError):
        examine(io.BytesIO(data))

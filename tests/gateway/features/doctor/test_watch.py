"""What a gateway remembers for the doctor: nothing until it is asked, bounded, and nothing again."""

from __future__ import annotations

import pytest

from gateway.dialects.prompt.outline import Outliner
from gateway.features.doctor.watch import WATCH_S, DoctorWatch, RecordsError, SeenRequest, observed

TEXT = b"\x1esystem\x1fToday is 2026-11-27.\x1euser\x1fHello"


def seen(time: float, outliner: Outliner, salt: str = "", keys: bytes = b"12345678") -> SeenRequest:
    outline = outliner.outline(TEXT)
    return SeenRequest(
        time, "m", salt, "t", "s", keys, len(TEXT), 256, False, outline, "a", 9, None, 5, "warm", ("a", "b"), time + 1
    )


def test_a_record_comes_back_without_secrets() -> None:
    watch = DoctorWatch(Outliner())
    watch.begin(3.0)
    for number, salt in enumerate(("", "secret")):
        watch.record(seen(11.0 + number, watch.outliner, salt=salt))
    since, records = watch.watched()
    first, second = (observed(record) for _, record in records)
    assert since == 3.0
    assert [time for time, _ in records] == [first.time, second.time] == [11.0, 12.0]
    assert first.outline == Outliner().outline(TEXT)
    assert (first.model, first.session, first.tenant, first.keys) == ("m", "s", "t", b"12345678")
    assert first.outcome is not None
    assert (first.outcome.up, first.outcome.available_tokens) == (frozenset({"a", "b"}), 5)
    assert second.salt != first.salt == ""
    assert b"secret" not in records[1][1]


def test_bytes_of_a_header_that_are_no_text_are_no_trouble() -> None:
    """A server has them as lone surrogates."""
    watch = DoctorWatch(Outliner())
    watch.begin(0.0)
    one = seen(1.0, watch.outliner)
    watch.record(one._replace(model="\udcff", salt="\udcff", tenant="\udcff", session="caf\udce9"))
    watch.record(one._replace(session="café"))
    first, second = (observed(record) for _, record in watch.watched().records)
    assert (first.model, first.tenant, first.session, second.session) == ("?", "?", "caf?", "café")


def test_it_ends_when_nobody_has_asked_for_a_while() -> None:
    watch = DoctorWatch(Outliner())
    assert not watch.outliner.on
    watch.begin(0.0)
    watch.begin(100.0)
    watch.record(seen(1.0, watch.outliner))
    watch.expire(WATCH_S + 99.0)
    assert watch.on
    assert len(watch) == 1
    watch.expire(WATCH_S + 100.0)
    assert (watch.outliner.on, len(watch), len(watch.outliner), watch.since) == (False, 0, 0, None)
    watch.check()


def test_a_flood_is_bounded() -> None:
    watch = DoctorWatch(Outliner(), max_records=100, max_bytes=200_000)
    watch.begin(0.0)
    for number in range(1000):
        watch.record(seen(number, watch.outliner, keys=bytes(100 * (number % 100))))
        watch.check()
    assert 10 < len(watch) <= 100


@pytest.mark.parametrize("data", [b"", b"\x93", b"nonsense", b"\x92\xc0\x91\x92\xc0\xc4\x00"])
def test_broken_records_are_an_error(data: bytes) -> None:
    with pytest.raises(RecordsError):
        observed(data)

"""Entries as rows: ids that are nobody else's, texts and numbers within bounds, sums by day."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.accounting.consumed import Consumption
from gateway.accounting.meter import Bill
from gateway.accounting.money import MOST
from gateway.dialects.usage import Usage
from gateway.errors import CLIENT_LEFT
from gateway.features.ledger.batches import (
    LAST_MS,
    MAX_CHARS,
    MAX_COUNT,
    MAX_TENANTS,
    LedgerBatch,
    RowMaker,
    clean,
    day_of,
    milliseconds,
    sums_of,
)
from gateway.features.ledger.sums import MILL, MONEY
from gateway.request.record import SettledRequest
from tests.gateway.features.ledger.conftest import DAY_S, NOON, Entries, maker, record


def row_of(request: SettledRequest, now: float = NOON) -> tuple[object, ...]:
    """Without its id."""
    ((_, *row),) = maker().batch(Entries(now).of(request), now).rows()
    return tuple(row)


def test_a_row_has_what_the_record_has() -> None:
    fields = {"trace_id": "t", "run": "run_1", "workflow": "support\n"}
    row = row_of(
        record(
            model="m-1",
            alias="a",
            key="k",
            resumed=2,
            stream=True,
            fields=fields,
            code="c",
            failed_attempts=({"replica": "x"},) * 3,
            session="s-1",
            agent="a-1",
            parent="a-0",
            client="10.0.0.7",
            user_agent="curl/8",
        )
    )
    assert row == (
        *(1_764_244_800_000, "r-1", "t", "k", "m", "m-1", "a", "p", "one:1", "/v1/chat/completions"),
        *(200, 0, 1, 0, 2, 3, ""),
        *(1500, 250, 700, 750, 1, 1, ""),
        *(1000, 800, 50, 10, 100, 2),
        *(150, 80, 50, 300, 7, 720),
        *("run_1", "support?", "s-1", "a-1", "a-0", "10.0.0.7", "curl/8", "c"),
    )


@pytest.mark.parametrize(("values", "code"), [({}, "adopted"), ({"code": "replica_failed", "status": 502}, "replica_failed")])
def test_a_row_says_that_the_answer_is_that_of_another_request(values: dict[str, object], code: str) -> None:
    assert row_of(record(fields={"adopted": "r-0"}, consumed=None, bill=None, **values))[-1] == code


def test_a_request_that_consumed_nothing_has_zeros() -> None:
    row = row_of(record(consumed=None, bill=None, first_token=None, status=503, error="no replica"))
    assert row[10:] == (*(503, 1, 0, 0, 0, 0, "no replica"), *(1500, -1, 700, 750, 0, 0, ""), *[0] * 12, *[""] * 8)


@pytest.mark.parametrize(
    ("values", "failed"),
    [
        ({"status": 200}, 0),
        ({"status": 200, "error": "the stream broke off"}, 1),
        ({"status": 429, "error": "busy"}, 1),
        ({"status": 404}, 1),
        ({"status": CLIENT_LEFT, "error": "the client left"}, 0),
        ({"status": 200, "error": "cancelled", "cancelled": True}, 0),
    ],
)
def test_what_has_failed(values: dict[str, object], failed: int) -> None:
    assert row_of(record(**values))[11] == failed


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("qwen3-coder", "qwen3-coder"),
        ("<script>alert('x')</script>", "<script>alert('x')</script>"),
        ("日本語 é", "日本語 é"),
        ("a\0b\x1b[31m\r\n\t", "a?b?[31m???"),
        ("\ud800 lone", "? lone"),
        ("\u202eright to left", "?right to left"),
        ("x" * 100_000, "x" * MAX_CHARS),
        ("", ""),
    ],
)
def test_texts_are_printable_and_short(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned
    texts = ("model", "alias", "label", "tenant", "key", "error", "session", "agent", "parent", "client", "user_agent", "code")
    row = row_of(record(**dict.fromkeys(texts, text), status=400))
    assert [row[at] for at in (2, 3, 4, 5, 6, 16, *range(-6, 0))] == [cleaned] * 12


@given(st.text())
def test_any_text_can_be_stored(text: str) -> None:
    found = clean(text)
    found.encode("utf-8")
    assert "\0" not in found
    assert len(found) <= MAX_CHARS


@given(st.floats())
def test_any_clock_gives_a_time_that_can_be_stored(seconds: float) -> None:
    found = milliseconds(seconds)
    assert 0 <= found <= LAST_MS
    assert len(day_of(found)) == 10
    if 0 <= seconds < 1e9:
        assert math.isclose(found, seconds * 1000, abs_tol=0.51)


def test_absurd_counts_and_amounts_are_brought_into_their_ranges() -> None:
    used = Consumption(Usage(10**30, -5, 10**12, 10**10, -1), -(10**20))
    row = row_of(record(consumed=used, bill=Bill(10**30, -(10**30), 3, -(10**19)), predicted_cached_tokens=10**20))
    assert row[19] == MAX_COUNT
    assert row[24:-8] == (*(MAX_COUNT, MAX_COUNT, MAX_COUNT, 0, 0, 0), *(MOST, -MOST, 0, 3, 0, -MOST))


def ids(batch: LedgerBatch) -> list[str]:
    return [str(row[0]) for row in batch.rows()]


def test_ids_are_unique_whatever_clients_and_clocks_do() -> None:
    entries = Entries().of(*(record() for _ in range(50)))
    makers = [RowMaker() for _ in range(4)]
    made = [one.batch(entries, now) for one in makers for now in (NOON, NOON, 0.0, NOON - 1e6, math.nan, 1e300)]
    found = [id_ for batch in made for id_ in ids(batch)]
    assert len(found) == len(set(found)) == 4 * 6 * 50
    assert {len(id_) for id_ in found} == {38}


def test_a_batch_keeps_its_ids_and_has_its_range_for_itself() -> None:
    entries, one = Entries().of(*(record() for _ in range(30))), maker()
    batches = [one.batch(entries, NOON), one.batch(entries, NOON)]
    for batch in batches:
        first, last = batch.range
        assert ids(batch) == ids(batch)
        assert (min(ids(batch)), max(ids(batch))) == (first, last)
        assert [id_ for each in batches for id_ in ids(each) if first <= id_ <= last] == ids(batch)
    halves = batches[0].halves()
    assert [id_ for half in halves for id_ in ids(half)] == ids(batches[0])
    assert [entry for half in halves for entry in half.entries] == entries
    assert one.batch(entries[:1], NOON).halves() == []


def test_tenants_beyond_the_bound_are_others_until_the_next_day() -> None:
    one, entries = maker(), Entries()

    def tenants(names: list[str], now: float) -> Counter[str]:
        entries.clock.now = now
        batch = one.batch(entries.of(*(record(tenant=name) for name in names)), now)
        return Counter(str(row[3]) for row in batch.rows())

    found = tenants([f"t{at}" for at in range(MAX_TENANTS + 30)], NOON)
    assert len(found) == MAX_TENANTS + 1
    assert found["other"] == 30
    assert tenants(["t1", "new"], NOON + 1) == {"t1": 1, "other": 1}
    assert tenants(["t1", "new"], NOON + DAY_S) == {"t1": 1, "new": 1}


COUNTS = st.integers(0, MAX_COUNT)
AMOUNTS = st.integers(-MOST, MOST)
REQUESTS = st.builds(
    lambda tenant, day, used, money, status: (record(tenant=tenant, consumed=used, bill=money, status=status), day),
    st.sampled_from("abc"),
    st.integers(0, 2),
    st.none() | st.builds(Consumption, st.builds(Usage, *[COUNTS] * 5), st.integers(0, 9), st.sampled_from(["", "cached"])),
    st.none() | st.builds(Bill, *[AMOUNTS] * 6),
    st.sampled_from([200, 500]),
)


@given(st.lists(REQUESTS, max_size=20))
def test_the_sums_are_those_of_the_rows(requests: list[tuple[SettledRequest, int]]) -> None:
    entries, one, made = Entries(), maker(), []
    for request, day in requests:
        entries.clock.now = NOON + day * DAY_S
        made += one.batch(entries.of(request), NOON).rows()
    expected = dict[tuple[str, str], list[int]]()
    for request, day in requests:
        used, bill = request.spent.consumed, request.spent.bill
        usage = used.usage if used else Usage(0, 0, 0)
        values = [1, int(request.status == 500), int(bool(used and used.estimated)), int(used is not None and bill is None)]
        values += [usage.prompt, usage.cached or 0, usage.written, usage.hours, usage.completion, used.images if used else 0]
        values += [getattr(bill, name) if bill else 0 for name in MONEY]
        sums = expected.setdefault((day_of(milliseconds(NOON + day * DAY_S)), request.sender.tenant), [0] * len(values))
        expected[day_of(milliseconds(NOON + day * DAY_S)), request.sender.tenant] = [
            a + b for a, b in zip(sums, values, strict=True)
        ]
    found = sums_of(made)
    assert [(each[0], each[1]) for each in found] == sorted(expected)
    for each in found:
        assert each[2:6] == ("", "m", "p", "/v1/chat/completions")
        *counts, money = *each[6:16], each[16:]
        amounts = [mills * MILL + pico for mills, pico in zip(money[::2], money[1::2], strict=True)]
        assert [*counts, *amounts] == expected[each[0], each[1]]
        assert all(0 <= pico < MILL * max(1, counts[0]) for pico in money[1::2])

"""What other gateways have written, and what somebody else has: a view is made of it, and nothing breaks it."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.messages import EVERYTHING_S, EventBatch, Reset, Want
from gateway.features.sharing.clock import StoreClock
from gateway.features.sharing.entry_reader import MAX_NAMED, MAX_OFFERS, MAX_REFUSED, MAX_WANTS, EntryReader
from gateway.features.sharing.messages import (
    ALL,
    MAX_ENVELOPE_BYTES,
    VERSION,
    Envelope,
    Item,
    Kind,
    Offer,
    encode_envelope,
)
from gateway.features.sharing.metrics import SharingMetrics
from gateway.features.sharing.outbox import Outbox
from gateway.features.sharing.peer_gateways import DEAD_S, MAX_GATEWAYS, MAX_SOURCES
from gateway.features.snapshots.snapshot import Snapshot
from gateway.features.table import new_metrics
from router.events import BookingClosed, BookingFirstToken, BookingMoved, BookingOpened, ObjectStored, Rent, decode, encode

BOOKED = BookingOpened(1, b"k" * 8, 300, 256, "m", 0, 0, 0, (), "r1", 0, 75, 75, 99.0, False, 0, 0)
STORE_AHEAD = 1000.0  # the store's clock


class Seen:
    """A gateway's routers, that note what they are told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def receive(self, source: int, batch: EventBatch) -> None:
        self.calls.append(("receive", source, batch.since, decode(batch.events)))

    def leave(self, source: int) -> None:
        self.calls.append(("leave", source))

    def join(self) -> None:
        self.calls.append(("join",))

    async def collect(self, since_s: float = 0.0) -> Snapshot | None:
        raise AssertionError

    async def restore(self, snapshot: Snapshot, at: float) -> None:
        raise AssertionError


class View:
    def __init__(self) -> None:
        self.now = 100.0
        self.seen, self.metrics = Seen(), new_metrics().of(SharingMetrics)
        self.outbox = Outbox(lambda: self.now)
        clock = StoreClock()
        clock.measure(99.999, 100.001, 100.0 + STORE_AHEAD)
        self.entry_reader = EntryReader(
            me="me",
            format="1/256",
            routers=self.seen,
            outbox=self.outbox,
            store_clock=clock,
            clock=lambda: self.now,
            metrics=self.metrics,
        )
        self.seqs: dict[str, int] = {}

    def entry(
        self, *items: Item | Kind, gateway: str = "a", seq: int | None = None, sent: float = 0.0, **fields: bytes
    ) -> None:
        """An entry that was written now; by the writer's clock at `sent`."""
        self.raw(self.fields(*items, gateway=gateway, seq=seq, sent=sent, **fields))

    def fields(
        self, *items: Item | Kind, gateway: str = "a", seq: int | None = None, sent: float = 0.0, **fields: bytes
    ) -> dict[bytes, bytes]:
        self.seqs[gateway] = self.seqs.get(gateway, 0) + 1 if seq is None else seq
        named_items = tuple([item if isinstance(item, tuple) else (ALL, item) for item in items])
        data = encode_envelope(Envelope(self.seqs[gateway], sent, "host", named_items))
        named = {"v": VERSION, "f": b"1/256", "g": gateway.encode(), "e": data} | fields
        return {name.encode(): value for name, value in named.items()}

    def raw(self, fields: dict[bytes, bytes]) -> None:
        for _ in self.entry_reader.entry(self.now + STORE_AHEAD, fields):
            pass

    @property
    def calls(self) -> list[tuple[Any, ...]]:
        calls, self.seen.calls = self.seen.calls, []
        return calls

    def refused(self, reason: str) -> float:
        return self.metrics.refused.values[(reason,)]

    def published(self) -> list[Kind]:
        self.entry_reader.answer()
        return [message for _, message in self.outbox.take()]


def batch(*events: Any, since: float = 0.0) -> EventBatch:
    return EventBatch(since, encode(list(events)))


def test_events_arrive_with_this_machines_times() -> None:
    view = View()
    view.entry((7, batch(BOOKED, BookingClosed(1, True, 75, 0, 5000.5, True, True), since=4999.0)), sent=5001.0)
    ((what, source, since, events),) = view.calls
    assert what == "receive"
    assert source > 1 << 31
    assert since == pytest.approx(98.0)
    assert events[0].since == pytest.approx(99.0 - 4901.0)
    assert events[1].now == pytest.approx(99.5)


def test_ours_is_passed_over() -> None:
    view = View()
    view.entry((1, batch(BOOKED)), gateway="me")
    assert view.calls == []
    assert view.entry_reader.peers.alive == {}


def test_routers_of_different_gateways_are_different() -> None:
    view = View()
    for gateway in ("a", "b", "a"):
        view.entry((1, batch(BOOKED)), gateway=gateway)
    first, second, third = [call[1] for call in view.calls]
    assert first == third != second


def test_an_envelope_that_comes_twice_counts_once() -> None:
    view = View()
    view.entry((1, batch(BOOKED)), seq=1)
    view.entry((1, batch(BOOKED)), seq=1)
    assert len(view.calls) == 1


def test_a_gap_closes_what_is_open_and_asks_for_what_was_missed() -> None:
    view = View()
    view.entry((1, batch(BOOKED)), seq=1)
    ((_, source, *_),) = view.calls
    view.now += 3.0
    view.entry((1, batch(BookingFirstToken(1, 0.0))), seq=3)
    calls = view.calls
    assert calls[0] == ("leave", source)
    assert calls[1][0] == "receive"
    assert calls[1][1] != source, "what is open there now is another matter"
    (want,) = view.published()
    assert isinstance(want, Want)
    assert want.of == "a"
    assert 3.0 <= want.since_s < 20.0
    assert view.metrics.resyncs.values[()] == 1


def test_a_gateway_that_was_there_before_is_asked_for_what_it_has_open() -> None:
    view = View()
    view.entry(seq=1, gateway="young")
    view.entry(seq=55, gateway="old")
    assert view.published() == [Want("old", 0.0)]


def test_a_gateway_that_was_silent_for_us_alone_is_asked_for_what_was_missed() -> None:
    view = View()
    view.entry((1, batch(BOOKED)), seq=1)
    view.now += 600.0
    view.entry_reader.expire(view.now)
    view.entry(seq=2000)
    (want,) = view.published()
    assert isinstance(want, Want)
    assert want.since_s > 600.0
    assert view.metrics.resyncs.values[()] == 1


def test_of_one_that_was_silent_and_wrote_nothing_only_what_is_open_is_asked_for() -> None:
    view = View()
    view.entry((1, batch(BOOKED)), seq=1)
    view.now += 600.0
    view.entry_reader.expire(view.now)
    view.entry(seq=2)
    assert view.published() == [Want("a", 0.0)]


def test_what_others_want_of_us() -> None:
    view = View()
    view.entry(Want("somebody", 5.0), Want("me", 0.0), Want("me", 7.0))
    view.entry_reader.answer()
    view.entry_reader.answer()
    assert view.calls == [("join",)], "once for all who came"
    assert list(view.entry_reader.wants) == [("a", 93.0)]


def test_offers_for_us_and_for_all() -> None:
    view = View()
    view.entry(Offer("me", "k1", 10.0), Offer("", "k2", 11.0), Offer("b", "k3", 12.0), sent=13.0)
    assert [(offer.key, at) for offer, at in view.entry_reader.offers] == [
        ("k1", pytest.approx(97.0)),
        ("k2", pytest.approx(98.0)),
    ]


def test_a_gateway_ends_by_its_goodbye_or_by_its_silence() -> None:
    view = View()
    for gateway in ("a", "b"):
        view.entry((1, batch(BOOKED)), gateway=gateway)
    (_, first, *_), (_, second, *_) = view.calls
    view.entry(Reset(ended=True), gateway="a")
    assert view.calls == [("leave", first)]
    view.entry_reader.expire(view.now + DEAD_S - 0.1)
    assert view.calls == []
    view.entry_reader.expire(view.now + DEAD_S + 0.1)
    assert view.calls == [("leave", second)]
    assert view.entry_reader.peers.alive == {}


def test_one_that_comes_back_has_new_numbers() -> None:
    view = View()
    view.entry((1, batch(BOOKED)))
    view.entry_reader.expire_all()
    view.entry((1, batch(BOOKED)))
    calls = view.calls
    assert [call[0] for call in calls] == ["receive", "leave", "receive"]
    assert calls[0][1] != calls[2][1]
    assert view.published() == [Want("a", 0.0)]


def test_a_router_that_ended_there_ends_here() -> None:
    view = View()
    view.entry((4, batch(BOOKED)), (4, Reset()), (99, Reset()))
    assert [call[0] for call in view.calls] == ["receive", "leave"]
    view.entry((4, batch(BOOKED)), (5, batch(BOOKED)), (ALL, Reset()))
    calls = view.calls
    assert [call[0] for call in calls] == ["receive", "receive", "leave", "leave"]
    assert {call[1] for call in calls[:2]} == {call[1] for call in calls[2:]}


def test_workers_may_be_replaced_for_ever() -> None:
    view = View()
    for number in range(1, 3 * MAX_SOURCES):
        view.entry((number, batch(BOOKED)), (number, Reset()))
    assert len([call for call in view.calls if call[0] == "receive"]) == 3 * MAX_SOURCES - 1
    assert view.refused("garbage") == 0


# -- refused


@pytest.mark.parametrize(
    ("fields", "reason", "why"),
    [
        ({"v": b"1"}, "version", "its release writes version '1', this one '2': both must write the same version"),
        ({"v": b""}, "version", "version ''"),
        ({"f": b"1/512"}, "format", "routing.block_bytes is 512 there and 256 here: both must have the same configuration"),
        ({"f": b"2/256"}, "format", "its release makes blocks in another way (2/256, not 1/256)"),
        ({"f": b"\xff"}, "format", "in another way"),
        ({"e": b"garbage"}, "garbage", ""),
        ({"e": b"x" * (MAX_ENVELOPE_BYTES + 1)}, "garbage", ""),
        ({"g": b""}, "garbage", ""),
        ({"g": b"\xff\xfe"}, "garbage", ""),
        ({"g": b"x" * 65}, "garbage", ""),
    ],
)
def test_what_is_refused_is_counted_and_named_once(
    fields: dict[str, bytes], reason: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    view = View()
    for _ in range(3):
        view.entry((1, batch(BOOKED)), **fields)
    assert view.calls == []
    assert view.refused(reason) == 3
    (told,) = [record.__dict__ for record in caplog.records if record.levelno == logging.ERROR]
    assert why in told["error"]


def test_the_log_is_not_flooded_by_names(caplog: pytest.LogCaptureFixture) -> None:
    view = View()
    for number in range(MAX_NAMED + 50):
        view.entry(gateway=f"g{number}", v=b"9")
    assert view.refused("version") == MAX_NAMED + 50
    assert len(caplog.records) == MAX_NAMED


def test_a_batch_that_does_not_decode_closes_what_its_router_has_open() -> None:
    view = View()
    view.entry((1, batch(BOOKED)), (1, EventBatch(0.0, b"garbage")))
    assert [call[0] for call in view.calls] == ["receive", "leave"]
    assert view.refused("garbage") == 1


@pytest.mark.parametrize(
    "event",
    [
        BookingOpened(1, b"k" * 8, 1 << 60, 256, "m", 0, 0, 0, (), "r1", 0, 75, 75, 99.0, False, 0, 0),
        BookingOpened(1, b"k" * 8, 300, 256, "m" * 2000, 0, 0, 0, (), "r1", 0, 75, 75, 99.0, False, 0, 0),
        BookingOpened(1, b"k" * 8, 300, 256, "m", 0, 0, 0, ((1, 1),) * 2000, "r1", 0, 75, 75, 99.0, False, 0, 0),
        BookingOpened(1, b"k" * (9 << 20), 300, 256, "m", 0, 0, 0, (), "r1", 0, 75, 75, 99.0, False, 0, 0),
        BookingMoved(1, "r" * 2000, 0, 1, 1, 0.0, 0),
        BookingClosed(1, True, 1 << 60, 0, 0.0, True, True),
        Rent(b"prefix--", float("nan")),
        Rent(b"prefix--", -1.0),
        Rent(b"a longer prefix", 1.0),
        ObjectStored(1, "r", "m" * 2000, 0.0),
    ],
)
def test_events_out_of_bounds_are_dropped_and_the_others_are_not(event: Any) -> None:
    view = View()
    size = len(encode([event]))
    if size > MAX_ENVELOPE_BYTES:
        view.entry((1, batch(event)))
        assert view.calls == []
    else:
        view.entry((1, batch(BOOKED, event)))
        ((_, _, _, events),) = view.calls
        assert [type(each) for each in events] == [BookingOpened]
    assert view.refused("garbage") == 1


def test_times_that_cannot_be_are_now_at_most() -> None:
    view = View()
    view.entry(
        (1, batch(BookingFirstToken(1, float("nan")), BookingFirstToken(1, 1e300), BookingFirstToken(1, -1e300), since=1e300))
    )
    ((_, _, since, events),) = view.calls
    assert since == 100.0
    assert [event.now for event in events] == [100.0, 100.0, pytest.approx(100.0 - 86_400)]


def test_a_flood_is_bounded() -> None:
    view = View()
    for number in range(MAX_GATEWAYS + 100):
        view.entry(gateway=f"g{number}", seq=1)
    assert len(view.entry_reader.peers.alive) == MAX_GATEWAYS
    for number in range(MAX_SOURCES + 100):
        view.entry((number, batch(BOOKED)), gateway="g1")
    assert len({call[1] for call in view.calls}) == MAX_SOURCES
    for number in range(MAX_WANTS + 100):
        view.entry(*[Want("me", 1.0)] * 10, Offer("me", f"k{number}", 0.0), gateway=f"g{number}")
    assert len(view.entry_reader.wants) == MAX_WANTS
    assert len(view.entry_reader.offers) == MAX_OFFERS


names = st.sampled_from([b"v", b"f", b"g", b"e", b"x"])
values = st.binary(max_size=40) | st.sampled_from([VERSION, b"1/256", b"a", b"me"])


@given(st.lists(st.dictionaries(names, values, max_size=5), max_size=20))
def test_any_entry_is_survived(entries: list[dict[bytes, bytes]]) -> None:
    view = View()
    for fields in entries:
        view.raw(fields)
    view.entry((1, batch(BOOKED)), gateway="good")
    assert view.calls[-1][0] == "receive"


def test_a_large_batch_is_applied_in_pieces() -> None:
    view = View()
    items = [BookingFirstToken(number, 0.0) for number in range(1, 201)]
    fields = view.fields((1, batch(*items)))
    steps = 0
    for _ in view.entry_reader.entry(view.now + STORE_AHEAD, fields):
        steps += 1
        assert len(view.calls) == 1
    assert steps == 4


def test_what_is_given_up_meanwhile_is_not_applied_further() -> None:
    view = View()
    fields = view.fields((1, batch(BOOKED)), (2, batch(BOOKED)))
    steps = view.entry_reader.entry(view.now + STORE_AHEAD, fields)
    next(steps)
    view.entry_reader.expire_all()
    assert list(steps) == []
    assert [call[0] for call in view.calls] == ["receive", "leave"], "nothing is open of it for ever"


def test_one_that_misses_all_the_time_is_asked_once_a_second() -> None:
    view = View()
    view.entry(seq=1)
    wants: list[Kind] = []
    for number in range(40):
        view.now += 0.1
        view.entry(seq=3 + 2 * number)
        wants += view.published()
    assert 4 <= len(wants) <= 5
    view.now += 1.0
    (last,) = view.published()
    assert isinstance(last, Want)
    assert last.since_s > 5.0, "what was missed since it was asked last"


def test_the_log_has_no_line_for_each_of_a_flood(caplog: pytest.LogCaptureFixture) -> None:
    view = View()
    with caplog.at_level(logging.INFO):
        for number in range(1000):
            view.entry(Reset(ended=True), gateway=f"g{number}")
        assert len(caplog.records) == 40
        view.now += 61.0
        view.entry(gateway="real")
    assert caplog.records[-1].__dict__["unsaid"] == 980


def test_nothing_is_taken_from_one_that_has_said_goodbye() -> None:
    """Nobody would ever close it."""
    view = View()
    view.entry(Reset(ended=True), (1, batch(BOOKED)))
    view.entry((1, batch(BOOKED)), Reset(ended=True), (1, batch(BOOKED)), gateway="b")
    assert [call[0] for call in view.calls] == ["receive", "leave"]


def test_what_was_taken_in_by_half_is_asked_for() -> None:
    view = View()
    view.entry(seq=1)
    steps = view.entry_reader.entry(view.now + STORE_AHEAD, view.fields(*[(1, batch(BOOKED))] * 2, seq=2))
    next(steps)
    steps.close()  # whoever reads has lost the store, and will go on behind this entry
    (_, source, *_), left = view.calls
    assert left == ("leave", source)
    (want,) = view.published()
    assert isinstance(want, Want)
    assert want.since_s > 0


def test_what_is_open_here_is_published_once_a_second_at_most() -> None:
    view = View()
    for _ in range(30):
        view.entry(Want("me", 0.0))
        view.published()
        view.now += 0.1
    assert 2 <= view.calls.count(("join",)) <= 4
    view.now += 1.0
    view.calls.clear()
    view.published()
    assert view.calls.count(("join",)) <= 1


def test_those_that_are_not_followed_are_shown_while_they_write() -> None:
    view = View()
    for number in range(MAX_REFUSED + 5):
        view.entry(gateway=f"old-{number}", v=b"0")
    view.now += DEAD_S - 1.0
    view.entry(gateway="other", f=b"1/128")
    assert len(view.entry_reader.refused) == MAX_REFUSED
    assert view.entry_reader.refused[0].gateway == "old-6", "the latest"
    refused = view.entry_reader.refused[-1]
    assert (refused.gateway, refused.reason) == ("other", "format")
    assert "routing.block_bytes is 128 there and 256 here" in refused.error
    view.now += 2.0
    assert [each.gateway for each in view.entry_reader.refused] == ["other"]


def test_what_is_wanted_or_offered_twice_waits_once() -> None:
    view = View()
    view.entry(Want("me", 7.0), Want("me", 3.0), Want("me", EVERYTHING_S), gateway="a")
    view.entry(Want("me", 7.0), Want("me", 20.0), gateway="b")
    assert list(view.entry_reader.wants) == [("a", -math.inf), ("b", 80.0)]
    view.entry(*[Offer("", "the-key", 0.0)] * 10, Offer("", "another", 0.0))
    assert [offer.key for offer, _ in view.entry_reader.offers] == ["the-key", "another"]

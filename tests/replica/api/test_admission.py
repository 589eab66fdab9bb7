"""Whatever comes and goes, no more wait and are on their way than there are queue, and no more bytes are here than may be."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.api.admission import AdmissionQueue, AdmissionReservation, BodyBudget
from replica.api.validation import ApiError


@given(st.lists(st.tuples(st.sampled_from(["reserve", "submit", "close", "leave"]), st.integers(0, 5)), max_size=60))
def test_there_are_never_more_than_may_wait(steps: list[tuple[str, int]]) -> None:
    waiting, most = 0, 6
    queue = AdmissionQueue(lambda: waiting, most, lambda: 0.0)
    open_: list[tuple[AdmissionReservation, list[int]]] = []  # with how many of it the engine does not know yet
    for what, number in steps:
        if what == "reserve":
            reserved = sum(left[0] for _, left in open_)
            if waiting + reserved + number + 1 <= most:
                open_.append((queue.reserve(number + 1), [number + 1]))
            else:
                with pytest.raises(ApiError, match="wait already"):
                    queue.reserve(number + 1)
        elif what == "leave" and waiting:
            waiting -= 1
        elif what in ("submit", "close") and open_:
            reservation, left = open_[number % len(open_)]
            if what == "close":
                reservation.close()
                open_.remove((reservation, left))
            elif left[0]:
                reservation.submitted()
                left[0], waiting = left[0] - 1, waiting + 1
        assert waiting + sum(left[0] for _, left in open_) <= most
    for reservation, _ in open_:
        reservation.close()
    assert repr(queue) == f"<AdmissionQueue {waiting} waiting, 0 reserved, of 6>"


def test_what_can_never_fit_is_the_requests_mistake() -> None:
    with pytest.raises(ApiError, match="more than the 3 that may wait") as caught:
        AdmissionQueue(lambda: 0, 3, lambda: 0.0).reserve(4, "prompt")
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize(("pace", "seconds"), [(0.0, 1), (2.0, 5), (100.0, 1), (0.01, 60)])
def test_when_to_come_again_follows_the_pace(pace: float, seconds: int) -> None:
    with pytest.raises(ApiError, match=f"Try again in {seconds} s") as caught:
        AdmissionQueue(lambda: 10, 10, lambda: pace).check()
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "queue_full", seconds)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 40)), max_size=60))
def test_there_are_never_more_bytes_than_may_be(steps: list[tuple[int, int]]) -> None:
    """Eight bodies of up to 30 bytes, of which the first four are free; a greater size ends one, and so does a refusal."""
    budget = BodyBudget(50, 4, lambda: 0.0)
    shares, sizes = [budget.share() for _ in range(8)], [0] * 8
    for which, size in steps:
        others = sum(one for at, one in enumerate(sizes) if at != which and one > 4)
        sizes[which] = 0
        if size <= 30 and (size <= 4 or others + size <= 50):
            shares[which].grow(size)
            sizes[which] = size
        else:
            if size <= 30:
                with pytest.raises(ApiError, match=r"50 may be\. Try again in 1 s") as caught:
                    shares[which].grow(size)
                assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "queue_full", 1)
            shares[which].close()
            shares[which] = budget.share()
        long = [one for one in sizes if one > 4]
        assert repr(budget) == f"<BodyBudget {sum(long)} bytes of {len(long)} bodies, of 50>"
    for share in shares:
        share.close()
    assert repr(budget) == "<BodyBudget 0 bytes of 0 bodies, of 50>"


def test_when_to_come_again_follows_the_bodies_that_are_here() -> None:
    budget = BodyBudget(50, 4, lambda: 0.5)
    shares = [budget.share() for _ in range(2)]
    for share in shares:
        share.grow(20)
    with pytest.raises(ApiError, match=r"have 40 bytes here, and 50 may be\. Try again in 4 s"):
        budget.check(11)
    budget.check(10)
    budget.check(4)
    for share in shares:
        share.close()
    budget.check(50)


def test_answers_that_are_not_taken_make_way() -> None:
    """The oldest first, no more than needed, and none that has just begun."""
    now, dropped = 0.0, list[str]()
    budget = BodyBudget(100, 4, lambda: 0.0, lambda: now)
    shares = [budget.answer(30, partial(dropped.append, name)) for name in "abc"]
    budget.answer(3, partial(dropped.append, "small"))
    with pytest.raises(ApiError):
        budget.check(50)
    now = 5.1
    shares.append(budget.answer(10, partial(dropped.append, "new")))
    budget.check(50)
    assert dropped == ["a", "b"]
    for share in shares:
        share.close()
    assert repr(budget) == "<BodyBudget 0 bytes of 0 bodies, of 100>"
    shares = [budget.answer(60, partial(dropped.append, name)) for name in "de"]
    now = 11.0
    shares[0].close()
    budget.check(50)
    assert dropped == ["a", "b", "e"]


def test_no_answer_is_dropped_in_vain() -> None:
    """Bodies have the room."""
    now, dropped = 0.0, list[str]()
    budget = BodyBudget(100, 4, lambda: 0.0, lambda: now)
    budget.share().grow(80)
    budget.answer(15, partial(dropped.append, "answer"))
    now = 60.0
    with pytest.raises(ApiError):
        budget.check(50)
    assert dropped == []
    budget.check(15)
    assert dropped == ["answer"]

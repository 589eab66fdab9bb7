"""Whatever comes and goes, no more are waiting and on their way than there are queue."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.api.admission import AdmissionQueue, Reservation
from replica.api.validation import ApiError


@given(st.lists(st.tuples(st.sampled_from(["reserve", "submit", "close", "leave"]), st.integers(0, 5)), max_size=60))
def test_there_are_never_more_than_may_wait(steps: list[tuple[str, int]]) -> None:
    waiting, most = 0, 6
    queue = AdmissionQueue(lambda: waiting, most, lambda: 0.0)
    open_: list[tuple[Reservation, list[int]]] = []  # with how many of it the engine does not know yet
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
        AdmissionQueue(lambda: 0, 3, lambda: 0.0).reserve(4)
    assert caught.value.status == 400


@pytest.mark.parametrize(("pace", "seconds"), [(0.0, 1), (2.0, 5), (100.0, 1), (0.01, 60)])
def test_when_to_come_again_follows_the_pace(pace: float, seconds: int) -> None:
    with pytest.raises(ApiError, match=f"Try again in {seconds} s") as caught:
        AdmissionQueue(lambda: 10, 10, lambda: pace).check()
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "queue_full", seconds)

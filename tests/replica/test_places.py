"""Whatever comes and goes, no more are waiting and on their way than there are places."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.fields import ApiError
from replica.places import Booking, Places


@given(st.lists(st.tuples(st.sampled_from(["book", "begin", "close", "leave"]), st.integers(0, 5)), max_size=60))
def test_there_are_never_more_than_may_wait(steps: list[tuple[str, int]]) -> None:
    waiting, most = 0, 6
    places = Places(lambda: waiting, most, lambda: 0.0)
    open_: list[tuple[Booking, list[int]]] = []  # with how many of it the engine does not know yet
    for what, number in steps:
        if what == "book":
            booked = sum(left[0] for _, left in open_)
            if waiting + booked + number + 1 <= most:
                open_.append((places.book(number + 1), [number + 1]))
            else:
                with pytest.raises(ApiError, match="wait already"):
                    places.book(number + 1)
        elif what == "leave" and waiting:
            waiting -= 1
        elif what in ("begin", "close") and open_:
            booking, left = open_[number % len(open_)]
            if what == "close":
                booking.close()
                open_.remove((booking, left))
            elif left[0]:
                booking.begun()
                left[0], waiting = left[0] - 1, waiting + 1
        assert waiting + sum(left[0] for _, left in open_) <= most
    for booking, _ in open_:
        booking.close()
    assert repr(places) == f"<Places {waiting} waiting, 0 booked, of 6>"


def test_what_can_never_fit_is_the_requests_mistake() -> None:
    with pytest.raises(ApiError, match="more than the 3 that may wait") as caught:
        Places(lambda: 0, 3, lambda: 0.0).book(4)
    assert caught.value.status == 400


@pytest.mark.parametrize(("pace", "seconds"), [(0.0, 1), (2.0, 5), (100.0, 1), (0.01, 60)])
def test_when_to_come_again_follows_the_pace(pace: float, seconds: int) -> None:
    with pytest.raises(ApiError, match=f"Try again in {seconds} s") as caught:
        Places(lambda: 10, 10, lambda: pace).check()
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "queue_full", seconds)

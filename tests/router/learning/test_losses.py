"""When replicas lost their caches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.learning.losses import Losses

KEPT_S = 10.0


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 4)), max_size=40))
def test_the_last_loss_of_each_is_known_as_long_as_it_matters(story: list[tuple[str, float]]) -> None:
    losses, now, last = Losses(), 0.0, dict[str, float]()
    for replica, pause_s in story:
        now += pause_s
        losses.add(replica, now, KEPT_S)
        last[replica] = now
        for each in "abcd":
            at = last.get(each)
            if at is None:
                assert not losses.after(each, 0.0)
            elif at > now - KEPT_S:
                assert losses.after(each, at)
                assert not losses.after(each, at + 0.001)
        assert len(losses) == sum(at > now - KEPT_S for at in last.values()), "the others are forgotten"

"""What a client displaces of others' prefixes in the beliefs about a replica is bounded by what the engine has counted for it.

The oracle is the same router without that client: what others lose to it is the difference.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from router import Outcome, Prompt, Replica, Router
from router.booking import Booking
from router.router import FAR_BELOW
from tests.support.strategies import keys_of

ATTACKER = 9
CAPACITY = 60


class Asked(NamedTuple):
    """A request. ends: None if it is still open when the next ones come."""

    client: int
    text: bytes
    outcome: Outcome
    open: bool


outcomes = st.one_of(
    st.builds(Outcome, st.booleans(), st.none() | st.integers(0, 80), st.none() | st.integers(0, 80), shown=st.booleans()),
    st.builds(Outcome, st.just(True), st.just(3), shown=st.booleans()),
)
texts = st.tuples(st.sampled_from([b"a", b"b", b"c", b"d"]), st.integers(1, 50)).map(lambda one: one[0] * one[1])
requests = st.lists(st.builds(Asked, st.sampled_from([1, 2, ATTACKER, ATTACKER]), texts, outcomes, st.booleans()), max_size=25)


def prompt_of(one: Asked) -> Prompt:
    # Others and the attacker have different prompts: shared ones displace nobody.
    text = b"z" + one.text if one.client == ATTACKER else one.text
    prompt = Prompt(keys_of(text), len(text), 1, "")
    prompt.origin = prompt.client = one.client
    return prompt


def replayed(asked: list[Asked], *, attacked: bool) -> Router:
    """A router after these requests, all of which have ended. The others' begin and end at the same times, attacked or not."""
    router = Router(policy="cost", ttl_s=1e6, memory_bytes=1 << 24, chance=random.Random(1))
    router.add(Replica("r1", CAPACITY))
    under_way: list[tuple[Asked, Booking]] = []
    for now, one in enumerate(asked):
        if one.client == ATTACKER and not attacked:
            continue
        booking = router.choose(prompt_of(one), ["r1"], float(now))
        booking.first_token(float(now))
        under_way.append((one, booking))
        if not one.open:
            ended = [each for each in under_way if each[0].client == ATTACKER or one.client != ATTACKER]
            for each, open_booking in ended:
                open_booking.close(each.outcome, float(now))
            under_way = [each for each in under_way if all(each is not other for other in ended)]
        router.check()
    for each, open_booking in under_way:
        open_booking.close(each.outcome, float(len(asked)))
    while router.sweep(float(len(asked))):
        pass
    router.check()
    return router


def held(router: Router, asked: list[Asked]) -> int:
    """Blocks that the replica is believed to hold of others."""
    texts = {one.text for one in asked if one.client != ATTACKER}
    longest = {first: max(text for text in texts if text[:1] == first) for first in {text[:1] for text in texts}}
    return sum(router.trie.match(keys_of(text), 1e3).get("r1", 0) for text in longest.values())


@given(requests)
def test_what_a_client_displaces_is_bounded_by_what_engines_counted_for_it(asked: list[Asked]) -> None:
    with_it, without = replayed(asked, attacked=True), replayed(asked, attacked=False)
    counted = sum(one.outcome.prompt_tokens or 0 for one in asked if one.client == ATTACKER and one.outcome.ok)
    assert held(without, asked) - held(with_it, asked) <= FAR_BELOW * counted

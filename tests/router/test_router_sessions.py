"""What a session adds to block keys: its holders are expected to have more than the longest match, in seconds."""

from __future__ import annotations

import random

import pytest

from router import Booking, Outcome, Prompt, Replica, Router
from tests.support.strategies import keys_of

FLEET = ["r1", "r2", "r3", "r4"]
TOKENS = 20_000


def router_of() -> Router:
    router = Router(policy="cost", ttl_s=300.0, memory_bytes=1 << 24, chance=random.Random(3))
    for name in FLEET:
        router.add(Replica(name))
    return router


def prompt(nonce: int, units: int = TOKENS, session: int = 1) -> Prompt:
    """A prompt that shares no block with those of other nonces."""
    return Prompt(keys_of(bytes([nonce])), units, 1, "", session_key=session)


def answer(booking: Booking, now: float, cached: int | None = None) -> str:
    booking.first_token(now)
    booking.close(Outcome(True, booking.prompt.units, cached), now)
    return booking.chosen.replica


def test_a_session_stays_although_no_key_matches() -> None:
    router = router_of()
    home = answer(router.choose(prompt(0), FLEET, 0.0), 1.0, 0)
    for turn in range(1, 30):
        booking = router.choose(prompt(turn), FLEET, 10.0 * turn)
        assert (booking.chosen.replica, booking.decision.reason) == (home, "session")
        assert booking.chosen.cost.session_s < 0
        assert booking.chosen.cost.total_s == pytest.approx(sum(booking.chosen.cost))
        answer(booking, 10.0 * turn + 1, TOKENS - 1)
    booking = router.choose(prompt(30), FLEET, 300.0)
    assert booking.chosen.uncached_tokens < TOKENS / 20, "what is there needs no work, so it is no queue for others"
    router.check()


def test_without_a_session_it_goes_anywhere() -> None:
    router = router_of()
    homes = {answer(router.choose(prompt(turn, session=0), FLEET, 10.0 * turn), 10.0 * turn + 1) for turn in range(30)}
    assert len(homes) > 1


def test_a_busy_holder_is_left() -> None:
    router = router_of()
    home = answer(router.choose(prompt(0), FLEET, 0.0), 1.0, 0)
    queue = router.choose(prompt(99, 20 * TOKENS, session=0), [home], 1.0)
    assert router.choose(prompt(1), FLEET, 1.0).chosen.replica != home
    answer(queue, 2.0)


def test_a_dead_holder_is_no_candidate() -> None:
    router = router_of()
    home = answer(router.choose(prompt(0), FLEET, 0.0), 1.0, 0)
    others = [name for name in FLEET if name != home]
    booking = router.choose(prompt(1), others, 2.0)
    assert booking.chosen.replica in others
    assert booking.decision.reason == "cold"


@pytest.mark.parametrize("how", ["restarted", "left", "expired"])
def test_a_cache_that_is_gone_is_not_expected(how: str) -> None:
    router = router_of()
    home = answer(router.choose(prompt(0), FLEET, 0.0), 1.0, 0)
    router.sweep(2.0)
    if how == "restarted":
        router.restarted(home)
    elif how == "left":
        router.remove(home)
        router.add(Replica(home))
    now = 400.0 if how == "expired" else 3.0
    decision, ranking = router.rank(prompt(1), FLEET, now)
    assert decision.reason == "cold"
    assert all(candidate.cost.session_s == 0 for candidate in ranking)


def test_what_is_never_there_is_no_longer_expected() -> None:
    """A nonce that the engine keeps, a company with one session id: its load is spread again."""
    router = router_of()
    for turn in range(100):
        answer(router.choose(prompt(turn), FLEET, 10.0 * turn), 10.0 * turn + 1, 0)
    _, ranking = router.rank(prompt(101), FLEET, 1001.0)
    assert all(candidate.cost.session_s > -0.05 for candidate in ranking)
    assert router.sessions.find(1)


def test_a_good_match_leaves_nothing_to_be_expected() -> None:
    """Where keys show what is held, the session changes nothing: not the price, and nothing is learned from it."""
    router = router_of()
    first = Prompt(keys_of(bytes(50)), 50, 1, "", session_key=1)
    answer(router.choose(first, FLEET, 0.0), 1.0, 0)
    second = Prompt(keys_of(bytes(60)), 60, 1, "", session_key=1)
    booking = router.choose(second, FLEET, 2.0)
    assert (booking.decision.reason, booking.unseen, booking.chosen.cost.session_s) == ("warm", 0, 0.0)


def test_keys_that_show_every_turn_are_relied_on() -> None:
    """What they do not show any more is gone: the session's replica has evicted it, or the conversation was compacted."""
    router = router_of()
    for turn in range(1, 20):
        grown = Prompt(keys_of(bytes(20 * turn)), 2000 * turn, 100, "", session_key=1)
        answer(router.choose(grown, FLEET, float(turn)), turn + 0.5)
    fresh = Prompt(keys_of(bytes([1]) * 100), 10_000, 100, "", session_key=1)
    decision, ranking = router.rank(fresh, FLEET, 21.0)
    assert decision.reason in ("cold", "session")
    assert all(-candidate.cost.session_s < 0.02 * candidate.cost.prefill_s for candidate in ranking)


def test_prompts_too_short_for_a_key_stay_with_their_session() -> None:
    router = router_of()
    short = Prompt(b"", 60, 256, "", session_key=1)
    home = answer(router.choose(short, FLEET, 0.0), 1.0)
    for turn in range(1, 20):
        booking = router.choose(short, FLEET, 10.0 * turn)
        assert (booking.chosen.replica, booking.decision.reason) == (home, "session")
        answer(booking, 10.0 * turn + 1)


def test_a_request_that_moves_is_compared_with_its_new_replica() -> None:
    router = router_of()
    home = answer(router.choose(prompt(0), FLEET, 0.0), 1.0, 0)
    booking = router.choose(prompt(1), FLEET, 2.0)
    assert (booking.chosen.replica, booking.unseen) == (home, TOKENS)
    booking.move([name for name in FLEET if name != home], 2.0)
    assert booking.unseen == 0


def test_a_sub_agent_does_not_take_its_session_along() -> None:
    """It ran on another replica, with a shorter prompt: the conversation returns to where it was."""
    router = router_of()
    home = answer(router.choose(prompt(0), FLEET, 0.0), 1.0, 0)
    other = next(name for name in FLEET if name != home)
    answer(router.choose(prompt(1, TOKENS // 10), [other], 2.0), 3.0, 0)
    assert router.choose(prompt(2), FLEET, 10.0).chosen.replica == home


# -- sub-agents


def agent(number: int, nonce: int, units: int = TOKENS) -> Prompt:
    """A prompt of an agent that session 1 has started."""
    asked = prompt(nonce, units, session=1000 + number)
    asked.parent_key = 1
    return asked


def test_a_new_agent_is_expected_where_its_parent_was_answered() -> None:
    router = router_of()
    home = answer(router.choose(prompt(0), FLEET, 0.0), 1.0, 0)
    booking = router.choose(agent(1, 1), FLEET, 2.0)
    assert (booking.chosen.replica, booking.decision.reason) == (home, "session")
    queue = router.choose(prompt(99, 20 * TOKENS, session=0), [home], 2.0)
    assert router.choose(agent(2, 2), FLEET, 2.0).chosen.replica != home, "it is busy"
    answer(queue, 3.0)


def test_it_is_learned_that_agents_share_nothing_with_their_parents() -> None:
    """And what their parents themselves have is no less expected for it."""
    router = router_of()
    answer(router.choose(prompt(0), FLEET, 0.0), 1.0, 0)
    before = router.sessions.clients.sums
    for number in range(100):
        answer(router.choose(agent(number, number + 1), FLEET, 10.0 + number), 10.5 + number, 0)
    _, ranking = router.rank(agent(100, 101), FLEET, 111.0)
    assert all(candidate.cost.session_s > -0.05 for candidate in ranking)
    assert router.sessions.clients.sums == before
    assert router.sessions.kin.value(0) < 0.05


def test_what_agents_share_with_their_parents_is_learned() -> None:
    router = router_of()
    home = answer(router.choose(prompt(0), FLEET, 0.0), 1.0, 0)
    for number in range(30):
        booking = router.choose(agent(number, number + 1), FLEET, 10.0 * number + 10)
        assert booking.chosen.replica == home
        answer(booking, 10.0 * number + 11, TOKENS - 1)
    assert router.sessions.kin.value(0) > 0.95


def test_agents_of_one_client_do_not_change_what_is_expected_of_those_of_others() -> None:
    """A client may say that any of its prompts is a first one, of any parent of its own."""
    router = router_of()

    def asked(number: int, nonce: int, client: int) -> Prompt:
        made = agent(number, nonce)
        made.origin = client
        return made

    home = answer(router.choose(prompt(0), FLEET, 0.0), 1.0, 0)
    _, before = router.rank(asked(500, 200, client=1), FLEET, 2.0)
    for number in range(100):
        answer(router.choose(asked(number, number + 1, client=2), FLEET, 10.0 + number), 10.5 + number, 0)
    answer(router.choose(prompt(0), [home], 111.0), 112.0, TOKENS - 1)
    _, after = router.rank(asked(501, 201, client=1), FLEET, 113.0)
    at_home = [[one.uncached_tokens for one in ranking if one.replica == home] for ranking in (before, after)]
    assert at_home == [[TOKENS // 2]] * 2
    _, own = router.rank(asked(502, 202, client=2), FLEET, 113.0)
    assert all(one.cost.session_s > -0.05 for one in own)


def test_agents_do_not_change_what_is_expected_of_their_session() -> None:
    """Each has a number of its own: their short prompts on other replicas displace none of its holders."""
    router = router_of()
    home = answer(router.choose(prompt(0), FLEET, 0.0), 1.0, 0)
    others = [name for name in FLEET if name != home]
    for number in range(50):
        answer(router.choose(agent(number, number + 1, 500), others, 2.0), 2.5, 0)
    booking = router.choose(prompt(60), FLEET, 3.0)
    assert (booking.chosen.replica, booking.unseen) == (home, TOKENS)


def test_twenty_agents_at_once_are_spread_by_load() -> None:
    """Prompts of their own, and a parent whose replica they would all like."""
    router = router_of()
    answer(router.choose(prompt(0), FLEET, 0.0), 1.0, 0)
    homes = [router.choose(agent(number, number + 1), FLEET, 2.0).chosen.replica for number in range(20)]
    counts = sorted(homes.count(name) for name in FLEET)
    assert counts[0] >= 4
    assert counts[-1] <= 8, "half of a prompt is expected at the parent's, so it gets at most twice as many"


def test_siblings_with_one_head_go_where_it_is() -> None:
    router = router_of()
    answer(router.choose(prompt(0), FLEET, 0.0), 1.0, 0)
    heads = [keys_of(b"h" * 100 + bytes([number]) * 2) for number in range(4)]
    asked = [Prompt(keys, len(keys) // 8 * 100, 100, "", session_key=2000 + number) for number, keys in enumerate(heads)]
    for each in asked:
        each.parent_key = 1
    first = answer(router.choose(asked[0], FLEET, 2.0), 3.0, 0)
    assert [answer(router.choose(each, FLEET, 4.0), 4.1, 10_000) for each in asked[1:]] == [first] * 3

from __future__ import annotations

import random
from typing import Any

import pytest

from router import Outcome, Prompt, Replica, Router, text_keys, token_keys
from router.learning.scales import MAX_SCALES
from router.router import SHRINK_BYTES
from tests.support.strategies import keys_of, prompt_of

OK = Outcome(ok=True)


def counted(prompt: Prompt) -> Outcome:
    """The engine has counted the tokens of this prompt, whose units are tokens."""
    return Outcome(True, prompt.units)


def router_with(*names: str, **options: Any) -> Router:
    router = Router(**{"policy": "cost", "ttl_s": 300.0, "memory_bytes": 1 << 24, "chance": random.Random(3), **options})
    for name in names:
        router.add(Replica(name))
    return router


def blocks_held(router: Router, prompt: Prompt, now: float = 0.0) -> dict[str, int]:
    return router.trie.match(prompt.keys, now)


def test_a_second_turn_follows_the_first() -> None:
    router = router_with("r1", "r2", "r3")
    first = router.choose(prompt_of(bytes(50)), ["r1", "r2", "r3"], 0.0)
    assert first.decision.reason == "cold"
    first.close(OK, 1.0)
    for turn in range(2, 20):
        booking = router.choose(prompt_of(bytes(50 * turn)), ["r1", "r2", "r3"], float(turn))
        assert (booking.chosen.replica, booking.decision.reason) == (first.chosen.replica, "warm")
        assert booking.chosen.matched_blocks == 50 * (turn - 1)
        assert (booking.chosen.matched_tokens, booking.chosen.uncached_tokens) == (50 * (turn - 1), 50)
        booking.close(OK, turn + 0.5)
    router.check()
    assert router.ledger.open_leases == 0


def test_siblings_of_a_burst_meet_before_the_first_answer() -> None:
    router = router_with("r1", "r2")
    bookings = [router.choose(prompt_of(bytes(100) + bytes([1 + index]) * 2), ["r1", "r2"], 0.0) for index in range(2)]
    assert len({booking.chosen.replica for booking in bookings}) == 1
    assert [booking.decision.reason for booking in bookings] == ["cold", "warm"]


def test_a_replica_that_came_up_gets_new_work_later_and_keeps_what_it_holds() -> None:
    """Even idle, it is asked only where the others' queues are longer than its slow start."""
    router, names = router_with("old", "new"), ["old", "new"]
    router.came_up("new", 0.0)
    prompts = [prompt_of(bytes([1 + number]) * 1000) for number in range(12)]
    bookings = [router.choose(prompt, names, 0.0) for prompt in prompts]
    taken = [booking.chosen.replica for booking in bookings]
    assert taken.count("new") == 1
    assert "new" not in taken[:8]
    for number, booking in enumerate(bookings):
        booking.close(OK, 0.1 * number)
    first = taken.index("new")
    for turn, now in enumerate((2.0, 4.0, 6.0)):
        booking = router.choose(prompt_of(bytes([1 + first]) * (1000 + 100 * turn)), names, now)
        assert (booking.chosen.replica, booking.decision.reason) == ("new", "warm")
        assert booking.chosen.cost.start_s == 0.0
        booking.close(OK, now + 0.1)
    assert not router.sweep(9.9)
    assert router.ledger.starting
    assert not router.sweep(10.1)
    assert not router.ledger.starting
    router.came_up("new", 11.0)
    router.remove("new")
    assert not router.ledger.starting


def test_a_loaded_holder_spills_to_an_idle_replica() -> None:
    router = router_with("r1", "r2")
    warm = router.choose(prompt_of(bytes(100)), ["r1"], 0.0)
    warm.close(OK, 1.0)
    queue = [router.choose(prompt_of(bytes([9]) * 2000), ["r1"], 1.0)]
    spilled = router.choose(prompt_of(bytes(100)), ["r1", "r2"], 1.0)
    assert (spilled.chosen.replica, spilled.decision.reason) == ("r2", "spill")
    assert blocks_held(router, prompt_of(bytes(100)), 1.0) == {"r1": 100, "r2": 100}, "the new holder is recorded"
    for booking in (*queue, spilled):
        booking.close(OK, 2.0)


def test_a_prefill_that_is_nearly_done_is_worth_waiting_for() -> None:
    router = router_with("r1", "r2")
    router.choose(prompt_of(bytes(20_000)), ["r1"], 0.0).close(OK, 1.0)
    router.choose(prompt_of(b"x" * 120_000), ["r1"], 10.0)  # fifteen seconds of work
    soon, late = (router.rank(prompt_of(bytes(20_000)), ["r1", "r2"], now)[0].best.replica for now in (10.1, 24.9))
    assert (soon, late) == ("r2", "r1")


def test_a_long_cold_prompt_goes_where_the_fewest_are_about_to_ask() -> None:
    router = router_with("busy", "quiet")
    for turn in range(60):
        name = "quiet" if turn % 10 == 0 else "busy"
        router.choose(prompt_of(bytes([turn]) * 40), [name], float(turn)).close(OK, turn + 0.5)
    taken = [router.rank(prompt_of(b"z" * 100_000), ["busy", "quiet"], 60.0)[0].best.replica for _ in range(20)]
    assert set(taken) == {"quiet"}


def test_what_is_booked_is_part_of_the_next_cost() -> None:
    router = router_with("r1", "r2")
    taken = [router.choose(prompt_of(bytes([index + 1]) * 100), ["r1", "r2"], 0.0) for index in range(10)]
    names = [booking.chosen.replica for booking in taken]
    assert names.count("r1") == names.count("r2") == 5


def test_a_failure_takes_the_credit_back_but_not_what_was_known_before() -> None:
    router = router_with("r1", "r2")
    router.choose(prompt_of(b"aaaa"), ["r1"], 0.0).close(OK, 0.0)
    booking = router.choose(prompt_of(b"aaaabbbb"), ["r1"], 0.0)
    assert blocks_held(router, prompt_of(b"aaaabbbb")) == {"r1": 8}
    booking.close(Outcome(ok=False), 0.0)
    assert blocks_held(router, prompt_of(b"aaaabbbb")) == {"r1": 4}


def test_a_move_takes_booking_and_credit_to_the_best_of_the_others() -> None:
    router = router_with("r1", "r2", "r3")
    router.choose(prompt_of(b"z" * 4000), ["r3"], 0.0)
    booking = router.choose(prompt_of(b"abcd"), ["r1", "r2"], 0.0)
    first = booking.chosen.replica
    second = "r2" if first == "r1" else "r1"
    booking.move([second, "r3"], 1.0)
    assert booking.chosen.replica == second
    assert blocks_held(router, prompt_of(b"abcd")) == {second: 4}
    assert router.ledger.of(first).inflight == 0
    assert router.ledger.of(second).booked_tokens == 4
    booking.first_token(2.0)
    booking.close(OK, 3.0)
    booking.close(Outcome(ok=False), 3.0)
    booking.move([first], 4.0)
    assert router.ledger.open_leases == 1, "the one on r3"
    assert blocks_held(router, prompt_of(b"abcd")) == {second: 4}


def test_an_answer_below_the_match_takes_nothing_from_other_prompts() -> None:
    """The engine may have read another prompt than the router did (`tools` in another order, a cut prompt)."""
    router = router_with("r1")
    router.choose(prompt_of(b"aaaaaaaa" + b"b"), ["r1"], 0.0).close(OK, 0.0)
    router.choose(prompt_of(b"aaaaaaaa" + b"c"), ["r1"], 0.0).close(OK, 0.0)
    booking = router.choose(prompt_of(b"aaaaaaaa" + b"d"), ["r1"], 0.0)
    assert booking.chosen.matched_blocks == 8
    booking.close(Outcome(ok=True, prompt_tokens=9, cached_tokens=2), 0.0)
    assert blocks_held(router, prompt_of(b"aaaaaaaa" + b"d")) == {"r1": 9}, "what it has just computed it holds"
    assert blocks_held(router, prompt_of(b"aaaaaaaa" + b"b")) == {"r1": 9}


@pytest.mark.parametrize("cached", [-5, 0, 7, 10**12, None])
@pytest.mark.parametrize("tokens", [-1, 0, 10**12, None])
def test_nonsense_from_an_engine_harms_nothing(cached: int | None, tokens: int | None) -> None:
    router = router_with("r1")
    for _ in range(3):
        router.choose(prompt_of(b"abcdefgh", scale="m"), ["r1"], 0.0).close(Outcome(True, tokens, cached), 0.0)
        router.check()
    assert 0.01 <= router.units_per_token("m") <= 1000


def test_bytes_per_token_are_learned_per_model() -> None:
    router = router_with("r1")
    assert router.units_per_token("m") == 4.0
    for turn in range(100):
        router.choose(prompt_of(bytes([turn]) * 3000, scale="m"), ["r1"], 0.0).close(Outcome(True, 1000, None), 0.0)
    assert router.units_per_token("m") == pytest.approx(3.0, rel=0.02)
    assert router.units_per_token("other") == 4.0
    assert router.units_per_token("") == 1.0, "token ids need no scale"


def test_a_slow_replica_learns_to_get_less() -> None:
    router = router_with("fast", "slow")
    speed = {"fast": 4000.0, "slow": 1000.0}
    for turn in range(30):
        for name, rate in speed.items():
            booking = router.choose(prompt_of(bytes([turn, 1]) * 500), [name], turn * 10.0)
            booking.first_token(turn * 10.0 + 1000 / rate)
            booking.close(OK, turn * 10.0 + 5)
    shares = [router.choose(prompt_of(bytes([99, i]) * 100), ["fast", "slow"], 999.0).chosen.replica for i in range(50)]
    assert 36 <= shares.count("fast") <= 44


def test_the_rate_is_learned_from_what_the_engine_really_computed() -> None:
    """It had evicted what we believed it to hold: a long prefill, not a slow replica."""
    router = router_with("r1")
    router.choose(prompt_of(bytes(4000)), ["r1"], 0.0).close(OK, 0.0)
    for turn in range(1, 40):
        booking = router.choose(prompt_of(bytes(4000)), ["r1"], turn * 100.0)
        assert booking.chosen.uncached_tokens == 0
        booking.first_token(turn * 100.0 + 4.0)
        booking.close(Outcome(True, 4000, 0), turn * 100.0 + 5.0)
    assert router.ledger.of("r1").rate.value == pytest.approx(1000, rel=0.05)


def test_without_the_engines_count_the_rate_is_learned_from_our_own() -> None:
    router = router_with("r1")
    for turn in range(40):
        booking = router.choose(prompt_of(bytes([turn]) * 4000), ["r1"], turn * 100.0)
        booking.first_token(turn * 100.0 + 4.0)
        booking.close(OK, turn * 100.0 + 5.0)
    assert router.ledger.of("r1").rate.value == pytest.approx(1000, rel=0.05)


def test_a_dry_run_changes_nothing() -> None:
    router = router_with("r1", "r2")
    before = repr(router)
    decision, ranking = router.rank(prompt_of(b"abcd"), ["r1", "r2"], 0.0)
    assert decision.best is ranking[0]
    assert {candidate.replica for candidate in ranking} == {"r1", "r2"}
    assert repr(router) == before


def test_a_replica_that_restarted_or_left_holds_nothing() -> None:
    router = router_with("r1", "r2")
    router.choose(prompt_of(b"abcd"), ["r1"], 0.0).close(OK, 0.0)
    router.restarted("r1")
    assert blocks_held(router, prompt_of(b"abcd")) == {}
    running = router.choose(prompt_of(b"abcd"), ["r1"], 0.0)
    router.remove("r1")
    running.close(OK, 1.0)
    assert blocks_held(router, prompt_of(b"abcd")) == {}, "a late success does not revive it"
    assert router.ledger.open_leases == 0
    router.check()


def test_capacity_is_given_in_tokens() -> None:
    router = router_with()
    router.add(Replica("r1", capacity_tokens=640))
    router.choose(Prompt(text_keys(bytes(20 * 256), 256, 0), 20 * 256, 256, "m"), ["r1"], 0.0).close(OK, 0.0)
    assert router.trie.held() == {"r1": 10}


def test_text_and_token_ids_share_a_replicas_capacity_in_tokens() -> None:
    """A block of text is 64 tokens, believed at first; one of token ids 16, or whatever it was cut into."""
    router = router_with()
    router.add(Replica("r1", capacity_tokens=640))
    text = Prompt(text_keys(bytes(8 * 256), 256, 1), 8 * 256, 256, "m")
    ids = Prompt(token_keys(range(12 * 16), 16, 2), 12 * 16, 16, "")
    router.choose(text, ["r1"], 0.0).close(Outcome(True, 512), 0.0)
    assert (router.trie.held_by("r1"), router.held_tokens("r1")) == (8, 512)
    router.choose(ids, ["r1"], 1.0).close(counted(ids), 1.0)
    assert blocks_held(router, text, 1.0) == {"r1": 7}, "64 tokens were too many"
    assert blocks_held(router, ids, 1.0) == {"r1": 12}
    assert router.held_tokens("r1") == 7 * 64 + 12 * 16 == 640
    assert router.held_tokens("unknown") == 0
    router.check()


def test_a_prompt_without_a_full_block_is_routed_by_load_alone() -> None:
    booking = router_with("r1", "r2").choose(Prompt(b"", 3, 256, "m"), ["r1", "r2"], 0.0)
    assert booking.decision.reason == "blind"


def test_less_than_the_longest_match_is_a_spill() -> None:
    router = router_with("r1", "r2")
    router.choose(prompt_of(b"h" * 100), ["r1"], 0.0).close(OK, 0.0)
    router.choose(prompt_of(b"h" * 90), ["r2"], 0.0).close(OK, 0.0)
    router.choose(prompt_of(b"z" * 2000), ["r1"], 1.0)
    decision = router.choose(prompt_of(b"h" * 100), ["r1", "r2"], 1.0).decision
    assert (decision.best.replica, decision.best.matched_blocks, decision.reason) == ("r2", 90, "spill")


def test_what_others_hold_that_are_not_asked_counts_for_nothing() -> None:
    router = router_with("r1", "r2", "r3")
    router.choose(prompt_of(b"abcdefgh"), ["r1"], 0.0).close(OK, 0.0)
    router.choose(prompt_of(b"abcd"), ["r2"], 0.0).close(OK, 0.0)
    decision, ranking = router.rank(prompt_of(b"abcdefgh"), ["r2", "r3"], 1.0)
    assert (decision.reason, decision.available_tokens) == ("warm", 4)
    assert [one.cost.duplicate_s > 0 for one in ranking] == [False, True]
    assert router.rank(prompt_of(b"abcdefgh"), ["r3"], 1.0)[0].reason == "cold"


def test_no_candidates_is_a_caller_error() -> None:
    with pytest.raises(ValueError, match="no replica"):
        router_with().choose(prompt_of(b"a"), [], 0.0)


def test_another_policy_and_other_bounds_while_requests_run() -> None:
    router = router_with("r1", "r2")
    running = router.choose(prompt_of(bytes(50)), ["r1"], 0.0)
    router.retune(policy="round_robin", ttl_s=10.0, memory_bytes=1 << 24)
    taken = [router.choose(prompt_of(bytes([turn]) * 9), ["r1", "r2"], 1.0).chosen.replica for turn in range(4)]
    assert taken[0] != taken[1]
    assert taken[:2] == taken[2:]
    router.retune(policy="round_robin", ttl_s=10.0, memory_bytes=1 << 24)
    assert router.choose(prompt_of(bytes([7]) * 9), ["r1", "r2"], 1.0).chosen.replica == taken[0], (
        "it remembers whose turn it is"
    )
    running.close(OK, 2.0)
    assert blocks_held(router, prompt_of(bytes(50)), 2.0)["r1"] == 50
    router.sweep(12.5)
    assert router.trie.blocks == 0
    router.check()


def test_a_smaller_index_shrinks_step_by_step() -> None:
    router = router_with("r1")
    for number in range(400):
        router.choose(prompt_of(number.to_bytes(4, "big") * 250), ["r1"], 1.0).close(OK, 1.0)
    before = router.trie.size_bytes
    assert before > 3 * SHRINK_BYTES
    router.retune(policy="cost", ttl_s=300.0, memory_bytes=SHRINK_BYTES)
    newcomer, sizes = prompt_of(bytes(9)), [before]
    while sizes[-1] > SHRINK_BYTES:
        router.sweep(2.0)
        router.choose(newcomer, ["r1"], 2.0).close(OK, 2.0)
        sizes.append(router.trie.size_bytes)
        assert 0 < sizes[-2] - sizes[-1] < SHRINK_BYTES * 1.2
    router.sweep(2.0)
    assert router.trie.max_bytes == SHRINK_BYTES
    router.retune(policy="cost", ttl_s=300.0, memory_bytes=1 << 30)
    assert router.trie.max_bytes == 1 << 30
    router.check()


@pytest.mark.parametrize(("took_s", "stays"), [(10.0, b"aa"), (0.5, b"bb")])
def test_a_long_request_has_its_blocks_in_use_until_its_end(took_s: float, stays: bytes) -> None:
    router = Router(policy="cost", ttl_s=100, memory_bytes=1 << 20, chance=random.Random(1))
    router.add(Replica("r1", 4))
    first = router.choose(prompt_of(b"aa"), ["r1"], 0.0)
    if took_s < 5:
        first.close(Outcome(True, 2), took_s)
    router.choose(prompt_of(b"bb"), ["r1"], 5.0).close(Outcome(True, 2), 5.1)
    first.close(Outcome(True, 2), took_s)
    router.choose(prompt_of(b"cc"), ["r1"], 11.0).close(Outcome(True, 2), 11.1)
    held = {text: router.trie.match(keys_of(text), 11.2).get("r1", 0) for text in (b"aa", b"bb", b"cc")}
    assert held == {b"aa": 0, b"bb": 0, b"cc": 2} | {stays: 2}


# -- what a request may cost the others


def with_tenants(router: Router, prompts: int = 20) -> list[Prompt]:
    """Prompts of others, which r1 holds: 50 blocks each."""
    found = [prompt_of(bytes([number, 1]) * 25) for number in range(prompts)]
    for prompt in found:
        router.choose(prompt, ["r1"], 0.0).close(counted(prompt), 0.5)
    return found


def held_of(router: Router, prompts: list[Prompt], now: float = 1.0) -> list[int]:
    return [router.trie.match(prompt.keys, now).get("r1", 0) for prompt in prompts]


@pytest.mark.parametrize("blocks", [900, 100_000])
@pytest.mark.parametrize("silent", [False, True])
def test_a_prompt_that_the_engine_refuses_evicts_nothing(blocks: int, silent: bool) -> None:
    router = router_with()
    router.add(Replica("r1", 1000))
    prompts = with_tenants(router)
    for turn in range(5):
        booking = router.choose(prompt_of(bytes([turn, 2]) * (blocks // 2)), ["r1"], 1.0, silent=silent)
        router.check()
        sibling = router.choose(prompts[0], ["r1"], 1.0)
        sibling.first_token(1.1)
        assert router.trie.evicted["capacity"] == 0, "nor when another one's bounds are enforced"
        assert sum(held_of(router, prompts)) >= 500, "meanwhile half of it at least is counted on"
        sibling.close(OK, 1.2)
        booking.close(Outcome(ok=False), 1.5)
        assert held_of(router, prompts) == [50] * 20
    assert held_of(router, prompts) == [50] * 20
    assert router.trie.held() == {"r1": 1000}
    assert router.trie.evicted["capacity"] == 0


def test_a_prompt_that_was_computed_evicts_what_it_has_to() -> None:
    router = router_with()
    router.add(Replica("r1", 1000))
    prompts = with_tenants(router)
    booking = router.choose(prompt_of(bytes([99]) * 900), ["r1"], 1.0)
    assert router.trie.held_by("r1") == 1900
    booking.first_token(2.0)
    router.sweep(2.0)
    assert router.trie.held_by("r1") == 1900, "a token does not show how much was computed"
    booking.close(counted(booking.prompt), 2.5)
    router.sweep(2.5)
    assert router.trie.held_by("r1") == 1000
    assert held_of(router, prompts) == [0] * 18 + [50, 50]


def test_a_count_far_below_the_estimate_credits_the_blocks_that_it_pays_for() -> None:
    router = router_with()
    router.add(Replica("r1", 1000))
    router.choose(prompt_of(b"aaaa"), ["r1"], 0.0).close(counted(prompt_of(b"aaaa")), 0.0)
    longer = prompt_of(b"aaaa" + bytes(800))
    router.choose(longer, ["r1"], 1.0).close(Outcome(True, 84), 1.0)
    assert blocks_held(router, longer, 1.0) == {"r1": 84}
    router.choose(longer, ["r1"], 1.0).close(Outcome(True, 2), 1.0)
    assert blocks_held(router, longer, 1.0) == {"r1": 84}, "counted before"
    router.choose(longer, ["r1"], 1.0).close(Outcome(True, 600), 1.0)
    assert blocks_held(router, longer, 1.0) == {"r1": 804}, "tokens are an estimate"
    assert router.trie.pending_of("r1") == 0
    router.check()


@pytest.mark.parametrize(
    ("count", "images", "matched"),
    [(900, 0, 80), (600, 0, 80), (400, 0, 16), (400, 1, 80)],
    ids=["10 bytes a token", "13 bytes a token", "20 bytes a token", "an image"],
)
def test_a_prompt_that_may_have_so_few_tokens_is_credited_whole_and_displaces_as_many(
    count: int, images: int, matched: int
) -> None:
    """Of 2,000 tokens by the estimate: a text in a script with long tokens, an image that its engine makes smaller."""
    router = router_with()
    router.add(Replica("r1", 10_000))
    for number in range(20):
        other = Prompt(text_keys(bytes([number]) * 2000, 100, 1), 2000, 100, "m")
        router.choose(other, ["r1"], 0.0).close(Outcome(True, 500), 0.0)
    prompt = Prompt(text_keys(bytes([99]) * 8000, 100, 1), 8000, 100, "m")
    prompt.origin, prompt.images = 7, images
    router.choose(prompt, ["r1"], 1.0).close(Outcome(True, count), 1.0)
    router.sweep(1.0)
    assert blocks_held(router, prompt, 1.0) == {"r1": matched}
    others = [Prompt(text_keys(bytes([number]) * 2000, 100, 1), 2000, 100, "m") for number in range(20)]
    lost = sum(20 - blocks_held(router, other, 1.0).get("r1", 0) for other in others)
    assert lost * 25 <= count + 25, "a block of 100 bytes has 25 tokens"
    router.check()


def test_cached_tokens_that_are_longer_than_others_are_no_miss() -> None:
    for count, images in ((600, 0), (300, 1)):
        router = router_with("r1")
        prompt = Prompt(text_keys(bytes([99]) * 8000, 100, 1), 8000, 100, "m")
        prompt.images = images
        router.choose(prompt, ["r1"], 0.0).close(Outcome(True, count, 0), 0.0)
        other, more = (Prompt(text_keys(text * 8000, 100, 1), 8000, 100, "m") for text in (b"o", b"m"))
        router.choose(other, ["r1"], 1.0).close(Outcome(True, 2000, 0), 1.0)
        router.choose(prompt, ["r1"], 2.0).close(Outcome(True, count, count), 2.0)
        assert router.learned_capacity("r1") is None
        router.choose(other, ["r1"], 3.0).close(Outcome(True, 2000, 2000), 3.0)
        router.choose(more, ["r1"], 3.0).close(Outcome(True, 2000, 0), 3.0)
        router.choose(prompt, ["r1"], 4.0).close(Outcome(True, count, 0 if images else count // 4), 4.0)
        assert router.learned_capacity("r1") is not None, "a miss"


def test_prompts_with_images_do_not_move_the_scale_of_texts() -> None:
    router = router_with("r1")
    prompt = Prompt(text_keys(bytes([99]) * 8000, 100, 1), 8000, 100, "m")
    prompt.images = 1
    router.choose(prompt, ["r1"], 0.0).close(Outcome(True, 1000, 0), 0.0)
    assert router.units_per_token("m") == 4.0


def test_a_new_path_weighs_what_the_engine_has_counted() -> None:
    for count, weighs in ((1500, 1500), (2500, 2500), (4000, 4000), (9000, 4000), (900, 900)):
        router = router_with("r1")
        prompt = Prompt(text_keys(bytes([count % 251]) * 8000, 100, 1), 8000, 100, "m")  # 2,000 tokens, as believed
        router.choose(prompt, ["r1"], 0.0).close(Outcome(True, count), 0.0)
        assert router.held_tokens("r1") == pytest.approx(weighs, rel=0.03)
        extended = Prompt(text_keys(bytes([count % 251]) * 8000 + b"x" * 800, 100, 1), 8800, 100, "m")
        router.choose(extended, ["r1"], 0.0).close(Outcome(True, 2200), 0.0)
        router.check()


@pytest.mark.parametrize(
    "outcome", [Outcome(True, shown=False), Outcome(True, 0, shown=False), Outcome(True, 84, shown=False), Outcome(ok=False)]
)
def test_an_answer_with_nothing_in_it_credits_nothing(outcome: Outcome) -> None:
    router = router_with("r1")
    router.choose(prompt_of(b"aaaa"), ["r1"], 0.0).close(OK, 0.0)
    longer = prompt_of(b"aaaa" + bytes(80))
    booking = router.choose(longer, ["r1"], 1.0)
    booking.first_token(1.0)
    booking.close(outcome, 2.0)
    assert blocks_held(router, longer, 2.0) == {"r1": 4}


def test_a_replica_that_seems_to_compute_nothing_loses_the_prompts_of_its_empty_answers() -> None:
    router = router_with("r1")
    for text in (b"aaaa", b"aaaabb", b"cccc"):
        router.choose(prompt_of(text), ["r1"], 0.0).close(counted(prompt_of(text)), 0.0)
    router.choose(prompt_of(b"aaaabb"), ["r1"], 1.0).close(Outcome(True, 6, shown=False), 1.0)
    assert blocks_held(router, prompt_of(b"aaaabb"), 1.0) == {"r1": 6}
    router.doubt({"r1"})
    for text in (b"aaaa", b"aaaabb"):
        router.choose(prompt_of(text), ["r1"], 2.0).close(Outcome(True, 6, shown=False), 2.0)
    assert blocks_held(router, prompt_of(b"aaaabb"), 2.0) == {}
    assert blocks_held(router, prompt_of(b"cccc"), 2.0) == {"r1": 4}
    router.check()


def test_a_prompt_in_flight_hides_others_up_to_what_was_counted_for_its_client() -> None:
    router = router_with()
    router.add(Replica("r1", 1000))
    prompts = with_tenants(router)
    stranger = prompt_of(bytes([99]) * 300)
    stranger.origin = 7
    booking = router.choose(stranger, ["r1"], 1.0)
    assert held_of(router, prompts) == [50] * 20
    booking.close(Outcome(ok=False), 1.0)
    known = prompt_of(bytes([98]) * 300)
    booking = router.choose(known, ["r1"], 1.0)
    assert held_of(router, prompts) == [0] * 6 + [50] * 14
    booking.close(Outcome(ok=False), 1.0)
    router.sweep(1.0)
    assert held_of(router, prompts) == [50] * 20
    router.check()


def test_credits_that_are_never_counted_have_a_share_of_the_memory() -> None:
    router = router_with("r1", memory_bytes=200_000)
    for number in range(300):
        prompt = prompt_of(number.to_bytes(2, "big") * 5)
        router.choose(prompt, ["r1"], 0.0).close(counted(prompt), 0.0)
    evicted = router.trie.evicted["memory"]
    for number in range(2000):
        prompt = prompt_of(number.to_bytes(2, "big") * 6)
        prompt.origin = number
        router.choose(prompt, ["r1"], 1.0).close(OK, 1.0)
    kept = sum(blocks_held(router, prompt_of(number.to_bytes(2, "big") * 5), 1.0) != {} for number in range(300))
    assert kept == 300
    assert router.trie.evicted["memory"] == evicted
    assert router.trie.size_bytes < 250_000, "the bound and the share of all clients"
    router.check()


def test_prompts_that_are_longer_than_their_counts_have_a_share_of_the_memory() -> None:
    router = router_with("r1", memory_bytes=400_000)
    for number in range(300):
        prompt = prompt_of(number.to_bytes(2, "big") * 5)
        router.choose(prompt, ["r1"], 0.0).close(counted(prompt), 0.0)
    for number in range(100):
        prompt = prompt_of(bytes([255, number]) * 750)
        prompt.origin, prompt.images = number, 1
        router.choose(prompt, ["r1"], 1.0).close(Outcome(True, 1), 1.0)
    kept = sum(blocks_held(router, prompt_of(number.to_bytes(2, "big") * 5), 1.0) != {} for number in range(300))
    assert kept == 300
    router.check()


def test_what_exceeds_the_context_or_the_cache_is_never_credited() -> None:
    router = router_with()
    router.add(Replica("r1", 1000, 300))
    router.add(Replica("r2", 1000))
    for name, most in (("r1", 300), ("r2", 1000)):
        booking = router.choose(prompt_of(bytes([9]) * 5000), [name], 0.0)
        assert blocks_held(router, booking.prompt) == {name: most}
        booking.close(Outcome(ok=False), 0.0)
        assert blocks_held(router, booking.prompt) == {}
    longer = router.choose(prompt_of(bytes([8]) * 400), ["r1"], 0.0)
    longer.close(counted(longer.prompt), 0.0)
    assert blocks_held(router, longer.prompt) == {"r1": 400}, "the engine took it: our tokens are an estimate"


def test_refused_prompts_do_not_push_each_others_memory_out() -> None:
    router = router_with("r1", memory_bytes=1 << 18)
    prompts = with_tenants(router)
    refused = [router.choose(prompt_of(bytes([turn, 2]) * 2000), ["r1"], 1.0) for turn in range(200)]
    assert held_of(router, prompts) == [50] * 20
    assert router.trie.size_bytes <= 1 << 18
    for booking in refused:
        booking.close(Outcome(ok=False), 2.0)
    assert router.trie.pending_bytes == 0
    assert router.trie.held() == {"r1": 1000}
    router.check()


def test_other_bounds_leave_what_was_learned() -> None:
    router = router_with("r1")
    with_tenants(router)
    router.add(Replica("r1", None, 5000))
    assert router.trie.held() == {"r1": 1000}
    assert router.replicas["r1"].context_tokens == 5000


def test_one_observation_moves_a_scale_by_a_factor_of_two_at_most() -> None:
    router = router_with("r1")

    def answered(units: int, tokens: int) -> float:
        prompt = Prompt(keys_of(b"x"), units, 256, "m")
        router.choose(prompt, ["r1"], 0.0).close(Outcome(True, tokens, 0), 0.0)
        return router.units_per_token("m")

    for _ in range(20):
        honest = answered(4000, 1000)
    assert honest == pytest.approx(4.0)
    for units, tokens in ((340_000, 1000), (320_000, 20_000), (20_000, 20_000), (400, 9000)):
        assert honest / 2 <= answered(units, tokens) <= honest * 2
        for _ in range(60):
            answered(4000, 1000)
        assert answered(4000, 1000) == pytest.approx(4.0, rel=0.15), "and is made good"


@pytest.mark.parametrize(
    ("units", "tokens", "least", "most"),
    [
        (1000, 100, 9.5, 10.0),  # plausible
        (1000, 50, 15.4, 16.0),  # a little beyond what is
        (1000, 1200, 1.0, 1.05),
        (1000, 20, 4.0, 4.0),  # far beyond: nothing is learned
        (1000, 10_000, 4.0, 4.0),
        (10**9, 1, 4.0, 4.0),
    ],
)
def test_a_replica_that_lies_cannot_make_a_scale_implausible(units: int, tokens: int, least: float, most: float) -> None:
    router = router_with("r1")
    for _ in range(2000):
        router.choose(Prompt(keys_of(b"x"), units, 256, "m"), ["r1"], 0.0).close(Outcome(True, tokens, 0), 0.0)
    assert least <= router.units_per_token("m") <= most


def test_one_replica_does_not_move_the_scale_of_a_model() -> None:
    """It counts just under two tokens a byte, for every client; the others count one for four bytes."""
    names = ("r1", "r2", "r3")
    router = router_with(*names)
    for number in range(90):
        prompt = Prompt(keys_of(b"x"), 3000, 256, "m")
        prompt.origin = 1 + number // 3 % 5
        tokens = 5700 if number % 3 == 1 else 750
        router.choose(prompt, [names[number % 3]], 0.0).close(Outcome(True, tokens, 0), 0.0)
    assert router.units_per_token("m") == pytest.approx(4.0, rel=0.05)


def test_a_replica_that_left_has_no_say_in_a_scale() -> None:
    router = router_with("r1")
    for name, tokens in (("r1", 1500), ("r2", 750)):
        router.add(Replica(name))
        for _ in range(30):
            router.choose(Prompt(keys_of(b"x"), 3000, 256, "m"), [name], 0.0).close(Outcome(True, tokens, 0), 0.0)
        router.remove("r1")
    assert router.units_per_token("m") == pytest.approx(4.0, rel=0.01)


def test_scales_are_learned_for_a_bounded_number_of_names() -> None:
    router = router_with("r1")
    for number in range(3 * MAX_SCALES):
        prompt = Prompt(keys_of(b"x"), 3000, 1, f"m{number}")
        router.choose(prompt, ["r1"], 0.0).close(Outcome(True, 1000, 0), 0.0)
        if number % 100 == 0:
            router.choose(Prompt(keys_of(b"x"), 3000, 1, "used"), ["r1"], 0.0).close(Outcome(True, 1000, 0), 0.0)
    router.check()
    assert router.units_per_token("m0") == 4.0 > router.units_per_token("used")


@pytest.mark.parametrize("tokens", [None, 10, 50])
def test_a_replica_that_keeps_one_conversation_holds_the_last_one_only(tokens: int | None) -> None:
    """Such an engine counts nothing, or only what was new."""
    router = router_with()
    for name in ("r1", "r2"):
        router.add(Replica(name, one_conversation=True))
    first, second = prompt_of(bytes(50)), prompt_of(bytes([1]) * 50)
    router.choose(first, ["r1"], 0.0).close(OK, 1.0)
    waiting = router.choose(second, ["r1"], 2.0)
    assert blocks_held(router, first, 2.0) == {"r1": 50}, "until the other one is computed"
    waiting.first_token(3.0)
    waiting.close(Outcome(True, tokens), 4.0)
    assert (blocks_held(router, first, 4.0), blocks_held(router, second, 4.0)) == ({}, {"r1": 50})
    refused = router.choose(first, ["r1"], 5.0)
    refused.close(Outcome(ok=False), 6.0)
    assert blocks_held(router, second, 6.0) == {"r1": 50}, "what was refused has displaced nothing"
    again = router.choose(prompt_of(bytes([1]) * 60), ["r1", "r2"], 7.0)
    assert (again.chosen.replica, again.chosen.matched_blocks) == ("r1", 50)
    again.close(OK, 8.0)
    router.check()

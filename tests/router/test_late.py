"""Late binding: who waits in the gateway at a replica that computes one prompt at a time, and who goes first."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import MAX_LEAD_S, Booking, Outcome, Prompt, Replica, Router
from router.late import MOST_WAITING, TurnInLine
from router.learning.serial import EXPLORE, PROOF_TOKENS, SerialPrefill
from router.load import AGEING
from tests.support.strategies import keys_of

RATE = 10_000.0  # tokens per second
BLOCK = 1000  # tokens
NAMES = ["r1"]


def router_of(*names: str, proven: bool = True) -> Router:
    router = Router(policy="cost", ttl_s=3600.0, memory_bytes=1 << 24, chance=random.Random(3))
    for name in names or NAMES:
        router.add(Replica(name, shares_inflight=True))
        router.ledger.restore(name, (1e6, 1e6 / RATE), 0.0, 0.0)
        if proven:
            serial = router.ledger.loads[name].serial
            while not serial.proven:
                serial.learn(10_000, 1.0, RATE)
    router.ledger.rates.refresh()
    return router


def send(router: Router, name: str, blocks: int, now: float = 0.0, *, silent: bool = False) -> Booking:
    """A cold prompt of so many thousand tokens: `blocks` tenths of a second."""
    text = name.encode() * blocks
    return router.choose(Prompt(keys_of(text), blocks * BLOCK, BLOCK, ""), NAMES, now, silent=silent)


def called(*bookings: Booking) -> list[bool]:
    """For each: it may be sent."""
    return [booking.lead is None or booking.lead.over for booking in bookings]


def finish(booking: Booking, now: float) -> None:
    booking.first_token(now)
    booking.close(Outcome(True, booking.prompt.units, 0), now)


def test_all_are_sent_at_once_to_an_engine_of_which_nothing_is_proven() -> None:
    router = router_of(proven=False)
    assert [send(router, name, 50).lead for name in "abcd"] == [None] * 4


def test_the_shortest_of_those_that_wait_goes_first() -> None:
    router = router_of()
    running, long, short, middle = (send(router, name, blocks) for name, blocks in zip("abcd", (30, 90, 10, 40), strict=True))
    assert called(running, long, short, middle) == [True, False, False, False]
    running.first_token(3.0)
    assert called(long, short, middle) == [False, True, False]
    short.release(3.0)
    router.check()
    assert router.ledger.loads["r1"].first is short.lease
    short.first_token(4.0)
    assert called(long, middle) == [False, True]
    middle.release(4.0)
    middle.first_token(8.0)
    assert called(long) == [True]
    long.release(8.0)
    for booking in (running, long, short, middle):
        finish(booking, 20.0)
    router.check()
    assert not router.ledger.open_leases


def test_a_long_prompt_is_not_overtaken_for_ever() -> None:
    router = router_of()
    running, long = send(router, "a", 30), send(router, "b", 50)
    now, overtaken = 0.0, 0
    for number in range(100):
        short = send(router, chr(ord("c") + number), 30, now + 0.1)
        now += 3.0
        running.first_token(now)
        if called(long) == [True]:
            break
        overtaken += 1
        short.release(now)
        running = short
    assert 1 <= overtaken <= 2.0 / AGEING / 3.0 + 1  # two seconds more work, three seconds of waiting each


def test_short_prompts_go_together() -> None:
    router = router_of()
    running = send(router, "a", 30)
    tiny = [router.choose(Prompt(b"", 300, BLOCK, ""), NAMES, 0.0) for _ in range(5)]
    running.first_token(3.0)
    assert called(*tiny).count(True) == 4  # 0.03 s each, until they take a tenth of a second


@pytest.mark.parametrize(
    "why", ["a plain answer", "a short wait", "another gateway", "load of others", "an idle replica", "a long line"]
)
def test_nobody_waits_where_something_would_be_lost(why: str) -> None:
    router, blocks = router_of(), 30
    ledger = router.ledger
    if why == "a short wait":
        blocks = 0
    if why == "another gateway":
        ledger.open("r1", 9000, 9000, 0.0, remote=True)
    if why == "load of others":
        router.reported("r1", 3, 9, 0, 0.0)
    if why != "an idle replica":
        send(router, "a", blocks, silent=why == "a plain answer")
    while why == "a long line" and len(ledger.loads["r1"].line) < MOST_WAITING:
        send(router, "c", 50)
    assert called(send(router, "b", 50)) == [True]


@pytest.mark.parametrize("why", ["another gateway", "load of others", "a restart"])
def test_a_line_ends_where_something_would_be_lost(why: str) -> None:
    router = router_of()
    running, one, other = send(router, "a", 30), send(router, "b", 50), send(router, "c", 60)
    if why == "another gateway":
        router.ledger.open("r1", 9000, 9000, 1.0, remote=True)
    elif why == "load of others":
        router.reported("r1", 3, 9, router.ledger.loads["r1"].sent_sequences, 2.9)
    else:
        router.restarted("r1")
    running.first_token(3.0)
    assert called(one, other) == [True, True]


def test_requests_in_the_line_of_a_replica_that_leaves_are_chosen_again_at_once() -> None:
    router = router_of("r1", "r2")
    running, one = send(router, "a", 30), send(router, "b", 50)
    router.remove("r1")
    assert called(one) == [True]
    assert one.release(1.0)
    one.move(["r2"], 1.0)
    finish(running, 3.0)
    finish(one, 6.0)
    router.check()
    assert not router.ledger.open_leases


def test_a_time_to_a_first_token_that_others_were_before_teaches_no_rate() -> None:
    """They came while it waited in line."""
    router = router_of()
    running, one = send(router, "a", 30), send(router, "b", 20)
    router.reported("r1", 1, 4, 1, 2.9)
    running.first_token(3.0)
    one.release(3.0)
    finish(one, 13.0)
    assert router.ledger.rates.of("r1").value == pytest.approx(RATE)


def test_a_request_that_leaves_the_line_leaves_nothing_there() -> None:
    router = router_of()
    running, gone, late = send(router, "a", 30), send(router, "b", 10), send(router, "c", 60)
    gone.close(Outcome(False), 1.0)
    assert late.lead is not None
    assert late.lead.most_s <= MAX_LEAD_S
    late.release(2.0)  # its time is over
    router.check()
    assert not router.ledger.loads["r1"].line
    running.close(Outcome(False), 2.5)
    assert router.ledger.loads["r1"].first is late.lease


def test_a_client_that_leaves_the_line_ends_no_turn_in_the_engine() -> None:
    router = router_of()
    serial = router.ledger.loads["r1"].serial
    running, gone = send(router, "a", 30), send(router, "b", 40)
    while (other := send(router, "c", 20)).lead is not None:  # until one is sent at once
        other.close(Outcome(False), 0.0)
    running.first_token(3.0)
    gone.close(Outcome(False), 4.9)
    finish(other, 5.0)
    assert other.lease.prefill_s == 2.0
    assert serial.proven


def test_a_plain_request_past_the_line_is_computed_before_those_in_it() -> None:
    router = router_of()
    running, one, other = send(router, "a", 30), send(router, "b", 50), send(router, "c", 60)
    plain = send(router, "d", 1, silent=True)
    running.first_token(3.0)
    one.release(3.0)
    load = router.ledger.loads["r1"]
    assert load.waiting == [plain.lease, one.lease, other.lease]
    assert load.advance(3.1) is one.lease


def test_a_request_with_followers_is_called() -> None:
    router = router_of()
    router.add(Replica("r1", shares_inflight=False))
    running, lead, follower = send(router, "a", 30), send(router, "b", 20), send(router, "b", 20)
    assert isinstance(lead.lead, TurnInLine)
    assert not isinstance(follower.lead, TurnInLine)
    running.first_token(3.0)
    assert called(lead, follower) == [True, False]


def test_a_plain_answer_that_was_sent_does_not_stop_the_line() -> None:
    router = router_of()
    running, plain, other = send(router, "a", 30), send(router, "b", 0, silent=True), send(router, "c", 20)
    running.first_token(3.0)
    assert called(plain, other) == [True, True]


def test_plain_requests_pass_a_line_for_a_tenth_of_a_second_in_all() -> None:
    router = router_of()
    send(router, "a", 30)
    other = send(router, "b", 50)
    send(router, "c", 1, silent=True)
    assert called(other) == [False]
    last = send(router, "d", 1, silent=True)
    assert called(other, last) == [True, True]
    assert last.lead, "after the others"
    assert last.lead.most_s == 0
    other.release(0.0)
    last.release(0.0)
    assert not router.ledger.loads["r1"].line
    later = send(router, "e", 50)
    send(router, "f", 1, silent=True)
    assert called(later) == [False], "another line"


def test_requests_that_failed_elsewhere_pass_a_line_likewise() -> None:
    router = router_of("r1", "r2")
    send(router, "a", 30)
    other = send(router, "b", 50)
    moved = router.choose(Prompt(keys_of(b"c" * 20), 20 * BLOCK, BLOCK, ""), ["r2"], 0.0)
    moved.move(NAMES, 1.0)
    moved.release(1.0)
    assert called(moved, other) == [True, True]


def test_followers_pass_a_line_likewise() -> None:
    router = router_of()
    router.add(Replica("r1", shares_inflight=False))
    running, lead, follower = send(router, "a", 30), send(router, "b", 20), send(router, "b", 22)
    one, other = send(router, "c", 60), send(router, "d", 60)
    running.first_token(3.0)
    lead.release(3.0)
    lead.first_token(5.0)
    assert called(follower, one, other) == [True, True, False]
    follower.release(5.0)
    assert called(other) == [True]


def test_the_next_goes_when_the_running_one_fails_or_moves() -> None:
    router = router_of()
    running, one, other = send(router, "a", 30), send(router, "b", 10), send(router, "c", 60)
    running.close(Outcome(False), 1.0)
    assert called(one, other) == [True, False]
    one.close(Outcome(False), 1.0)  # before it was sent
    assert called(other) == [True]


def test_a_short_prompt_does_not_pay_for_those_that_it_overtakes_but_for_their_delay() -> None:
    router = router_of()
    send(router, "a", 10)
    for name in "bc":
        assert send(router, name, 90).lead is not None
    short = send(router, "d", 5).decision.best.cost
    assert short.queue_s == pytest.approx(1.0)
    assert short.others_s == pytest.approx(2 * 0.5)
    long = send(router, "e", 95).decision.best.cost
    assert long.queue_s == pytest.approx(1.0 + 2 * 9.0 + 0.5)


def test_a_short_prompt_goes_where_only_long_ones_wait() -> None:
    router = router_of("r1", "r2")
    send(router, "a", 10)
    for name in "bc":
        assert send(router, name, 90).lead is not None
    router.choose(Prompt(keys_of(b"d" * 30), 30 * BLOCK, BLOCK, ""), ["r2"], 0.0)
    assert router.choose(Prompt(keys_of(b"e" * 5), 5 * BLOCK, BLOCK, ""), ["r2", "r1"], 0.0).lease.replica == "r1"


def test_some_are_sent_at_once_for_evidence() -> None:
    router = router_of()
    send(router, "a", 30)
    bookings = [send(router, chr(200 + number), 20) for number in range(EXPLORE)]
    assert called(*bookings).count(True) == 1, "and the others still wait"


# -- the proof


def serve(router: Router, rounds: int, *, together: bool) -> bool:
    """Pairs of prompts at once. True if the replica is proven to compute one at a time."""
    now = 0.0
    for number in range(rounds):
        pair = [send(router, chr(300 + 2 * number + place), 20, now) for place in range(2)]
        assert [booking.lead for booking in pair] == [None, None] or not together
        for place, booking in enumerate(pair):
            finish(booking, now + (4.0 if together else 2.0 * (place + 1)))
        now += 10.0
    return router.ledger.loads["r1"].serial.proven


def test_first_tokens_prove_that_an_engine_computes_one_prompt_at_a_time() -> None:
    assert serve(router_of(proven=False), 6, together=False)


def test_first_tokens_at_once_prove_nothing() -> None:
    assert not serve(router_of(proven=False), 30, together=True)


def test_an_engine_that_begins_to_batch_loses_the_proof() -> None:
    router = router_of()
    router.ledger.loads["r1"].serial.learn(10_000, 0.1, RATE)
    assert send(router, "a", 30).lead is send(router, "b", 30).lead is None


def test_a_prompt_that_overtakes_another_is_evidence_against_it() -> None:
    router = router_of()
    serial = router.ledger.loads["r1"].serial
    send(router, "a", 30)
    send(router, "c", 40)
    while (other := send(router, "b", 10, 0.5)).lead is not None:  # until one is sent at once
        other.close(Outcome(False), 0.5)
    assert serial.proven
    other.first_token(1.5)
    assert not serial.proven


def test_the_order_beside_another_gateway_s_prompt_is_no_evidence() -> None:
    """Its first token is known later."""
    router = router_of()
    router.ledger.open("r1", 30_000, 30_000, 0.0, remote=True)
    send(router, "a", 20, 0.5).first_token(5.0)
    assert router.ledger.loads["r1"].serial.proven


def test_a_restart_begins_anew() -> None:
    router = router_of()
    router.restarted("r1")
    send(router, "a", 30)
    assert send(router, "b", 30).lead is None


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e6), st.floats(1, 1e6)), max_size=40))
def test_any_evidence_is_forgotten_after_enough_of_the_other(evidence: list[tuple[float, float, float]]) -> None:
    serial = SerialPrefill()
    for tokens, seconds, rate in evidence:
        serial.learn(tokens, seconds, rate)
    for _ in range(int(2 * PROOF_TOKENS / 10_000)):
        serial.learn(10_000, 1.0, 10_000)
    assert serial.proven
    for _ in range(3):
        serial.learn(10_000, 0.1, 10_000)
    assert not serial.proven


def test_a_request_whose_match_was_evicted_while_it_waited_is_chosen_again() -> None:
    router = router_of("r1", "r2")
    router.add(Replica("r1", 100 * BLOCK, shares_inflight=True))
    first = send(router, "x", 60)
    finish(first, 6.0)
    running = send(router, "a", 90, 10.0)
    text = b"x" * 60 + b"y"
    later = router.choose(Prompt(keys_of(text), len(text) * BLOCK, BLOCK, ""), ["r1", "r2"], 10.0)
    assert (later.lease.replica, later.lease.uncached_tokens, called(later)) == ("r1", BLOCK, [False])
    finish(running, 19.0)
    blocks = send(router, "b", 20, 19.0)  # r1 is busy again
    assert (called(later), later.release(19.0)) == ([True], True)
    later.move(["r1", "r2"], 19.0)
    assert (later.lease.replica, later.lease.uncached_tokens, later.lead) == ("r2", len(text) * BLOCK, None)
    finish(blocks, 21.0)
    finish(later, 25.1)
    router.check()
    assert not router.ledger.open_leases


def test_a_request_that_is_chosen_again_does_not_wait_for_itself() -> None:
    router = router_of("r1", "r2")
    router.add(Replica("r1", 100 * BLOCK, shares_inflight=True))
    finish(send(router, "x", 60), 6.0)
    running = send(router, "a", 90, 10.0)
    later = router.choose(Prompt(keys_of(b"x" * 60), 60 * BLOCK, BLOCK, ""), ["r1", "r2"], 10.0)
    finish(running, 19.0)
    busy = router.choose(Prompt(keys_of(b"z" * 90), 90 * BLOCK, BLOCK, ""), ["r2"], 19.0)
    assert later.release(19.0)
    later.move(["r1", "r2"], 19.0)
    assert (later.lease.replica, later.decision.best.cost.queue_s) == ("r1", 0.0)
    for booking in (busy, later):
        finish(booking, 30.0)
    router.check()


def test_a_burst_with_one_cold_head_follows_its_first_request_into_the_line() -> None:
    router = router_of("r1", "r2")
    for name in ("r1", "r2"):
        router.choose(Prompt(keys_of(name.encode() * 15), 30 * BLOCK, BLOCK, ""), [name], 0.0)
    prompts = [Prompt(keys_of(b"h" * 40 + task), 41 * BLOCK, BLOCK, "") for task in (b"x", b"y")]
    burst = [router.choose(prompt, ["r1", "r2"], 0.0) for prompt in prompts]
    assert called(*burst) == [False, False]
    assert [booking.lease.uncached_tokens for booking in burst] == [41 * BLOCK, BLOCK]
    assert burst[0].lease.replica == burst[1].lease.replica


def test_a_prompt_in_line_is_matched_also_behind_a_plain_request_that_was_sent() -> None:
    router = router_of("r1", "r2")
    running, first = send(router, "a", 30), send(router, "x", 40)
    plain = send(router, "s", 1, silent=True)
    assert called(first, plain) == [False, True]
    text = b"x" * 40 + b"y"
    later = router.choose(Prompt(keys_of(text), len(text) * BLOCK, BLOCK, ""), ["r1", "r2"], 0.0)
    assert (later.lease.replica, later.matched_blocks) == ("r1", 40)
    for booking in (running, plain, first, later):
        finish(booking, 30.0)
    router.rank(later.prompt, NAMES, 30.0)
    assert not router.ledger.lines
    router.check()


def test_the_price_knows_whether_the_shortest_goes_first() -> None:
    """Behind a plain request there is no line: all requests that come meanwhile wait for this one."""
    others_s = []
    for silent in (False, True):
        router = router_of()
        finish(send(router, "x", 10), 1.0)
        send(router, "a", 60, 2.0, silent=silent)
        others_s.append(router.rank(Prompt(keys_of(b"b" * 30), 30 * BLOCK, BLOCK, ""), NAMES, 2.0)[0].best.cost.others_s)
    assert others_s[1] > 2 * others_s[0] > 0

"""Twenty kinds of planted lies are found, and honest traffic raises nothing: the audit on its own, with simulated replicas."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.usage import Usage
from gateway.features.audit import audit as rules
from gateway.features.audit.audit import Audit, medians
from gateway.features.audit.claim import AnswerClaim
from gateway.features.audit.evidence import LEAST, RatioLevel, SignTally
from gateway.features.audit.sent import GROWTH, SentPrompts
from gateway.features.audit.twins import PromptTwins
from router import text_keys
from tests.support.strategies import keys_of

BLOCK = 256


@dataclass(frozen=True)
class Truth:
    """An answer as an honest replica computes and reports it. None: not reported, or not shown."""

    bytes: int
    prompt: int
    cached: int | None
    completion: int
    passed: int | None
    prefill_s: float | None
    decode_s: float | None
    fresh: bool = False
    silent: bool = False


Lie = Callable[[Truth], Truth]


class Request(NamedTuple):
    """bound: how many blocks its replica may have cached."""

    replica: str
    client: int
    keys: bytes
    bound: int
    truth: Truth


class Traffic:
    """Requests of conversations that mostly stay where they are, answered by honest replicas."""

    def __init__(self, seed: int, replicas: int, clients: int) -> None:
        self.chance = random.Random(seed)
        self.names = [f"r{number}" for number in range(replicas)]
        self.clients = clients
        self.sent = SentPrompts()
        self.caches: dict[str, set[bytes]] = {name: set() for name in self.names}
        self.rates = {name: 9000.0 * self.chance.uniform(0.6, 1.6) for name in self.names}
        self.talks: list[tuple[bytes, float, int, str]] = []
        self.shared = self.text(8000)
        self.questions = [self.text(self.chance.choice((300, 2000, 5000))) for _ in range(30)]
        self._requests: list[Request] = []

    def text(self, size: int) -> bytes:
        return self.chance.randbytes(size)

    def request(self, number: int) -> Request:
        while len(self._requests) <= number:
            self._requests.append(self.step())
        return self._requests[number]

    def step(self) -> Request:
        chance, kind = self.chance, self.chance.random()
        client, name = chance.randrange(self.clients), chance.choice(self.names)
        density = chance.uniform(2.2, 7.0)
        if kind < 0.4 and self.talks:  # a next turn
            text, density, client, name = self.talks.pop(chance.randrange(len(self.talks)))
            text += self.text(chance.randrange(100, 6000))
            name = chance.choice(self.names) if chance.random() < 0.1 else name
        elif kind < 0.6:  # the same question of somebody else
            text = chance.choice(self.questions)
            density = 4.0
        elif kind < 0.9:
            text = self.shared + self.text(chance.randrange(50, 20_000))
        else:
            text = self.text(chance.choice((40, 500, 90_000, 400_000)))
        if len(text) < 300_000 and len(self.talks) < 60:
            self.talks.append((text, density, client, name))
        return self.answered(name, client, text, density)

    def answered(self, name: str, client: int, text: bytes, density: float) -> Request:
        chance = self.chance
        keys = text_keys(text, BLOCK, 1)
        tokens, blocks = int(len(text) / density) + 12, len(keys) // 8
        held = 0
        while held < blocks and keys[held * 8 : held * 8 + 8] in self.caches[name]:
            held += 1
        self.caches[name].update(keys[at : at + 8] for at in range(0, len(keys), 8))
        cached = int(held * BLOCK / density)
        completion = chance.choice((1, 20, 300, 1500))
        stream = chance.random() < 0.8
        passed = max(1, int(completion / chance.choice((1, 1, 1, 4)))) if stream else None
        prefill = (tokens - cached) / self.rates[name] * chance.uniform(0.9, 3.0) + 0.02
        bound = self.sent.send(name, keys)
        truth = Truth(
            len(text),
            tokens,
            cached,
            completion,
            passed,
            prefill if stream else None,
            completion / chance.uniform(20, 80) if stream else None,
            fresh=held == 0,
        )
        return Request(name, client, keys, bound, truth)


traffic = cache(Traffic)  # the same for each lie


class Pool:
    """An audit of traffic, and lies, by replica."""

    def __init__(self, seed: int, lies: Mapping[str, Lie], replicas: int = 4, clients: int = 6) -> None:
        self.traffic = traffic(seed, replicas, clients)
        self.lies = lies
        self.audit = Audit()
        self.served = 0

    def serve(self, requests: int) -> Mapping[str, frozenset[str]]:
        found: dict[str, set[str]] = {}
        for number in range(requests):
            self.claim(self.traffic.request(self.served))
            self.served += 1
            if number % 10 == 9:
                for name, findings in self.audit.judge().items():
                    found.setdefault(name, set()).update(findings)
        return {name: frozenset(findings) for name, findings in found.items()}

    def claim(self, request: Request) -> None:
        truth = request.truth
        told = self.lies.get(request.replica, lambda each: each)(truth)
        usage = None if told.silent else Usage(max(0, told.prompt), max(0, told.completion), told.cached)
        claim = AnswerClaim(request.keys, truth.bytes, BLOCK, "m", request.client, usage)
        claim.sent = int((request.bound + 1) * BLOCK * told.prompt / truth.bytes)
        claim.passed, claim.prefill_s, claim.decode_s = told.passed, told.prefill_s, told.decode_s
        self.audit.observe(request.replica, "pool", claim)


def cached_all(one: Truth) -> Truth:
    return replace(one, cached=max(0, one.prompt - 1))


def instant(one: Truth) -> Truth:
    return replace(one, prefill_s=one.prefill_s and 0.001)


def empty(one: Truth) -> Truth:
    return replace(one, completion=0, passed=one.passed and 0, decode_s=None)


LIES: dict[str, tuple[Lie, str]] = {
    "everything is cached": (cached_all, rules.CACHED_UNSENT),
    "nine tenths are cached": (lambda one: replace(one, cached=one.prompt * 9 // 10), rules.CACHED_UNSENT),
    "what it never saw is cached": (
        lambda one: replace(one, cached=one.prompt * 2 // 3) if one.fresh else one,
        rules.CACHED_UNSENT,
    ),
    "everything is cached, and answered at once": (lambda one: instant(cached_all(one)), rules.CACHED_UNSENT),
    "prompts are counted twice": (lambda one: replace(one, prompt=one.prompt * 2), rules.PROMPT_DIFFERS),
    "prompts are counted half": (lambda one: replace(one, prompt=one.prompt // 2), rules.PROMPT_DIFFERS),
    "another template: 200 tokens more": (lambda one: replace(one, prompt=one.prompt + 200), rules.PROMPT_DIFFERS),
    "other weights: a fifth more tokens": (lambda one: replace(one, prompt=one.prompt * 6 // 5), rules.PROMPT_DIFFERS),
    "a constant count of prompts": (lambda one: replace(one, prompt=10), rules.PROMPT_DIFFERS),
    "more tokens than bytes": (lambda one: replace(one, prompt=one.bytes * 3 + 5000), rules.PROMPT_EXCESS),
    "prompts are counted nine times": (lambda one: replace(one, prompt=one.prompt * 9), rules.PROMPT_DIFFERS),
    "a million tokens for every prompt": (lambda one: replace(one, prompt=1_000_000), rules.PROMPT_EXCESS),
    "prompts are cut at 4,096 tokens": (lambda one: replace(one, prompt=min(one.prompt, 4096)), rules.PROMPT_CUT),
    "prompts are cut at 16,387 tokens": (lambda one: replace(one, prompt=min(one.prompt, 16_387)), rules.PROMPT_CUT),
    "no prompt tokens at all": (lambda one: replace(one, prompt=0, cached=0), rules.PROMPT_DIFFERS),
    "answers of one token": (lambda one: replace(one, completion=1), rules.ANSWER_SHORT),
    "a tenth of each answer is counted": (lambda one: replace(one, completion=one.completion // 10), rules.ANSWER_SHORT),
    "forty times each answer is counted": (lambda one: replace(one, completion=one.completion * 40), rules.ANSWER_EXCESS),
    "empty answers": (empty, rules.ANSWERS_EMPTY),
    "empty answers at once": (lambda one: instant(empty(one)), rules.PREFILL_FAST),
    "no usage": (lambda one: replace(one, silent=True), rules.USAGE_MISSING),
    "answers at once": (instant, rules.PREFILL_FAST),
    "a first token that is none, a minute late": (
        lambda one: replace(one, prefill_s=one.prefill_s and one.prefill_s + 60),
        rules.PREFILL_SLOW,
    ),
    "tokens that were ready before": (lambda one: replace(one, decode_s=one.decode_s and 0.001), rules.DECODE_FAST),
    "tokens that are held back": (lambda one: replace(one, decode_s=one.decode_s and one.decode_s * 40), rules.DECODE_SLOW),
}


@pytest.mark.parametrize("name", LIES)
def test_a_planted_lie_is_found_and_nobody_else_is_blamed(name: str) -> None:
    lie, finding = LIES[name]
    found = Pool(1, {"r2": lie}).serve(1200)
    assert finding in found.get("r2", ()), found
    assert set(found) == {"r2"}, found


@pytest.mark.parametrize("name", ["everything is cached", "empty answers", "no usage", "prompts are cut at 4,096 tokens"])
def test_a_liar_in_a_pool_of_two_is_found(name: str) -> None:
    lie, finding = LIES[name]
    found = Pool(3, {"r1": lie}, replicas=2).serve(1200)
    assert finding in found.get("r1", ()), found
    assert set(found) == {"r1"}, found


def test_a_single_replica_that_counts_prompts_nine_times_is_found() -> None:
    assert Pool(3, {"r0": LIES["prompts are counted nine times"][0]}, replicas=1).serve(1200) == {"r0": {rules.PROMPT_EXCESS}}


def test_a_tokenizer_of_bytes_is_no_finding() -> None:
    bytewise: dict[str, Lie] = {"r0": lambda one: replace(one, prompt=one.bytes + 40, cached=0)}
    assert Pool(3, bytewise, replicas=1).serve(1200) == {}


def test_where_two_replicas_count_differently_both_have_the_finding() -> None:
    found = Pool(3, {"r1": LIES["prompts are counted twice"][0]}, replicas=2).serve(1200)
    assert found == {name: {rules.PROMPT_DIFFERS} for name in ("r0", "r1")}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("replicas", [1, 2, 4, 9])
def test_honest_replicas_have_no_finding(seed: int, replicas: int) -> None:
    assert Pool(seed, {}, replicas, clients=1 + seed % 3).serve(1500) == {}


def test_what_all_replicas_do_is_no_finding() -> None:
    """A KV store that they share, or other gateways that send them requests; an engine that does not report usage."""
    for name in ("everything is cached", "no usage", "empty answers"):
        lie = LIES[name][0]
        assert Pool(5, dict.fromkeys(("r0", "r1", "r2", "r3"), lie)).serve(800) == {}


def test_one_client_among_several_discredits_no_replica() -> None:
    pool, chance = Pool(1, {}), random.Random(0)
    pool.serve(300)
    for number in range(200):
        text = chance.randbytes(40_000)
        claim = AnswerClaim(text_keys(text, BLOCK, 1), len(text), BLOCK, "m", 0, Usage(15, 0, 0))
        claim.passed = 0
        pool.audit.observe("r1", "pool", claim)
        if number % 20 == 0:
            assert not pool.audit.judge()


def test_a_finding_ends_with_its_cause() -> None:
    pool = Pool(2, {"r0": cached_all, "r3": cached_all}, replicas=7)
    pool.serve(1500)
    assert set(pool.audit.judge()) == {"r0", "r3"}
    pool.audit.forget("r3")
    assert set(pool.audit.judge()) == {"r0"}
    pool.lies = {}
    pool.serve(2500)
    assert not pool.audit.judge()


# -- the parts

prompts = st.binary(max_size=40).map(lambda data: bytes(byte % 3 for byte in data))


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), prompts), max_size=30))
def test_what_was_sent_is_never_above_its_bound(sent: list[tuple[str, bytes]]) -> None:
    memory = SentPrompts(first=1)
    before: dict[str, list[bytes]] = {"a": [], "b": []}
    for replica, letters in sent:
        keys = keys_of(letters)
        common = max((_common(letters, other) for other in before[replica]), default=0)
        bound = memory.send(replica, keys)
        assert common <= bound <= len(letters)
        assert bound < GROWTH * max(1, common)
        before[replica].append(letters)


def _common(one: bytes, two: bytes) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


@given(st.lists(st.floats(-100, 100), max_size=9))
def test_the_median_of_the_others(values: list[float]) -> None:
    expected = [median(values[:at] + values[at + 1 :]) if len(values) > 1 else None for at in range(len(values))]
    assert medians(values) == expected


def test_old_prompts_are_dropped_a_generation_at_a_time() -> None:
    memory = SentPrompts(prompts=10, first=1)
    for number in range(35):
        assert memory.send("r", keys_of(bytes([number, 1, 2, 3]))) == 0
    assert memory.send("r", keys_of(bytes([30, 1, 2, 3]))) == 4
    assert memory.send("r", keys_of(bytes([5, 1, 2, 3]))) == 0


def test_twins_are_bounded() -> None:
    twins = PromptTwins(prompts=3)
    assert [list(twins.count(("m", b"a", 9), name, 1)) for name in "pqrstu"] == [[], [1], [1] * 2, [1] * 3, [1] * 4, [1] * 4]
    for number in range(5):
        assert twins.count(("m", b"%d" % number, 9), "p", number) == ()
    assert len(twins) == 3


def test_the_counts_of_a_replica_that_left_are_compared_with_nobody_s() -> None:
    audit = Audit()
    for name, text in (("r1", b"a" * BLOCK), ("r1", b"b" * BLOCK), ("r2", b"b" * BLOCK)):
        audit.observe(name, "pool", AnswerClaim(text_keys(text, BLOCK, 1), BLOCK, BLOCK, "m", 1, Usage(100, 1, None)))
    audit.forget("r1")
    assert repr(audit) == "<Audit of 1 replicas, 1 prompts>"
    twins = PromptTwins()
    for name, tokens in (("r1", 1), ("r2", 2)):
        twins.count(("m", b"a", 9), name, tokens)
    twins.forget("r1")
    assert twins.count(("m", b"a", 9), "r3", 3) == [2]


def test_a_tally_needs_half_of_the_answers_and_two_clients() -> None:
    tally = SignTally()
    for _ in range(LEAST):
        assert not tally.shows(alone=True)
        tally.add(True, 1)
    assert tally.shows(alone=True)
    assert not tally.shows(alone=False)
    tally.add(True, 2)
    assert not tally.shows(alone=False), "one of six"
    tally.add(True, 2)
    assert tally.shows(alone=False)
    for _ in range(10):
        tally.add(False, 1)
    assert not tally.shows(alone=True)


def test_a_level_follows_what_is_new() -> None:
    level = RatioLevel()
    for _ in range(200):
        level.add(10.0)
    for _ in range(200):
        level.add(1000.0)
    assert level.mean == pytest.approx(6.63, abs=0.05)

"""Reports of engines about their caches, beside the beliefs of the index."""

from __future__ import annotations

import random
from collections.abc import Mapping

from router import Outcome, Prompt, Replica, Router, text_keys
from router.residency import HeldPrefix, PromptTokens, Residency

BLOCK, TOKENS = 256, 1000


class SetReports(Residency):
    """Reports that a test sets."""

    def __init__(self, reports: Mapping[str, HeldPrefix]) -> None:
        self.reports = reports
        self.asked = 0

    def held(self, tokens: PromptTokens, replica: str) -> HeldPrefix | None:
        self.asked += 1
        return self.reports.get(replica)


def router(reports: Mapping[str, HeldPrefix], *names: str) -> Router:
    made = Router(policy="cost", ttl_s=300.0, memory_bytes=1 << 24, chance=random.Random(0))
    for name in names or ("a", "b"):
        made.add(Replica(name, 100_000))
    made.residency = SetReports(reports)
    return made


def prompt(text: bytes = b"x" * 4000, *, tokens: int = TOKENS, whole: bool = True, known: bool = True) -> Prompt:
    made = Prompt(text_keys(text, BLOCK, 7), len(text), BLOCK, "m")
    made.tokens = PromptTokens(bytes(4 * tokens), whole) if known else None
    return made


def test_blocks_that_others_put_there_are_matched() -> None:
    booking = router({"b": HeldPrefix(800, 800, certain=True), "a": HeldPrefix(0, 0, certain=True)}).choose(
        prompt(), ["a", "b"], 0.0
    )
    assert (booking.chosen.replica, booking.chosen.matched_tokens, booking.chosen.uncached_tokens) == ("b", 800, 200)
    assert booking.decision.reason == "warm"
    assert booking.decision.prompt_tokens == TOKENS


def test_evicted_blocks_are_not_matched_though_they_were_sent() -> None:
    made = router({})
    booking = made.choose(prompt(), ["a"], 0.0)
    booking.first_token(0.1)
    booking.close(Outcome(True, TOKENS, 0), 0.2)
    assert made.rank(prompt(), ["a"], 1.0)[0].best.matched_tokens > 900
    made.residency = SetReports({"a": HeldPrefix(0, 0, certain=True)})
    decision = made.rank(prompt(), ["a"], 1.0)[0]
    assert (decision.best.matched_tokens, decision.reason) == (0, "cold")


def test_a_part_of_the_truth_adds_to_history_only() -> None:
    made = router({"a": HeldPrefix(100, 100, certain=False)})
    assert made.rank(prompt(), ["a"], 0.0)[0].best.matched_tokens == 100
    booking = made.choose(prompt(), ["a"], 0.0)
    booking.first_token(0.1)
    booking.close(Outcome(True, TOKENS, 0), 0.2)
    assert made.rank(prompt(), ["a"], 1.0)[0].best.matched_tokens > 900


def test_prompts_in_flight_are_matched_before_their_events() -> None:
    none = HeldPrefix(0, 0, certain=True)
    made = router({"a": none, "b": none})
    first = made.choose(prompt(), ["a", "b"], 0.0)
    second = made.choose(prompt(b"x" * 4000 + b"y" * 300), ["a", "b"], 0.01)
    assert second.chosen.replica == first.chosen.replica
    assert second.chosen.matched_tokens > 800


def test_a_prompt_that_moves_is_not_matched_by_itself() -> None:
    none = HeldPrefix(0, 0, certain=True)
    made = router({"a": none, "b": none})
    booking = made.choose(prompt(), ["a", "b"], 0.0)
    booking.move(["a", "b"], 0.1)
    assert booking.chosen.matched_tokens == 0


def test_slower_memory_is_priced_between_hit_and_miss() -> None:
    reports = {
        "a": HeldPrefix(800, 640, certain=True),
        "b": HeldPrefix(700, 700, certain=True),
        "c": HeldPrefix(0, 0, certain=True),
    }
    _, ranking = router(reports, "a", "b", "c").rank(prompt(), ["a", "b", "c"], 0.0)
    assert [each.replica for each in ranking] == ["b", "a", "c"]
    assert [each.uncached_tokens for each in ranking] == [300, 360, 1000]
    assert ranking[1].matched_tokens == 800, "the engine will report what it has loaded as cached"


def test_without_tokens_nobody_is_asked() -> None:
    made = router({"b": HeldPrefix(800, 800, certain=True)})
    made.choose(prompt(known=False), ["a", "b"], 0.0)
    assert isinstance(made.residency, SetReports)
    assert made.residency.asked == 0


def test_absurd_reports_do_no_harm() -> None:
    reports = {"a": HeldPrefix(10**9, 10**9, certain=True), "b": HeldPrefix(0, 0, certain=True)}
    made = router(reports)
    booking = made.choose(prompt(tokens=3, whole=False), ["a", "b"], 0.0)
    assert booking.chosen.uncached_tokens >= 0
    booking.first_token(0.1)
    booking.close(Outcome(True, TOKENS, 0), 0.2)
    made.check()
    assert made.rank(prompt(b"z", tokens=0), ["a", "b"], 1.0)[0].reason == "blind"

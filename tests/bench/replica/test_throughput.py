"""Rates from outside: what two lengths of answers differ by."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch")

from bench.replica.throughput import FEW, Contestant, Rates, measure, parse, report


def test_each_is_asked_for_the_same_and_no_prompt_comes_twice() -> None:
    asked: dict[str, list[tuple[list[str], int]]] = {"a": [], "b": []}
    clock = itertools.count(0.0)  # seconds: everything takes one more than what came before

    def contestant(name: str) -> Contestant:
        def ask(prompts: list[str], tokens: int) -> int:
            asked[name].append((list(prompts), tokens))
            return 100

        return Contestant(name, ask, 0)

    options = parse(["--batches", "1,3", "--rounds", "2", "--tokens", "20"])
    results = measure([contestant("a"), contestant("b")], options, lambda: next(clock) ** 2)
    assert [list(result.rates) for result in results] == [["prefill", "decode, 1 at once", "decode, 3 at once"]] * 2
    for calls in asked.values():
        assert [(len(prompts), tokens) for prompts, tokens in calls] == 2 * [(1, 1), (1, FEW), (1, 20), (3, FEW), (3, 20)]
    prompts = [prompt for calls in asked.values() for some, _ in calls for prompt in some]
    assert len(set(prompts)) == len(prompts)


def test_ratios_are_of_a_round() -> None:
    text = report(
        "made", [Rates("ours", {"prefill": [10.0, 40.0, 90.0]}, 5), Rates("theirs", {"prefill": [10.0, 20.0, 30.0]}, 6)]
    )
    assert "| over theirs | 2.00 (1.00 to 3.00) | |" in text

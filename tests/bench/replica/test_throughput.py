"""Rates from outside: what two lengths of answers differ by."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")

from bench.replica.throughput import FEW, GREEDY, SAMPLED, Contestant, Rates, Sampling, endless, measure, parse, report


def test_each_is_asked_for_the_same_and_no_prompt_comes_twice() -> None:
    asked: dict[str, list[tuple[list[str], int, Sampling]]] = {"a": [], "b": []}
    clock = itertools.count(0.0)  # seconds: everything takes one more than what came before

    def contestant(name: str) -> Contestant:
        def ask(prompts: Sequence[str], tokens: int, sampling: Sampling) -> int:
            asked[name].append((list(prompts), tokens, sampling))
            return 100

        return Contestant(name, ask, 0)

    options = parse(["--batches", "1,3", "--rounds", "2", "--tokens", "20"])
    results = measure([contestant("a"), contestant("b")], options, lambda: next(clock) ** 2)
    columns = ["prefill", "decode, 1 at once", "decode, 3 at once", "sampled, 1 at once", "sampled, 3 at once"]
    assert [list(result.rates) for result in results] == [columns] * 2
    wakes = (1, FEW, GREEDY)
    for calls in asked.values():
        found = [(len(prompts), tokens, sampling) for prompts, tokens, sampling in calls]
        decoding = [(batch, tokens, sampling) for sampling in (GREEDY, SAMPLED) for batch in (1, 3) for tokens in (FEW, 20)]
        expected = [wakes, (1, 1, GREEDY)]
        for first, second in zip(decoding[::2], decoding[1::2], strict=True):
            expected += [wakes, first, second]
        assert found == 2 * expected
    prompts = [prompt for calls in asked.values() for some, _, _ in calls for prompt in some]
    assert len(set(prompts)) == len(prompts)


def test_the_copied_model_has_no_end_of_text(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"eos_token_id": 2, "hidden_size": 8}')
    (folder / "model.safetensors").write_text("weights")
    copy = endless(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    assert (config["hidden_size"], config["eos_token_id"] != 2) == (8, True)
    assert (copy / "model.safetensors").read_text() == "weights"
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 2


def test_ratios_are_of_a_round() -> None:
    text = report(
        "made", [Rates("ours", {"prefill": [10.0, 40.0, 90.0]}, 5), Rates("theirs", {"prefill": [10.0, 20.0, 30.0]}, 6)]
    )
    assert "| over theirs | 2.00 (1.00 to 3.00) | |" in text

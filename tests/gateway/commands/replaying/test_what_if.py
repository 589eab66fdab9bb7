"""`--what-if`: what it takes, and the sentence."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.commands.replaying.money import RunCost
from gateway.commands.replaying.what_if import Variant, sentence, variant
from router.simulation.fleet import Result

NOW = Result("cost", 12, 1_000_000, 100, 0.72, 0.4, 0.3, 0.8, 2.0, 5.0, 1.1)
POLICIES = ("cost", "round_robin")


def test_all_that_can_be_changed() -> None:
    text = "replicas=12, kv=2M,policy=round_robin,prefill=2.5k,decode=40,speed=1.5"
    assert variant(text, POLICIES) == Variant(text, "round_robin", 12, 2_000_000, 2500.0, 40.0, 1.5)
    assert variant("kv=250k", POLICIES).kv_tokens == 250_000
    assert variant("kv=1e6", POLICIES).kv_tokens == 1_000_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not one of replicas=, kv=, policy=, prefill=, decode=, speed="),
        ("replicas", "'replicas' is not one of replicas="),
        ("gpus=3", "'gpus=3' is not one of"),
        ("replicas=6,", "'' is not one of"),
        ("replicas=6,replicas=7", "replicas= is there twice"),
        ("policy=fastest", "policy='fastest' is not one of cost, round_robin"),
        ("replicas=0", "replicas='0' is not a whole number from 1 to 10000, such as 12"),
        ("replicas=1.5", "is not a whole number"),
        ("replicas=1M", "is not a whole number from 1 to 10000"),
        ("kv=-1", "is not a whole number"),
        ("kv=2T", "is not a whole number"),
        ("prefill=1e-300", "is not a number from 0.001"),
        ("speed=nan", "speed='nan' is not a number from 0.001 to 1e+15"),
        ("speed=inf", "is not a number from 0.001 to 1e+15"),
        ("decode=", "is not a number from 0.001 to 1e+15"),
    ],
)
def test_anything_else_is_refused_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        variant(text, POLICIES)
    assert str(refused.value).startswith("--what-if: ")
    assert message in str(refused.value)


@given(st.text(max_size=30))
def test_any_text_is_taken_or_refused(text: str) -> None:
    with contextlib.suppress(argparse.ArgumentTypeError):
        found = variant(f"replicas=3,kv={text}", POLICIES)
        assert found.replicas == 3
        assert found.kv_tokens


def test_the_sentence_is_one_that_a_person_would_say() -> None:
    then = dataclasses.replace(NOW, ttft_p90_s=1.9, ttft_mean_s=0.05, hit_ratio=0.61)
    assert sentence(variant("replicas=6", POLICIES), then, NOW, None, None) == (
        "with 6 replicas p90 TTFT would be 1.90 s (now 0.80 s), the mean 50 ms (now 0.40 s), hits 61.0% (now 72.0%)."
    )
    costs = RunCost(3.0, 4.5, 0.5), RunCost(3.0, 1.0, 0.5)
    text = sentence(variant("replicas=1,kv=2M,speed=2", POLICIES), then, NOW, (1.5, 12.0), costs)
    assert text.startswith(
        "with 1 replica, 2,000,000 KV tokens each and 2 times the load p90 TTFT would be 1.90 s (1.50 s to 12 s, now"
    )
    assert text.endswith(", and an hour would cost 15.00 USD (now 8.00 USD).")

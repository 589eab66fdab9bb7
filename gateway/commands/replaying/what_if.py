"""`--what-if replicas=12,kv=2M`: the same load on another fleet, as a row and as a sentence."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.commands.replaying.money import RunCost
from router.simulation.fleet import Result

MAX_REPLICAS: Final = 10_000
MOST: Final = 1e15
LEAST: Final = 1e-3
SUFFIXES: Final = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}
KEYS: Final = {
    "replicas": "replicas",
    "kv": "kv_tokens",
    "policy": "policy",
    "prefill": "prefill_rate",
    "decode": "decode_rate",
    "speed": "speed",
    "prefillers": "prefillers",
}
WHOLE: Final = ("replicas", "kv_tokens", "prefillers")


@dataclass(frozen=True, slots=True)
class Variant:
    """text: the user's. None: as in the base."""

    text: str
    policy: str | None = None
    replicas: int | None = None
    kv_tokens: int | None = None
    prefill_rate: float | None = None
    decode_rate: float | None = None
    speed: float | None = None
    prefillers: int | None = None

    @property
    def words(self) -> str:
        """The variant as a part of a sentence."""
        parts = [
            self.replicas and f"{self.replicas} replica{'s' if self.replicas > 1 else ''}",
            self.prefillers and f"{self.prefillers} replica{'s' if self.prefillers > 1 else ''} for prompts only",
            self.kv_tokens and f"{self.kv_tokens:,} KV tokens each",
            self.policy and f"policy {self.policy}",
            self.prefill_rate and f"{self.prefill_rate:,g} tokens/s of prefill",
            self.decode_rate and f"{self.decode_rate:,g} tokens/s of decode",
            self.speed and f"{self.speed:g} times the load",
        ]
        *most, last = [part for part in parts if part]
        return f"{', '.join(most)} and {last}" if most else last


def variant(text: str, policies: Sequence[str]) -> Variant:
    """Parses a value of --what-if. Raises ArgumentTypeError."""
    changes: dict[str, str | int | float] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        name = KEYS.get(key)
        if name is None or not equals:
            raise argparse.ArgumentTypeError(f"--what-if: {part[:60]!r} is not one of {', '.join(f'{key}=' for key in KEYS)}")
        if name in changes:
            raise argparse.ArgumentTypeError(f"--what-if: {key}= is there twice in {text[:100]!r}")
        if name == "policy":
            if value not in policies:
                raise argparse.ArgumentTypeError(f"--what-if: policy={value[:60]!r} is not one of {', '.join(policies)}")
            changes[name] = value
        else:
            changes[name] = _number(key, value, whole=name in WHOLE)
    return Variant(text, **changes)  # type: ignore[arg-type]


def _number(key: str, text: str, *, whole: bool) -> int | float:
    factor = SUFFIXES.get(text[-1:], 1.0)
    try:
        number = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        number = math.nan
    kind = "whole number" if whole else "number"
    most = MAX_REPLICAS if key in ("replicas", "prefillers") else MOST
    least = 1 if whole else LEAST
    if not least <= number <= most or (whole and number != int(number)):
        example = "such as 12, 250k or 2M"
        wanted = f"a {kind} from {least:g} to {most:g}, {example}"
        raise argparse.ArgumentTypeError(f"--what-if: {key}={text[:60]!r} is not {wanted}")
    return int(number) if whole else number


def sentence(
    variant: Variant, then: Result, now: Result, spread: tuple[float, float] | None, money: tuple[RunCost, RunCost] | None
) -> str:
    """The result as a sentence. spread: the least and the largest p90 of several replays. money: then and now."""
    between = f"{_seconds(spread[0])} to {_seconds(spread[1])}, " if spread else ""
    text = (
        f"with {variant.words} p90 TTFT would be {_seconds(then.ttft_p90_s)} ({between}now {_seconds(now.ttft_p90_s)}),"
        f" the mean {_seconds(then.ttft_mean_s)} (now {_seconds(now.ttft_mean_s)}),"
        f" hits {then.hit_ratio:.1%} (now {now.hit_ratio:.1%})"
    )
    if money:
        text += f", and an hour would cost {money[0].hourly_usd:,.2f} USD (now {money[1].hourly_usd:,.2f} USD)"
    return text + "."


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 0.1 else f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.0f} s"

"""The cost of a simulated run: tokens by prices per million, replicas by the hour."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from router.simulation.fleet import FleetSpec, ServedRequest


@dataclass(frozen=True, slots=True)
class SimulationPrices:
    """USD: of a million tokens, and of a replica for an hour."""

    input: float = 0.0
    cached: float = 0.0
    output: float = 0.0
    replica_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class RunCost:
    """USD of the whole run. hours: its duration."""

    tokens_usd: float
    replicas_usd: float
    hours: float

    @property
    def hourly_usd(self) -> float:
        return (self.tokens_usd + self.replicas_usd) / self.hours if self.hours else 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    per = "USD per million tokens"
    parser.add_argument("--price-input", type=float, metavar="USD", help=f"price of uncached prompt tokens: {per} (default: 0)")
    parser.add_argument(
        "--price-cached", type=float, metavar="USD", help=f"of cached ones: {per} (default: a tenth of the former)"
    )
    parser.add_argument("--price-output", type=float, metavar="USD", help=f"of generated tokens: {per} (default: 0)")
    parser.add_argument("--gpu-hour", type=float, metavar="USD", help="price of a replica for an hour (default: 0)")


def prices_of(options: argparse.Namespace) -> SimulationPrices | None:
    """The prices in the options; None: there are none."""
    given = options.price_input, options.price_cached, options.price_output, options.gpu_hour
    if all(price is None for price in given):
        return None
    full, cached, output, hour = given
    return SimulationPrices(full or 0.0, (full or 0.0) / 10 if cached is None else cached, output or 0.0, hour or 0.0)


def cost_of(prices: SimulationPrices, spec: FleetSpec, served: Sequence[ServedRequest]) -> RunCost:
    cached, tokens = sum(one.cached_tokens for one in served), sum(one.request.tokens for one in served)
    output = sum(one.request.output_tokens for one in served)
    usd = ((tokens - cached) * prices.input + cached * prices.cached + output * prices.output) / 1e6
    hours = (max(one.finished for one in served) - min(one.arrived for one in served)) / 3600
    return RunCost(usd, prices.replica_hour * spec.replicas * hours, hours)

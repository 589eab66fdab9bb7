"""What a gateway sends by itself, as rows: frozen, small, and right whatever it sends. Pure; `state.py` keeps them.

Every text in them may be shown as it is (`values.text`), every number is finite or None, every list has a bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from gateway.commands.top.values import Json, amount, number, objects, share, text
from gateway.errors import CLIENT_LEFT

MOST_REPLICAS: Final = 256
MOST_POOLS: Final = 256
MOST_MODELS: Final = 8
MESSAGE_CHARS: Final = 300


@dataclass(frozen=True, slots=True)
class Replica:
    """state: up, down, draining, leaving, or the circuit's. waiting: in the engine's queue, if it says so. cached: share of its
    prompt tokens.
    """

    name: str
    pool: str
    url: str
    state: str
    error: str
    draining: bool
    leaving: bool
    up: bool
    circuit: str
    engine: str
    source: str
    models: tuple[str, ...]
    further_models: float
    inflight: float
    decoding: float
    waiting: float | None
    booked_tokens: float
    tokens_per_second: float | None
    held_tokens: float
    capacity_tokens: float | None
    prompt_tokens: float
    cached: float | None

    @property
    def filled(self) -> float | None:
        """Share of what it can hold."""
        return share(self.held_tokens, self.capacity_tokens or 0.0)

    @property
    def key(self) -> str:
        """Of its row: one that leaves may have the name of another one."""
        return f"{self.pool}\n{self.name}\n{self.url}"

    @classmethod
    def of(cls, row: Json) -> Replica:
        models = row.get("models")
        up, draining, leaving = row.get("up") is True, row.get("draining") is True, row.get("leaving") is True
        circuit = text(row.get("circuit"), 20)
        prompt = amount(row.get("prompt_tokens"))
        return cls(
            name=text(row.get("name")),
            pool=text(row.get("pool")),
            url=text(row.get("url"), MESSAGE_CHARS),
            state=_state(circuit, up=up, draining=draining, leaving=leaving),
            error=text(row.get("error"), MESSAGE_CHARS),
            draining=draining,
            leaving=leaving,
            up=up,
            circuit=circuit,
            engine=text(row.get("engine")),
            source=text(row.get("source")),
            models=tuple([text(each) for each in models[:MOST_MODELS]]) if isinstance(models, list) else (),
            further_models=amount(row.get("further_models")),
            inflight=amount(row.get("inflight")),
            decoding=amount(row.get("decoding")),
            waiting=number(row.get("engine_waiting")),
            booked_tokens=amount(row.get("booked_tokens")),
            tokens_per_second=number(row.get("prefill_tokens_per_second")),
            held_tokens=amount(row.get("held_tokens")),
            capacity_tokens=number(row.get("capacity_tokens")) or number(row.get("learned_capacity_tokens")),
            prompt_tokens=prompt,
            cached=share(amount(row.get("cached_tokens")), prompt),
        )


def _state(circuit: str, *, up: bool, draining: bool, leaving: bool) -> str:
    if leaving:
        return "leaving"
    if not up:
        return "down"
    if draining:
        return "draining"
    return "up" if circuit in ("closed", "") else f"circuit {circuit.replace('_', ' ')}"


class Pool(NamedTuple):
    name: str
    waiting: float
    running: float
    limit: float | None

    @classmethod
    def of(cls, row: Json) -> Pool:
        return cls(text(row.get("name")), amount(row.get("waiting")), amount(row.get("running")), number(row.get("limit")))


@dataclass(frozen=True, slots=True)
class Request:
    """prompt, cached: as counted, or by the index while nothing was counted (then `guessed`)."""

    key: str
    id: str
    time: float | None
    ended: bool
    status: int | None
    code: str
    error: str
    endpoint: str
    model: str
    tenant: str
    api_key: str
    pool: str
    replica: str
    reason: str
    fallback: str
    head: str
    prompt: float | None
    cached: float | None
    guessed: bool
    estimated: str
    completion: float | None
    ttft_s: float | None
    seconds: float | None
    queued_s: float | None
    cost_usd: float | None
    saved_usd: float | None
    attempts: tuple[str, ...]
    resumed: float
    cancelled: bool

    @property
    def outcome(self) -> str:
        """running, left (its client has), or the status."""
        if not self.ended:
            return "running"
        return "left" if self.status == CLIENT_LEFT else str(self.status or "?")

    @property
    def failed(self) -> bool:
        """By the gateway or a replica, or in mid-stream; what is refused has another status."""
        return self.ended and ((self.status or 0) >= 500 or (bool(self.error) and (self.status or 0) < 400))

    @property
    def why(self) -> str:
        word = self.reason or self.code
        return f"{word}, retried" if self.attempts else word

    @classmethod
    def of(cls, row: Json) -> Request:
        prompt, cached = number(row.get("prompt_tokens")), number(row.get("cached_tokens"))
        foreseen = number(row.get("estimated_prompt_tokens")) or None  # 0 of a request that was not looked at
        guessed = prompt is None and foreseen is not None
        attempts = objects(row.get("failed_attempts"), 8)
        status = number(row.get("status"))
        return cls(
            key=text(row.get("key")),
            id=text(row.get("id")),
            time=number(row.get("time")),
            ended=row.get("state") == "ended",
            status=int(status) if status is not None and 0 < status < 1000 else None,
            code=text(row.get("code")),
            error=text(row.get("error"), MESSAGE_CHARS),
            endpoint=text(row.get("endpoint")),
            model=text(row.get("model")),
            tenant=text(row.get("tenant")),
            api_key=text(row.get("api_key")),
            pool=text(row.get("pool")),
            replica=text(row.get("replica")),
            reason=text(row.get("reason")),
            fallback=text(row.get("fallback")),
            head=text(row.get("head"), 16),
            prompt=foreseen if guessed else prompt,
            cached=number(row.get("predicted_cached_tokens")) if cached is None else cached,
            guessed=guessed,
            estimated=text(row.get("estimated")),
            completion=number(row.get("completion_tokens")),
            ttft_s=number(row.get("ttft_s")),
            seconds=number(row.get("seconds")),
            queued_s=number(row.get("queued_s")),
            cost_usd=number(row.get("cost_usd")),
            saved_usd=number(row.get("saved_usd")),
            attempts=tuple([_attempt(each) for each in attempts]),
            resumed=amount(row.get("resumed")),
            cancelled=row.get("cancelled") is True,
        )


def _attempt(row: Json) -> str:
    rest = [f"{text(name, 20)} {text(value, 60)}" for name, value in list(row.items())[:6] if name != "replica"]
    return ", ".join([text(row.get("replica"), 60), *rest])


class Point(NamedTuple):
    """A step of time: what ended in it, and how it was at its end."""

    time: float
    requests: float
    errors: float
    refused: float
    prompt_tokens: float
    cached_tokens: float
    completion_tokens: float
    cost_usd: float
    saved_usd: float
    waiting: float
    running: float
    ttft_p50_s: float | None
    ttft_p90_s: float | None

    @classmethod
    def of(cls, row: Json) -> Point:
        values: list[Any] = [amount(row.get(name)) for name in cls._fields[:-2]]
        return cls._make([*values, number(row.get("ttft_p50_s")), number(row.get("ttft_p90_s"))])

"""What a gateway answers when it is asked: a decision, a node of the prefix index, a key. As `rows.py` in all else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from gateway.commands.top.values import Json, amount, inside, number, objects, text

MOST_CANDIDATES: Final = 64
MOST_HOLDERS: Final = 32
MOST_CHILDREN: Final = 64
# The parts of a cost, in the order of docs/routing.md, with their names in tables.
PARTS: Final[Sequence[tuple[str, str]]] = (
    ("queue_s", "queue"),
    ("prefill_s", "prefill"),
    ("others_s", "others"),
    ("duplicate_s", "copy"),
    ("evicted_s", "evicted"),
    ("decode_s", "decode"),
    ("rent_s", "rent"),
    ("session_s", "session"),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """parts: seconds, in the order of PARTS."""

    replica: str
    total_s: float | None
    parts: tuple[float | None, ...]
    matched_tokens: float | None
    uncached_tokens: float | None
    inflight: float | None

    @classmethod
    def of(cls, row: Json) -> Candidate:
        cost = inside(row.get("cost"))
        return cls(
            text(row.get("replica")),
            number(cost.get("total_s")),
            tuple([number(cost.get(name)) for name, _ in PARTS]),
            number(row.get("matched_tokens")),
            number(row.get("uncached_tokens")),
            number(row.get("inflight")),
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """Why a request went where it went. candidates: the best first."""

    policy: str
    replica: str
    reason: str
    prompt_tokens: float | None
    available_tokens: float | None
    candidates: tuple[Candidate, ...]
    further: float

    @classmethod
    def of(cls, row: Json) -> Decision:
        return cls(
            text(row.get("policy")),
            text(row.get("replica")),
            text(row.get("reason")),
            number(row.get("prompt_tokens")),
            number(row.get("available_tokens")),
            tuple([Candidate.of(each) for each in objects(row.get("candidates"), MOST_CANDIDATES)]),
            amount(row.get("further")),
        )


class Holder(NamedTuple):
    replica: str
    blocks: float
    pending: float
    idle_s: float | None

    @classmethod
    def of(cls, row: Json) -> Holder:
        return cls(text(row.get("replica")), amount(row.get("blocks")), amount(row.get("pending")), number(row.get("idle_s")))


@dataclass(frozen=True, slots=True)
class Node:
    """Of the prefix index. way: its name; what would not be a way is none. children: how many it has; shown: some of them."""

    way: str
    blocks: float
    tokens: float
    depth_tokens: float
    holders: tuple[Holder, ...]
    further_holders: float
    idle_s: float | None
    children: float
    shown: tuple[Node, ...]

    @classmethod
    def of(cls, row: Json, levels: int = 1) -> Node:
        """levels: of nodes below it that are read."""
        way = text(row.get("way"), 10_000)
        below = objects(row.get("shown"), MOST_CHILDREN) if levels else []
        return cls(
            way=way if all(char in "0123456789abcdef." for char in way) else "",
            blocks=amount(row.get("blocks")),
            tokens=amount(row.get("tokens")),
            depth_tokens=amount(row.get("depth_tokens")),
            holders=tuple([Holder.of(each) for each in objects(row.get("holders"), MOST_HOLDERS)]),
            further_holders=amount(row.get("further_holders")),
            idle_s=number(row.get("idle_s")),
            children=amount(row.get("children")),
            shown=tuple([cls.of(each, levels - 1) for each in below]),
        )


@dataclass(frozen=True, slots=True)
class Key:
    """Of a client. state: valid, rotating, expired, revoked."""

    id: str
    tenant: str
    name: str
    state: str
    models: str
    pools: str
    requests_per_minute: float | None
    tokens_per_minute: float | None
    usd_day: float | None
    usd_month: float | None
    budget_day: float | None
    budget_month: float | None
    priority: float
    expires_at: str
    revoked: bool

    @classmethod
    def of(cls, row: Json, now: str) -> Key:
        """now: as the gateway writes times."""
        used = inside(row.get("used"))
        revoked, expires, rotated = (
            text(row.get("revoked_at"), 40),
            text(row.get("expires_at"), 40),
            text(row.get("rotated_until"), 40),
        )
        if revoked:
            state = "revoked"
        elif expires and expires <= now:
            state = "expired"
        else:
            state = "rotating" if rotated > now else "valid"
        return cls(
            id=text(row.get("id"), 20),
            tenant=text(row.get("tenant")),
            name=text(row.get("name")),
            state=state,
            models=_names(row.get("models")),
            pools=_names(row.get("pools")),
            requests_per_minute=number(row.get("requests_per_minute")),
            tokens_per_minute=number(row.get("uncached_tokens_per_minute")),
            usd_day=number(used.get("usd_day")),
            usd_month=number(used.get("usd_month")),
            budget_day=number(row.get("budget_usd_day")),
            budget_month=number(row.get("budget_usd_month")),
            priority=amount(row.get("priority")),
            expires_at=expires,
            revoked=bool(revoked),
        )


def _names(value: object) -> str:
    names = [text(each) for each in value[:64]] if isinstance(value, list) else []
    return text(", ".join(filter(None, names))) or "all"

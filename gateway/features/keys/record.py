"""A key: stored form, operator input and JSON output. Not compiled, because mypyc drops the types of msgspec Structs.

Every text is bounded in length and limited to characters that are safe in logs, metric labels and terminals.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from msgspec import Meta, Struct, field, json
from msgspec.structs import asdict, replace

from gateway.accounting.money import DOLLAR
from gateway.config.addresses import shown
from gateway.config.hints import EXPECTED, READ
from gateway.config.kinds import Dollars, Positive, unix_time
from gateway.config.parse import ConfigError, Problem, convert
from gateway.features.keys.grant import Grant
from gateway.features.keys.limits.account import Day, KeyLimits
from gateway.features.keys.limits.calendar import day_of_text
from gateway.features.keys.ring import MAX_KEYS
from gateway.features.keys.secret import DIGEST, ID
from gateway.features.keys.section import MAX_GRANTED, Granted, GrantedPool, OidcConfig
from gateway.request.record import NO_TENANT
from gateway.server.actions import OperatorAction

MAX_CREDITS: Final = 62  # days
MAX_GRACE_S: Final = 30 * 86_400.0  # longest validity of an old secret after a rotation
_NAME: Final = re.compile(r"[!#-&(-~]([ !#-&(-~]{0,62}[!#-&(-~])?")  # printable ASCII except quotes
_TIME: Final = "a date, a date with time such as 2026-10-07T16:00:00Z,"


class KeyNotFoundError(Exception):
    """No key has this id."""


def no_key(id_: str) -> KeyNotFoundError:
    """The error for an unknown id. The text is repeated only if it has the form of an id: it may be a whole key."""
    if ID.fullmatch(id_):
        return KeyNotFoundError(f"There is no key {id_!r}.")
    return KeyNotFoundError("This is not a key id. Give the id, the 8 characters after `wr-`, not the key.")


class KeyRefusedError(Exception):
    """The key does not permit this change. The message says why."""


def is_tenant(text: str) -> bool:
    """True if the text is a valid tenant name."""
    return _NAME.fullmatch(text) is not None and text != NO_TENANT


def _tenant(text: str) -> str:
    """Raises ValueError."""
    if not is_tenant(text):
        raise ValueError(
            f"1 to 64 printable ASCII characters without quotes, not {NO_TENANT!r}, are expected, got {shown(text)}"
        )
    return text


def _label(text: str) -> str:
    """Raises ValueError."""
    if text and not _NAME.fullmatch(text):
        raise ValueError(f"at most 64 printable ASCII characters without quotes are expected, got {shown(text)}")
    return text


def _time(text: str) -> str:
    """Raises ValueError."""
    try:
        unix_time(text)
    except (ValueError, OverflowError):
        raise ValueError(f"{_TIME} is expected, got {shown(text)}") from None
    return text


def _id(text: str) -> str:
    """Raises ValueError."""
    if not ID.fullmatch(text):
        raise ValueError(f"8 of a-z and 0-9 are expected, got {shown(text)}")
    return text


def _digest(text: str) -> str:
    """Raises ValueError, without the text: it may be the key itself."""
    if not DIGEST.fullmatch(text):
        raise ValueError("the SHA-256 of the key, 64 of 0-9 and a-f, is expected, not the key itself")
    return text


Time = Annotated[str, Meta(max_length=40, extra={READ: _time, EXPECTED: _TIME})]


class KeySettings(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The properties of a key that an operator sets. Omitted limits and lists mean "unlimited" and "all". Empty lists and empty
    times are rejected, because they are probably mistakes.
    """

    tenant: Annotated[str, Meta(extra={READ: _tenant})]
    name: Annotated[str, Meta(extra={READ: _label})] = ""
    models: Annotated[tuple[Granted, ...], Meta(min_length=1, max_length=MAX_GRANTED)] = ()
    pools: Annotated[tuple[GrantedPool, ...], Meta(min_length=1, max_length=MAX_GRANTED)] = ()
    budget_usd_day: Dollars | None = None
    budget_usd_month: Dollars | None = None
    requests_per_minute: Positive | None = None
    uncached_tokens_per_minute: Positive | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    expires_at: Time = ""


class Credit(Struct, frozen=True, forbid_unknown_fields=True):
    """An operator's wish to raise the budget of a key for today."""

    usd: Dollars


class FileKey(KeySettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One entry of the keys file."""

    id: Annotated[str, Meta(extra={READ: _id})]
    sha256: Annotated[str, Meta(extra={READ: _digest})]


class KeysFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys file."""

    keys: Annotated[tuple[FileKey, ...], Meta(max_length=MAX_KEYS)] = ()


class Key(Struct, frozen=True):
    """A stored key. digests: pairs of a SHA-256 digest and the Unix time at which it stops being valid (0: never). Other times
    are Unix seconds, 0: never. credits: days (YYYY-MM-DD) and the picodollars by which their budgets were raised.
    """

    id: str
    settings: KeySettings
    digests: tuple[tuple[bytes, float], ...] = ()
    created_at: float = 0.0
    revoked_at: float = 0.0
    revision: int = field(default=0)
    credits: tuple[tuple[str, int], ...] = ()

    @property
    def expires_at(self) -> float:
        """Unix seconds; 0 means never, so an expiry at 1970-01-01 becomes 1."""
        return max(1.0, unix_time(self.settings.expires_at)) if self.settings.expires_at else 0.0

    def grant(self) -> Grant:
        settings = self.settings
        made = Grant(
            self.id,
            settings.tenant,
            settings.models,
            settings.pools,
            priority=settings.priority,
            expires_at=self.expires_at,
            limits=limits_of(settings, [(day_of_text(day), amount) for day, amount in self.credits]),
        )
        made.revoked = self.revoked_at > 0
        return made

    def shown(self) -> dict[str, Any]:
        """The key as JSON for operators, without digests."""
        return {
            "id": self.id,
            **asdict(self.settings),
            "created_at": stamp(self.created_at),
            "revoked_at": stamp(self.revoked_at),
            "rotated_until": stamp(max((until for _, until in self.digests), default=0.0)),
            "credits_usd": {day: amount / DOLLAR for day, amount in self.credits},
        }


def limits_of(settings: KeySettings | OidcConfig, raised: Sequence[tuple[Day, int]] = ()) -> KeyLimits | None:
    """The limits in the settings of a key, or of an issuer for each of its tenants. None: unlimited."""
    made = KeyLimits(
        requests=settings.requests_per_minute or 0,
        tokens=settings.uncached_tokens_per_minute or 0,
        day=_pico(settings.budget_usd_day),
        month=_pico(settings.budget_usd_month),
        credited=raised,
    )
    return made if made.any else None


def credited(key: Key, day: str, usd: float) -> Key:
    """The key with a larger budget of a day. Raises KeyRefusedError."""
    if key.settings.budget_usd_day is None and key.settings.budget_usd_month is None:
        raise KeyRefusedError(f"The key {key.id} has no budget.")
    raised = dict(key.credits)
    raised[day] = raised.get(day, 0) + _pico(usd)
    return replace(key, credits=tuple(sorted(raised.items())[-MAX_CREDITS:]))


def changed(key: Key, changes: Mapping[str, Any]) -> Key:
    """The key with other settings. changes: by the names of KeySettings; None removes a limit, a list, a name or the expiry.
    Raises KeyRefusedError for a revoked key, ConfigError for settings that are wrong.
    """
    if key.revoked_at:
        raise KeyRefusedError(f"The key {key.id} was revoked: make a new one.")
    if not changes:
        raise ConfigError("at least one setting is expected")
    tenant = key.settings.tenant
    if changes.get("tenant", tenant) != tenant:
        raise ConfigError(Problem(("tenant",), "the tenant of a key is fixed: make a key for the other tenant"))
    raw = {**json.decode(json.encode(key.settings)), **changes}
    return replace(key, settings=convert(KeySettings, {name: value for name, value in raw.items() if value is not None}))


def _pico(amount: float | None) -> int:
    return max(1, round(amount * DOLLAR)) if amount else 0


def shown_action(action: OperatorAction) -> dict[str, Any]:
    """The action of an operator as JSON."""
    details = json.decode(action.details) if action.details.endswith("}") else action.details  # a long one was cut
    return {"at": stamp(action.at), "time": action.at, **action.shown(), "details": details or None}


def stamp(seconds: float) -> str | None:
    """The time in ISO 8601 (UTC), or None for 0 (never)."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z") if seconds else None

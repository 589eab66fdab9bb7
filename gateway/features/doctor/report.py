"""The results of an examination as plain values, equal for a file and for a running gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from gateway.features.doctor.causes import DELIVERY_CAUSES, REMEDIES
from gateway.features.doctor.examination import Examination, Finding

MAX_SHOWN: Final = 200  # characters of a name or an excerpt
_NO_SESSIONS: Final = (
    "{} requests have block ids and no session: their reusable tokens are counted, but broken prefixes cannot be found."
)
_KEYS_ONLY: Final = (
    "{} requests have block ids and no text: causes are derived from positions and lengths of differences, not from texts."
)


def report(examination: Examination, notes: Sequence[str] = ()) -> dict[str, Any]:
    """notes: additional remarks for the reader."""
    found, remarks = examination, list(notes)
    if found.by_keys_alone:
        remarks.append(_NO_SESSIONS.format(found.by_keys_alone))
    if found.by_keys > found.by_keys_alone:
        remarks.append(_KEYS_ONLY.format(found.by_keys - found.by_keys_alone))
    causes = sorted(found.sums, key=lambda cause: -found.sums[cause].tokens)
    return {
        "requests": found.requests,
        "sessions": found.sessions,
        "seconds": round(max(0.0, found.last_time - found.first_time), 3),
        "prompt_tokens": found.tokens,
        "reusable_tokens": found.reusable,
        "lost_tokens": found.lost,
        "lost_usd": _rounded(found.lost_usd),
        "reported_prompt_tokens": found.reported,
        "cached_tokens": found.cached,
        "causes": [_cause(examination, cause) for cause in causes],
        "findings": [_finding(each) for each in found.findings],
        "notes": remarks,
    }


def encoded(about: Mapping[str, Any], examination: Examination) -> bytes:
    """The report for an operator, which begins with `about`."""
    return orjson.dumps({**about, **report(examination)}, option=orjson.OPT_INDENT_2)


def _cause(examination: Examination, cause: str) -> dict[str, Any]:
    found = examination.sums[cause]
    return {
        "cause": cause,
        "delivery": cause in DELIVERY_CAUSES,
        "requests": found.count,
        "lost_tokens": found.tokens,
        "lost_usd": _rounded(found.usd) if examination.priced else None,
        "first": _finding(found.first),
        "remedy": REMEDIES[cause],
    }


def _finding(found: Finding) -> dict[str, Any]:
    return {
        "cause": found.cause,
        "request": found.number,
        "place": found.place[:MAX_SHOWN],
        "session": found.session[:MAX_SHOWN],
        "model": found.model[:MAX_SHOWN],
        "after_request": found.before,
        "after_place": found.before_place[:MAX_SHOWN],
        "where": found.where[:MAX_SHOWN],
        "offset": None if found.at < 0 else found.at,
        "entry": None if found.entry < 0 else found.entry,
        "before": found.old[:MAX_SHOWN],
        "now": found.new[:MAX_SHOWN],
        "text": found.shown,
        "lost_tokens": found.tokens,
        "lost_usd": _rounded(found.usd),
    }


def _rounded(usd: float | None) -> float | None:
    return None if usd is None else round(usd, 9)

"""Prints the report on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypedDict

import msgspec

from gateway.commands.streams import escaped
from gateway.commands.tables import number, print_table, text

_CLEAN: Final = "No prefix is broken."


class FirstExample(TypedDict):
    """The first finding of a cause in a report. Members that are not printed are left out here and below."""

    cause: str
    request: int
    place: str
    session: str
    after_request: int
    after_place: str
    where: str
    offset: int | None
    before: str
    now: str
    text: bool
    lost_tokens: int


class Cause(TypedDict):
    cause: str
    requests: int
    lost_tokens: int
    lost_usd: float | None
    first: FirstExample
    remedy: str


class Report(TypedDict):
    """A report of `gateway.features.doctor.report`."""

    requests: int
    sessions: int
    seconds: float
    prompt_tokens: int
    reusable_tokens: int
    lost_tokens: int
    lost_usd: float | None
    reported_prompt_tokens: int
    cached_tokens: int
    causes: list[Cause]
    notes: list[str]


def is_report(found: Any) -> bool:
    """True if an answer is a report."""
    try:
        msgspec.convert(found, Report)
    except msgspec.ValidationError:
        return False
    return True


def print_report(found: Report) -> None:
    for line in _summary(found):
        print(line)
    causes = found["causes"]
    if causes:
        print()
        _print_causes(found)
        print("\nFirst examples")
        for cause in causes:
            for line in _example(cause["first"]):
                print(escaped(line))
        print("\nWhat to change")
        for cause in causes:
            print(escaped(f"  {cause['cause']}: {cause['remedy']}"))
    else:
        print(_CLEAN)
    for note in found["notes"]:
        print(f"\nNote: {escaped(note)}")


def _summary(found: Report) -> Iterator[str]:
    seconds = f" in {found['seconds']:,.0f} s" if found["seconds"] else ""
    yield f"{found['requests']:,} requests{seconds}, {_sessions(found['sessions'])}, {found['prompt_tokens']:,} prompt tokens"
    lost, usd = found["lost_tokens"], found["lost_usd"]
    yield f"  reusable from earlier requests: {_share(found['reusable_tokens'], found['prompt_tokens'])}"
    if found["reported_prompt_tokens"]:
        yield f"  cached, as the engines report:  {_share(found['cached_tokens'], found['reported_prompt_tokens'])}"
    yield f"  lost:                           {_share(lost, found['prompt_tokens'])}" + (
        "" if usd is None else f", {_usd(usd)}"
    )


def _print_causes(found: Report) -> None:
    priced = found["lost_usd"] is not None
    columns = [text("cause"), number("requests"), number("tokens lost"), number("share"), *([number("USD")] if priced else [])]
    total = max(1, found["prompt_tokens"])
    rows = [
        [
            escaped(cause["cause"]),
            f"{cause['requests']:,}",
            f"{cause['lost_tokens']:,}",
            f"{cause['lost_tokens'] / total:.1%}",
            *([_usd(cause["lost_usd"] or 0.0).removesuffix(" USD")] if priced else []),
        ]
        for cause in found["causes"]
    ]
    print_table(columns, rows)


def _example(first: FirstExample) -> Iterator[str]:
    after = f"after request {first['after_request']}{_place(first['after_place'])}"
    named = f", session {first['session']}" if first["session"] else ""
    yield f"  {first['cause']}: request {first['request']}{_place(first['place'])}{named}, {after}"
    at = "" if first["offset"] is None else f", at {first['offset']:,}"
    yield f"    {first['where']}{at}; {first['lost_tokens']:,} tokens lost"
    mark = "…" if first["text"] else ""
    yield f"    before: {mark}{first['before']}{mark}" if first["before"] else "    before: (nothing)"
    yield f"    now:    {mark}{first['now']}{mark}" if first["now"] else "    now:    (nothing)"


def _sessions(count: int) -> str:
    return f"{count:,} session{'' if count == 1 else 's'}"


def _place(place: str) -> str:
    return f" ({place})" if place else ""


def _share(part: int, of: int) -> str:
    return f"{part:,} tokens ({part / of:.1%})" if of else f"{part:,} tokens"


def _usd(value: float) -> str:
    return f"{value:,.2f} USD" if value >= 1 or value == 0 else f"{value:.4g} USD"

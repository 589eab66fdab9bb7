"""`warmroute usage`: periods, forms of output, names that would be formulas or commands, errors and their exit status."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gateway.accounting.meter import Bill
from gateway.commands.cli import main
from gateway.features.ledger.command.output import escaped, micro_dollars, safe_cell
from gateway.features.ledger.command.period import PeriodError, parse_bound, period
from gateway.features.ledger.sums import MONEY, NAMES, Period, UsageSums
from tests.gateway.features.ledger.conftest import DAY_S, NOON, Entries, file_url, maker, record, stored

SINCE = ("--since", "2025-11-01")


@pytest.fixture
def ledger(tmp_path: Path) -> str:
    """The URL of one with three tenants, over two days."""
    url = file_url(tmp_path / "ledger.sqlite")

    async def write() -> None:
        entries, one = Entries(), maker()
        async with stored(url) as (store, _):
            for day in (0, 1):
                entries.clock.now = NOON + day * DAY_S
                records = [record(tenant="a", bill=Bill(10**12, 0, 1, 5)), record(tenant="b", bill=None, status=500)]
                await store.write(one.batch(entries.of(*records, record(tenant="=cmd|' /C calc'!A0")), NOON))

    asyncio.run(write())
    return url


def test_the_table_has_a_row_for_each_group_and_one_for_all(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--url", ledger, "--by", "tenant", *SINCE]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].split()[:3] == ["tenant", "requests", "failed"]
    assert lines[1].split() == ["a", "2", "0", "2,000", "1,600", "100", "200", "80.0%", "2.000000", "0.000000", "0.0%"]
    assert lines[-1].split()[:3] == ["total", "6", "2"]
    assert len(lines) == 5
    assert shown.err == "warmroute: note: 2 requests of models without a price are counted at no cost\n"


def test_csv_is_exact_and_holds_no_formula(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--url", ledger, "--by", "day,tenant", "--csv", *SINCE]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["day"], row["tenant"]) for row in rows[:3]] == [
        ("2025-11-27", "a"),
        ("2025-11-27", "'=cmd|' /C calc'!A0"),
        ("2025-11-27", "b"),
    ]
    assert (rows[0]["cost_usd"], rows[0]["saved_usd"]) == ("1.000000000001", "0.000000000005")
    assert rows[2]["unpriced"] == "1"


def test_json_has_the_groups_and_their_total(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--url", ledger, "--by", "model,endpoint", "--json", *SINCE, "--until", "2025-11-28"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["since"], found["until"]) == ("2025-11-01T00:00:00.000+00:00", "2025-11-28T00:00:00.000+00:00")
    (group,) = found["groups"]
    assert (group["model"], group["endpoint"], group["requests"]) == ("m", "/v1/chat/completions", 3)
    assert found["total"]["requests"] == 3
    assert found["incomplete_days"] == []


def test_the_ledger_of_a_configuration(
    ledger: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps({"pools": [{"replicas": ["http://a:1"]}], "ledger": {"url": ledger}}))
    assert main(["usage", "--config", str(file), "--json", *SINCE]) == 0
    by_flag = capsys.readouterr().out
    monkeypatch.setenv("WARMROUTE_CONFIG", str(file))
    assert main(["usage", "--json", *SINCE]) == 0
    assert capsys.readouterr().out == by_flag
    file.write_text(json.dumps({"pools": [{"replicas": ["http://a:1"]}]}))
    assert main(["usage", "--config", str(file)]) == 2
    assert "ledger.url is off: this gateway has no ledger" in capsys.readouterr().err


def test_a_day_whose_rows_are_gone_is_named(ledger: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as file, file:
        file.execute("delete from warmroute_usage")
    assert main(["usage", "--url", ledger, "--since", "2025-11-27T10:00", "--until", "2025-11-29"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1].split()[1] == "3"
    assert (
        "2025-11-27 is counted in part, and some rows of that part may be missing: 0 of its 3 requests have rows" in shown.err
    )


def test_no_time_is_too_late(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    for until in ("9999-12-31T23:59:59-14:00", "9999-12-31"):
        assert main(["usage", "--url", ledger, *SINCE, "--until", until, "--by", "day"]) == 0
        assert capsys.readouterr().out.splitlines()[-1].startswith("total")


def test_a_ledger_that_cannot_be_read_is_status_1_and_is_not_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["usage", "--url", file_url(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    (tmp_path / "bad").write_bytes(b"nothing of the kind" * 100)
    assert main(["usage", "--url", file_url(tmp_path / "bad")]) == 1
    assert "not a database" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give the ledger"),
        (("--url", "mysql://h/n"), "postgresql://USER@HOST/NAME"),
        (("--url", "postgresql://u:secret@h/n"), "a password does not belong in a URL"),
        (("--url", "sqlite", "--by", "tenant,weekday"), "'weekday'"),
        (("--url", "sqlite", "--by", ""), "one or more of day, tenant"),
        (("--url", "sqlite", "--since", "soon"), "a duration such as 7d"),
        (("--url", "sqlite", "--since", "-3d"), "expected"),
        (("--url", "sqlite", "--since", "1d", "--until", "2d"), "ends before it begins"),
        (("--url", "sqlite", "--since", "9999-01-01"), "ends before it begins"),
        (("--url", "sqlite", "--csv", "--json"), "not allowed with"),
        (("--url", "sqlite", "--config", "x"), "not allowed with"),
    ],
)
def test_unusable_arguments_are_status_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WARMROUTE_CONFIG", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["usage", *arguments])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "secret" not in shown


def test_periods() -> None:
    now = datetime(2026, 11, 27, 12, 30, tzinfo=UTC).timestamp()

    def found(since: str, until: str | None = None) -> Period:
        return period(parse_bound(since), None if until is None else parse_bound(until), now)

    tomorrow = int(datetime(2026, 11, 28, tzinfo=UTC).timestamp() * 1000)
    assert found("24h") == Period(int((now - 86_400) * 1000), tomorrow)
    assert found("2w", "90m") == Period(int((now - 14 * 86_400) * 1000), int((now - 5400) * 1000))
    assert found("2026-11-01", "2026-11-27T12:00+02:00") == Period(
        int(datetime(2026, 11, 1, tzinfo=UTC).timestamp() * 1000),
        int(datetime(2026, 11, 27, 10, tzinfo=UTC).timestamp() * 1000),
    )
    assert found("999999999w") == Period(0, tomorrow)
    assert found("0001-01-01") == Period(0, tomorrow)
    for text in ("", "d", "7", "7 d", "1.5d", "٣d", "9999999999d", "7D", "2026-13-01", "2026-11-01T25:00"):
        with pytest.raises(PeriodError):
            parse_bound(text)
    assert parse_bound("3d") == timedelta(days=3).total_seconds()


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\uff1d1+1", " =1", "\t=1"])
def test_a_cell_is_no_formula(text: str) -> None:
    assert not safe_cell(text).lstrip().startswith(("=", "+", "-", "@", "\uff1d"))


def test_control_characters_are_escaped() -> None:
    assert escaped("a\x1b[31m\r\n\ud800é\u202e") == r"a\x1b[31m\r\n\ud800é\u202e"


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0.000000"),
        (1, "0.000000"),
        (-1, "0.000000"),
        (500_000, "0.000001"),
        (-(10**12), "-1.000000"),
        (10**30, f"{10**18:,}.000000"),
    ],
)
def test_money_is_rounded_to_millionths(amount: int, text: str) -> None:
    assert micro_dollars(amount) == text


def test_what_is_saved_is_no_cost() -> None:
    assert UsageSums((), tuple(1 for _ in NAMES)).cost == len(MONEY) - 1
